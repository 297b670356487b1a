"""Scenarios that break one replica of the training job, each in its way.

A scenario breaks one thing from outside and then only watches: everything that mends it is the
product. It reads rows; it never writes one.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Max, Min

from controlplane.accounts.models import AuditEvent
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from controlplane.health.models import Failure, Signal
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, StepState
from controlplane.incidents.models import Incident, PlaybookStep, RmaCase
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState
from controlplane.jobs.models import (
    Checkpoint,
    Directive,
    Interruption,
    Job,
    LedgerRange,
    Placement,
    ProgressSample,
)
from controlplane.local.scenarios.base import (
    MENDED_S,
    READY_S,
    TOLD_S,
    Result,
    Say,
    ScenarioError,
    await_rows,
    fit_new_cards,
    last_reached,
    replace_cards,
    resolved,
    seconds_since,
    state_reached,
    url,
)
from workers import power


@dataclass(frozen=True)
class Fault:
    """One way to break a replica, and what must come of it."""

    words: str
    break_it: Callable[[Placement], dict[str, Any]]
    #: The codes of which triage must find one.
    codes: tuple[str, ...]
    #: The node is taken out, repaired and returned as a spare; else it keeps its replica.
    node_out: bool
    #: How often the node is booted for its repair.
    boots: int = 0
    #: The replica leaves at a checkpoint, before there is a fault.
    planned: bool = False
    #: The field diagnostic finds the card defective: it goes back to its vendor.
    defective: bool = False


#: Of its tier's interval: a save that begins sooner after the one before was asked for.
EARLY = 0.8


@dataclass(frozen=True)
class Scene:
    """The job as it was when the fault was made."""

    job: Job
    victim: Placement
    survivors: dict[int, tuple[str, int | None]]  # by replica: placement and pid
    step: int
    at: datetime


def _kill_rank(victim: Placement) -> dict[str, Any]:
    if victim.pid is None:
        raise ScenarioError("the rank has not told its process id")
    os.kill(victim.pid, signal.SIGKILL)
    return {"pid": victim.pid}


def power_off(victim: Placement) -> dict[str, Any]:
    """Switch the victim's node off through its BMC."""
    power.switch(victim.node, "ForceOff", None)
    return {}


def _freeze(victim: Placement) -> dict[str, Any]:
    return power.freeze(victim.node, "all")


def _card(fault: str) -> Callable[[Placement], dict[str, Any]]:
    return lambda victim: power.break_card(victim.node, fault, random.randrange(8))  # noqa: S311


#: An agent that was restarted adopted its ranks: it sees that one ends, not how.
KILLED = ("process-killed", "process-vanished")

FAULTS: dict[str, Fault] = {
    "kill-process": Fault("kill -9", _kill_rank, KILLED, node_out=False),
    "kill-node": Fault("power off", power_off, ("node-lost",), node_out=True, boots=1),
    "xid79": Fault("XID 79", _card("xid79"), ("xid-79",), node_out=True, boots=1),
    "xid94": Fault("XID 94", _card("xid94"), ("xid-94",), node_out=True),
    "app-error": Fault("XID 31", _card("xid31"), ("xid-31",), node_out=False),
    "ecc-drift": Fault(
        "corrected errors accelerate",
        _card("ecc-drift"),
        ("ecc-drift",),
        node_out=True,
        planned=True,
    ),
    "nvlink-slow": Fault(
        "NVLink below its own baseline",
        _card("nvlink-slow"),
        ("nvlink-slow",),
        node_out=True,
        planned=True,
    ),
    "sram-errors": Fault(
        "SRAM errors beyond the threshold",
        _card("sram-errors"),
        ("sram-threshold",),
        node_out=True,
        boots=1,  # with its new cards
        planned=True,
        defective=True,
    ),
    "node-silent": Fault(
        "SIGSTOP to agent and ranks", _freeze, ("node-lost",), node_out=True, boots=1
    ),
}


def play(name: str, say: Say) -> Result:
    """Break one replica, wait until it is mended, and measure. Raises ScenarioError."""
    return play_out(name, FAULTS[name], say)


