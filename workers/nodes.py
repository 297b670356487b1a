"""Which nodes are free to take a rank."""

from __future__ import annotations

from controlplane.incidents.selectors import usable_nodes
from controlplane.jobs.choices import JOB_ACTIVE
from controlplane.jobs.models import Job
from workers.spares import Candidate


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
        )
        for node in usable_nodes(cluster_id, job_id).select_related("rack")
    ]
