"""A store that gives no sign of life keeps no job from going on, nor from saving to others."""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import disk, store, watched_store
from runtime.client import CheckpointSaved
from runtime.snapshot import Copying
from tests.runtime.checkpoint.one_rank import PATIENCE_S, OneRank, read_from, unasked
from tests.runtime.checkpoint.states import (
    SOON_S,
    copy_of_step,
    hanging,
    impatient,
    staged_at,
)


def test_a_shared_folder_that_hangs_keeps_no_job_from_its_own_disk(
    on_two_tiers: OneRank, tmp_path: Path
) -> None:
    on_two_tiers.save_all(1)
    restarted = OneRank(tmp_path, own_disk=True)

    with hanging(tmp_path / "checkpoints" / "run"):
        found = [restarted.saver.sources.saves() for _ in range(2)]
        digest = read_from(restarted, 1, "local")
        epoch = restarted.saver.sources.next_epoch(4)

    assert found == [[(1, "save1", "local")]] * 2
    assert digest == staged_at(1).digest
    assert epoch == 5
    assert restarted.told.troubles() == ["checkpoints_out_of_reach"] * 2  # each time it was asked
    (text, _again) = [message.text for message in restarted.told.messages]
    assert re.search(r"^shared: .*/checkpoints (hangs|has not answered)", text)


def test_who_starts_while_the_shared_folder_hangs_saves_where_it_did_before(tmp_path: Path) -> None:
    saved = OneRank(tmp_path, own_disk=True, holder=True)
    saved.save_all(1)  # no epoch has been granted, so it has no peer
    restarted = OneRank(tmp_path, own_disk=True, holder=True)
    place = restarted.saver.open_holder("127.0.0.1")
    restarted.saver.meet([{"replica": 0, "placement": "p", "holders": [place]}], 0)

    with hanging(tmp_path / "checkpoints" / "run"):
        found = restarted.saver.sources.saves()
        restarted.save(2)
        restarted.told.until(lambda: {"local", "peer"} <= saved_to(restarted))
        digest = read_from(restarted, 2, "local")
    for one in (saved, restarted):
        one.saver.finish()
    os.kill(json.loads((tmp_path / "memory/j/holder.json").read_bytes())["pid"], signal.SIGKILL)

    assert found == [(1, "save1", "local")]
    assert digest == staged_at(2).digest


def saved_to(one: OneRank) -> set[str]:
    return {said.tier for said in one.told.messages if isinstance(said, CheckpointSaved)}


def test_a_shared_folder_that_hangs_keeps_no_job_from_peers_memory(tmp_path: Path) -> None:
    one = OneRank(tmp_path, holder=True)
    place = one.saver.open_holder("127.0.0.1")
    one.saver.meet([{"replica": 0, "placement": "p", "holders": [place]}], 0)
    one.save_all(7)

    with hanging(tmp_path / "checkpoints" / "run"):
        found = one.saver.sources.saves()

    assert found == [(7, "0-7", "peer")]
    assert one.told.troubles() == ["checkpoint_not_apart", "checkpoints_out_of_reach"]
    one.saver.finish()
    os.kill(json.loads((tmp_path / "memory/j/holder.json").read_bytes())["pid"], signal.SIGKILL)


