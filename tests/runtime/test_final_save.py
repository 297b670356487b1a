"""A job that restarts as a whole has saved what it can before it is killed."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import runtime
from runtime.checkpoint.tiers import TIERS
from runtime.final_save import NEVER_MS, FinalSave
from runtime.replica import preemption
from tests.runtime.replicas import until
from tests.runtime.whole.runs import NEVER, STEPS, Alone, Whole, kill

EVALUATES_IN = 20
GRACE = {"DRYDOCK_GRACE_S": "4"}
#: A copy is thought to be with its writers by then, and so a save that takes a tenth of a second
#: begins 0.3 s after the word.
BEGIN_S, GRACE_S = 60.0, 60.5
SHORT_S = 1.5


@pytest.fixture(autouse=True)
def _begins_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "BEGIN_S", BEGIN_S)


def quick(whole: runtime.WholeJob) -> None:
    """Its saves were, so far."""
    for tier in whole.saver.tiers.values():
        tier.pace.note(0.0, 0.1)


def saved(alone: Alone, whole: runtime.WholeJob) -> list[list[int]]:
    return [alone.saved(whole, "local"), alone.saved(whole, "shared")]


@pytest.mark.parametrize(
    ("first", "second", "late"),
    [
        # What each rank would choose by itself another would leave out, and none would be left.
        ({"local": 14.0, "shared": 17.0}, {"local": 17.0, "shared": 14.0}, {"shared"}),
        ({"local": 14.0, "shared": 17.0}, {}, {"shared"}),
        ({"local": 5.0, "shared": 17.0}, {"local": 5.0}, set()),
        ({}, {}, set()),
    ],
)
def test_all_ranks_leave_out_the_same_tiers(
    alone: Alone, first: dict[str, float], second: dict[str, float], late: set[str]
) -> None:
    def told(usual_s: dict[str, float]) -> list[int]:
        left = -30_000 if usual_s else -NEVER_MS
        return [*(int(1000 * usual_s.get(name, -0.001)) for name in TIERS), left]

    job = alone.join()
    ending = FinalSave(job, runtime.Checkpointer(job), lambda *_: None)
    ending.hear(
        ["local", "shared"],
        [max(pair) for pair in zip(told(first), told(second), strict=True)],
    )
    ending.close()
    job.sender.close(3.0)

    assert ending.too_late == late


def test_told_to_end_while_it_evaluates_the_step_is_saved_that_has_made_its_update(
    alone: Alone,
) -> None:
    with alone.start(grace_s=GRACE_S) as whole:
        quick(whole)
        steps = whole.steps(NEVER)
        next(steps)
        with whole.evaluating():
            whole.job.told.set()
            until(lambda: saved(alone, whole) == [[0], [0]], "both tiers have it")
        assert list(steps) == []

    assert saved(alone, whole) == [[0], [0]]
    assert alone.trained(1) == (2, 1)


def test_the_same_between_two_loops(alone: Alone) -> None:
    with alone.start(grace_s=GRACE_S) as whole:
        quick(whole)
        list(whole.steps(3))
        with whole.evaluating():
            whole.job.told.set()
            until(lambda: saved(alone, whole) == [[2], [2]], "both tiers have it")

    assert saved(alone, whole) == [[2], [2]]


def test_what_is_told_in_the_middle_of_a_step_waits_until_its_update_is_made(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    with alone.start(grace_s=GRACE_S) as whole:
        quick(whole)
        await_free = whole.saver.copy_buffers.await_free

        def asks(wait_s: float) -> bool:
            asked.set()
            return await_free(wait_s)

        monkeypatch.setattr(whole.saver.copy_buffers, "await_free", asks)
        steps = whole.steps(NEVER)
        next(steps)
        whole.job.told.set()
        until(asked.is_set, "it is time to save aside")
        before = saved(alone, whole)
        with whole.evaluating():
            until(lambda: saved(alone, whole) == [[0], [0]], "both tiers have it")

    assert before == [[], []]


def test_an_evaluation_that_ends_in_time_leaves_the_save_to_the_edge(alone: Alone) -> None:
    with alone.start(grace_s=GRACE_S) as whole:
        quick(whole)
        steps = whole.steps(NEVER)
        next(steps)
        with whole.evaluating():
            whole.job.told.set()
        assert list(steps) == []

    assert saved(alone, whole) == [[0], [0]]
    assert len(alone.door.messages("checkpoint")) == 2


def test_what_the_loop_changes_after_it_is_not_in_what_was_saved_aside(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone.start(grace_s=GRACE_S) as whole:
        quick(whole)
        model: Any = whole.model
        given: list[Any] = []
        give = whole.saver.dispatcher.give
        monkeypatch.setattr(whole.saver.dispatcher, "give", given.append)
        steps = whole.steps(NEVER)
        next(steps)
        weight = model.weight.detach().clone()
        with whole.evaluating():
            whole.job.told.set()
            until(lambda: given != [], "a copy is begun, and nobody makes it")
        with torch.no_grad():
            model.weight.zero_()
        give(given[0])
        until(lambda: saved(alone, whole) == [[0], [0]], "both tiers have it")

    again: Any = alone.start()
    with again:
        assert torch.equal(again.model.weight, weight)


@pytest.mark.parametrize("evaluates", [[0, 1], [0]])
def test_of_several_ranks_one_that_waits_at_the_edge_saves_its_part_of_the_same_step(
    tmp_path: Path, evaluates: list[int]
) -> None:
    calm, whole = (Whole(tmp_path / name) for name in ("calm", "killed"))
    for one in (calm, whole):
        one.folder.mkdir()
    assert calm.run()[0] == 0
    arguments = ["--standalone", "--nproc-per-node=2"]
    steps = dict.fromkeys(evaluates, EVALUATES_IN)
    process = whole.start(arguments, "disk", GRACE, every_s=1e9, evaluates=steps)
    try:
        for rank in evaluates:
            until((whole.folder / f"evaluates.{rank}").exists, "it evaluates")
        until(lambda: whole.steps(1)[-1][1] == EVALUATES_IN, "the other has made the step")
        for rank in range(2):
            os.kill(int((whole.folder / f"pid.{rank}").read_text()), signal.SIGTERM)
        until(lambda: len(whole.parts(EVALUATES_IN)) == 2, "their disks have it")
    finally:
        kill(process)
    status, said = whole.run()

    assert status == 0, said
    assert (whole.begins(epoch=2), whole.steps(0)[-1][1]) == (EVALUATES_IN + 1, STEPS - 1)
    assert whole.digests() == calm.digests()
    assert whole.ledger().whole, whole.ledger().problems


def test_a_rank_that_ended_listens_no_more(alone: Alone) -> None:
    before = threading.active_count()
    with alone.start() as whole:
        list(whole.steps(1))
    until(lambda: threading.active_count() <= before, "its threads have ended")

    os.kill(psutil.Process().pid, signal.SIGTERM)
    until(whole.job.told.is_set, "it is noted")
    assert threading.active_count() <= before


def test_a_step_that_was_left_in_the_middle_is_not_saved_aside_either(alone: Alone) -> None:
    """The loader of a `zip` ended: nothing was trained in the step that was begun."""
    with alone.start(grace_s=SHORT_S) as whole:
        quick(whole)
        list(zip(whole.steps(NEVER), range(2), strict=False))
        with whole.evaluating():
            whole.job.told.set()
            threading.Event().wait(SHORT_S)

    assert saved(alone, whole) == [[], []]


def test_what_was_begun_aside_at_an_edge_is_not_begun_again_there(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits at the edge for ranks that were not told, and so the job goes on."""
    with alone.start(local=0.0, shared=0.0, grace_s=GRACE_S) as whole:
        quick(whole)
        steps = whole.steps(NEVER)
        next(steps)
        until(lambda: whole.saver.prepare(lambda: 1 << 20), "there is room")
        given: list[list[str]] = []
        give = whole.saver.dispatcher.give

        def gives(save: Any) -> None:
            given.append([tier.name for tier in save.tiers])
            give(save)

        def meets(_told: torch.Tensor, *_: Any, **__: Any) -> None:
            whole.job.told.set()
            until(lambda: given != [], "a save aside is begun")

        monkeypatch.setattr(whole.saver.dispatcher, "give", gives)
        monkeypatch.setattr(dist, "all_reduce", meets)
        next(steps)
        monkeypatch.undo()
        list(steps)

    assert given == [["local", "shared"]]


def test_what_an_evaluation_draws_changes_nothing(alone: Alone) -> None:
    with alone.start() as whole:
        steps = whole.steps(2)
        next(steps)
        before = whole.digest()
        with whole.evaluating():
            drawn = (torch.rand(1), random.random())  # noqa: S311 - what it is like is no secret
        after, again = whole.digest(), (torch.rand(1), random.random())  # noqa: S311
        list(steps)

    assert before == after
    assert again == drawn


def test_a_state_that_cannot_be_made_ends_no_evaluation(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone.start() as whole:
        steps = whole.steps(NEVER)
        next(steps)
        monkeypatch.setattr(whole, "_state", lambda _step: 1 / 0)
        with whole.evaluating():
            pass
        monkeypatch.undo()

    assert "not_saved_aside" in alone.troubles()
