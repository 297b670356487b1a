"""What every request gets: an id, a log line, its place in the metrics, a strict content policy.

Neither log nor metrics may hold what a caller sent: no path, no query, no header.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from django.core.exceptions import SuspiciousOperation
from django.http import HttpRequest, HttpResponse, QueryDict
from django.utils.functional import SimpleLazyObject
from prometheus_client import Counter, Histogram

from controlplane.ids import new_id

POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: Routes that machines ask all day: their lines are there for who debugs.
QUIET_ROUTES = frozenset({"healthz", "readyz", "metrics"})

REQUESTS = Counter(
    "drydock_http_requests", "Requests that web answered.", ["route", "method", "status"]
)
DURATION = Histogram(
    "drydock_http_request_duration_seconds",
    "Time from a request's arrival in web to its answer.",
    ["route", "method"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10),
)

GetResponse = Callable[[HttpRequest], HttpResponse]
log = structlog.get_logger(__name__)


class RequestIdMiddleware:
    """Names each request, for logs, audit rows and whoever reports a fault; logs and counts it."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        request.request_id = new_id("req")  # type: ignore[attr-defined]
        began = time.perf_counter()
        with structlog.contextvars.bound_contextvars(request=request.request_id):  # type: ignore[attr-defined]
            response = self.get_response(request)
            _record(request, response, time.perf_counter() - began)
        response["X-Request-Id"] = request.request_id  # type: ignore[attr-defined]
        return response


class NoNulMiddleware:
    """The database keeps no NUL: whoever sends one to a page hears 400 before any view looks.

    The API reads its own bodies and parameters, and names the field.
    """

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if not request.path.startswith("/api/"):
            texts = [request.path, *_values(request.GET)]
            if request.method == "POST":
                texts += _values(request.POST)
            if any("\0" in text for text in texts):
                raise SuspiciousOperation("a NUL character in a request")
        return self.get_response(request)


def _values(told: QueryDict) -> list[str]:
    return [value for _, values in told.lists() for value in values]


class ContentSecurityPolicyMiddleware:
    """No inline script or style runs on our pages, whatever slips into one."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response.setdefault("Content-Security-Policy", POLICY)
        return response


def _record(request: HttpRequest, response: HttpResponse, seconds: float) -> None:
    match = request.resolver_match
    route = match.view_name if match else "unknown"
    method = request.method if request.method in METHODS else "other"
    REQUESTS.labels(route, method, response.status_code).inc()
    DURATION.labels(route, method).observe(seconds)
    write = log.debug if route in QUIET_ROUTES else log.info
    write(
        "http.request",
        method=method,
        route=route,
        status=response.status_code,
        duration_s=round(seconds, 4),
        user=_user_id(request),
    )


def _user_id(request: HttpRequest) -> int | None:
    """Of whoever was found to be asking on the way here; looks nobody up."""
    user = request.__dict__.get("user")
    if isinstance(user, SimpleLazyObject):
        user = request.__dict__.get("_cached_user")
    return getattr(user, "pk", None)
