"""Ending a product from elsewhere, and forgetting its data: also when either is cut short."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.local import down, processes, services
from controlplane.local.processes import Child, Program
from controlplane.local.up import holder

Eventually = Callable[..., object]
#: Holds the home's lock, and ends by force when it is asked to.
KILLED = """
import fcntl, json, os, pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
lock = open("up.lock", "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(json.dumps({"pid": os.getpid(), "url": "http://there"}))
lock.flush()
pathlib.Path("holds").touch()
time.sleep(600)
"""


class Cut(Exception):
    """Stands for a Ctrl-C in the middle."""


@pytest.fixture
def used(home: Path) -> Path:
    """A home that has been used."""
    used = home / "used"
    (used / "postgres" / "base").mkdir(parents=True)
    (used / "postgres" / "PG_VERSION").write_text("18\n")
    (used / "secret-key").write_text("secret")
    return used


def cut(*_: object, **__: object) -> None:
    raise Cut


def said(_line: str) -> None:
    """Nothing: what is said is not looked at."""


def test_what_is_left_when_an_up_is_killed_while_it_stops_is_stopped(
    home: Path, eventually: Eventually
) -> None:
    child = Child(home, Program("sleeper", ("sleep", "600"), home))
    child.start()
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=home) as holder:
        eventually(lambda: (home / "holds").exists(), 120, "the lock is held")
        assert down.down(home, said)
        assert holder.wait(120) < 0
    assert processes.marked(home) == []
    child.stop()


def test_one_that_ends_before_it_is_asked_has_ended(home: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait(120)
    with (home / "up.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(json.dumps({"pid": gone.pid, "url": "http://there"}))
        lock.flush()
        assert down.down(home, lambda _line: fcntl.flock(lock, fcntl.LOCK_UN))


def test_what_starts_just_now_is_neither_stopped_nor_forgotten(used: Path) -> None:
    child = Child(used, Program("sleeper", ("sleep", "600"), used))
    child.start()
    with (used / "up.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="starts or stops just now"):
            down.down(used, said)
        with pytest.raises(SystemExit, match="starts or stops just now"):
            down.forget(used)
    assert child.poll() is None
    assert (used / "secret-key").exists()
    child.stop()


def test_nothing_starts_in_a_home_while_it_is_cleared(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def clear(folder: Path) -> int:
        seen.append(holder(folder))
        return 0

    with monkeypatch.context() as watched:
        watched.setattr(processes, "sweep", clear)
        watched.setattr("shutil.rmtree", clear)
        assert down.down(used, said)
        down.forget(used)
    assert seen == [{}, {}]
    assert holder(used) is None


def test_a_reset_that_is_cut_short_leaves_no_home(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as early:
        early.setattr("shutil.rmtree", cut)
        with pytest.raises(Cut):
            down.forget(used)
    assert not used.exists()

    down.forget(used)
    assert [*used.parent.iterdir()] == []


def test_a_reset_after_one_that_was_cut_short_forgets_both(used: Path) -> None:
    shutil.copytree(used, used.with_name("used.forgotten"))
    down.forget(used)
    assert [*used.parent.iterdir()] == []


def test_where_a_home_cannot_be_moved_the_database_goes_first(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "rename", refuse)
    with monkeypatch.context() as early:
        early.setattr("shutil.rmtree", cut)
        with pytest.raises(Cut):
            down.forget(used)
    assert not (used / "postgres" / "PG_VERSION").exists()
    assert (used / "secret-key").exists()

    down.forget(used)
    assert [*used.parent.iterdir()] == []


def test_half_a_database_does_not_keep_a_new_one_from_being_made(home: Path) -> None:
    (home / "postgres" / "base").mkdir(parents=True)
    (home / "postgres" / "base" / "1").write_text("half")
    told: list[str] = []
    services.plan(home, {}, told.append)
    assert (home / "postgres" / "PG_VERSION").exists()
    assert (home / "postgres.half" / "base" / "1").read_text() == "half"
    assert f"{home / 'postgres.half'}" in told[-1]
