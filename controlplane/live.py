"""Pages that stay true without reloading: each polls its own address for what is new.

Every visible change takes the next `change_seq` of its cluster, so those numbers, joined, are the
token of what a page shows. The browser sends it back each second and mostly hears 204.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.cache import patch_vary_headers

from controlplane.fleet.models import Cluster

Context = Callable[[], dict[str, Any]]


def live_page(
    request: HttpRequest,
    template: str,
    clusters: Iterable[Cluster],
    context: Context,
    *,
    status: int = 200,
) -> HttpResponse:
    """`<template>.html`, or for a refresh its `<template>_live.html`, or 204 if nothing changed.

    The page polls `live_path` with `live_query`, and its links lead on from there. What may be the
    answer to an order names them in its context: the order's address is no page.
    `clusters` must have been read before `context` is called: a change in between is then shown
    twice, never missed.
    """
    token = token_of(clusters)
    refresh = bool(request.htmx) and request.method == "GET"  # type: ignore[attr-defined]
    if refresh and request.GET.get("after") == token:
        return HttpResponse(status=204)
    suffix = "_live" if refresh else ""
    values = {
        "live_path": request.path,
        "live_query": request.GET,
        "live_token": token,
        "refresh": refresh,
    } | context()
    response = render(request, f"{template}{suffix}.html", values, status=status)
    response["Cache-Control"] = "no-store"
    patch_vary_headers(response, ["HX-Request"])
    return response


def token_of(clusters: Iterable[Cluster]) -> str:
    """What of these clusters has been seen, as a short opaque string."""
    return ".".join(f"{cluster.id[-6:]}-{cluster.change_seq}" for cluster in clusters) or "none"
