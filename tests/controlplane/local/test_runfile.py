"""The run file is whole or absent, private, and believed only while its `up` lives."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from controlplane.local import runfile
from controlplane.local.up import locked
from tests.controlplane.local.conftest import as_nobody, by_root


@pytest.fixture(autouse=True)
def own_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRYDOCK_HOME", str(home))


def test_a_living_ups_environment_is_read_and_the_callers_wins() -> None:
    runfile.write({"REDIS_URL": "redis://there", "PUBLIC_URL": "http://there"}, os.getpid())
    environment = {"PUBLIC_URL": "http://mine"}
    runfile.load_into(environment)
    assert environment["REDIS_URL"] == "redis://there"
    assert environment["PUBLIC_URL"] == "http://mine"


def test_what_a_dead_up_has_left_is_not_believed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        runfile.write({"REDIS_URL": "redis://gone"}, process.pid)
    assert runfile.read() == {}


def test_a_step_of_the_clock_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runfile.write({"REDIS_URL": "redis://there"}, os.getpid())
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: 1.0)  # it moves along with the clock
    assert runfile.read() == {"REDIS_URL": "redis://there"}


@pytest.mark.parametrize("other", [{"start_ticks": 1}, {"boot_id": "another"}])
def test_another_process_that_has_the_number_is_told_apart(other: dict[str, object]) -> None:
    identity = runfile.identity(os.getpid())
    assert runfile.is_alive(identity)
    assert not runfile.is_alive({**identity, **other})


def test_the_record_of_an_earlier_version_names_nobody() -> None:
    assert not runfile.is_alive({"pid": os.getpid(), "started_at": time.time()})


@by_root
def test_whose_the_home_is_is_said_to_another_user() -> None:
    runfile.write({}, os.getpid())
    with as_nobody(), pytest.raises(SystemExit, match="belongs to root: run this as that user"):
        runfile.load_into({})


@by_root
def test_whose_the_secret_key_is_is_said_to_another_user() -> None:
    runfile.write_private(runfile.home() / "secret-key", "secret")
    with as_nobody(), pytest.raises(SystemExit, match="belongs to root: run this as that user"):
        runfile.load_into({})


@by_root
def test_whose_the_folder_is_is_said_to_one_who_may_not_make_a_home_there(home: Path) -> None:
    refused = pytest.raises(SystemExit, match="new belongs to root: run this")
    with as_nobody(), refused, locked(home / "new"):
        pass


def test_it_is_readable_by_its_owner_only() -> None:
    runfile.write({}, os.getpid())
    assert stat.S_IMODE(runfile.path().stat().st_mode) == 0o600


def test_readers_never_see_half_a_file() -> None:
    texts = {character * 100_000 for character in "ab"}
    stop = threading.Event()
    target = runfile.home() / "value"
    runfile.write_private(target, "a" * 100_000)

    def rewrite() -> None:
        while not stop.is_set():
            for text in sorted(texts):
                runfile.write_private(target, text)

    writer = threading.Thread(target=rewrite)
    writer.start()
    seen = {target.read_text() for _ in range(200)}
    stop.set()
    writer.join()
    assert seen <= texts


def test_a_write_that_fails_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", no_room)
    with pytest.raises(OSError, match="No space"):
        runfile.write_private(home / "pids" / "keeper.json", "{}")
    assert list((home / "pids").iterdir()) == []


@pytest.fixture
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key from whoever started us."""
    monkeypatch.setattr(runfile, "_found", {})


@pytest.mark.usefixtures("nothing_given")
def test_the_secret_key_that_up_keeps_is_everyones() -> None:
    starting: dict[str, str] = {}
    runfile.load_into(starting)
    made = starting["SECRET_KEY"]
    runfile.keep_secret_key(starting)
    beside: dict[str, str] = {}
    runfile.load_into(beside)
    assert len(made) > 40
    assert starting == beside == {"SECRET_KEY": made}


@pytest.mark.usefixtures("nothing_given")
def test_a_key_that_the_home_got_meanwhile_is_taken() -> None:
    slow: dict[str, str] = {}
    runfile.load_into(slow)
    runfile.write_private(runfile.home() / "secret-key", "first")
    runfile.keep_secret_key(slow)
    assert slow == {"SECRET_KEY": "first"}


@pytest.mark.usefixtures("nothing_given")
@pytest.mark.parametrize("given", ["SECRET_KEY", "SECRET_KEY_FILE"])
def test_a_key_that_the_caller_gave_is_not_written_down(home: Path, given: str) -> None:
    environment = {given: "theirs"}
    runfile.load_into(environment)
    runfile.keep_secret_key(environment)
    assert environment == {given: "theirs"}
    assert [*home.iterdir()] == []


@pytest.mark.usefixtures("nothing_given")
def test_a_command_writes_no_key(home: Path) -> None:
    runfile.load_into({})
    assert [*home.iterdir()] == []


@pytest.mark.usefixtures("nothing_given")
def test_what_is_started_by_hand_on_one_database_shares_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_hand: list[dict[str, str]] = [{"DATABASE_URL": "postgres://there"} for _ in range(2)]
    for environment in by_hand:
        monkeypatch.setattr(runfile, "_found", {})
        runfile.load_into(environment)
    assert by_hand[0]["SECRET_KEY"] == by_hand[1]["SECRET_KEY"]


@pytest.mark.usefixtures("nothing_given")
def test_a_command_beside_a_running_up_writes_no_key(home: Path) -> None:
    runfile.write({"DATABASE_URL": "postgres://there"}, os.getpid())
    runfile.load_into({})
    assert [*home.iterdir()] == [runfile.path()]


def test_a_damaged_record_is_an_error_not_a_guess() -> None:
    runfile.path().write_text("{")
    with pytest.raises(json.JSONDecodeError):
        runfile.read()
