"""How quick a tier is, while it is written to."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class Meter:
    """Of one save: how many bytes were written, and the time in which any request was under way;
    waiting for the bytes to be there is no time of the tier's."""

    def __init__(self) -> None:
        self.bytes = 0
        self.seconds = 0.0
        self._changing = threading.Lock()
        self._under_way = 0
        self._since = 0.0

    @property
    def speed(self) -> float:
        """Bytes a second; 0 if nothing was written."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @contextlib.contextmanager
    def request(self, size: int = 0) -> Iterator[None]:
        """One that takes so many bytes, on any thread."""
        with self._changing:
            if not self._under_way:
                self._since = time.monotonic()
            self._under_way += 1
        try:
            yield
        finally:
            with self._changing:
                self.bytes += size
                self._under_way -= 1
                if not self._under_way:
                    self.seconds += time.monotonic() - self._since
