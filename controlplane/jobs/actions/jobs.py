"""What people, schedulers and playbooks do with jobs: register, place, direct, end."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from controlplane import crypto, doorbell
from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change, touch
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from controlplane.jobs.actions.spares import release
from controlplane.jobs.choices import JOB_ACTIVE, JobState, PlacementState, ReplicaState
from controlplane.jobs.models import (
    IN_ITS_PLACE,
    Directive,
    Job,
    Placement,
    Replica,
    SpareReservation,
)
from controlplane.jobs.selectors import may_return, placeable_nodes
from node_agent import wire

#: How long a job's processes may take to hear that they are to stop: also where a node is silent.
STOP_TTL_S = 24 * 3600
#: So long an order to a job is kept after nobody obeys it any more.
EXPIRED_KEPT = timedelta(days=1)
#: What most nodes have.
GPUS_PER_NODE = 8


@change()
def register(
    actor: Actor,
    *,
    cluster_id: str,
    name: str,
    program: str,
    world_replicas: int,
    min_replicas: int = 1,
    gpus_per_replica: int | None = None,
    nodes_per_replica: int = 1,
    warm_spares: int = 0,
    options: dict[str, Any] | None = None,
) -> Job:
    """Make a job known, with its replicas pending; eight cards on each node unless it says so.

    Raises Conflict if the name is taken.
    """
    if Job.objects.filter(cluster_id=cluster_id, name=name).exists():
        raise Conflict(f"the cluster has a job {name!r} already; choose another name")
    job = Job.objects.create(
        cluster_id=cluster_id,
        name=name,
        program=program,
        world_replicas=world_replicas,
        min_replicas=min_replicas,
        gpus_per_replica=gpus_per_replica or GPUS_PER_NODE * nodes_per_replica,
        nodes_per_replica=nodes_per_replica,
        whole=nodes_per_replica > 1,
        warm_spares=warm_spares,
        options=options or {},
    )
    now = timezone.now()
    Replica.objects.bulk_create(
        [Replica(job=job, index=index, state_since=now) for index in range(world_replicas)]
    )
    audit(actor, "job.register", "job", job.pk, cluster_id=cluster_id, after={"name": name})
    touch(cluster_id)
    return job


@change()
def begin_start(actor: Actor, job_id: str, reason: str) -> Job:
    """Take a job back to the point before its ranks run: all placements ended, replicas pending."""
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    for placement in Placement.objects.filter(replica__job=job).exclude(state=PlacementState.ENDED):
        end_placement(actor, placement.pk, reason, free_node=True)
    set_replicas(job, list(range(job.world_replicas)), ReplicaState.PENDING)
    audit(
        actor,
        "job.start",
        "job",
        job.pk,
        cluster_id=job.cluster_id,
        before={"state": job.state},
        after={"state": JobState.STARTING},
        reason=reason,
    )
    _stop_coordinator(actor, job)
    job.state = JobState.STARTING
    job.coordinator_node = None
    job.coordinator_address = ""
    job.coordinator_placement = ""
    job.save(
        update_fields=[
            "state",
            "coordinator_node",
            "coordinator_address",
            "coordinator_placement",
        ]
    )
    touch(job.cluster_id)
    return job


@change()
def set_coordinator(actor: Actor, job_id: str, node_id: str, address: str, placement: str) -> None:
    """Note where the job's coordinator answers ("" while it is being started)."""
    job = Job.objects.get(pk=job_id)
    Job.objects.filter(pk=job_id).update(
        coordinator_node_id=node_id, coordinator_address=address, coordinator_placement=placement
    )
    audit(
        actor,
        "job.set_coordinator",
        "job",
        job_id,
        cluster_id=job.cluster_id,
        before={"address": job.coordinator_address},
        after={"address": address, "node": node_id},
    )
    touch(job.cluster_id)


@change()
def place(
    actor: Actor, replica_id: str, node_id: str, *, placement_id: str, node_rank: int = 0
) -> Placement:
    """Put a replica on a node: the node becomes allocated, the replica starting.

    `placement_id` is the caller's, so that asking again finds what is there. `node_rank`: which of
    the replica's nodes it is to be. Raises Conflict if that is placed already, the node is not
    free, or the job is over.
    """
    known = Placement.objects.filter(pk=placement_id).first()
    if known is not None:
        return known
    # The job is locked with it: it cannot end in this very moment.
    replica = (
        Replica.objects.select_for_update(no_key=True).select_related("job").get(pk=replica_id)
    )
    check_active(replica.job)
    if replica.alive.filter(node_rank=node_rank).exists():
        raise Conflict(f"replica {replica.index} of {replica.job.name} is placed already")
    take_node(actor, node_id, replica)
    placement = Placement.objects.create(
        pk=placement_id, replica=replica, node_id=node_id, node_rank=node_rank
    )
    set_replicas(replica.job, [replica.index], ReplicaState.STARTING)
    audit(
        actor,
        "replica.place",
        "job",
        replica.job_id,
        cluster_id=replica.job.cluster_id,
        after={"replica": replica.index, "node": node_id, "placement": placement.pk},
    )
    touch(replica.job.cluster_id)
    return placement


