"""What people and schedulers ask of nodes: be a spare, keep one for me, stay away from my job."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from django.db.models import QuerySet
from django.utils import timezone

from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change, touch
from controlplane.fleet.models import Node
from controlplane.jobs import selectors
from controlplane.jobs.models import Job, NodeExclusion, SpareReservation

TIME_IS_UP = "its time is up"


@change()
def exclude_node(actor: Actor, job_id: str, node_id: str, reason: str) -> NodeExclusion:
    """Never place this job on this node from now on; what runs there goes on.

    Raises Conflict if the node is of another cluster or is excluded already.
    """
    job = Job.objects.get(pk=job_id)
    if not Node.objects.filter(pk=node_id, cluster_id=job.cluster_id).exists():
        raise Conflict(f"the cluster of {job.name} has no such node")
    exclusion, made = NodeExclusion.objects.get_or_create(
        job_id=job_id, node_id=node_id, defaults={"reason": reason}
    )
    if not made:
        raise Conflict(f"{job.name} is kept from this node already: {exclusion.reason}")
    audit(
        actor,
        "job.exclude_node",
        "job",
        job_id,
        cluster_id=job.cluster_id,
        after={"node": node_id},
        reason=reason,
    )
    touch(job.cluster_id)
    return exclusion


@change()
def include_node(actor: Actor, job_id: str, node_id: str, reason: str) -> None:
    """Let this job use this node again. Raises Conflict if it was not kept from it."""
    job = Job.objects.get(pk=job_id)
    if not NodeExclusion.objects.filter(job_id=job_id, node_id=node_id).delete()[0]:
        raise Conflict(f"{job.name} is not kept from this node")
    audit(
        actor,
        "job.include_node",
        "job",
        job_id,
        cluster_id=job.cluster_id,
        before={"node": node_id},
        reason=reason,
    )
    touch(job.cluster_id)


@change()
def make_spare(actor: Actor, node_id: str, reason: str) -> None:
    """Keep a node free for replicas that lose theirs.

    Raises Conflict if it is a spare already, or not free and in service.
    """
    node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
    if node.spare:
        raise Conflict(f"{node.name} is a spare already")
    if node.key_revoked_at is not None:
        raise Conflict(f"{node.name} is heard no more: its key was revoked")
    if not selectors.may_be_spare(node):
        state = node.get_state_display().lower()
        raise Conflict(f"{node.name} is {state}: a spare is made of a node that is available")
    fleet.set_spare(actor, node_id, True, reason=reason)


@change()
def unmake_spare(actor: Actor, node_id: str, reason: str) -> None:
    """Give a spare to the common pool. Raises Conflict if it is none, or reserved by somebody."""
    node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
    if not node.spare:
        raise Conflict(f"{node.name} is no spare")
    kept = selectors.present_reservations().filter(node=node).first()
    if kept is not None:
        raise Conflict(
            f"{node.name} is reserved for {kept.holder} until {kept.expires_at:%Y-%m-%d %H:%M} UTC;"
            " release that first"
        )
    fleet.set_spare(actor, node_id, False, reason=reason)


@change()
def reserve_spare(
    actor: Actor,
    cluster_id: str,
    *,
    holder: str,
    ttl_s: float,
    reason: str,
    job_id: str | None = None,
    gpu_model: str = "",
    rack_id: str | None = None,
    among: QuerySet[Node] | None = None,
) -> SpareReservation:
    """Keep one free spare for `holder` for `ttl_s` seconds, or until the job is placed on it.

    Of two who ask at once each gets another node. `among` narrows the nodes to what a later app
    knows to be usable. Raises Conflict if no spare is free that fits.
    """
    spares = selectors.placeable_nodes(cluster_id, job_id).filter(spare=True)
    if among is not None:
        spares = spares.filter(pk__in=among.values("pk"))
    if gpu_model:
        spares = spares.filter(pk__in=selectors.nodes_with(gpu_model))
    if rack_id is not None:
        spares = spares.filter(rack_id=rack_id)
    node = _lock_free_spare(spares)
    if node is None:
        raise Conflict("no spare that fits is free; ask for less, or wait for a repair to end")
    now = timezone.now()
    # A row whose time is up holds nothing, but the keeper may not have come by yet.
    due = SpareReservation.objects.filter(node=node, expires_at__lte=now)
    release(replace(SYSTEM, request_id=actor.request_id), due, TIME_IS_UP)
    reservation = SpareReservation.objects.create(
        cluster_id=cluster_id,
        node=node,
        job_id=job_id,
        holder=holder,
        reason=reason,
        expires_at=now + timedelta(seconds=ttl_s),
    )
    _audit(actor, "spare.reserve", reservation, reason)
    return reservation


def _lock_free_spare(spares: QuerySet[Node]) -> Node | None:
    """The first of these that nobody has reserved, locked.

    Another's choice is skipped, so that nobody waits only to find it taken; one that was reserved
    between our look and our lock shows at the second look, which sees what was committed since.
    """
    for _ in range(spares.count()):
        node = (
            spares.exclude(spare_reservations__in=selectors.present_reservations())
            .select_for_update(no_key=True, skip_locked=True, of=("self",))
            .order_by("name")
            .first()
        )
        if node is None or not selectors.present_reservations().filter(node=node).exists():
            return node
    return None


@change()
def release_spare(actor: Actor, reservation_id: str, reason: str) -> None:
    """Give a spare back before its time. Raises Conflict if it is not held any more."""
    reservation = SpareReservation.objects.select_for_update(no_key=True).get(pk=reservation_id)
    if reservation.released_at is not None:
        raise Conflict("this reservation is over already")
    _release(actor, reservation, timezone.now(), reason)


@change()
def expire_reservations(now: datetime) -> int:
    """Give back the spares whose time is up. Returns how many; the keeper calls it."""
    due = SpareReservation.objects.filter(released_at=None, expires_at__lte=now)
    expired = list(due.select_for_update(no_key=True, skip_locked=True))
    for reservation in expired:
        _release(SYSTEM, reservation, now, TIME_IS_UP)
    return len(expired)


def release(actor: Actor, reservations: QuerySet[SpareReservation], reason: str) -> None:
    """Give back what is held still of these."""
    now = timezone.now()
    for held in reservations.filter(released_at=None).select_for_update(no_key=True):
        _release(actor, held, now, reason)


def _release(actor: Actor, reservation: SpareReservation, at: datetime, reason: str) -> None:
    SpareReservation.objects.filter(pk=reservation.pk).update(released_at=at)
    _audit(actor, "spare.release", reservation, reason)


def _audit(actor: Actor, verb: str, reservation: SpareReservation, reason: str) -> None:
    audit(
        actor,
        verb,
        "spare_reservation",
        reservation.pk,
        cluster_id=reservation.cluster_id,
        after={
            "node": reservation.node_id,
            "holder": reservation.holder,
            "job": reservation.job_id,
            "expires_at": reservation.expires_at.isoformat(),
        },
        reason=reason,
    )
    touch(reservation.cluster_id)
