"""Which replicas compute more slowly than their peers, as all members learn from each step's sum.

Pure: no torch, no clock. All members come to the same conclusion; the one that speaks tells it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

#: A straggler takes this many times as long for a shard as its peers do; below the second it is
#: well again.
SLOW, WELL = 1.3, 1.15
#: How much one step counts in the running mean of a replica's time.
WEIGHT = 0.1
#: A step counts for no more than this many times the mean: one long step is no slow replica.
LONGEST = 3.0


@dataclass(frozen=True)
class Pace:
    """How a replica compares to its peers from now on."""

    replica: int
    slow: bool  # False: it keeps up again
    times: float  # as long as its peers, at the median

    def __str__(self) -> str:
        if not self.slow:
            return f"replica {self.replica} keeps up with its peers again"
        return (
            f"replica {self.replica} takes {self.times:.2f} times as long for a shard as its "
            "peers, and all wait for it: look on its node for a throttled card, another program or "
            "slow reads of data; if none is found start it on another node"
        )


class Stragglers:
    """The running pace of each replica, and who was found to be slow."""

    def __init__(self, after_s: float) -> None:
        """`after_s`: whoever is slow for this many seconds in a row is a straggler; 0 for nobody,
        ever."""
        self._after_s = after_s
        self._mean: dict[int, float] = {}  # seconds for a shard, by replica
        self._slow_since: dict[int, float] = {}  # in seconds in which steps were made
        self._told: set[int] = set()
        self._noted_at: float | None = None
        self._step_s = 0.0  # the running mean from one step to the next
        self._trained_s = 0.0

    def note(self, who: Sequence[int], seconds: Sequence[float], now: float) -> list[Pace]:
        """Take in one step: for each shard 1 + the replica that computed it (0: nobody), and how
        long that took; `now` in seconds, rising. What is new of anybody's pace."""
        took: dict[int, list[float]] = defaultdict(list)
        for one, lasted in zip(who, seconds, strict=True):
            if one and lasted > 0:  # 0: it was computed in parts, and not measured
                took[one - 1].append(lasted)
        for replica, times in took.items():
            self._add(replica, sum(times) / len(times))
        there = {one - 1 for one in who if one}
        for known in (self._mean, self._slow_since):
            for gone in set(known) - there:
                del known[gone]
        self._told &= there
        trained_s = self._trained(now)
        news = [self._judge(one, trained_s) for one in sorted(took)] if self._after_s else []
        return [one for one in news if one is not None]

    def _trained(self, now: float) -> float:
        """For how long steps were made by now: while all evaluate, or wait for others, nothing
        shows of anybody's pace."""
        lasted = 0.0 if self._noted_at is None else now - self._noted_at
        self._noted_at = now
        self._step_s = self._step_s or lasted
        lasted = min(lasted, LONGEST * self._step_s)
        self._step_s += WEIGHT * (lasted - self._step_s)
        self._trained_s += lasted
        return self._trained_s

    def _add(self, replica: int, lasted: float) -> None:
        mean = self._mean.get(replica, lasted)
        self._mean[replica] = mean + WEIGHT * (min(lasted, LONGEST * mean) - mean)

    def _judge(self, replica: int, trained_s: float) -> Pace | None:
        peers = [mean for other, mean in self._mean.items() if other != replica]
        times = self._mean[replica] / median(peers) if peers else 1.0
        if times < WELL:
            self._slow_since.pop(replica, None)
            if replica not in self._told:
                return None
            self._told.discard(replica)
            return Pace(replica, slow=False, times=times)
        if times < SLOW:
            self._slow_since.pop(replica, None)  # so many seconds in a row
        if times < SLOW or replica in self._told:
            return None
        if trained_s - self._slow_since.setdefault(replica, trained_s) < self._after_s:
            return None
        self._told.add(replica)
        return Pace(replica, slow=True, times=times)
