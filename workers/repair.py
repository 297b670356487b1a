"""How far up the repair ladder a node goes, and when a card has had enough. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """Whether a rung may be tried, and why."""

    allowed: bool
    reason: str


def may_attempt(rung: str, attempts_by_card: Sequence[int], limit: int) -> Attempt:
    """Whether a rung may be tried once more on a node.

    `attempts_by_card` counts, for each card of the node, the attempts at this rung in the last 24
    hours. Repairs that are repeated without end are the commonest complaint about automatic
    remediation, so the card with the most attempts decides.
    """
    most = max(attempts_by_card, default=0)
    if most >= limit:
        return Attempt(
            False,
            f"{rung.replace('_', ' ')} was tried {most} times in 24 h on a card of this node "
            f"(limit {limit}): the next rung, or a person",
        )
    return Attempt(True, f"{most} of {limit} attempts in 24 h")


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
