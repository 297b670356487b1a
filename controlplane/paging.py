"""Lists by page: sorted, and continued after the last row that was shown.

Of a page nothing is counted or skipped through, so the hundredth page costs what the first did.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from django.core.exceptions import ValidationError
from django.db import DataError
from django.db.models import Model, Q, QuerySet
from django.http import Http404

Row = TypeVar("Row", bound=Model)
#: Where a page ended: the value of the sorted field in its last row, and that row's key.
Place = tuple[Any, Any]

PAGE_SIZE = 50
#: So many rows of a list that is read to its end stand in memory at once.
CHUNK = 1000


@dataclass(frozen=True)
class Page(Generic[Row]):
    """Some rows of a list. `next` is the cursor of the page after this one, or empty."""

    rows: list[Row]
    sort: str
    next: str

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Top(Generic[Row]):
    """The first rows of a list, and how many there are in all."""

    rows: list[Row]
    total: int

    @classmethod
    def of(cls, found: QuerySet[Row], shown: int) -> Top[Row]:
        """Counts only where `shown` rows are not all."""
        rows = list(found[: shown + 1])
        return cls(rows[:shown], len(rows) if len(rows) <= shown else found.count())


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
    order = _Order.asked(query, sorts)
    if token := query.get("cursor"):
        rows = _read_from(token, order, queryset, size + 1)
    else:
        rows = order.read(queryset, None, size + 1)
    if len(rows) <= size:
        return Page(rows, order.sort, "")
    return Page(rows[:size], order.sort, _closed(order.place_of(rows[size - 1])))


def pages_of(
    queryset: QuerySet[Row],
    query: Mapping[str, str],
    *,
    sorts: Mapping[str, str],
    size: int = CHUNK,
) -> Iterator[list[Row]]:
    """The whole list from its first row on, sorted as `page_of` sorts it, `size` rows at a time.

    Each page is a query of its own when it is asked for, and no transaction stays open between
    them: a row whose sorted field changes meanwhile may come twice or not at all.
    """
    order = _Order.asked(query, sorts)
    place = None
    while rows := order.read(queryset, place, size):
        yield rows
        if len(rows) < size:
            return
        place = order.place_of(rows[-1])


def sort_words(sorts: Mapping[str, str]) -> list[str]:
    """What `sort` may be in the address of a list that has these: each, rising and falling."""
    named = {word.removeprefix("-") for word in sorts}
    return sorted(f"{sign}{word}" for word in named for sign in ("", "-"))


@dataclass(frozen=True)
class _Order:
    """How a list is sorted: the word in the address, and the field it stands for."""

    sort: str
    field: str

    @classmethod
    def asked(cls, query: Mapping[str, str], sorts: Mapping[str, str]) -> _Order:
        default = next(iter(sorts))
        sort = query.get("sort", default)
        if sort not in sort_words(sorts):
            sort = default
        word = sort.removeprefix("-")
        return cls(sort, sorts.get(word) or sorts[f"-{word}"])

    def read(self, queryset: QuerySet[Row], after: Place | None, limit: int) -> list[Row]:
        """At most `limit` rows after that place, or from the first one on."""
        sign, beyond = ("-", "lt") if self.sort.startswith("-") else ("", "gt")
        rows = queryset.order_by(f"{sign}{self.field}", f"{sign}pk")
        if after is not None:
            value, pk = after
            # The first condition follows from the second: only by it can an index be entered at
            # this place instead of being walked from its start.
            rows = rows.filter(
                Q(**{f"{self.field}__{beyond}e": value}),
                Q(**{f"{self.field}__{beyond}": value})
                | Q(**{self.field: value, f"pk__{beyond}": pk}),
            )
        return list(rows[:limit])

    def place_of(self, row: Model) -> Place:
        value: Any = row
        for part in self.field.split("__"):
            value = getattr(value, part)
        return value, row.pk


def _read_from(token: str, order: _Order, queryset: QuerySet[Row], limit: int) -> list[Row]:
    try:
        return order.read(queryset, _opened(token), limit)
    except (ValidationError, ValueError, TypeError, OverflowError, DataError):
        raise Http404("this cursor belongs to another list") from None


def _closed(place: Place) -> str:
    value, pk = place
    told = value.isoformat() if isinstance(value, datetime) else value
    return base64.urlsafe_b64encode(json.dumps([told, pk]).encode()).decode().rstrip("=")


def _opened(token: str) -> Place:
    try:
        value, pk = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except (binascii.Error, ValueError, TypeError):
        raise Http404("no such page; go back to the first") from None
    if not isinstance(value, str | int | float) or not isinstance(pk, str | int):
        raise Http404("no such page; go back to the first")
    return value, pk
