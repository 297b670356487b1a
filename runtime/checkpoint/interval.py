"""How often to save: from what a save costs the training, and how often the job fails.

Pure arithmetic, in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

DAY_S = 86_400.0
#: Failures per node and day, before a fleet knows its own: 6.50 in 1,000 node-days on the larger of
#: Meta's two research clusters, 11 months of 16,000 A100 (arXiv 2410.21680).
FAILURES_PER_NODE_DAY = 6.5e-3
NODE_RANKS = 8  # of one node at most, where a job does not say
#: From a failure until the ranks train again: to notice it, start Python, import torch, load.
RESTART_S = 30.0
FIRST_S = 10.0  # between saves until one was measured
LEAST_S, MOST_S = 1.0, 3600.0
MEASURED = 5  # saves of which the median counts; of fewer one may have met an outage
MEANINGLESS = 1e-4  # seconds; a shorter stall is the clock's


def nodes_of(replicas: int, ranks: int, said: int = 1) -> int:
    """At least so many nodes a job has; `said`: on how many each replica is by its launcher."""
    return replicas * max(said, -(-ranks // NODE_RANKS))


def best_interval(stall_s: float, durable_s: float, mtbf_s: float, *, usual: bool = True) -> float:
    """Young's optimum, the square root of twice the stall times the mean time between failures
    (CACM 17(9), 1974); never so short that a tier is written to more than half the time. `usual`:
    saves are known to take so long; else it is an hour at most."""
    young = math.sqrt(2 * max(stall_s, MEANINGLESS) * mtbf_s)
    most_s = max(MOST_S, 2 * durable_s) if usual else MOST_S
    return min(max(young, 2 * durable_s, LEAST_S), most_s)


def expected_ettr(stall_s: float, durable_s: float, interval_s: float, mtbf_s: float) -> float:
    """The share of time in which the job trains what it keeps, 0 to 1: Meta's estimator (arXiv
    2410.21680), where a checkpoint counts once it is durable."""
    lost_s = RESTART_S + interval_s / 2 + durable_s
    return max(0.0, 1 - lost_s / mtbf_s) / (1 + stall_s / interval_s)


class Pace:
    """How often one tier is saved to."""

    def __init__(self, every_s: float | None, nodes: int, rate: Callable[[], float]) -> None:
        """`every_s` None: as often as is best, by what the last saves cost and by the `rate` of
        failures per node and day as it is known by then. Raises ValueError."""
        if every_s is not None and not every_s >= 0:
            raise ValueError(f"every_s is {every_s}; give seconds, or 'auto'")
        if not 0 < rate() < math.inf:
            raise ValueError(f"failures_per_node_day is {rate()}; give a number above 0")
        self._nodes = nodes
        self._rate = rate
        self._fixed_s = every_s
        self._stalls: deque[float] = deque(maxlen=MEASURED)
        self._durable: deque[float] = deque(maxlen=MEASURED)
        self._alone: deque[float] = deque(maxlen=MEASURED)

    def note(self, stall_s: float, durable_s: float, shares: int = 1) -> None:
        """What a save took from the training, and how long it took until it was durable, of which
        we wrote one of so many `shares`."""
        self._alone.append(durable_s * shares)
        self._durable.append(durable_s)  # first: who sees a stall looks here too, on another thread
        self._stalls.append(stall_s)

    @property
    def alone_s(self) -> float | None:
        """How long it takes at most, usually, until a save that one writes alone is durable; None
        before one was measured."""
        return median(self._alone) if self._alone else None

    @property
    def mtbf_s(self) -> float:
        """Mean time between two failures of the job."""
        return DAY_S / (self._nodes * self._rate())

    @property
    def every_s(self) -> float:
        """Seconds between two saves."""
        if self._fixed_s is not None:
            return self._fixed_s
        if not self._stalls:
            return FIRST_S
        usual = len(self._durable) == MEASURED
        stall_s, durable_s = median(self._stalls), median(self._durable)
        return best_interval(stall_s, durable_s, self.mtbf_s, usual=usual)

    @property
    def ettr(self) -> float | None:
        """What is to be expected with this interval; None before a save was measured."""
        every_s = self.every_s
        if not self._stalls or not every_s:
            return None
        return expected_ettr(median(self._stalls), median(self._durable), every_s, self.mtbf_s)
