"""Where a lost replica returns: every option with its cost, and the choice. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workers.placement import Choice

Strategy = Literal["in_place", "on_spare", "wait"]


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint of one tier."""

    tier: str
    step: int
    #: So many seconds of training came after it: who goes on from it makes them again.
    behind_s: float
    #: Another node reaches it too.
    everywhere: bool


@dataclass(frozen=True)
class Situation:
    """What the choice rests on. Times in seconds."""

    node_fit: bool
    spare: Choice | None
    survivors: int
    replicas: int
    gpus_per_replica: int
    #: Process start, import and state fetch, as measured at this job's earlier starts.
    start_s: float
    #: What moving to another node costs on top: nothing is cached there.
    move_s: float = 1.0
    #: Its node's cards want a reset: staying means another interruption later.
    reset_pending: bool = False
    #: What there is to go on from where no survivor holds the state in its memory.
    saved: tuple[Saved, ...] = ()
    #: How long the job has trained: what is made again where nothing was saved.
    trained_s: float = 0.0


@dataclass(frozen=True)
class Option:
    """A way in which the replica may return, with its estimated cost."""

    strategy: Strategy
    possible: bool
    #: GPU-seconds of the lost replica until it trains again; survivors cover its shards meanwhile.
    gpu_seconds: float | None
    reason: str


@dataclass(frozen=True)
class Decision:
    """The way that was chosen, why, and all options that were weighed."""

    strategy: Strategy
    reason: str
    options: tuple[Option, ...]


def decide(situation: Situation) -> Decision:
    """Choose the cheapest possible way back; `wait` where there is none yet."""
    options = (_on_spare(situation), _in_place(situation), _wait(situation))
    priced = [o for o in options if o.possible and o.gpu_seconds is not None]
    best = min(priced, key=lambda o: o.gpu_seconds or 0.0) if priced else options[-1]
    return Decision(best.strategy, best.reason, options)


def expected_start_s(earlier: Sequence[float], default: float = 10.0) -> float:
    """The median of what earlier starts took, from command to first commit; `default` if none."""
    ordered = sorted(max(0.0, taken) for taken in earlier)
    return ordered[len(ordered) // 2] if ordered else default


def shown(saved: Sequence[Saved]) -> str:
    """The newest checkpoint of each tier, in words."""
    return (
        "; ".join(
            f"{one.tier}: step {one.step}, {one.behind_s:.0f} s before its last step"
            + ("" if one.everywhere else ", on its own node alone")
            for one in saved
        )
        or "none"
    )


def _in_place(situation: Situation) -> Option:
    if not situation.node_fit:
        return Option("in_place", False, None, "the node is unfit")
    again, from_what = _made_again(situation, situation.saved)
    cost = situation.start_s * situation.gpus_per_replica + again
    if situation.reset_pending:
        reason = "the node can go on, but its cards want a reset, which will interrupt it again"
        later = (situation.start_s + situation.move_s) * situation.gpus_per_replica
        return Option("in_place", True, cost + later, f"{reason}{from_what}")
    reason = "the node is healthy: restart the process there"
    return Option("in_place", True, cost, f"{reason}{from_what}")


def _on_spare(situation: Situation) -> Option:
    if situation.spare is None:
        return Option("on_spare", False, None, "no node is free")
    reached = [one for one in situation.saved if one.everywhere]
    again, from_what = _made_again(situation, reached)
    cost = (situation.start_s + situation.move_s) * situation.gpus_per_replica + again
    return Option("on_spare", True, cost, f"{situation.spare.reason}{from_what}")


def _wait(situation: Situation) -> Option:
    meanwhile = "survivors cover its shards" if situation.survivors else "the job stands still"
    return Option("wait", True, None, f"{meanwhile}; wait until a node is free or repaired")


def _made_again(situation: Situation, reached: Sequence[Saved]) -> tuple[float, str]:
    """GPU-seconds of the whole job, which makes again what came after the newest checkpoint that is
    reached, and this in words. Nothing where survivors hand over what they hold."""
    if situation.survivors:
        return 0.0, ""
    newest = min(reached, key=lambda one: one.behind_s, default=None)
    behind_s = newest.behind_s if newest else situation.trained_s
    from_what = f"from step {newest.step}, {newest.tier}" if newest else "from nothing"
    gpus = situation.gpus_per_replica * situation.replicas
    return behind_s * gpus, f"; it goes on {from_what}, {behind_s:.0f} s of training before"
