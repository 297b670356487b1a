"""What the repairs page shows: spares, nodes under repair, the record of cards, RMA cases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from django.contrib.auth.models import AnonymousUser
from django.db.models import Count, OuterRef, Q, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce
from django.http import Http404
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.dashboard.selectors.fleet import nodes_for, present, ready_spare
from controlplane.fleet.choices import TAKEN_OUT, NodeState, Rung
from controlplane.fleet.models import Cluster, Gpu, Node, RepairRecord
from controlplane.fleet.selectors import clusters_for, repairs_for
from controlplane.incidents.choices import CaseState
from controlplane.incidents.models import RmaCase
from controlplane.jobs.models import SpareReservation
from controlplane.jobs.selectors import present_reservations

#: At most this many racks with spares, and cards with repairs, are listed.
LIMIT = 100


@dataclass(frozen=True)
class Pool:
    """The spares of one rack and GPU model; of a whole cluster where `rack` is empty."""

    cluster_id: str
    cluster: str
    rack_id: str
    rack: str
    model: str
    nodes: int
    spares: int
    free: int  # that could take work at this moment
    reserved: int


def pools_of(clusters: Iterable[Cluster]) -> list[Pool]:
    """Spares by cluster and GPU model, against the nodes that they cover."""
    return _pools(clusters, ("cluster", "cluster__name"))


def pools_by_rack(clusters: Iterable[Cluster]) -> list[Pool]:
    """The same by rack: only racks that hold a spare, the first `LIMIT` of them."""
    by = ("cluster", "cluster__name", "rack", "rack__name")
    return _pools(clusters, by, only_with_spares=True)


def _pools(
    clusters: Iterable[Cluster], by: tuple[str, ...], *, only_with_spares: bool = False
) -> list[Pool]:
    model = Gpu.objects.filter(node=OuterRef("pk")).order_by("index").values("model")[:1]
    kept = present_reservations().values("node")
    rows = (
        present(clusters)
        .annotate(gpu_model=Coalesce(Subquery(model), Value("")))
        .values(*by, "gpu_model")
        .annotate(
            nodes=Count("pk"),
            spares=Count("pk", filter=Q(spare=True)),
            free=Count("pk", filter=ready_spare()),
            reserved=Count("pk", filter=Q(spare=True, pk__in=kept)),
        )
        .order_by(*by[1::2], "gpu_model")
    )
    if only_with_spares:
        rows = rows.filter(spares__gt=0)
    return [
        Pool(
            row["cluster"],
            row["cluster__name"],
            row.get("rack") or "",
            row.get("rack__name") or "",
            row["gpu_model"] or "no GPU",
            row["nodes"],
            row["spares"],
            row["free"],
            row["reserved"],
        )
        for row in rows[:LIMIT]
    ]


def reservations_in(clusters: Iterable[Cluster]) -> list[SpareReservation]:
    """Spares that are kept for somebody, the next to expire first."""
    kept = SpareReservation.objects.filter(cluster__in=list(clusters), released_at=None)
    return list(kept.select_related("cluster", "node", "job").order_by("expires_at")[:LIMIT])


#: Under repair: taken out of service, at the vendor's, or being validated on its way back.
UNDER_REPAIR = sorted(TAKEN_OUT | {NodeState.RMA, NodeState.VALIDATING})


def under_repair(user: User | AnonymousUser) -> QuerySet[Node]:
    """Nodes that are out, each with the rung that was last tried on it."""
    newest = RepairRecord.objects.filter(node=OuterRef("pk"), at__gte=OuterRef("state_since"))
    earlier = RepairRecord.objects.filter(node=OuterRef("pk"))
    return (
        nodes_for(user)
        .filter(state__in=UNDER_REPAIR)
        .annotate(
            rung=Subquery(newest.order_by("-at").values("rung")[:1]),
            last_rung=Subquery(earlier.order_by("-at").values("rung")[:1]),
            last_repair_at=Subquery(earlier.order_by("-at").values("at")[:1]),
        )
    )


# --- The record of cards --------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What was done to one card, by rung: in the last 24 hours and in 30 days."""

    gpu: Gpu
    rungs: list[tuple[str, int, int]]
    day: int
    month: int


def records_in(clusters: Iterable[Cluster], *, limit: int = 50) -> list[Record]:
    """The cards that were repaired most often in 30 days: a card that comes again is a lemon."""
    now = timezone.now()
    visible = {cluster.pk for cluster in clusters}
    month = RepairRecord.objects.filter(
        gpu__isnull=False,
        node__cluster__in=visible,
        at__gte=now - timedelta(days=30),
    )
    often = list(month.values("gpu").annotate(times=Count("pk")).order_by("-times", "gpu")[:limit])
    ids = [row["gpu"] for row in often]
    gpus = Gpu.objects.select_related("node__cluster").in_bulk(ids)
    for gpu in gpus.values():
        if gpu.node is not None and gpu.node.cluster_id not in visible:
            gpu.node = None  # it has moved to where the caller sees nothing
    by_rung: dict[str, list[tuple[str, int, int]]] = {}
    rows = (
        month.filter(gpu__in=ids)
        .values("gpu", "rung")
        .annotate(day=Count("pk", filter=Q(at__gte=now - timedelta(hours=24))), month=Count("pk"))
    )
    for row in rows.order_by():
        told = (Rung(row["rung"]).label, row["day"], row["month"])
        by_rung.setdefault(row["gpu"], []).append(told)
    return [
        Record(
            gpus[uuid],
            sorted(by_rung[uuid]),
            sum(day for _, day, _ in by_rung[uuid]),
            sum(times for _, _, times in by_rung[uuid]),
        )
        for uuid in ids
    ]


def repairs_of(user: User | AnonymousUser) -> QuerySet[RepairRecord]:
    """Every single repair the caller may see, with its card and node."""
    return repairs_for(user).select_related("gpu", "node__cluster").defer("node__report")


# --- RMA cases ------------------------------------------------------------------------------------


#: What a list of cases does without.
CASE_BULK = ("bundle", "node__report", "incident__postmortem", "incident__impact")


def cases_for(user: User | AnonymousUser) -> QuerySet[RmaCase]:
    """RMA cases the caller may see."""
    return RmaCase.objects.filter(cluster__in=clusters_for(user)).select_related(
        "cluster", "gpu", "node", "incident"
    )


def case_for(user: User | AnonymousUser, case_id: str) -> RmaCase:
    """Raises Http404 if there is none, or none the caller may see."""
    case = cases_for(user).filter(pk=case_id).first()
    if case is None:
        raise Http404("no such case")
    return case


def cases_by(user: User | AnonymousUser, state: str) -> QuerySet[RmaCase]:
    """Cases by `state`: "open", "sent", "closed", or empty for all that are not closed."""
    cases = cases_for(user).defer(*CASE_BULK)
    if state == "all":
        return cases
    if state in CaseState.values:
        return cases.filter(state=state)
    return cases.exclude(state=CaseState.CLOSED)
