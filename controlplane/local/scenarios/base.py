"""What every scenario is made of: its result, waiting for rows, reading the clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection
from django.urls import reverse

from controlplane.accounts.models import AuditEvent
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Gpu, Node
from controlplane.health.models import Baseline
from controlplane.incidents.choices import IncidentState
from controlplane.incidents.models import Incident
from workers import power

T = TypeVar("T")
Say = Callable[[str], None]

READY_S = 180.0
MENDED_S = 240.0
TOLD_S = 60.0  # a rank that could not tell us something tries again after 22 s at most


class ScenarioError(Exception):
    """The scenario cannot be played, or did not come to its end; the message says why."""


@dataclass
class Result:
    """What one play measured. Times are seconds since the fault; None: it did not come to that."""

    scenario: str
    ok: bool = False
    seconds: dict[str, float | None] = field(default_factory=dict)
    longest_gap_s: float | None = None
    samples: dict[str, int] = field(default_factory=dict)
    incident: str = ""
    #: What else there is to tell: the raw line, the card, the rule, the decisions.
    facts: dict[str, Any] = field(default_factory=dict)
    #: Why `ok` is false, one sentence each.
    problems: list[str] = field(default_factory=list)


def fit_new_cards(node: Node) -> None:
    """Give the node cards that nobody has repaired yet: a scenario can be played for ever."""
    before = set(Gpu.objects.filter(node=node).values_list("uuid", flat=True))
    power.fit_new_cards(node)

    def reported() -> bool:
        now = set(Gpu.objects.filter(node=node).values_list("uuid", flat=True))
        known = Baseline.objects.filter(gpu__in=now).count()  # each has been seen at its best
        return bool(now) and now.isdisjoint(before) and known == len(now)

    await_rows(reported, 30, f"{node.name} did not report its new cards")


def replace_cards(node: Node, say: Say) -> None:
    """The technician is played: the node is switched off, new cards are fitted, and on again."""
    say(f"{node.name} is switched off, new cards are fitted, and it is switched on")
    power.switch(node, "ForceOff")
    power.fit_new_cards(node)
    power.switch(node, "On")


def resolved(incident_id: str) -> Incident | None:
    """The incident once it is resolved. Raises ScenarioError if a run of it gave up."""
    incident = Incident.objects.get(pk=incident_id)
    stuck = incident.runs.filter(state__in=["needs_operator", "failed", "cancelled"]).first()
    if stuck is not None:
        raise ScenarioError(f"{stuck.title} {stuck.state}: {stuck.state_reason}")
    return incident if incident.state == IncidentState.RESOLVED else None


def state_reached(node_id: str, state: NodeState, since: datetime) -> datetime | None:
    """When the node first entered a state after a moment."""
    event = AuditEvent.objects.filter(
        verb="node.transition", object_id=node_id, after__state=state, at__gte=since
    ).first()
    return event.at if event else None


def last_reached(node_id: str, state: NodeState, since: datetime) -> datetime | None:
    """When the node last entered a state after a moment."""
    event = AuditEvent.objects.filter(
        verb="node.transition", object_id=node_id, after__state=state, at__gte=since
    ).last()
    return event.at if event else None


def url(incident: Incident) -> str:
    return settings.PUBLIC_URL + reverse("incident", args=[incident.pk])


def seconds_since(start: datetime, moment: datetime | None) -> float | None:
    return None if moment is None else round(max(moment - start, timedelta(0)).total_seconds(), 3)


def await_rows(predicate: Callable[[], T | None], timeout: float, otherwise: str) -> T:
    """Poll the rows until there is something. Raises ScenarioError with `otherwise`."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        try:
            if value := predicate():
                return value
        except (OperationalError, InterfaceError):
            connection.close()  # the database may be what is being mended
        if time.monotonic() > deadline:
            raise ScenarioError(f"{otherwise} after {timeout:.0f} s")
        pause.wait(0.1)
