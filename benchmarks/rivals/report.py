"""The tables in words: ours, the others, how many times ours theirs is, and whether ours keeps its
limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from benchmarks.rivals.contenders import OURS
from benchmarks.rivals.figures import ENOUGH, interval, share

Row = dict[str, Any]
Keeps = Callable[[Row], Iterable[str]]  # each figure that has a limit, and whether it is kept
LIMIT_STEP, LIMIT_KILL_S, LIMIT_STEPS = 0.01, 0.3, 2
LIMIT_SILENT_S = 2.0 + 0.5  # PEER_SILENT_S of runtime/replica/roster.py, and a margin
#: In jobs of their own even DDP over itself differs by more than the limit.
TOGETHER = "the same processes"


def lines(results: dict[str, Any]) -> Iterator[str]:
    """All tables of what was measured."""
    last = ""
    makers = (
        ("healthy", _healthy),
        ("kill", _kill),
        ("kill", _samples),
        ("silent", _silent),
        ("silent", _samples),
        ("rejoin", _rejoin),
    )
    for part, make in makers:
        if part not in results:
            continue
        if (machine := _machine(results["machines"][part])) != last:
            yield from ["", machine] if last else [machine]
        last = machine
        yield from make(results[part])


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cores']} cores of {machine['processor']}, torch {machine['torch']}, "
        f"Python {machine['python']}; gloo on the loopback; {machine['day']}"
    )


def _healthy(rows: Sequence[Row]) -> Iterator[str]:
    for (how, replicas), group in _by(rows, "how", "replicas"):
        yield ""
        yield f"A healthy step of {replicas} replicas, {how}"
        yield f"{'':<32}{'a step':>9}{'over DDP':>11}{'95% interval':>22}{'turns':>8}"
        for row in group:
            line = f"{row['name']:<32}{row['step_s'] * 1e3:>6.1f} ms"
            if "over_ddp" in row:
                few = row["low"] is None
                interval = "-" if few else f"{row['low'] - 1:+.1%} to {row['high'] - 1:+.1%}"
                line += f"{row['over_ddp'] - 1:>+11.1%}{interval:>22}{row['turns']:>8}"
            yield line
        if how.endswith(TOGETHER):
            yield from _verdicts(group, _keeps_its_step)
    yield f"limit: ours within {LIMIT_STEP:.0%} with its interval, in {TOGETHER}, seen beside A/A"


def _keeps_its_step(row: Row) -> Iterator[str]:
    if row["low"] is None:
        yield f"{row['over_ddp'] - 1:+.1%}, of too few turns for an interval: MISSED"
    else:
        most = row["high"] - 1
        yield f"{row['over_ddp'] - 1:+.1%}, up to {most:+.1%} ({_at_most(most, LIMIT_STEP, '.0%')})"


def _kill(rows: Sequence[Row]) -> Iterator[str]:
    yield from _losses(rows, _keeps_on_at_a_kill)
    yield f"limit: ours p99 {LIMIT_KILL_S} s, nobody dies. Deadly: kills that took survivors along;"
    yield "their gap has no end, and counts; if lived: the median of the others. Not back: all did"
    yield "not train together again within 30 s"


def _silent(rows: Sequence[Row]) -> Iterator[str]:
    yield from _losses(rows, _keeps_on_in_silence)
    yield f"limit: ours {LIMIT_SILENT_S} s at worst, silence of 2 s and 0.5 s more; nobody dies"


def _keeps_on_at_a_kill(row: Row) -> Iterator[str]:
    if row["made"]:
        p99 = share(_gaps(row), 0.99)
        yield f"p99 {_s(p99)} ({_at_most(p99, LIMIT_KILL_S)})"
    yield from _keeps_all(row)


def _keeps_on_in_silence(row: Row) -> Iterator[str]:
    if row["made"]:
        worst = max(_gaps(row))
        yield f"worst {_s(worst)} ({_at_most(worst, LIMIT_SILENT_S)})"
    yield from _keeps_all(row)


def _keeps_all(row: Row) -> Iterator[str]:
    missing = row["wanted"] - row["made"]
    none = not (row["died"] or row["hung"] or row["not_back"] or missing)
    yield (
        f"{row['died']} died, {row['hung']} hung, {row['not_back']} not back, {missing} not made "
        f"(all 0: {_kept(none)})"
    )


def _losses(rows: Sequence[Row], keeps: Keeps) -> Iterator[str]:
    for (fault, traffic, replicas), group in _by(rows, "fault", "traffic", "replicas"):
        yield ""
        yield f"{fault} of one of {replicas} replicas, {traffic}: survivors' longest gap"
        yield (
            f"{'':<32}{'times':>10}{'deadly':>8}{'died':>6}{'hung':>6}{'not back':>10}"
            f"{'median':>10}{'p99':>9}{'worst':>9}{'of ours':>9}{'if lived':>10}{'a step':>10}"
        )
        ours = _median(group, OURS.name, "gaps_s")
        for row in group:
            made = f"{row['made']} / {row['wanted']}"
            counts = f"{made:>10}{row['deadly']:>8}{row['died']:>6}{row['hung']:>6}"
            counts += f"{row['not_back']:>10}"
            step = f"{row['step_s'] * 1e3:>7.0f} ms" if row["made"] else ""
            gaps = row["gaps_s"]
            lived = _s(statistics.median(gaps), 10) if gaps else f"{'-':>10}"
            yield f"{row['name']:<32}{counts}{_times(_gaps(row), ours)}{lived}{step}"
        yield from _verdicts(group, keeps)


def _gaps(row: Row) -> list[float]:
    """Those that have no end among them."""
    return [*row["gaps_s"], *[math.inf] * (row["made"] - len(row["gaps_s"]))]


def _samples(rows: Sequence[Row]) -> Iterator[str]:
    for (fault, traffic, replicas), group in _by(rows, "fault", "traffic", "replicas"):
        yield ""
        yield f"{fault} of one of {replicas} replicas, {traffic}: samples of the steps around it"
        yield (
            f"{'':<32}{'steps':>8}{'other batch':>13}{'smallest':>10}{'lost':>7}"
            f"{'computed twice':>16}"
        )
        for row in group:
            found = row["samples"]
            if found["steps"]:
                smallest = f"{found['smallest']} of {row['batch']}"
                yield (
                    f"{row['name']:<32}{found['steps']:>8}{found['other_batch']:>13}{smallest:>10}"
                    f"{found['lost']:>7}{found['computed_twice']:>16}"
                )
            else:
                yield f"{row['name']:<32}{'none: nobody went on':>24}"
        yield from _verdicts(group, _keeps_samples)
    yield "limit: ours 0 lost, no step of another batch"


def _keeps_samples(row: Row) -> Iterator[str]:
    found = row["samples"]
    if not found["steps"]:
        yield "nobody went on: MISSED"
        return
    none = not (found["lost"] or found["other_batch"])
    yield (
        f"{found['lost']} samples lost, {found['other_batch']} steps of another batch "
        f"(both 0: {_kept(none)})"
    )


def _rejoin(rows: Sequence[Row]) -> Iterator[str]:
    for (state, replicas), group in _by(rows, "state", "replicas"):
        yield ""
        yield f"A newcomer to {replicas - 1} replicas, {state}"
        yield (
            f"{'':<32}{'entered':>8}{'median':>10}{'p99':>9}{'worst':>9}{'of ours':>9}"
            f"{'in steps':>10}{'95% interval':>14}{'worst':>7}{'calm':>6}{'in service':>12}"
        )
        ours = _median(group, OURS.name, "gaps_s")
        for row in group:
            entered = len(row["gaps_s"])
            line = f"{row['name']:<32}{entered:>4} / {entered + row['failed']:<2}"
            if entered:
                steps = row["gaps_steps"]
                line += f"{_times(row['gaps_s'], ours)}{statistics.median(steps):>10.1f}"
                line += f"{_interval(steps):>14}"
                calm = statistics.median(row["calm_steps"])
                line += f"{max(steps):>7.1f}{calm:>6.1f}"
                line += f"{statistics.median(row['service_s']):>10.2f} s"
            yield line
        yield from _verdicts(group, _keeps_out_of_the_way)
    yield f"interval: of the median, from {ENOUGH} newcomers on"
    yield f"limit: ours {LIMIT_STEPS} median steps, in the median and at worst. Calm: as long a"
    yield "time before, all replicas there"


def _keeps_out_of_the_way(row: Row) -> Iterator[str]:
    steps = row["gaps_steps"]
    if steps:
        median, worst = statistics.median(steps), max(steps)
        yield f"median {median:.2f} steps ({_at_most(median, LIMIT_STEPS)})"
        yield f"worst {worst:.2f} ({_at_most(worst, LIMIT_STEPS)})"
    yield f"{row['failed']} never entered (0: {_kept(not row['failed'])})"


def _interval(values: Sequence[float]) -> str:
    found = interval(values)
    return "-" if found is None else f"{found[0]:.1f} to {found[1]:.1f}"


def _verdicts(rows: Sequence[Row], keeps: Keeps) -> Iterator[str]:
    """Whether ours keeps each limit, where it is among these."""
    for row in rows:
        if row["name"] == OURS.name:
            yield f"{row['name']}: {', '.join(keeps(row))}"


def _at_most(value: float, limit: float, form: str = "") -> str:
    return f"<= {limit:{form}}: {_kept(value <= limit)}"


def _kept(good: bool) -> str:
    return "kept" if good else "MISSED"


def _times(gaps: Sequence[float], ours: float | None) -> str:
    if not gaps:
        return f"{'-':>10}{'-':>9}{'-':>9}{'-':>9}"
    median = statistics.median(gaps)
    ratio = f"{median / ours:.1f}x" if ours and median < math.inf else "-"
    return f"{_s(median, 10)}{_s(share(gaps, 0.99), 9)}{_s(max(gaps), 9)}{ratio:>9}"


def _s(seconds: float, width: int = 0) -> str:
    return f"{seconds:>{max(width - 2, 0)}.3f} s" if seconds < math.inf else f"{'never':>{width}}"


def _median(rows: Sequence[Row], name: str, key: str) -> float | None:
    found = [row[key] for row in rows if row["name"] == name and row[key]]
    return statistics.median(found[0]) if found else None


def _by(rows: Sequence[Row], *keys: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Rows in groups that have these alike, in their order."""
    for values, group in groupby(rows, key=lambda row: tuple(row[key] for key in keys)):
        yield values, list(group)
