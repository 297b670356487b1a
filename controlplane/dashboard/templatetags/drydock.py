"""Filters and tags of every template: times, numbers, icons and the words of a state."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from django import template
from django.template.context import Context
from django.templatetags.static import static
from django.urls import NoReverseMatch, reverse
from django.utils import dateformat, timezone
from django.utils.html import conditional_escape, format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from controlplane.accounts.choices import Role
from controlplane.fleet.choices import COLOURS, NodeState
from controlplane.fleet.selectors import may_somewhere
from controlplane.incidents.models import Approval, PlaybookRun
from controlplane.incidents.selectors import waiting_approval

register = template.Library()

DASH = "\N{EN DASH}"
NOTHING = format_html('<span class="nothing">{}</span>', DASH)


# --- Time -----------------------------------------------------------------------------------------


@register.filter
def ago(moment: datetime | None) -> SafeString:
    """“4 min ago”, kept ticking by the page, with the exact time on hover."""
    return _time(moment, "ago", "{} ago") if moment else NOTHING


@register.filter
def since(moment: datetime | None) -> SafeString:
    """“4 min”: how long something has lasted until now."""
    return _time(moment, "age", "{}") if moment else NOTHING


@register.filter
def clock(moment: datetime | None) -> SafeString:
    """“03:12:07” in UTC, behind its day where that is not today, with the date on hover."""
    if moment is None:
        return NOTHING
    utc = moment.astimezone(UTC)
    return _plain(utc, utc.strftime("%H:%M:%S"))


@register.filter
def clock_ms(moment: datetime | None) -> SafeString:
    """“03:12:07.518” in UTC; see `clock` of its day."""
    if moment is None:
        return NOTHING
    utc = moment.astimezone(UTC)
    return _plain(utc, utc.strftime("%H:%M:%S.%f")[:-3])


def _plain(utc: datetime, words: str) -> SafeString:
    day = "" if utc.date() == timezone.now().date() else dateformat.format(utc, "j M, ")
    return format_html(
        '<time datetime="{}" title="{}">{}{}</time>', utc.isoformat(), _exact(utc), day, words
    )


@register.filter
def offset(moment: datetime, start: datetime) -> SafeString:
    """“+0.31 s”: how long after `start`, with the exact time on hover."""
    utc = moment.astimezone(UTC)
    return format_html(
        '<time class="offset" datetime="{}" data-time="{}" title="{}">{}</time>',
        utc.isoformat(),
        utc.timestamp(),
        _exact(utc),
        signed((moment - start).total_seconds()),
    )


def _time(moment: datetime, mode: str, words: str) -> SafeString:
    age = coarse((timezone.now() - moment).total_seconds())
    return format_html(
        '<time datetime="{}" data-tick="{}" title="{}">{}</time>',
        moment.astimezone(UTC).isoformat(),
        mode,
        _exact(moment.astimezone(UTC)),
        words.format(age),
    )


def _exact(utc: datetime) -> str:
    return utc.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


@register.filter
def coarse(seconds: float) -> str:
    """“12 s”, “4 min”, “3 h 05 min”, “6 d”: an age. The page's script counts in the same words."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 2 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d"


@register.filter
def seconds(value: float | None) -> str | SafeString:
    """A measured duration: “84 ms”, “0.31 s”, “12.4 s”, “3 m 04 s”, “2 h 05 m”."""
    if value is None:
        return NOTHING
    if value <= -0.0005:
        return f"\N{MINUS SIGN}{seconds(-value)}"
    if value < 0.0005:
        return "0 s"
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 59.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


@register.filter
def signed(value: float) -> str:
    """“+0.31 s”: how long after something; before it with a minus."""
    return f"{'' if value < 0 else '+'}{seconds(value)}"


@register.filter
def until(start: datetime | None, end: datetime | None) -> str | SafeString:
    """The duration between two moments."""
    if start is None or end is None:
        return NOTHING
    return seconds((end - start).total_seconds())


# --- Numbers --------------------------------------------------------------------------------------


