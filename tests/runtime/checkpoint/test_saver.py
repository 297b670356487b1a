"""From a copy at a step's edge to a verified checkpoint, with the real writer's process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from runtime.checkpoint import saver as saver_module
from runtime.checkpoint import store
from runtime.checkpoint.copy_buffers import SLACK_BYTES
from runtime.checkpoint.draft import HOST
from runtime.checkpoint.manifest import sealed
from runtime.checkpoint.tiers import TierName, tiers_of
from runtime.checkpoint.writer_handle import WRITER_MODULE, WriterHandle
from runtime.client import CheckpointSaved, Trouble
from runtime.image import Damaged, Piece
from runtime.snapshot import Copying, state_of
from tests.runtime.checkpoint.one_rank import PATIENCE_S, SIZE, OneRank, read_from, unasked
from tests.runtime.checkpoint.states import (
    copy_of_step,
    due,
    flip_a_bit,
    staged_at,
    state_of_step,
)


def test_a_copy_becomes_a_verified_checkpoint(trainer: OneRank, tmp_path: Path) -> None:
    trainer.save_all(7)

    (saved,) = trainer.told.messages
    assert (saved.step, saved.tier, saved.bytes) == (7, "shared", SIZE)
    assert saved.digest == staged_at(7).digest
    assert 0 <= saved.stall_s <= saved.seconds
    assert store.read(Path(saved.path)).digest == saved.digest
    facts = store.manifest_of(Path(saved.path)).facts
    assert (facts["job"], facts["replicas"], facts["ranks"]) == ("j", 1, 1)
    assert facts["torch"].startswith("2.")


def test_one_copy_is_written_to_each_tier(on_two_tiers: OneRank) -> None:
    on_two_tiers.save_all(7)

    on_two_tiers.told.until(lambda: len(on_two_tiers.told.messages) == 2)
    told = [(m.tier, m.digest) for m in on_two_tiers.told.messages]
    digest = staged_at(7).digest
    assert sorted(told) == [("local", digest), ("shared", digest)]
    assert on_two_tiers.saver.sources.saves() == [(7, "save7", "local"), (7, "save7", "shared")]
    assert {read_from(on_two_tiers, 7, tier) for tier in on_two_tiers.saver.tiers} == {digest}


def test_what_a_later_epoch_made_comes_before_a_later_step(on_two_tiers: OneRank) -> None:
    on_two_tiers.saver.prepare(lambda: SIZE)
    saves: list[tuple[int, int, TierName]] = [(9, 1, "local"), (7, 2, "shared")]
    for step, epoch, tier in saves:
        begin = partial(copy_of_step, step)
        on_two_tiers.saver.save(begin, f"save{step}", [tier], epoch=epoch, last=True)
    on_two_tiers.told.until(lambda: {*on_two_tiers.told.saved()} == {9, 7})

    assert [save[0] for save in on_two_tiers.saver.sources.saves()] == [7, 9]


def test_a_tier_that_fails_costs_the_other_nothing(on_two_tiers: OneRank, tmp_path: Path) -> None:
    on_two_tiers.save_all(1)
    (own,) = (tmp_path / "disk").glob("*/*/replica-0-rank-0")
    own.rename(tmp_path / "away")
    own.write_text("in the way")

    on_two_tiers.save_all(2)

    assert on_two_tiers.told.troubles() == ["checkpoint_failed"]
    assert (2, "save2", "shared") in on_two_tiers.saver.sources.saves()


def test_of_a_tier_that_fails_for_long_an_engineer_is_told_once_and_when_it_is_well_again(
    on_two_tiers: OneRank, tmp_path: Path
) -> None:
    on_two_tiers.save_all(1)
    (own,) = (tmp_path / "disk").glob("*/*/replica-0-rank-0")
    own.rename(tmp_path / "away")
    own.write_text("in the way")
    on_two_tiers.save_all(2, 3, 4)
    own.unlink()
    on_two_tiers.save_all(5)

    told = [m for m in on_two_tiers.told.messages if isinstance(m, Trouble)]
    assert [(m.kind, m.subject) for m in told] == [
        ("checkpoint_failed", "local"), ("checkpoint_recovered", "local")
    ]  # fmt: skip
    assert (5, "save5", "local") in on_two_tiers.saver.sources.saves()


def test_without_the_shared_folder_a_job_goes_on_from_its_own_disk(
    on_two_tiers: OneRank, tmp_path: Path
) -> None:
    on_two_tiers.save_all(1)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("not a folder any more")
    restarted = OneRank(tmp_path, own_disk=True)

    assert restarted.saver.sources.saves() == [(1, "save1", "local")]
    assert restarted.told.troubles() == ["checkpoints_out_of_reach"]


def test_a_disk_that_cannot_be_used_keeps_no_job_from_beginning(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("in the way")
    new = OneRank(tmp_path, own_disk=True)

    assert new.saver.sources.saves() == []
    new.save_all(1)
    assert new.told.troubles() == ["checkpoint_failed"]
    new.saver.finish()


def test_only_what_changed_is_written_and_only_the_newest_kept(trainer: OneRank) -> None:
    trainer.save_all(1, 2, 3, 4, 5)

    newest = trainer.saver.folders.shared / "step-00000005"
    assert trainer.saver.sources.saves() == [
        (5, "save5", "shared"),
        (4, "save4", "shared"),
        (3, "save3", "shared"),
    ]
    assert (newest / "rank-0-0000.bin").stat().st_nlink == 3


def test_by_whatever_way_the_folder_is_reached_as_many_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    trainer = OneRank(tmp_path / "link")

    trainer.save_all(1, 2, 3, 4)

    assert [step for step, *_ in trainer.saver.sources.saves()] == [4, 3, 2]
    trainer.saver.finish()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_another_replica_s_process_left_on_this_disk_goes_once_ours_is_later(
    tmp_path: Path, rank: int
) -> None:
    """A spare has the number of whomever it serves for, one after another."""
    one = OneRank(tmp_path, rank, 2, own_disk=True)
    saver = one.saver
    saver.prepare(lambda: SIZE)

    def left_after(step: int, replica: int) -> set[str]:
        begin = partial(copy_of_step, step)
        assert saver.save(begin, f"save{step}", ["local"], replica=replica, last=True)
        one.told.until(lambda: step in one.told.saved())
        one.told.until(lambda: not saver.dispatcher._asked)
        there = (tmp_path / "disk").glob("*/*/replica-*/step-*")
        return {f"{path.parent.name[8]}: {path.name[-1]}" for path in there}

    asked = [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]
    left = [left_after(step, replica) for step, replica in asked]

    assert left[2] == {"0: 1", "0: 2", "1: 3"}
    assert left[3] == {"1: 3", "1: 4"}
    assert left[4] == {"1: 3", "1: 4", "2: 5"}
    saver.finish()


def test_of_several_copies_on_this_disk_one_that_is_whole_is_read(
    on_two_tiers: OneRank, tmp_path: Path
) -> None:
    saver = on_two_tiers.saver
    saver.prepare(lambda: SIZE)
    for replica in (0, 1):
        begin = partial(copy_of_step, 7)
        assert saver.save(begin, "save7", ["local"], replica=replica, last=True)
        copies = replica + 1
        on_two_tiers.told.until(lambda copies=copies: on_two_tiers.told.saved() == [7] * copies)  # type: ignore[misc]
        on_two_tiers.told.until(lambda: not saver.dispatcher._asked)  # both have one name
    (first,) = (tmp_path / "disk").glob("*/*/replica-0-rank-0/step-00000007")
    flip_a_bit(first / "rank-0-0000.bin", 1000)

    assert saver.sources.saves() == [(7, "save7", "local")]
    assert read_from(on_two_tiers, 7, "local") == staged_at(7).digest
    assert on_two_tiers.told.troubles() == ["checkpoint_damaged", "checkpoint_passed_over"]


def test_what_a_dead_writer_left_goes_before_more_is_written(
    trainer: OneRank, tmp_path: Path
) -> None:
    """It may be what fills the disk, so that no save succeeds."""
    trainer.save_all(1)
    draft = tmp_path / "checkpoints" / ".writing-00000002-abc"
    draft.mkdir()
    (draft / "rank-0.lock").write_text(HOST)
    (tmp_path / "checkpoints" / ".writing-00000003-save3").write_text("in the way")

    trainer.save(3)
    trainer.told.until(lambda: "checkpoint_failed" in trainer.told.troubles())

    assert not draft.exists()


def test_a_note_that_cannot_be_made_is_no_flaw_of_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WRITER_MODULE, "tests.runtime.checkpoint.forgetful_writer")
    one = OneRank(tmp_path)

    one.save(1)
    one.told.until(lambda: "checkpoint_failed" in one.told.troubles())
    one.saver.finish()

    (whole,) = store.candidates(tmp_path / "checkpoints")
    assert store.verify(whole) == []


def test_a_thread_that_cannot_be_started_costs_no_later_save(
    trainer: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_handle: WriterHandle) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(WriterHandle, "start", start)
    trainer.save_all(1)

    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def rot(path: Path) -> None:
    """A bit of what every checkpoint has that shares this file."""
    with path.open("r+b") as file:
        (byte,) = file.read(1)
        file.seek(0)
        file.write(bytes([byte ^ 1]))


def test_what_is_not_on_the_disk_as_it_was_written_is_written_again_and_told(
    trainer: OneRank,
) -> None:
    """A file that a checkpoint shares with the one before has rotted since."""
    trainer.save_all(1)
    before, after = (trainer.saver.folders.shared / f"step-0000000{step}" for step in (1, 2))
    rot(before / "rank-0-0000.bin")

    trainer.save_all(2)

    (trouble,) = [m for m in trainer.told.messages if isinstance(m, Trouble)]
    assert trouble.kind == "checkpoint_damaged"
    assert "written again" in trouble.text
    assert "rank-0-0000.bin (rank 0), tensors base" in trouble.text
    assert store.verify(after) == []
    assert (after / "rank-0-0000.bin").stat().st_nlink == 1
    assert [finding.file for finding in store.verify(before)] == ["rank-0-0000.bin"]


def test_what_is_copied_later_is_of_the_edge_and_the_wait_is_counted(trainer: OneRank) -> None:
    copying = trainer.save(7)

    assert copying is not None
    copying.wait()
    assert copying.finished.wait(PATIENCE_S)
    assert copying.waited_s >= 0


def test_a_save_to_a_tier_that_this_node_has_not_takes_no_room(trainer: OneRank) -> None:
    trainer.save_all(1)
    begun = trainer.saver.save(partial(copy_of_step, 2), "save2", ["local"])

    assert begun is None
    assert trainer.save(3) is not None
    assert trainer.save(4) is not None


def test_what_describes_a_state_may_grow_from_save_to_save(trainer: OneRank) -> None:
    """As a history does that a script keeps in its extras."""
    said = 400_000

    def begin(step: int, into: memoryview | None) -> Copying:
        return Copying({**state_of_step(step), "history": "x" * step * said}, step, into)

    for step in range(1, 17):
        assert trainer.save(step, begin=begin) is not None
        trainer.told.until(lambda step=step: step in trainer.told.saved())  # type: ignore[misc]

    assert 16 * said > 6 * SLACK_BYTES
    assert trainer.told.troubles() == []


def test_without_room_a_save_is_skipped_and_told(trainer: OneRank) -> None:
    trainer.save_all(1)
    trainer.told.until(trainer.saver.copy_buffers.all_free)
    os.kill(trainer.writer(), signal.SIGSTOP)
    began = [trainer.save(step, last=False) is not None for step in (2, 3, 4)]
    ready = [trainer.saver.prepare(unasked, ["shared"]) for _ in range(2)]
    os.kill(trainer.writer(), signal.SIGCONT)
    trainer.told.until(lambda: trainer.told.saved() == [1, 2, 3])

    assert began == [True, True, False]
    assert ready == [False, False]
    assert trainer.told.troubles() == ["checkpoint_skipped", "checkpoint_late"]
    skipped = next(one for one in trainer.told.messages if isinstance(one, Trouble))
    assert skipped.text.startswith("nothing was saved to shared: shared has the memory for copies")
    assert "every_s" in skipped.text


def test_of_a_store_that_stays_slow_an_engineer_is_told_once_until_it_was_on_time(
    trainer: OneRank,
) -> None:
    trainer.save_all(1)
    hold_up_the_next(trainer, 2)
    hold_up_the_next(trainer, 3)
    trainer.save_all(4)
    slow = trainer.told.troubles()
    trainer.save_all(5)
    hold_up_the_next(trainer, 6)

    assert slow == ["checkpoint_late"]
    assert trainer.told.troubles() == ["checkpoint_late"] * 2


def test_at_the_end_what_is_not_durable_yet_is_told_with_who_finishes_it(
    trainer: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.save_all(1)
    writer = trainer.writer()
    os.kill(writer, signal.SIGSTOP)
    trainer.save(2)
    monkeypatch.setattr(saver_module, "FINISH_S", 0.1)

    trainer.saver.finish()
    os.kill(writer, signal.SIGCONT)

    (told,) = [one for one in trainer.told.messages if isinstance(one, Trouble)]
    assert told.kind == "checkpoint_unfinished"
    assert told.text.startswith("not durable after 0.1 s: shared. The writers finish what they")


def hold_up_the_next(trainer: OneRank, step: int) -> None:
    """A save of this step is still being written when the next is due."""
    os.kill(trainer.writer(), signal.SIGSTOP)
    trainer.save(step, last=False)
    assert trainer.saver.ready(["shared"]) == set()
    os.kill(trainer.writer(), signal.SIGCONT)
    trainer.told.until(lambda: trainer.saver.ready(["shared"]) == {"shared"})
    trainer.told.until(lambda: not trainer.saver.dispatcher._asked)


def test_a_killed_writer_costs_its_save_and_the_next_succeeds(trainer: OneRank) -> None:
    trainer.save_all(1)
    os.kill(trainer.writer(), signal.SIGSTOP)
    trainer.save(2)
    trainer.told.until(lambda: ("shared", "save2") in trainer.saver.dispatcher._asked)
    os.kill(trainer.writer(), signal.SIGKILL)
    trainer.told.until(lambda: "checkpoint_failed" in trainer.told.troubles())

    trainer.save_all(3)

    assert trainer.saver.sources.saves() == [(3, "save3", "shared"), (1, "save1", "shared")]
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def test_a_folder_that_cannot_be_written_is_told_and_may_be_mended(
    trainer: OneRank, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    trainer.save(1)
    trainer.told.until(lambda: "checkpoint_failed" in trainer.told.troubles())
    (tmp_path / "checkpoints").unlink()

    trainer.save_all(2)

    assert trainer.saver.sources.saves() == [(2, "save2", "shared")]


def test_a_state_that_grows_gets_other_buffers(trainer: OneRank) -> None:
    trainer.save_all(1)
    trainer.saver.copy_buffers.prepare(1)
    larger = {"weight": torch.ones(16 << 20)}
    former = [weakref.ref(room.memory.obj) for room in trainer.saver.copy_buffers.there()[1]]

    trainer.saver.tiers = tiers_of(trainer.saver.job, 3600.0, 3, 1e-3)
    first = trainer.saver.save(lambda into: Copying(larger, 2, into), "larger")
    trainer.told.until(lambda: not any(area() for area in former))  # which unpins it too
    due = trainer.saver.due()
    again = trainer.saver.save(lambda into: Copying(larger, 2, into), "again", last=True)
    trainer.told.until(lambda: 2 in trainer.told.saved())

    assert (first, due, again and again.step) == (None, {"shared"}, 2)
    assert trainer.told.troubles() == []


def test_what_goes_wrong_with_each_save_is_told_once_until_one_is_without_it(
    trainer: OneRank, tmp_path: Path
) -> None:
    odd = tmp_path / "checkpoints" / ".writing-00000001-odd" / "rank-0.lock"  # no file
    odd.mkdir(parents=True)
    trainer.save_all(1, 2, 3)
    odd.rmdir()
    trainer.save_all(4)
    odd.mkdir()
    trainer.save_all(5, 6)

    assert trainer.told.troubles() == ["checkpoint_not_pruned"] * 2


def test_bytes_that_do_not_change_are_an_alarm(trainer: OneRank) -> None:
    trainer.save_all(1)
    trainer.saver.save(lambda into: stuck(2, into), "stuck", last=True)
    trainer.told.until(lambda: 2 in trainer.told.saved())

    (trouble,) = [m for m in trainer.told.messages if isinstance(m, Trouble)]
    assert trouble.kind == "checkpoint_stale"
    assert trouble.text.startswith(
        "step 2, shared: rank-0-0001.bin (rank 0), tensors model.weight: "
        "step 2 holds what step 1 held of all that is trained"
    )


def test_what_is_wrong_on_a_node_s_own_disk_is_named_with_the_rank_of_the_job(
    tmp_path: Path,
) -> None:
    """There each rank writes as the only one, into files that are named as the first one's."""
    trainer = OneRank(tmp_path, 1, 2, own_disk=True)
    asked: dict[str, Any] = {"tiers": ["local"], "last": True}
    trainer.saver.save(lambda into: copy_of_step(1, into), "save1", **asked)
    trainer.told.until(lambda: 1 in trainer.told.saved())
    (path,) = (tmp_path / "disk").glob("j/*/replica-0-rank-1/step-00000001")
    flip_a_bit(path / "rank-0-0001.bin", 80)
    with pytest.raises(Damaged, match=r"rank-0-0001\.bin \(rank 1\), tensors model\.weight"):
        trainer.saver.sources.read("save1", "local", 1)
    (found,) = store.verify(path)
    rot(path / "rank-0-0000.bin")  # which the next one shares with it
    trainer.saver.save(lambda into: stuck(2, into), "save2", **asked)
    trainer.told.until(lambda: 2 in trainer.told.saved())
    (path / "rank-0.json").unlink()
    (lacking,) = store.verify(path)

    troubles = [one for one in trainer.told.messages if isinstance(one, Trouble)]
    told = {one.kind: one.text for one in troubles}
    assert {one.subject for one in troubles} == {"local"}
    assert "rank-0-0000.bin (rank 1), tensors base" in told["checkpoint_damaged"]
    assert "rank-0-0001.bin (rank 1), tensors model.weight" in told["checkpoint_stale"]
    assert (found.rank, lacking.rank) == (1, 1)
    assert "the tensors of rank 1 are expected there" in lacking.what


