"""What a finding of `workers.detectors` in a card's sensors, or a port's counters, means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers import detectors
from workers.triage.lines import RECOVERY_ACTIONS
from workers.triage.verdicts import SILENT, LineVerdict

#: NVIDIA's memory guide: a card is replaced once so many of its rows were remapped.
MAX_REMAPPED_ROWS = 512
#: What a job says of one of its replicas that speaks of the node: kinds of its troubles.
BLAMES = frozenset({"straggler", "diverged"})
#: What a rank says of its own node, if its subject is that node's disk or memory: a failure of the
#: disk is called so, and one of the memory as follows, for they are two faults.
DAMAGED, DAMAGED_MEMORY = "checkpoint_damaged", "memory_damaged"
#: NVML's clocks event reasons, in words.
_REASONS = {
    0x8: "its hardware slows it",
    0x20: "it is slowed for its heat",
    0x40: "its hardware slows it for its heat",
    0x80: "a power brake slows it",
}


def judge_reading(pci: str, data: Mapping[str, Any]) -> LineVerdict | None:
    """What a stored reading means: `data` as the keeper wrote it. None for nothing."""
    name, value = str(data.get("reading", "")), float(data.get("value", 0.0))
    if name in detectors.CARD_FLAGS:
        return judge_flag(pci, name, value)
    if name == "ecc_corrected":
        return judge_errors(pci, data.get("errors", ()), data.get("window_s", 0.0))
    if name in detectors.PORT_ERRORS_AN_HOUR or name.startswith("port_"):
        return _judge_port(name, value, str(data.get("port", "a port")))
    return _judge_watched(pci, name, value, data)


def judge_silence(pci: str, reason: str) -> LineVerdict:
    """What it means that a card has not answered for a while, and no kernel line says why: `reason`
    in its agent's words. What trains there may not need what was asked of it: it trains on."""
    why = reason or "no reason given"
    return LineVerdict(
        SILENT, pci, "hardware", "reboot", "idle", "card-silent",
        f"it does not answer: {why}", follow_up="contact_vendor",
    )  # fmt: skip


def judge_blame(kind: str, told: str) -> LineVerdict:
    """What it means that a job finds one of its replicas unlike the others, one of BLAMES, or that
    a node's disk does not give back what was written to it, DAMAGED, or its memory what it was
    given to keep, DAMAGED_MEMORY: `told` in its words.

    A straggler may be held back by its card, its host or a neighbour's program; what a replica
    holds that nobody else does may be the error of a card, of memory, or the script's own doing.
    No node is taken out for what may be a script's, nor for a disk or memory while there are other
    copies of what was damaged: somebody looks.
    """
    return LineVerdict(kind, "", "unknown", "field_diagnostic", "idle", "told-by-the-job", told)


def judge_errors(pci: str, errors: Sequence[float], window_s: float) -> LineVerdict | None:
    """What the corrected memory errors of a card mean, counted in equal parts of a window.

    Its memory is failing but still corrects itself: the card can be emptied before the fault, at
    a moment that costs its job nothing. None if they do not accelerate.
    """
    if not detectors.accelerates(errors):
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
        f"{window_s / detectors.GROWTH_PARTS:g} s, the newest last",
    )


def judge_flag(pci: str, name: str, value: float) -> LineVerdict | None:
    """What one of `detectors.CARD_FLAGS`, NVML's word on memory, calls for; None for nothing.

    NVIDIA's memory guide: a pending remap takes effect with a reset; the card is for RMA where a
    remap failed, where a bank has no spare row left (eight uncorrectable remaps), and at 512 remaps
    in all; beyond the threshold of SRAM errors the field diagnostic decides.
    """
    if not value:
        return None
    if name == "remap_pending":
        return LineVerdict(
            "remap-pending", pci, "hardware", "reset_gpu", "idle", "nvidia-memory-guide",
            "a row of its memory waits for a reset to be remapped", reset_when_idle=True,
        )  # fmt: skip
    if name == "sram_over_threshold":
        return LineVerdict(
            "sram-threshold", pci, "hardware", "field_diagnostic", "next_checkpoint",
            "nvidia-memory-guide", "uncorrectable errors of its SRAM are beyond the threshold",
            "contact_vendor",
        )  # fmt: skip
    if name == "recovery_action":
        action = RECOVERY_ACTIONS.get(int(value), "contact_vendor")
        return LineVerdict(
            "recovery-action", pci, "hardware", action, "now", "driver-recovery-action",
            f"NVML says that the driver wants action {int(value)}",
        )  # fmt: skip
    why = beyond_remapping({name: value})
    if not why:
        return None
    code = "remap-failed" if name == "remap_failed" else "remap-exhausted"
    return LineVerdict(
        code, pci, "hardware", "contact_vendor", "next_checkpoint", "nvidia-memory-guide", why,
        replace_card=True,
    )  # fmt: skip


