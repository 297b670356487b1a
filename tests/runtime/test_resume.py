"""A job of which everything is killed at any moment ends with the bits of one that was left alone.

All its processes die at once: the coordinator, the ranks, their writers, their loaders' workers.
Nothing is left of it but the shared folder and the nodes' disks.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading

import psutil
import pytest

from runtime.checkpoint.suspects import TRIAL_STEPS
from runtime.ledger.__main__ import main
from tests.runtime.replicas import Fleet, Lives, until
from tests.runtime.test_replicas import MakeFleet, newest_local

#: Dropout, AdamW and another optimizer with a schedule each, a scaler that overflows, averages;
#: rows with noise that the workers of a DataLoader draw.
OPTIONS = {
    "rich": True, "data": "loader", "workers": 2, "signed": True, "samples": 480,
    "mode": "reproducible", "width": 8192, "pace_s": 0, "checkpoint_s": 0.1, "local_s": 0.02,
}  # fmt: skip
#: Of the one that is left alone.
UNSAVED = {"checkpoint_s": 3600, "local_s": 3600}
START_S = 4.0  # of a process until it trains
LONG_S = 600.0  # of all steps once more


@pytest.mark.parametrize(
    ("replicas", "kills", "seed"),
    [
        pytest.param(1, 1, 5, id="1-replica-1-kill"),
        pytest.param(1, 50, 50, id="1-replica-50-kills", marks=pytest.mark.soak),
        pytest.param(2, 10, 10, id="2-replicas-10-kills", marks=pytest.mark.soak),
    ],
)
def test_a_job_that_is_killed_as_a_whole_at_any_moment_ends_as_one_left_alone(
    make_fleet: MakeFleet, replicas: int, kills: int, seed: int
) -> None:
    """Each step that was made twice has the same loss, too, and the ledger is whole. Each life goes
    on from the newest checkpoint that is whole on any of the disks: all replicas come, and the one
    that has it hands it on."""
    chance = random.Random(seed)  # noqa: S311 - moments, not secrets
    fleet = make_fleet(replicas, own_disks=True, options=dict(OPTIONS))
    lives = Lives(fleet)

    for kill in range(kills):
        commits, within_s = moment(chance)
        fleet.start()
        until(lambda enough=lives.made[-1] + commits: len(fleet.steps(0)) >= enough, "it trains")  # type: ignore[misc]
        early, before = commits < TRIAL_STEPS, lives.saved[-1]
        until(lambda e=early, b=before: e or newest_local(fleet, 0) > b, "it saves")  # type: ignore[misc]
        threading.Event().wait(within_s)
        assert all(rank.poll() is None for rank in fleet.ranks.values())
        kill_all(fleet)
        lives.ended()
        print(  # noqa: T201
            f"seed {seed}, kill {kill}: after {commits} commits and {within_s:.3f} s, at step "
            f"{fleet.last(0)['step']}, {lives.saved[-1]} is saved, {drafts(fleet)} are half written"
        )
    fleet.start()
    lives.wait_for_workers()
    fleet.stop()
    alone = make_fleet(1, options={**fleet.options, **UNSAVED, "steps": fleet.last(0)["step"] + 1})
    alone.start()

    assert alone.ranks[0].wait(LONG_S) == 0
    assert lives.began_too_early() == []
    assert fleet.weights() == alone.weights()
    assert results(fleet) == results(alone)
    assert len({*lives.saved}) > 1 + kills / 3  # so many have saved something new
    assert lives.loaded_by_workers() >= (kills + 1) / 2
    assert main([str(fleet.folder / "state")]) == 0


def moment(chance: random.Random) -> tuple[int, float]:
    """After so many commits and so long: while it starts, while what it was loaded from is on
    trial, or while it saves."""
    on_trial = chance.randrange(1, TRIAL_STEPS)
    later = chance.randrange(TRIAL_STEPS, 6 * TRIAL_STEPS)
    commits, within_s = chance.choice([(0, START_S), (on_trial, 0.2), (later, 0.2), (later, 0.2)])
    return commits, chance.uniform(0, within_s)


def kill_all(fleet: Fleet) -> None:
    """SIGKILL to every process of the job."""
    assert fleet.coordinator is not None
    started = [psutil.Process(rank.pid) for rank in fleet.ranks.values()]
    family = [child for one in started for child in one.children(recursive=True)]
    fleet.coordinator.kill()
    for process in [*started, *family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    fleet.kill(*fleet.ranks)
    fleet.coordinator.wait()
    until(lambda: not any(map(is_alive, family)), "all are dead")


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def drafts(fleet: Fleet) -> int:
    """Checkpoints that were being written."""
    return len([*fleet.folder.rglob(".writing-*")])


def results(fleet: Fleet) -> set[str]:
    """What each step gave, in all lives: one line for each, if it gave the same in each."""
    keys = ("step", "loss", "grad_norm", "samples", "coverage")
    return {json.dumps([step[key] for key in keys]) for step in fleet.steps(0)}
