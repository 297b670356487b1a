"""A checkpoint's writer whose shared folder takes longer than a job has that is to be killed.

Named to the rank through DRYDOCK_CHECKPOINT_WRITER.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.checkpoint import disk, writer
from runtime.torture.injector import around

SLOW_S = 6.0


def write(inner: Callable[..., None], name: str, data: memoryview, into: int, *more: Any) -> None:
    if "state" in Path(f"/proc/self/fd/{into}").readlink().parts:
        time.sleep(SLOW_S)
    inner(name, data, into, *more)


if __name__ == "__main__":
    around(disk, "write", write)
    writer.main()
