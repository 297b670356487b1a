"""Replicas that share out one checkpoint among their writers."""

from __future__ import annotations

import os
import queue
import signal
from pathlib import Path

from runtime.checkpoint import store
from runtime.checkpoint.dispatch import UNSEEN
from runtime.client import CheckpointSaved
from tests.runtime.checkpoint.one_rank import PATIENCE_S, SIZE, OneRank
from tests.runtime.checkpoint.states import (
    staged_at,
)


def test_one_rank_s_failure_is_one_alarm(tmp_path: Path) -> None:
    ranks = [OneRank(tmp_path, rank, 2) for rank in (0, 1)]
    for rank in ranks:
        rank.save(1)
    ranks[0].told.until(lambda: any(1 in rank.told.saved() for rank in ranks))
    os.kill(ranks[0].writer(), signal.SIGSTOP)
    ranks[0].save(2)
    in_the_way = ranks[0].saver.folders.shared / ".writing-00000002-save2" / "rank-1-0000.bin"
    in_the_way.mkdir(parents=True)
    ranks[1].save(2)
    ranks[1].told.until(lambda: "checkpoint_failed" in ranks[1].told.troubles())
    os.kill(ranks[0].writer(), signal.SIGCONT)
    for rank in ranks:
        rank.save(3)
    for rank in ranks:
        rank.saver.finish()

    assert [rank.told.troubles().count("checkpoint_failed") for rank in ranks] == [0, 1]
    assert ranks[0].saver.sources.saves() == [(3, "save3", "shared"), (1, "save1", "shared")]


def test_replicas_that_share_out_make_one_checkpoint(tmp_path: Path) -> None:
    replicas = [OneRank(tmp_path) for _ in range(3)]
    for number, one in enumerate(replicas):
        assert one.save(7, share=(number, 3)) is not None
    for one in replicas:
        one.saver.finish()

    (told,) = [message for one in replicas for message in one.told.messages]
    assert isinstance(told, CheckpointSaved)
    assert (told.bytes, told.digest) == (SIZE, staged_at(7).digest)
    assert store.verify(Path(told.path)) == []


def without_room_for_a_share(tmp_path: Path) -> OneRank:
    """One whose share of a save could not be written."""
    one = OneRank(tmp_path)
    failed: queue.SimpleQueue[bool] = queue.SimpleQueue()
    one.saver.dispatcher.on_shared_failed = failed.put
    one.saver.dispatcher.sees_others = True
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".writing-00000007-save7").write_text("in the way")
    assert one.save(7, share=(1, 2)) is not None
    assert failed.get(timeout=PATIENCE_S)  # a share, and not all
    one.told.until(lambda: not one.saver.dispatcher.busy(["shared"]))
    assert store.candidates(folder) == []
    return one


def test_a_share_that_fails_is_told_once_another_could_write(tmp_path: Path) -> None:
    one = without_room_for_a_share(tmp_path)
    early = one.told.troubles()
    could_share = one.saver.can_share()

    for _ in range(2):
        one.saver.dispatcher.look("save8")
        one.told.until(lambda: not one.saver.dispatcher._looking)
    one.saver.finish()

    assert (early, could_share) == ([], False)
    assert one.told.troubles() == ["checkpoint_failed"]


def test_where_one_alone_fails_too_the_others_are_silent(tmp_path: Path) -> None:
    one = without_room_for_a_share(tmp_path)

    one.saver.dispatcher.forgive(told=True)
    one.saver.dispatcher.look("save8")
    one.saver.finish()

    assert one.told.troubles() == []


def test_of_a_folder_that_nobody_can_write_to_one_tells(tmp_path: Path) -> None:
    """They take turns to write alone: the second fails as the first did."""
    first, second = OneRank(tmp_path), OneRank(tmp_path)
    first.save_all(1)
    failing_in_the_folder_of_all(first, 2)
    for one in (first, second):
        one.saver.dispatcher.forgive(told=True)
    failed: queue.SimpleQueue[bool] = queue.SimpleQueue()
    second.saver.dispatcher.on_shared_failed = failed.put

    second.save(2)
    assert not failed.get(timeout=PATIENCE_S)
    silent = second.told.troubles()
    second.saver.dispatcher.regrouped(came=False, gone=True)
    failing_in_the_folder_of_all(second, 3)
    for one in (first, second):
        one.saver.finish()

    assert silent == []