def stuck(step: int, into: memoryview | None) -> Copying:
    copying = copy_of_step(1, into)
    copying.step = step
    return copying


def test_two_ranks_make_one_checkpoint(tmp_path: Path) -> None:
    ranks = [OneRank(tmp_path, rank, 2) for rank in (0, 1)]
    for rank in ranks:
        assert rank.save(7) is not None
    for rank in ranks:
        rank.saver.finish()

    (told,) = [one for rank in ranks for one in rank.told.messages]
    assert isinstance(told, CheckpointSaved)
    assert (told.bytes, told.path) == (2 * SIZE, str(tmp_path / "checkpoints" / "step-00000007"))
    assert [rank.saver.sources.saves() for rank in ranks] == [[(7, "save7", "shared")]] * 2
    images = [ranks[0].saver.sources.read("save7", "shared", rank) for rank in (0, 1)]
    assert [image.digest for image in images] == [staged_at(7).digest] * 2


def test_another_number_of_ranks_finds_the_checkpoint(tmp_path: Path) -> None:
    OneRank(tmp_path).saver.folders.shared.mkdir()
    pair = [OneRank(tmp_path, rank, 2) for rank in (0, 1)]
    for rank in pair:
        assert rank.save(7) is not None
    for rank in pair:
        rank.saver.finish()

    for other in (OneRank(tmp_path, 0, 1), OneRank(tmp_path, 1, 4)):
        assert other.saver.sources.saves() == [(7, "save7", "shared")]
        assert other.saver.sources.ranks("save7", "shared") == 2


