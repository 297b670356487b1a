"""A thread gives way alone; the ones beside it go on as before."""

import os
import threading

from runtime.giving_way import NICE, give_way


def priority_of_this_thread() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_thread_that_asks_gives_way_and_once() -> None:
    found: list[int] = []
    before = priority_of_this_thread()

    def work() -> None:
        give_way()
        give_way()
        found.append(priority_of_this_thread())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert found == [min(19, before + NICE)]
    assert priority_of_this_thread() == before
