"""Which nodes are free to take a rank."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.utils import timezone

from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from controlplane.incidents.choices import RUN_UNFINISHED
from controlplane.incidents.models import PlaybookRun
from controlplane.jobs.choices import JOB_ACTIVE
from controlplane.jobs.models import Job
from workers.spares import Candidate


def free_nodes(cluster_id: str) -> list[Candidate]:
    """The cluster's nodes that may take work now: available, heard, trusted, not on hold.

    One that a repair run is about to take out is none of them.
    """
    heard_since = timezone.now() - timedelta(seconds=settings.LEASE_S)
    nodes = (
        Node.objects.select_related("rack")
        .filter(
            cluster_id=cluster_id,
            state=NodeState.AVAILABLE,
            lease__reachable=True,
            lease__last_beat_at__gte=heard_since,
            key_revoked_at=None,
            hold_reason="",
        )
        .exclude(
            runs__in=PlaybookRun.objects.filter(
                playbook="repair-node", state__in=sorted(RUN_UNFINISHED)
            )
        )
    )
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
        for node in nodes
    ]
