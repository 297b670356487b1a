"""The order to start a rank, as several playbooks give it."""

from __future__ import annotations

from typing import Literal

from django.conf import settings

from controlplane import crypto
from controlplane.jobs.models import Replica
from node_agent import wire

#: A node that is heard starts a rank within this many seconds, or is passed over.
START_ORDER_S = 20.0


def start_rank_command(
    replica: Replica,
    placement_id: str,
    standby: Literal["", "migrate", "spare"] = "",
    together: wire.Together | None = None,
) -> wire.StartRank:
    """The order to start the one rank of a replica, or one that is to take its place, or what it
    has on one of several nodes."""
    job = replica.job
    return wire.StartRank(
        job=job.pk,
        placement=placement_id,
        replica=replica.index,
        rank=0,
        world_replicas=job.world_replicas,
        coordinator=job.coordinator_address,
        token=crypto.job_token(job.pk),
        ingest_url=settings.INGEST_URL,
        program=job.program,
        options=job.options,
        standby=standby,
        together=together,
    )
