"""Which nodes are free to take a rank, and what a replica needs of one."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, Min, QuerySet

from controlplane.fleet.models import Node
from controlplane.incidents.selectors import usable_nodes
from controlplane.jobs.choices import JOB_ACTIVE
from controlplane.jobs.models import Job
from workers.placement import Candidate, Wanted


def free_nodes(cluster_id: str, job_id: str | None = None) -> list[Candidate]:
    """The cluster's nodes that may take work now; with `job_id`, work of that job.

    A job may use the spares reserved for it, and no node that it is kept from.
    """
    coordinating = set(
        Job.objects.filter(cluster_id=cluster_id, state__in=JOB_ACTIVE).values_list(
            "coordinator_node_id", flat=True
        )
    )
    return [
        Candidate(
            node.pk,
            node.name,
            node.rack.name if node.rack else "",
            node.spare,
            coordinates=node.pk in coordinating,
            gpu_model=node.gpu_model or "",
            gpus=node.gpu_count,
        )
        for node in with_cards(usable_nodes(cluster_id, job_id)).select_related("rack")
    ]


def wanted_by(node: Node, gpus: int) -> Wanted:
    """What a replica that was on this node needs of the next one."""
    had = with_cards(Node.objects.filter(pk=node.pk)).select_related("rack").get()
    return Wanted(had.gpu_model or "", gpus, had.rack.name if had.rack else "")


def with_cards(nodes: QuerySet[Node]) -> QuerySet[Any]:
    """The nodes with the model of their cards and how many there are."""
    return nodes.annotate(gpu_model=Min("gpus__model"), gpu_count=Count("gpus", distinct=True))
