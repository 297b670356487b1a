"""Writes about clusters, and how nodes and their keys are let in and shut out."""

from __future__ import annotations

import secrets
from datetime import timedelta
from decimal import Decimal

from django.db.models import F
from django.utils import timezone

from controlplane import crypto
from controlplane.accounts.actions import audit
from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import Actor
from controlplane.errors import Conflict, Refused
from controlplane.fleet.actions.nodes import record_cards
from controlplane.fleet.changes import change, touch
from controlplane.fleet.choices import (
    NodeState,
)
from controlplane.fleet.models import (
    Cluster,
    JoinToken,
    Lease,
    Node,
    Rack,
)
from node_agent import wire


@change()
def create_cluster(
    actor: Actor, name: str, *, gpu_hour_price: Decimal = Decimal("2.00"), currency: str = "USD"
) -> Cluster:
    """Add an empty cluster. `gpu_hour_price` is money per GPU-hour in the cluster's currency.

    Raises Conflict if the name is taken.
    """
    cluster, made = Cluster.objects.get_or_create(
        name=name, defaults={"gpu_hour_price": gpu_hour_price, "currency": currency}
    )
    if not made:
        raise Conflict(f"there is a cluster {name!r} already; choose another name")
    audit(
        actor,
        "cluster.create",
        "cluster",
        cluster.pk,
        cluster_id=cluster.pk,
        after={"name": name, **_price(cluster)},
    )
    return cluster


@change()
def set_price(
    actor: Actor, cluster_id: str, *, gpu_hour_price: Decimal, currency: str, reason: str = ""
) -> None:
    """Price the cluster's GPU-hours anew. What incidents lost is kept in GPU-seconds, so what they
    cost is shown at the new price from now on, the past ones' too."""
    cluster = Cluster.objects.select_for_update(no_key=True).get(pk=cluster_id)
    before = _price(cluster)
    cluster.gpu_hour_price, cluster.currency = gpu_hour_price, currency
    if _price(cluster) == before:
        return
    cluster.save(update_fields=["gpu_hour_price", "currency"])
    audit(
        actor,
        "cluster.set_price",
        "cluster",
        cluster_id,
        cluster_id=cluster_id,
        before=before,
        after=_price(cluster),
        reason=reason,
    )
    touch(cluster_id)


@change()
def create_join_token(
    actor: Actor, cluster_id: str, *, max_uses: int = 1, ttl_s: float = 1800
) -> str:
    """Make a token that lets `max_uses` new nodes into a cluster within `ttl_s` seconds.

    The token is returned once and never stored.
    """
    token = "ddk_" + secrets.token_urlsafe(32)
    row = JoinToken.objects.create(
        cluster_id=cluster_id,
        hash=crypto.token_hash(token),
        max_uses=max_uses,
        expires_at=timezone.now() + timedelta(seconds=ttl_s),
    )
    audit(
        actor,
        "join_token.create",
        "join_token",
        row.pk,
        cluster_id=cluster_id,
        after={"max_uses": max_uses, "ttl_s": ttl_s},
    )
    touch(cluster_id)
    return token


@change()
def revoke_join_token(actor: Actor, token_id: str, reason: str) -> None:
    """Let nobody in by this token any more. Raises Conflict if it was revoked already."""
    row = JoinToken.objects.get(pk=token_id)
    now = timezone.now()
    if not JoinToken.objects.filter(pk=token_id, revoked_at=None).update(revoked_at=now):
        raise Conflict("this join token was revoked already")
    audit(
        actor,
        "join_token.revoke",
        "join_token",
        token_id,
        cluster_id=row.cluster_id,
        before={"uses": row.uses, "max_uses": row.max_uses},
        after={"revoked_at": now.isoformat()},
        reason=reason,
    )
    touch(row.cluster_id)


