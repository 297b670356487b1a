"""Prometheus metrics: who may read them, and how they are written out.

The metrics themselves stand beside what they measure. No label may hold an id, a path or a name
that a sender chooses: each of its values is a series that Prometheus keeps.
"""

from __future__ import annotations

import hmac
import os
from functools import cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

import prometheus_client
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from controlplane.accounts.access import Access, needs

# A second series for each counter, of when it began, is of use to nobody here.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

#: Headers by which a proxy says that it speaks for somebody else.
RELAYED = ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via")
DENIED = (
    "Metrics are read from an address in METRICS_ALLOW, without a proxy between, or with the "
    "bearer token METRICS_TOKEN.\n"
)


def may_read(address: str, authorization: str, *, relayed: bool) -> bool:
    """Whether a caller at `address` may read the metrics.

    `relayed`: a proxy brought the request, so that the address is the proxy's own.
    """
    scheme, _, token = authorization.partition(" ")
    if settings.METRICS_TOKEN and scheme.lower() == "bearer":
        return hmac.compare_digest(token.encode(), settings.METRICS_TOKEN.encode())
    return not relayed and _is_allowed(address)


def exposition() -> bytes:
    """All metrics of this process in Prometheus' text format, of type CONTENT_TYPE.

    With PROMETHEUS_MULTIPROC_DIR set they are those of all processes that share the folder.
    """
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return generate_latest()
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


@needs(Access.PUBLIC)  # as far as accounts go: the address or the token decides
def metrics(request: HttpRequest) -> HttpResponse:
    """The page for Prometheus; 403 for whoever may not read it."""
    allowed = may_read(
        request.META.get("REMOTE_ADDR", ""),
        request.headers.get("Authorization", ""),
        relayed=any(name in request.headers for name in RELAYED),
    )
    if not allowed:
        return HttpResponse(DENIED, content_type="text/plain", status=403)
    return HttpResponse(exposition(), content_type=CONTENT_TYPE)


def _is_allowed(address: str) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False  # a Unix socket has none
    return any(parsed in network for network in _networks(tuple(settings.METRICS_ALLOW)))


@cache
def _networks(allowed: tuple[str, ...]) -> tuple[IPv4Network | IPv6Network, ...]:
    try:
        return tuple(ip_network(text, strict=False) for text in allowed)
    except ValueError as error:
        raise ImproperlyConfigured(f"METRICS_ALLOW: {error}") from error
