"""Stored signals judged once more, by the rules of today: which decisions would be others?

Reads, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from controlplane.health.models import Failure, Signal
from workers import triage
from workers.verdicts import HARDWARE_SPEAKS, verdict_of

NOTHING = "nothing"
#: Of one fault at most so many signals are judged anew.
SIGNALS = 20


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


def replay(since: datetime, node_name: str = "") -> Iterator[Replayed]:
    """Each failure of this time, and each signal that was found to be nothing: oldest first.

    Of a fault that spoke through several signals the gravest decides; what merely repeated it
    decided nothing, and of many only the first SIGNALS are looked at.
    """
    signals = (
        Signal.objects.filter(kind__in=HARDWARE_SPEAKS, observed_at__gte=since)
        .select_related("node", "gpu")
        .prefetch_related("failures")
        .order_by("observed_at", "pk")
    )
    if node_name:
        signals = signals.filter(node__name=node_name)
    judged: set[str] = set()
    for signal in signals.iterator(chunk_size=500):
        failure = next(iter(signal.failures.all()), None)
        if failure is None:
            yield _replayed(None, [signal])
        elif failure.pk not in judged:
            judged.add(failure.pk)
            told = failure.signals.filter(kind__in=HARDWARE_SPEAKS).select_related("node", "gpu")
            yield _replayed(failure, list(told.order_by("observed_at", "pk")[:SIGNALS]))


def _replayed(failure: Failure | None, signals: list[Signal]) -> Replayed:
    """What is made of these signals of one fault today."""
    judged = [(signal, verdict_of(signal)) for signal in signals]
    found = [(s, v) for s, v in judged if v is not None and not triage.is_note(v)]
    gravest = triage.gravest(verdict for _signal, verdict in found)[:1]
    deciding = next((s for s, v in found if v in gravest), signals[0])
    verdict = gravest[0] if gravest else judged[0][1]
    return Replayed(
        signal=deciding,
        failure=failure,
        was=NOTHING if failure is None else _words(failure.needed, failure.urgency),
        now=_words(gravest[0].action, gravest[0].urgency) if gravest else NOTHING,
        verdict=verdict,
    )


def _words(action: str, urgency: str) -> str:
    return f"{action}, {urgency}"