@register.filter
def number(value: float | str | None, digits: int = 0) -> str | SafeString:
    """1234567 as “1 234 567”, with thin spaces, to `digits` decimals.

    A key that some JSON lacks reaches a filter as an empty string, and is nothing too.
    """
    if value is None or isinstance(value, str):
        return NOTHING
    return f"{value:,.{digits}f}".replace(",", "\u202f")


@register.filter
def amount(value: float | str | None) -> str | SafeString:
    """A measured number to three or four significant digits; see `number` of what is missing."""
    if value is None or isinstance(value, str):
        return NOTHING
    if abs(value) >= 1000:
        return number(value)
    return f"{value:.4g}" if abs(value) < 10 else f"{value:.1f}"


@register.filter
def size(value: float | None) -> str | SafeString:
    """Bytes as “64.0 MiB”."""
    if value is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@register.filter
def money(value: float | None, currency: str) -> str | SafeString:
    """“1 234.50 USD”."""
    return NOTHING if value is None else f"{number(value, 2)}\u202f{currency}"


@register.filter
def ranks(values: list[int]) -> str:
    """[0, 2, 3] as “0, 2, 3”, and what is a run of three or more, as “0, 2 to 9”."""
    told = []
    for _, run in groupby(enumerate(sorted(values)), lambda pair: pair[1] - pair[0]):
        numbers = [str(value) for _, value in run]
        told += [f"{numbers[0]} to {numbers[-1]}"] if len(numbers) > 2 else numbers
    return ", ".join(told)


@register.filter
def short_id(value: str) -> str:
    """The tail of an id, enough to tell two apart."""
    return value[-6:]


# --- Pieces of pages ------------------------------------------------------------------------------

#: The sign of each colour: a state is told by its shape as well.
SIGNS = {"good": "ok", "busy": "busy", "warn": "warn", "bad": "bad", "quiet": "quiet"}


@register.simple_tag
def icon(name: str) -> SafeString:
    """One symbol of the sprite, hidden from screen readers: words stand beside it."""
    return format_html(
        '<svg class="icon" aria-hidden="true" focusable="false"><use href="{}#{}"></use></svg>',
        static("icons.svg"),
        name,
    )


@register.inclusion_tag("_pill.html")
def pill(thing: Any, testid: str = "") -> dict[str, Any]:
    """The state of anything that has `state`, `colour` and `get_state_display`."""
    return {
        "label": thing.get_state_display(),
        "state": thing.state,
        "colour": thing.colour,
        "sign": SIGNS[thing.colour],
        "testid": testid,
    }


@register.simple_tag(takes_context=True)
def nav_link(context: Context, name: str, words: str, also: str = "") -> SafeString:
    """A link of the header, marked on its own page and on those in `also`; nothing if unknown."""
    try:
        address = reverse(name)
    except NoReverseMatch:
        return SafeString("")
    match = context["request"].resolver_match
    here = match is not None and match.url_name in (name, *also.split())
    current = mark_safe(' aria-current="page"') if here else ""
    return format_html('<a href="{}"{}>{}</a>', address, current, words)


@register.simple_tag(takes_context=True)
def may_administer(context: Context) -> bool:
    """Whether the reader is an administrator of any cluster, or of all that will be."""
    return may_somewhere(context["request"].user, Role.ADMIN)


@register.simple_tag(takes_context=True)
def narrowed(context: Context) -> bool:
    """Whether the address asks for a part of the list, and not only for where to look in it or for
    what is new."""
    given = context["request"].GET
    return any(given[name] for name in given if name not in ("after", "cursor", "sort"))


@register.simple_tag(takes_context=True)
def sort_head(
    context: Context, words: str, word: str, sort: str, number: bool = False
) -> SafeString:
    """The head of a column by which the list can be sorted: a link that turns the order round."""
    query = context["request"].GET.copy()
    for gone in ("after", "cursor"):
        query.pop(gone, None)
    now = {word: "ascending", f"-{word}": "descending"}.get(sort, "none")
    # Numbers and times are mostly looked for from the greatest down.
    first, second = (f"-{word}", word) if number else (word, f"-{word}")
    query["sort"] = second if sort == first else first
    return format_html(
        '<th{} aria-sort="{}"><a class="sort" href="?{}">{}{}</a></th>',
        mark_safe(' class="num"') if number else "",
        now,
        query.urlencode(),
        words,
        "" if now == "none" else icon("up" if now == "ascending" else "down"),
    )


