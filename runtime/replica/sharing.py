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
#: What may be heard of a save.
Outcome = Literal["whole", "share_failed", "alone_failed"]
Who = Literal["nobody", "all", "one"]


class Sharing:
    """What one member knows of the saves to the folder of all."""

    def __init__(self) -> None:
        self._owed = False  # one is due, and none was begun
        self._short = PATIENCE  # edges at which we could have written and not all could
        self._free = False  # we can write one alone at the next edge
        self._under_way: Who = "nobody"  # who writes one that is not known to be whole
        self._failed = False  # the last one that was shared out
        self._turn = 0  # whose it is to write alone: passed on if that fails, or cannot be begun
        self._stuck = 0  # edges at which one was owed and nobody could begin
        self.writer = 0  # the one that was decided on: its place among the members
        self._place = 0  # ours
        #: it is we who write one alone of which the others have not heard what became of it
        self.writes_alone = False
        self._heard: list[Outcome] = []  # what became of ours; from threads of their own
        self._said: list[Outcome] = []  # of that, to the others in the step under way

    def hear(self, outcome: Outcome) -> None:
        """What became of the one that we wrote, or have a share in."""
        self._heard.append(outcome)

    def wishes(
        self, place: int, members: int, *, due: bool, able: bool, free: bool
    ) -> dict[str, Any]:
        """For the next edge. `place`: ours among the members, of which the first speaks. `due`: the
        interval is over, by its clock. `able`: we can write our share then; `free`: or all of
        it."""
        self._place = place
        late = due and self._under_way == "all"
        self._said, self._free = list(self._heard), free
        would = self._failed or late or self._short >= PATIENCE
        return {
            "shared": (place == 0 and due) or self._owed,
            "share": int(able),
            "alone": place == self._turn % members and free and would,
            **dict.fromkeys(self._said, True),
        }

    def decide(self, wishes: Wishes, members: int) -> Who:
        """Who begins to save at this edge; if it is one alone, `writer`."""
        who = self._decide(wishes, members)
        if who == "one":
            self.writes_alone = self.writer == self._place
        elif self._under_way != "one":
            self.writes_alone = False
        return who

    def _decide(self, wishes: Wishes, members: int) -> Who:
        self.writer = self._turn % members
        self._turn += wishes.alone_failed
        del self._heard[: len(self._said)]  # and all have heard it
        self._said = []
        if wishes.share_failed and self._under_way == "all":
            self._under_way, self._failed, self._owed = "nobody", True, True
        elif wishes.whole or wishes.alone_failed:
            self._under_way, self._failed = "nobody", False
        all_can = wishes.share == members
        self._short = 0 if all_can else self._short + self._free
        if not (wishes.shared or wishes.checkpoint):
            return "nobody"
        if not wishes.alone and not all_can:
            self._owed = True
            self._stuck += self._under_way != "one"
            if self._stuck > 2 * PATIENCE:
                self._turn, self._stuck = self._turn + 1, 0
            return "nobody"
        self._owed = self._failed = False
        self._short = self._stuck = 0
        self._under_way = "one" if wishes.alone else "all"
        return self._under_way

    def is_stuck(self) -> bool:
        """Whether one has been owed for long: whose store is busy says so."""
        return self._stuck >= PATIENCE

    @property
    def turn(self) -> int:
        """How often it was passed on who writes alone since the members changed."""
        return self._turn

    def regrouped(self) -> None:
        """There are other members: who is gone writes no share, and who came knows of nothing."""
        self._owed |= self._under_way != "nobody"
        self._under_way = "nobody"
        self.writes_alone = False
        self._turn = self._stuck = 0
        self._heard.clear()
        self._said = []
