"""Each job that trains has its warm spares: what lacks is started, what is too much is ended."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from django.db.models import Count, F, Q
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change
from controlplane.fleet.models import Command, Node
from controlplane.ids import new_id
from controlplane.incidents.actions.runs import request_run
from controlplane.incidents.candidates import free_nodes, wanted_by
from controlplane.incidents.choices import RUN_UNFINISHED
from controlplane.incidents.models import PlaybookRun
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JobState, PlacementState
from controlplane.jobs.models import Job, Placement
from node_agent import wire
from workers.spares import choose_spare

PLAYBOOK = "warm-spare"
#: So long after one did not come to life another is tried.
RETRY = timedelta(seconds=60)


def keep_warm_spares() -> int:
    """Start and end warm spares where jobs have too few or too many. Returns how many orders were
    given; the keeper calls it."""
    alive = ~Q(replicas__placements__state=PlacementState.ENDED)
    warm = Q(replicas__placements__standby=True, replicas__placements__warm=True)
    held = Count("replicas__placements", filter=alive & warm)
    ours = Job.objects.exclude(coordinator_address="").annotate(held=held)
    lacking = ours.filter(state=JobState.RUNNING, whole=False, held__lt=F("warm_spares"))
    crowded = ours.filter(state=JobState.RUNNING, held__gt=F("warm_spares"))
    leaving = ours.filter(state=JobState.STOPPING, held__gt=0)
    return (
        sum(_start_one(job) for job in lacking)
        + sum(_end(job.held_warm_spares[job.warm_spares :]) for job in crowded)
        + sum(_end(job.held_warm_spares) for job in leaving)
    )


def _start_one(job: Job) -> bool:
    """Not while a replica waits for a node itself, nor soon after one has failed."""
    runs = PlaybookRun.objects.filter(playbook=PLAYBOOK, job=job)
    lately = Q(finished_at__gt=timezone.now() - RETRY, state="failed")
    if runs.filter(Q(state__in=sorted(RUN_UNFINISHED)) | lately).exists():
        return False
    own = Placement.objects.filter(replica__job=job, standby=False)
    alive = own.exclude(state=PlacementState.ENDED).select_related("node__rack", "node__cluster")
    trains = list(alive)
    if len(trains) < job.world_replicas:
        return False
    racks = [one.node.rack.name if one.node.rack else "" for one in trains]
    choice = choose_spare(
        free_nodes(job.cluster_id, job.pk), racks, wanted_by(trains[0].node, job.gpus_per_replica)
    )
    return choice is not None and _place(job, choice.node_id, choice.reason)


@change()
def _place(job: Job, node_id: str, why: str) -> bool:
    node = Node.objects.get(pk=node_id)
    try:
        placement = jobs.place_warm_spare(SYSTEM, job.pk, node_id, placement_id=new_id("plc"))
    except Conflict:
        return False  # it was taken meanwhile
    request_run(
        SYSTEM,
        PLAYBOOK,
        job.pk,
        cluster_id=job.cluster_id,
        title=f"Start a warm spare of {job.name} on {node.name}",
        job_id=job.pk,
        node_id=node_id,
        context={"placement": placement.pk, "spare": True, "reason": why},
    )
    return True


@change()
def _end(spares: Iterable[Placement]) -> int:
    """Have them killed: what they hold is held elsewhere. Each is told once."""
    ended = 0
    for spare in spares:
        requester = f"warm/{spare.pk}"
        if not Command.objects.filter(requester=requester).exists():
            verb = wire.StopProcess(placement=spare.pk, grace_s=0)
            fleet.queue_command(SYSTEM, spare.node_id, verb, requester=requester)
            ended += 1
    return ended
