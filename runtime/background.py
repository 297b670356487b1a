"""Work on a thread beside the training. Standard library only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("drydock.background")


def in_background(name: str, work: Callable[[bool], object], *, awaited: bool = False) -> None:
    """Do this on a thread of its own, which may give way to the others: `work` is told so. Where no
    thread can be had it is done here: that takes the training some time, and is better than to
    leave what was begun, or to die of it. `awaited`: the process does not end before it is done."""
    try:
        threading.Thread(target=work, args=(True,), name=name, daemon=not awaited).start()
    except RuntimeError as error:  # so many threads as the process may have are there
        log.warning("no_thread name=%s error=%s", name, error)
        work(False)
