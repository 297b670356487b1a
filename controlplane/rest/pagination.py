"""Pages by cursor: each page begins after the last row of the one before, by sort key and id.

Rows that are added or removed meanwhile shift nothing: no row is shown twice or left out.
"""

# Django REST framework carries no types.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from typing import Any, Generic, TypeVar

from django.core import signing
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest
from rest_framework.pagination import BasePagination

from controlplane.rest.filters import values_of, whole
from controlplane.rest.problems import invalid

Row = TypeVar("Row", bound=Model)
DEFAULT_LIMIT = 100
MAX_LIMIT = 500
_SALT = "drydock.rest.cursor"


@dataclass(frozen=True)
class Page(Generic[Row]):
    rows: list[Row]
    next: str | None
    previous: str | None


@dataclass(frozen=True)
class Cursor:
    """A place between two rows of the list at `path`, and the way to go from there.

    It is one under any filter, so filters are no part of it.
    """

    path: str
    sort: str
    key: Any
    pk: Any
    backwards: bool

    def encode(self) -> str:
        """Signed, so that what comes back needs no checking.

        Without a time: a page that has not changed has the same cursors, and so the same tag.
        """
        key = self.key.isoformat() if isinstance(self.key, datetime) else self.key
        told = [self.path, self.sort, key, self.pk, self.backwards]
        return signing.Signer(salt=_SALT).sign_object(told)

    @classmethod
    def decode(cls, text: str, path: str, sort: str) -> Cursor:
        try:
            cursor = cls(*signing.Signer(salt=_SALT).unsign_object(text))
        except (signing.BadSignature, ValueError, TypeError):
            raise invalid("cursor", "this is no cursor of ours", "invalid_cursor") from None
        if cursor.path != path:
            raise invalid("cursor", "this cursor belongs to another list", "invalid_cursor")
        if cursor.sort != sort:
            raise invalid("cursor", "this cursor belongs to another sort", "invalid_cursor")
        return cursor


def page_of(
    request: HttpRequest, rows: QuerySet[Row], sorts: Mapping[str, str], default_sort: str
) -> Page[Row]:
    """One page of these rows, in the order that the request asks for.

    `sorts` maps the names that may be sorted by to columns that are never empty.
    """
    sort = request.GET.get("sort", default_sort)
    column = sorts.get(sort.removeprefix("-"))
    if column is None:
        raise invalid("sort", f"may be one of: {', '.join(sorts)}; with - before it, downwards")
    limit = DEFAULT_LIMIT
    if "limit" in request.GET:
        limit = whole("limit", values_of(request.GET, "limit", many=False)[0], 1, MAX_LIMIT)
    cursor = None
    if "cursor" in request.GET:
        cursor = Cursor.decode(request.GET["cursor"], request.path, sort)
    downwards = sort.startswith("-") != (cursor is not None and cursor.backwards)
    if cursor is not None:
        rows = rows.filter(_beyond(column, cursor, downwards))
    minus = "-" if downwards else ""
    ordering = [f"{minus}{column}"] + ([] if column == "pk" else [f"{minus}pk"])
    found = list(rows.order_by(*ordering)[: limit + 1])
    return _page(request, found, limit, sort, column, cursor)


def _beyond(column: str, cursor: Cursor, downwards: bool) -> Q:
    """(column, pk) > (key, pk), written so that an index on the column is used."""
    way = "lt" if downwards else "gt"
    if column == "pk":
        return Q(**{f"pk__{way}": cursor.pk})
    return Q(**{f"{column}__{way}e": cursor.key}) & (
        Q(**{f"{column}__{way}": cursor.key}) | Q(**{f"pk__{way}": cursor.pk})
    )


def _page(
    request: HttpRequest,
    found: list[Row],
    limit: int,
    sort: str,
    column: str,
    cursor: Cursor | None,
) -> Page[Row]:
    backwards = cursor is not None and cursor.backwards
    more = len(found) > limit
    rows = found[:limit][::-1] if backwards else found[:limit]

    def link(row: Row, way_back: bool) -> str:
        key = row.pk if column == "pk" else reduce(getattr, column.split("__"), row)
        query = request.GET.copy()
        query["cursor"] = Cursor(request.path, sort, key, row.pk, way_back).encode()
        return f"{request.path}?{query.urlencode()}"

    if not rows:
        return Page(rows, None, None)
    has_next = more or backwards
    has_previous = more if backwards else cursor is not None
    return Page(
        rows,
        link(rows[-1], False) if has_next else None,
        link(rows[0], True) if has_previous else None,
    )


class CursorPagination(BasePagination):
    """Tells the description of the API what a list looks like; `page_of` does the work."""

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        link = {"type": ["string", "null"], "format": "uri-reference"}
        return {
            "type": "object",
            "required": ["results", "next", "previous"],
            "properties": {"results": schema, "next": link, "previous": link},
        }
