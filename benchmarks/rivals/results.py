"""Who is measured how often, and what is kept of it: plain values that JSON can hold."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.rivals import contenders as who
from benchmarks.rivals.contenders import Contender
from benchmarks.rivals.figures import interval, together
from benchmarks.rivals.measuring import (
    Bench,
    Loss,
    Rejoin,
    Turns,
    healthy,
    healthy_together,
    losses,
    rejoin,
)
from benchmarks.rivals.task import BLACK_HOLE, GLOBAL_BATCH, KILL, STOP, TRAFFIC, Fault, State

PARTS = ("healthy", "kill", "silent", "rejoin")
BLOCKS = 4  # into which a contender's faults are divided


@dataclass(frozen=True)
class Plan:
    """How often what is done."""

    replicas: int
    rounds: int  # of jobs of their own
    turns: int  # of ours and plain DDP in the same processes
    our_kills: int
    rival_kills: int
    default_kills: int  # of a rival as it comes, which takes five times as long
    our_stops: int  # and as many black holes
    rival_stops: int
    default_stops: int
    rejoins: int
    states: tuple[State, ...]


def measure(
    plan: Plan, part: str, folder: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The rows of one of the parts."""
    who.install_rivals()
    bench = Bench(folder, plan.replicas, seed=1)
    run = {"healthy": _healthy, "kill": _kill, "silent": _silent, "rejoin": _rejoin}
    try:
        return run[part](bench, plan, say)
    finally:
        bench.end()


def machine() -> dict[str, Any]:
    """What rows are measured on, and when."""
    text = Path("/proc/cpuinfo").read_text()
    models = [line.split(": ")[1] for line in text.splitlines() if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": len(models),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "day": time.strftime("%Y-%m-%d"),
    }


