"""Pages that stay true without reloading: each polls its own address for what is new.

Every visible change takes the next `change_seq` of its cluster, so those numbers, joined, are the
token of what a page shows. What changes by mere time, such as the begin of a maintenance window,
is looked for from the moment at which the page was made, which goes with the token. The browser
sends both back each second and mostly hears 204.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.cache import patch_vary_headers

from controlplane.fleet.models import Cluster, MaintenanceWindow
from controlplane.form_actions import whole

Context = Callable[[], dict[str, Any]]
#: Rows that look different once one of these fields, moments, has passed.
Moments = tuple[QuerySet[Any], tuple[str, ...]]
#: The year 10000, in milliseconds: no moment is later.
_LAST_MS = 253_402_300_800_000


def live_page(
    request: HttpRequest,
    template: str,
    clusters: Iterable[Cluster],
    context: Context,
    *,
    also: str = "",
    moments: Sequence[Moments] = (),
    status: int = 200,
) -> HttpResponse:
    """`<template>.html`, or for a refresh its `<template>_live.html`, or 204 if nothing changed.

    The page polls `live_path` with `live_query`, and its links lead on from there. What may be the
    answer to an order names them in its context: the order's address is no page.
    `clusters` must have been read before `context` is called: a change in between is then shown
    twice, never missed. So must `also`, which stands for what is shown and is no cluster's change.
    `moments` are those at which the page changes, beside the begin and end of maintenance.
    """
    clusters, now = list(clusters), timezone.now()
    token = token_of(clusters) + also
    refresh = bool(request.htmx) and request.method == "GET"  # type: ignore[attr-defined]
    seen, _, at = request.GET.get("after", "").rpartition("@")
    if refresh and seen == token and not _has_passed([_windows(clusters), *moments], at, now):
        return HttpResponse(status=204)
    suffix = "_live" if refresh else ""
    values = {
        "live_path": request.path,
        "live_query": request.GET,
        "live_token": f"{token}@{int(now.timestamp() * 1000)}",
        "refresh": refresh,
    } | context()
    response = render(request, f"{template}{suffix}.html", values, status=status)
    response["Cache-Control"] = "no-store"
    patch_vary_headers(response, ["HX-Request"])
    return response


def token_of(clusters: Iterable[Cluster]) -> str:
    """What of these clusters has been seen, as a short opaque string."""
    return ".".join(f"{cluster.id[-6:]}-{cluster.change_seq}" for cluster in clusters) or "none"


def _windows(clusters: list[Cluster]) -> Moments:
    announced = MaintenanceWindow.objects.filter(cluster__in=clusters, closed_at=None)
    return announced, ("starts_at", "ends_at")


def _has_passed(moments: list[Moments], at: str, now: datetime) -> bool:
    """Whether any lies between `at`, in milliseconds since 1970, and now."""
    told = whole(at, _LAST_MS - 1)
    if told is None:
        return True
    since = datetime.fromtimestamp(told / 1000, UTC)
    return any(
        rows.filter(
            Q.create(
                [Q(**{f"{field}__gt": since, f"{field}__lte": now}) for field in fields],
                connector=Q.OR,
            )
        ).exists()
        for rows, fields in moments
    )
