"""The tables in words: every contender beside the limits of this machine."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from benchmarks.checkpoints.contenders import DISK, MEMCPY, OURS
from benchmarks.rivals.figures import share

Row = dict[str, Any]
STALL, FIRST, DURABLE, LOAD = 1.1, 1.5, 0.8, 0.8
#: Copies of the state that may be kept, and how much memory beside them.
STATES, BEYOND_BYTES = 2, 64e6


def lines(results: dict[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    yield (
        f"{machine['cores']} cores of {machine['processor']}, torch {machine['torch']}, "
        f"Python {machine['python']}; steps of {results['step_ms']:g} ms on "
        f"{next((row['card'] for row in results['rows']), '') or 'one thread'}"
    )
    for size, group in groupby(results["rows"], key=lambda row: float(row["size_gib"])):
        yield from _table(size, list(group))
    for name, why in results["failed"].items():
        yield ""
        yield f"{name} failed, and has no row of that size: {why}"
    yield ""
    yield "stall: what the training thread waits in all; first: the first save of a process, and"
    yield "how many of a later one; steps: how much slower work goes until it is over; durable:"
    yield "from the call until the disk has it; load: cold, every byte in memory (ours verified);"
    yield "memory: peak PSS of trainer and helpers over that before, without the page cache; %: of"
    yield "the disk's speed; p99 of fewer than a hundred is the worst"


def _table(size: float, rows: Sequence[Row]) -> Iterator[str]:
    figures = {row["name"]: figures_of(row, rows) for row in rows}
    saves = len(rows[0]["later"])
    yield ""
    yield f"{size:g} GiB; {len(rows[0]['first'])} first saves and {saves} later ones of each"
    yield (
        f"{'':<28}{'stall p50':>11}{'memcpy':>8}{'p99':>11}{'first':>11}{'later':>7}{'steps':>7}"
        f"{'durable':>10}{'disk':>6}{'verified':>10}{'written':>9}{'load':>9}{'disk':>6}{'memory':>9}"
    )
    for name, f in figures.items():
        yield (
            f"{name:<28}{_ms(f['stall_s'])}{_times(f['of_memcpy'])}{_ms(f['stall_p99_s'])}"
            f"{_ms(f['first_s'])}{_times(f['first_of_later'], 7)}{_more(f['slower'])}"
            f"{_s(f['durable_s'], 10)}{_share(f['of_disk'])}{_s(f['verified_s'], 10)}"
            f"{_gb(f['bytes'])}{_s(f['load_s'], 9)}{_share(f['of_reads'])}{_gb(f['memory_bytes'])}"
        )
    for one in OURS:
        if one.name in figures:
            yield f"{one.name}: {', '.join(_verdicts(figures[one.name]))}"


def figures_of(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Medians of a row, beside the limits measured in the same run."""
    stalls = [save["stall_s"] for save in row["later"]]
    first = statistics.median(save["stall_s"] for save in row["first"])
    stall = statistics.median(stalls)
    durable, load = _median(row["later"], "durable_s"), statistics.median(row["load_s"])
    memcpy, disk = _named(rows, MEMCPY.name), _named(rows, DISK.name)
    touches_disk = row is not memcpy
    return {
        "prepare_s": statistics.median(row["prepare_s"]),
        "stall_s": stall,
        "stall_p99_s": share(stalls, 0.99),
        "first_s": first,
        "first_of_later": first / stall,
        "first_durable_of_later": (_median(row["first"], "durable_s") or 0) / (durable or 1),
        "of_memcpy": stall / (_median(memcpy["later"], "stall_s") or stall) if memcpy else None,
        "slower": _median(row["later"], "slower"),
        "durable_s": durable if touches_disk else None,
        "of_disk": _of(disk, "later", durable) if touches_disk else None,
        "verified_s": _median(row["later"], "verified_s"),
        "bytes": _median(row["later"], "bytes") or 0,
        "load_s": load if touches_disk else None,
        "of_reads": _of(disk, "load_s", load) if touches_disk else None,
        "memory_bytes": row.get("memory_bytes", 0),
        "beyond_states": row.get("memory_bytes", 0) - STATES * row["state_bytes"],
    }


def _verdicts(found: dict[str, Any]) -> Iterator[str]:
    kept = (
        ("stall", found["of_memcpy"], STALL, "x memcpy", True),
        ("first save", found["first_of_later"], FIRST, "x later", True),
        ("durable at", found["of_disk"], DURABLE, " of the disk", False),
        ("load at", found["of_reads"], LOAD, " of its reads", False),
    )
    for what, value, limit, unit, at_most in kept:
        if value is not None:
            good = value <= limit if at_most else value >= limit
            sign = "<=" if at_most else ">="
            yield f"{what} {value:.2f}{unit} ({sign} {limit}: {'kept' if good else 'MISSED'})"
    beyond, limit = (size / 1e6 for size in (found["beyond_states"], BEYOND_BYTES))
    good = "kept" if beyond <= limit else "MISSED"
    yield f"memory {beyond:+.0f} MB beyond {STATES} states (<= {limit:.0f}: {good})"
    yield f"room made in {found['prepare_s']:.2f} s before"


def _named(rows: Sequence[Row], name: str) -> Row | None:
    return next((row for row in rows if row["name"] == name), None)


def _of(disk: Row | None, key: str, seconds: float | None) -> float | None:
    """The disk's own time as a share of these seconds."""
    if disk is None or not seconds:
        return None
    own = statistics.median(disk["load_s"]) if key == "load_s" else _median(disk[key], "durable_s")
    return (own or 0.0) / seconds


def _median(saves: Sequence[Row], key: str) -> float | None:
    found = [save[key] for save in saves if save[key] is not None]
    return statistics.median(found) if found else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:>8.1f} ms"


def _s(seconds: float | None, width: int) -> str:
    return f"{'-':>{width}}" if seconds is None else f"{seconds:>{width - 2}.2f} s"


def _gb(size: float) -> str:
    return f"{size / 1e9:>6.2f} GB" if size >= 5e6 else f"{'-':>9}"


def _times(value: float | None, width: int = 8) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width - 1}.2f}x"


def _share(value: float | None) -> str:
    return f"{'-':>6}" if value is None else f"{value:>6.0%}"


def _more(value: float | None) -> str:
    return f"{'-':>7}" if value is None else f"{value:>+7.0%}"
