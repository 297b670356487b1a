"""The faults that a simulated machine can have: what each does to a card, its log, its programs.

Descriptions only; `machine` makes them happen, in the order in which they do: the card first, then
the kernel says so, then the programs feel it. Standard library only.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any


class NoSuchCard(Exception):
    """No card with that index is fitted."""


@dataclass(frozen=True)
class Fault:
    """One kind. In `lines` may stand {pci}, {who} (pid and name of a program) and {row}."""

    lines: tuple[str, ...]
    #: Which of the lines names the fault.
    main: int
    #: What becomes of the programs; None: they notice nothing. A lost card leaves them stuck in the
    #: driver, which no signal but SIGKILL ends: they are stopped.
    signal: signal.Signals | None
    #: What it changes in the card's entry, and what it stamps there with the time.
    flags: dict[str, bool | int | float] = field(default_factory=dict)
    stamp: str = ""
    uncorrected: int = 0
    #: The fault that comes of it unless the card is reset before, and after how many seconds.
    leads_to: str = ""
    after_s: float = 0.0

    def mark(self, card: dict[str, Any]) -> dict[str, Any]:
        """The card's entry in hardware.json once it has this fault."""
        count = card.get("ecc_uncorrected", 0) + self.uncorrected
        marked = {**card, **self.flags, "ecc_uncorrected": count}
        return {**marked, self.stamp: time.time()} if self.stamp else marked

    def kernel_lines(self, card: dict[str, Any], pid: int | None) -> list[str]:
        who = "pid='<unknown>', name=<unknown>" if pid is None else f"pid={pid}, name=python3"
        row = f"0x{int.from_bytes(os.urandom(4)) << 4:016x}"
        return [line.format(pci=kernel_pci(card), who=who, row=row) for line in self.lines]


_LOST = (
    "NVRM: Xid (PCI:{pci}): 79, {who}, GPU has fallen off the bus.",
    "NVRM: GPU {pci}.0: GPU has fallen off the bus.",
)
FAULTS = {
    "xid79": Fault(_LOST, 0, signal.SIGSTOP, flags={"unreadable": True}),
    # The same, and no boot brings the card back.
    "dead-card": Fault(_LOST, 0, signal.SIGSTOP, flags={"unreadable": True, "dead": True}),
    "xid94": Fault(
        (
            "NVRM: Xid (PCI:{pci}): 63, {who}, Row Remapper: New row ({row}) marked for remapping,"
            " reset gpu to activate.",
            "NVRM: Xid (PCI:{pci}): 94, {who}, Ch 00000008",
        ),
        1,
        signal.SIGABRT,
        flags={"contained": True},
        uncorrected=1,
    ),
    "xid31": Fault(
        (
            "NVRM: Xid (PCI:{pci}): 31, {who}, Ch 0000000d, intr 00000000. MMU Fault: ENGINE"
            " GRAPHICS GPCCLIENT_T1_1 faulted @ 0x7f_a0000000. Fault is of type FAULT_PDE"
            " ACCESS_TYPE_VIRT_READ",
        ),
        0,
        signal.SIGABRT,
    ),
    "xid48": Fault(
        (
            "NVRM: Xid (PCI:{pci}): 48, An uncorrectable double bit error (DBE) has been detected"
            " on GPU in the framebuffer at physAddr {row} partition 3, subpartition 0.",
        ),
        0,
        signal.SIGABRT,
        uncorrected=1,
    ),
    # Corrected errors come ever faster; no line says so before one cannot be corrected.
    "ecc-drift": Fault((), 0, None, stamp="drifts_since", leads_to="xid48", after_s=600.0),
    # What sensors alone show. A reset mends the links and the memory's flags; the others stay until
    # somebody has looked, who is played by fitting new cards.
    "nvlink-slow": Fault((), 0, None, flags={"nvlink_share": 0.7}),
    "nvlink-errors": Fault((), 0, None, stamp="nvlink_errors_since"),
    "overheating": Fault((), 0, None, stamp="heats_since"),
    "power-brake": Fault((), 0, None, flags={"throttle_reasons": 0x88}),
    "pcie-narrow": Fault((), 0, None, flags={"pcie_lanes": 8}),
    "pcie-replays": Fault((), 0, None, stamp="pcie_replays_since"),
    "port-down": Fault((), 0, None, flags={"port_down": True}),
    "port-flaps": Fault((), 0, None, stamp="port_flaps_since"),
    "port-errors": Fault((), 0, None, stamp="port_errors_since"),
    "remap-pending": Fault((), 0, None, flags={"remap_pending": True, "remapped_rows": 1}),
    "remap-failed": Fault((), 0, None, flags={"remap_failed": True, "remapped_rows": 9}),
    "bank-exhausted": Fault((), 0, None, flags={"exhausted_banks": 1, "remapped_rows": 8}),
    "sram-errors": Fault((), 0, None, flags={"sram_over_threshold": True}),
    "wants-reset": Fault((), 0, None, flags={"recovery_action": 1}),
}
#: A counter that rises rises so often in a second; a card that heats up does by so much.
COUNTS_A_SECOND, HEAT_A_SECOND_C = 5.0, 0.5
#: A port that flaps is down for the first of these seconds, and up for the others.
FLAP_DOWN_S, FLAP_PERIOD_S = 30.0, 50.0
#: Corrected errors of a drifting card: they double in this many seconds.
DOUBLING_S = 3.0
#: What a card shows at most; its counter has so many bits.
MAX_ERRORS = 2**20


