"""A target is called kept only where the whole interval of what was measured is within it."""

from __future__ import annotations

import pytest

from benchmarks.peer_memory import judged


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        ((0.001, -0.01, 0.01), "kept"),
        ((0.03, 0.011, 0.05), "MISSED"),
        ((0.005, -0.01, 0.011), "kept at the median, the interval has it within"),
        ((0.02, 0.01, 0.05), "MISSED at the median, the interval has it within"),
    ],
)
def test_a_target_is_judged_by_the_interval(
    share: tuple[float, float, float], verdict: str
) -> None:
    assert judged(share, 0.01) == verdict
