"""The audit trail as a chain: each row's keyed hash covers the row and the hash before it.

Whoever edits the database without the key cannot make the chain fit again; cutting off its end is
found by comparing it with a head that was kept elsewhere. This module reads; the keeper appends
through `accounts.actions.chain_audit`.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from django.db import transaction

from controlplane import crypto
from controlplane.accounts.models import AuditEvent

#: What the first row's hash covers in place of the one before it.
GENESIS = "0" * 64
#: Every column of a row but its place in the chain, which the walk itself checks.
COVERED = (
    *("id", "at", "actor_kind", "actor_id", "request_id", "cluster_id"),
    *("verb", "object_type", "object_id", "before", "after", "reason"),
)
#: A report names this many problems; it counts all of them.
PROBLEMS_NAMED = 100
CHUNK = 2000


@dataclass(frozen=True)
class Head:
    """The newest chained row: to be kept outside the database, where an edit cannot reach it."""

    position: int = 0
    hash: str = GENESIS

    def __str__(self) -> str:
        return f"{self.position}:{self.hash}"


@dataclass(frozen=True)
class Problem:
    """One place where the chain does not hold."""

    position: int | None
    event_id: int | None
    what: str


@dataclass
class Report:
    """What a walk along the whole chain found."""

    rows: int = 0
    head: Head = field(default_factory=Head)
    unchained: int = 0
    problem_count: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.problem_count == 0

    def add(self, position: int | None, event_id: int | None, what: str) -> None:
        self.problem_count += 1
        if len(self.problems) < PROBLEMS_NAMED:
            self.problems.append(Problem(position, event_id, what))

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self), "head": str(self.head)}


@transaction.atomic  # so that the rows are streamed, all as of one moment
def verify(pinned: Head | None = None) -> Report:
    """Walk the chain and report each place where it does not hold.

    `pinned` is a head that was noted earlier, outside the database: with it a cut-off end is found
    too. Rows that the keeper has not chained yet are counted, not judged.
    """
    report = Report()
    follows = _Follows()
    for row in _chained_rows():
        position, stored = row[-2:]
        report.rows += 1
        if position < 1:
            report.add(position, row[0], "inserted: the chain begins at position 1")
            continue
        if position != report.head.position + 1:
            report.add(position, row[0], _gap(report.head.position, position))
            follows.unknown()
        if not follows.fits(row[:-2], stored):
            report.add(position, row[0], "this row or its hash was changed after it was chained")
        report.head = Head(position, stored)
        if pinned and pinned.position == position and pinned.hash != stored:
            report.add(position, row[0], "not the hash that was pinned: the chain was made anew")
    if pinned and pinned.position > report.head.position:
        missing = pinned.position - report.head.position
        what = f"cut off: the pinned head stood at {pinned.position}, so {missing} rows are missing"
        report.add(report.head.position + 1, None, what)
    _look_at_the_rest(report)
    return report


def head() -> Head:
    """The newest chained row as it stands."""
    newest = AuditEvent.objects.exclude(position=None).order_by("-position").first()
    if newest is None or newest.position is None:
        return Head()
    return Head(newest.position, newest.hash)


def unchained() -> int:
    """How many rows the keeper has not come by yet."""
    return AuditEvent.objects.filter(position=None).count()


def next_hash(previous: str, covered: tuple[Any, ...]) -> str:
    """The hash of a row, given by its COVERED columns, that follows the one hashed `previous`."""
    return hmac.digest(
        crypto.audit_chain_key(), bytes.fromhex(previous) + canonical(covered), "sha256"
    ).hex()


def canonical(covered: tuple[Any, ...]) -> bytes:
    """One row as bytes that are the same wherever and whenever it is read."""
    return json.dumps(
        [_plain(value) for value in covered], sort_keys=True, separators=(",", ":")
    ).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds")
    return value


class _Follows:
    """Which hashes the next row may follow: after a bad row, the one stored and the one due.

    So one edit is reported once, whether it was the row's content or its hash that was touched.
    """

    def __init__(self) -> None:
        self._candidates: list[str] | None = [GENESIS]

    def unknown(self) -> None:
        """Rows are missing here: what comes next cannot be judged by what came before."""
        self._candidates = None

    def fits(self, covered: tuple[Any, ...], stored: str) -> bool:
        due = [next_hash(previous, covered) for previous in self._candidates or ()]
        fits = self._candidates is None or stored in due
        self._candidates = [stored] if fits else [stored, *due[:1]]
        self._candidates = [h for h in self._candidates if _is_hash(h)]
        return fits


def _is_hash(text: str) -> bool:
    return len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)


def _gap(last: int, position: int) -> str:
    if position == last + 2:
        return f"missing: position {last + 1} was deleted"
    return f"missing: positions {last + 1} to {position - 1} were deleted"


def _chained_rows() -> Iterator[tuple[Any, ...]]:
    rows = AuditEvent.objects.exclude(position=None).order_by("position")
    return rows.values_list(*COVERED, "position", "hash").iterator(chunk_size=CHUNK)


def _look_at_the_rest(report: Report) -> None:
    report.unchained = unchained()
    torn_out = AuditEvent.objects.filter(position=None).exclude(hash="")
    for event_id in torn_out.values_list("pk", flat=True):
        report.add(None, event_id, "torn out: it carries a hash but has no place in the chain")
