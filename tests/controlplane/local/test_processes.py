"""Children start, end and are found again; strangers are never touched."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from controlplane.local import processes, runfile
from controlplane.local.processes import Child, Program

Eventually = Callable[..., object]
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
PARENT = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); " + SLEEPER
)


def program(home: Path, code: str, name: str = "sleeper") -> Program:
    return Program(name, (sys.executable, "-c", code), home, stop_s=5.0)


def started(home: Path, wanted: Program, eventually: Eventually) -> Child:
    child = Child(home, wanted)
    child.start()
    eventually(lambda: "up" in child.tail(), 120, "the program runs")
    return child


def test_a_child_ends_when_asked(home: Path, eventually: Eventually) -> None:
    child = started(home, program(home, SLEEPER), eventually)
    assert child.stop()
    assert child.poll() == -signal.SIGTERM
    assert list((home / "pids").iterdir()) == []


def test_a_stubborn_child_is_killed(home: Path, eventually: Eventually) -> None:
    child = started(home, replace(program(home, STUBBORN), stop_s=0.1), eventually)
    assert not child.stop()
    assert child.poll() == -signal.SIGKILL


def test_sweep_ends_the_recorded_and_their_children(home: Path, eventually: Eventually) -> None:
    started(home, program(home, PARENT), eventually)
    eventually(lambda: len(processes.marked(home)) == 2, 120, "parent and child are marked")
    assert processes.sweep(home) == 2
    assert processes.marked(home) == []


@pytest.mark.parametrize(
    "told", [{**runfile.identity(os.getpid()), "start_ticks": 1}, {"started_at": 1.0}]
)
def test_sweep_leaves_a_process_that_only_has_the_number(
    home: Path, eventually: Eventually, told: dict[str, object]
) -> None:
    child = started(home / "other", program(home, SLEEPER), eventually)
    record = {**told, "pid": child.pid, "stop_signal": 15, "stop_s": 1, "stop_order": 1}
    (home / "pids").mkdir()
    (home / "pids" / "sleeper.json").write_text(json.dumps(record))
    assert processes.sweep(home) == 0
    assert child.poll() is None
    child.stop()


def test_marked_never_names_ourselves(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processes.MARK, str(home))
    assert os.getpid() not in {process.pid for process in processes.marked(home)}


def test_wait_gone_takes_a_zombie_for_ended(home: Path, eventually: Eventually) -> None:
    child = started(home, program(home, SLEEPER), eventually)
    process = psutil.Process(child.pid)
    process.kill()
    assert processes.wait_gone([process], 10) == []
    child.stop()


def test_a_large_log_is_begun_anew_under_the_running_program(
    home: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 1)
    child = started(home, program(home, SLEEPER), eventually)
    child.bound_log()
    assert child.log.read_text() == ""
    assert child.log.with_suffix(".log.1").read_text() == "up\n"
    child.stop()


def full_disk(*arguments: object, **_: object) -> None:
    """As a copy or a write does where there is no room: something of it is there."""
    Path(str(arguments[1])).write_text("u")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_large_log_is_begun_anew_also_where_there_is_no_room_for_the_old_one(
    home: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 1)
    child = started(home, program(home, SLEEPER), eventually)
    monkeypatch.setattr("shutil.copyfile", full_disk)
    child.bound_log()
    assert child.log.read_text() == ""
    assert not child.log.with_suffix(".log.1").exists()
    child.stop()


def test_what_cannot_be_remembered_does_not_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(home, program(home, SLEEPER))
    monkeypatch.setattr("controlplane.local.runfile.write_private", no_room)
    with pytest.raises(OSError, match="No space"):
        child.start()
    assert processes.marked(home) == []


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