def test_a_damaged_checkpoint_is_told_and_not_read(trainer: OneRank) -> None:
    trainer.save_all(1, 2)
    (trainer.saver.folders.shared / "step-00000002" / "rank-0-0001.bin").write_bytes(b"short")

    with pytest.raises(Damaged, match=r"rank-0-0001.bin \(rank 0\)"):
        trainer.saver.sources.read("save2", "shared", 0)
    assert trainer.saver.sources.read("save1", "shared", 0).step == 1


def test_checkpoints_of_which_none_can_be_read_are_not_taken_for_none(trainer: OneRank) -> None:
    trainer.save_all(1)
    (trainer.saver.folders.shared / "step-00000001" / "manifest.json").write_text("{}")

    with pytest.raises(ValueError, match=r"the 1 .* can be read \(.*m runtime.check") as error:
        trainer.saver.sources.saves()
    assert "manifest.json is no checkpoint's JSON: " in str(error.value)
    assert str(error.value).count("python -m runtime.checkpoint verify") == 1


def test_that_all_are_of_another_version_says_what_to_do(trainer: OneRank) -> None:
    trainer.save_all(1)
    manifest = trainer.saver.folders.shared / "step-00000001" / "manifest.json"
    said = {**json.loads(manifest.read_bytes()), "version": 5}
    del said["self"]
    manifest.write_bytes(sealed(said))

    with pytest.raises(ValueError, match=r"can be read \(.* version 5, .*--upgrade .*\): mend"):
        trainer.saver.sources.saves()


