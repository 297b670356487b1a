"""What broke, and whose fault it is: pure functions from evidence to a verdict with its reasons.

No Django, no I/O, no clock: the same evidence gives the same verdict, so decisions can be replayed.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Literal

#: A kernel line of the NVIDIA driver about a fault: "NVRM: Xid (PCI:0000:1b:00): 79, …" and kin,
#: also SXid of a switch and a lost card without any code.
_HARDWARE_LINE = re.compile(
    r"NVRM:.*\bXid\b|\bSXid\b|GPU has fallen off the bus|GPU is lost|mce: \[Hardware Error\]",
    re.IGNORECASE,
)

Fault = Literal["hardware", "program", "platform", "unknown"]


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
    #: Kernel lines and unreadable cards of that node since shortly before the loss, verbatim.
    hardware_lines: tuple[str, ...] = ()
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


@dataclass(frozen=True)
class NothingLost:
    """The replica trains and its node is heard: whatever was told is over."""

    summary: str


@dataclass(frozen=True)
class NotYet:
    """No cause can be named yet; look again when something is heard, or in `wait_s` seconds."""

    wait_s: float
    reason: str


def is_hardware_line(line: str) -> bool:
    """Whether a kernel line speaks of a fault of a card, a switch or the machine."""
    return _HARDWARE_LINE.search(line) is not None


def cause_of_loss(evidence: LossEvidence) -> Cause | NotYet | NothingLost:
    """Name the cause of a replica's loss, the strongest evidence first.

    Hardware evidence outranks the way in which the process ended: a lost card kills its process
    too. A node that went silent outranks a process's end that was told before it did. But silence
    alone loses nothing: an agent may be away while its rank trains on.
    """
    gone = evidence.process_exited or evidence.peers_lost_it
    if not gone and evidence.still_commits and not evidence.node_reachable:
        return NotYet(1.0, "its node's agent is silent, but the replica commits steps")
    if not gone and evidence.node_reachable:
        return NothingLost("its node is heard again, and nobody lost the replica")
    if not evidence.node_reachable:
        return Cause(
            "platform",
            "node-lost",
            False,
            f"the node has been silent for {evidence.silent_s:.1f} s, beyond its lease of "
            f"{evidence.lease_s:g} s, and its replica is gone",
            "lease-lost",
        )
    if evidence.hardware_lines:
        return Cause(
            "hardware",
            "hardware-fault",
            False,
            f"the node's kernel reported a hardware fault: {evidence.hardware_lines[0]}",
            "kernel-line",
        )
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
    )


def _process_cause(evidence: LossEvidence) -> Cause:
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
