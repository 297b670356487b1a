"""Whoever is told that it will be killed has saved by then, whatever it is doing."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import time

import pytest
import torch
from torch import nn

from runtime.checkpoint import store
from runtime.data import Batches
from runtime.job import seconds_of
from runtime.replica.preemption import Preemption, durable_in, longest_s
from runtime.replica.state import TrainingState
from tests.runtime.replicas import PATIENCE_S, Fleet, until
from tests.runtime.test_replicas import MakeFleet, assert_every_sample_once


@pytest.mark.parametrize(
    ("usual_s", "left_s", "tiers"),
    [
        ({"peer": 0.1, "local": 0.5, "shared": 20.0}, 30.0, {"peer", "local"}),
        ({"peer": 0.1, "local": 0.5, "shared": 10.0}, 30.0, {"peer", "local", "shared"}),
        ({"peer": 0.1, "local": 0.5, "shared": 20.0}, 0.1, {"peer"}),  # the least bad
        ({"local": 3.0, "shared": 2.0}, 1.0, {"shared"}),
        ({"local": None, "shared": None}, 30.0, {"local", "shared"}),
        ({"local": None, "shared": None}, 2.0, {"local"}),
    ],
)
def test_the_tiers_that_will_be_durable_in_time_are_chosen(
    usual_s: dict[str, float | None], left_s: float, tiers: set[str]
) -> None:
    assert durable_in([*usual_s], usual_s, left_s) == tiers


def noticed(grace_s: float, needs_s: float) -> tuple[Preemption, threading.Event]:
    saved = threading.Event()
    return Preemption(grace_s, lambda: needs_s, saved.set), saved


def test_no_edge_in_time_saves_without_one() -> None:
    preemption, saved = noticed(0.5, 0.4)
    preemption.notice()
    assert saved.wait(PATIENCE_S)


def test_an_edge_in_time_is_what_is_saved() -> None:
    preemption, saved = noticed(1.0, 0.5)
    preemption.notice()
    preemption.edge()
    assert not saved.wait(1.0)


@pytest.mark.parametrize(
    ("usual_s", "needs_s"),
    [
        ({"peer": 0.05, "local": 0.5, "shared": 5.0}, 11.0),  # so that all are durable in time
        ({"peer": 0.05, "local": 0.5, "shared": 50.0}, 2.0),  # which shared cannot be
        ({"shared": 50.0}, 101.0),
    ],
)
def test_it_begins_early_enough_for_all_that_can_be_durable(
    usual_s: dict[str, float], needs_s: float
) -> None:
    assert longest_s(usual_s.values(), grace_s=30.0) == needs_s


def test_whoever_leaves_saves_nothing_more() -> None:
    preemption, saved = noticed(0.2, 0.0)
    preemption.close()
    preemption.notice()
    assert not saved.wait(0.5)


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_grace_that_is_no_time_is_refused(value: str) -> None:
    with pytest.raises(RuntimeError, match="DRYDOCK_GRACE_S is"):
        seconds_of(value)


def test_a_copy_aside_is_the_edge_s_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, [optimizer], Batches(samples=24, shards=2))
    at_edge = state.copy().digest
    state.statistics.begin()
    model(torch.randn(8, 4)).sum().backward()  # the middle of a shard
    during = [buffer.clone() for buffer in model.buffers()]
    drawn = torch.get_rng_state()

    aside = state.begin_copy_aside(None).finish()

    assert aside.digest == at_edge
    assert all(map(torch.equal, during, model.buffers()))
    assert torch.equal(drawn, torch.get_rng_state())


def preempt(fleet: Fleet) -> list[int]:
    """SIGTERM to all ranks, and SIGKILL once their time is over; how they ended."""
    processes = fleet.part_with(0)
    end = time.monotonic() + fleet.grace_s
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        with_time = max(0.0, end - time.monotonic())
        try:
            process.wait(with_time)
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in processes]


def newest(fleet: Fleet) -> int:
    found = store.newest(fleet.folder / "state" / "checkpoints")
    assert found is not None
    return found[1].step


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_job_that_evaluates_when_it_is_to_be_killed_loses_no_step(
    make_fleet: MakeFleet, ranks: int
) -> None:
    options = {"evaluate_at": 30, "rich": True, "averages": False}
    fleet = make_fleet(1, divided=ranks, grace_s=4.0, options=options)
    fleet.start()
    until((fleet.folder / "evaluating.0").exists, "it evaluates")

    codes = preempt(fleet)
    saved = newest(fleet)
    fleet.start_rank(0)
    fleet.train_on()
    fleet.stop()

    assert codes == [-signal.SIGKILL] * ranks
    assert saved == 29
    assert [step["step"] for step in fleet.steps(0)] == [*range(fleet.newest() + 1)]


def come_to_a_step(fleet: Fleet, moments: random.Random) -> int:
    """Start the job, and let it train for a while; how it ends when it is preempted then."""
    last = fleet.last(0)["step"]
    fleet.start_rank(0)
    fleet.wait_for_step(last + 10 + moments.randrange(20))
    return 0


def come_to_an_evaluation(fleet: Fleet, moments: random.Random) -> int:
    """The same, until it evaluates: no edge comes in time."""
    marker = fleet.folder / "evaluating.0"
    marker.unlink(missing_ok=True)
    fleet.start_rank(0, evaluate_at=fleet.last(0)["step"] + 10 + moments.randrange(20))
    until(marker.exists, "it evaluates")
    return -signal.SIGKILL


@pytest.mark.soak
def test_twenty_preemptions_at_any_moment_lose_no_step(make_fleet: MakeFleet) -> None:
    moments = random.Random(20)  # noqa: S311 - the same each time
    fleet = make_fleet(1, grace_s=3.0)
    fleet.start_coordinator()
    expected, ended, lost = [], [], []
    for come_to in [come_to_a_step, come_to_an_evaluation] * 10:
        expected.append(come_to(fleet, moments))
        ended += preempt(fleet)
        lost.append(fleet.steps(0)[-1]["step"] - newest(fleet))
    fleet.start_rank(0)
    fleet.train_on()
    fleet.stop()

    assert ended == expected
    assert lost == [0] * 20
    assert_every_sample_once(fleet.steps(0), 0)
