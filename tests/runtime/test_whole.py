"""A job of a shape that cannot drop: what it is told at the start, and that it is recovered."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

import runtime
from runtime import stalls
from runtime.checkpoint import facts, store
from runtime.checkpoint.draft import write
from runtime.checkpoint.suspects import TOO_MANY, TRIAL_STEPS, DoesNotTrain
from runtime.checkpoint.tiers import TIERS
from runtime.client import CheckpointSaved, Directive
from runtime.image import Damaged, Staged
from runtime.replica.division import Division
from runtime.replica.gloo import Gloo
from runtime.replica.observing import Observer
from runtime.replica.rank import Rank
from runtime.replica.state import TrainingState
from runtime.replica.step import StepEngine
from runtime.replica.together import MAX_TRIES
from runtime.snapshot import room_for
from runtime.whole import newest
from runtime.whole.job import due_in
from runtime.whole.newest import Found, Newest
from tests.runtime.checkpoint.states import hanging
from tests.runtime.replicas import PATIENCE_S, until
from tests.runtime.whole_runs import (
    NEVER,
    NEVER_S,
    Alone,
    imported_into,
    local_saves,
    told,
    trainee,
)


class Odd(torch.Tensor):
    """More than its elements."""


def loader() -> Any:
    return StatefulDataLoader(range(8), shuffle=True)


def part_of_rank(step: int) -> CheckpointSaved:
    return CheckpointSaved(
        step=step, tier="local", path="here", bytes=10, digest=f"{step:032x}", stall_s=0.0,
        seconds=1.0, at=1.0,
    )  # fmt: skip


def test_what_is_whole_on_all_ranks_is_known_from_what_each_has(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = iter([5, 5, 9])  # what another rank has verified last

    def most(told: torch.Tensor, _op: Any, group: Any) -> None:
        other = next(others)
        of_local = told[-3::2]  # that of peers' memory comes before each
        of_local[:] = torch.maximum(of_local, torch.tensor([other, -other]))

    known = []
    with alone.start() as whole:
        monkeypatch.setattr(dist, "all_reduce", most)
        for ours in (5, 7, 9):
            whole._on_saved(part_of_rank(ours))
            whole._at_edge()
            known.append(whole.saver.delivery.common["local"])
        monkeypatch.undo()

    assert known == [5, 5, 9]
    assert [one["step"] for one in local_saves(alone.door)] == [5, 9]


def test_a_rank_whose_state_outgrew_its_room_has_all_save_again(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    with alone.start() as whole:
        until(lambda: whole.saver.prepare(lambda: room_for(whole._state())), "there is room")
        alone.kept.held = torch.zeros(8 << 20)
        whole._save(["local", "shared"])
        monkeypatch.setattr(whole, "job", replace(whole.job, rank=1))
        monkeypatch.setattr(dist, "all_reduce", lambda told, *_, **__: asked.append(told.tolist()))
        whole._at_edge()
        monkeypatch.undo()

    (told,) = asked
    wanted = {name for name, flag in zip(TIERS, told[2:], strict=False) if flag}
    assert wanted == {"local", "shared"}


def test_what_is_saved_again_and_does_not_train_is_told(alone: Alone) -> None:
    alone.door.refuses = "none of these"
    with alone.start(local=0.0) as whole:
        steps = whole.steps(NEVER)
        until(
            lambda: next(steps) >= 0 and len({*alone.saved(whole, "local")}) >= 2,
            "two are there",
        )

    told = next(one for one in alone.door.messages("trouble") if one["kind"] == "checkpoint_stale")
    assert "tensors model.weight, model.bias" in told["text"]
    assert "either nothing is learnt, or what is saved is not what is trained" in told["text"]


def test_what_is_not_trained_is_written_once_and_taken_up_by_a_script_that_trains_it(
    alone: Alone, tmp_path: Path
) -> None:
    def trainee() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        base, head = torch.nn.Linear(600, 600), torch.nn.Linear(600, 2)
        model = torch.nn.Sequential(base.requires_grad_(requires_grad=False), head)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    alone.trainee = trainee
    with alone.start(shared=0.0) as whole:
        model: Any = whole.model
        optimizer: Any = whole.optimizers[0]
        steps = whole.steps(NEVER)

        def two_are_there() -> bool:
            model(torch.ones(600)).sum().backward()
            optimizer.step()
            return next(steps) >= 0 and len({*alone.saved(whole, "shared")}) >= 2

        next(steps)
        until(two_are_there, "two are there")
    files = [
        [one.stat().st_ino for one in sorted(path.glob("*.bin"))]
        for path in store.candidates(tmp_path / "state" / "checkpoints")[:2]
    ]
    again: Any = alone.start()
    again.model.requires_grad_()
    with again:
        list(again.steps(1))

    assert [one == other for one, other in zip(*files, strict=True)] == [True, False]
    assert "checkpoint_not_restored" not in alone.troubles()


@pytest.mark.parametrize("every", [1, 10])
def test_a_state_that_leads_to_nan_is_not_saved_nor_loaded_again(alone: Alone, every: int) -> None:
    def diverge(whole: runtime.WholeJob) -> None:
        with whole:
            for step in whole.steps(NEVER):
                for _ in range(step % every == 0):
                    whole.tell(math.nan)

    first, _ = alone.trained(3)
    alone.trained(2)
    bad = alone.start(local=0.0)
    with pytest.raises(DoesNotTrain, match="after the state of step 4 "):
        diverge(bad)
    saved = alone.saved(bad, "local")
    with alone.start() as whole:
        begins = whole.committed + 1
        list(whole.steps(begins + 1))

    assert bad.committed == -(-5 // every) * every + (TOO_MANY - 1) * every
    assert (max(saved), begins) == (4, 3)
    assert whole.saver.delivery.began["epoch"] == first


def test_of_a_loop_that_tells_no_losses_some_steps_are_waited_for(alone: Alone) -> None:
    alone.trained(1)
    with alone.start(local=0.0) as whole:
        steps = whole.steps(NEVER)
        until(lambda: next(steps) >= 0 and max(alone.saved(whole, "local")) > 0, "one is there")

    assert max(alone.saved(whole, "local")) >= TRIAL_STEPS


def test_a_state_that_trains_is_saved_again_once_that_shows(alone: Alone) -> None:
    alone.trained(1)
    saved = []
    with alone.start(local=0.0) as whole:
        for step in whole.steps(TRIAL_STEPS + 1):
            whole.tell(1.0)
            saved += [step] if whole.saver.delivery.busy(["local"]) else []
        until(lambda: not whole.saver.delivery.busy(["local"]), "it is durable")

    assert saved == []
    assert whole._trial is None


def test_what_all_ranks_have_on_their_disks_is_known_from_the_start(alone: Alone) -> None:
    """And stays, if a disk fails before they have another one."""
    alone.trained(1)
    alone.trained(2)
    (newest, older) = store.candidates(next((alone.folder / "disk").glob("*/*/*")))
    store.remove(newest)

    with alone.start() as whole:
        common = dict(whole.saver.delivery.common)

    assert whole.committed == 2
    assert common == {"local": store.number_of(older)[0]} == {"local": 0}


def refusing(whole: runtime.WholeJob, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of those that it tries to read, and cannot, from now on."""
    tried: list[str] = []

    def read(name: str, *_where: object, **_also: object) -> Staged:
        tried.append(name)
        raise Damaged("a bit")

    monkeypatch.setattr(whole.saver.sources, "ranks", lambda *_asked, **_also: 1)
    monkeypatch.setattr(whole.saver.sources, "read", read)
    return tried


