"""What newcomers take leaves at the rate that was said, on a clock of the test's own."""

from __future__ import annotations

import threading

import pytest

from runtime.replica.pacing import Pace, bytes_per_second, pace_of
from tests.runtime.replicas import PATIENCE_S


class Clock:
    """Goes on when somebody waits."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += seconds

    def pace(self) -> Pace:
        return Pace(100, burst=50, now=self.now, wait=self.wait)


def test_a_burst_passes_at_once_and_what_follows_at_the_rate() -> None:
    clock = Clock()
    pace = clock.pace()

    pace.take(50)
    at_once = clock.time
    for _ in range(40):
        pace.take(10)

    assert at_once == 1000.0
    assert clock.time == pytest.approx(1004.0)


def test_a_pause_saves_up_a_burst_and_no_more() -> None:
    clock = Clock()
    pace = clock.pace()
    pace.take(50)
    clock.time += 3600
    resumed = clock.time

    pace.take(50)
    waited = clock.time - resumed
    pace.take(50)

    assert waited == 0.0
    assert clock.time == pytest.approx(resumed + 0.5)


def test_time_that_sending_took_is_not_waited_again() -> None:
    clock = Clock()
    pace = clock.pace()
    pace.take(50)

    clock.time += 0.4
    pace.take(50)

    assert clock.time == pytest.approx(1000.5)


def test_all_who_wait_at_once_share_the_rate() -> None:
    waits: list[float] = []
    pace = Pace(100, burst=50, now=lambda: 0.0, wait=waits.append)

    for _ in range(4):
        pace.take(50)

    assert waits == pytest.approx([0.5, 1.0, 1.5])


def test_who_waits_passes_when_it_is_closed() -> None:
    pace = Pace(1, burst=1)
    waiting = threading.Thread(target=pace.take, args=(10**6,), daemon=True)
    waiting.start()

    pace.close()
    waiting.join(PATIENCE_S)

    assert not waiting.is_alive()


@pytest.mark.parametrize(
    ("said", "rate"),
    [
        ("", None),
        ("200M", 200_000_000),
        ("1.5G", 1_500_000_000),
        ("12500k", 12_500_000),
        ("10000000", 10_000_000),
    ],
)
def test_a_rate_as_it_is_said(said: str, rate: int | None) -> None:
    assert bytes_per_second(said) == rate


def test_without_a_rate_nothing_is_held_up() -> None:
    assert pace_of(None) is None


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("fast", "DRYDOCK_RATE_CAP is 'fast'; give bytes per second, as 800M"),
        ("200MB", "is '200MB'; give bytes"),
        ("-1G", "is '-1G'; give bytes"),
        ("2M", "is 2M, 2,000,000 bytes per second; give at least 10,000,000"),
        ("0", "is 0, 0 bytes per second; give at least"),
    ],
)
def test_what_is_no_rate_is_refused(said: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        bytes_per_second(said)
