"""Each job that trains has its warm spares: what lacks is started, what is too much is ended."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet.changes import change
from controlplane.fleet.models import Node
from controlplane.ids import new_id
from controlplane.incidents.actions.job_end import end_process
from controlplane.incidents.actions.requests import WARM_SPARE
from controlplane.incidents.actions.runs import request_run
from controlplane.incidents.candidates import free_nodes, wanted_by
from controlplane.incidents.choices import RUN_UNFINISHED, Mode, RunState
from controlplane.incidents.limits import mode_of
from controlplane.incidents.models import PlaybookRun
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JobState, PlacementState
from controlplane.jobs.models import Job, Placement
from workers.placement import choose_spare

#: So long after one did not come to life another is tried.
RETRY = timedelta(seconds=60)
#: A node on which one did not come to life is passed over for so long.
PASSED_OVER = timedelta(hours=1)


def keep_warm_spares() -> int:
    """Start and end warm spares where jobs have too few or too many. Returns how many orders were
    given; the keeper calls it."""
    alive = Placement.objects.exclude(state=PlacementState.ENDED)
    held = Counter(alive.filter(standby=True, warm=True).values_list("replica__job_id", flat=True))
    wanting = Job.objects.filter(state=JobState.RUNNING, warm_spares__gt=0, whole=False)
    lacking = [
        job for job in wanting.exclude(coordinator_address="") if held[job.pk] < job.warm_spares
    ]
    running = Job.objects.filter(pk__in=list(held), state=JobState.RUNNING)
    crowded = [one for job in running for one in job.held_warm_spares[job.warm_spares :]]
    return sum(map(_start_one, lacking)) + sum(map(end_process, crowded))


def _start_one(job: Job) -> bool:
    """Not while a replica waits for a node itself, nor soon after one has failed.

    Where that is switched off none is placed either: it would hold a node while a person is asked.
    """
    if mode_of(job.cluster_id, WARM_SPARE) == Mode.OFF:
        return False
    runs = PlaybookRun.objects.filter(playbook=WARM_SPARE, job=job)
    failed = runs.filter(state__in=[RunState.FAILED, RunState.CANCELLED])
    lately = failed.filter(finished_at__gt=timezone.now() - RETRY)
    if runs.filter(state__in=sorted(RUN_UNFINISHED)).exists() or lately.exists():
        return False
    # One that was cancelled says nothing of its node.
    in_vain = runs.filter(state=RunState.FAILED, finished_at__gt=timezone.now() - PASSED_OVER)
    passed_over = set(in_vain.values_list("node_id", flat=True))
    free = [one for one in free_nodes(job.cluster_id, job.pk) if one.node_id not in passed_over]
    if not free:
        return False
    own = Placement.objects.filter(replica__job=job, standby=False)
    alive = own.exclude(state=PlacementState.ENDED).select_related("node__rack", "node__cluster")
    trains = list(alive)
    if len(trains) < job.world_replicas:
        return False
    racks = [one.node.rack.name if one.node.rack else "" for one in trains]
    choice = choose_spare(free, racks, wanted_by(trains[0].node, job.gpus_per_replica))
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
        WARM_SPARE,
        job.pk,
        cluster_id=job.cluster_id,
        title=f"Start a warm spare of {job.name} on {node.name}",
        job_id=job.pk,
        node_id=node_id,
        context={"placement": placement.pk, "spare": placement.from_spares, "reason": why},
    )
    return True
