"""The overview, the header's dot, and the answers for load balancers."""

from __future__ import annotations

from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from controlplane.accounts.access import Access, needs
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import overview as selectors
from controlplane.fleet.selectors import clusters_for
from controlplane.live import live_page


@signed_in
@needs(Access.SIGNED_IN)
def overview(request: HttpRequest) -> HttpResponse:
    return live_page(
        request,
        "dashboard/overview",
        clusters_for(request.user),
        lambda: selectors.overview(request.user),
    )


@signed_in
@needs(Access.SIGNED_IN)
def automation(request: HttpRequest) -> HttpResponse:
    """The dot in the header: refreshed on its own, since silence makes no change to number."""
    return render(request, "dashboard/_automation.html", {"automation": selectors.automation()})


@needs(Access.PUBLIC)
def healthz(_request: HttpRequest) -> HttpResponse:
    """200 while this process answers."""
    return HttpResponse("ok\n", content_type="text/plain")


@needs(Access.PUBLIC)
def readyz(_request: HttpRequest) -> HttpResponse:
    """200 while the database answers too, else 503."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return HttpResponse("database does not answer\n", content_type="text/plain", status=503)
    return HttpResponse("ok\n", content_type="text/plain")