@register.filter
def node_colour(state: str) -> str:
    return COLOURS[NodeState(state)]


@register.filter
def in_list(value: Any, values: Container[Any]) -> bool:
    return value in values


@register.filter
def job_colour(job: Any) -> str:
    """A job runs well only with all of its replicas; one that was stopped is nobody's trouble."""
    if job.state == "failed":
        return "bad"
    if job.state == "running":
        return "good" if job.active_replicas >= job.world_replicas else "warn"
    return "busy" if job.state in ("pending", "starting", "stopping") else "quiet"


@register.filter
def sign(colour: str) -> str:
    return SIGNS[colour]


@register.filter
def to_sign(run: PlaybookRun) -> Approval | None:
    """The approval that a run waits for."""
    return waiting_approval(run)


@register.filter
def pretty_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


@register.filter
def lookup(values: Mapping[str, Any], key: str) -> Any:
    """The entry of a mapping, or nothing."""
    return values.get(key, "")


@register.filter
def evidence(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A JSON object as label and text, for a definition list. A plan is shown in its own way."""
    told = ((key.replace("_", " "), _told(item)) for key, item in value.items() if key != "plan")
    return list(told)


def _told(item: Any) -> str:
    if item is None or item == "" or item == []:
        return DASH
    if isinstance(item, bool):
        return "yes" if item else "no"
    if isinstance(item, float):
        return f"{item:.6g}"
    if isinstance(item, list) and not any(isinstance(part, dict | list) for part in item):
        return ", ".join(_told(part) for part in item)
    if isinstance(item, dict | list):
        return json.dumps(item, ensure_ascii=False)
    return str(item)


# --- Prose ----------------------------------------------------------------------------------------


@register.filter
def prose(text: str) -> SafeString:
    """A small part of Markdown: headings, lists, **strong**, _stressed_, `code`. Never raw HTML."""
    blocks = re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip())
    return format_html_join(
        "\n", "{}", ((_block(part),) for block in blocks for part in _parts(block))
    )


def _parts(block: str) -> list[list[str]]:
    """Lines of one block, parted where their kind changes: a heading ends with its line."""
    parts: list[list[str]] = []
    for line in block.split("\n"):
        same = parts and _kind(parts[-1][0]) == _kind(line) != "heading"
        if same:
            parts[-1].append(line)
        elif line.strip():
            parts.append([line])
    return parts


def _kind(line: str) -> str:
    if re.match(r"#{1,6} ", line):
        return "heading"
    if re.match(r"\s*\d+\. ", line):
        return "ol"
    return "ul" if re.match(r"\s*[-*] ", line) else "text"


def _block(lines: list[str]) -> SafeString:
    kind = _kind(lines[0])
    match kind:
        case "heading":
            # Its own page has an h1 and its section an h2.
            level = min(6, len(lines[0]) - len(lines[0].lstrip("#")) + 2)
            words = _inline(lines[0].lstrip("# "))
            return format_html("<h{}>{}</h{}>", level, words, level)
        case "ul" | "ol":
            items = ((_inline(re.sub(r"^\s*([-*]|\d+\.) ", "", line)),) for line in lines)
            inner = format_html_join("", "<li>{}</li>", items)
            return format_html("<{}>{}</{}>", kind, inner, kind)
    return format_html("<p>{}</p>", _inline("\n".join(lines)))


def _inline(text: str) -> SafeString:
    escaped = str(conditional_escape(text))
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    escaped = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
    escaped = re.sub(r"(?<!\w)_([^_]+)_(?!\w)", r"<em>\1</em>", escaped)
    return mark_safe(escaped)  # noqa: S308 - escaped first; only the tags above were put in