def check_active(job: Job) -> None:
    """Raises Conflict if the job is over or ends: whoever saw to that calls off what is under way
    for it."""
    if job.state not in JOB_ACTIVE:
        raise Conflict(f"{job.name} is {job.get_state_display().lower()}; nothing of it is started")


def take_node(actor: Actor, node_id: str, replica: Replica) -> bool:
    """Let a node be allocated to a replica; whether it was a spare. Raises Conflict if it is not
    free for that: since it was chosen somebody may have kept it from work, or for others."""
    node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
    if Placement.objects.filter(node_id=node_id).exclude(state=PlacementState.ENDED).exists():
        raise Conflict("this node holds another replica")
    job = replica.job
    in_place = node.state == NodeState.ALLOCATED
    free = placeable_nodes(job.cluster_id, job.pk).filter(pk=node_id)
    if not (may_return(node, job) if in_place else free.exists()):
        raise Conflict(f"{node.name} is not free for {job.name} any more")
    if not in_place:
        reason = f"replica {replica.index} of {job.name}"
        fleet.transition(actor, node_id, NodeState.ALLOCATED, reason=reason)
        # It is needed now; another may take its part.
        fleet.set_spare(actor, node_id, False, reason="it takes a replica")
    reserved = SpareReservation.objects.filter(node_id=node_id)
    release(actor, reserved, f"replica {replica.index} of {job.name} takes it")
    return node.spare


@change()
def end_placement(actor: Actor, placement_id: str, reason: str, *, free_node: bool) -> bool:
    """Note that this process is gone; its replica is lost until it is placed anew.

    Whoever stood by for it has its place from now on. The end of a process that only stood by takes
    nothing from its replica. `free_node` gives an allocated node back to the pool; a replica that
    returns in place keeps it. Returns False if the placement had ended before.
    """
    placement = Placement.objects.select_related("replica__job").get(pk=placement_id)
    ended = Placement.objects.filter(pk=placement_id).exclude(state=PlacementState.ENDED)
    if not ended.update(state=PlacementState.ENDED, ended_at=timezone.now(), end_reason=reason):
        return False
    job = placement.replica.job
    if not placement.standby:
        set_replicas(job, [placement.replica.index], _succeeded(placement.replica))
    if free_node:
        vacate(actor, placement)
    audit(
        actor,
        "replica.end",
        "job",
        job.pk,
        cluster_id=job.cluster_id,
        before={"replica": placement.replica.index, "placement": placement_id},
        reason=reason,
    )
    touch(job.cluster_id)
    doorbell.ring_after_commit(f"node/{placement.node_id}")
    if job.state == JobState.STOPPING and not _alive(job).exists():
        end_job(actor, job.pk, "its last process has left")
    return True


@change()
def vacate(actor: Actor, placement: Placement) -> None:
    """Give a node back to the pool, now that nothing of this ended placement runs there; that of a
    warm spare to the spares, if it is from there.

    One that is in other hands by now, or holds another replica, stays as it is.
    """
    held = Placement.objects.filter(node=placement.node_id).exclude(state=PlacementState.ENDED)
    if _node_state(placement.node_id) == NodeState.ALLOCATED and not held.exists():
        fleet.transition(actor, placement.node_id, NodeState.AVAILABLE, reason="its replica left")
        if placement.standby and placement.from_spares:
            keep_as_spare(actor, placement.node_id, "its warm spare left")
        doorbell.ring_after_commit(f"node/{placement.node_id}")


@change()
def keep_as_spare(actor: Actor, node_id: str, reason: str) -> None:
    """Let a node be a spare that was taken or given back, if it is free."""
    if _node_state(node_id) == NodeState.AVAILABLE:
        fleet.set_spare(actor, node_id, True, reason=reason)


@change()
def reveal_token(actor: Actor, job_id: str) -> str:
    """Tell the token of a job's ranks, for those that its own scheduler starts; it stands nowhere.

    It lets whoever has it speak for the job, so it is on record that it was told.
    """
    job = Job.objects.get(pk=job_id)
    audit(
        actor,
        "job.reveal_token",
        "job",
        job_id,
        cluster_id=job.cluster_id,
        reason="for ranks that its scheduler starts",
    )
    return crypto.job_token(job_id)