def play_out(
    name: str, fault: Fault, say: Say, begun: Callable[[], object] = lambda: None
) -> Result:
    """`begun` is called once the fault is made and its incident is there."""
    job = ready_job(fault.node_out)
    victim = _choose_victim(job, fault)
    fit_new_cards(victim.node)
    scene = _scene(job, victim)
    say(f"{fault.words}: replica {victim.replica.index} on {victim.node.name} at step {scene.step}")
    facts = fault.break_it(victim)
    incident = await_rows(lambda: _incident(scene), 60, "no incident was opened")
    say(f"incident: {url(incident)}")
    begun()
    done = await_rows(lambda: resolved(incident.pk), MENDED_S, "the incident is not resolved")
    joined = await_rows(lambda: _rejoin(scene), TOLD_S, "nobody has told that the replica joined")
    lags = f"the sample ledger lags behind step {joined.step}"
    await_rows(lambda: _ledger_step(scene) >= joined.step, TOLD_S, lags)
    if fault.defective:
        replace_cards(victim.node, say)
    if fault.node_out:
        await_rows(lambda: _back(scene), MENDED_S, f"{victim.node.name} did not come back")
    return _measure(name, fault, scene, done, facts)


# --- before ---------------------------------------------------------------------------------------


def ready_job(needs_spare: bool) -> Job:
    """The job that trains, with all its replicas, nothing else being mended, a spare at hand."""

    def ready() -> Job | None:
        running = Job.objects.filter(state=JobState.RUNNING, whole=False)
        job = running.order_by("created_at").first()
        if job is None or job.replicas.exclude(state=ReplicaState.ACTIVE).exists():
            return None
        if Incident.objects.filter(cluster=job.cluster, state__in=INCIDENT_UNRESOLVED).exists():
            return None
        spares = Node.objects.filter(
            cluster=job.cluster, state=NodeState.AVAILABLE, lease__reachable=True
        )
        return job if spares.exists() or not needs_spare else None

    return await_rows(ready, READY_S, "no job trains with all its replicas and a spare beside it")


def _choose_victim(job: Job, fault: Fault) -> Placement:
    placements = Placement.objects.select_related("node", "replica").filter(
        replica__job=job, state=PlacementState.RUNNING, standby=False
    )
    if fault.defective:
        # A coordinator is started again only where it was, and this node goes to its vendor.
        placements = placements.exclude(node=job.coordinator_node)
    return random.choice(list(placements))  # noqa: S311 - any will do


def _scene(job: Job, victim: Placement) -> Scene:
    job.refresh_from_db()
    running = Placement.objects.select_related("replica").filter(
        replica__job=job, state=PlacementState.RUNNING, standby=False
    )
    return Scene(
        job=job,
        victim=victim,
        survivors={p.replica.index: (p.pk, p.pid) for p in running if p.pk != victim.pk},
        step=job.step,
        at=datetime.now(UTC),
    )


# --- meanwhile ------------------------------------------------------------------------------------


def _incident(scene: Scene) -> Incident | None:
    job, index = scene.job.pk, scene.victim.replica.index
    subjects = [f"job/{job}/{index}", f"job/{job}"]
    return Incident.objects.filter(subject__in=subjects, opened_at__gte=scene.at).first()


def _ledger_step(scene: Scene) -> int:
    scene.job.refresh_from_db(fields=["ledger_step"])
    return scene.job.ledger_step


# --- after ----------------------------------------------------------------------------------------


def _back(scene: Scene) -> bool:
    """The node stands ready as a spare again, without a wish left."""
    return Node.objects.filter(
        pk=scene.victim.node_id,
        state=NodeState.AVAILABLE,
        spare=True,
        reset_pending="",
        state_since__gte=scene.at,
    ).exists()


def _measure(
    name: str, fault: Fault, scene: Scene, incident: Incident, facts: dict[str, Any]
) -> Result:
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
    if fault.node_out:
        node_id = scene.victim.node_id
        moments["quarantined"] = state_reached(node_id, NodeState.QUARANTINED, scene.at)
        moments["validated"] = _validated_at(scene)
        moments["returned"] = last_reached(node_id, NodeState.AVAILABLE, scene.at)
    if fault.planned:
        moments["checkpoint"] = saved_as_asked(scene.job, scene.at)
    failure = incident.failures.order_by("observed_at").first()
    result = Result(
        scenario=name,
        seconds={key: seconds_since(scene.at, moment) for key, moment in moments.items()},
        longest_gap_s=_longest_gap(scene, incident),
        samples=_samples(scene),
        incident=url(incident),
        facts={
            **facts,
            "code": incident.code,
            "rule": failure.rule if failure else None,
            "card": failure.gpu.serial if failure and failure.gpu else None,
            "gpu_seconds_lost": incident.gpu_seconds_lost,
            "boots": _boots(scene),
        },
    )
    result.problems = _problems(fault, scene, incident, result)
    result.ok = not result.problems
    return result


