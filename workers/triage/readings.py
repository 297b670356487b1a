"""What a card's sensors mean, over time: the counts come from `workers.readings`."""

from __future__ import annotations

from collections.abc import Sequence

from workers import readings
from workers.triage.lines import RECOVERY_ACTIONS
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


def judge_flag(pci: str, name: str, value: float) -> LineVerdict | None:
    """What NVML says of a card's memory, or wants done: see `readings.FLAGS`. None for nothing.

    NVIDIA's memory guide: a pending remap takes effect with a reset; where one failed the card is
    for RMA; beyond the threshold of SRAM errors the field diagnostic decides.
    """
    if not value:
        return None
    if name == "remap_pending":
        return LineVerdict(
            "remap-pending", pci, "hardware", "reset_gpu", "idle", "nvidia-memory-guide",
            "a row of its memory waits for a reset to be remapped", reset_when_idle=True,
        )  # fmt: skip
    if name == "remap_failed":
        return LineVerdict(
            "remap-failed", pci, "hardware", "contact_vendor", "now", "nvidia-memory-guide",
            "a row of its memory could not be remapped",
        )  # fmt: skip
    if name == "sram_over_threshold":
        return LineVerdict(
            "sram-threshold", pci, "hardware", "field_diagnostic", "now", "nvidia-memory-guide",
            "uncorrectable errors of its SRAM are beyond the threshold", "contact_vendor",
        )  # fmt: skip
    action = RECOVERY_ACTIONS.get(int(value), "contact_vendor")
    return LineVerdict(
        "recovery-action", pci, "hardware", action, "now", "driver-recovery-action",
        f"NVML says that the driver wants action {int(value)}",
    )  # fmt: skip
