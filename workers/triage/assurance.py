"""How sure a verdict is, and what must be seen of the node before it has work again.

Both follow from the rule and the action alone, so a stored decision can be explained at any time.
"""

from __future__ import annotations

from typing import Literal

Confidence = Literal["high", "medium", "low"]

#: Rules that rest on what a sensor showed for a while, or on a count: the cause may be another.
_INFERRED = (
    "ecc-acceleration",
    "nvlink-below-baseline",
    "nvlink-error-rate",
    "near-its-own-limit",
    "clocks-event-reasons",
    "pcie-width",
    "pcie-replay-rate",
    "port-error-rate",
    "port-flaps",
    "told-by-the-job",
    "correlated-silence",
    "same-rack",
    "card-silent",
    "silence",
)
_AFTER_RESET = (
    "no row of the card's memory waits to be remapped, and none could not be",
    "the driver wants nothing done (recovery action none)",
    "the level-2 diagnostic really passed: no test was skipped",
    "no new line against the card while the node was watched",
)
_VERIFY: dict[str, tuple[str, ...]] = {
    "reset_gpu": _AFTER_RESET,
    "drain_and_reset": _AFTER_RESET,
    "reboot": ("its boot id changed", *_AFTER_RESET),
    "power_cycle": ("its boot id changed", *_AFTER_RESET),
    "field_diagnostic": ("the vendor's field diagnostic passed", *_AFTER_RESET),
    "contact_vendor": ("the vendor's answer, or a new card", *_AFTER_RESET),
    "check_mechanicals": (
        "seating, cable and cooling were looked at",
        "the reading that spoke is well again",
        _AFTER_RESET[2],
    ),
    "update_software": ("the driver, firmware or program that was named is updated",),
    "restart_app": ("the program runs again, and the line does not repeat on this card",),
    "undecodable": ("somebody has looked at the line",),
}


def to_verify(action: str) -> tuple[str, ...]:
    """What must be seen before the node has work again, in words; () if nothing."""
    return _VERIFY.get(action, ())


def confidence(rule: str, action: str) -> Confidence:
    """How far a rule's word can be trusted: high where the driver or the vendor says it of this
    very code, medium where it is inferred from readings, repeats or neighbours, low where nobody
    says what the code means."""
    if action == "undecodable" or "not-in-catalogue" in rule or "unused code" in rule:
        return "low"
    inferred = rule.startswith(_INFERRED) or ": repeats" in rule
    return "medium" if inferred else "high"
