"""The only writers of clusters, nodes, cards, leases and commands."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import msgspec
from django.db.models import F
from django.utils import timezone

from controlplane import crypto, doorbell
from controlplane.accounts.actions import audit
from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import Actor
from controlplane.errors import Conflict, Refused
from controlplane.fleet.changes import change, touch
from controlplane.fleet.choices import (
    COMMAND_FINISHED,
    EDGES,
    FAILED_TWIN,
    TRANSIENT,
    CommandState,
    NodeState,
    Rung,
)
from controlplane.fleet.models import (
    Cluster,
    Command,
    Gpu,
    JoinToken,
    Lease,
    Node,
    Rack,
    RepairRecord,
)
from controlplane.ids import new_id
from node_agent import wire

#: An order taken in its last second may still be running; its result is awaited this much longer.
RESULT_GRACE_S = 30

# --- clusters and enrolment -----------------------------------------------------------------------


@change()
def create_cluster(actor: Actor, name: str, *, gpu_hour_price: float = 2.0) -> Cluster:
    """Add an empty cluster. `gpu_hour_price` is money per GPU-hour in the cluster's currency."""
    cluster = Cluster.objects.create(name=name, gpu_hour_price=gpu_hour_price)
    audit(
        actor, "cluster.create", "cluster", cluster.pk, cluster_id=cluster.pk, after={"name": name}
    )
    return cluster


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
    return token


@change()
def revoke_join_token(actor: Actor, token: str) -> None:
    """Let nobody in by this token any more. Raises Conflict if there is no such token."""
    row = JoinToken.objects.filter(hash=crypto.token_hash(token)).first()
    if row is None:
        raise Conflict("there is no such join token")
    JoinToken.objects.filter(pk=row.pk, revoked_at=None).update(revoked_at=timezone.now())
    audit(actor, "join_token.revoke", "join_token", row.pk, cluster_id=row.cluster_id)


