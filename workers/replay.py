"""Stored signals judged once more, by other rules: which decisions would be others?

Reads, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet

from controlplane.health.catalogue import Kind
from controlplane.health.models import Failure, Signal
from workers import triage
from workers.signal_triage import HARDWARE_SPEAKS, deciding_signals, verdict_of

NOTHING = "nothing"


@dataclass(frozen=True)
class Replayed:
    """What was made of one fault, or of a signal that was found to be none, and what would be made
    of it now."""

    signal: Signal  # the one that decides today
    failure: Failure | None
    was: str  # the action and its urgency, or NOTHING
    now: str
    verdict: triage.LineVerdict | None

    @property
    def differs(self) -> bool:
        return self.was != self.now


def stored(since: datetime, node_name: str = "") -> QuerySet[Signal]:
    """What hardware said from this moment on, of one node or of all."""
    signals = Signal.objects.filter(kind__in=HARDWARE_SPEAKS, observed_at__gte=since)
    return signals.filter(node__name=node_name) if node_name else signals


def told_of(signals: QuerySet[Signal], kind: Kind, number: int) -> QuerySet[Signal]:
    """Those of these that bear one code."""
    return signals.filter(raw__regex=rf"\m{'SXid' if kind == 'sxid' else 'Xid'} .*: {number}(,|$)")


def replay(signals: QuerySet[Signal], rules: triage.Catalogue | None = None) -> Iterator[Replayed]:
    """Each failure that these speak of, and each of them that was found to be nothing: oldest
    first. `rules`: the catalogues to judge by, those of today if not given.

    Of a fault that spoke through several signals the gravest decides; what merely repeated it
    decided nothing.
    """
    signals = signals.select_related("node", "gpu").prefetch_related("failures")
    judged: set[str] = set()
    for signal in signals.order_by("observed_at", "pk").iterator(chunk_size=500):
        failure = next(iter(signal.failures.all()), None)
        if failure is None:
            yield _replayed(None, [signal], rules)
        elif failure.pk not in judged:
            judged.add(failure.pk)
            yield _replayed(failure, deciding_signals(failure), rules)


def _replayed(
    failure: Failure | None, signals: list[Signal], rules: triage.Catalogue | None
) -> Replayed:
    """What is made of these signals of one fault by these rules."""
    judged = [(signal, verdict_of(signal, rules)) for signal in signals]
    found = [(s, v) for s, v in judged if v is not None and not triage.is_note(v)]
    gravest = triage.gravest(verdict for _signal, verdict in found)[:1]
    deciding = next((s for s, v in found if v in gravest), signals[0])
    verdict = gravest[0] if gravest else judged[0][1]
    return Replayed(
        signal=deciding,
        failure=failure,
        was=NOTHING if failure is None else _action_text(failure.needed, failure.urgency),
        now=_action_text(gravest[0].action, gravest[0].urgency) if gravest else NOTHING,
        verdict=verdict,
    )


def _action_text(action: str, urgency: str) -> str:
    return f"{action}, {urgency}"
