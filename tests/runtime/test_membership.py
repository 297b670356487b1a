"""Membership as a property, over thousands of seeded schedules of faults, without torch.

What must hold is in simulation/history.py, and for all that live to train together again once the
faults are over. A seed that fails prints what happened; `python -m tests.runtime.simulation SEED 1`
plays it alone, `python -m tests.runtime.simulation 0 100000` many more.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.runtime.simulation.schedule import run, steps_while_two_are_parted

SEEDS = 100  # in one test
SCHEDULES = 3000


@pytest.mark.parametrize("first", range(0, SCHEDULES, SEEDS))
def test_one_history_and_all_train_again(first: int) -> None:
    outcomes = [run(seed) for seed in range(first, first + SEEDS)]

    assert sum(outcome.epochs for outcome in outcomes) > 2 * SEEDS


def test_a_newcomer_follows_no_step_that_one_made_alone() -> None:
    outcomes = [run(seed, only=["tear", "grow", "stand_by"]) for seed in range(SEEDS)]

    assert sum(outcome.epochs for outcome in outcomes) > 2 * SEEDS


@pytest.mark.parametrize("seed", range(50))
def test_two_that_do_not_reach_each_other_do_not_hold_up_a_third(seed: int) -> None:
    parted, healed = steps_while_two_are_parted(seed)

    assert parted > 10
    assert healed == {0, 1, 2}


@pytest.mark.parametrize("fault", ["kill_coordinator", "freeze_coordinator"])
def test_the_coordinators_absence_costs_no_member(fault: str) -> None:
    outcomes = [run(seed, only=[fault]) for seed in range(SEEDS)]

    assert {outcome.epochs for outcome in outcomes} == {1}


def test_a_seed_is_the_same_schedule_each_time() -> None:
    assert run(7) == run(7)


def test_membership_needs_no_torch() -> None:
    looked = "import sys, tests.runtime.simulation.schedule; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", looked], check=False).returncode == 0
