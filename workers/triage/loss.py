"""Why a replica was lost, and whether its node may hold it again: from evidence to a cause."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from workers.triage.verdicts import SILENT, Fault, LineVerdict, condemns_node, ends_program

#: A program that a fault of its card ends has ended by then, in seconds.
PROGRAM_ENDS_S = 5.0
#: Causes that nothing but silence speaks for: a word of the replica and its node takes them back.
SILENCE_ALONE = frozenset({"node-lost", "replica-unresponsive"})


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
    #: A SIGTERM that nobody here had sent told it to end, and it left at a step's edge.
    sent_away: bool = False
    #: Somebody ordered its process to be stopped.
    stopped_by_order: bool = False
    #: It was emptied off its node, and the replica has no other process: gone, whoever tells of it.
    ended: bool = False
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


@dataclass(frozen=True)
class PlaceEvidence:
    """The same of a replica's process on one of its nodes, and what its ranks said."""

    loss: LossEvidence
    #: How many of its ranks said why they ended: those whose peers died do, one that was killed
    #: does not.
    said: int = 0
    #: When the first of them did, or its end was seen, as a Unix time.
    at: float = math.inf


_STOPPED_BY_ORDER = Cause(
    "platform",
    "stopped-by-order",
    True,
    "its process was stopped by order, because its node is being taken out",
    "process-exit",
)


_SENT_AWAY = Cause(
    "platform",
    "process-sent-away",
    True,
    "a SIGTERM that Drydock had not sent told its process to end, and it left at the end of a "
    "step; the node is healthy, but it may be about to go",
    "process-exit",
)


def cause_of_loss(evidence: LossEvidence) -> Cause | NotYet | NothingLost:
    """Name the cause of a replica's loss, the strongest evidence first.

    Hardware evidence outranks the way in which the process ended: a lost card kills its process
    too. A node that went silent outranks a process's end that was told before it did. But silence
    alone loses nothing: an agent may be away while its rank trains on.
    """
    gone = evidence.process_exited or evidence.peers_lost_it or evidence.ended
    condemning = next(filter(condemns_node, evidence.verdicts), None)
    line = next(filter(ends_program, evidence.verdicts), None)
    if condemning is not None and (gone or evidence.node_reachable):
        # Also where the process still stands: it hangs on the card, and its node is being emptied.
        return _line_cause(condemning, node_fit=False)
    if not gone and evidence.still_commits and not evidence.node_reachable:
        # It may be away for days: whoever loses the replica says so.
        wait_s = 1.0 if evidence.waited_s < evidence.patience_s else 10.0
        return NotYet(wait_s, "its node's agent is silent, but the replica commits steps")
    if not gone and evidence.node_reachable:
        if line is not None and evidence.waited_s < PROGRAM_ENDS_S:
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
            SILENT,
            False,
            f"a card of the node does not answer: {evidence.card_silent}",
            "card-silent",
            "reboot",
        )
    if line is not None:
        return _line_cause(line, node_fit=True)
    if evidence.sent_away:
        return _SENT_AWAY
    if evidence.process_exited:
        return _process_cause(evidence)
    if evidence.ended:
        return _STOPPED_BY_ORDER
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


def first_to_go(places: Sequence[PlaceEvidence]) -> int | NotYet:
    """Which of a replica's processes on several nodes took the others along.

    One whose node is unfit, by its hardware or by its silence. Else, of those that are gone, the
    one of which the fewest ranks said why, and that went first: for the end of the others is told
    by ranks that lost a peer. While all that are gone said why, and others are not gone, one of
    those may be it yet.
    """
    unfit = [n for n, place in enumerate(places) if _is_unfit(place.loss)]
    if unfit:
        return min(unfit, key=lambda n: (not places[n].loss.verdicts, places[n].at, n))
    gone = [n for n, place in enumerate(places) if place.loss.process_exited or place.loss.ended]
    if not gone:
        return 0
    others = len(gone) < len(places) and places[0].loss.waited_s < places[0].loss.patience_s
    if others and all(places[n].said for n in gone):
        return NotYet(0.5, "its ranks lost a peer on another node, of which nothing is told")
    return min(gone, key=lambda n: (places[n].said, places[n].at, n))


def _is_unfit(loss: LossEvidence) -> bool:
    silent = not loss.node_reachable and not loss.still_commits
    return silent or bool(loss.card_silent) or any(map(condemns_node, loss.verdicts))


def _line_cause(line: LineVerdict, node_fit: bool) -> Cause:
    action = "restart_app" if node_fit else line.action
    return Cause(line.fault, line.code, node_fit, line.summary, line.rule, action, line.pci)


def _process_cause(evidence: LossEvidence) -> Cause:
    if evidence.stopped_by_order:
        return _STOPPED_BY_ORDER
    if evidence.exit_reason == "reboot":
        return Cause(
            "platform",
            "node-rebooted",
            False,
            "its node booted anew, which ended its process",
            "boot-id-changed",
            "reset_gpu",  # the gentlest rung after which it is validated: it has had its restart
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
