"""A job is to end: what automation had under way for it ends with it, and all its processes."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState, NodeState
from controlplane.fleet.models import Command
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.incidents.actions.incidents import open_or_merge, resolve
from controlplane.incidents.actions.repairs import repair_node
from controlplane.incidents.actions.requests import FOR_THE_JOB, WARM_SPARE
from controlplane.incidents.actions.runs import cancel_run
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, RUN_UNFINISHED, Severity
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.incidents.move_plans import PLAYBOOK as MOVE
from controlplane.incidents.move_plans import SAVE_S
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JobState, PlacementState
from controlplane.jobs.models import LEFT, Directive, Job, Placement
from node_agent import wire

#: One that does not end is told again after so long.
RESEND_AFTER = timedelta(seconds=60)
#: A node that is heard has ended it, and said so, so long after the time that it has to leave.
ANSWER_S = 60.0


@change()
def end_job(actor: Actor, job_id: str, reason: str) -> Job:
    """Have a job's ranks stop; nothing brings them back. Raises Conflict if it has ended."""
    job = jobs.request_stop(actor, job_id, reason)
    why = f"the job is ended: {reason}"
    for run in _under_way(job_id=job_id):
        cancel_run(actor, run.pk, why)
    for incident in Incident.objects.filter(job_id=job_id, state__in=INCIDENT_UNRESOLVED):
        resolve(actor, incident.pk, why)
    return job


def _under_way(**which: Any) -> list[PlaybookRun]:
    """What is being done for jobs that nobody is to bring back."""
    runs = PlaybookRun.objects.filter(playbook__in=FOR_THE_JOB, state__in=RUN_UNFINISHED, **which)
    return list(runs.select_related("incident"))


def _call_off_for_what_is_over() -> None:
    """A job whose script ended it may have lost a replica before, which is being brought back."""
    for run in _under_way(job__state__in=(JobState.STOPPING, JobState.STOPPED)):
        with change(), suppress(Conflict):  # it has ended by itself
            cancel_run(SYSTEM, run.pk, "the job is over")
            if run.incident is not None and run.incident.state in INCIDENT_UNRESOLVED:
                resolve(SYSTEM, run.incident.pk, "the job is over")


def finish_ending_jobs() -> int:
    """Have killed what a job that is to end has no use for, and what is known to be gone from its
    job and hangs; have told to end what trained and stands still; give back the nodes that nobody
    else does; note that those jobs are over of which nothing is left. Returns how many orders were
    given; the keeper calls it."""
    _call_off_for_what_is_over()
    long_ago = timezone.now() - timedelta(seconds=SAVE_S)
    stopping = Job.objects.filter(state=JobState.STOPPING)
    alive = Placement.objects.exclude(state=PlacementState.ENDED)
    exits = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=OuterRef("pk"))
    # Who has never trained, or is gone, is in no loop that it could leave.
    idle = Q(joined_at=None) | Q(standby=True) | Q(Exists(exits))
    # Nor is one that waits for others of its start, which ended and had the time to be waited for.
    others = Placement.objects.filter(
        replica=OuterRef("replica"),
        ended_at__gt=OuterRef("created_at"),
        ended_at__lt=long_ago,
    )
    idle |= Q(Exists(others), replica__job__nodes_per_replica__gt=1)
    unseen = _gone().filter(~Exists(exits), ended_at__lt=long_ago, node__lease__reachable=True)
    hang = [one for one in unseen if not _has_owning_run(one)]
    there = alive.filter(replica__job__in=stopping)
    told = sum(map(end_process, [*there.filter(idle), *hang]))
    # What had the time to hear of it and to save may stand still, where a SIGTERM is heard too.
    lately = Directive.objects.filter(
        job=OuterRef("replica__job"), verb="stop", created_at__gt=long_ago
    )
    for one in there.filter(~idle, ~Exists(lately)):
        told += end_process(one, grace_s=SAVE_S)
    # In that very moment, and neither saw the other; or who was to free its node was called off.
    # Not before it is known what the end of the process means.
    for one in _gone().filter(Exists(exits.filter(triaged_at__isnull=False))):
        if not _has_owning_run(one):
            _give_back(one)
    for job in stopping.exclude(Exists(alive.filter(replica__job=OuterRef("pk")))):
        with suppress(Conflict):  # it is over by now
            jobs.end_job(SYSTEM, job.pk, "its last process has left")
    return told


