"""How often is best: as the formulas say, within what the store can take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint.interval import (
    FIRST_S,
    LEAST_S,
    MEASURED,
    MOST_S,
    Pace,
    best_interval,
    expected_ettr,
    nodes_of,
)

seconds = st.floats(min_value=0.0, max_value=1e4)
mtbf = st.floats(min_value=60.0, max_value=1e8)


def test_youngs_interval_of_the_worked_example() -> None:
    """16,384 GPUs, a failure each 3.09 h, a stall of 0.2 s: 67 s."""
    assert best_interval(0.2, 1.0, 3.09 * 3600) == pytest.approx(66.7, abs=0.1)


def test_metas_estimate_of_a_classic_job() -> None:
    """Hourly synchronous checkpoints of 5 minutes, 30 s to restart: most is lost to the stalls."""
    assert expected_ettr(300.0, 0.0, 3600.0, 3.09 * 3600) == pytest.approx(0.771, abs=0.001)


@given(stall_s=seconds, durable_s=seconds, mtbf_s=mtbf)
def test_the_interval_keeps_within_its_bounds(
    stall_s: float, durable_s: float, mtbf_s: float
) -> None:
    every_s = best_interval(stall_s, durable_s, mtbf_s)
    assert LEAST_S <= every_s <= max(MOST_S, 2 * durable_s)
    assert every_s >= 2 * durable_s
    assert 0.0 <= expected_ettr(stall_s, durable_s, every_s, mtbf_s) <= 1.0


@given(stall_s=st.floats(0.01, 10.0), mtbf_s=st.floats(3600.0, 1e5), other=st.floats(0.2, 5.0))
def test_no_other_interval_is_much_better(stall_s: float, mtbf_s: float, other: float) -> None:
    """Young's is the optimum where a stall is short beside the time between failures."""
    best_s = best_interval(stall_s, 0.0, mtbf_s)
    best = expected_ettr(stall_s, 0.0, best_s, mtbf_s)
    assert expected_ettr(stall_s, 0.0, best_s * other, mtbf_s) <= best + 1e-2


def test_a_job_has_the_nodes_that_its_launcher_says_and_no_fewer_than_its_ranks_need() -> None:
    assert [nodes_of(1, 16), nodes_of(1, 16, 4), nodes_of(2, 2, 2), nodes_of(1, 16, 1)] == [
        2, 4, 4, 2,
    ]  # fmt: skip


def test_a_pace_follows_what_saves_cost_by_now() -> None:
    pace = Pace(None, nodes_of(64, 8), lambda: 6.5e-3)
    before = pace.every_s, pace.ettr
    for _ in range(5):
        pace.note(0.01, 0.5)
    quick = pace.every_s
    for _ in range(5):
        pace.note(1.0, 30.0)

    assert before == (FIRST_S, None)
    assert quick < pace.every_s
    assert pace.every_s == pytest.approx(best_interval(1.0, 30.0, pace.mtbf_s))
    assert pace.ettr is not None
    assert 0.9 < pace.ettr < 1.0


def test_one_slow_save_changes_nothing() -> None:
    pace = Pace(None, 8, lambda: 6.5e-3)
    for stall_s in (0.01, 0.01, 5.0):
        pace.note(stall_s, 0.5)
    assert pace.every_s == best_interval(0.01, 0.5, pace.mtbf_s)


def test_a_first_save_that_met_an_outage_puts_the_next_off_for_an_hour_at_most() -> None:
    pace = Pace(None, 8, lambda: 6.5e-3)
    after = []
    for _ in range(MEASURED):  # and it turns out to be always so slow
        pace.note(0.01, 6 * 3600.0)
        after.append(pace.every_s)

    assert after == [MOST_S] * (MEASURED - 1) + [12 * 3600.0]


def test_a_fixed_interval_stays_and_its_ettr_is_told() -> None:
    pace = Pace(20.0, 8, lambda: 6.5e-3)
    pace.note(0.01, 0.5)
    assert pace.every_s == 20.0
    assert pace.ettr == expected_ettr(0.01, 0.5, 20.0, pace.mtbf_s)


@pytest.mark.parametrize(
    ("every_s", "rate", "words"),
    [(-1.0, 1e-3, "every_s is -1.0"), (float("nan"), 1e-3, "every_s"), (None, 0.0, "above 0")],
)
def test_what_makes_no_sense_is_refused(every_s: float | None, rate: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pace(every_s, 8, lambda: rate)


def test_a_fleet_that_fails_more_often_is_saved_more_often() -> None:
    rates = [6.5e-3]
    pace = Pace(None, 8, lambda: rates[-1])
    pace.note(1.0, 0.5)
    before = pace.every_s
    rates.append(4 * 6.5e-3)

    assert pace.every_s == pytest.approx(before / 2)
