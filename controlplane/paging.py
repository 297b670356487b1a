"""Lists by page: sorted, and continued after the last row that was shown.

Nothing is counted or skipped through, so the hundredth page costs what the first did.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from django.core.exceptions import ValidationError
from django.db import DataError
from django.db.models import Model, Q, QuerySet
from django.http import Http404

Row = TypeVar("Row", bound=Model)

PAGE_SIZE = 50


@dataclass(frozen=True)
class Page(Generic[Row]):
    """Some rows of a list. `next` is the cursor of the page after this one, or empty."""

    rows: list[Row]
    sort: str
    next: str

    def __bool__(self) -> bool:
        return bool(self.rows)


def page_of(
    queryset: QuerySet[Row],
    query: Mapping[str, str],
    *,
    sorts: Mapping[str, str],
    size: int = PAGE_SIZE,
) -> Page[Row]:
    """The page that `query` asks for by `sort` ("name", or "-name" for falling) and `cursor`.

    `sorts` names the fields by their word in the address, the first being the default; none of
    them may be null. Raises Http404 for a cursor that no page gave out.
    """
    default = next(iter(sorts))
    sort = query.get("sort", default)
    if sort.removeprefix("-") not in {word.removeprefix("-") for word in sorts}:
        sort = default
    falling = sort.startswith("-")
    word = sort.removeprefix("-")
    field = sorts.get(word) or sorts[f"-{word}"]
    sign, beyond = ("-", "lt") if falling else ("", "gt")
    ordered = queryset.order_by(f"{sign}{field}", f"{sign}pk")
    try:
        if token := query.get("cursor"):
            value, pk = _opened(token)
            ordered = ordered.filter(
                Q(**{f"{field}__{beyond}": value}) | Q(**{field: value, f"pk__{beyond}": pk})
            )
        rows = list(ordered[: size + 1])
    except (ValidationError, ValueError, TypeError, OverflowError, DataError):
        raise Http404("this cursor belongs to another list") from None
    if len(rows) <= size:
        return Page(rows, sort, "")
    return Page(rows[:size], sort, _closed(rows[size - 1], field))


def _closed(row: Model, field: str) -> str:
    value: Any = row
    for part in field.split("__"):
        value = getattr(value, part)
    told = value.isoformat() if isinstance(value, datetime) else value
    return base64.urlsafe_b64encode(json.dumps([told, row.pk]).encode()).decode().rstrip("=")


def _opened(token: str) -> tuple[Any, Any]:
    try:
        value, pk = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except (binascii.Error, ValueError, TypeError):
        raise Http404("no such page; go back to the first") from None
    if not isinstance(value, str | int | float) or not isinstance(pk, str | int):
        raise Http404("no such page; go back to the first")
    return value, pk
