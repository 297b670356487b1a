"""From what replicas told to the numbers of the tables: pure functions, times in seconds."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Event:
    """What a replica told: `commit` (step, samples, shards computed), `discard`, `failed`."""

    what: str
    at: float  # monotonic, one clock for all processes of the machine
    data: dict[str, Any]


@dataclass(frozen=True)
class Samples:
    """What became of the samples of a stretch of steps."""

    steps: int  # committed
    other_batch: int  # of these, trained on fewer or more samples than the batch
    smallest: int  # batch
    lost: int  # samples of committed steps that nobody trained on
    computed_twice: int  # samples whose gradient a survivor computed and threw away


def gap(commits: Sequence[float], since: float, until: float) -> float | None:
    """The longest time between two commits that touches this span; None without any."""
    found = [b - a for a, b in pairwise(commits) if b > since and a < until]
    return max(found, default=None)


def median_step(commits: Sequence[float]) -> float | None:
    steps = [b - a for a, b in pairwise(commits)]
    return statistics.median(steps) if steps else None


def account(survivors: Iterable[Sequence[Event]], batch: int, shard_size: int) -> Samples:
    """Sum up the survivors' events of one stretch.

    Where survivors differ on a step, what the most of its samples were applied by counts: the
    others take that state over.
    """
    events = [event for told in survivors for event in told]
    commits = [event for event in events if event.what == "commit"]
    trained: dict[int, int] = {}
    for event in commits:
        step = int(event.data["step"])
        trained[step] = max(trained.get(step, 0), int(event.data["samples"]))
    computed = Counter(
        (event.data["step"], shard)
        for event in events
        if event.what in ("commit", "discard")
        for shard in event.data["shards"]
    )
    return Samples(
        steps=len(trained),
        other_batch=sum(samples != batch for samples in trained.values()),
        smallest=min(trained.values(), default=batch),
        lost=sum(batch - samples for samples in trained.values() if samples < batch),
        computed_twice=sum(times - 1 for times in computed.values()) * shard_size,
    )


def together(parts: Sequence[Samples]) -> Samples:
    """Several stretches as one."""
    return Samples(
        steps=sum(part.steps for part in parts),
        other_batch=sum(part.other_batch for part in parts),
        smallest=min((part.smallest for part in parts), default=0),
        lost=sum(part.lost for part in parts),
        computed_twice=sum(part.computed_twice for part in parts),
    )


def against(turns: Sequence[float], before: Sequence[float], after: Sequence[float]) -> list[float]:
    """Each turn over the mean of the reference's turns before and after it."""
    return [turn / ((a + b) / 2) for turn, a, b in zip(turns, before, after, strict=True)]


#: Of fewer not even the range covers the median in 95 of 100 cases: 1 - 2 * (1/2) ** 5 is 94%.
ENOUGH = 6


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float] | None:
    """The 95% interval of the median, by drawing again from what was seen; None of too few."""
    if len(ratios) < ENOUGH:
        return None
    chance = random.Random(0)  # noqa: S311 - a figure, not a secret
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


def share(values: Sequence[float], part: float) -> float:
    """The smallest value that this part of them does not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]