def test_a_copy_that_is_interrupted_keeps_no_room(trainer: OneRank) -> None:
    def begin(_into: memoryview | None) -> Copying:
        raise KeyboardInterrupt

    trainer.save_all(1)
    trainer.told.until(trainer.saver.copy_buffers.all_free)
    with pytest.raises(KeyboardInterrupt):
        trainer.saver.save(begin, "x", last=True)

    assert trainer.saver.copy_buffers.all_free()


def test_a_state_of_which_no_copy_can_be_made_costs_no_step(trainer: OneRank) -> None:
    def begin(_into: memoryview | None) -> Copying:
        raise TypeError("state.extra is a set")

    trainer.save_all(1)
    trainer.saver.tiers = tiers_of(trainer.saver.job, 3600.0, 3, 1e-3)
    assert trainer.saver.save(begin, "x", last=True) is None
    assert not trainer.saver.due()  # it is not tried again at each edge
    trainer.save_all(2)

    failed, well = [m for m in trainer.told.messages if isinstance(m, Trouble)]
    assert (failed.kind, failed.subject) == ("checkpoint_failed", "shared")
    assert "state.extra is a set" in failed.text
    assert f"see that {trainer.saver.folders.shared} answers" in failed.text
    assert well.kind == "checkpoint_recovered"


