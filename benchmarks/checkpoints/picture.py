"""Two pictures in one: the stall of every save, and how long until it was durable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from benchmarks.checkpoints.contenders import MEMCPY
from benchmarks.checkpoints.report import figures_of
from benchmarks.rivals.plot import Panel, Strip, draw


def svg(results: dict[str, Any]) -> str:
    """The picture of what was measured."""
    rows = results["rows"]
    return draw(
        [
            Panel(
                "What the training thread waits for a save",
                (0.1, 1, 10, 100, 1000, 10_000),
                "ms",
                _strips(rows, "stall_s", 1e3, "ms"),
            ),
            Panel(
                "From the call until the disk has it",
                (0.05, 0.1, 0.3, 1, 3, 10, 30),
                "s",
                _strips([row for row in rows if row["name"] != MEMCPY.name], "durable_s", 1, "s"),
            ),
        ]
    )


def _strips(rows: Sequence[dict[str, Any]], key: str, scale: float, unit: str) -> list[Strip]:
    strips: list[Strip] = []
    for size, group in groupby(rows, key=lambda row: float(row["size_gib"])):
        strips.append(Strip(f"{size:g} GiB", [], heading=True))
        alike = list(group)
        for row in alike:
            median = figures_of(row, alike)[key] * scale
            dots = [save[key] * scale for save in row["later"]]
            shown = f"{float(f'{median:.3g}'):,g}"  # three figures, and no exponent
            strips.append(Strip(row["name"], dots, f"median {shown} {unit}"))
    return strips
