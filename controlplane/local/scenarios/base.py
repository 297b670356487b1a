"""What every scenario is made of: its result, waiting for rows, reading the clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
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
from controlplane.incidents.choices import (
    INCIDENT_UNRESOLVED,
    RUN_UNFINISHED,
    IncidentState,
    StepState,
)
from controlplane.incidents.models import Incident, PlaybookStep
from controlplane.jobs.choices import JOB_ACTIVE, JobState, ReplicaState
from controlplane.jobs.models import Job, Replica
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
    power.switch(node, "ForceOff", None)
    power.fit_new_cards(node)
    power.switch(node, "On", None)


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
    """The address of the incident's page."""
    return settings.PUBLIC_URL + reverse("incident", args=[incident.pk])


def seconds_since(start: datetime, moment: datetime | None) -> float | None:
    """Seconds from `start` to `moment`, 0 if it lies before; None if there is no moment."""
    return None if moment is None else round(max(moment - start, timedelta(0)).total_seconds(), 3)


def await_rows(predicate: Callable[[], T | None], timeout: float, otherwise: str) -> T:
    """Poll the rows until there is something. Raises ScenarioError with `otherwise`, and with what
    the product was still at."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        try:
            if value := predicate():
                return value
        except (OperationalError, InterfaceError):
            connection.close()  # the database may be what is being mended
        if time.monotonic() > deadline:
            raise ScenarioError("; ".join([f"{otherwise} after {timeout:.0f} s", *_unfinished()]))
        pause.wait(0.1)


def _unfinished() -> Iterator[str]:
    """What is not as it should be in a fleet where all is well: its runs, replicas and nodes."""
    steps = PlaybookStep.objects.filter(run__state__in=sorted(RUN_UNFINISHED)).exclude(
        state__in=[StepState.DONE, StepState.SKIPPED, StepState.BLOCKED]
    )
    for step in steps.select_related("run"):
        yield f"{step.run.title}, {step.title}: {step.state}, {step.outcome or 'nothing said'}"
    idle = Incident.objects.filter(state__in=INCIDENT_UNRESOLVED).exclude(
        runs__state__in=sorted(RUN_UNFINISHED)
    )
    for incident in idle:
        yield f"incident {incident.pk} has no run: {incident.title}"
    jobs = Job.objects.filter(state__in=JOB_ACTIVE)
    for job in jobs.exclude(state=JobState.RUNNING):
        yield f"{job.name} is {job.state}"
    lost = Replica.objects.filter(job__in=jobs).exclude(state=ReplicaState.ACTIVE)
    for replica in lost.select_related("job"):
        yield f"replica {replica.index} of {replica.job.name} is {replica.state}"
    for node in Node.objects.exclude(state__in=[NodeState.AVAILABLE, NodeState.ALLOCATED]):
        yield f"{node.name} is {node.state}"
