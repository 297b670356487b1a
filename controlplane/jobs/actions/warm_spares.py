"""Warm spares: processes that hold a job's state and take the place of whichever replica dies.

Which one takes whose place is decided among the job's processes alone; here it is written down.
"""

from __future__ import annotations

from datetime import datetime

from django.db.models import Q

from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet.changes import change, touch
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.jobs.actions.jobs import end_placement, take_node
from controlplane.jobs.actions.moves import take_place
from controlplane.jobs.choices import JobState, PlacementState
from controlplane.jobs.models import Job, Placement


@change()
def set_warm_spares(actor: Actor, job_id: str, count: int, reason: str) -> Job:
    """Say how many warm spares a job is to have.

    Raises Conflict if it has ended, or restarts as a whole.
    """
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    if job.ended_at is not None:
        raise Conflict(f"{job.name} has ended")
    if job.whole and count:
        raise Conflict(f"{job.name} restarts as a whole: no process can hold its state beside it")
    before, job.warm_spares = job.warm_spares, count
    job.save(update_fields=["warm_spares"])
    audit(
        actor,
        "job.set_warm_spares",
        "job",
        job_id,
        cluster_id=job.cluster_id,
        before={"warm_spares": before},
        after={"warm_spares": count},
        reason=reason,
    )
    touch(job.cluster_id, ("job", job_id))
    return job


@change()
def place_warm_spare(actor: Actor, job_id: str, node_id: str, *, placement_id: str) -> Placement:
    """Put a warm spare of a job on a node, which becomes allocated.

    `placement_id` is the caller's, so that asking again finds what is there. Raises Conflict if the
    node is not free, or if the job does not run.
    """
    known = Placement.objects.filter(pk=placement_id).first()
    if known is not None:
        return known
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    if job.state != JobState.RUNNING:
        raise Conflict(f"{job.name} is {job.get_state_display().lower()}; it needs no warm spare")
    replica = job.replicas.select_related("job").earliest("index")
    placement = Placement.objects.create(
        pk=placement_id,
        replica=replica,
        node_id=node_id,
        standby=True,
        warm=True,
        from_spares=take_node(actor, node_id, replica),
    )
    audit(
        actor,
        "job.place_warm_spare",
        "job",
        job_id,
        cluster_id=job.cluster_id,
        after={"node": node_id, "placement": placement.pk},
    )
    touch(job.cluster_id, ("job", job_id))
    return placement


@change()
def end_warm_spare(actor: Actor, placement_id: str, reason: str) -> bool:
    """Note that a warm spare's process is gone, and free its node. False if it had ended, or has
    taken a replica's place meanwhile."""
    spare = Placement.objects.select_for_update(no_key=True).get(pk=placement_id)
    if not spare.standby or spare.ended_at is not None:
        return False
    return end_placement(actor, placement_id, reason, free_node=True)


def enter(spare: Placement, index: int, at: datetime) -> None:
    """Note that a warm spare trains in this replica's place since `at`; what had it is gone.

    One that was to replace what is gone stands by for the spare now. Where another trains in the
    place since, and the spare is said to be gone too, this is old news. Of a replica that the job
    does not have nothing is noted: whoever tells of it would else repeat that for ever.
    """
    replica = spare.replica.job.replicas.filter(index=index).first()
    if replica is None:
        return
    alive = replica.placements.filter(standby=False).exclude(state=PlacementState.ENDED)
    gone = Signal.objects.filter(
        kind__in=(SignalKind.PEER_LOST, SignalKind.PROCESS_EXITED), placement_id=spare.pk
    )
    if gone.exists() and alive.filter(joined_at__gt=at).exists():
        end_warm_spare(SYSTEM, spare.pk, f"it had the place of replica {index}, and was lost")
        return
    lost = replica.placements.filter(standby=False).exclude(joined_at=None)
    before = lost.order_by("created_at").last()
    moving = Q(warm=False, joined_at=None, moved_from__isnull=False)
    for placement in alive.exclude(moving):
        reason = f"its place was taken by the warm spare on {spare.node.name}"
        end_placement(SYSTEM, placement.pk, reason, free_node=False)
    alive.filter(moving).update(standby=True, moved_from=spare)
    Placement.objects.filter(pk=spare.pk).update(replica=replica, moved_from=before)
    spare.refresh_from_db()
    take_place(spare, at)
