"""A thread gives way alone; the ones beside it go on as before."""

import os
import threading

from runtime.priority import NICE, lower_priority


def priority_of_this_thread() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_thread_that_asks_gives_way_and_once() -> None:
    found: list[int] = []
    before = priority_of_this_thread()

    def work() -> None:
        lower_priority()
        lower_priority()
        found.append(priority_of_this_thread())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert found == [min(19, before + NICE)]
    assert priority_of_this_thread() == before
