"""What the pages that belong to no single app show."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import redis
import structlog
from django.conf import settings
from django.contrib.auth.models import AnonymousUser

from controlplane.accounts.models import User
from controlplane.fleet.models import Cluster
from controlplane.fleet.selectors import FleetOfCluster, clusters_for, fleet_of
from controlplane.incidents import selectors as incidents
from controlplane.jobs.models import Job
from controlplane.jobs.selectors import active_jobs_for

#: The keeper writes the time of its last round here, in ISO 8601; it expires when it falls silent.
KEEPER_ALIVE_KEY = "drydock:keeper:alive"

log = structlog.get_logger(__name__)
_redis = redis.Redis.from_url(
    settings.REDIS_URL, socket_timeout=1, socket_connect_timeout=1, decode_responses=True
)


@dataclass(frozen=True)
class Automation:
    """Whether what acts is alive, in a word and a colour."""

    label: str
    colour: str
    seen_at: datetime | None = None


def automation() -> Automation:
    """The keeper's last sign of life."""
    try:
        told = _redis.get(KEEPER_ALIVE_KEY)
    except redis.RedisError as error:
        log.warning("automation.unknown", error=str(error))
        return Automation("Automation unknown", "quiet")
    if told is None:
        return Automation("Automation silent", "bad")
    return Automation("Automation on", "good", datetime.fromisoformat(str(told)))


@dataclass(frozen=True)
class ClusterCard:
    """One cluster on the overview."""

    fleet: FleetOfCluster
    jobs: list[Job]

    @property
    def cluster(self) -> Cluster:
        return self.fleet.cluster


def overview(user: User | AnonymousUser) -> dict[str, Any]:
    """Everything on the overview, in a number of queries that does not grow with the fleet."""
    clusters = list(clusters_for(user))
    fleet = fleet_of(clusters)
    jobs: dict[str, list[Job]] = {cluster.id: [] for cluster in clusters}
    for job in active_jobs_for(user):
        jobs[job.cluster_id].append(job)
    return {
        "needs": needs_for(user),
        "cards": [ClusterCard(fleet[cluster.id], jobs[cluster.id]) for cluster in clusters],
        "resolved": incidents.resolved_for(user, limit=8),
        "decisions": incidents.decisions_for(user, limit=8),
    }


@dataclass(frozen=True)
class Needs:
    """What is open: what waits for a person, and what automation has in hand."""

    incidents: list[tuple[Any, incidents.Ask]]
    runs: list[Any]  # waiting for a person, without an incident of their own

    @property
    def waiting(self) -> int:
        """How many things a person has to act on."""
        return len(self.runs) + sum(ask.kind in ("decide", "look") for _, ask in self.incidents)

    def __bool__(self) -> bool:
        return bool(self.incidents or self.runs)


def needs_for(user: User | AnonymousUser) -> Needs:
    unresolved = list(incidents.unresolved_for(user)[:50])
    shown = {incident.id for incident in unresolved}
    runs = incidents.runs_needing_operator_for(user)[:50]
    return Needs(
        [(one, incidents.ask_of(one, list(one.runs.all()))) for one in unresolved],
        [run for run in runs if run.incident_id not in shown],
    )
