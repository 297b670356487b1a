"""One picture of all parts, as an SVG written by hand: a dot for each measurement, a bar at the
median. Light or dark is left to whoever shows it: the picture has its own ground."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.rivals.report import LIMIT_KILL_S, LIMIT_SILENT_S, LIMIT_STEPS

WIDTH, LEFT, RIGHT = 860, 250, 190
ROW, HEAD, FOOT = 20, 46, 34
COLOURS = {"ours": "#0b7a75", "torchft": "#c2571a", "plain": "#5b6472"}


@dataclass(frozen=True)
class Strip:
    """One line of a panel."""

    name: str
    dots: Sequence[float]
    note: str = ""
    span: tuple[float, float] | None = None  # an interval, where there are no dots
    heading: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    ticks: Sequence[float]  # from the left edge to the right one
    unit: str
    strips: Sequence[Strip]
    limit: float | None = None
    logarithmic: bool = True

    @property
    def height(self) -> int:
        return HEAD + ROW * len(self.strips) + FOOT

    def x(self, value: float) -> float:
        """Where a value lies; what is beyond the edges lies on them."""
        scale: Callable[[float], float] = math.log if self.logarithmic else float
        low, high = scale(self.ticks[0]), scale(self.ticks[-1])
        place = (scale(value) - low) / (high - low)
        return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, place))


def svg(results: dict[str, Any]) -> str:
    """The picture of what was measured."""
    makers = {"kill": _kill, "silent": _silent, "rejoin": _rejoin, "healthy": _healthy}
    return draw([make(results[part]) for part, make in makers.items() if part in results])


def draw(panels: Sequence[Panel]) -> str:
    """Panels, one below the other."""
    height = sum(panel.height for panel in panels) + 12
    body: list[str] = []
    top = 6
    for panel in panels:
        body += _draw(panel, top)
        top += panel.height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


# --- what is shown --------------------------------------------------------------------------------


def _kill(rows: Sequence[dict[str, Any]]) -> Panel:
    title = "SIGKILL of a replica: the survivors' longest time between two commits"
    strips = _losses(rows, lambda row: f"{row['replicas']} replicas, {row['traffic']}")
    return Panel(title, (0.03, 0.1, 0.3, 1, 3, 10), "s", strips, LIMIT_KILL_S)


def _silent(rows: Sequence[dict[str, Any]]) -> Panel:
    title = "A replica falls silent: the survivors' longest time between two commits"
    strips = _losses(rows, lambda row: str(row["fault"]))
    return Panel(title, (1, 2, 3, 5, 10, 20), "s", strips, LIMIT_SILENT_S)


def _losses(
    rows: Sequence[dict[str, Any]], heading_of: Callable[[dict[str, Any]], str]
) -> list[Strip]:
    strips: list[Strip] = []
    for heading, row in _under_headings(rows, heading_of):
        strips += [Strip(heading, [], heading=True)] if heading else []
        whose = "if lived, " if row["deadly"] else ""
        gaps = row["gaps_s"]
        notes = [f"{whose}median {statistics.median(gaps):.2f} s"] if gaps else []
        notes += [f"{row['deadly']} of {row['made']} deadly"] if row["deadly"] else []
        strips.append(Strip(row["name"], row["gaps_s"], ", ".join(notes)))
    return strips


def _rejoin(rows: Sequence[dict[str, Any]]) -> Panel:
    strips: list[Strip] = []
    for heading, row in _under_headings(rows, lambda r: r["state"]):
        strips += [Strip(heading, [], heading=True)] if heading else []
        failed = f"{row['failed']} never entered" if row["failed"] else ""
        service = row["service_s"]
        note = failed or f"in service after {statistics.median(service):.1f} s"
        strips.append(Strip(row["name"], row["gaps_steps"], note))
    title = "A newcomer: the others' longest time between two commits, in median steps"
    return Panel(title, (1, 2, 5, 10, 20, 50, 100), "", strips, LIMIT_STEPS)


def _healthy(rows: Sequence[dict[str, Any]]) -> Panel:
    strips: list[Strip] = []
    compared = [row for row in rows if "over_ddp" in row]
    for heading, row in _under_headings(compared, lambda r: str(r["how"])):
        strips += [Strip(heading, [], heading=True)] if heading else []
        middle, note, span = (row["over_ddp"] - 1) * 100, "", None
        if row["low"] is not None:
            span = ((row["low"] - 1) * 100, (row["high"] - 1) * 100)
            note = f"  ({span[0]:+.1f} to {span[1]:+.1f})"
        strips.append(Strip(row["name"], [middle], f"{middle:+.1f}%{note}", span))
    title = "A healthy step over plain DDP: median and 95% interval"
    return Panel(title, (-20, 0, 20, 40, 60, 80), "%", strips, logarithmic=False)


def _under_headings(
    rows: Sequence[dict[str, Any]], heading: Callable[[dict[str, Any]], str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row, the first of each group with its heading."""
    last = ""
    for row in rows:
        now = heading(row)
        yield ("" if now == last else now), row
        last = now


# --- how ------------------------------------------------------------------------------------------


def _draw(panel: Panel, top: int) -> Iterator[str]:
    bottom = top + HEAD + ROW * len(panel.strips)
    yield _text(12, top + 20, panel.title, size=14, weight="bold")
    for tick in panel.ticks:
        x = panel.x(tick)
        yield _line(x, top + HEAD - 8, x, bottom, "#e3e6ea")
        yield _text(
            x, bottom + 14, f"{tick:g} {panel.unit}".strip(), anchor="middle", colour="#5b6472"
        )
    if panel.limit is not None:
        x = panel.x(panel.limit)
        yield _line(x, top + HEAD - 8, x, bottom, "#b3261e", dashes="4 3")
        yield _text(x + 4, top + HEAD - 10, "ours at most", colour="#b3261e", size=11)
    for number, strip in enumerate(panel.strips):
        yield from _strip(panel, strip, top + HEAD + ROW * number + ROW // 2)


def _strip(panel: Panel, strip: Strip, y: int) -> Iterator[str]:
    if strip.heading:
        yield _text(12, y + 4, strip.name, weight="bold")
        return
    colour = COLOURS.get(strip.name.split()[0].rstrip(",").split("-")[0], "#5b6472")
    yield _text(24, y + 4, strip.name, colour=colour)
    yield _text(WIDTH - RIGHT + 12, y + 4, strip.note, colour="#5b6472", size=11)
    if strip.span is not None:
        low, high = (panel.x(value) for value in strip.span)
        yield _line(low, y, high, y, colour, width=3)
    for value in strip.dots:
        yield f'<circle cx="{panel.x(value):.1f}" cy="{y}" r="3.2" fill="{colour}" opacity="0.35"/>'
    if strip.dots:
        x = panel.x(statistics.median(strip.dots))
        yield _line(x, y - 7, x, y + 7, colour, width=2)


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, *, width: int = 1, dashes: str = ""
) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}" stroke="{colour}" '
        f'stroke-width="{width}"' + (f' stroke-dasharray="{dashes}"' if dashes else "") + "/>"
    )


def _text(
    x: float,
    y: float,
    words: str,
    *,
    colour: str = "#1c2024",
    size: int = 12,
    weight: str = "normal",
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )
