"""Ending a product from elsewhere, and forgetting its data: also when either is cut short."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from controlplane.local import down, processes, runfile, services
from controlplane.local.processes import Child, Program
from controlplane.local.up import (
    MARKER,
    Options,
    UpError,
    _check_home,
    _only_one,
    _settle,
    holder,
    is_home,
    made,
)

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
    (used / MARKER).touch()
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

    def clear(_folder: Path) -> int:
        seen.append(holder(used))
        return 0

    with monkeypatch.context() as watched:
        watched.setattr(processes, "sweep", clear)
        watched.setattr("shutil.rmtree", clear)
        assert down.down(used, said)
        down.forget(used)
    assert seen == [{}, {}]
    assert holder(used) is None


def test_a_reset_that_is_cut_short_leaves_nothing_to_go_on_from(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as early:
        early.setattr("shutil.rmtree", cut)
        with pytest.raises(Cut):
            down.forget(used)
    assert made(used) == []
    assert is_home(used)

    down.forget(used)
    assert [*used.parent.iterdir()] == []


def test_a_reset_after_one_that_was_cut_short_forgets_both(used: Path) -> None:
    (used / down.FORGOTTEN / "postgres" / "base").mkdir(parents=True)
    down.forget(used)
    assert [*used.parent.iterdir()] == []


@pytest.mark.parametrize("sign", ["secret-key", "up.lock", MARKER])
@pytest.mark.parametrize("name", ["used", "never-used"])
def test_what_an_earlier_version_was_cut_short_over_is_deleted(
    used: Path, monkeypatch: pytest.MonkeyPatch, sign: str, name: str
) -> None:
    monkeypatch.setenv("DRYDOCK_HOME", str(used.with_name(name)))
    moved = used.with_name(f"{name}.forgotten")
    (moved / "postgres").mkdir(parents=True)
    (moved / sign).touch()
    call_command("reset", yes=True)
    assert not moved.exists()


def test_a_folder_that_is_only_named_like_one_moved_away_stays(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRYDOCK_HOME", str(used))
    theirs = used.with_name("used.forgotten") / "postgres"
    theirs.mkdir(parents=True)
    call_command("reset", yes=True)
    assert [*used.parent.rglob("*")] == [theirs.parent, theirs]


def test_half_a_database_does_not_keep_a_new_one_from_being_made(home: Path) -> None:
    (home / "postgres" / "base").mkdir(parents=True)
    (home / "postgres" / "base" / "1").write_text("half")
    told: list[str] = []
    services.plan(home, {}, told.append)
    assert (home / "postgres" / "PG_VERSION").exists()
    assert (home / "postgres.half" / "base" / "1").read_text() == "half"
    assert f"{home / 'postgres.half'}" in told[-1]


def test_the_database_goes_first(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    monkeypatch.setattr(Path, "rename", lambda path, _target: moved.append(path.name))
    down.forget(used)
    assert moved == ["postgres", "secret-key"]


def test_a_reset_leaves_what_is_not_drydocks(used: Path) -> None:
    (used / "notes").mkdir()
    (used / "notes" / "mine").touch()
    assert down.forget(used) == {"notes": down.THEIRS}
    assert [*used.rglob("*")] == [used / "notes", used / "notes" / "mine"]


def busy(monkeypatch: pytest.MonkeyPatch, verb: str, mount: str, why: int = errno.EBUSY) -> None:
    """The system refuses this for what is so called, as it does for a mount point."""
    real = getattr(os, verb)

    def refuse(path: Path | str, *to: Any, **how: Any) -> Any:
        if Path(path).name == mount:
            raise OSError(why, os.strerror(why), str(path))
        return real(path, *to, **how)

    monkeypatch.setattr(os, verb, refuse)


@pytest.mark.parametrize("name", ["postgres", "secret-key"])
def test_what_cannot_be_moved_is_deleted_where_it_is(
    used: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    busy(monkeypatch, "rename", name)
    assert down.forget(used) == {}
    assert [*used.parent.iterdir()] == []


def test_keys_stay_with_a_database_that_may_not_be_deleted(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(monkeypatch, "rename", "postgres", errno.EACCES)
    with pytest.raises(PermissionError):
        down.forget(used)
    assert (used / "secret-key").exists()


def test_a_mount_point_is_emptied_and_stays(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (used / "shared" / "checkpoints").mkdir(parents=True)
    (used / "notes").mkdir()
    with monkeypatch.context() as mounted:
        busy(mounted, "rename", "shared")
        busy(mounted, "rmdir", "shared")
        left = [down.forget(used) for _ in range(2)]
    assert left == [{"shared": "Device or resource busy", "notes": down.THEIRS}] * 2
    assert sorted(used.rglob("*")) == [used / MARKER, used / "notes", used / "shared"]
    _check_home(used)

    (used / "notes").rmdir()
    assert down.forget(used) == {}
    assert [*used.parent.iterdir()] == []


def test_a_mount_point_within_what_is_moved_is_emptied_and_stays(
    used: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (used / "shared" / "mounted" / "checkpoints").mkdir(parents=True)
    busy(monkeypatch, "rmdir", "mounted")
    left = [down.forget(used) for _ in range(2)]
    mounted = used / down.FORGOTTEN / "shared" / "mounted"
    assert left == [{down.FORGOTTEN: "Device or resource busy"}] * 2
    assert sorted(used.rglob("*")) == [
        used / down.FORGOTTEN, mounted.parent, mounted, used / MARKER
    ]  # fmt: skip


def test_a_folder_in_which_drydock_never_ran_is_no_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRYDOCK_HOME", str(home))
    (home / "logs").mkdir()
    (home / "pids").mkdir()
    assert down.down(home, said)
    call_command("reset", yes=True)
    assert sorted(home.iterdir()) == [home / "logs", home / "pids"]


def test_a_folder_is_no_home_for_the_lock_of_an_up_that_was_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRYDOCK_HOME", str(home))
    theirs = [home / "logs", home / "postgres", home / "shared"]
    with _only_one(Options(home)):
        pass
    for folder in theirs:
        folder.mkdir()
    call_command("reset", yes=True)
    assert sorted(home.iterdir()) == [*theirs, home / "up.lock"]


@pytest.mark.parametrize("stop", [down.down, lambda *_: call_command("reset", yes=True)])
def test_what_runs_for_a_home_that_somebody_deleted_is_stopped(
    home: Path, monkeypatch: pytest.MonkeyPatch, stop: Callable[..., object]
) -> None:
    deleted = home / "deleted"
    monkeypatch.setenv("DRYDOCK_HOME", str(deleted))
    child = Child(deleted, Program("sleeper", ("sleep", "600"), home))
    child.start()
    shutil.rmtree(deleted)
    stop(deleted, said)
    assert processes.marked(deleted) == []
    assert not deleted.exists()
    child.stop()


def test_a_home_stays_one_without_its_lock(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runfile, "_found", {"SECRET_KEY": "theirs"})
    with _only_one(Options(home)):
        _settle(home)
    (home / "up.lock").unlink()
    (home / "postgres").mkdir()
    assert is_home(home)
    _check_home(home)


@pytest.mark.parametrize("names", [("admin-password",), ("pids", "up.lock")])
def test_a_home_of_an_earlier_version_is_one(home: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (home / name).touch()
    assert is_home(home)


def test_up_takes_no_folder_that_holds_others_under_its_own_names(home: Path) -> None:
    (home / "notes").mkdir()
    (home / "secret-key").touch()
    with pytest.raises(UpError, match="holds secret-key, which Drydock has not made") as refused:
        _check_home(home)
    assert f"touch {home / MARKER}" in str(refused.value)


def test_up_takes_a_folder_with_other_things_and_goes_on_in_a_home(used: Path, home: Path) -> None:
    _check_home(home)
    _check_home(used)


def test_up_takes_a_folder_in_which_a_command_of_an_earlier_version_ran(home: Path) -> None:
    (home / "secret-key").touch()
    (home / "up.lock").touch()
    _check_home(home)