@change()
def enroll(message: wire.Enroll) -> Node:
    """Let a new node in by its join token; the same key again gets the same node.

    Raises Refused, naming the field, for a token that is unknown, revoked, expired or used up, and
    for a name or a key that belongs to another node.
    """
    known = Node.objects.filter(public_key=message.public_key, name=message.name).first()
    if known is not None and known.key_revoked_at is None:
        return known  # the answer to the first enrolment was lost
    token = _usable_token(message.join_token)
    if Node.objects.filter(public_key=message.public_key).exists():
        raise Refused(409, "key_taken", "public_key", "another node has this key; make a new one")
    if Node.objects.filter(cluster_id=token.cluster_id, name=message.name).exists():
        raise Refused(
            409,
            "name_taken",
            "name",
            f"cluster has a node {message.name!r} already; retire it or choose another name",
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
    _record_cards(node, message.inventory)
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
    """Hear this node no more; it must be enrolled anew under another key."""
    node = Node.objects.get(pk=node_id)
    Node.objects.filter(pk=node_id, key_revoked_at=None).update(key_revoked_at=timezone.now())
    audit(actor, "node.revoke_key", "node", node_id, cluster_id=node.cluster_id, reason=reason)
    touch(node.cluster_id)


@change()
def set_bmc(actor: Actor, node_id: str, url: str, username: str, password: str) -> None:
    """Tell where the node's management controller answers; the password is stored encrypted."""
    node = Node.objects.get(pk=node_id)
    Node.objects.filter(pk=node_id).update(
        bmc_url=url, bmc_username=username, bmc_password_sealed=crypto.seal(password)
    )
    audit(
        actor,
        "node.set_bmc",
        "node",
        node_id,
        cluster_id=node.cluster_id,
        before={"url": node.bmc_url},
        after={"url": url, "username": username},
    )


@change()
def set_spare(actor: Actor, node_id: str, spare: bool) -> None:
    """Keep this node free for replicas that lose theirs, or give it to the common pool."""
    node = Node.objects.get(pk=node_id)
    if node.spare == spare:
        return
    Node.objects.filter(pk=node_id).update(spare=spare)
    audit(
        actor,
        "node.set_spare",
        "node",
        node_id,
        cluster_id=node.cluster_id,
        before={"spare": node.spare},
        after={"spare": spare},
    )
    touch(node.cluster_id)


@change()
def set_hold(actor: Actor, node_id: str, reason: str) -> None:
    """Keep automation's hands off a node, for this reason; "" lifts the hold."""
    node = Node.objects.get(pk=node_id)
    if node.hold_reason == reason:
        return
    Node.objects.filter(pk=node_id).update(hold_reason=reason)
    audit(
        actor,
        "node.hold",
        "node",
        node_id,
        cluster_id=node.cluster_id,
        before={"hold_reason": node.hold_reason},
        after={"hold_reason": reason},
    )
    touch(node.cluster_id)


# --- the node's life ------------------------------------------------------------------------------


@change()
def transition(
    actor: Actor,
    node_id: str,
    to: NodeState,
    *,
    reason: str,
    deadline_s: float | None = None,
    frm: Iterable[NodeState] | None = None,
) -> Node:
    """Move a node along one edge of the table; the only way in which its state changes.

    `frm` narrows the states it may come from. A transient state takes `deadline_s`, after which it
    falls into its failed twin. Raises Conflict if the node is not in a state that leads there.
    """
    if (to in TRANSIENT) != (deadline_s is not None):
        raise ValueError(f"{to}: deadline_s is for transient states, and each of those needs one")
    node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
    before = NodeState(node.state)
    if to not in EDGES[before] or (frm is not None and before not in frozenset(frm)):
        raise Conflict(
            f"{node.name} is {before.label.lower()}; it cannot become {to.label.lower()}"
        )
    now = timezone.now()
    node.state = to
    node.state_since = now
    node.state_reason = reason
    node.state_deadline = None if deadline_s is None else now + timedelta(seconds=deadline_s)
    node.save(update_fields=["state", "state_since", "state_reason", "state_deadline"])
    audit(
        actor,
        "node.transition",
        "node",
        node_id,
        cluster_id=node.cluster_id,
        before={"state": before},
        after={"state": to},
        reason=reason,
    )
    touch(node.cluster_id)
    return node


def fail_overdue_nodes(actor: Actor, now: datetime) -> list[str]:
    """Move each node whose transient state outlived its deadline into the failed twin."""
    due = Node.objects.filter(state_deadline__lt=now).values_list("pk", "state")
    failed = []
    for node_id, state in due:
        try:
            transition(
                actor,
                node_id,
                FAILED_TWIN[NodeState(state)],
                frm=[NodeState(state)],
                reason=f"{NodeState(state).label} did not finish before its deadline",
            )
        except Conflict:
            continue  # it finished in this very moment
        doorbell.ring(f"node/{node_id}")
        failed.append(node_id)
    return failed


@change()
def record_boot(node_id: str, boot_id: str, at: datetime) -> None:
    """Note that the node runs under a new boot id: whatever ran before is gone."""
    node = Node.objects.get(pk=node_id)
    changed = Node.objects.filter(pk=node_id).exclude(boot_id=boot_id)
    if changed.update(boot_id=boot_id, booted_at=at):
        audit(
            Actor(ActorKind.AGENT, node_id),
            "node.boot",
            "node",
            node_id,
            cluster_id=node.cluster_id,
            before={"boot_id": node.boot_id},
            after={"boot_id": boot_id},
        )
        touch(node.cluster_id)
        doorbell.ring_after_commit(f"node/{node_id}")


@change()
def record_report(node_id: str, report: wire.Report) -> None:
    """Store a node's full inventory; its cards are those named here, whatever was there before."""
    node = Node.objects.get(pk=node_id)
    Node.objects.filter(pk=node_id).update(
        report=msgspec.to_builtins(report),
        report_digest=report.digest,
        agent_version=report.agent_version,
    )
    _record_cards(node, report.inventory)
    touch(node.cluster_id)


@change()
def record_repair(node_id: str, rung: Rung, step_id: str) -> None:
    """Write one attempt at a rung of the ladder into the record of each card of the node."""
    now = timezone.now()
    # One row for the node itself too: one whose cards are all gone must not be repaired for ever.
    cards = [None, *Gpu.objects.filter(node_id=node_id)]
    RepairRecord.objects.bulk_create(
        [
            RepairRecord(gpu=gpu, node_id=node_id, rung=rung, step_id=step_id, at=now)
            for gpu in cards
        ],
        ignore_conflicts=True,
    )


@change()
def record_power_order(actor: Actor, node_id: str, order: str, reason: str) -> None:
    """Write down that a node's power is about to be switched, before it is."""
    node = Node.objects.get(pk=node_id)
    audit(
        actor,
        "node.power",
        "node",
        node_id,
        cluster_id=node.cluster_id,
        after={"order": order},
        reason=reason,
    )


# --- leases ---------------------------------------------------------------------------------------


@change()
def extend_leases(seconds: float) -> None:
    """Believe every node alive for some time: we, not they, were away (a start of the product)."""
    now = timezone.now()
    Lease.objects.update(
        deadline=now + timedelta(seconds=seconds), reachable=True, unreachable_since=None
    )


@change()
def renew_leases(beats: dict[str, datetime], lease_s: float) -> list[str]:
    """Extend the leases of the nodes that were heard, and return those that had been lost.

    `beats` holds, by node id, when ingest received the newest beat.
    """
    back = list(
        Node.objects.filter(pk__in=beats, lease__reachable=False).values_list("pk", "cluster_id")
    )
    rows = [
        Lease(node_id=node_id, last_beat_at=at, deadline=at + timedelta(seconds=lease_s))
        for node_id, at in beats.items()
    ]
    for row in rows:
        row.reachable = True
    Lease.objects.bulk_update(
        rows, ["last_beat_at", "deadline", "reachable", "unreachable_since"], batch_size=1000
    )
    for node_id, cluster_id in back:
        touch(cluster_id)
        doorbell.ring_after_commit(f"node/{node_id}")
    return [node_id for node_id, _ in back]


@change()
def lose_leases(now: datetime) -> list[Node]:
    """Mark as unreachable each node whose lease ran out, and return them."""
    overdue = list(
        Node.objects.filter(lease__reachable=True, lease__deadline__lt=now)
        .exclude(state=NodeState.RETIRED)
        .select_related("lease")
    )
    lost = [
        node
        for node in overdue
        if Lease.objects.filter(pk=node.pk, reachable=True, deadline__lt=now).update(
            reachable=False, unreachable_since=now
        )
    ]
    for node in lost:
        touch(node.cluster_id)
        doorbell.ring_after_commit(f"node/{node.pk}")
    return lost


# --- commands -------------------------------------------------------------------------------------


@change()
def queue_command(
    actor: Actor, node_id: str, action: wire.Verb, *, requester: str, ttl_s: float = 60
) -> Command:
    """Sign an order and keep it for the node's next poll.

    One command per requester and verb: asking again returns the one there is, so a step that is
    tried again cannot send a second. The order expires `ttl_s` seconds from now.
    """
    verb = msgspec.to_builtins(action)["verb"]
    there = Command.objects.filter(requester=requester, verb=verb).first()
    if there is not None:
        return there
    now = timezone.now()
    expires_at = now + timedelta(seconds=ttl_s)
    command = wire.Command(
        id=new_id("cmd"),
        node_id=node_id,
        issued_at=now.timestamp(),
        expires_at=expires_at.timestamp(),
        action=action,
    )
    payload = msgspec.json.encode(command).decode()
    row = Command.objects.create(
        id=command.id,
        node_id=node_id,
        verb=verb,
        payload=payload,
        signature=crypto.sign_command(payload),
        requester=requester,
        expires_at=expires_at,
    )
    audit(
        actor,
        f"command.{verb}",
        "node",
        node_id,
        cluster_id=Node.objects.values_list("cluster_id", flat=True).get(pk=node_id),
        after={"command": row.pk, "requester": requester},
    )
    doorbell.announce_command_after_commit(node_id)
    return row


@change()
def take_commands(node_ids: list[str]) -> dict[str, list[Command]]:
    """The orders that these nodes have not finished, oldest first; marks them as delivered.

    A delivered order is handed out again until its result is known: the agent's journal, not this
    row, is what keeps it from being executed twice.
    """
    now = timezone.now()
    rows = list(
        Command.objects.filter(
            node_id__in=node_ids,
            state__in=[CommandState.QUEUED, CommandState.DELIVERED],
            expires_at__gt=now,
        ).order_by("created_at")
    )
    Command.objects.filter(pk__in=[row.pk for row in rows], state=CommandState.QUEUED).update(
        state=CommandState.DELIVERED, delivered_at=now
    )
    taken: dict[str, list[Command]] = {}
    for row in rows:
        taken.setdefault(row.node_id, []).append(row)
    return taken


@change()
def record_command_result(node_id: str, result: wire.CommandResult) -> None:
    """Store what an agent says of a command; the same result again changes nothing.

    Raises Refused for a command that does not exist or was given to another node.
    """
    row = Command.objects.select_related("node").filter(pk=result.id).first()
    if row is None:
        raise Refused(404, "unknown_command", "id", f"there is no command {result.id}")
    if row.node_id != node_id:
        raise Refused(403, "command_of_other_node", "id", "this command was given to another node")
    finished = Command.objects.filter(pk=row.pk).exclude(state__in=COMMAND_FINISHED)
    if finished.update(
        state=CommandState(result.state),
        finished_at=_moment(result.at),
        output=result.output,
        error=result.error,
    ):
        touch(row.node.cluster_id)
        doorbell.ring_after_commit(f"step/{row.requester}")


@change()
def call_back_commands(requester: str) -> int:
    """Expire the orders of this asker that no node has finished. Returns how many.

    One that a node has taken already may still be executed.
    """
    unfinished = Command.objects.filter(requester__startswith=f"{requester}.").exclude(
        state__in=COMMAND_FINISHED
    )
    return unfinished.update(
        state=CommandState.EXPIRED, finished_at=timezone.now(), error="called back"
    )


@change()
def expire_commands(now: datetime) -> int:
    """Give up on orders that no agent answered in time. Returns how many."""
    overdue = Command.objects.exclude(state__in=COMMAND_FINISHED).filter(
        expires_at__lt=now - timedelta(seconds=RESULT_GRACE_S)
    )
    count = 0
    for row in overdue:
        count += Command.objects.filter(pk=row.pk, state=row.state).update(
            state=CommandState.EXPIRED, finished_at=now, error="the agent did not answer in time"
        )
        doorbell.ring_after_commit(f"step/{row.requester}")
    return count


# --- helpers --------------------------------------------------------------------------------------


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


def _record_cards(node: Node, inventory: wire.Inventory) -> None:
    """Let the node hold exactly these cards. A card that left keeps its record, without a node."""
    Gpu.objects.filter(node=node).exclude(uuid__in=[g.uuid for g in inventory.gpus]).update(
        node=None, index=None
    )
    for card in inventory.gpus:
        # Two cards may have changed places: free the slot before it is taken.
        Gpu.objects.filter(node=node, index=card.index).exclude(uuid=card.uuid).update(index=None)
        Gpu.objects.update_or_create(
            uuid=card.uuid,
            defaults={
                "serial": card.serial,
                "model": card.model,
                "memory_bytes": card.memory_bytes,
                "node": node,
                "index": card.index,
                "pci_address": card.pci_address,
            },
        )


def _moment(unix_time: float) -> datetime:
    return datetime.fromtimestamp(unix_time, UTC)
