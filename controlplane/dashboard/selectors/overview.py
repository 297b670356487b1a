"""What the overview shows: what needs a person, the fleet by cluster, the pulse of automation."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import redis
import structlog
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.utils import timezone

from controlplane import redis_keys
from controlplane.accounts.choices import Role
from controlplane.accounts.models import User
from controlplane.dashboard.selectors.fleet import Tally, tallies_of
from controlplane.fleet.models import Cluster
from controlplane.fleet.selectors import Cell, clusters_for, fleet_of
from controlplane.incidents import limits, pricing
from controlplane.incidents import selectors as incidents
from controlplane.incidents.choices import ApprovalState, CaseState
from controlplane.incidents.models import Approval, Breaker, Incident, RmaCase
from controlplane.jobs.models import Job
from controlplane.jobs.selectors import unfinished_jobs_for
from controlplane.paging import Top

#: A worker takes what is due at once: what has waited for so long says that none does.
BEHIND_AFTER = timedelta(seconds=30)
#: A larger cluster is drawn as a map instead of one tile for each node.
TILES_UP_TO = 96
#: So many of each kind that needs a person are shown; those beyond are counted.
SHOWN = 50
#: What interruptions cost is told over this time.
COST_OVER = timedelta(days=30)

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
    """The keeper's last sign of life, and whether the workers keep up with what is due."""
    try:
        told = _redis.get(redis_keys.KEEPER_ALIVE)
    except redis.RedisError as error:
        log.warning("automation.unknown", error=str(error))
        return Automation("Automation unknown", "quiet")
    if told is None:
        return Automation("Automation silent", "bad")
    heard_at = datetime.fromisoformat(str(told))
    if incidents.waits_for_a_worker(since=timezone.now() - BEHIND_AFTER):
        return Automation("Automation behind", "bad", heard_at)
    return Automation("Automation on", "good", heard_at)


@dataclass(frozen=True)
class ClusterCard:
    """One cluster on the overview; `cells` is empty where it is drawn as a map."""

    cluster: Cluster
    tally: Tally
    cells: list[Cell]
    jobs: list[Job]


def overview(user: User | AnonymousUser) -> dict[str, Any]:
    """Everything on the overview, in a number of queries that does not grow with the fleet."""
    clusters = list(clusters_for(user))
    impacts = pricing.impact_by_code(clusters, timezone.now() - COST_OVER)
    return {
        "needs": needs_for(user, clusters),
        "cards": cards_of(clusters, list(unfinished_jobs_for(user))),
        "resolved": incidents.resolved_for(user, limit=8),
        "decisions": incidents.decisions_for(user, limit=8),
        "cost": Cost.of(impacts),
        "operates": set(clusters_for(user, Role.OPERATOR).values_list("pk", flat=True)),
    }


def cards_of(clusters: list[Cluster], active_jobs: list[Job]) -> list[ClusterCard]:
    """A card for each cluster; those of up to TILES_UP_TO nodes show a tile for each node."""
    tallies = tallies_of(clusters)
    small = [one for one in clusters if tallies[one.id].nodes <= TILES_UP_TO]
    tiles = fleet_of(small)
    jobs: dict[str, list[Job]] = {cluster.id: [] for cluster in clusters}
    for job in active_jobs:
        jobs[job.cluster_id].append(job)
    return [
        ClusterCard(
            cluster,
            tallies[cluster.id],
            tiles[cluster.id].cells if cluster.id in tiles else [],
            jobs[cluster.id],
        )
        for cluster in clusters
    ]


@dataclass(frozen=True)
class Cost:
    """What incidents have cost, in GPU-hours and in each currency."""

    gpu_hours: float
    money: list[tuple[str, float]]

    @classmethod
    def of(cls, impacts: list[pricing.CodeImpact]) -> Cost:
        money: dict[str, float] = {}
        for impact in impacts:
            money[impact.currency] = money.get(impact.currency, 0.0) + impact.money
        return cls(sum(impact.gpu_seconds for impact in impacts) / 3600, sorted(money.items()))


@dataclass(frozen=True)
class LeftOut:
    """A kind of which there is more than is shown, and the page that shows all of it, if any."""

    label: str
    shown: int
    total: int
    page: str = ""
    query: str = ""


@dataclass(frozen=True)
class Needs:
    """What is open: what waits for a person, and what automation has in hand."""

    approvals: list[Approval]
    breakers: list[Breaker]
    cases: list[RmaCase]  # evidence collected, not yet with the vendor
    incidents: list[tuple[Any, incidents.RequiredAction]]
    runs: list[Any]  # waiting for a person, without an open incident of their own
    waiting: int  # how many things a person has to act on, shown or not
    left_out: list[LeftOut]

    def __bool__(self) -> bool:
        return bool(self.waiting or self.incidents)


def needs_for(user: User | AnonymousUser, clusters: list[Cluster]) -> Needs:
    """What waits for this user, and how much of it the overview leaves out."""
    waiting = Approval.objects.filter(cluster__in=clusters, state=ApprovalState.WAITING)
    to_send = RmaCase.objects.filter(cluster__in=clusters, state=CaseState.OPEN)
    # A plan to approve stands among the approvals already, with its incident.
    unresolved = incidents.unresolved_for(user).exclude(signs=True, waits=False)  # type: ignore[misc]
    approvals = Top.of(waiting.select_related("cluster", "run__incident", "run__node"), SHOWN)
    breakers = Top.of(limits.open_breakers(c.id for c in clusters).select_related("cluster"), SHOWN)
    cases = Top.of(to_send.select_related("cluster", "gpu", "node"), SHOWN)
    runs = Top.of(incidents.runs_needing_operator_for(user), SHOWN)
    found = Top.of(unresolved, SHOWN)
    asking = sum(one.waits for one in found.rows)  # type: ignore[attr-defined]
    if asking == len(found.rows) < found.total:
        asking = unresolved.filter(waits=True).count()  # type: ignore[misc]
    everywhere = (
        _left_out(approvals, "plans to approve", "incidents", "?state=unresolved"),
        _left_out(breakers, "open breakers", "automation-page"),
        _left_out(runs, "stopped playbooks"),
        _left_out(found, "open incidents", "incidents", "?state=unresolved"),
        _left_out(cases, "cards to send", "repairs"),
    )
    return Needs(
        approvals.rows,
        breakers.rows,
        cases.rows,
        [(one, _ask_beside_approvals(one)) for one in found.rows],
        runs.rows,
        approvals.total + breakers.total + cases.total + runs.total + asking,
        [one for one in everywhere if one.shown < one.total],
    )


def _ask_beside_approvals(incident: Incident) -> incidents.RequiredAction:
    runs = [run for run in incident.runs.all() if incidents.waiting_approval(run) is None]
    return incidents.ask_of(incident, runs)


def _left_out(top: Top[Any], label: str, page: str = "", query: str = "") -> LeftOut:
    return LeftOut(label, len(top.rows), top.total, page, query)
