"""A thread gives way alone; the ones beside it go on as before. A process does with all it has."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.giving_way import BEHIND, LEAST, give_way, put_behind


def priority_of_this_thread() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_thread_that_asks_gives_way() -> None:
    found: list[int] = []
    before = priority_of_this_thread()

    def work() -> None:
        give_way()
        found.append(priority_of_this_thread())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert found == [LEAST]
    assert priority_of_this_thread() == before


@pytest.fixture
def sleeper() -> Iterator[Callable[[bool], int]]:
    """Starts processes that do nothing, in a session of their own or in ours."""
    started = []

    def start(own_session: bool) -> int:
        process = subprocess.Popen(["sleep", "600"], start_new_session=own_session)
        started.append(process)
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_process_is_put_behind_with_its_session(sleeper: Callable[[bool], int]) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    processes = [sleeper(True) for _ in range(3)]

    for process in processes:
        put_behind(process)

    assert {os.getpriority(os.PRIO_PROCESS, one) for one in processes} == {mine + BEHIND}
    sessions = [Path(f"/proc/{one}/autogroup") for one in processes]
    assert {one.read_text().split()[-1] for one in sessions if one.exists()} <= {str(BEHIND)}


def test_the_session_that_it_shares_with_us_stays_as_it_is(sleeper: Callable[[bool], int]) -> None:
    ours = Path("/proc/self/autogroup")
    before = ours.exists() and ours.read_text()

    put_behind(sleeper(False))

    assert (ours.exists() and ours.read_text()) == before


def test_a_process_that_has_ended_is_nobody_to_put_behind(sleeper: Callable[[bool], int]) -> None:
    process = sleeper(True)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)

    put_behind(process)