@change()
def end_process(placement: Placement, *, grace_s: float = 0) -> bool:
    """Have a process killed that holds nothing of its own, and note it once nothing of it runs. It
    is told until then; whether it was now. `grace_s`: what it has to save and to leave by itself.
    """
    why = "it is not wanted any more"
    # The job first, as whoever takes its processes' word does.
    Job.objects.select_for_update(no_key=True).get(pk=placement.replica.job_id)
    start = PlaybookRun.objects.filter(
        playbook=WARM_SPARE, state__in=sorted(RUN_UNFINISHED), context__placement=placement.pk
    ).first()
    if start is not None:  # which may be about to start it
        cancel_run(SYSTEM, start.pk, why)
        return True
    orders = Command.objects.filter(requester__startswith=f"end/{placement.pk}.")
    last = orders.order_by("created_at").last()
    if last is not None and last.state == CommandState.DONE:
        if placement.state == PlacementState.ENDED:
            _give_back(placement)
        elif placement.warm:
            jobs.end_warm_spare(SYSTEM, placement.pk, why)
        else:
            jobs.end_placement(SYSTEM, placement.pk, why, free_node=True)
        return False
    if last is not None and (
        last.state not in COMMAND_FINISHED or timezone.now() - last.created_at < RESEND_AFTER
    ):
        return False
    # Once its agent may only have been restarted meanwhile.
    if last is not None and orders.filter(state=CommandState.FAILED).count() > 1:
        _cannot_be_ended(placement, last.error)
    requester = f"end/{placement.pk}.{orders.count()}"
    verb = wire.StopProcess(placement=placement.pk, grace_s=grace_s)
    ttl_s = grace_s + ANSWER_S
    fleet.queue_command(SYSTEM, placement.node_id, verb, requester=requester, ttl_s=ttl_s)
    return True


def _cannot_be_ended(placement: Placement, why: str) -> None:
    """A node that cannot end a process is unfit: it holds the cards for ever."""
    node, job = placement.node, placement.replica.job
    incident = open_or_merge(
        f"node/{node.pk}",
        cluster_id=node.cluster_id,
        title=f"{node.name} cannot end a process of {job.name}",
        severity=Severity.MINOR,
        occurred_at=timezone.now(),
        node_id=node.pk,
    )
    reason = f"it cannot end a process of {job.name}: {why}"
    repair_node(SYSTEM, node.pk, incident, reason, lost_placement=placement.pk)


def _gone() -> QuerySet[Placement]:
    """What left its job, or lost its place to another, and whose node waits for its process to be
    seen to end. What a node holds by now is of later."""
    later = Placement.objects.filter(node=OuterRef("node"), created_at__gt=OuterRef("created_at"))
    ended = Placement.objects.filter(
        ~Exists(later), state=PlacementState.ENDED, node__state=NodeState.ALLOCATED
    )
    return ended.select_related("replica__job", "node")


def _has_owning_run(gone: Placement) -> bool:
    """Whether a run frees its node that brings its replica back, or moves it. Who left by itself
    waits for none."""
    if gone.end_reason.startswith(LEFT):
        return False
    runs = _under_way(job=gone.replica.job_id)
    return any(gone.pk in json.dumps(run.context) for run in runs)


@change()
def _give_back(gone: Placement) -> None:
    """Free its node, now that nothing of it runs there: a spare, if what has its place was one."""
    jobs.vacate(SYSTEM, gone)
    successors = gone.successors.filter(standby=False)
    moves = PlaybookRun.objects.filter(
        playbook=MOVE,
        context__spare=True,
        context__placement__in=[*successors.values_list("pk", flat=True)],
    )
    if successors.filter(warm=True, from_spares=True).exists() or moves.exists():
        jobs.keep_as_spare(SYSTEM, gone.node_id, "it was replaced by one")
