"""Pages of clusters: all of them, one as a map and a table, and the map's data."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.urls import reverse
from django.views.decorators.gzip import gzip_page

from controlplane.accounts.access import Access, needs
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import fleet as selectors
from controlplane.dashboard.selectors import overview
from controlplane.fleet.choices import NodeState
from controlplane.fleet.selectors import clusters_for
from controlplane.incidents import limits
from controlplane.jobs.selectors import active_jobs_for
from controlplane.live import live_page
from controlplane.paging import page_of

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


@signed_in
@needs(Access.SIGNED_IN)
def clusters(request: HttpRequest) -> HttpResponse:
    """All clusters. Whoever sees but one is led to it."""
    found = list(clusters_for(request.user))
    if len(found) == 1 and not request.htmx:  # type: ignore[attr-defined]
        return HttpResponseRedirect(reverse("cluster", args=[found[0].id]))

    def context() -> dict[str, Any]:
        return {"cards": overview.cards_of(found, list(active_jobs_for(request.user)))}

    return live_page(request, "dashboard/clusters", found, context)


@signed_in
@needs(Access.VIEWER)
def cluster(request: HttpRequest, cluster_id: str) -> HttpResponse:
    """One cluster, filtered: see `NodeFilter` for the words of the address."""
    found = selectors.cluster_for(request.user, cluster_id)

    def context() -> dict[str, Any]:
        chosen = selectors.NodeFilter.of(request.GET)
        page = page_of(
            selectors.listed(found, chosen), request.GET, sorts=selectors.SORTS, size=PAGE_SIZE
        )
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
