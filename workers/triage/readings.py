"""What a card's sensors mean, over time: the counts come from `workers.readings`."""

from __future__ import annotations

from collections.abc import Sequence

from workers import readings
from workers.triage.verdicts import LineVerdict


def judge_errors(pci: str, errors: Sequence[float], window_s: float) -> LineVerdict | None:
    """What the corrected memory errors of a card mean, counted in equal parts of a window.

    Its memory is failing but still corrects itself: the card can be emptied before the fault, at
    a moment that costs its job nothing. None if they do not accelerate.
    """
    if not readings.accelerates(errors):
        return None
    counts = ", ".join(f"{count:.0f}" for count in errors)
    return LineVerdict(
        code="ecc-drift",
        pci=pci,
        fault="hardware",
        action="drain_and_reset",
        urgency="next_checkpoint",
        rule="ecc-acceleration",
        summary=f"corrected memory errors accelerate: {counts} in each "
        f"{window_s / readings.PARTS:g} s, the newest last",
    )