def _healthy(bench: Bench, plan: Plan, say: Callable[[str], None]) -> list[dict[str, Any]]:
    others = [
        who.DDP_AGAIN, who.OURS, who.OURS_REPRODUCIBLE, who.TORCHFT_PATIENT, who.NIGHTLY_PATIENT,
    ]  # fmt: skip
    rows = []
    for traffic, rounds in (("light", plan.rounds), ("heavy", plan.rounds // 2)):
        say(f"a healthy step, {traffic}: {rounds} rounds")
        references, found = healthy(bench, who.DDP, others, rounds, TRAFFIC[traffic])
        rows += _healthy_rows(f"{traffic}, jobs of their own", references, found, plan)
    for traffic, turns in (("light", plan.turns), ("heavy", plan.turns // 3)):
        say(f"a healthy step, {traffic}: {turns} turns of ours and plain DDP")
        references, found = healthy_together(bench, who.BOTH, turns, TRAFFIC[traffic])
        rows += _healthy_rows(f"{traffic}, the same processes", references, found, plan)
    return rows


def _healthy_rows(
    how: str, references: Sequence[float], found: dict[str, Turns], plan: Plan
) -> list[dict[str, Any]]:
    common = {"how": how, "replicas": plan.replicas}
    rows = [{**common, "name": who.DDP.name, "step_s": statistics.median(references)}]
    for name, turns in found.items():
        low, high = interval(turns.over_ddp) or (None, None)
        rows.append(
            {
                **common,
                "name": name,
                "step_s": statistics.median(turns.seconds),
                "over_ddp": statistics.median(turns.over_ddp),
                "low": low,
                "high": high,
                "turns": len(turns.seconds),
            }
        )
    return rows


def _kill(bench: Bench, plan: Plan, say: Callable[[str], None]) -> list[dict[str, Any]]:
    rivals = [who.TORCHFT, who.TORCHFT_NIGHTLY]
    brisk = [who.TORCHFT_BRISK, who.NIGHTLY_BRISK]
    as_they_come = [who.TORCHFT_DEFAULT, who.NIGHTLY_DEFAULT, who.DDP]
    rows = []
    # Of three replicas each is a neighbour of the dead one and hears at once: torchft's best case.
    for replicas, traffic, ours, theirs, others in (
        (plan.replicas, "light", plan.our_kills, rivals, as_they_come),
        (plan.replicas, "heavy", plan.our_kills, brisk, as_they_come),
        (3, "light", plan.rival_kills // 4, rivals, []),
        (3, "heavy", plan.rival_kills // 4, rivals, []),
    ):
        bench.replicas = replicas
        wanted = {
            who.OURS: ours,
            **dict.fromkeys(theirs, min(ours, plan.rival_kills)),
            **dict.fromkeys(others, plan.default_kills),
        }
        rows += _losses(bench, KILL, traffic, wanted, say)
    bench.replicas = plan.replicas
    return rows


def _silent(bench: Bench, plan: Plan, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Plain DDP has no part in it: unless told otherwise it waits half an hour."""
    wanted = {
        who.OURS: plan.our_stops,
        **dict.fromkeys([who.TORCHFT, who.TORCHFT_NIGHTLY], plan.rival_stops),
        **dict.fromkeys([who.TORCHFT_DEFAULT, who.NIGHTLY_DEFAULT], plan.default_stops),
    }
    return [
        row for fault in (STOP, BLACK_HOLE) for row in _losses(bench, fault, "light", wanted, say)
    ]


def _losses(
    bench: Bench,
    fault: Fault,
    traffic: str,
    wanted: dict[Contender, int],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """So many faults of each contender, in turns; a row for each that has any."""
    found: dict[Contender, list[Loss]] = {
        contender: [] for contender in wanted if wanted[contender]
    }
    for block, contender in product(range(BLOCKS), found):
        times = wanted[contender]
        here = times * (block + 1) // BLOCKS - times * block // BLOCKS
        if here:
            say(f"{fault.name}, {traffic}, {bench.replicas} replicas: {here} of {contender.name}")
            found[contender] += losses(bench, contender, TRAFFIC[traffic], fault, here)
    common = {"fault": fault.name, "traffic": traffic, "replicas": bench.replicas}
    return [
        {**common, "name": contender.name, "wanted": wanted[contender], **_loss_row(those)}
        for contender, those in found.items()
    ]


def _loss_row(those: Sequence[Loss]) -> dict[str, Any]:
    return {
        "made": len(those),
        "step_s": statistics.median([loss.step_s for loss in those]) if those else None,
        "gaps_s": [loss.gap_s for loss in those if loss.gap_s is not None],
        "died": sum(loss.died for loss in those),
        "deadly": sum(loss.died > 0 for loss in those),
        "hung": sum(loss.hung for loss in those),
        "not_back": sum(not loss.back for loss in those),
        "batch": GLOBAL_BATCH,
        "samples": asdict(together([loss.samples for loss in those])),
        "words": next((loss.words for loss in those if loss.words), ""),
    }


def _rejoin(bench: Bench, plan: Plan, say: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for state in plan.states:
        found: dict[str, list[Rejoin | None]] = {}
        for number in range(plan.rejoins):
            for contender in (who.OURS, who.TORCHFT_PATIENT, who.NIGHTLY_PATIENT):
                say(f"newcomer {number + 1}, {state}: {contender.name}")
                one = rejoin(bench, contender, state)
                found.setdefault(contender.name, []).append(one)
        rows += [_rejoin_row(name, state, those, plan) for name, those in found.items()]
    return rows


def _rejoin_row(
    name: str, state: State, those: Sequence[Rejoin | None], plan: Plan
) -> dict[str, Any]:
    entered = [one for one in those if one is not None]
    return {
        "name": name,
        "state": str(state),
        "replicas": plan.replicas,
        "failed": len(those) - len(entered),
        "step_s": statistics.median([one.step_s for one in entered]) if entered else None,
        "gaps_s": [one.gap_s for one in entered],
        "gaps_steps": [one.gap_s / one.step_s for one in entered],
        "calm_steps": [one.calm_s / one.step_s for one in entered],
        "service_s": [one.service_s for one in entered],
    }
