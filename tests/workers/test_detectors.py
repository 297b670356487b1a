"""Readings beyond their bounds: each is told once, also one that wavers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import detectors
from workers.detectors import Bound, CardWatch, Finding, PortWatch, Rate, Trend

HOLD_S = 5.0
BEST = 480_000.0


def found(
    readings: Iterable[Mapping[str, float | None]], every_s: float = 1.0, baseline: float = 0.0
) -> list[Finding]:
    """What is told of a card that shows these, one after the other."""
    watch = CardWatch(HOLD_S, baseline)
    return [f for i, one in enumerate(readings) for f in watch.read(i * every_s, one)]


def heats(temperatures: Iterable[float], limit: float | None = 87.0) -> list[Finding]:
    return found({"temperature_c": one, "slowdown_c": limit} for one in temperatures)


def test_nvlink_below_its_own_baseline_is_told_once() -> None:
    (slow,) = found([{"nvlink_mb_s": BEST}] * 3 + [{"nvlink_mb_s": 0.7 * BEST}] * 60)

    assert slow == Finding("nvlink_mb_s", {"value": 0.7 * BEST, "baseline": BEST})


def test_the_baseline_is_the_card_s_own_of_before() -> None:
    assert not found([{"nvlink_mb_s": 0.7 * BEST}] * 60)
    assert len(found([{"nvlink_mb_s": 0.7 * BEST}] * 60, baseline=BEST)) == 1


@pytest.mark.parametrize("share", [0.81, 0.9, 1.0])
def test_nvlink_near_its_baseline_is_nothing(share: float) -> None:
    assert not found([{"nvlink_mb_s": BEST}] + [{"nvlink_mb_s": share * BEST}] * 60)


def test_what_lasts_a_moment_is_nothing() -> None:
    dips = [{"nvlink_mb_s": BEST}] * 3 + [{"nvlink_mb_s": 0.0}] * 4
    assert not found(dips * 20)


def test_what_wavers_between_its_two_bounds_is_told_once() -> None:
    slow = [{"nvlink_mb_s": 0.75 * BEST}] * 10
    wavers = [{"nvlink_mb_s": share * BEST} for share in (0.75, 0.85) * 40]
    assert len(found([{"nvlink_mb_s": BEST}, *slow, *wavers, *slow])) == 1


def test_short_dips_far_apart_do_not_add_up() -> None:
    dips = [
        {"nvlink_mb_s": BEST},
        *([{"nvlink_mb_s": 0.7 * BEST}] + [{"nvlink_mb_s": 0.85 * BEST}] * 90) * 20,
    ]
    assert not found(dips)


def test_what_was_well_again_is_told_again() -> None:
    episode = [{"nvlink_mb_s": BEST}] * 3 + [{"nvlink_mb_s": 0.5 * BEST}] * 10
    assert len(found(episode * 2)) == 2


def test_a_card_at_its_own_limit_is_too_hot() -> None:
    (hot,) = heats([60.0] * 40 + [85.0] * 20)

    assert (hot.reading, hot.values["value"], hot.values["limit"]) == ("temperature_c", 85.0, 87.0)


def test_a_card_on_its_way_to_its_limit_is_told_before_it_is_there() -> None:
    (hot,) = heats(60.0 + 0.4 * second for second in range(60))

    assert hot.values["value"] < 84.0
    assert hot.values["expected"] >= 87.0


def test_a_card_that_warms_up_to_its_usual_heat_is_not_too_hot() -> None:
    assert not heats([*(35.0 + second for second in range(35)), *[70.0] * 100])


def test_a_card_without_a_limit_of_its_own_is_warned_of_at_80() -> None:
    assert not heats([79.0] * 60, limit=None)
    assert len(heats([80.0] * 60, limit=None)) == 1


def test_clocks_that_are_held_back_by_heat_or_power_are_told() -> None:
    (held,) = found([{"throttle_reasons": 0x4 | 0x40}] * 20)
    assert held.values == {"value": 0x40}


@pytest.mark.parametrize("reasons", [0x0, 0x1, 0x2, 0x4, 0x10, 0x100])
def test_what_holds_clocks_back_in_a_healthy_card_is_nothing(reasons: int) -> None:
    """Idle, application clocks, the power cap under load, sync boost, the display."""
    assert not found([{"throttle_reasons": reasons}] * 60)


def test_fewer_pcie_lanes_than_there_could_be_are_told() -> None:
    (narrow,) = found([{"pcie_lanes": 8, "pcie_lanes_max": 16}] * 20)
    assert narrow.values == {"value": 8, "most": 16}


@pytest.mark.parametrize("counter", ["pcie_replays", "nvlink_errors"])
def test_a_counter_that_rises_fast_is_told_once(counter: str) -> None:
    (fast,) = found({counter: 1000 + second} for second in range(300))

    assert fast.reading == counter
    assert fast.values["value"] > 8


@pytest.mark.parametrize("counter", ["pcie_replays", "nvlink_errors"])
def test_a_counter_that_rises_now_and_then_is_nothing(counter: str) -> None:
    assert not found({counter: 1000 + second // 10} for second in range(1200))


def test_a_reading_that_could_not_be_taken_says_nothing() -> None:
    fields = ("nvlink_mb_s", "temperature_c", "slowdown_c", "throttle_reasons", "pcie_lanes",
              "pcie_lanes_max", "pcie_replays", "nvlink_errors")  # fmt: skip
    assert not found([dict.fromkeys(fields), {}] * 60)


def told_of_port(states: Iterable[dict[str, float]]) -> list[str]:
    watch = PortWatch()
    return [f.reading for i, one in enumerate(states) for f in watch.read(float(i), one)]


def ups_and_downs(*seconds: int) -> list[dict[str, float]]:
    """Up for so many seconds, then down for so many, and so on."""
    return [{"up": float(i % 2 == 0)} for i, lasts in enumerate(seconds) for _ in range(lasts)]


def test_three_downs_of_25_seconds_are_a_flap() -> None:
    assert told_of_port(ups_and_downs(5, 26, 5, 26, 5, 26, 5)) == ["port_flaps"]
    assert told_of_port(ups_and_downs(5, 26, 5, 26, 5)) == []
    assert told_of_port(ups_and_downs(*[5, 20] * 10, 5)) == []


def test_a_port_that_nobody_ever_plugged_in_is_not_down() -> None:
    assert told_of_port([{"up": 0.0}] * 4000) == []


def test_a_port_that_is_down_for_four_minutes_has_dropped() -> None:
    assert told_of_port(ups_and_downs(5, 300)) == ["port_drop"]
    assert told_of_port(ups_and_downs(5, 230, 5)) == []


@pytest.mark.parametrize("counter", detectors.PORT_ERRORS_AN_HOUR)
def test_a_port_s_errors_are_told_beyond_their_hourly_rate(counter: str) -> None:
    most = detectors.PORT_ERRORS_AN_HOUR[counter]
    assert told_of_port({counter: 7.0 + i} for i in range(most + 1)) == []
    assert told_of_port({counter: 7.0 + 10 * i} for i in range(most + 1)) == [counter]


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.booleans()), max_size=80))
def test_a_bound_speaks_at_most_once_between_two_moments_of_being_well(
    seen: list[tuple[float, bool, bool]],
) -> None:
    bound, at, told = Bound(HOLD_S), 0.0, 0
    for passed, beyond, well in seen:
        at += passed
        told = 0 if well else told
        told += bound.read(at, beyond=beyond and not well, well=well)
        assert told <= 1


@given(st.floats(0, 100), st.integers(1, 400))
def test_a_counter_at_a_steady_pace_is_told_once_if_at_all(pace: float, seconds: int) -> None:
    rate = Rate(limit=60, window_s=60)
    rises = [rate.read(float(i), i * pace) for i in range(seconds)]
    told = [one for one in rises if one is not None]
    assert len(told) == (pace > 1.1 and max(0, seconds - 1) * pace > 60) or 0.9 < pace <= 1.1
    assert len(told) <= 1


def expected(values: Iterable[float]) -> float | None:
    """What a card that showed these, one a second, will show in 24 s."""
    trend, at = Trend(24.0), 0.0
    for at, value in enumerate(values):
        trend.note(at, value)
    return trend.ahead(at)


@given(st.floats(0.05, 2), st.floats(20, 80))
def test_a_trend_goes_on_as_it_went(slope: float, start: float) -> None:
    found = expected(start + slope * second for second in range(60))
    assert found == pytest.approx(start + slope * 83.0, abs=0.01 + 4 * slope)


@given(st.floats(-2, 0), st.floats(20, 80))
def test_what_stays_or_falls_has_no_trend(slope: float, start: float) -> None:
    assert expected(start + slope * second for second in range(60)) is None


@given(st.floats(2, 20), st.integers(25, 200))
def test_what_warms_up_to_a_load_has_no_trend(warm_s: float, seconds: int) -> None:
    assert expected(75 - 40 * math.exp(-second / warm_s) for second in range(seconds)) is None


def test_a_step_of_load_is_no_trend() -> None:
    for length in range(26, 90):
        assert expected([35.0] * 25 + [73.0] * (length - 25)) is None


@pytest.mark.parametrize("counter", ["pcie_replays", "nvlink_errors"])
def test_what_rose_while_nobody_heard_counts_for_nothing(counter: str) -> None:
    watch = CardWatch(HOLD_S)
    told = [
        watch.read(float(at), {counter: at / 60})
        for at in (*range(0, 600, 5), *range(1800, 2400, 5))
    ]
    assert not any(told)


def test_a_counter_of_which_was_told_before_is_told_again_only_after_it_was_well() -> None:
    watch = CardWatch(HOLD_S, told=["pcie_replays"])
    fast, slow = [5.0 * i for i in range(200)], [1000.0] * 100
    counts = [*fast, *slow, *(1000.0 + one for one in fast)]
    told = [len(watch.read(float(i), {"pcie_replays": one})) for i, one in enumerate(counts)]
    assert (sum(told[:200]), sum(told)) == (0, 1)


def test_who_was_told_of_before_is_told_again_only_after_it_was_well() -> None:
    watch = CardWatch(HOLD_S, BEST, told=["nvlink_mb_s"])
    slow, well = {"nvlink_mb_s": 0.5 * BEST}, {"nvlink_mb_s": BEST}
    told = [
        len(watch.read(float(i), one)) for i, one in enumerate([slow] * 20 + [well] + [slow] * 20)
    ]
    assert (sum(told[:20]), sum(told)) == (0, 1)
