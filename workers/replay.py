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


@dataclass(frozen=True)
class Replayed:
    """What was made of one signal, and what would be made of it now."""

    signal: Signal
    failure: Failure | None  # that it decided on, if it did
    was: str  # the action and its urgency, or NOTHING
    now: str
    verdict: triage.LineVerdict | None

    @property
    def differs(self) -> bool:
        return self.was != self.now


def replay(since: datetime, node_name: str = "") -> Iterator[Replayed]:
    """Each signal that decided on a failure, or on that there is none, from this moment on. What
    only repeated a failure decided nothing."""
    signals = (
        Signal.objects.filter(kind__in=HARDWARE_SPEAKS, observed_at__gte=since)
        .select_related("node", "gpu")
        .prefetch_related("failures")
        .order_by("observed_at", "pk")
    )
    if node_name:
        signals = signals.filter(node__name=node_name)
    for signal in signals.iterator(chunk_size=500):
        failure = next(iter(signal.failures.all()), None)
        if failure is not None and failure.observed_at != signal.observed_at:
            continue
        verdict = verdict_of(signal)
        yield Replayed(
            signal=signal,
            failure=failure,
            was=NOTHING if failure is None else _words(failure.needed, failure.urgency),
            now=NOTHING
            if verdict is None or triage.is_note(verdict)
            else _words(verdict.action, verdict.urgency),
            verdict=verdict,
        )


def _words(action: str, urgency: str) -> str:
    return f"{action}, {urgency}"
