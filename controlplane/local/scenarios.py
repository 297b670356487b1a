"""Scripted failures against the running product, and what they measure.

A scenario breaks one thing from outside and then only watches: everything that mends it is the
product. It reads rows; it never writes one.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection
from django.db.models import Max, Min, Sum
from django.urls import reverse

from controlplane.accounts.models import AuditEvent
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Gpu, Node
from controlplane.health.models import Signal
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, IncidentState, StepState
from controlplane.incidents.models import Incident, PlaybookStep
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState
from controlplane.jobs.models import Interruption, Job, LedgerRange, Placement, ProgressSample
from workers import power

T = TypeVar("T")
Say = Callable[[str], None]

READY_S = 120.0
MENDED_S = 180.0


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
    #: Why `ok` is false, one sentence each.
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scene:
    """The job as it was when the fault was made."""

    job: Job
    victim: Placement
    survivors: dict[int, tuple[str, int | None]]  # by replica: placement and pid
    step: int
    at: datetime


def play(name: str, say: Say) -> Result:
    """Break one thing, wait until it is mended, and measure. Raises ScenarioError."""
    breaks_node = {"kill-process": False, "kill-node": True}[name]
    job = _ready_job(breaks_node)
    victim = _choose_victim(job)
    _fit_new_cards(victim.node)
    scene = _scene(job, victim)
    say(
        f"{'power off' if breaks_node else 'kill -9'}: replica {victim.replica.index} "
        f"on {victim.node.name} at step {scene.step}"
    )
    if breaks_node:
        power.switch(victim.node, "ForceOff")
    else:
        _kill_rank(victim)
    incident = _await(lambda: _incident(scene), 60, "no incident was opened")
    say(f"incident: {_url(incident)}")
    resolved = _await(lambda: _resolved(incident.pk), MENDED_S, "the incident is not resolved")
    _await(lambda: _ledger_reaches(scene), 30, "the sample ledger lags behind")
    return _measure(name, scene, resolved, breaks_node)


# --- before ---------------------------------------------------------------------------------------


def _ready_job(breaks_node: bool) -> Job:
    """The job that trains, with all its replicas, nothing else being mended, a spare at hand."""

    def ready() -> Job | None:
        job = Job.objects.filter(state=JobState.RUNNING).first()
        if job is None or job.replicas.exclude(state=ReplicaState.ACTIVE).exists():
            return None
        if Incident.objects.filter(cluster=job.cluster, state__in=INCIDENT_UNRESOLVED).exists():
            return None
        spares = Node.objects.filter(
            cluster=job.cluster, state=NodeState.AVAILABLE, lease__reachable=True
        )
        return job if spares.exists() or not breaks_node else None

    return _await(ready, READY_S, "no job trains with all its replicas and a spare beside it")


def _choose_victim(job: Job) -> Placement:
    placements = Placement.objects.select_related("node", "replica").filter(
        replica__job=job, state=PlacementState.RUNNING
    )
    return random.choice(list(placements))  # noqa: S311 - any will do


def _fit_new_cards(node: Node) -> None:
    """Give the node cards that nobody has repaired yet: a scenario can be played for ever."""
    before = set(Gpu.objects.filter(node=node).values_list("uuid", flat=True))
    power.fit_new_cards(node)

    def reported() -> bool:
        now = set(Gpu.objects.filter(node=node).values_list("uuid", flat=True))
        return bool(now) and now.isdisjoint(before)

    _await(reported, 30, f"{node.name} did not report its new cards")


def _scene(job: Job, victim: Placement) -> Scene:
    job.refresh_from_db()
    running = Placement.objects.select_related("replica").filter(
        replica__job=job, state=PlacementState.RUNNING
    )
    return Scene(
        job=job,
        victim=victim,
        survivors={p.replica.index: (p.pk, p.pid) for p in running if p.pk != victim.pk},
        step=job.step,
        at=datetime.now(UTC),
    )


def _kill_rank(victim: Placement) -> None:
    if victim.pid is None:
        raise ScenarioError("the rank has not told its process id")
    os.kill(victim.pid, signal.SIGKILL)


# --- meanwhile ------------------------------------------------------------------------------------


def _incident(scene: Scene) -> Incident | None:
    subject = f"job/{scene.job.pk}/{scene.victim.replica.index}"
    return Incident.objects.filter(subject=subject, opened_at__gte=scene.at).first()


def _resolved(incident_id: str) -> Incident | None:
    incident = Incident.objects.get(pk=incident_id)
    if incident.runs.filter(state__in=["needs_operator", "failed", "cancelled"]).exists():
        run = incident.runs.filter(state__in=["needs_operator", "failed", "cancelled"]).first()
        raise ScenarioError(f"{run.title} {run.state}: {run.state_reason}" if run else "")
    return incident if incident.state == IncidentState.RESOLVED else None


def _ledger_reaches(scene: Scene) -> bool:
    joined = _rejoin(scene)
    scene.job.refresh_from_db(fields=["ledger_step"])
    return joined is not None and scene.job.ledger_step >= joined.step


# --- after ----------------------------------------------------------------------------------------


def _measure(name: str, scene: Scene, incident: Incident, breaks_node: bool) -> Result:
    signals = Signal.objects.filter(failures__incidents=incident) | Signal.objects.filter(
        job_id=scene.job.pk, replica=scene.victim.replica.index, recorded_at__gte=scene.at
    )
    told = signals.aggregate(seen=Min("observed_at"), recorded=Min("recorded_at"))
    loss = _loss(scene)
    moments: dict[str, datetime | None] = {
        "seen": told["seen"],
        "recorded": told["recorded"],
        "incident": incident.opened_at,
        "survivors_commit": loss.committed_at if loss else None,
        "replica_commit": incident.restored_at,
        "resolved": incident.resolved_at,
    }
    if breaks_node:
        moments["quarantined"] = _quarantined_at(scene)
        moments["validated"] = _validated_at(incident)
    samples = _samples(scene)
    result = Result(
        scenario=name,
        seconds={key: _since(scene.at, moment) for key, moment in moments.items()},
        longest_gap_s=_longest_gap(scene, incident),
        samples=samples,
        incident=_url(incident),
    )
    result.problems = _problems(scene, incident, result, breaks_node)
    result.ok = not result.problems
    return result


def _problems(scene: Scene, incident: Incident, result: Result, breaks_node: bool) -> list[str]:
    problems = [f"{key} never came" for key, value in result.seconds.items() if value is None]
    now = {
        p.replica.index: (p.pk, p.pid)
        for p in Placement.objects.select_related("replica").filter(
            replica__job=scene.job, state=PlacementState.RUNNING
        )
    }
    for index, process in scene.survivors.items():
        if now.get(index) != process:
            problems.append(f"replica {index} is not the process that it was")
    for kind, count in result.samples.items():
        if count:
            problems.append(f"{count} samples {kind}")
    if not incident.postmortem or incident.gpu_seconds_lost is None:
        problems.append("the incident has no post-mortem or no cost")
    if (
        breaks_node
        and not Node.objects.filter(
            pk=scene.victim.node_id, state=NodeState.AVAILABLE, spare=True
        ).exists()
    ):
        problems.append(f"{scene.victim.node.name} did not come back as a spare")
    return problems


def _loss(scene: Scene) -> Interruption | None:
    return (
        Interruption.objects.filter(
            job=scene.job,
            lost__contains=scene.victim.replica.index,
            committed_at__gte=scene.at,
        )
        .order_by("epoch")
        .first()
    )


def _rejoin(scene: Scene) -> Interruption | None:
    return (
        Interruption.objects.filter(
            job=scene.job,
            joined__contains=scene.victim.replica.index,
            committed_at__gte=scene.at,
        )
        .order_by("-epoch")
        .first()
    )


def _longest_gap(scene: Scene, incident: Incident) -> float | None:
    window = ProgressSample.objects.filter(
        job=scene.job, at__gte=scene.at, at__lte=incident.resolved_at or datetime.now(UTC)
    )
    longest: float | None = window.aggregate(longest=Max("max_gap_s"))["longest"]
    return longest


def _samples(scene: Scene) -> dict[str, int]:
    """Samples lost and duplicated in the steps from the fault on, from the sample ledger.

    Each range tells the shards whose count in the reduced gradient was not one; the number of
    samples that were summed must be the same for every step beside.
    """
    ranges = LedgerRange.objects.filter(job=scene.job, step_to__gte=scene.step)
    steps = sum(r.step_to - r.step_from + 1 for r in ranges)
    samples = ranges.aggregate(total=Sum("samples"))["total"] or 0
    before = LedgerRange.objects.filter(job=scene.job, step_to__lt=scene.step).last()
    whole = before or ranges[0]
    batch = whole.samples // (whole.step_to - whole.step_from + 1)
    missing = batch * steps - samples
    lost = sum(len(r.lost) + len(r.dropped) for r in ranges)
    duplicated = sum(len(r.duplicated) for r in ranges)
    return {
        "lost": max(lost, missing, 0),
        "duplicated": max(duplicated, -missing, 0),
    }


def _quarantined_at(scene: Scene) -> datetime | None:
    event = AuditEvent.objects.filter(
        verb="node.transition",
        object_id=scene.victim.node_id,
        after__state=NodeState.QUARANTINED,
        at__gte=scene.at,
    ).first()
    return event.at if event else None


def _validated_at(incident: Incident) -> datetime | None:
    step = PlaybookStep.objects.filter(
        run__incident=incident, key="validate", state=StepState.DONE
    ).first()
    return step.finished_at if step else None


def _url(incident: Incident) -> str:
    return settings.PUBLIC_URL + reverse("incident", args=[incident.pk])


def _since(start: datetime, moment: datetime | None) -> float | None:
    return None if moment is None else round(max(moment - start, timedelta(0)).total_seconds(), 3)


def _await(predicate: Callable[[], T | None], timeout: float, otherwise: str) -> T:
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
