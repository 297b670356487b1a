"""The page of failures: what triage made of what was observed, over time, and its price."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse

from controlplane.accounts.access import Access, needs
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import failures as selectors
from controlplane.fleet.selectors import clusters_for
from controlplane.health.choices import FaultClass
from controlplane.incidents import pricing
from controlplane.incidents.selectors import failures_for
from controlplane.live import live_page
from controlplane.paging import page_of

SORTS = {"-seen": "observed_at", "code": "code", "-count": "count"}


@signed_in
@needs(Access.SIGNED_IN)
def failures(request: HttpRequest) -> HttpResponse:
    """Failures by `code`, `fault_class`, `cluster`, `node`, `card`, over `window`."""
    clusters = list(clusters_for(request.user))

    def context() -> dict[str, Any]:
        chosen = selectors.FailureFilter.of(request.GET)
        visible = failures_for(request.user)
        found = chosen.apply(visible)
        page = page_of(selectors.with_story(found), request.GET, sorts=SORTS)
        return {
            "page": page,
            "jobs": selectors.job_names(page.rows),
            "filter": chosen,
            "windows": {word: label for word, (label, _) in selectors.WINDOWS.items()},
            "classes": FaultClass,
            "codes": selectors.codes_of(visible),
            "clusters": clusters,
            "chart": selectors.chart_of(found, chosen),
            "impacts": pricing.impact_by_code(clusters, chosen.since),
        }

    return live_page(request, "dashboard/failures", clusters, context)