def test_a_state_that_has_no_size_costs_no_step_before_there_is_room(trainer: OneRank) -> None:
    def fails(*_given: object) -> NoReturn:
        raise TypeError("state.extra is a set")

    ready = trainer.saver.prepare(fails)
    trainer.told.until(trainer.saver.copy_buffers.any_free)
    begun = trainer.saver.save(fails, "x")
    trainer.save_all(2)

    assert (ready, begun) == (False, None)
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def test_where_no_thread_can_be_started_the_training_goes_on(
    trainer: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", fails)
        ready = [trainer.saver.prepare(lambda: SIZE) for _ in range(2)]
        begun = trainer.saver.save(partial(copy_of_step, 1), "save1")
    trainer.save_all(2)

    assert (ready, begun) == ([False, False], None)
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def test_a_long_description_gets_room_for_the_next_save(trainer: OneRank) -> None:
    trainer.save_all(1)
    long = {"ids": list(range(2_000_000))}
    trainer.saver.save(lambda into: Copying(long, 2, into), "first", last=True)
    trainer.told.until(lambda: "checkpoint_failed" in trainer.told.troubles())

    trainer.saver.save(lambda into: Copying(long, 3, into), "second", last=True)
    trainer.told.until(lambda: 3 in trainer.told.saved())

    assert trainer.told.saved() == [1, 3]
    assert state_of(trainer.saver.sources.read("second", "shared", 0)) == long


def test_the_last_save_of_a_job_that_had_made_no_room_is_made(trainer: OneRank) -> None:
    large = {"weight": torch.ones(4 << 20)}

    copying = trainer.saver.save(lambda into: Copying(large, 1, into), "only", last=True)
    trainer.told.until(lambda: 1 in trainer.told.saved())

    assert copying is not None
    assert trainer.told.troubles() == []


def test_the_last_save_is_made_also_where_memory_could_not_be_had_just_now(
    trainer: OneRank,
) -> None:
    trainer.save_all(1)
    trainer.saver.copy_buffers._put_off(MemoryError("none"))
    large = {"weight": torch.ones(4 << 20)}
    tried: list[memoryview | None] = []

    def begin(into: memoryview | None) -> Copying:
        tried.append(into)
        return Copying(large, 2, into)

    copying = trainer.saver.save(begin, "only", last=True)
    trainer.told.until(lambda: 2 in trainer.told.saved())

    assert copying is not None
    assert len(tried) == 2  # what is too small, and what was made then
    assert trainer.told.troubles() == ["no_room_for_checkpoints"]


def test_a_writer_that_died_takes_no_room_that_was_given_to_the_next(trainer: OneRank) -> None:
    trainer.save_all(1)
    trainer.told.until(lambda: not trainer.saver.dispatcher._asked)
    life = trainer.saver.dispatcher._writers["shared"]._life
    os.kill(trainer.writer(), signal.SIGSTOP)
    for step in (2, 3):
        trainer.save(step)
    trainer.told.until(lambda: len(trainer.saver.dispatcher._asked) == 2)

    trainer.saver.dispatcher._hear("shared", {"op": "died", "life": life - 1, "code": -9})

    assert not trainer.saver.copy_buffers.any_free()
    os.kill(trainer.writer(), signal.SIGCONT)
    trainer.told.until(lambda: trainer.told.saved() == [1, 2, 3])


class Interrupted(Copying):
    """A copy that fails in one of its tensors."""

    def __init__(self, name: str, step: int, into: memoryview | None) -> None:
        self.name = name
        super().__init__(state_of_step(step), step, into, due)

    def _copy(self, piece: Piece, tensor: torch.Tensor) -> None:
        if piece.name == self.name:
            raise MemoryError("no more")
        super()._copy(piece, tensor)


@pytest.mark.parametrize("name", [".base", ".model.weight"])
def test_a_copy_that_fails_becomes_no_checkpoint(
    trainer: OneRank, tmp_path: Path, name: str
) -> None:
    """Whether the writer was asked before or not."""
    trainer.save_all(3)

    copying = trainer.save(4, begin=partial(Interrupted, name))
    assert copying is not None
    copying.wait()
    trainer.told.until(lambda: "checkpoint_failed" in trainer.told.troubles())
    trainer.save_all(5)

    (told, again) = [one for one in trainer.told.messages if isinstance(one, Trouble)]
    assert "no more" in told.text
    assert again.kind == "checkpoint_recovered"
    assert [path.name for path in store.candidates(tmp_path / "checkpoints")] == [
        "step-00000005",
        "step-00000003",
    ]
    assert not list((tmp_path / "checkpoints").glob(".writing-*"))


def test_that_the_object_store_fails_is_told_anew_once_others_may_have_written_there(
    trainer: OneRank,
) -> None:
    dispatcher = trainer.saver.dispatcher
    for came, gone in ((False, False), (False, True)):
        dispatcher.failed("object", "no route")
        dispatcher.failed("object", "no route")
        dispatcher.regrouped(came=came, gone=gone)
    dispatcher.failed("local", "no space")
    dispatcher.regrouped(came=True, gone=True)
    dispatcher.failed("local", "no space")

    told = [one.subject for one in trainer.told.messages if isinstance(one, Trouble)]
    assert told == ["object", "object", "local"]