def after_boot(card: dict[str, Any]) -> dict[str, Any]:
    """The card's entry once the machine has booted: only a dead card stays lost."""
    dead = card.get("dead", False)
    return {**after_reset(card), "unreadable": dead}


def after_reset(card: dict[str, Any]) -> dict[str, Any]:
    """The card's entry once it was reset: its counters begin anew, its bad rows are remapped."""
    zeroed = {
        "contained": False, "ecc_uncorrected": 0, "ecc_corrected": 0, "drifts_since": 0.0,
        "remap_pending": False, "recovery_action": 0, "nvlink_share": 1.0,
        "nvlink_errors_since": 0.0,
    }  # fmt: skip
    return {**card, **zeroed}


def corrected_errors(count: int, drifts_since: float, now: float) -> int:
    """What the counter of a card shows that has had `count` errors, and drifts since (0: never)."""
    if not drifts_since:
        return count
    doublings = max(0.0, now - drifts_since) / DOUBLING_S
    return min(MAX_ERRORS, count + int(4 * (2 ** min(doublings, 20.0) - 1)))


def count_since(since: float, now: float) -> int:
    """What a counter shows that rises since then (0: never)."""
    return int(max(0.0, now - since) * COUNTS_A_SECOND) if since else 0


def heat_since(since: float, now: float) -> float:
    """By how many degrees C a card is hotter that heats up since then (0: never)."""
    return max(0.0, now - since) * HEAT_A_SECOND_C if since else 0.0


def is_down_by_flaps(since: float, now: float) -> bool:
    """Whether a port is down at this moment that flaps since then (0: never)."""
    return bool(since) and (now - since) % FLAP_PERIOD_S < FLAP_DOWN_S


def boot_lines(card: dict[str, Any]) -> list[str]:
    """What the driver says of this card when it is loaded."""
    if not card.get("dead"):
        return []
    return [
        f"NVRM: The NVIDIA GPU {kernel_pci(card)}.0 (PCI ID: 10de:2330) installed in this system"
        " has fallen off the bus and is not responding to commands."
    ]


def kernel_pci(card: dict[str, Any]) -> str:
    """NVML's "00000000:1B:00.0" as the kernel writes it: "0000:1b:00"."""
    address = str(card["pci_address"]).lower().partition(".")[0]
    domain, _, rest = address.partition(":")
    return f"{domain[-4:]}:{rest}"
