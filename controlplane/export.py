"""Lists as files: the whole of a list, filtered and sorted as its page shows it, as CSV or JSON.

A file never looks complete when it is not, and no cell of it is run by a spreadsheet. It is sent
piece by piece, so that neither memory nor the time to its first byte grows with the list.
"""

from __future__ import annotations

import csv
import io
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import msgspec
import structlog
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils import timezone

Row = TypeVar("Row")
#: Times are told in UTC, in ISO 8601; dicts are objects in JSON, and JSON text in CSV.
Value = str | int | float | bool | Decimal | datetime | dict[str, Any] | None

#: So many files may be under way in one process: each holds one of its threads until its reader
#: has all of it, and pages need the others (web has four, see docker-compose.yml).
MAX_EXPORTS = 2
#: What makes a spreadsheet run a cell. An apostrophe before it takes that away; one before an
#: apostrophe keeps those apart that were there already.
DANGEROUS = ("=", "+", "-", "@", "\t", "\r", "\n", "'")
BROKEN_OFF = (
    "BROKEN OFF: rows are missing from here on. Download the list again, or a narrower one."
)

_under_way = threading.BoundedSemaphore(MAX_EXPORTS)
_json = msgspec.json.Encoder(decimal_format="number")
log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column: its name in the file, which stays as it is for ever, and its value in a row."""

    word: str
    value: Callable[[Row], Value]


def is_wanted(request: HttpRequest) -> bool:
    """Whether the address asks for the list as a file: `export=csv` or `export=json`."""
    return request.method == "GET" and bool(request.GET.get("export"))


def as_file(
    request: HttpRequest,
    name: str,
    columns: Sequence[Column[Row]],
    pages: Iterable[Sequence[Row]],
    known: Mapping[str, Collection[str]] | None = None,
) -> HttpResponseBase:
    """All `pages` as the file that `is_wanted`; 400 for an unknown word, 503 when too many run.

    `known` are the words that fields of the address may have: a page leaves another word out, but
    a file would hold other rows than were asked for, and nothing in it would say so.

    A list that ends within its first page is sent in one piece and with its length. Whatever
    fails while that page is read is an error of the request, as on the page itself.
    """
    for field, words in {"export": _FORMATS, **(known or {})}.items():
        told = request.GET.get(field, "")
        if told and told not in words:
            return refusal(field, told, words)
    word = request.GET["export"]
    form = _FORMATS[word]
    coming = iter(pages)
    first = list(islice(coming, 2))
    pieces = form.pieces(columns, chain(first, coming))
    if len(first) < 2:
        return _named(HttpResponse(b"".join(pieces), content_type=form.media_type), name, word)
    slot = ExitStack()
    if not _under_way.acquire(blocking=False):
        return _busy()
    slot.callback(_under_way.release)
    download = _Download(pieces, form.broken_off(len(columns)), slot, name, request.request_id)  # type: ignore[attr-defined]
    return _named(StreamingHttpResponse(download, content_type=form.media_type), name, word)


def refusal(field: str, told: str, known: Iterable[str]) -> HttpResponse:
    """400, in words: what `field` of the address may be."""
    text = f"{field}: there is no {told[:40]!r}. Use one of: {', '.join(known)}.\n"
    return HttpResponse(text, status=400, content_type="text/plain; charset=utf-8")


# --- What is sent ---------------------------------------------------------------------------------


def _busy() -> HttpResponse:
    text = "Too many lists are being downloaded at this moment. Try again in half a minute.\n"
    response = HttpResponse(text, status=503, content_type="text/plain; charset=utf-8")
    response["Retry-After"] = "30"
    return response


def _named(response: HttpResponseBase, name: str, word: str) -> HttpResponseBase:
    stamp = f"{timezone.now():%Y%m%dT%H%M%SZ}"
    response["Content-Disposition"] = f'attachment; filename="drydock-{name}-{stamp}.{word}"'
    response["Cache-Control"] = "no-store"
    return response


class _Download:
    """The pieces of one file. If one fails, what was sent ends so that nobody takes it for whole.

    That must stand in the file itself: the web server ends a chunked answer in good order whatever
    its application raises.
    """

    def __init__(
        self, pieces: Iterator[bytes], broken_off: bytes, slot: ExitStack, name: str, request: str
    ) -> None:
        self._pieces = pieces
        self._broken_off = broken_off
        self._slot = slot
        self._name = name
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._pieces
        except Exception as error:
            log.error("export.broken", list=self._name, request=self._request, error=repr(error))
            yield self._broken_off
            raise

    def close(self) -> None:
        """Called by the server when all was sent, when it failed, or when the reader has left."""
        self._slot.close()


# --- Formats --------------------------------------------------------------------------------------


def _csv_pieces(columns: Sequence[Column[Row]], pages: Iterable[Sequence[Row]]) -> Iterator[bytes]:
    yield _csv_lines([[column.word for column in columns]])
    for page in pages:
        yield _csv_lines([_cell(column.value(row)) for column in columns] for row in page)


def _json_pieces(columns: Sequence[Column[Row]], pages: Iterable[Sequence[Row]]) -> Iterator[bytes]:
    before = b"[\n"
    for page in pages:
        rows = ({column.word: column.value(row) for column in columns} for row in page)
        yield before + b",\n".join(_json.encode(row) for row in rows)
        before = b",\n"
    yield b"\n]\n" if before == b",\n" else b"[]\n"


def _csv_broken_off(columns: int) -> bytes:
    """A last line that a person reads, and with one cell too many for any program to take."""
    return _csv_lines([[BROKEN_OFF, *[""] * columns]])


def _json_broken_off(_columns: int) -> bytes:
    """Nothing: without its end no program takes an array for whole."""
    return b"\n"


@dataclass(frozen=True)
class _Format:
    media_type: str
    pieces: Callable[[Sequence[Column[Any]], Iterable[Sequence[Any]]], Iterator[bytes]]
    broken_off: Callable[[int], bytes]


_FORMATS = {
    "csv": _Format("text/csv; charset=utf-8; header=present", _csv_pieces, _csv_broken_off),
    "json": _Format("application/json", _json_pieces, _json_broken_off),
}


def _csv_lines(lines: Iterable[Sequence[str | int | float | Decimal]]) -> bytes:
    """RFC 4180; all text stands in quotes, so that no semicolon splits it either."""
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\r\n").writerows(lines)
    return text.getvalue().encode()


def _cell(value: Value) -> str | int | float | Decimal:
    if isinstance(value, str):
        return f"'{value}" if value.startswith(DANGEROUS) else value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""  # JSON has no such numbers either: there they are null
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Decimal):
        return value
    if isinstance(value, dict):
        return _json.encode(value).decode()
    return str(msgspec.to_builtins(value))