def test_where_nothing_else_is_a_store_that_hangs_is_not_taken_for_an_empty_one(
    trainer: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    monkeypatch.setattr(watched_store, "ANSWER_S", SOON_S)
    monkeypatch.setattr(store, "candidates", lambda _folder: [] * back.wait())

    with pytest.raises(TimeoutError, match=r"checkpoints has not answered for 1\.5 s"):
        trainer.saver.sources.saves()

    back.set()


def test_of_suspects_that_hang_nobody_waits_for_ever(on_two_tiers: OneRank, tmp_path: Path) -> None:
    on_two_tiers.save_all(1)
    restarted = OneRank(tmp_path, own_disk=True)
    (tmp_path / "checkpoints" / "suspects.json").touch()

    with hanging(tmp_path / "checkpoints" / "suspects.json"):
        found = restarted.saver.sources.saves()

    assert found == [(1, "save1", "local"), (1, "save1", "shared")]
    assert restarted.told.troubles() == ["checkpoints_out_of_reach"]


def test_a_disk_of_ours_that_hangs_keeps_no_job_from_the_shared_folder(
    on_two_tiers: OneRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_two_tiers.save_all(1)
    back, iterdir, ours = threading.Event(), Path.iterdir, tmp_path / "disk" / "j"
    impatient(monkeypatch, ours)
    monkeypatch.setattr(
        Path, "iterdir", lambda path: (path == ours and back.wait(), iterdir(path))[1]
    )
    restarted = OneRank(tmp_path, own_disk=True)

    found = restarted.saver.sources.saves()
    back.set()

    assert found == [(1, "save1", "shared")]
    assert restarted.told.troubles() == ["checkpoints_out_of_reach"]


def test_a_checkpoint_is_read_as_long_as_its_store_gives_something_of_it(
    on_two_tiers: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_two_tiers.save_all(1)
    back, fill, pauses = threading.Event(), disk._fill, itertools.repeat(2.5)
    monkeypatch.setattr(watched_store, "ANSWER_S", 4.0)

    def hesitating(*given: Any) -> None:
        back.wait(next(pauses))
        fill(*given)

    monkeypatch.setattr(disk, "_fill", hesitating)
    digest = read_from(on_two_tiers, 1, "shared")
    pauses = itertools.repeat(PATIENCE_S)

    with pytest.raises(TimeoutError, match="checkpoints has not answered for 4 s"):
        read_from(on_two_tiers, 1, "shared")
    back.set()

    assert digest == staged_at(1).digest


class Refused(Exception):
    """Another rank said so."""


def refused_elsewhere(_bytes: int) -> None:
    raise Refused


@pytest.mark.parametrize("call", [(disk, "_fill"), (store, "candidates")])
def test_who_waits_for_a_store_hears_that_another_rank_refuses_the_checkpoint(
    on_two_tiers: OneRank, monkeypatch: pytest.MonkeyPatch, call: tuple[Any, str]
) -> None:
    """The store is not given up for that."""
    on_two_tiers.save_all(1)
    back = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(*call, lambda *_given: [] * back.wait())
        with pytest.raises(Refused):
            on_two_tiers.saver.sources.read("save1", "shared", 0, progress=refused_elsewhere)
    digest = read_from(on_two_tiers, 1, "local")
    back.set()

    assert digest == read_from(on_two_tiers, 1, "shared") == staged_at(1).digest


def test_who_waits_for_a_holder_hears_that_another_rank_refuses_the_checkpoint(
    tmp_path: Path,
) -> None:
    one = OneRank(tmp_path, holder=True)
    place = one.saver.open_holder("127.0.0.1")
    one.saver.meet([{"replica": 0, "placement": "p", "holders": [place]}], 0)
    one.save_all(7)
    found = one.saver.sources.saves()
    holder = json.loads((tmp_path / "memory/j/holder.json").read_bytes())["pid"]

    os.kill(holder, signal.SIGSTOP)
    with pytest.raises(Refused):
        one.saver.sources.read("0-7", "peer", 0, progress=refused_elsewhere)
    os.kill(holder, signal.SIGCONT)
    one.saver.finish()
    os.kill(holder, signal.SIGKILL)

    assert (7, "0-7", "peer") in found


def hang_at_the_second_save(trainer: OneRank) -> None:
    """The shared folder does; the disk of our own has it."""
    trainer.save_all(1)
    os.kill(trainer.writer("shared"), signal.SIGSTOP)
    trainer.save(2, last=False)
    trainer.told.until(lambda: trainer.told.saved() == [1, 1, 2])
    trainer.told.until(lambda: ("local", "save2") not in trainer.saver.dispatcher._asked)


def go_on(trainer: OneRank) -> None:
    """The shared folder does, and takes what it was asked to."""
    os.kill(trainer.writer("shared"), signal.SIGCONT)
    trainer.told.until(lambda: trainer.told.saved().count(2) == 2)


def test_a_store_that_hangs_holds_up_no_other(on_two_tiers: OneRank) -> None:
    saver = on_two_tiers.saver
    hang_at_the_second_save(on_two_tiers)

    ready = [saver.ready(["local", "shared"]) for _ in range(3)]
    for step in (3, 4, 5):
        assert saver.prepare(unasked)
        begun = saver.save(partial(copy_of_step, step), f"save{step}", ["local"])
        assert begun is not None
        on_two_tiers.told.until(lambda step=step: step in on_two_tiers.told.saved())  # type: ignore[misc]
        on_two_tiers.told.until(saver.copy_buffers.any_free)
    go_on(on_two_tiers)
    on_two_tiers.told.until(lambda: saver.ready(["shared"]) == {"shared"})

    assert ready == [{"local"}] * 3
    assert on_two_tiers.told.troubles() == ["checkpoint_late"]


def test_a_state_that_grows_while_a_store_hangs_is_saved_to_the_others(
    on_two_tiers: OneRank,
) -> None:
    saver = on_two_tiers.saver
    hang_at_the_second_save(on_two_tiers)
    on_two_tiers.told.until(saver.copy_buffers.any_free)
    (free,) = [os.dup(room.fd) for room in saver.copy_buffers._free]

    def larger(into: memoryview | None) -> Copying:
        return Copying({"weight": torch.ones(4 << 20)}, 3, into)

    first = saver.save(larger, "larger", ["local"])
    again = saver.save(larger, "again", ["local"], last=True)
    assert again is not None
    on_two_tiers.told.until(lambda: 3 in on_two_tiers.told.saved())
    left = os.fstat(free).st_blocks  # though the one that hangs has it mapped
    os.close(free)
    go_on(on_two_tiers)
    on_two_tiers.told.until(saver.copy_buffers.all_free)

    assert first is None
    assert left == 0
    assert all(len(room.memory) > again.table.bytes for room in saver.copy_buffers._free)
    assert on_two_tiers.told.troubles() == []


def test_a_writer_that_hangs_keeps_no_more_than_its_save_once_the_trainer_has_ended(
    on_two_tiers: OneRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all buffers mapped, and the job's next start on this node needs the memory."""
    saver = on_two_tiers.saver
    hang_at_the_second_save(on_two_tiers)
    on_two_tiers.told.until(saver.copy_buffers.any_free)
    (free,) = [os.dup(room.fd) for room in saver.copy_buffers._free]
    writer = on_two_tiers.writer("shared")
    ended = os.pidfd_open(writer)
    monkeypatch.setattr("runtime.checkpoint.saver.FINISH_S", SOON_S)

    saver.finish()
    left = os.fstat(free).st_blocks
    os.close(free)
    os.kill(writer, signal.SIGCONT)
    select.select([ended], [], [], PATIENCE_S)
    os.close(ended)

    assert left == 0
    assert store.verify(tmp_path / "checkpoints" / "step-00000002") == []


def test_a_shared_folder_that_hangs_holds_no_copy_up(tmp_path: Path) -> None:
    """Also not the first to a disk of our own, which needs the name of the job's run."""
    one = OneRank(tmp_path, own_disk=True)
    (tmp_path / "checkpoints").mkdir()
    os.mkfifo(tmp_path / "checkpoints" / "run")  # who reads it waits for ever
    copies = [one.save(3), one.save(4)]
    finished = [copying.finished.wait(PATIENCE_S) for copying in copies if copying is not None]
    for tier in ("local", "shared"):
        os.kill(one.writer(tier), signal.SIGKILL)
    one.saver.finish()

    assert finished == [True, True]
