"""What every request gets: an id that stands on each log line, and a strict content policy."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from django.http import HttpRequest, HttpResponse

from controlplane.ids import new_id

POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)

GetResponse = Callable[[HttpRequest], HttpResponse]


class RequestIdMiddleware:
    """Names each request, for logs, audit rows and whoever reports a fault."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        request.request_id = new_id("req")  # type: ignore[attr-defined]
        with structlog.contextvars.bound_contextvars(request=request.request_id):  # type: ignore[attr-defined]
            response = self.get_response(request)
        response["X-Request-Id"] = request.request_id  # type: ignore[attr-defined]
        return response


class ContentSecurityPolicyMiddleware:
    """No inline script or style runs on our pages, whatever slips into one."""

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response.setdefault("Content-Security-Policy", POLICY)
        return response
