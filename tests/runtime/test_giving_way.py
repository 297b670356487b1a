"""A thread gives way alone; the ones beside it go on as before. A process does with all it has."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from runtime import giving_way
from runtime.giving_way import BEHIND, LEAST, give_way, put_behind, stay_behind

AUTOGROUP = Path("/proc/self/autogroup")


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


def test_a_process_is_put_behind(sleeper: Callable[[bool], int]) -> None:
    process = sleeper(True)

    put_behind(process)

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process) == min(mine + BEHIND, LEAST)


def test_the_session_that_it_shares_with_us_stays_as_it_is(sleeper: Callable[[bool], int]) -> None:
    before = rank_of_session()

    put_behind(sleeper(False))

    assert rank_of_session() == before


def test_a_process_that_has_ended_is_nobody_to_put_behind(sleeper: Callable[[bool], int]) -> None:
    process = sleeper(True)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)

    put_behind(process)


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel shares out by process alone")
def test_who_leads_a_session_ranks_it() -> None:
    program = (
        "from runtime.giving_way import stay_behind; stay_behind().join();"
        f"print(open('{AUTOGROUP}').read())"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE, check=True
    )

    assert said.stdout.split()[-1] == str(BEHIND).encode()


@pytest.mark.parametrize(
    ("refusals", "tries"),
    [([BlockingIOError(), BlockingIOError(), None], 3), ([PermissionError(), None], 1)],
)
def test_it_tries_again_where_others_were_faster_and_not_where_it_may_not(
    monkeypatch: pytest.MonkeyPatch, refusals: list[OSError | None], tries: int
) -> None:
    rank = Mock(side_effect=refusals)
    monkeypatch.setattr(giving_way, "_rank_session", rank)
    monkeypatch.setattr(giving_way, "AGAIN_S", 0.0)

    stay_behind().join(30)

    assert rank.call_count == tries


def rank_of_session() -> str:
    """Ours, where there is such a thing."""
    return AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
