"""How far up the repair ladder a node goes, and when a card has had enough. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from node_agent.collectors.xid import same_card

#: What automation can do to a node, gentlest first; the last hands the card to its vendor.
LADDER = ("reset_gpu", "reboot", "power_cycle", "field_diagnostic", "rma")
#: Where each action begins.
_START = {
    "reset_gpu": "reset_gpu",
    "drain_and_reset": "reset_gpu",
    "reboot": "reboot",
    "power_cycle": "power_cycle",
    "field_diagnostic": "field_diagnostic",
}
#: A PCI address with its domain, as the kernel or NVML writes it, in lower case.
_PCI = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\b")
#: A restart that did not cure the same fault of the same card is not tried again.
_RESTARTS = frozenset({"reboot", "power_cycle"})


@dataclass(frozen=True)
class Record:
    """The repair record that a decision rests on: the failed card's, whichever node it sat in."""

    #: Attempts at each rung in the last 24 hours.
    attempts: Mapping[str, int] = field(default_factory=dict)
    #: Rungs that were tried for this very code in the last 30 days, after which it came again.
    in_vain: frozenset[str] = frozenset()
    #: Why NVIDIA's memory guide has the card replaced: see `triage.beyond_remapping`; or "".
    beyond_remapping: str = ""


@dataclass(frozen=True)
class Choice:
    """The rung to take, and why."""

    rung: str
    reason: str


def choose_rung(
    action: str,
    record: Record,
    *,
    limit: int,
    card_known: bool,
    can_examine: bool = False,
    not_below: str = "",
    not_helped: str = "",
) -> Choice | None:
    """The gentlest rung that the failure calls for and the record still allows.

    `not_below` is set once a gentler rung was tried in this very repair and did not help, with
    `not_helped` in words. None: no rung is left that automation may take, a person decides.

    A fault that calls for a restart and comes again on the same card after one goes to the vendor
    (NVIDIA's catalogue on XID 79: restart, then contact support), and repairs that are repeated
    without end are the commonest complaint about automatic remediation, so `limit` attempts in 24
    hours close a rung. `card_known`: there is a card to blame; without one nothing is examined or
    goes to the vendor. `can_examine`: the node has the vendor's field diagnostic, whose word a
    vendor wants before it takes a card back; without it that rung is passed over, and what calls
    for it is a person's. A card that NVIDIA's memory guide has replaced goes to the vendor at once,
    whatever brought it here: no reset gives it new rows.
    """
    if record.beyond_remapping and card_known:
        return Choice("rma", f"{record.beyond_remapping} (NVIDIA's memory guide)")
    start = _START.get(action)
    can_examine = can_examine and card_known
    if start is None or (start == "field_diagnostic" and not (can_examine or not_below)):
        return None
    begin = max(LADDER.index(start), LADDER.index(not_below) if not_below else 0)
    reasons = [f"{action.replace('_', ' ')} is what the failure calls for"]
    if not_below:
        reasons.append(not_helped or "a gentler rung did not help")
    restarts_in_vain = bool(record.in_vain & _RESTARTS)
    for rung in LADDER[begin:]:
        tried = record.attempts.get(rung, 0)
        if rung == "rma":
            break
        if rung == "field_diagnostic" and not can_examine:
            continue
        if rung == "field_diagnostic" and restarts_in_vain and start in _RESTARTS:
            continue
        if rung in _RESTARTS and restarts_in_vain:
            again = "the same fault of the same card came again after a restart"
            reasons += [again] if again not in reasons else []
        elif rung in record.in_vain:
            reasons.append(f"the failure came again after a {_rung_text(rung)}")
        elif tried >= limit:
            reasons.append(f"{_rung_text(rung)} was tried {tried} times in 24 h (limit {limit})")
        else:
            reasons.append(f"{tried} of {limit} attempts in 24 h")
            return Choice(rung, "; ".join(reasons))
    if not card_known:
        return None
    return Choice("rma", "; ".join(reasons))


def next_rung(rung: str) -> str:
    """The rung above."""
    return LADDER[min(LADDER.index(rung) + 1, len(LADDER) - 1)]


def diagnosis_passed(output: dict[str, object]) -> tuple[bool, str]:
    """Whether a diagnostic's output lets a node return: a skipped test is not a passed one."""
    tests = output.get("tests")
    if not isinstance(tests, list) or not tests:
        return False, "the diagnostic ran no test"
    not_passed = [
        f"{test.get('name')}: {test.get('outcome')} {test.get('detail', '')}".strip()
        for test in tests
        if test.get("outcome") != "passed"
    ]
    if not_passed:
        return False, "; ".join(not_passed)
    return True, f"{len(tests)} of {len(tests)} tests passed"


def cards_named(output: Mapping[str, object], cards: Mapping[str, str]) -> frozenset[str]:
    """Which cards a diagnostic's tests that did not pass speak of, by UUID. `cards`: the node's,
    their PCI address by UUID, as NVML writes it."""
    tests = output.get("tests")
    told = " ".join(
        str(test.get("detail", "")).lower()
        for test in (tests if isinstance(tests, list) else [])
        if test.get("outcome") != "passed"
    )
    places = _PCI.findall(told)
    return frozenset(
        uuid
        for uuid, pci in cards.items()
        if uuid.lower() in told or any(same_card(place, pci) for place in places)
    )


def _rung_text(rung: str) -> str:
    return rung.replace("_", " ")