def beyond_remapping(shown: Mapping[str, float]) -> str:
    """Why NVIDIA's memory guide has a card replaced that shows these values; "" if it has not.

    Its fourth rule, a row that was remapped and fails again, NVML shows as a remap that failed.
    """
    if shown.get("remap_failed"):
        return "a row of its memory could not be remapped"
    if shown.get("exhausted_banks"):
        return f"{shown['exhausted_banks']:.0f} of its memory banks have no spare row left"
    rows = shown.get("remapped_rows", 0.0)
    if rows >= MAX_REMAPPED_ROWS:
        return f"{rows:.0f} rows of its memory were remapped (limit {MAX_REMAPPED_ROWS})"
    return ""


def _judge_watched(
    pci: str, name: str, value: float, data: Mapping[str, Any]
) -> LineVerdict | None:
    if name == "nvlink_mb_s":
        base = float(data.get("baseline") or 1.0)
        return LineVerdict(
            "nvlink-slow", pci, "hardware", "drain_and_reset", "next_checkpoint",
            "nvlink-below-baseline",
            f"its NVLinks carry {value / 1000:.0f} GB/s together, {value / base:.0%} of the "
            f"{base / 1000:.0f} GB/s that they did", "field_diagnostic",
        )  # fmt: skip
    if name == "nvlink_errors":
        return LineVerdict(
            "nvlink-errors", pci, "hardware", "reset_gpu", "idle", "nvlink-error-rate",
            f"its NVLinks recovered from {value:.0f} errors in a minute", "field_diagnostic",
            reset_when_idle=True,
        )  # fmt: skip
    if name == "temperature_c":
        return LineVerdict(
            "overheating", pci, "platform", "check_mechanicals", "idle", "near-its-own-limit",
            f"it is at {value:.0f} °C, on its way to {data.get('expected', value):.0f} °C, with a "
            f"limit of {data.get('limit', 0.0):.0f} °C",
        )  # fmt: skip
    if name == "throttle_reasons":
        held = int(value) & detectors.THROTTLE
        why = ", ".join(words for bit, words in _REASONS.items() if held & bit)
        return LineVerdict(
            "throttled", pci, "platform", "check_mechanicals", "idle", "clocks-event-reasons",
            f"its clocks are held back: {why}",
        ) if why else None  # fmt: skip
    if name == "pcie_lanes":
        return LineVerdict(
            "pcie-downgrade", pci, "platform", "check_mechanicals", "idle", "pcie-width",
            f"it runs on {value:.0f} of {data.get('most', 0.0):.0f} PCIe lanes",
        )  # fmt: skip
    if name == "pcie_replays":
        return LineVerdict(
            "pcie-replays", pci, "platform", "check_mechanicals", "idle", "pcie-replay-rate",
            f"{value:.0f} PCIe replays in a minute, where "
            f"{detectors.PCIE_REPLAYS_A_MINUTE} are the most for a healthy link",
        )  # fmt: skip
    return None


def _judge_port(name: str, value: float, port: str) -> LineVerdict | None:
    if name == "port_drop":
        return LineVerdict(
            "fabric-drop", "", "fabric", "check_mechanicals", "now", "port-down",
            f"port {port} has been down for {value:.0f} s",
        )  # fmt: skip
    if name == "port_flaps":
        return LineVerdict(
            "fabric-flaps", "", "fabric", "check_mechanicals", "next_checkpoint", "port-flaps",
            f"port {port} went down {value:.0f} times, for "
            f"{detectors.FLAP_DOWN_S:.0f} s and longer",
        )  # fmt: skip
    if value <= detectors.PORT_ERRORS_AN_HOUR.get(name, 0):
        return None
    return LineVerdict(
        "fabric-errors", "", "fabric", "check_mechanicals", "idle", "port-error-rate",
        f"port {port}: {value:.0f} {name.replace('_', ' ')} within an hour",
    )  # fmt: skip
