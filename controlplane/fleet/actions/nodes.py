"""Writes about a node: its state, what people say of it, and what it reports of itself."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec
from django.utils import timezone

from controlplane import crypto, doorbell
from controlplane.accounts.actions import audit
from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.accounts.selectors import username
from controlplane.errors import Conflict
from controlplane.fleet.changes import change, touch
from controlplane.fleet.choices import (
    EDGES,
    FAILED_TWIN,
    TRANSIENT,
    NodeState,
    Rung,
)
from controlplane.fleet.models import (
    Gpu,
    Node,
    RepairRecord,
)
from node_agent import wire

#: How a drain of ours begins; an incident's id follows.
OUR_DRAIN = "drydock/"


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
    if to == NodeState.AVAILABLE and node.admitted_at is None:
        node.admitted_at = now
    node.save(
        update_fields=["state", "state_since", "state_reason", "state_deadline", "admitted_at"]
    )
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
        switch=report.switch,
    )
    record_cards(node, report.inventory)
    touch(node.cluster_id, ("node", node_id))


@change()
def record_repair(
    node_id: str, rung: Rung, step_id: str, *, gpu_uuid: str = "", turn: int = 0
) -> None:
    """Write one attempt at a rung of the ladder into the record of the card that it was for.

    Where no card is to blame it stands in the record of each card of the node, and in the node's
    own in any case: one whose cards are all gone must not be repaired for ever. `turn` counts how
    often the step came back to it.
    """
    now = timezone.now()
    cards = Gpu.objects.filter(pk=gpu_uuid) if gpu_uuid else Gpu.objects.filter(node_id=node_id)
    key = f"{step_id}.{turn}" if turn else step_id
    RepairRecord.objects.bulk_create(
        [
            RepairRecord(gpu=gpu, node_id=node_id, rung=rung, step_id=key, at=now)
            for gpu in [None, *cards]
        ],
        ignore_conflicts=True,
    )
    audit(
        SYSTEM,
        "node.repair",
        "node",
        node_id,
        cluster_id=Node.objects.values_list("cluster_id", flat=True).get(pk=node_id),
        after={"rung": rung, "gpu": gpu_uuid or None, "step": step_id},
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
def set_spare(actor: Actor, node_id: str, spare: bool, *, reason: str = "") -> None:
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
        reason=reason,
    )
    touch(node.cluster_id)


@change()
def set_drained_by(actor: Actor, node_id: str, owner: str, reason: str) -> None:
    """Note who drained the node: "drydock/<incident>" for automation, else a person or scheduler.

    "" gives it back. A drain that is not ours is never lifted by us: raises Conflict if automation
    tries to.
    """
    node = Node.objects.get(pk=node_id)
    foreign = node.drained_by and not node.drained_by.startswith(OUR_DRAIN)
    if actor.kind == ActorKind.SYSTEM and foreign:
        owner = username(node.drained_by)
        raise Conflict(f"{node.name} was drained by {owner}; only they give it back")
    if node.drained_by == owner:
        return
    Node.objects.filter(pk=node_id).update(drained_by=owner)
    audit(
        actor,
        "node.drain" if owner else "node.undrain",
        "node",
        node_id,
        cluster_id=node.cluster_id,
        before={"drained_by": node.drained_by},
        after={"drained_by": owner},
        reason=reason,
    )
    touch(node.cluster_id)


@change()
def set_reset_pending(actor: Actor, node_id: str, reason: str) -> None:
    """Note that the node's cards want a reset once it is idle, and why; "" when it is done."""
    node = Node.objects.get(pk=node_id)
    if node.reset_pending == reason:
        return
    Node.objects.filter(pk=node_id).update(reset_pending=reason)
    audit(
        actor,
        "node.reset_pending",
        "node",
        node_id,
        cluster_id=node.cluster_id,
        before={"reset_pending": node.reset_pending},
        after={"reset_pending": reason},
        reason=reason,
    )
    touch(node.cluster_id)


@change()
def set_hold(actor: Actor, node_id: str, reason: str, *, lifted_because: str = "lifted") -> None:
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
        reason=reason or lifted_because,
    )
    touch(node.cluster_id)
    doorbell.ring_after_commit(f"node/{node_id}")


def record_cards(node: Node, inventory: wire.Inventory) -> None:
    """Let the node hold exactly these cards. A card that left keeps its record, without a node."""
    _audit_cards(node, [card.uuid for card in inventory.gpus])
    Gpu.objects.filter(node=node).exclude(uuid__in=[g.uuid for g in inventory.gpus]).update(
        node=None, index=None
    )
    for card in inventory.gpus:
        # Two cards may have changed places: free the slot before it is taken.
        Gpu.objects.filter(node=node, index=card.index).exclude(uuid=card.uuid).update(index=None)
        told = {
            "serial": card.serial,
            "model": card.model,
            "memory_bytes": card.memory_bytes,
            "pci_address": card.pci_address,
        }
        # A sick card may tell nothing more than its UUID: what it told before still holds.
        known = {name: value for name, value in told.items() if value and value != card.uuid}
        place = {"node": node, "index": card.index}
        Gpu.objects.update_or_create(
            uuid=card.uuid, defaults={**known, **place}, create_defaults={**told, **place}
        )


def _audit_cards(node: Node, uuids: list[str]) -> None:
    """Write down which cards came and went, and which node those that came had sat in."""
    held = list(Gpu.objects.filter(node=node).order_by("index").values_list("uuid", flat=True))
    if set(held) == set(uuids):
        return
    moved = Gpu.objects.filter(uuid__in=uuids, node__isnull=False).exclude(node=node)
    audit(
        Actor(ActorKind.AGENT, node.pk),
        "node.cards",
        "node",
        node.pk,
        cluster_id=node.cluster_id,
        before={"cards": held},
        after={"cards": uuids, "from": dict(moved.values_list("uuid", "node_id"))},
        reason="the node's own report",
    )
