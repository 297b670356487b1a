"""The page of the audit trail: who wrote what, why, and whether the chain holds it."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse

from controlplane.accounts import chain
from controlplane.accounts.access import Access, needs
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import trail
from controlplane.fleet.selectors import audit_for, clusters_for
from controlplane.live import live_page
from controlplane.paging import page_of


@signed_in
@needs(Access.SIGNED_IN)
def audit(request: HttpRequest) -> HttpResponse:
    """What was written in one's clusters, newest first, narrowed by the form's fields."""

    def context() -> dict[str, Any]:
        asked = trail.Asked.of(request.GET)
        found = trail.narrowed(audit_for(request.user), asked)
        page = page_of(found, request.GET, sorts={"-id": "id"})
        return {
            "asked": asked,
            "page": page,
            "rows": trail.rows_of(page.rows),
            "clusters": clusters_for(request.user),
            "head": chain.head(),
            "unchained": chain.unchained(),
            "verification": trail.last_verification(),
        }

    return live_page(request, "audit/list", clusters_for(request.user), context)
