"""What can be seen of another process while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def is_gone(pid: int | str) -> bool:
    return not Path(f"/proc/{pid}").exists()


def open_files(pid: int | str) -> Iterator[tuple[Path, str]]:
    """Each descriptor's path in /proc and what it is open on; some may be closed meanwhile."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield descriptor, str(descriptor.readlink())
