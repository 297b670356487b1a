"""A replica moves while it trains: a second process stands by on another node, then has its place.

When that happens is decided among the job's processes alone; here it is written down once told.
"""

from __future__ import annotations

from datetime import datetime

from django.db.models.functions import Coalesce

from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet.changes import change, touch
from controlplane.jobs.actions.jobs import end_placement, set_replicas, take_node
from controlplane.jobs.choices import PlacementState, ReplicaState
from controlplane.jobs.models import IN_ITS_PLACE, Placement, Replica


@change()
def stand_by(
    actor: Actor, replica_id: str, node_id: str, *, placement_id: str, reason: str
) -> Placement:
    """Put a second process of an active replica on a node, which becomes allocated.

    `placement_id` is the caller's. Raises Conflict if the replica is not active, if one stands by
    for it already, or if the node is not free.
    """
    replica = (
        Replica.objects.select_for_update(no_key=True).select_related("job").get(pk=replica_id)
    )
    own = replica.placements.filter(IN_ITS_PLACE)
    alive = own.exclude(state=PlacementState.ENDED).select_related("node")
    there = alive.filter(standby=True).first()
    if there is not None:
        raise Conflict(f"replica {replica.index} is being moved to {there.node.name} already")
    before = alive.first()
    if before is None or replica.state != ReplicaState.ACTIVE:
        state = replica.get_state_display().lower()
        raise Conflict(f"replica {replica.index} is {state}; only one that trains can be moved")
    take_node(actor, node_id, replica)
    placement = Placement.objects.create(
        pk=placement_id, replica=replica, node_id=node_id, standby=True, moved_from=before
    )
    audit(
        actor,
        "replica.move",
        "job",
        replica.job_id,
        cluster_id=replica.job.cluster_id,
        before={"replica": replica.index, "node": before.node_id, "placement": before.pk},
        after={"replica": replica.index, "node": node_id, "placement": placement.pk},
        reason=reason,
    )
    touch(replica.job.cluster_id)
    return placement


@change()
def take_place(standby: Placement, at: datetime) -> None:
    """Note that a process that stood by trains in its replica's place since `at`.

    The other one is leaving; its node stays allocated until nothing of it runs there. What was told
    of it may come late: where the standby was given up meanwhile, its replica is lost.
    """
    replica = Replica.objects.select_related("job").get(pk=standby.replica_id)
    before = replica.placements.filter(standby=False).exclude(state=PlacementState.ENDED)
    for placement in before:
        end_placement(SYSTEM, placement.pk, f"moved to {standby.node.name}", free_node=False)
    Placement.objects.filter(pk=standby.pk).update(
        standby=False, joined_at=at, started_at=Coalesce("started_at", at)
    )
    alive = Placement.objects.filter(pk=standby.pk).exclude(state=PlacementState.ENDED)
    if alive.update(state=PlacementState.RUNNING):
        set_replicas(replica.job, [replica.index], ReplicaState.ACTIVE)
    audit(
        SYSTEM,
        "replica.moved",
        "job",
        replica.job_id,
        cluster_id=replica.job.cluster_id,
        after={"replica": replica.index, "node": standby.node_id, "placement": standby.pk},
        reason="the job's processes told so",
    )
    touch(replica.job.cluster_id, ("job", replica.job_id))


@change()
def give_up_move(actor: Actor, placement_id: str, reason: str) -> bool:
    """Note that a process that stood by is gone, and free its node: its replica trains on.

    Returns False if it had ended before, or has taken the place meanwhile.
    """
    standby = Placement.objects.select_for_update(no_key=True).get(pk=placement_id)
    if not standby.standby or standby.ended_at is not None:
        return False
    return end_placement(actor, placement_id, f"not moved: {reason}", free_node=True)
