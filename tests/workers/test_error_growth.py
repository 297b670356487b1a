"""Corrected memory errors: their rate and its growth, never their sum."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import triage
from workers.detectors import GROWTH_MIN_ERRORS, ErrorCounter, Growth, accelerates

WINDOW_S = 12.0


def found(counts: list[float], every_s: float = 1.0) -> list[Growth]:
    """What a counter finds in these values, read one after the other."""
    counter = ErrorCounter(WINDOW_S)
    told = [counter.read(i * every_s, count) for i, count in enumerate(counts)]
    return [growth for growth in told if growth is not None]


def doubling(seconds: int, every_s: float = 3.0) -> list[float]:
    return [math.floor(4 * (2 ** (second / every_s) - 1)) for second in range(seconds)]


def test_errors_that_double_again_and_again_are_found_once() -> None:
    (growth,) = found([0.0] * 60 + doubling(40))
    assert growth.errors[-1] >= GROWTH_MIN_ERRORS[-1]
    assert growth.errors[0] < growth.errors[1] < growth.errors[2]


@given(st.floats(0, 1e6), st.integers(0, 40), st.floats(0.2, 5))
def test_a_steady_pace_is_never_found_not_even_where_it_begins(
    pace: float, calm: int, every_s: float
) -> None:
    steady = [float(math.floor(pace * i * every_s)) for i in range(80)]
    assert not found([0.0] * calm + steady, every_s)


def test_one_burst_is_no_drift() -> None:
    assert not found([0.0] * 30 + [100_000.0] * 30)


def test_a_counter_that_begins_anew_is_followed_anew() -> None:
    assert len(found([0.0] * 20 + doubling(30) + [0.0] * 20 + doubling(30))) == 2


def test_what_came_before_the_first_reading_is_not_made_up() -> None:
    assert not found([1000.0 + count for count in doubling(12)])


def test_a_card_whose_errors_became_few_again_speaks_again() -> None:
    calm = [doubling(30)[-1]] * 30
    again = [calm[-1] + count for count in doubling(30)]
    assert len(found([0.0] * 20 + doubling(30) + calm + again)) == 2


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=200), st.floats(0.01, 100))
def test_any_counter_can_be_followed_and_little_of_it_is_kept(
    counts: list[int], every_s: float
) -> None:
    counter = ErrorCounter(WINDOW_S)
    for i, count in enumerate(counts):
        counter.read(i * every_s, count)
    assert len(counter._points) <= 16


@given(st.lists(st.floats(0, 1e9), min_size=3, max_size=3))
def test_what_is_told_is_judged_again_as_it_was(errors: list[float]) -> None:
    verdict = triage.judge_errors("0000:1b:00", errors, WINDOW_S)
    assert (verdict is not None) == accelerates(errors)


@pytest.mark.parametrize("errors", [(), (1.0,), (10.0, 40.0), (3.0, 10.0, 30.0, 90.0)])
def test_parts_that_are_too_few_or_too_many_say_nothing(errors: tuple[float, ...]) -> None:
    assert triage.judge_errors("", errors, WINDOW_S) is None


def test_a_drift_empties_the_card_before_its_fault() -> None:
    verdict = triage.judge_errors("0000:1b:00", (4.0, 12.0, 40.0), WINDOW_S)
    assert verdict is not None
    assert (verdict.code, verdict.action, verdict.urgency) == (
        "ecc-drift",
        "drain_and_reset",
        "next_checkpoint",
    )
    assert "4, 12, 40 in each 4 s" in verdict.summary
