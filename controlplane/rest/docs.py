"""The description of the API, as a document for programs and as a page for people."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator

from controlplane.accounts.access import Access, needs


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document; it is the same as long as the process lives."""
    schema: dict[str, Any] = SchemaGenerator().get_schema(request=None, public=True)
    return schema


@needs(Access.PUBLIC)
@require_safe
def openapi(_request: HttpRequest) -> HttpResponse:
    """The document itself: no secrets stand in it, so anybody may read it."""
    return HttpResponse(msgspec.json.encode(document()), content_type="application/json")
