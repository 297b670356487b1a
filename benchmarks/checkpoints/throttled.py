"""In the place of a checkpoint's writer: the same, whose disk takes only so many bytes a second, as
a network or a store does that many share. Imports no torch.
"""

from __future__ import annotations

import os
import threading
import time

from runtime.checkpoint import disk, writer

ENV_MB_S = "DRYDOCK_BENCHMARK_MB_S"


class Throttle:
    """All requests together, in the order in which they come."""

    def __init__(self, speed: float) -> None:
        """`speed`: bytes a second."""
        self._speed = speed
        self._free = 0.0  # when the last byte that was asked for is through
        self._asking = threading.Lock()

    def wait(self, size: int) -> None:
        with self._asking:
            self._free = max(self._free, time.monotonic()) + size / self._speed
            left_s = self._free - time.monotonic()
        time.sleep(max(0.0, left_s))


def main() -> None:
    throttle = Throttle(float(os.environ[ENV_MB_S]) * 1e6)
    inner = disk._put

    def put(file: int, data: memoryview, offset: int) -> None:
        inner(file, data, offset)
        throttle.wait(len(data))

    disk._put = put
    writer.main()


if __name__ == "__main__":
    main()
