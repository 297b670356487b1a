"""A job that restarts as a whole: when and what it saves, what it tells, how it ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

import runtime
from runtime import stalls
from runtime.checkpoint import store
from runtime.checkpoint.tiers import TIERS
from runtime.client import CheckpointSaved, Directive
from runtime.snapshot import room_for
from tests.runtime.replicas import until
from tests.runtime.whole.runs import (
    NEVER,
    NEVER_S,
    Alone,
    local_saves,
    told,
    trainee,
)


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
            known.append(whole.saver.dispatcher.common["local"])
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


def test_told_to_stop_it_saves_its_last_step_to_every_tier(alone: Alone) -> None:
    with alone.start(local=0.0) as whole:
        steps = whole.steps(10)
        made = [next(steps), next(steps)]  # at the edge between them it begins to make room
        until(lambda: whole.saver.is_free("local"), "there is room")
        whole.job.stop.set()
        made += [*steps, *whole.steps(20)]

    assert made == [0, 1]
    assert alone.saved(whole, "local") == alone.saved(whole, "shared") == [1]


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


@pytest.mark.parametrize("wish", ["stop", "told"])
def test_its_last_step_is_saved_at_the_edge_whatever_the_script_does_until_its_end(
    alone: Alone, wish: str
) -> None:
    with alone.start() as whole:
        for _step in whole.steps(NEVER):
            getattr(whole.job, wish).set()
        until(lambda: alone.saved(whole, "local") == [0], "its disk has it")
        until(lambda: alone.saved(whole, "shared") == [0], "the folder of all has it")

    assert len(alone.door.messages("checkpoint")) == 2
    assert alone.troubles() == []


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
        monkeypatch.setattr(whole.saver.copy_buffers, "any_free", lambda: False)
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
        until(lambda: whole.saver.dispatcher.unwell() == {"local"}, "it has failed")
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
        whole.saver.dispatcher.failed("shared", "no word of it came")

    (path, *others) = store.candidates(alone.folder / "state" / "checkpoints")
    assert store.manifest_of(path).save == f"{whole._start}x1again"
    assert store.manifest_of(others[0]).save == f"{whole._start}x1"


def test_no_try_to_save_the_last_step_takes_the_place_of_another(alone: Alone) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
        for _ in range(2):
            whole._save_last()
            until(lambda: whole.saver.is_free("shared"), "its writer is done")
            whole.saver.dispatcher.failed("shared", "no word of it came")

    paths = store.candidates(alone.folder / "state" / "checkpoints")
    name = f"{whole._start}x0"
    saves = {store.manifest_of(path).save for path in paths}
    assert saves == {name, f"{name}again", f"{name}againagain"}


def test_what_a_tier_has_is_not_saved_to_it_again(alone: Alone) -> None:
    with alone.start() as first:
        list(first.steps(2))
    with alone.start() as again:
        left = list(again.steps(2))

    assert left == []
    assert alone.saved(again, "local") == alone.saved(again, "shared") == [1]


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


@contextlib.contextmanager
def past_its_first_steps(alone: Alone) -> Iterator[tuple[runtime.WholeJob, Iterator[int]]]:
    """A job in whose steps half a second is far too long, in one of them."""
    with alone.start(stalled_after_s=0.5) as whole:
        steps = whole.steps(NEVER)
        for _ in range(stalls.FIRST_STEPS + 1):
            next(steps)
        yield whole, steps


def test_a_rank_that_hangs_in_a_step_says_where(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "LOOK_S", 0.05)
    with past_its_first_steps(alone):
        until(lambda: "stalled" in alone.troubles(), "an engineer is told")

    (told,) = [one for one in alone.door.messages("trouble") if one["kind"] == "stalled"]
    assert "test_job.py" in told["text"]


def test_a_rank_that_waits_between_two_steps_for_one_that_stands_still_says_so(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "LOOK_S", 0.05)
    with past_its_first_steps(alone) as (whole, steps):
        meet = whole._ranks.highest

        def wait_for_others(numbers: list[int]) -> list[int]:
            until(lambda: "stalled" in alone.troubles(), "an engineer is told")
            return meet(numbers)

        monkeypatch.setattr(whole._ranks, "highest", wait_for_others)
        next(steps)

    (told,) = [one for one in alone.door.messages("trouble") if one["kind"] == "stalled"]
    assert "(wait_for_others)" in told["text"]


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


@pytest.mark.parametrize(("given", "ours"), [(180, 180), (1, 30)])
def test_who_waits_for_one_that_evaluates_alone_is_as_patient_as_the_script(
    alone: Alone, given: int, ours: int
) -> None:
    _set_pg_timeout(timedelta(minutes=given))
    with alone.start() as whole:
        backend = whole._ranks.group._get_backend(torch.device("cpu"))

    assert backend.options._timeout == timedelta(minutes=ours)


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
