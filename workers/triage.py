"""What broke, and whose fault it is: pure functions from evidence to a verdict with its reasons.

No Django, no I/O, no clock: the same evidence gives the same verdict, so decisions can be replayed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from node_agent.collectors import xid
from workers import readings

Fault = Literal["hardware", "driver", "program", "fabric", "platform", "unknown"]
Urgency = Literal["now", "next_checkpoint", "idle", "none"]

#: What a failure can call for, gentlest first: of two that hold, the later one decides.
ACTIONS = (
    "ignore",
    "follow_primary",
    "undecodable",
    "restart_app",
    "update_software",
    "reset_gpu",
    "drain_and_reset",
    "reboot",
    "power_cycle",
    "check_mechanicals",
    "field_diagnostic",
    "contact_vendor",
)
#: Actions that automation can take by itself, and that need the node emptied.
NODE_REPAIRS = frozenset({"reset_gpu", "drain_and_reset", "reboot", "power_cycle"})
#: Actions that only a person, or the vendor, can take.
FOR_PEOPLE = frozenset(
    {"undecodable", "update_software", "check_mechanicals", "field_diagnostic", "contact_vendor"}
)
#: A program that a fault of its card ends has ended by then, in seconds.
PROGRAM_ENDS_S = 5.0
#: Codes that say that a card is gone, not why: a code of the driver names it better.
VAGUE_CODES = frozenset({"gpu-lost", "gpu-unreadable"})
#: The driver's own recovery action in an XID 154, read by its number: NVML field 230 has the same.
RECOVERY_ACTIONS = {
    0: "ignore",
    1: "reset_gpu",
    2: "reboot",
    3: "drain_and_reset",  # drain P2P
    4: "drain_and_reset",
    5: "contact_vendor",  # IMEX domain
    6: "reset_gpu",  # bus reset
    7: "reboot",
}
_RECOVERY = re.compile(r"\bto\s+(?:0x)?([0-9a-f]+)\s*\(", re.IGNORECASE)


@dataclass(frozen=True)
class CatalogueEntry:
    """What the vendor says of one code."""

    number: int
    mnemonic: str
    description: str
    fault: Fault
    action: str
    #: The vendor marks the code as unused: it never takes a node out by itself.
    unused: bool


@dataclass(frozen=True)
class LineVerdict:
    """What one kernel line means."""

    code: str  # "xid-79", "sxid-20034", "gpu-lost"
    pci: str
    fault: Fault
    action: str
    urgency: Urgency
    #: Which rule said so, with its authority.
    rule: str
    #: A sentence for the on-call engineer.
    summary: str
    #: A reset is wanted once the node is idle, whatever is done now.
    reset_when_idle: bool = False


@dataclass(frozen=True)
class LossEvidence:
    """What is known about a replica that was lost, at one moment."""

    #: How the agent saw its process end: exit status, signal number, and why if not by itself.
    process_exited: bool = False
    #: A survivor said that it is gone.
    peers_lost_it: bool = False
    #: It committed a step after its node was last heard: the agent is away, the replica is not.
    still_commits: bool = False
    exit_code: int | None = None
    exit_signal: int | None = None
    exit_reason: str = ""
    node_reachable: bool = True
    #: Seconds since the node's last beat, and the lease that it has.
    silent_s: float = 0.0
    lease_s: float = 30.0
    #: Somebody ordered its process to be stopped.
    stopped_by_order: bool = False
    #: What the kernel lines of that node since shortly before the loss mean, the gravest first.
    verdicts: tuple[LineVerdict, ...] = ()
    #: A card of that node does not answer, and no kernel line says why.
    card_silent: str = ""
    #: Seconds since the loss, and how long a cause is looked for at the most.
    waited_s: float = 0.0
    patience_s: float = 40.0


@dataclass(frozen=True)
class Cause:
    """Why a replica was lost, and whether its node may hold it again."""

    fault: Fault
    code: str
    node_fit: bool
    summary: str
    rule: str
    action: str = "restart_app"
    pci: str = ""


@dataclass(frozen=True)
class NothingLost:
    """The replica trains and its node is heard: whatever was told is over."""

    summary: str


@dataclass(frozen=True)
class NotYet:
    """No cause can be named yet; look again when something is heard, or in `wait_s` seconds."""

    wait_s: float
    reason: str


def judge_line(line: str, xids: Mapping[int, CatalogueEntry]) -> LineVerdict | None:
    """What a kernel line says of a card or a switch; None if nothing.

    The driver's own recovery action stands above the catalogue. Codes that the vendor marks as
    unused, and codes whose line would have to be decoded further, never take a node out alone.
    """
    parsed = xid.parse(line)
    if isinstance(parsed, xid.LostGpu):
        return LineVerdict(
            "gpu-lost", parsed.pci, "hardware", "reboot", "now", "lost-card",
            "the card has fallen off the bus",
        )  # fmt: skip
    if isinstance(parsed, xid.SxidLine):
        return LineVerdict(
            f"sxid-{parsed.code}", parsed.pci, "fabric", "undecodable", "now", "sxid",
            f"SXid {parsed.code} of an NVSwitch",
        )  # fmt: skip
    if parsed is None:
        return None
    entry = xids.get(parsed.code)
    if parsed.code == 154:
        return _recovery_action(parsed)
    if entry is None:
        return LineVerdict(
            f"xid-{parsed.code}", parsed.pci, "unknown", "undecodable", "now", "not-in-catalogue",
            f"XID {parsed.code}, which the catalogue does not know",
        )  # fmt: skip
    return LineVerdict(
        code=f"xid-{parsed.code}",
        pci=parsed.pci,
        fault=entry.fault,
        action="ignore" if entry.unused else entry.action,
        urgency="now",
        rule="xid-catalogue: unused code" if entry.unused else "xid-catalogue",
        summary=f"XID {parsed.code}: {entry.description}",
        # NVIDIA on XID 94: restart the program, others go on, reset when convenient.
        reset_when_idle=parsed.code == 94,
    )


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


def gravest(verdicts: Iterable[LineVerdict]) -> tuple[LineVerdict, ...]:
    """The same verdicts, those that call for most first, and of those the best named."""
    return tuple(sorted(verdicts, key=lambda v: (-ACTIONS.index(v.action), v.code in VAGUE_CODES)))


def condemns_node(verdict: LineVerdict) -> bool:
    """Whether the line speaks against the node itself, not just against the program on it."""
    return verdict.action in NODE_REPAIRS or (
        verdict.action in FOR_PEOPLE and verdict.fault in ("hardware", "fabric")
    )


def _recovery_action(parsed: xid.XidLine) -> LineVerdict:
    number = _RECOVERY.search(parsed.text)
    action = RECOVERY_ACTIONS.get(int(number.group(1), 16), "") if number else ""
    return LineVerdict(
        code="xid-154",
        pci=parsed.pci,
        fault="hardware",
        action=action or "undecodable",
        urgency="now",
        rule="driver-recovery-action",
        summary=f"the driver says: {parsed.text.strip() or 'recovery action changed'}",
    )


def cause_of_loss(evidence: LossEvidence) -> Cause | NotYet | NothingLost:
    """Name the cause of a replica's loss, the strongest evidence first.

    Hardware evidence outranks the way in which the process ended: a lost card kills its process
    too. A node that went silent outranks a process's end that was told before it did. But silence
    alone loses nothing: an agent may be away while its rank trains on.
    """
    gone = evidence.process_exited or evidence.peers_lost_it
    line = next(iter(evidence.verdicts), None)
    if line is not None and condemns_node(line) and (gone or evidence.node_reachable):
        # Also where the process still stands: it hangs on the card, and its node is being emptied.
        return _line_cause(line, node_fit=False)
    if not gone and evidence.still_commits and not evidence.node_reachable:
        return NotYet(1.0, "its node's agent is silent, but the replica commits steps")
    if not gone and evidence.node_reachable:
        if line is not None and line.action == "restart_app" and evidence.waited_s < PROGRAM_ENDS_S:
            # The kernel speaks first; the program that it speaks of ends a moment later.
            return NotYet(0.5, f"{line.code} hit the program, whose end has not been told")
        return NothingLost("its node is heard again, and nobody lost the replica")
    if not evidence.node_reachable:
        return Cause(
            "platform",
            "node-lost",
            False,
            f"the node has been silent for {evidence.silent_s:.1f} s, beyond its lease of "
            f"{evidence.lease_s:g} s, and its replica is gone",
            "lease-lost",
            "power_cycle",
        )
    if evidence.card_silent:
        return Cause(
            "hardware",
            "gpu-unreadable",
            False,
            f"a card of the node does not answer: {evidence.card_silent}",
            "card-silent",
            "reboot",
        )
    if line is not None and line.action == "restart_app":
        return _line_cause(line, node_fit=True)
    if evidence.process_exited:
        return _process_cause(evidence)
    if evidence.waited_s < evidence.patience_s:
        return NotYet(
            min(1.0, evidence.patience_s - evidence.waited_s),
            "the peers lost it; neither its agent nor its lease has said why",
        )
    return Cause(
        "unknown",
        "replica-unresponsive",
        False,
        f"its peers lost it {evidence.waited_s:.0f} s ago, its node beats, and its agent says "
        "nothing of its process: the node cannot be trusted with it",
        "silence",
        "power_cycle",
    )


def _line_cause(line: LineVerdict, node_fit: bool) -> Cause:
    return Cause(line.fault, line.code, node_fit, line.summary, line.rule, line.action, line.pci)


def _process_cause(evidence: LossEvidence) -> Cause:
    if evidence.stopped_by_order:
        return Cause(
            "platform",
            "stopped-by-order",
            True,
            "its process was stopped by order, because its node is being taken out",
            "process-exit",
        )
    if evidence.exit_reason == "reboot":
        return Cause(
            "platform",
            "node-rebooted",
            False,
            "its node booted anew, which ended its process",
            "boot-id-changed",
        )
    if evidence.exit_signal is not None:
        name = _signal_name(evidence.exit_signal)
        return Cause(
            "program",
            "process-killed",
            True,
            f"its process was killed by {name}; the node is healthy",
            "process-exit",
        )
    if evidence.exit_code is None:
        return Cause(
            "program",
            "process-vanished",
            True,
            "its process ended while its agent was away; the node is healthy",
            "process-exit",
        )
    return Cause(
        "program",
        "process-exited",
        True,
        f"its process exited with status {evidence.exit_code}; the node is healthy",
        "process-exit",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
