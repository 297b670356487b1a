"""Pages of clusters: all of them, one as a map and a table, and the map's data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.views.decorators.gzip import gzip_page

from controlplane.accounts.access import Access, needs
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import fleet as selectors
from controlplane.dashboard.selectors import overview
from controlplane.export import Column, as_file, is_wanted
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster
from controlplane.fleet.selectors import clusters_for
from controlplane.incidents import limits
from controlplane.jobs.selectors import unfinished_jobs_for
from controlplane.live import live_page
from controlplane.paging import page_of, pages_of, sort_words

PAGE_SIZE = 100
#: What the colours of the map say.
LEGEND = (
    ("good", "at work"),
    ("idle", "available"),
    ("busy", "under way"),
    ("warn", "taken out or watched"),
    ("bad", "broken or not heard"),
    ("fault", "faulty card"),
    ("quiet", "not in service"),
)

Counted = tuple[Cluster, selectors.Tally]


def _in_state(state: NodeState) -> Callable[[Counted], int]:
    return lambda row: dict(row[1].states).get(state, 0)


CLUSTER_COLUMNS: tuple[Column[Counted], ...] = (
    Column("id", lambda row: row[0].pk),
    Column("name", lambda row: row[0].name),
    Column("gpu_hour_price", lambda row: row[0].gpu_hour_price),
    Column("currency", lambda row: row[0].currency),
    Column("nodes", lambda row: row[1].nodes),
    Column("gpus", lambda row: row[1].gpus),
    Column("spares_ready", lambda row: row[1].spares),
    Column("unreachable", lambda row: row[1].unreachable),
    Column("held", lambda row: row[1].held),
    *(Column(f"nodes_{state}", _in_state(state)) for state in NodeState),
)
NODE_COLUMNS: tuple[Column[selectors.Row], ...] = (
    Column("id", lambda row: row.node.pk),
    Column("name", lambda row: row.node.name),
    Column("cluster_id", lambda row: row.node.cluster_id),
    Column("cluster_name", lambda row: row.node.cluster.name),
    Column("rack_name", lambda row: row.node.rack.name if row.node.rack else None),
    Column("address", lambda row: row.node.address),
    Column("state", lambda row: row.node.state),
    Column("state_since", lambda row: row.node.state_since),
    Column("state_reason", lambda row: row.node.state_reason),
    Column("reachable", lambda row: row.reachable),
    Column(
        "last_beat_at",
        lambda row: row.node.lease.last_beat_at if hasattr(row.node, "lease") else None,
    ),
    Column("gpu_count", lambda row: row.cards),
    Column("open_faults", lambda row: "; ".join(_fault(*fault) for fault in row.faulty)),
    Column("job_id", lambda row: row.job.replica.job_id if row.job else None),
    Column("job_name", lambda row: row.job.replica.job.name if row.job else None),
    Column("replica", lambda row: row.job.replica.index if row.job else None),
    Column("spare", lambda row: row.node.spare),
    Column("hold_reason", lambda row: row.node.hold_reason),
    Column("drained_by", lambda row: row.drained_by),
    Column("reset_pending", lambda row: row.node.reset_pending),
    Column("boot_id", lambda row: row.node.boot_id),
    Column("booted_at", lambda row: row.node.booted_at),
    Column("agent_version", lambda row: row.node.agent_version),
    Column("enrolled_at", lambda row: row.node.enrolled_at),
)


@signed_in
@needs(Access.SIGNED_IN)
def clusters(request: HttpRequest) -> HttpResponseBase:
    """All clusters. Whoever sees but one is led to it."""
    found = list(clusters_for(request.user))
    if is_wanted(request):
        tallies = selectors.tallies_of(found)
        counted = [(cluster, tallies[cluster.id]) for cluster in found]
        return as_file(request, "clusters", CLUSTER_COLUMNS, [counted])
    if len(found) == 1 and not request.htmx:  # type: ignore[attr-defined]
        return HttpResponseRedirect(reverse("cluster", args=[found[0].id]))

    def context() -> dict[str, Any]:
        return {"cards": overview.cards_of(found, list(unfinished_jobs_for(request.user)))}

    return live_page(request, "dashboard/clusters", found, context)


@signed_in
@needs(Access.VIEWER)
def cluster(request: HttpRequest, cluster_id: str) -> HttpResponseBase:
    """One cluster, filtered: see `NodeFilter` for the words of the address."""
    found = selectors.cluster_for(request.user, cluster_id)
    chosen = selectors.NodeFilter.of(request.GET)
    listed = selectors.listed(found, chosen)
    if is_wanted(request):
        whole = map(selectors.rows_of, pages_of(listed, request.GET, sorts=selectors.SORTS))
        known = {**selectors.WORDS, "sort": sort_words(selectors.SORTS)}
        return as_file(request, f"nodes-{found.name}", NODE_COLUMNS, whole, known)

    def context() -> dict[str, Any]:
        page = page_of(listed, request.GET, sorts=selectors.SORTS, size=PAGE_SIZE)
        return {
            "cluster": found,
            "tally": selectors.tallies_of([found])[found.id],
            "filter": chosen,
            "choices": selectors.choices_of(found),
            "states": NodeState,
            "legend": LEGEND,
            "page": page,
            "rows": selectors.rows_of(page.rows),
            "breakers": limits.open_breakers([found.id]),
        }

    return live_page(request, "dashboard/cluster", [found], context)


@gzip_page
@signed_in
@needs(Access.VIEWER)
def cluster_map(request: HttpRequest, cluster_id: str) -> HttpResponse:
    """Every node and card of a cluster, packed for drawing."""
    found = selectors.cluster_for(request.user, cluster_id)
    response = JsonResponse(selectors.map_of(found, selectors.NodeFilter.of(request.GET)))
    response["Cache-Control"] = "no-store"
    return response


@signed_in
@needs(Access.VIEWER)
def node_by_name(request: HttpRequest, cluster_id: str, name: str) -> HttpResponse:
    """Leads to a node's page: the map knows names only."""
    found = selectors.cluster_for(request.user, cluster_id)
    node_id = found.nodes.filter(name=name).values_list("pk", flat=True).first()
    if node_id is None:
        raise Http404("no such node")
    return HttpResponseRedirect(reverse("node", args=[node_id]))


def _fault(index: int | None, code: str) -> str:
    return code if index is None else f"{code} GPU {index}"