def _problems(fault: Fault, scene: Scene, incident: Incident, result: Result) -> list[str]:
    problems = [f"{key} never came" for key, value in result.seconds.items() if value is None]
    now = {
        p.replica.index: (p.pk, p.pid)
        for p in Placement.objects.select_related("replica").filter(
            replica__job=scene.job, state=PlacementState.RUNNING, standby=False
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
    if incident.code not in fault.codes:
        wanted = " or ".join(fault.codes)
        problems.append(f"the cause was taken for {incident.code or 'unknown'}, not {wanted}")
    if result.facts["boots"] != fault.boots:
        problems.append(
            f"the node was booted {result.facts['boots']} times instead of {fault.boots}"
        )
    if fault.defective:
        problems += _problems_of_case(scene)
    if fault.planned:
        problems += _problems_of_plan(scene, result, fault.codes)
    if "serial" in result.facts and result.facts["card"] != result.facts["serial"]:
        problems.append("the failure names another card")
    if not fault.node_out and not scene.victim.node.placements.filter(
        replica=scene.victim.replica, state=PlacementState.RUNNING, standby=False
    ):
        problems.append(f"the replica did not return on {scene.victim.node.name}")
    return problems


def _problems_of_plan(scene: Scene, result: Result, codes: tuple[str, ...]) -> list[str]:
    problems = []
    saved, out = result.seconds["checkpoint"], result.seconds["quarantined"]
    if saved is not None and out is not None and saved > out:
        problems.append("the node was emptied before the checkpoint was saved")
    worse = Failure.objects.filter(node=scene.victim.node, observed_at__gte=scene.at)
    if worse.exclude(code__in=codes).exists():
        problems.append("the fault came before the node was out")
    return problems


def _problems_of_case(scene: Scene) -> list[str]:
    case = RmaCase.objects.filter(node=scene.victim.node, opened_at__gte=scene.at).first()
    if case is None:
        return ["no RMA case was opened"]
    rungs = [repair["rung"] for repair in case.bundle["repairs"]]
    found = [diagnostic.get("outcome") for diagnostic in case.bundle["diagnostics"]]
    if rungs != ["field_diagnostic"] or "failed" not in found:
        return [f"the case does not rest on a failed field diagnostic: {rungs}, {found}"]
    return []


def _boots(scene: Scene) -> int:
    """How often the node came up under a new boot id since the fault."""
    return AuditEvent.objects.filter(
        verb="node.boot", object_id=scene.victim.node_id, at__gte=scene.at
    ).count()


def saved_as_asked(job: Job, since: datetime) -> datetime | None:
    """When a checkpoint was durable that the job was told to save, as far as that can be told: one
    that its tier's interval does not explain, or else the first one, if it is on all tiers. None if
    the job was not told, or saved nothing for it."""
    told = Directive.objects.filter(job=job, verb="checkpoint", created_at__gte=since)
    order = told.order_by("created_at").first()
    if order is None:
        return None
    saves = sorted(Checkpoint.objects.filter(job=job), key=_begun)
    last: dict[str, datetime] = {}
    after = []
    for save in saves:
        if _begun(save) >= order.created_at:
            after.append(save)
            pause_s = EARLY * (save.every_s or 0)
            if save.tier in last and _begun(save) < last[save.tier] + timedelta(seconds=pause_s):
                return save.at
        last[save.tier] = _begun(save)
    first = [save for save in after if save.step == after[0].step]
    return first[0].at if first and {save.tier for save in first} == {*last} else None


def _begun(save: Checkpoint) -> datetime:
    return save.at - timedelta(seconds=save.seconds)


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
    ledger = LedgerRange.objects.filter(job=scene.job).order_by("step_from")
    ranges = [*ledger.filter(step_to__gte=scene.step)]  # at one moment: the job trains on
    steps = sum(r.step_to - r.step_from + 1 for r in ranges)
    samples = sum(r.samples for r in ranges)
    before = ledger.filter(step_to__lt=scene.step).last()
    whole = before or ranges[0]
    batch = whole.samples // (whole.step_to - whole.step_from + 1)
    missing = batch * steps - samples
    lost = sum(len(r.lost) + len(r.dropped) * (r.step_to - r.step_from + 1) for r in ranges)
    duplicated = sum(len(r.duplicated) for r in ranges)
    return {
        "lost": max(lost, missing, 0),
        "duplicated": max(duplicated, -missing, 0),
    }


def _validated_at(scene: Scene) -> datetime | None:
    step = PlaybookStep.objects.filter(
        run__node_id=scene.victim.node_id,
        key="validate",
        state=StepState.DONE,
        finished_at__gte=scene.at,
    ).first()
    return step.finished_at if step else None
