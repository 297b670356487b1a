"""Lemons: found with few false words, and with the numbers that say so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fleet_history import made_up_fleet
from workers.lemons import LEMON, SIGNALS, WEIGHTS, History, score

SEEDS = range(40)


def test_of_the_nodes_that_are_called_lemons_at_least_85_percent_are() -> None:
    """Over fleets of 1,000 nodes with 12 lemons each; others look like them now and then."""
    right = wrong = there = 0
    for seed in SEEDS:
        fleet, lemons = made_up_fleet(seed)
        called = {one.node for one in score(fleet) if one.lemon}
        right += len(called & lemons)
        wrong += len(called - lemons)
        there += len(lemons)

    assert right / (right + wrong) >= 0.85
    assert right / there >= 0.35  # one that failed once or twice in 28 days nobody can tell


def test_a_score_shows_what_it_is_made_of() -> None:
    fleet = {f"n{i}": History() for i in range(99)}
    worst = score({**fleet, "bad": History(xids=9, outs=7, exclusions=1)})[0]

    spoke = {part.signal: part.value for part in worst.parts if part.points}
    assert (worst.node, worst.lemon, spoke) == ("bad", True, {"xids": 9, "outs": 7})
    assert worst.points == sum(part.points for part in worst.parts) == 2.0
    assert [part.signal for part in worst.parts] == list(SIGNALS)


def test_in_a_fleet_that_hardly_fails_one_failure_makes_no_lemon() -> None:
    fleet = {f"n{i}": History() for i in range(99)}
    once = History(xids=1, outs=1, tickets=1, multi_node_failures=1)
    assert not score({**fleet, "unlucky": once})[0].lemon


def test_in_a_fleet_that_fails_everywhere_nobody_stands_out() -> None:
    fleet = {f"n{i}": History(xids=20 + i % 7, outs=9 + i % 3, tickets=8) for i in range(100)}
    assert not any(one.lemon for one in score(fleet))


@pytest.mark.parametrize("fleet", [{}, {"alone": History(xids=1)}])
def test_a_fleet_of_none_or_one_has_no_lemon(fleet: dict[str, History]) -> None:
    assert not any(one.lemon for one in score(fleet))


def test_what_people_exclude_makes_no_lemon_by_itself() -> None:
    fleet = {f"n{i}": History() for i in range(99)}
    assert not score({**fleet, "shunned": History(exclusions=50)})[0].lemon
    assert WEIGHTS["exclusions"] < LEMON


@given(
    st.dictionaries(
        st.text("abc", max_size=3),
        st.builds(History, xids=st.floats(0, 1e6), outs=st.integers(0, 40)),
        max_size=30,
    )
)
def test_any_fleet_is_scored_the_worst_first(fleet: dict[str, History]) -> None:
    scores = score(fleet)

    assert {one.node for one in scores} == set(fleet)
    assert [one.points for one in scores] == sorted((one.points for one in scores), reverse=True)
    assert all(0 <= one.points <= sum(WEIGHTS.values()) for one in scores)
