"""Requests to bring back replicas that their job lost."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta

from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet.changes import change
from controlplane.fleet.models import Command
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.incidents.actions.incidents import add_timeline_entry
from controlplane.incidents.actions.merging import (
    incident_of_replica,
    open_for_loss,
    open_for_replica,
    title_of_loss,
)
from controlplane.incidents.actions.runs import lock_run, look_again, request_run
from controlplane.incidents.choices import (
    RUN_UNFINISHED,
    EntryKind,
    RunState,
    StepState,
)
from controlplane.incidents.models import (
    Incident,
    PlaybookRun,
    PlaybookStep,
)
from controlplane.incidents.selectors import LOSS, restartable_losses
from controlplane.jobs.choices import JobState, ReplicaState
from controlplane.jobs.models import IN_ITS_PLACE, SENT_AWAY, Job, Placement, Replica
from controlplane.jobs.selectors import left_together, was_sent_away

#: Where the process of a replica that was sent away runs on after its farewell it is ended after so
#: long, and its place given to another.
FAREWELL_GRACE = timedelta(seconds=60)
#: States of a job whose replicas are missed.
JOB_NEEDS_REPLICAS = (JobState.RUNNING, JobState.STARTING)


@change()
def bring_back(
    placement: Placement, occurred_at: datetime, actor: Actor = SYSTEM, *, emptied: bool = False
) -> Incident:
    """Open the incident of the replica that this placement held, and have it brought back.

    What is lost with other replicas of its job is one incident with them; not one that went because
    its node was `emptied`. A run that had asked for a person, and did not know of this, goes on.
    """
    job = placement.replica.job
    index = placement.replica.index
    opened = open_for_replica if emptied else open_for_loss
    incident = opened(placement, occurred_at, actor=actor)
    run = request_run(
        actor,
        "replica-lost",
        f"{job.pk}/{index}",
        cluster_id=job.cluster_id,
        title=f"Bring back replica {index} of {job.name}",
        incident=incident,
        job_id=job.pk,
        node_id=placement.node_id,
        context={"replica": index, "lost_placement": placement.pk},
    )
    if run.state == RunState.NEEDS_OPERATOR and (news := _news_of_loss(run, placement)):
        # What never trained is no other story: of that there are as many as a run may start.
        look_again(run.pk, news, actor, afresh=placement.joined_at is not None)
    if incident.replica is None:
        title = title_of_loss(incident, incident.code)
        Incident.objects.filter(pk=incident.pk).update(title=title[:200])
    return incident


@change()
def bring_back_missed(actor: Actor, incident_id: str, reason: str) -> None:
    """A person wants brought back after all what an incident lost and nobody brings back: each such
    replica has a new run. Raises Conflict if there is none, or without a reason."""
    if not reason.strip():
        raise Conflict("an order needs a reason, for the record")
    incident = Incident.objects.select_for_update(no_key=True, of=("self",)).get(pk=incident_id)
    missed = restartable_losses(incident.runs.select_related("job")) if incident.unresolved else []
    if not missed:
        raise Conflict(
            "nothing is to be brought back here: what this incident lost is there, is being "
            "brought back, or is not wanted any more"
        )
    for run in missed:
        lost = Placement.objects.select_related("replica__job", "node").get(
            pk=run.context["lost_placement"]
        )
        bring_back(lost, incident.occurred_at, actor, emptied=True)
    replicas = ", ".join(sorted(str(run.context["replica"]) for run in missed))
    what = f"To be brought back after all: replica {replicas} ({reason})"
    add_timeline_entry(incident, f"bring-back/{timezone.now().timestamp()}", EntryKind.STATE, what)


def _news_of_loss(run: PlaybookRun, lost: Placement) -> str:
    """What a loss tells a run that asked for a person and that it did not know, in words; "" if
    nothing. What is told of one process again and again is news once."""
    where = lost.node.name
    looked_into = Placement.objects.filter(pk=run.context.get("lost_placement")).first()
    itself = looked_into is not None and looked_into.pk == lost.pk
    if not itself and (looked_into is None or not _lost_as_one(looked_into, lost)):
        return f"what it has by now, on {where}, was lost too"
    step = run.steps.filter(state=StepState.NEEDS_OPERATOR).first()
    if step is None or step.started_at is None:
        return ""
    if step.key == "find-cause":
        return f"more was told of its loss on {where}"
    ends = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=lost.pk)
    gone = ends.filter(recorded_at__gt=step.started_at).exists()
    gone = gone or (lost.ended_at is not None and lost.ended_at > step.started_at)
    # These ask because nobody saw to it that nothing of it runs there.
    ending = step.key == "end-what-is-left" or (itself and step.key == "take-node-out")
    return f"its process on {where} has ended" if gone and ending else ""


def _lost_as_one(before: Placement, lost: Placement) -> bool:
    """Whether they are parts of one replica on several nodes, which start and end together."""
    one = before.replica_id == lost.replica_id and before.node_rank != lost.node_rank
    stood_by = (before.moved_from_id is None) != (lost.moved_from_id is None)
    return one and not stood_by and (before.ended_at is None or lost.created_at < before.ended_at)


def bring_back_sent_away() -> int:
    """Have brought back what a SIGTERM that we had not sent told to end, and whose job goes on:
    nobody lost it, and if its machine goes down with it nobody sees its process end. Returns how
    many; the keeper calls it."""
    told = Placement.objects.filter(replica=OuterRef("pk"), end_reason=SENT_AWAY)
    missing = Replica.objects.filter(
        Exists(told), state=ReplicaState.LOST, job__state__in=JOB_NEEDS_REPLICAS
    )
    brought = 0
    for replica in missing:
        with suppress(Conflict):  # it was brought back in this very moment
            brought += _bring_back_sent_away(replica)
    return brought


@change()
def _bring_back_sent_away(replica: Replica) -> bool:
    # The job first, as whoever starts it anew does.
    job = Job.objects.select_for_update(no_key=True).get(pk=replica.job_id)
    last = replica.placements.filter(IN_ITS_PLACE).order_by("ended_at", "created_at").last()
    if job.state not in JOB_NEEDS_REPLICAS or replica.alive.exists() or last is None:
        return False
    if not was_sent_away(last) or _is_being_restored(job, last):
        return False
    bring_back(last, last.ended_at or timezone.now())
    return True


def _is_being_restored(job: Job, last: Placement) -> bool:
    """Whether somebody has seen to its coming back since it left, or something of it runs still."""
    runs = PlaybookRun.objects.filter(job=job)
    starts = runs.filter(playbook="start-job", created_at__gt=last.created_at)
    since = Q(finished_at=None) | Q(finished_at__gt=last.ended_at)
    looked_into = runs.filter(since, playbook="replica-lost", context__lost_placement=last.pk)
    if starts.exists() or looked_into.exists():
        return True
    lingers = timezone.now() - (last.ended_at or timezone.now()) <= FAREWELL_GRACE
    return (lingers or job.nodes_per_replica > 1) and any(map(may_still_run, left_together(last)))


def may_still_run(placement: Placement) -> bool:
    """Whether its process may be there still, as far as its node can tell."""
    ends = Signal.objects.filter(
        node=placement.node_id, kind=SignalKind.PROCESS_EXITED, placement_id=placement.pk
    )
    return placement.node.lease.reachable and not ends.exists()


@change()
def bring_back_stopped(
    placement: Placement, occurred_at: datetime, actor: Actor = SYSTEM
) -> Incident | None:
    """Have a process brought back that ended as ordered. Returns the incident that tells of it, the
    open one of its replica if its loss is in somebody's hands there.

    None if the run that gave the order is there to see to it; one that was called off is not, and
    the only replica of a job has no peer that would miss it.
    """
    orders = Command.objects.filter(
        node=placement.node_id, verb="stop_process", payload__contains=f'"{placement.pk}"'
    )
    steps = {order.requester.partition(".")[0] for order in orders}
    runs = PlaybookStep.objects.filter(pk__in=steps).values_list("run", flat=True).distinct()
    # Locked: who calls one off either sees that the process has ended, or is seen here.
    if any(lock_run(run_id).state in RUN_UNFINISHED for run_id in list(runs)):
        return None
    there = incident_of_replica(placement.replica.job_id, placement.replica.index)
    if there is not None and _is_in_hands(placement, there):
        return there
    return bring_back(placement, occurred_at, actor, emptied=True)


def _is_in_hands(placement: Placement, incident: Incident) -> bool:
    """Whether the incident brings its replica back, or would have, had not a person called that
    off: they know of it."""
    subject = f"{LOSS}/{placement.replica.job_id}/{placement.replica.index}"
    off = Q(state=RunState.CANCELLED, created_at__gt=placement.created_at)
    return incident.runs.filter(Q(state__in=RUN_UNFINISHED) | off, subject=subject).exists()
