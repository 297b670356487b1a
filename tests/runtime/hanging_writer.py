"""A checkpoint's writer that hangs, as long as its trainer lives, where it is to write the part of
a replica's second rank to the disk of its node.

Named to the rank through DRYDOCK_CHECKPOINT_WRITER.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from runtime.checkpoint import writer
from runtime.torture.injector import around

TRAINER = os.getppid()


def save(inner: Callable[..., None], one: writer.Writer, asked: dict[str, Any]) -> None:
    while str(asked.get("within")).endswith("rank-1") and os.getppid() == TRAINER:
        time.sleep(0.05)
    inner(one, asked)


if __name__ == "__main__":
    around(writer.Writer, "_save", save)
    writer.main()
