"""What is asked before every disruptive step: may automation take this node out now?

Budgets are reserved in the transaction that claims the step, under the cluster's row lock, so that
a limit cannot be exceeded by two workers at once.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db.models import Count, Q
from django.utils import timezone

from controlplane.fleet.choices import TAKEN_OUT, Rung
from controlplane.fleet.models import Cluster, Gpu, Node, RepairRecord
from controlplane.incidents.models import PlaybookRun, Reservation
from workers import repair


def refuse(run: PlaybookRun) -> str:
    """Why the run may not disrupt its node now; "" if it may, its share of the budget reserved.

    Must be called inside the transaction that claims the step.
    """
    if run.node_id is None:
        raise ValueError(f"{run.playbook} has a disruptive step but no node")
    Cluster.objects.select_for_update(no_key=True).get(pk=run.cluster_id)
    node = Node.objects.get(pk=run.node_id)
    if node.hold_reason:
        return f"{node.name} is on hold: {node.hold_reason}"
    held = Reservation.objects.filter(cluster_id=run.cluster_id, released_at=None)
    if held.filter(run=run, node=node).exists():
        return ""
    if held.filter(node=node).exists():
        return f"another run has {node.name} in hand"
    out = Node.objects.filter(
        Q(pk__in=held.values("node")) | Q(state__in=sorted(TAKEN_OUT)), cluster_id=run.cluster_id
    ).exclude(pk=node.pk)
    taken = out.count()
    if taken >= settings.BUDGET_NODES_PER_CLUSTER:
        return (
            f"{taken} nodes of this cluster are out for repair already "
            f"(limit {settings.BUDGET_NODES_PER_CLUSTER})"
        )
    Reservation.objects.create(cluster_id=run.cluster_id, node=node, run=run)
    return ""


def may_repair(node: Node, rung: Rung) -> repair.Attempt:
    """Whether the loop guard lets this rung be tried on the node's cards once more."""
    since = timezone.now() - timedelta(hours=24)
    counts = Gpu.objects.filter(node=node).annotate(
        attempts=Count("repairs", filter=Q(repairs__rung=rung, repairs__at__gte=since))
    )
    of_node = RepairRecord.objects.filter(node=node, gpu=None, rung=rung, at__gte=since).count()
    cards = list(counts.values_list("attempts", flat=True))
    return repair.may_attempt(
        rung,
        cards or [of_node],
        settings.REPAIR_ATTEMPTS_PER_DAY,
    )


def release(run: PlaybookRun) -> None:
    """Give back what the run had reserved."""
    Reservation.objects.filter(run=run, released_at=None).update(released_at=timezone.now())
