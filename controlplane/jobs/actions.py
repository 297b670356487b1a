"""The only writers of jobs, replicas, placements and what a job tells of itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils import timezone

from controlplane import doorbell
from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change, touch
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from controlplane.health.actions import record_signal
from controlplane.health.choices import SignalKind
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState
from controlplane.jobs.models import (
    Checkpoint,
    Directive,
    Interruption,
    Job,
    LedgerRange,
    Placement,
    ProgressSample,
    Replica,
)
from runtime import client

# --- what people, schedulers and playbooks do -----------------------------------------------------


@change()
def register(
    actor: Actor,
    *,
    cluster_id: str,
    name: str,
    program: str,
    world_replicas: int,
    min_replicas: int = 1,
    options: dict[str, Any] | None = None,
) -> Job:
    """Make a job known, with its replicas pending. Raises Conflict if the name is taken."""
    if Job.objects.filter(cluster_id=cluster_id, name=name).exists():
        raise Conflict(f"the cluster has a job {name!r} already; choose another name")
    job = Job.objects.create(
        cluster_id=cluster_id,
        name=name,
        program=program,
        world_replicas=world_replicas,
        min_replicas=min_replicas,
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
    _set_replicas(job, list(range(job.world_replicas)), ReplicaState.PENDING)
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
def place(actor: Actor, replica_id: str, node_id: str, *, placement_id: str) -> Placement:
    """Put a replica on a node: the node becomes allocated, the replica starting.

    `placement_id` is the caller's, so that asking again finds what is there. Raises Conflict if the
    replica is placed already or the node is not free.
    """
    there = Placement.objects.filter(pk=placement_id).first()
    if there is not None:
        return there
    replica = (
        Replica.objects.select_for_update(no_key=True).select_related("job").get(pk=replica_id)
    )
    if replica.placements.exclude(state=PlacementState.ENDED).exists():
        raise Conflict(f"replica {replica.index} of {replica.job.name} is placed already")
    if Placement.objects.filter(node_id=node_id).exclude(state=PlacementState.ENDED).exists():
        raise Conflict("this node holds another replica")
    if _node_state(node_id) != NodeState.ALLOCATED:
        fleet.transition(
            actor,
            node_id,
            NodeState.ALLOCATED,
            reason=f"replica {replica.index} of {replica.job.name}",
        )
        fleet.set_spare(actor, node_id, False)  # it is needed now; another may take its part
    placement = Placement.objects.create(pk=placement_id, replica=replica, node_id=node_id)
    _set_replicas(replica.job, [replica.index], ReplicaState.STARTING)
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


@change()
def end_placement(actor: Actor, placement_id: str, reason: str, *, free_node: bool) -> bool:
    """Note that this process is gone; its replica is lost until it is placed anew.

    `free_node` gives an allocated node back to the pool; a replica that returns in place keeps it.
    Returns False if the placement had ended before.
    """
    placement = Placement.objects.select_related("replica__job").get(pk=placement_id)
    ended = Placement.objects.filter(pk=placement_id).exclude(state=PlacementState.ENDED)
    if not ended.update(state=PlacementState.ENDED, ended_at=timezone.now(), end_reason=reason):
        return False
    job = placement.replica.job
    _set_replicas(job, [placement.replica.index], ReplicaState.LOST)
    if free_node and _node_state(placement.node_id) == NodeState.ALLOCATED:
        fleet.transition(actor, placement.node_id, NodeState.AVAILABLE, reason="its replica left")
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
    return True


@change()
def direct(actor: Actor, job_id: str, verb: str, *, ttl_s: float = 60) -> Directive:
    """Give an order to a job's runtime; it is obeyed at a step's edge, once."""
    job = Job.objects.get(pk=job_id)
    directive = Directive.objects.create(
        job=job, verb=verb, expires_at=timezone.now() + timedelta(seconds=ttl_s)
    )
    audit(actor, f"job.direct.{verb}", "job", job_id, cluster_id=job.cluster_id)
    return directive


# --- what a job tells of itself -------------------------------------------------------------------


@change()
def record_runtime_batch(
    job_id: str, batch: client.Batch, messages: list[client.Message]
) -> client.Reply:
    """Keep what one rank told. Each message has a natural key: telling it again changes nothing."""
    # One job's batches take turns, so that the ledger's end is read and moved by one at a time.
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    for message in messages:
        if isinstance(message, client.Hello):
            _record_hello(job, batch, message)
        elif isinstance(message, client.Progress):
            _record_progress(job, message)
        elif isinstance(message, client.Ledger):
            _record_ledger(job, message)
        elif isinstance(message, client.PeerLost):
            _record_peer_lost(job, batch, message)
        elif isinstance(message, client.Regrouped):
            _record_regrouped(job, message)
        elif isinstance(message, client.CheckpointSaved):
            _record_checkpoint(job, message)
        elif isinstance(message, client.Trouble):
            _record_trouble(job, batch, message)
        else:
            _record_stopped(job, batch, message)
    job.save()
    touch(job.cluster_id)
    directives = Directive.objects.filter(job=job, expires_at__gt=timezone.now())
    return client.Reply(
        ledger_step=job.ledger_step,
        directives=[{"id": d.pk, "verb": d.verb, "args": d.args} for d in directives],
    )


def _record_hello(job: Job, batch: client.Batch, message: client.Hello) -> None:
    started = Placement.objects.filter(
        pk=batch.placement, replica__job=job, state=PlacementState.STARTING
    )
    if started.update(
        state=PlacementState.RUNNING, pid=message.pid, started_at=_moment(message.at)
    ):
        _set_replicas(job, [batch.replica], ReplicaState.JOINING)
        doorbell.ring_after_commit(f"job/{job.pk}")


def _record_progress(job: Job, message: client.Progress) -> None:
    at = _moment(message.at)
    ProgressSample.objects.update_or_create(
        job=job,
        step=message.step,
        defaults={
            "steps": message.steps,
            "epoch": message.epoch,
            "at": at,
            "loss": message.loss,
            "grad_norm": message.grad_norm,
            "step_s": message.step_s,
            "max_gap_s": message.max_gap_s,
            "samples": message.samples,
            "replicas": message.replicas,
        },
    )
    if message.epoch < job.epoch or (job.step_at is not None and at <= job.step_at):
        return  # told late, or again
    job.step = message.step
    job.step_at = at
    job.epoch = message.epoch
    job.loss = message.loss
    job.samples_per_s = (
        message.samples / (message.steps * message.step_s) if message.step_s else None
    )
    if job.state == JobState.STARTING:
        job.state = JobState.RUNNING
        job.started_at = job.started_at or at
        doorbell.ring_after_commit(f"job/{job.pk}")
    _activate(job, message.replicas, at)


def _record_ledger(job: Job, message: client.Ledger) -> None:
    """Append to the ledger, which has no gaps; a resumed job takes back what it recomputes."""
    if message.step_from > job.ledger_step + 1:
        return  # our reply says where to go on from
    if message.step_from <= job.ledger_step:
        newest = LedgerRange.objects.filter(job=job, step_to__gte=message.step_from)
        if newest.filter(epoch__gte=message.epoch).exists():
            return  # told again
        _roll_back_ledger(job, message.step_from)
    LedgerRange.objects.create(
        job=job,
        step_from=message.step_from,
        step_to=message.step_to,
        epoch=message.epoch,
        samples=message.samples,
        lost=message.lost,
        duplicated=message.duplicated,
        dropped=message.dropped,
    )
    job.ledger_step = message.step_to


def _roll_back_ledger(job: Job, step: int) -> None:
    """Take back the ledger from `step` on: those steps are not in the present weights."""
    job.recomputed_steps += job.ledger_step - step + 1
    LedgerRange.objects.filter(job=job, step_from__gte=step).delete()
    for row in LedgerRange.objects.filter(job=job, step_to__gte=step):
        kept = step - row.step_from
        row.samples = row.samples * kept // (row.step_to - row.step_from + 1)
        row.step_to = step - 1
        row.lost = [entry for entry in row.lost if entry[0] < step]
        row.duplicated = [entry for entry in row.duplicated if entry[0] < step]
        row.dropped = [entry for entry in row.dropped if entry[0] < step]
        row.save()
    job.ledger_step = step - 1


def _record_peer_lost(job: Job, batch: client.Batch, message: client.PeerLost) -> None:
    record_signal(
        f"peer-lost:{job.pk}:{message.epoch}:{message.replica}",
        SignalKind.PEER_LOST,
        source=f"replica {batch.replica}",
        observed_at=_moment(message.at),
        job_id=job.pk,
        replica=message.replica,
        placement_id=message.placement,
        data={"how": message.how, "step": message.step, "epoch": message.epoch},
    )


def _record_regrouped(job: Job, message: client.Regrouped) -> None:
    committed_at = _moment(message.committed_at)
    Interruption.objects.get_or_create(
        job=job,
        epoch=message.epoch,
        defaults={
            "lost": message.lost,
            "joined": message.joined,
            "replicas": message.replicas,
            "taken_over": message.taken_over,
            "started_at": _moment(message.started_at),
            "committed_at": committed_at,
            "step": message.step,
            "gap_s": message.gap_s,
        },
    )
    job.epoch = max(job.epoch, message.epoch)
    _activate(job, message.joined, committed_at)
    doorbell.ring_after_commit(f"job/{job.pk}")


def _record_checkpoint(job: Job, message: client.CheckpointSaved) -> None:
    Checkpoint.objects.get_or_create(
        job=job,
        step=message.step,
        tier=message.tier,
        defaults={
            "path": message.path,
            "bytes": message.bytes,
            "digest": message.digest,
            "stall_s": message.stall_s,
            "seconds": message.seconds,
            "at": _moment(message.at),
        },
    )


def _record_trouble(job: Job, batch: client.Batch, message: client.Trouble) -> None:
    record_signal(
        f"trouble:{batch.placement or job.pk}:{message.kind[:60]}:{message.at}"[:64],
        SignalKind.JOB_TROUBLE,
        source=f"replica {batch.replica}",
        observed_at=_moment(message.at),
        job_id=job.pk,
        replica=batch.replica,
        placement_id=batch.placement,
        data={"kind": message.kind, "text": message.text},
    )


def _record_stopped(job: Job, batch: client.Batch, message: client.Stopped) -> None:
    if not message.clean:
        return  # its process is about to exit, and that is what an incident begins with
    if Placement.objects.filter(pk=batch.placement, replica__job=job).exists():
        end_placement(SYSTEM, batch.placement, f"left: {message.reason}", free_node=True)


# --- helpers --------------------------------------------------------------------------------------


def _activate(job: Job, replicas: list[int], at: datetime) -> None:
    """These replicas commit steps. Their placements joined now, unless they had before."""
    joined = Placement.objects.filter(
        replica__job=job,
        replica__index__in=replicas,
        state=PlacementState.RUNNING,
        joined_at=None,
        started_at__lte=at,
    )
    indices = list(joined.values_list("replica__index", flat=True))
    if indices:
        Placement.objects.filter(replica__job=job, replica__index__in=indices).filter(
            state=PlacementState.RUNNING, joined_at=None
        ).update(joined_at=at)
        _set_replicas(job, indices, ReplicaState.ACTIVE)
        doorbell.ring_after_commit(f"job/{job.pk}")


def _set_replicas(job: Job, indices: list[int], state: ReplicaState) -> None:
    Replica.objects.filter(job=job, index__in=indices).exclude(state=state).update(
        state=state, state_since=timezone.now()
    )


def _node_state(node_id: str) -> NodeState:
    return NodeState(Node.objects.values_list("state", flat=True).get(pk=node_id))


def _moment(unix_time: float) -> datetime:
    return datetime.fromtimestamp(unix_time, UTC)