def test_who_sees_what_another_wrote_can_share(tmp_path: Path) -> None:
    writes, looks = OneRank(tmp_path), OneRank(tmp_path)
    apart = OneRank(tmp_path / "elsewhere")
    for one in (writes, looks, apart):
        one.save_all(3)
        one.saver.dispatcher.sees_others = False
    writes.save(4, "epoch9x4")
    writes.told.until(lambda: 4 in writes.told.saved())

    looks.saver.dispatcher.look("epoch9")
    for _ in range(2 * UNSEEN):
        apart.saver.dispatcher.look("epoch9")
        apart.told.until(lambda: not apart.saver.dispatcher._looking)
    looks.told.until(lambda: looks.saver.dispatcher.sees_others)
    for one in (writes, looks, apart):
        one.saver.finish()  # all that was asked is answered

    assert (writes.saver.dispatcher.sees_others, apart.saver.dispatcher.sees_others) == (
        True,
        False,
    )
    assert (looks.told.troubles(), apart.told.troubles()) == ([], ["checkpoints_not_shared"])


def test_what_others_wrote_is_looked_for_again_once_somebody_came(trainer: OneRank) -> None:
    """With another folder, perhaps: who had found the same may be the only ones to notice."""
    stays, goes, comes = ({"replica": 0, "placement": name, "holders": []} for name in "abc")
    sees = []
    for members in ([stays, goes], [stays], [stays, comes]):
        trainer.saver.dispatcher.sees_others = True
        trainer.saver.meet(members, 0)
        sees.append(trainer.saver.dispatcher.sees_others)

    assert sees == [False, True, False]


def failing_in_the_folder_of_all(trainer: OneRank, step: int) -> Path:
    """One that has just told that it could not write there; what is in its way."""
    folder = trainer.saver.folders.shared
    in_the_way = folder / f".writing-{step:08d}-save{step}"
    in_the_way.write_text("no folder")
    trainer.save(step)
    trainer.told.until(lambda: "checkpoint_failed" in trainer.told.troubles())
    return in_the_way


def test_who_could_not_write_and_sees_what_another_wrote_is_well_again(tmp_path: Path) -> None:
    """Another writes alone from then on, as one that came back with a lower number does."""
    fails, writes = OneRank(tmp_path), OneRank(tmp_path)
    fails.save_all(3)
    in_the_way = failing_in_the_folder_of_all(fails, 4)
    in_the_way.unlink()
    writes.save_all(5)

    fails.saver.dispatcher.look("save5")
    fails.told.until(lambda: fails.saver.dispatcher.sees_others)
    again = failing_in_the_folder_of_all(fails, 6)
    fails.told.until(lambda: len(fails.told.troubles()) == 3)
    for one in (fails, writes):
        one.saver.finish()

    assert again.exists()
    assert fails.told.troubles() == [
        "checkpoint_failed",
        "checkpoint_recovered",
        "checkpoint_failed",
    ]


def test_who_sees_what_another_wrote_in_its_stead_is_not_well_for_that(tmp_path: Path) -> None:
    one, writes = without_room_for_a_share(tmp_path), OneRank(tmp_path)
    writes.save_all(8)

    for _ in range(2):
        one.saver.dispatcher.look("save8")
        one.told.until(lambda: not one.saver.dispatcher._looking)
    one.told.until(lambda: one.saver.dispatcher.sees_others)
    for each in (one, writes):
        each.saver.finish()

    assert one.told.troubles() == ["checkpoint_failed"]


def test_a_writer_that_died_is_started_to_look(tmp_path: Path) -> None:
    one = OneRank(tmp_path)
    one.save_all(3)
    one.saver.dispatcher.sees_others = False
    os.kill(one.writer(), signal.SIGKILL)
    one.told.until(lambda: one.saver.dispatcher._writers["shared"].pid is None)

    one.saver.dispatcher.look("save3")
    one.told.until(lambda: not one.saver.dispatcher._looking)
    one.saver.finish()

    assert one.saver.dispatcher.sees_others
    assert one.told.troubles() == []
