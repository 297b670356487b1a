"""What the registers of an NVLink error say: XID 74's bits, and the words of XID 144 to 150."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from node_agent.collectors.xid import XidLine
from workers.triage.catalogue import Catalogue, RegisterRule, UnitRule
from workers.triage.verdicts import ACTIONS

#: So many errors of parity or ECC on one link are chance; more are reported to the vendor.
PARITY_ERRORS = 2
#: Words that XID 74 prints.
REGISTERS = 7
XID_154 = "xid_154"


@dataclass(frozen=True)
class Decoded:
    """What the words call for."""

    action: str  # one of ACTIONS, or XID_154: the driver's recovery action decides
    follow_up: str
    rule: str
    why: str
    #: Counted for each link: one more of them, and it is no chance any more.
    parity: bool = False
    #: What another error brought about; if there is none it is to be reported.
    secondary: bool = False


def decode_registers(line: XidLine, catalogue: Catalogue, parity_before: int) -> Decoded | None:
    """XID 74's, NVLink up to generation 4; None if the line has not all of its words.

    `parity_before`: errors of parity or ECC that this link had before.
    """
    words = line.words
    if len(words) != REGISTERS or not any(words):
        return None
    found = {rule: bits for rule in catalogue.registers if (bits := _bits_of(rule, words))}
    known = {(word, bit) for rule, bits in found.items() if rule.bits for word, bit in bits}
    strongest: tuple[RegisterRule, str, str] | None = None
    parity = False
    for rule, bits in found.items():
        left = bits if rule.bits else bits - known
        if not left:
            continue
        action, follow_up = rule.action, ""
        if rule.group == "ecc_parity":
            parity = True
            often = parity_before >= PARITY_ERRORS
            action, follow_up = ("contact_vendor", "") if often else (action, "contact_vendor")
        elif rule.group == "secondary":
            follow_up = "contact_vendor"
        elif rule.group in ("watch", "possible_hardware", "marginal_signal"):
            follow_up = "field_diagnostic"
        if strongest is None or ACTIONS.index(action) > ACTIONS.index(strongest[1]):
            strongest = rule, action, follow_up
    if strongest is None:
        return None
    rule, action, follow_up = strongest
    where = ", ".join(f"word {word + 1} bit {bit}" for word, bit in sorted(found[rule])[:4])
    said = f": {rule.note}" if rule.note else ""
    return Decoded(
        action,
        follow_up,
        f"nvlink4-registers: {rule.group}",
        f"{where}{said}",
        parity,
        rule.group == "secondary",
    )


def _bits_of(rule: RegisterRule, words: tuple[int, ...]) -> frozenset[tuple[int, int]]:
    """The rule's bits that are set; all that are, for the one that means any other."""
    chosen = enumerate(words) if rule.word < 0 else [(rule.word, words[rule.word])]
    return frozenset(
        (number, bit)
        for number, word in chosen
        for bit in range(32)
        if word >> bit & 1 and (not rule.bits or bit in rule.bits)
    )


def decode_unit(line: XidLine, catalogue: Catalogue) -> Decoded | None:
    """XID 144 to 150's, NVLink 5, in either of the driver's layouts; None if the line lacks its
    words, or no row of the vendor's table fits them.

    Which layout it is shows by the unit: both are tried, and where only the unit's name fits, its
    rows are taken by the status alone.
    """
    words = line.words
    if len(words) < 2:
        return None
    interrupt, status = words[0], words[1]
    rules = catalogue.units.get(line.code, ())
    named = [rule for rule in rules if line.unit in rule.units]
    fits = [one for one in named or rules if any(layout.fits(interrupt) for layout in one.layouts)]
    exact = _by_status(fits, status)
    found = exact or _by_status([one for one in named if not _tells_reason(one)], status)
    if not found:
        return None
    best = max(found, key=lambda rule: _strength(rule.action))
    printed = {True: "printed Fatal", False: "printed Nonfatal", None: ""}[line.fatal]
    why = f"{line.unit or 'unit'} {interrupt:#010x}, status {status:#010x}"
    return Decoded(
        best.action, best.follow_up, "nvlink5-table", f"{why}, {printed}" if printed else why
    )


def _by_status(rules: Iterable[UnitRule], status: int) -> list[UnitRule]:
    """Those whose error is set: each is one bit, but for a few that are whole numbers."""
    there = list(rules)
    exact = [rule for rule in there if not rule.statuses or status in rule.statuses]
    if exact:
        return exact
    return [rule for rule in there if any(one & status == one for one in rule.statuses if one)]


def _tells_reason(rule: UnitRule) -> bool:
    """Whether the interrupt's word says what happened, so that it must fit."""
    return not rule.statuses


def _strength(action: str) -> int:
    return ACTIONS.index("restart_app") if action == XID_154 else ACTIONS.index(action)