@change()
def enroll(message: wire.Enroll) -> Node:
    """Let a new node in by its join token; the same key again gets the same node.

    Such a one may have another rack or address by now, where a join token lets it say so.

    Raises Refused, naming the field, for a token that is unknown, revoked, expired or used up, and
    for a name or a key that belongs to another node.
    """
    there = Node.objects.select_related("rack").filter(public_key=message.public_key)
    known = there.filter(name=message.name).first()
    if known is not None and known.key_revoked_at is None:
        _record_place(known, message)
        return known
    token = _usable_token(message.join_token)
    if Node.objects.filter(public_key=message.public_key).exists():
        raise Refused(409, "key_taken", "public_key", "another node has this key; make a new one")
    if Node.objects.filter(cluster_id=token.cluster_id, name=message.name).exists():
        raise Refused(
            409,
            "name_taken",
            "name",
            f"cluster has a node {message.name!r} on record; choose another name",
        )
    now = timezone.now()
    node = Node.objects.create(
        cluster_id=token.cluster_id,
        rack=_rack(token.cluster_id, message.rack),
        name=message.name,
        address=message.address,
        state=NodeState.ENROLLED,
        state_since=now,
        public_key=message.public_key,
        boot_id=message.boot_id,
        booted_at=now,
        agent_version=message.agent_version,
    )
    Lease.objects.create(node=node, last_beat_at=now, deadline=now + timedelta(seconds=60))
    record_cards(node, message.inventory)
    audit(
        Actor(ActorKind.AGENT, node.pk),
        "node.enroll",
        "node",
        node.pk,
        cluster_id=node.cluster_id,
        after={"name": node.name, "state": node.state, "join_token": token.pk},
    )
    touch(node.cluster_id)
    return node


@change()
def revoke_node_key(actor: Actor, node_id: str, reason: str) -> None:
    """Hear this node no more. The machine comes back only under another key and another name, for
    this one stays on record. Raises Conflict if its key was revoked already."""
    node = Node.objects.get(pk=node_id)
    now = timezone.now()
    if not Node.objects.filter(pk=node_id, key_revoked_at=None).update(key_revoked_at=now):
        raise Conflict(f"the key of {node.name} was revoked already")
    audit(
        actor,
        "node.revoke_key",
        "node",
        node_id,
        cluster_id=node.cluster_id,
        after={"key_revoked_at": now.isoformat()},
        reason=reason,
    )
    touch(node.cluster_id)


def _record_place(node: Node, message: wire.Enroll) -> None:
    """Note where a node that is in already is by now; nothing where the answer to its enrolment was
    lost. Only under a join token: whoever knows its public key can ask in its name, and others go
    to its address."""
    before = {"rack": node.rack.name if node.rack else "", "address": node.address}
    after = {"rack": message.rack, "address": message.address}
    if after == before:
        return
    token = _usable_token(message.join_token)
    if token.cluster_id != node.cluster_id:
        raise Refused(
            403, "token_unknown", "join_token", "this join token is of another cluster; make one"
        )
    node.rack, node.address = _rack(node.cluster_id, message.rack), message.address
    node.save(update_fields=["rack", "address"])
    audit(
        Actor(ActorKind.AGENT, node.pk),
        "node.enroll_again",
        "node",
        node.pk,
        cluster_id=node.cluster_id,
        before=before,
        after={**after, "join_token": token.pk},
    )
    touch(node.cluster_id)


def _price(cluster: Cluster) -> dict[str, str]:
    return {"gpu_hour_price": f"{cluster.gpu_hour_price:.2f}", "currency": cluster.currency}


def _usable_token(token: str) -> JoinToken:
    """Count one use of a join token, or refuse it by name."""
    row = JoinToken.objects.filter(hash=crypto.token_hash(token)).first()
    if row is None:
        raise Refused(
            403, "token_unknown", "join_token", "no such join token; make one for this cluster"
        )
    if row.revoked_at is not None:
        raise Refused(
            403, "token_revoked", "join_token", "this join token was revoked; make another"
        )
    if row.expires_at < timezone.now():
        raise Refused(403, "token_expired", "join_token", "this join token expired; make another")
    # The condition is the lock: of two nodes with the last use, one gets it.
    if not JoinToken.objects.filter(pk=row.pk, uses__lt=F("max_uses")).update(uses=F("uses") + 1):
        raise Refused(403, "token_used", "join_token", "this join token is used up; make another")
    return row


def _rack(cluster_id: str, name: str) -> Rack | None:
    return Rack.objects.get_or_create(cluster_id=cluster_id, name=name)[0] if name else None
