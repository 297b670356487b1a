"""What triage says of one observation, and how two of its words compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Fault = Literal["hardware", "driver", "program", "fabric", "platform", "unknown"]
Urgency = Literal["now", "next_checkpoint", "idle", "none"]
#: The most urgent first.
URGENCIES: tuple[Urgency, ...] = get_args(Urgency)

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
#: Actions that only a person, or the vendor, can take; of the field diagnostic see `is_for_people`.
FOR_PEOPLE = frozenset(
    {"undecodable", "update_software", "check_mechanicals", "field_diagnostic", "contact_vendor"}
)
#: Of these a fault lasts until somebody has done it: seen again before, it is the same one.
LASTING = (NODE_REPAIRS | FOR_PEOPLE) - {"undecodable", "update_software"}
#: The code of a card that does not answer.
SILENT = "gpu-unreadable"
#: Codes that say that a card is gone, not why: a code of the driver names it better.
VAGUE_CODES = frozenset({"gpu-lost", SILENT})


@dataclass(frozen=True)
class LineVerdict:
    """What one kernel line means."""

    code: str  # "xid-79", "sxid-20034", "gpu-lost", "oom"
    pci: str
    fault: Fault
    action: str
    #: "idle" and "none": whatever the action, it takes no node out by itself.
    urgency: Urgency
    #: Which rule said so, with its authority.
    rule: str
    #: A sentence for the on-call engineer.
    summary: str
    #: What comes after the action, or if that does not help: one of ACTIONS, or the vendor's word.
    follow_up: str = ""
    #: A reset is wanted once the node is idle, whatever is done now.
    reset_when_idle: bool = False
    #: The vendor's own rule has the card replaced: no rung of the ladder would mend it.
    replace_card: bool = False


def gravest(verdicts: Iterable[LineVerdict]) -> tuple[LineVerdict, ...]:
    """The same verdicts, those that call for most first, of those the most urgent, and of those the
    best named; a silence after the fault that explains it."""
    verdicts = list(verdicts)
    explained = any(explains_silence(v.action, v.urgency) for v in verdicts)
    return tuple(
        sorted(
            verdicts,
            key=lambda v: (
                v.urgency == "none",
                explained and v.code == SILENT,
                -ACTIONS.index(v.action),
                URGENCIES.index(v.urgency),
                v.code in VAGUE_CODES,
            ),
        )
    )


def explains_silence(action: str, urgency: str) -> bool:
    """Whether what calls for this on a card is why the card does not answer. Its repair comes
    sooner than one for the silence would, and shows whether the card answers after it."""
    return action in NODE_REPAIRS and urgency in ("now", "next_checkpoint")


def stronger(one: str, other: str) -> str:
    """Of two actions the one that does more."""
    return max(one, other, key=ACTIONS.index)


def is_for_people(action: str, fault: str, *, can_examine: bool) -> bool:
    """Whether only a person can do it. `can_examine`: the card that it is about is known, and its
    node has the vendor's field diagnostic."""
    by_tool = action == "field_diagnostic" and fault == "hardware" and can_examine
    return action in FOR_PEOPLE and not by_tool


def ends_program(verdict: LineVerdict) -> bool:
    """Whether it ends the program on the card, whatever else is wanted of that."""
    of_program = verdict.fault == "program" and verdict.urgency != "none"
    return verdict.action == "restart_app" or of_program


def condemns_node(verdict: LineVerdict) -> bool:
    """Whether the line speaks against the node itself, not just against the program on it."""
    if verdict.urgency not in ("now", "next_checkpoint"):
        return False
    return verdict.action in NODE_REPAIRS or (
        verdict.action in FOR_PEOPLE and verdict.fault in ("hardware", "fabric")
    )