def newest_of(whole: runtime.WholeJob) -> Newest:
    return Newest(whole.job, whole.saver, whole._ranks, whole._start)


def test_a_tier_of_which_two_checkpoints_fail_comes_after_the_others(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[Found] = [
        (9, "d", "local"), (8, "c", "local"), (7, "b", "local"), (5, "a", "shared"),
    ]  # fmt: skip
    with alone.start() as whole:
        tried = refusing(whole, monkeypatch)
        with pytest.raises(ValueError, match="none of the 4 checkpoints of this job can be loaded"):
            newest_of(whole).load(there, there)

    assert tried == ["d", "c", "a", "b"]


def test_what_another_rank_refuses_is_not_read_to_its_end(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newest, "LOOK_S", 0.0)

    def endless(*_where: object, progress: Callable[[int], object]) -> Staged:
        until(lambda: progress(1), "the block comes after which it is given up")
        raise AssertionError("nothing was there to be read")

    with alone.start() as whole:
        refusing(whole, monkeypatch)
        refused = newest_of(whole).read("d", "shared")
        monkeypatch.setattr(whole, "job", replace(whole.job, ranks=2))
        monkeypatch.setattr(whole.saver.sources, "ranks", lambda *_asked, **_also: 2)
        monkeypatch.setattr(whole.saver.sources, "read", endless)
        given_up = newest_of(whole).read("d", "shared")
        monkeypatch.undo()

    assert refused is given_up is None
    assert alone.troubles() == ["checkpoint_refused"]  # by the one whose part it is


def test_a_bounded_number_of_checkpoints_is_tried_before_a_person_has_to_look(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[Found] = [(step, f"save{step}", "shared") for step in range(MAX_TRIES + 3, 0, -1)]
    with alone.start() as whole:
        tried = refusing(whole, monkeypatch)
        with pytest.raises(ValueError, match="none of the 11 checkpoints of this job can be"):
            newest_of(whole).load(there, there)

    assert len(tried) == MAX_TRIES


def test_told_to_stop_it_saves_its_last_step_to_every_tier(alone: Alone) -> None:
    with alone.start(local=0.0) as whole:
        steps = whole.steps(10)
        made = [next(steps), next(steps)]  # at the edge between them it begins to make room
        until(lambda: whole.saver.is_free("local"), "there is room")
        whole.job.stop.set()
        made += [*steps, *whole.steps(20)]

    assert made == [0, 1]
    assert alone.saved(whole, "local") == alone.saved(whole, "shared") == [1]


def test_a_weight_without_elements_lies_where_it_lay() -> None:
    model = torch.nn.Linear(3, 0).requires_grad_(requires_grad=False)
    due = due_in(model)

    assert due(".model.weight", model.weight) == "now"


def test_told_to_stop_it_saves_to_no_tier_that_would_hold_up_another(alone: Alone) -> None:
    with alone.start() as whole:
        steps = whole.steps(NEVER)
        next(steps)
        whole.saver.tiers["local"].pace.note(0.0, 14.0)
        whole.saver.tiers["shared"].pace.note(0.0, 17.0)
        whole.job.told.set()  # 30 s are left
        assert list(steps) == []

    assert alone.saved(whole, "local") == [0]
    assert alone.saved(whole, "shared") == []


@pytest.mark.parametrize("notices", [["30", "3600"], ["3600", "30"]])
def test_of_several_notices_the_one_counts_that_leaves_the_least_time(
    alone: Alone, notices: list[str]
) -> None:
    notice = alone.folder / "notice"
    with alone.start(notice_file=notice) as whole:
        steps = whole.steps(NEVER)
        next(steps)
        whole.saver.tiers["local"].pace.note(0.0, 14.0)
        whole.saver.tiers["shared"].pace.note(0.0, 17.0)
        for seconds in notices:
            notice.write_text(seconds)
            whole.job.told.set()
        assert list(steps) == []

    assert alone.saved(whole, "local") == [0]
    assert alone.saved(whole, "shared") == []


@pytest.mark.parametrize(("wish", "because"), [("stop", "over"), ("told", "told")])
def test_it_says_whether_its_job_is_over_or_it_alone_was_told_to_end(
    alone: Alone, wish: str, because: str
) -> None:
    with alone.start() as whole:
        for _step in whole.steps(NEVER):
            getattr(whole.job, wish).set()

    assert [said["because"] for said in alone.door.messages("stopped")] == [because]


def test_a_job_is_over_once_all_its_steps_are_made_and_not_when_a_loop_is_left(
    alone: Alone,
) -> None:
    with alone.start() as left:
        list(left.steps(1))
        next(left.steps(3))
    with alone.start() as done:
        list(done.steps(3))

    assert [said["because"] for said in alone.door.messages("stopped")] == ["", "over"]


def test_a_checkpoint_that_is_asked_for_is_made_in_a_busy_tier_too(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone.start() as whole:
        steps = whole.steps(NEVER)
        until(lambda: next(steps) >= 0 and whole.saver.is_free("local"), "there is room")
        free = whole.saver.is_free
        monkeypatch.setattr(whole.saver, "is_free", lambda tier: tier != "shared" and free(tier))
        whole._on_directive(Directive(id="dir_1", verb="checkpoint"))
        until(lambda: next(steps) >= 0 and alone.saved(whole, "local"), "one tier is free")
        busy = alone.saved(whole, "shared")
        monkeypatch.undo()
        until(lambda: next(steps) >= 0 and alone.saved(whole, "shared"), "the other one is")

    assert busy == []


def test_where_there_is_no_room_for_what_is_due_that_is_told(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone.start() as whole:
        steps = whole.steps(NEVER)
        until(lambda: next(steps) >= 0 and whole.saver.is_free("local"), "there is room")
        monkeypatch.setattr(whole.saver.rooms, "any_free", lambda: False)
        whole._on_directive(Directive(id="dir_1", verb="checkpoint"))
        next(steps)
        monkeypatch.undo()
        whole.job.stop.set()
        list(steps)

    assert alone.troubles() == ["checkpoint_late"] * 2
    assert [one["subject"] for one in alone.door.messages("trouble")] == ["local", "shared"]


def test_on_one_node_memory_is_no_tier(alone: Alone, tmp_path: Path) -> None:
    """It would be lost with the node, whose disk is not."""
    job = alone.join(DRYDOCK_HOLDER_DIR=str(tmp_path / "memory"))
    saver = runtime.Checkpointer(job, every_s=NEVER_S)

    with runtime.WholeJob(job, *trainee(), saver) as whole:
        list(whole.steps(1))

    assert sorted(saver.tiers) == ["local", "shared"]
    assert alone.saved(whole, "local") == alone.saved(whole, "shared") == [0]
    assert not (tmp_path / "memory").exists()
    assert alone.troubles() == []


def test_what_could_not_be_copied_at_the_last_edge_is_saved_at_the_end(alone: Alone) -> None:
    with alone.start(shared=0.0) as whole:
        steps = whole.steps(2)
        made = [next(steps), next(steps)]
        until(lambda: whole.saver.is_free("shared"), "there is room")
        alone.kept.held = torch.zeros(4 << 20)  # more than there is room for
        made += steps

    assert made == [0, 1]
    assert alone.saved(whole, "local") == alone.saved(whole, "shared") == [1]


def test_what_failed_at_the_last_edge_is_saved_at_the_end(alone: Alone) -> None:
    with alone.start(local=0.0) as whole:
        steps = whole.steps(2)
        made = [next(steps), next(steps)]
        until(lambda: whole.saver.is_free("local"), "there is room")
        (alone.folder / "disk").write_text("in the way")
        made += steps
        until(lambda: whole.saver.delivery.unwell() == {"local"}, "it has failed")
        until(lambda: whole.saver.is_free("local"), "its writer is done")
        (alone.folder / "disk").unlink()

    assert made == [0, 1]
    assert alone.saved(whole, "local") == alone.saved(whole, "shared") == [1]


def test_what_is_tried_again_where_all_save_takes_no_place_of_what_may_be_there(
    alone: Alone,
) -> None:
    with alone.start(shared=0.0) as whole:
        steps = whole.steps(2)
        made = [next(steps), next(steps)]
        until(lambda: whole.saver.is_free("shared"), "there is room")
        made += steps
        until(lambda: alone.saved(whole, "shared") == [1], "it is there")
        until(lambda: whole.saver.is_free("shared"), "its writer is done")
        whole.saver.delivery.failed("shared", "no word of it came")

    (path, *others) = store.candidates(alone.folder / "state" / "checkpoints")
    assert store.manifest_of(path).save == f"{whole._start}x1again"
    assert store.manifest_of(others[0]).save == f"{whole._start}x1"


def test_what_a_tier_has_is_not_saved_to_it_again(alone: Alone) -> None:
    with alone.start() as first:
        list(first.steps(2))
    with alone.start() as again:
        left = list(again.steps(2))

    assert left == []
    assert alone.saved(again, "local") == alone.saved(again, "shared") == [1]


def test_what_a_start_made_that_was_lost_is_no_later_than_what_was_made_since(
    alone: Alone,
) -> None:
    """Its node was down meanwhile, and nobody else has seen of its later starts."""
    first, *others = (alone.trained(2, disk="a"), alone.lost(disk="a"), alone.lost(disk="a"))
    elsewhere, begins = alone.trained(3, disk="b")
    again = alone.trained(1, disk="a")

    assert [epoch for epoch, _ in (first, *others)] == [1, 2, 3]
    assert (elsewhere, begins) == (4, 2)
    assert again == (5, 5)


def test_the_log_says_that_another_torch_made_what_it_goes_on_from(
    alone: Alone, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as then:
        then.setattr(facts, "version_of", lambda module: "1.0")
        alone.trained(1)
    alone.trained(1)
    alone.trained(1)

    assert caplog.text.count("torch was '1.0', is '2.") == 1


def test_a_start_is_later_than_all_that_is_there_though_it_cannot_be_loaded(alone: Alone) -> None:
    alone.trained(1)
    alone.lost()
    for data in (alone.folder / "disk").glob("**/step-*/rank-0-*.bin"):
        data.write_bytes(b"?")
    for number in (alone.folder / "state" / "checkpoints").glob("epoch-*"):
        number.unlink()

    assert alone.trained(1) == (3, 1)


def test_while_the_shared_folder_hangs_it_goes_on_from_its_own_disk(alone: Alone) -> None:
    alone.trained(1)
    _, lost_from = alone.lost()

    with hanging(alone.folder / "state" / "checkpoints" / "run"), alone.start() as whole:
        step = next(whole.steps(NEVER))

    assert (whole.epoch, step > lost_from) == (3, True)
    assert alone.troubles().count("checkpoints_out_of_reach") == 1


def test_where_starts_cannot_be_counted_the_checkpoints_tell_which_it_is(alone: Alone) -> None:
    alone.trained(1)
    alone.lost()
    shared = alone.folder / "state" / "checkpoints"
    shared.rename(shared.with_name("away"))
    shared.write_text("in the way")

    with alone.start() as whole:
        epoch = whole.epoch

    assert epoch == 3


def test_a_step_that_the_loop_was_left_in_is_not_saved_and_that_is_told(
    alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    with alone.start() as first:
        list(first.steps(2))
    with alone.start() as left:
        for _step in left.steps(10):
            break
    with alone.start() as again:
        step = next(again.steps(10))

    assert alone.saved(again, "shared") == [1]
    assert step == 2
    assert alone.troubles() == ["left_in_a_step", "left_in_a_step"]
    assert "set job.stop" in alone.door.messages("trouble")[0]["text"]
    assert "the loop of step 2 was left in the middle" in caplog.text


def test_a_rank_that_hangs_in_a_step_says_where(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "LOOK_S", 0.05)
    with alone.start(stalled_after_s=0.5) as whole:
        steps = whole.steps(NEVER)
        for _ in range(stalls.FIRST_STEPS + 1):
            next(steps)
        until(lambda: "stalled" in alone.troubles(), "an engineer is told")

    (told,) = [one for one in alone.door.messages("trouble") if one["kind"] == "stalled"]
    assert "test_whole.py" in told["text"]


def test_who_has_left_a_step_in_the_middle_makes_no_other(alone: Alone) -> None:
    with alone.start() as left:
        next(left.steps(10))
        with pytest.raises(RuntimeError, match=r"step 0 was left in the middle"):
            next(left.steps(10))

    assert alone.saved(left, "shared") == []


def test_a_loss_may_be_told_as_the_tensor_that_it_is(alone: Alone) -> None:
    weight = torch.ones(1, requires_grad=True)

    with alone.start() as whole:
        for _step in whole.steps(2):
            whole.tell(2 * weight.mean(), 8)

    assert {one["loss"] for one in alone.door.messages("progress")} == {2.0}


def test_samples_count_for_the_step_of_which_they_were_told(alone: Alone) -> None:
    with alone.start() as whole:
        steps = whole.steps(6)
        made = [next(steps)]
        whole.tell(0.5, 8)
        made += steps

    progress = alone.door.messages("progress")
    assert sum(one["steps"] for one in progress) == len(made) == 6
    assert {one["whole"] for one in progress} == {True}
    assert sum(one["samples"] for one in progress) == 8
    assert {one["loss"] for one in progress} == {0.5}


def test_why_it_cannot_start_is_told_before_the_process_goes(alone: Alone) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
    folders = [*whole.saver.folders.to_read("local"), whole.saver.folders.shared]
    for data in (data for folder in folders for data in folder.glob("step-*/rank-0-*.bin")):
        data.write_bytes(b"?")

    with pytest.raises(ValueError, match=r"none of the 2 .* \(rank 0: local: .*; rank 0: shared: "):
        alone.start().__enter__()

    assert alone.troubles() == [
        *("checkpoint_damaged", "checkpoint_refused"),  # on its own disk
        *("checkpoint_refused", "exception"),
    ]
    refused = [one["subject"] for one in alone.door.messages("trouble")[:3]]
    assert refused == ["local", "local", "shared"]
    assert not any(one.name == "drydock-sender" for one in threading.enumerate())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda whole: setattr(whole, "model", torch.nn.Linear(2, 3)), "of another model than"),
        (
            lambda whole: whole.model.half(),
            "another model than this script's Linear (type mismatch",
        ),
        (lambda whole: whole.optimizers.clear(), "the state has 1 optimizers and the extras"),
        (lambda whole: whole.extra.clear(), "extras ['kept'], this script 1 and []"),
        (
            lambda whole: whole.optimizers.__setitem__(
                0, torch.optim.AdamW(whole.model.parameters())
            ),
            "the state's optimizer 0 is SGD with groups of [2] tensors, this script's is AdamW",
        ),
    ],
)
def test_what_is_no_state_of_this_script_is_refused_in_a_sentence(
    alone: Alone, change: Callable[[runtime.WholeJob], None], words: str
) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
    other = alone.start()
    change(other)

    with pytest.raises(ValueError, match=f"{re.escape(words)}.*or start a new job"):
        other.__enter__()


def test_elements_of_a_type_that_has_them_all_are_put_back(alone: Alone) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
    other: Any = alone.start()
    other.model.double()
    with other:
        list(other.steps(2))

    assert torch.equal(other.model.weight, whole.model.state_dict()["weight"].double())


@contextmanager
def rank_of_a_group(alone: Alone, state: TrainingState) -> Iterator[Rank]:
    """The only one, with what the job has in its folders."""
    job, division = alone.join(), Division(state.model, 0)
    gloo, saver = Gloo("127.0.0.1"), runtime.Checkpointer(job)
    engine = StepEngine(state, gloo, Observer(), division, mode="cover", max_grad_norm=None)
    rank = Rank(job, state, engine, gloo, saver, Observer(), host="127.0.0.1", on_step=None)
    yield rank
    rank.close()
    job.sender.close(PATIENCE_S)


def test_a_replica_group_does_not_take_its_checkpoint_for_weights_alone(alone: Alone) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
    model, optimizer = trainee()
    state = TrainingState(model, [optimizer], runtime.Batches(samples=24, shards=2))

    with rank_of_a_group(alone, state) as rank:
        (_, name, tier), *_ = rank.checkpoints([])
        given = rank.obey("read", {"name": name, "tier": tier, "number": 1})

    assert given["failed"] == "unloadable"
    assert alone.troubles() == ["checkpoint_refused"]
    (told,) = alone.door.messages("trouble")
    assert "a runtime.WholeJob" in told["text"]
    assert told["subject"] == tier


def test_a_state_that_was_divided_among_one_rank_is_put_back_whole(alone: Alone) -> None:
    def trained(model: torch.nn.Module) -> TrainingState:
        batches, optimizer = (
            runtime.Batches(samples=24, shards=2),
            torch.optim.AdamW(model.parameters()),
        )
        return TrainingState(model, [optimizer], batches, Division(model, 0))

    (divided, _), (whole, _) = trainee(), trainee()
    fully_shard(divided, mesh=init_device_mesh("cpu", (1,)))
    theirs, ours = trained(divided), trained(whole)
    theirs.committed = 0
    write(alone.folder / "state" / "checkpoints", theirs.copy(), facts={"epoch": 1, "ranks": 1})

    with rank_of_a_group(alone, ours) as rank:
        (_, name, tier), *_ = rank.checkpoints([])
        rank.obey("read", {"name": name, "tier": tier, "number": 1})
        ours.restore(rank._read)

    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, divided.state_dict()[name].full_tensor())


def test_it_takes_weights_alone_for_no_checkpoint_of_its_own(alone: Alone) -> None:
    imported_into(alone.folder / "state" / "checkpoints")

    with pytest.raises(
        ValueError, match=r"weights alone, .*: load them in the script.* other than"
    ):
        alone.start().__enter__()


def test_it_takes_a_replica_group_s_checkpoint_for_none_of_its_own(alone: Alone) -> None:
    model, optimizer = trainee()
    state = TrainingState(model, [optimizer], runtime.Batches(samples=24, shards=2))
    state.committed = 3
    write(alone.folder / "state" / "checkpoints", state.copy(), facts={"epoch": 1, "ranks": 1})

    with pytest.raises(ValueError, match=r"is of a runtime\.ReplicaGroup, .*: start the job with"):
        alone.start().__enter__()


def test_a_state_of_which_no_copy_can_be_made_is_refused_before_it_trains(alone: Alone) -> None:
    alone.kept.held = Odd(torch.zeros(1))

    with pytest.raises(TypeError, match=r"state\.extra\.kept\.held is a Odd"), alone.start():
        pass

    assert alone.troubles() == ["exception"]


class Mean:
    """Has no state before its first step."""

    count = total = 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.total / self.count, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.total = state["count"], state["mean"] * state["count"]


def test_what_has_no_state_before_its_first_step_is_saved_after_it_and_put_back(
    alone: Alone,
) -> None:
    alone.kept = first = Mean()
    with alone.start() as whole:
        for _step in whole.steps(1):
            first.count, first.total = 2, 6
    alone.kept = again = Mean()
    with alone.start():
        pass

    assert vars(again) == {"count": 2, "total": 6}
    assert alone.troubles() == []


@pytest.mark.parametrize(("given", "ours"), [(180, 180), (1, 30)])
def test_who_waits_for_one_that_evaluates_alone_is_as_patient_as_the_script(
    alone: Alone, given: int, ours: int
) -> None:
    _set_pg_timeout(timedelta(minutes=given))
    with alone.start() as whole:
        backend = whole._ranks.group._get_backend(torch.device("cpu"))

    assert backend.options._timeout == timedelta(minutes=ours)


def test_a_loader_that_is_put_back_draws_no_random_numbers(alone: Alone) -> None:
    """It makes its order once it is asked for its state."""
    alone.kept = loader()
    with alone.start() as whole:
        list(whole.steps(1))
    drawn = torch.rand(1)
    alone.kept = begins = loader()
    with alone.start():
        iter(begins)
        again = torch.rand(1)

    assert torch.equal(again, drawn)
    assert alone.troubles() == []


def test_several_replicas_are_refused(alone: Alone) -> None:
    job = alone.join(DRYDOCK_WORLD_REPLICAS="2")

    with pytest.raises(ValueError, match=r"2 replicas \(DRYDOCK_WORLD_REPLICAS\)"):
        runtime.WholeJob(job, *trainee(), runtime.Checkpointer(job))


def test_a_process_that_is_to_stand_by_is_refused_before_it_trains_beside_the_other(
    alone: Alone,
) -> None:
    job = alone.join(DRYDOCK_STANDBY="migrate")

    with pytest.raises(ValueError, match=r"DRYDOCK_STANDBY is 'migrate', and nobody can follow"):
        runtime.WholeJob(job, *trainee(), runtime.Checkpointer(job))


def test_ranks_without_their_process_group_are_told_to_make_it(tmp_path: Path) -> None:
    job = runtime.join(told(tmp_path))

    with pytest.raises(RuntimeError, match=r"rank 0 of 1, .* call init_process_group"):
        runtime.WholeJob(job, *trainee(), runtime.Checkpointer(job))


def test_a_save_says_which_state_its_start_began_from(alone: Alone, tmp_path: Path) -> None:
    """What that start passed over is told by it from what it keeps."""
    (first, _), (second, _) = alone.trained(3), alone.trained(2)

    newest = store.manifest_of(store.candidates(tmp_path / "state" / "checkpoints")[0])
    assert newest.facts["began"] == {"epoch": first, "step": 2, "first": second}
