"""Which nodes are lemons: fit by every check, and yet at the root of far more failures than others.

After Meta's study of its research clusters (Kokolis et al., 2024, arXiv 2410.21680, section on
lemon nodes): seven signals of 28 days, each held against its own distribution over the fleet. There
it found 40 nodes, over 85% of them rightly. Pure: no Django, no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

#: So many days are looked at.
DAYS = 28
#: A node is a lemon from this score on: two signals that count in full, or more that count half.
LEMON = 2.0
#: Where in the fleet's distribution a signal begins to speak.
TAIL = 0.95
#: And how sure it must be that chance alone would not bring as much, were all nodes alike.
CHANCE = 0.001


@dataclass(frozen=True, kw_only=True)
class History:
    """What is on record of one node, over DAYS."""

    #: People said that no work, or no automation, may touch it.
    exclusions: float = 0.0
    #: Faults of hardware, driver or fabric that triage made of its lines and readings.
    xids: float = 0.0
    #: Repairs that were asked for, and cards handed to the vendor.
    tickets: float = 0.0
    #: Times it was taken out of service.
    outs: float = 0.0
    #: Failures of jobs over several nodes that it caused, and of jobs on it alone.
    multi_node_failures: float = 0.0
    single_node_failures: float = 0.0
    #: Of the jobs that ran on it alone, the share that it failed.
    single_node_failure_rate: float = 0.0


#: What each signal counts. What people exclude says little by itself (the same study), and the
#: share of failed jobs says again what their number says.
WEIGHTS: Mapping[str, float] = {
    "exclusions": 0.5,
    "xids": 1.0,
    "tickets": 1.0,
    "outs": 1.0,
    "multi_node_failures": 1.0,
    "single_node_failures": 1.0,
    "single_node_failure_rate": 0.5,
}
SIGNALS = tuple(one.name for one in fields(History))


@dataclass(frozen=True)
class Part:
    """One signal of a node, against the fleet."""

    signal: str
    value: float
    #: From here on it speaks.
    threshold: float
    points: float


@dataclass(frozen=True)
class Score:
    """A node's score, and what it is made of."""

    node: str
    points: float
    parts: tuple[Part, ...]

    @property
    def lemon(self) -> bool:
        return self.points >= LEMON


def score(fleet: Mapping[str, History]) -> list[Score]:
    """Every node's score, the worst first."""
    thresholds = {name: _threshold(name, list(fleet.values())) for name in SIGNALS}
    scores = []
    for node, history in fleet.items():
        parts = []
        for name in SIGNALS:
            value = getattr(history, name)
            speaks = value >= thresholds[name]
            parts.append(Part(name, value, thresholds[name], WEIGHTS[name] * speaks))
        scores.append(Score(node, sum(part.points for part in parts), tuple(parts)))
    return sorted(scores, key=lambda one: (-one.points, one.node))


def _threshold(name: str, fleet: Sequence[History]) -> float:
    """From which value on a signal speaks: beyond TAIL of the fleet, and more than chance brings.

    In a fleet that hardly fails, TAIL alone would make a lemon of whoever failed once. The chance
    is that of a Poisson process at the fleet's own mean, without those beyond TAIL: lemons must not
    hide each other.
    """
    values: list[float] = sorted(getattr(history, name) for history in fleet)
    if not values:
        return math.inf
    tail = values[min(len(values) - 1, math.ceil(TAIL * len(values)))]
    usual = values[: max(1, math.ceil(TAIL * len(values)))]
    if name == "single_node_failure_rate":
        return max(tail, 0.5)
    return max(tail, _more_than_chance(sum(usual) / len(usual)))


def _more_than_chance(mean: float) -> float:
    """The smallest count that a Poisson process of this mean reaches in less than CHANCE."""
    count, below = 0, 0.0
    term = math.exp(-mean)
    while 1.0 - below >= CHANCE:
        below += term
        count += 1
        term *= mean / count
        if term == 0.0:  # beyond the reach of floating point: that far is no chance
            break
    return float(max(2, count))
