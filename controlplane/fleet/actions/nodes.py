"""Writes about a node: its state, what people say of it, and what it reports of itself."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec
from django.utils import timezone

from controlplane import crypto, doorbell
from controlplane.accounts.actions import audit
from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import Actor
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
    record_cards(node, report.inventory)
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


def record_cards(node: Node, inventory: wire.Inventory) -> None:
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