@change()
def direct(
    actor: Actor, job_id: str, verb: str, *, ttl_s: float = 60, reason: str = ""
) -> Directive:
    """Give an order to a job's runtime; it is obeyed at a step's edge, once."""
    job = Job.objects.get(pk=job_id)
    directive = Directive.objects.create(
        job=job, verb=verb, expires_at=timezone.now() + timedelta(seconds=ttl_s)
    )
    audit(
        actor,
        f"job.direct.{verb}",
        "job",
        job_id,
        cluster_id=job.cluster_id,
        after={"directive": directive.pk, "ttl_s": ttl_s},
        reason=reason,
    )
    return directive


def forget_directives(now: datetime) -> int:
    """Delete orders to jobs that expired a day ago: nobody obeys them any more, and each message
    of a job looks through its own. Returns how many rows went."""
    return Directive.objects.filter(expires_at__lt=now - EXPIRED_KEPT).delete()[0]


@change()
def request_stop(actor: Actor, job_id: str, reason: str) -> Job:
    """Have a job's ranks leave at a step's edge; it ends when the last one has.

    One that we have no process of ends at once; ranks of its own scheduler's that tell of
    themselves hear of it. Raises Conflict if it has ended or is stopping already.
    """
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    if job.state not in JOB_ACTIVE:
        raise Conflict(f"{job.name} is {job.get_state_display().lower()}; there is nothing to end")
    ours = _alive(job).exists()
    if ours:
        set_job(actor, job, JobState.STOPPING, reason, "job.stop")
    direct(actor, job_id, "stop", ttl_s=STOP_TTL_S, reason=reason)
    return job if ours else end_job(actor, job_id, reason)


@change()
def end_itself(job_id: str, reason: str) -> None:
    """Note that a job is over by its own word: of its processes those that are still there are to
    leave too. Nothing where it was to stop before."""
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    if job.state not in JOB_ACTIVE:
        return
    if _alive(job).exists():
        set_job(SYSTEM, job, JobState.STOPPING, reason, "job.stop")
        direct(SYSTEM, job_id, "stop", ttl_s=STOP_TTL_S, reason=reason)
    else:
        end_job(SYSTEM, job_id, reason)


@change()
def end_job(actor: Actor, job_id: str, reason: str) -> Job:
    """Note that a job is over. Raises Conflict while a process of it is believed to run."""
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    if job.ended_at is not None:
        raise Conflict(f"{job.name} has ended already")
    if _alive(job).exists():
        raise Conflict(f"processes of {job.name} still run; have them stop first")
    job.ended_at = timezone.now()
    job.save(update_fields=["ended_at"])
    set_job(actor, job, JobState.STOPPED, reason, "job.end")
    _stop_coordinator(actor, job)
    release(actor, SpareReservation.objects.filter(job=job), f"{job.name} is over")
    return job


def _stop_coordinator(actor: Actor, job: Job) -> None:
    if job.coordinator_node_id and job.coordinator_placement:
        stop = wire.StopProcess(placement=job.coordinator_placement)
        requester = f"end/{job.coordinator_placement}"
        fleet.queue_command(
            actor, job.coordinator_node_id, stop, requester=requester, ttl_s=STOP_TTL_S
        )


def set_job(actor: Actor, job: Job, to: JobState, reason: str, verb: str) -> None:
    """Write the job's state, audit it, and wake the workers once committed.

    The caller holds the job's row locked and has checked that the state may follow the present one.
    """
    before = job.state
    job.state = to
    job.save(update_fields=["state"])
    audit(
        actor,
        verb,
        "job",
        job.pk,
        cluster_id=job.cluster_id,
        before={"state": before},
        after={"state": to},
        reason=reason,
    )
    touch(job.cluster_id)
    doorbell.ring_after_commit(f"job/{job.pk}")


def _succeeded(replica: Replica) -> ReplicaState:
    """Give the replica to whoever stood by for it; its state without what it had until now."""
    alive = replica.placements.filter(IN_ITS_PLACE).exclude(state=PlacementState.ENDED)
    if not alive.filter(standby=True).update(standby=False):
        return ReplicaState.LOST
    up = alive.filter(state=PlacementState.RUNNING).exists()
    return ReplicaState.JOINING if up else ReplicaState.STARTING


def _alive(job: Job) -> QuerySet[Placement]:
    return Placement.objects.filter(replica__job=job).exclude(state=PlacementState.ENDED)


def set_replicas(job: Job, indices: list[int], state: ReplicaState) -> None:
    """Write the state of these replicas, and since when, where it is another."""
    Replica.objects.filter(job=job, index__in=indices).exclude(state=state).update(
        state=state, state_since=timezone.now()
    )


def _node_state(node_id: str) -> NodeState:
    return NodeState(Node.objects.values_list("state", flat=True).get(pk=node_id))
