"""Who writes what all replicas hold alike to the folder of all: each a share, so that it takes as
long as one share does; or one of them alone, where that would not do.

Every member decides by what was agreed on in the last all-reduce, so all decide the same. What each
can say of itself is whether it sees in its folder what another wrote there: a folder that is not
one is a mistake, but no checkpoint may be lost to it. So the first save of all, and the first after
somebody came, is written by one alone.
"""

from __future__ import annotations

from typing import Any, Literal

from runtime.replica.gradients import Wishes

#: Edges for which a save that is due waits until all can write their share.
PATIENCE = 10


class Sharing:
    """What one member knows of the saves to the folder of all."""

    def __init__(self) -> None:
        self._owed = False  # one is due, and none was begun
        self._short = PATIENCE  # edges at which not all could have written their share
        self._under_way = False  # one that is shared out is not known to be whole
        self._failed = False  # the last one that was shared out
        self._heard: list[int] = []  # what became of ours; from threads of their own
        self._said = 0  # of that, to the others in the step under way

    def hear(self, outcome: int) -> None:
        """What became of the one that we wrote, or have a share in: 1 if it is whole, -1 if ours
        failed."""
        self._heard.append(outcome)

    def wishes(self, *, speaks: bool, due: bool, able: bool) -> dict[str, Any]:
        """For the next edge. `due`: the interval is over, by the clock of the one that `speaks`.
        `able`: we can write our share then."""
        late = due and self._under_way
        self._said = self._heard[0] if self._heard else 0
        return {
            "shared": speaks and (due or self._owed),
            "share": int(able),
            "alone": speaks and (self._failed or late or self._short >= PATIENCE),
            "outcome": self._said,
        }

    def decide(self, wishes: Wishes, members: int) -> Literal["nobody", "all", "one"]:
        """Who begins to save at this edge."""
        if self._said:  # and all have heard it
            del self._heard[0]
            self._said = 0
        if wishes.outcome:
            self._failed = wishes.outcome < 0 and self._under_way
            self._owed |= self._failed
            self._under_way = False
        self._short = 0 if wishes.share == members else self._short + 1
        if not (wishes.shared or wishes.checkpoint):
            return "nobody"
        if not wishes.alone and wishes.share < members:
            self._owed = True
            return "nobody"
        self._owed = self._failed = False
        self._under_way = not wishes.alone
        return "one" if wishes.alone else "all"

    def lost(self) -> None:
        """A member is gone; its share of what was under way will never be there."""
        self._owed |= self._under_way
        self._under_way = False
        self._heard.clear()
        self._said = 0
