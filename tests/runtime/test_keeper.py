"""Of two machines that share a job's folder one runs its coordinator, and no other beside it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.replica import keeper as module
from runtime.replica.keeper import Keeper
from runtime.replica.record import RECORD, Record, RecordFile, StaleEpoch
from tests.runtime.replicas import PATIENCE_S, ROOT, TOKEN, until


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path, "first")
    keeper.take_over()
    yield keeper
    keeper.release()


@pytest.fixture(autouse=True)
def _beats_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    monkeypatch.setattr(module, "SILENT_S", 0.5)


@pytest.fixture
def looks(first: Keeper, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each time that the first looks for its record."""
    made: list[None] = []
    demand = first._demand_record

    def looks_again() -> None:
        made.append(None)
        demand()

    monkeypatch.setattr(first, "_demand_record", looks_again)
    return made


def does_not_wait(keeper: Keeper) -> bool:
    """Whether it takes over within a small part of the time for which it would wait."""
    taking = threading.Thread(target=keeper.take_over, daemon=True)
    taking.start()
    taking.join(module.SILENT_S / 20)
    return not taking.is_alive()


def test_one_that_lives_is_not_followed(
    first: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_S", PATIENCE_S)
    first.keep(lambda: None)

    with pytest.raises(StaleEpoch, match="the coordinator on first keeps the record in"):
        Keeper(tmp_path, "second").take_over()


def test_one_that_gives_no_sign_is_followed_and_ends_when_it_wakes_up(
    first: Keeper, tmp_path: Path
) -> None:
    second = Keeper(tmp_path, "second")
    second.take_over()

    lost, kept = threading.Event(), threading.Event()
    second.keep(kept.set)
    first.keep(lost.set)

    assert lost.wait(PATIENCE_S)
    second.release()
    assert not kept.is_set()


def test_a_folder_that_takes_no_sign_of_life_does_not_answer(first: Keeper, tmp_path: Path) -> None:
    first.keep(lambda: None)
    until(first.answers, "it answers")

    (tmp_path / "coordinator.keeper.first").mkdir()  # in the way of the next
    until(lambda: not first.answers(), "it does not answer")
    (tmp_path / "coordinator.keeper.first").rmdir()

    assert until(first.answers, "it answers again")


def test_beneath_a_folder_that_was_unmounted_no_sign_is_left_and_none_is_believed(
    first: Keeper, tmp_path: Path, looks: list[None]
) -> None:
    record, lost = tmp_path / RECORD, threading.Event()
    record.touch()
    first.keep(lost.set)
    until(lambda: first._seen, "it has seen the record")

    record.unlink()
    until(lambda: not first.answers(), "it does not answer")
    claim = tmp_path / "coordinator.keeper"
    claim.write_text("an earlier one")
    before = len(looks)
    until(lambda: len(looks) > before + 1, "it looks again")
    beneath = claim.read_text()
    claim.unlink()
    record.touch()
    until(first.answers, "it answers again")

    assert not lost.is_set()
    assert beneath == "an earlier one"


def test_after_one_that_ended_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 2 * PATIENCE_S)
    ended = Keeper(tmp_path, "first")
    ended.take_over()
    ended.release()

    assert does_not_wait(Keeper(tmp_path, "second"))


@pytest.mark.usefixtures("first")
def test_who_holds_the_lock_of_the_same_machine_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 2 * PATIENCE_S)

    assert does_not_wait(Keeper(tmp_path, "first"))


def test_a_claim_that_somebody_removed_is_made_again(first: Keeper, tmp_path: Path) -> None:
    claim = tmp_path / "coordinator.keeper"
    claim.unlink()
    lost = threading.Event()
    first.keep(lost.set)

    until(lambda: claim.exists() or lost.is_set(), "it looks")

    assert not lost.is_set()


def test_a_folder_that_cannot_be_reached_ends_nobody(
    first: Keeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    claim = tmp_path / "coordinator.keeper"
    claim.rename(tmp_path / "aside")
    claim.mkdir()  # to read it fails, as of a disk that is away
    lost = threading.Event()
    first.keep(lost.set)
    until(lambda: "no_sign_of_life" in caplog.text, "it could not be reached")
    claim.rmdir()
    (tmp_path / "aside").rename(claim)
    before = claim.read_text()

    until(lambda: claim.read_text() != before, "it gives signs of life again")
    assert not lost.is_set()


@pytest.mark.parametrize(("again_s", "told"), [(60.0, 1), (0.0, 3)])
def test_a_folder_that_stays_away_is_logged_now_and_then(
    first: Keeper,
    tmp_path: Path,
    looks: list[None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    again_s: float,
    told: int,
) -> None:
    monkeypatch.setattr(module, "AWAY_S", again_s)
    claim = tmp_path / "coordinator.keeper"
    claim.unlink()
    claim.mkdir()

    first.keep(lambda: None)
    until(lambda: len(looks) > 3, "it has looked three times, and looks again")
    first._ended.set()
    claim.rmdir()

    assert min(caplog.text.count("no_sign_of_life"), 3) == told


def test_a_coordinator_ends_as_soon_as_another_machine_s_has_its_record(tmp_path: Path) -> None:
    def start(host: str) -> subprocess.Popen[bytes]:
        on_host = (
            f"import socket; socket.gethostname = lambda: {host!r}\n"
            "from runtime.replica.coordinator import main; main()"
        )
        words = ["--job", "j", "--state-dir", str(tmp_path), "--port-file", str(tmp_path / host)]
        environment = {**os.environ, "DRYDOCK_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, "-c", on_host, *words], env=environment)

    RecordFile(tmp_path, "j").advance(0, Record(job="j", epoch=5, members={0: "a"}))
    one = start("one")
    until((tmp_path / "one").exists, "it listens")
    refused = start("two")
    assert refused.wait(PATIENCE_S) == 1
    assert one.poll() is None

    # As one that stood still for long enough finds it.
    (tmp_path / "coordinator.keeper").write_text("two 1 0 1")

    assert one.wait(PATIENCE_S) == 1
