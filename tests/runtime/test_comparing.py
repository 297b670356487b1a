"""Members whose states differ are found, and the one that errs is named."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.replica.comparing import Comparison, most_common, odd_ones
from tests.runtime.replicas import Fleet, until
from tests.runtime.test_client import Door

STATES = st.dictionaries(st.integers(0, 9), st.sampled_from("abc"), min_size=1)


def test_a_digest_that_comes_late_disturbs_no_later_step() -> None:
    comparison = Comparison()
    comparison.hear(0, 1, 9, "d", (0, 1))
    comparison.hear(0, 1, 19, "e", (0, 1))

    assert comparison.hear(1, 1, 9, "d", (0, 1)) is None
    assert comparison.hear(1, 1, 19, "e", (0, 1)) == {0: "e", 1: "e"}


def test_a_step_that_is_made_anew_is_compared_anew() -> None:
    comparison = Comparison()
    for replica in (0, 1):
        comparison.hear(replica, 1, 999, "before", [0, 1])

    assert comparison.hear(0, 2, 999, "after", [0, 1]) is None
    assert comparison.hear(1, 2, 999, "after", [0, 1]) == {0: "after", 1: "after"}
    assert comparison.hear(1, 2, 999, "again", [0, 1]) is None


@given(STATES)
def test_only_a_minority_is_odd(states: dict[int, str]) -> None:
    odd = odd_ones(states)

    assert 2 * len(odd) < len(states)
    assert {states[one] for one in odd}.isdisjoint({most_common(states)})
    assert odd == [] or {states[one] for one in set(states) - set(odd)} == {most_common(states)}


@given(st.lists(st.integers(0, 99), min_size=3, unique=True), st.data())
def test_one_that_differs_from_all_is_the_odd_one(replicas: list[int], data: st.DataObject) -> None:
    odd = data.draw(st.sampled_from(replicas))

    assert odd_ones({one: "odd" if one == odd else "d" for one in replicas}) == [odd]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replica_whose_memory_errs_is_named(make_fleet: Callable[..., Fleet], ranks: int) -> None:
    door = Door()
    fleet = make_fleet(3, url=door.url, divided=ranks, options={"compare_every": 10})
    fleet.start_coordinator()
    for replica, flips_at in enumerate([-1, 34, -1]):
        fleet.start_rank(replica, flips_at=flips_at)
    until(lambda: door.messages("trouble"), "an engineer is told")
    fleet.stop()
    door.close()

    told = door.messages("trouble")
    assert {(one["kind"], one["subject"]) for one in told} == {("diverged", "replica 1")}
    sentence = r"^after step (\d+) replica 1 does not hold what the others hold"
    steps = [int(step) for one in told for step in re.findall(sentence, one["text"])]
    assert len(steps) == len(told)
    assert min(steps) >= 34


def test_one_that_trains_otherwise_from_the_beginning_is_named_after_the_first_steps(
    make_fleet: Callable[..., Fleet],
) -> None:
    door = Door()
    fleet = make_fleet(3, url=door.url, options={"compare_every": 1 << 30})
    fleet.start_coordinator()
    for replica, flips_at in enumerate([-1, 0, -1]):
        fleet.start_rank(replica, flips_at=flips_at)
    until(lambda: door.messages("trouble"), "an engineer is told")
    fleet.stop()
    door.close()

    told = {(one["kind"], one["subject"]) for one in door.messages("trouble")}
    assert told == {("diverged", "replica 1")}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_newcomer_does_after_each_step_what_the_others_do(
    make_fleet: Callable[..., Fleet], ranks: int
) -> None:
    door = Door()
    options = {"clamps": True, "compare_every": 10}
    fleet = make_fleet(3, url=door.url, divided=ranks, options=options)
    fleet.start()
    fleet.wait_for_step(20)
    fleet.kill(2)
    fleet.wait_for_members([0, 1])
    fleet.start_rank(2)
    fleet.wait_for_members([0, 1, 2])
    fleet.train_on()
    fleet.stop()
    door.close()

    told = {one["kind"] for one in door.messages("trouble")}
    assert told.isdisjoint({"diverged", "weights_written"})
    assert len(fleet.digests()) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_newcomer_that_makes_something_else_of_a_step_is_not_let_in(
    make_fleet: Callable[..., Fleet], ranks: int
) -> None:
    door = Door()
    fleet = make_fleet(3, url=door.url, divided=ranks)
    fleet.start()
    fleet.wait_for_step(20)
    fleet.kill(2)
    fleet.wait_for_members([0, 1])
    fleet.start_rank(2, flips_at=0)
    fleet.wait_for_members([0, 1, 2])
    fleet.stop()
    door.close()

    (told,) = [one["text"] for one in door.messages("trouble") if one["kind"] == "diverged"]
    assert " and replica 0 " in told
    assert "it is not let in, and begins anew" in told
    assert len(fleet.digests()) == 1
