"""The same work on many items, by several threads. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")


def run_in_threads(
    work: Callable[[_T], object], items: Iterable[_T], threads: int, name: str
) -> None:
    """`work` on each item, in their order, by so many threads of that name, until all is done.

    After one that fails no other is begun; what it raised is raised once those under way are done.
    """
    left = iter(items)
    taking = threading.Lock()
    failed: list[BaseException] = []

    def take() -> _T | None:
        with taking:
            return None if failed else next(left, None)

    def run() -> None:
        try:
            while (item := take()) is not None:
                work(item)
        except BaseException as error:
            failed.append(error)

    # No pool of concurrent.futures: the end of the process waits for its threads.
    started: list[threading.Thread] = []
    try:
        for _ in range(threads):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException as error:  # what they use is not to be closed before they are done
        failed.append(error)
        for thread in started:
            thread.join()
        raise
    if failed:
        raise failed.pop(0)
