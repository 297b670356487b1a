"""What the supervisor starts again, what it survives, and how fast it stops what it keeps."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controlplane.local import processes, supervisor
from controlplane.local.processes import Program
from controlplane.local.supervisor import Interrupted, Supervisor

Eventually = Callable[..., object]
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
CAREFUL = """
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path("saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(600)
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER


@pytest.fixture
def handlers() -> Iterator[None]:
    """The test run's own signal handlers, put back afterwards."""
    numbers = (signal.SIGCHLD, *supervisor.STOP_SIGNALS)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def stopped(
    home: Path, code: str, eventually: Eventually, first: signal.Signals, again: signal.Signals
) -> list[str]:
    """What is said when the second signal comes between one program's end and the next one's."""
    said: list[str] = []
    deeds = {"stopped first": lambda: os.kill(os.getpid(), again)}

    def say(line: str) -> None:
        said.append(line)
        deeds.get(line, lambda: None)()

    last = Program("last", (sys.executable, "-c", code), home, stop_s=60.0, stop_order=2)
    with Supervisor(home, say) as everything:
        everything.keep(Program("first", ("sleep", "600"), home))
        child = everything.keep(last)
        eventually(lambda: "up" in child.tail(), 120, "it runs")
        os.kill(os.getpid(), first)
        with pytest.raises(Interrupted):
            everything.wait(1.0)
    return said


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("first", "again"),
    [
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGHUP),
        (signal.SIGTERM, signal.SIGINT),
    ],
)
def test_one_ctrl_c_and_any_other_signals_leave_each_program_its_time(
    home: Path, eventually: Eventually, first: signal.Signals, again: signal.Signals
) -> None:
    said = stopped(home, CAREFUL, eventually, first, again)
    assert said == ["stopped first", "stopped last"]
    assert (home / "saved").exists()


@pytest.mark.usefixtures("handlers")
def test_a_second_ctrl_c_kills_at_once(home: Path, eventually: Eventually) -> None:
    said = stopped(home, STUBBORN, eventually, signal.SIGINT, signal.SIGINT)
    assert "last did not stop in time and was killed" in said


@pytest.mark.usefixtures("handlers")
def test_a_program_that_cannot_be_started_again_ends_nothing_and_is_tried_again(
    home: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.1)
    said: list[str] = []
    with Supervisor(home, said.append) as everything:
        child = everything.keep(Program("sleeper", (sys.executable, "-c", SLEEPER), home))
        with monkeypatch.context() as full:
            full.setattr("controlplane.local.runfile.write_private", no_room)
            child.kill()
            eventually(lambda: tended(everything) and cannot(said), 120, "it cannot be started")
            assert processes.marked(home) == []
        eventually(lambda: tended(everything) and child.poll() is None, 120, "it runs again")


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def tended(everything: Supervisor) -> bool:
    everything.wait(0.1)
    return True


def cannot(said: list[str]) -> list[str]:
    return [line for line in said if "sleeper cannot be started" in line]
