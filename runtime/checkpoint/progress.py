"""A bar on a terminal, and nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

WIDTH = 30
REDRAW_S = 0.1
WATCH_S = 0.2  # between two looks at what others write


class Bar:
    """How much of so many bytes is done."""

    def __init__(
        self, what: str, total: int, out: TextIO | None = None, *, shown: bool = True
    ) -> None:
        """`shown`: on a terminal, which sees nothing otherwise."""
        self._what = what
        self._total = max(total, 1)
        self._out = out or sys.stderr
        self._shown = shown and self._out.isatty()
        self._done = 0
        self._began = time.monotonic()
        self._drawn = 0.0
        self._drawing = threading.Lock()

    def __call__(self, count: int) -> None:
        """So many more; on any thread."""
        with self._drawing:
            self._done += count
            now = time.monotonic()
            if self._shown and now - self._drawn >= REDRAW_S:
                self._drawn = now
                self._out.write(f"\r\033[K{self.text(now - self._began)}")
                self._out.flush()

    def close(self) -> None:
        """What comes next takes its line."""
        if self._shown:
            self._out.write("\r\033[K")
            self._out.flush()

    def text(self, seconds: float) -> str:
        """As it is drawn after so many seconds."""
        share = min(1.0, self._done / self._total)
        filled = int(share * WIDTH)
        bar = "#" * filled + "." * (WIDTH - filled)
        rate = self._done / max(seconds, 1e-9) / 1e6
        return f"{self._what} [{bar}] {share:4.0%}  {rate:,.0f} MB/s"


@contextlib.contextmanager
def watched(count: Callable[[], int], progress: Callable[[int], object]) -> Iterator[None]:
    """Tell of the bytes that come, while others read or write them that say nothing themselves.
    `count`: how many there are by now."""
    over = threading.Event()
    seen = count()

    def look() -> None:
        nonlocal seen
        new = count() - seen
        seen += new
        progress(new)

    def look_on() -> None:
        while not over.wait(WATCH_S):
            look()

    looking = threading.Thread(target=look_on, name="drydock-progress", daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
    look()


def bytes_in(path: Path) -> int:
    """As far as can be seen: what is written may get another name meanwhile."""
    size = 0
    for one in [path, *path.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            size += one.stat().st_size if one.is_file() else 0
    return size


def bytes_read() -> int:
    """That this process has read; 0 where the kernel does not tell it."""
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:
        return 0
