"""Membership as a property, over thousands of seeded schedules of faults, without torch.

What must hold is in simulation/history.py, and for all that live to train together again once the
faults are over. A seed that fails prints what happened; `python -m tests.runtime.simulation SEED 1`
plays it alone, `python -m tests.runtime.simulation 0 100000` many more.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

import pytest

from runtime.replica.membership import CannotFollow, Member, Severed, Trainer
from tests.runtime.simulation.schedule import (
    epochs_of_a_doubt,
    epochs_of_a_leave,
    run,
    steps_while_two_are_parted,
)

SEEDS = 100  # in one test
SCHEDULES = 3000


@pytest.mark.parametrize("first", range(0, SCHEDULES, SEEDS))
def test_one_history_and_all_train_again(first: int) -> None:
    outcomes = [run(seed) for seed in range(first, first + SEEDS)]

    assert sum(outcome.epochs for outcome in outcomes) > 2 * SEEDS


def test_a_newcomer_follows_no_step_that_one_made_alone() -> None:
    outcomes = [run(seed, only=["tear", "grow", "stand_by"]) for seed in range(SEEDS)]

    assert sum(outcome.epochs for outcome in outcomes) > 2 * SEEDS


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("seed", range(25))
def test_two_that_do_not_reach_each_other_do_not_hold_up_the_others(seed: int, world: int) -> None:
    parted, epochs, healed = steps_while_two_are_parted(seed, world)

    assert parted > 10
    assert epochs == 1
    assert healed == set(range(world))


@pytest.mark.parametrize("seed", range(50))
def test_a_doubt_costs_no_member_where_answers_come_from_the_other_end_of_the_world(
    seed: int,
) -> None:
    epochs = epochs_of_a_doubt(seed, round_trip_s=0.25)

    assert epochs
    assert {frozenset(members) for members in epochs} == {frozenset({0, 1, 2})}


@pytest.mark.parametrize("seed", range(50))
def test_who_is_told_to_end_leaves_by_an_epoch_and_breaks_nothing(seed: int) -> None:
    epochs, victim, severed = epochs_of_a_leave(seed)

    assert epochs == [{0, 1, 2} - {victim}, {0, 1, 2}]
    assert severed == 0


@pytest.mark.parametrize("fault", ["kill_coordinator", "freeze_coordinator", "isolate_coordinator"])
def test_the_coordinators_absence_costs_no_member(fault: str) -> None:
    outcomes = [run(seed, only=[fault]) for seed in range(SEEDS)]

    assert {outcome.epochs for outcome in outcomes} == {1}


class Behind:
    """A trainer that lacks a step which no peer hands over."""

    trained_in = 1

    def __init__(self) -> None:
        self.committed = 11
        self.held = {3, 4}

    def connect(self, grant: dict[str, Any]) -> None: ...

    def replay(self, step: int, donors: list[list[str]]) -> None:
        raise CannotFollow(f"{donors} do not answer")

    def forget(self) -> None:
        self.held = set()


def behind() -> tuple[Member, Behind, list[tuple[str, dict[str, Any]]]]:
    said: list[tuple[str, dict[str, Any]]] = []
    trainer = Behind()
    member = Member(1, lambda op, **told: said.append((op, told)), cast(Trainer, trainer))
    return member, trainer, said


def epoch(number: int) -> dict[str, Any]:
    members = [{"replica": one, "placement": f"p{one}"} for one in (0, 1, 2)]
    return {
        "op": "epoch", "epoch": number, "members": members, "lease_s": 10.0, "step": 12,
        "donors": [["a:1"]],
    }  # fmt: skip


def test_who_is_not_handed_a_step_keeps_what_it_computed_for_the_next_epoch() -> None:
    """The one that made the step has just died: the others go on without it, and it is no step."""
    member, trainer, said = behind()

    assert not member.hear(epoch(2))
    report = {"epoch": 2, "step": 11, "held": [3, 4], "planned": False}
    assert said[-1][0] == "report"
    assert report.items() <= said[-1][1].items()
    assert trainer.held == {3, 4}


def test_who_is_not_handed_a_step_again_begins_anew() -> None:
    """Whoever made it lives, and has it in memory no more."""
    member, trainer, said = behind()

    member.hear(epoch(2))
    member.hear(epoch(3))
    assert said[-1][0] == "again"
    assert (member.newcomer, trainer.held) == (True, set())


class Entering(Behind):
    """A trainer that is handed all it lacks."""

    entered = 0

    def replay(self, step: int, donors: list[list[str]]) -> None:
        self.committed = step

    def enter(self, grant: dict[str, Any]) -> None:
        self.entered += 1


def test_an_epoch_that_is_told_twice_is_entered_once() -> None:
    """Its connection ended after it was told, and before it had taken part: it is told again."""
    trainer = Entering()
    member = Member(1, lambda op, **told: None, cast(Trainer, trainer))
    entered = member.hear(epoch(2))
    trainer.committed += 1

    again = member.hear(epoch(2))

    assert (entered, again) == (True, False)
    assert trainer.entered == 1
    assert (member.epoch, member.newcomer) == (2, False)


class Barred(Entering):
    """A trainer that no peer hands its state to, as a newcomer."""

    def __init__(self) -> None:
        super().__init__()
        self.troubles: list[tuple[str, str]] = []

    def unreached(self, addresses: list[list[str]], try_s: float) -> list[int]:
        return []

    def take(self, step: int, digest: str, donors: list[list[str]]) -> None:
        raise CannotFollow(f"{donors} do not answer")

    def trouble(self, kind: str, text: str, subject: str = "") -> None:
        self.troubles.append((kind, text))


def sync(refusals: int) -> dict[str, Any]:
    return {
        "op": "sync", "order": 1, "step": 12, "digest": "d", "donors": [], "members": [],
        "refusals": refusals, "why": "it is late",
    }  # fmt: skip


def test_who_is_not_let_in_is_told_of_once_until_it_has_been_in() -> None:
    """Of some refusals it hears nothing, so that it may never hear of the third."""
    trainer = Barred()
    member = Member(1, lambda _op, **_told: None, cast(Trainer, trainer))

    for refusals in (2, 4, 5):
        member.hear(sync(refusals))
    before = list(trainer.troubles)
    member.hear(epoch(2))
    member.hear(sync(3))

    told = [*before, *trainer.troubles[1:]]
    assert [kind for kind, _text in told] == ["cannot_rejoin"] * 2
    assert [text.partition(".")[0] for _kind, text in told] == [
        "not let in 4 times in a row, the last time: it is late",
        "not let in 3 times in a row, the last time: it is late",
    ]
    assert "It tries on" in told[0][1]


def test_a_member_that_the_others_went_on_without_hears_that_it_comes_back_by_itself() -> None:
    trainer = Barred()
    member = Member(1, lambda _op, **_told: None, cast(Trainer, trainer))
    member.hear(epoch(2))

    member.hear({"op": "evicted", "epoch": 3})

    ((kind, text),) = trainer.troubles
    assert kind == "evicted"
    assert text.startswith("epoch 2 went on without this replica")
    assert "it comes back by itself" in text


class Breaking(Behind):
    """A trainer none of whose groups ever stands."""

    def __init__(self) -> None:
        super().__init__()
        self.troubles: list[tuple[str, str]] = []

    def replay(self, step: int, donors: list[list[str]]) -> None:
        raise Severed("epoch 2 has no group: Too many open files")

    def unreached(self, addresses: list[list[str]], try_s: float) -> list[int]:
        return []

    def trouble(self, kind: str, text: str, subject: str = "") -> None:
        self.troubles.append((kind, text))


def test_epochs_of_the_same_members_that_break_again_and_again_are_told_once() -> None:
    trainer = Breaking()
    member = Member(1, lambda _op, **_told: None, cast(Trainer, trainer))

    for number in range(2, 8):
        member.hear(epoch(number))

    ((kind, text),) = trainer.troubles
    assert kind == "epochs_break"
    assert "after step 11 the epoch of replicas [0, 1, 2] broke 3 times in a row" in text
    assert "is mended" in text
    assert text.endswith("Too many open files")


def test_what_a_silent_network_broke_is_not_told_twice() -> None:
    trainer = Breaking()
    member = Member(1, lambda _op, **_told: None, cast(Trainer, trainer))

    for number in range(2, 8):
        member.hear(epoch(number))
        member.hear({"op": "probe", "epoch": number, "peers": {}})

    assert [kind for kind, _text in trainer.troubles] == ["silent_network"]


def test_a_seed_is_the_same_schedule_each_time() -> None:
    assert run(7) == run(7)


def test_membership_needs_no_torch() -> None:
    looked = "import sys, tests.runtime.simulation.schedule; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", looked], check=False).returncode == 0
