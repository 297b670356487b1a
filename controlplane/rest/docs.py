"""The description of the API, as a document for programs and as a page for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator

from controlplane.accounts.access import Access, needs
from controlplane.accounts.views import signed_in
from controlplane.rest import problems


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document; it is the same as long as the process lives."""
    generator = SchemaGenerator()  # type: ignore[no-untyped-call]
    schema: dict[str, Any] = generator.get_schema(public=True)  # type: ignore[no-untyped-call]
    return schema


@needs(Access.PUBLIC)
@require_safe
def openapi(_request: HttpRequest) -> HttpResponse:
    """The document itself: no secrets stand in it, so anybody may read it."""
    return HttpResponse(msgspec.json.encode(document()), content_type="application/json")


@needs(Access.SIGNED_IN)
@require_safe
@signed_in
def page(request: HttpRequest) -> HttpResponse:
    """The document as a page: every operation by what it is about, with an example."""
    told = [(code, kind, _with_code(kind.remedy)) for code, kind in problems.KINDS.items()]
    return render(request, "rest/docs.html", {"sections": sections(), "problems": told})


# --- the document, arranged for reading -----------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One parameter, one field of a body, or one field of an answer."""

    name: str
    place: str  # "path", "query", "header" or "body"
    kind: str
    required: bool
    description: str


@dataclass(frozen=True)
class Operation:
    id: str
    method: str
    path: str
    summary: str
    description: str
    takes: list[Field]
    answers: list[Field]
    statuses: list[tuple[int, str]]
    example: str


@dataclass(frozen=True)
class Section:
    name: str
    operations: list[Operation]


@cache
def sections() -> list[Section]:
    """Operations by the list they belong to, reading before writing."""
    found: dict[str, list[Operation]] = {}
    for path, methods in document()["paths"].items():
        for method, told in methods.items():
            found.setdefault(told["tags"][0], []).append(_operation(path, method, told))
    for operations in found.values():
        operations.sort(key=lambda one: (one.method != "GET", one.path))
    return [Section(name, operations) for name, operations in sorted(found.items())]


def _operation(path: str, method: str, told: dict[str, Any]) -> Operation:
    body = _body_of(told)
    takes = [
        Field(
            one["name"],
            one["in"],
            _kind(one["schema"]),
            one.get("required", False),
            one.get("description", ""),
        )
        for one in told.get("parameters", [])
    ]
    takes += list(_fields(body, "body"))
    return Operation(
        id=told["operationId"],
        method=method.upper(),
        path=path,
        summary=told.get("summary", ""),
        description=told.get("description", ""),
        takes=takes,
        answers=list(_fields(_answer_of(told), "answer")),
        statuses=[(int(status), HTTPStatus(int(status)).phrase) for status in told["responses"]],
        example=_example(path, method.upper(), body),
    )


def _body_of(told: dict[str, Any]) -> dict[str, Any]:
    content = told.get("requestBody", {}).get("content", {}).get("application/json", {})
    return _resolved(content.get("schema", {}))


def _answer_of(told: dict[str, Any]) -> dict[str, Any]:
    """What a list holds, or what a verb shows, or the object itself."""
    success = next(told["responses"][s] for s in ("201", "202", "200") if s in told["responses"])
    schema = _resolved(success["content"]["application/json"]["schema"])
    properties = schema.get("properties", {})
    if "results" in properties:
        return _resolved(properties["results"]["items"])
    if "changes" in properties and "result" in properties:
        return _resolved(properties["result"])
    return schema


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    for inner in (schema, *schema.get("allOf", ()), *schema.get("oneOf", ())):
        if "$ref" in inner:
            found: dict[str, Any] = document()["components"]["schemas"][
                inner["$ref"].rpartition("/")[2]
            ]
            return found
    return schema


def _fields(schema: dict[str, Any], place: str) -> Iterator[Field]:
    required = schema.get("required", [])
    for name, inner in schema.get("properties", {}).items():
        description = inner.get("description", "")
        if "enum" in inner or description.startswith("* `"):
            description = ""  # the choices stand in the kind
        yield Field(name, place, _kind(inner), name in required, description)


def _kind(schema: dict[str, Any]) -> str:
    """A type in a few words, such as "one of a, b" or "list of string"."""
    schema = {**_resolved(schema), **{k: v for k, v in schema.items() if k != "$ref"}}
    if "enum" in schema:
        return "one of " + ", ".join(str(one) for one in schema["enum"] if one is not None)
    if schema.get("type") == "array":
        items = _kind(schema["items"])
        return f"any of {items[7:]}" if items.startswith("one of ") else f"list of {items}"
    kinds = schema.get("type", "any")
    kind = " or ".join(kinds) if isinstance(kinds, list) else kinds
    return str(schema["format"]) if schema.get("format") == "date-time" else kind


def _with_code(text: str) -> SafeString:
    """Words between backticks as code."""
    parts = enumerate(text.split("`"))
    return format_html_join(
        "", "{}", ((format_html("<code>{}</code>", part) if n % 2 else part,) for n, part in parts)
    )


def _example(path: str, method: str, body: dict[str, Any]) -> str:
    address = re.sub(r"\{(\w+)\}", lambda part: f"${part[1].upper()}", path)
    lines = [f'curl -H "Authorization: Bearer $TOKEN" "$DRYDOCK{address}"']
    if method == "DELETE":
        lines = [f'curl -X DELETE -H "Authorization: Bearer $TOKEN" "$DRYDOCK{address}?reason=why"']
    elif method == "POST":
        values = {name: _value(name, body) for name in body.get("required", [])}
        lines[0] = lines[0].replace("curl ", "curl -X POST ")
        lines.append('-H "Content-Type: application/json" -H "Idempotency-Key: $(uuidgen)"')
        lines.append(f"-d '{json.dumps(values)}'")
    return " \\\n  ".join(lines)


_VALUES = {"cluster": "alpha", "reason": "why", "step": 1200, "ends_at": "2026-11-21T18:00:00Z"}


def _value(name: str, body: dict[str, Any]) -> Any:
    schema = body["properties"][name]
    if "enum" in schema:
        return schema["enum"][0]
    return _VALUES.get(name, 60 if schema.get("type") in ("integer", "number") else "…")
