"""What a card's sensors say over time: pure rules over counts, and the memory that they need.

No Django, no I/O, no clock. Whoever follows a counter feeds it; what it finds can be judged again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

#: What a card says of itself, each told whenever it changes, by the reading's name. One that is
#: well shows 0, but for its remapped rows.
FLAGS = (
    "remap_pending",
    "remap_failed",
    "sram_over_threshold",
    "recovery_action",
    "remapped_rows",
    "exhausted_banks",
)
#: A window is looked at in so many equal parts, oldest first.
PARTS = 3
#: Counts are kept at this many moments of a window.
MOMENTS = 12
#: Fewer corrected errors than this, in each part, are what healthy memory does.
MIN_ERRORS = (3, 10, 30)
#: Each part must hold this many times the errors of the one before.
GROWTH = 2.0


@dataclass(frozen=True)
class Growth:
    """How many errors came in each part of a window, oldest first, and the counter's value."""

    errors: tuple[float, ...]
    window_s: float
    count: float


@dataclass
class ErrorCounter:
    """One card's counter of corrected errors, as far back as its window.

    It says nothing before it has followed the counter for a whole window, and speaks once: again
    only after the card was reset, or after its errors became few.
    """

    window_s: float
    _since: float = 0.0
    _points: list[tuple[float, float]] = field(default_factory=list)
    _told: bool = False

    def read(self, at: float, count: float) -> Growth | None:
        """Take in the counter's value at a moment (seconds, rising). Its growth if it accelerates.

        A value below the last one is a counter that began anew, with a boot or a reset.
        """
        if not self._points or count < self._points[-1][1]:
            self._since, self._points, self._told = at, [(at, count)], False
            return None
        errors = self._errors(at, count)
        self._keep(at, count)
        if errors[-1] < MIN_ERRORS[-1] / 2:
            self._told = False
        if self._told or at - self._since < self.window_s or not accelerates(errors):
            return None
        self._told = True
        return Growth(errors, self.window_s, count)

    def _errors(self, at: float, count: float) -> tuple[float, ...]:
        part = self.window_s / PARTS
        edges = [self._value_at(at - part * back) for back in range(PARTS, 0, -1)] + [count]
        return tuple(edges[i + 1] - edges[i] for i in range(PARTS))

    def _value_at(self, moment: float) -> float:
        """The last value known at that moment; the first one before that, so nothing is made up."""
        place = bisect_right(self._points, moment, key=lambda point: point[0])
        return self._points[max(0, place - 1)][1]

    def _keep(self, at: float, count: float) -> None:
        last_at, last = self._points[-1]
        if count == last or at - last_at < self.window_s / MOMENTS:
            return
        # One point older than the window says where it began.
        first = bisect_right(self._points, at - self.window_s, key=lambda point: point[0]) - 1
        self._points = [*self._points[max(0, first) :], (at, count)]


def accelerates(errors: Sequence[float]) -> bool:
    """Whether corrected errors come ever faster: their rate and its growth, never their sum.

    A card with many corrected errors at a steady pace works as it should. One whose rate doubles
    again and again is on its way to the first error that cannot be corrected. A steady pace that
    has just begun shows no growth over all the parts.
    """
    enough = len(errors) == PARTS and all(
        count >= least for count, least in zip(errors, MIN_ERRORS, strict=True)
    )
    return enough and all(later >= GROWTH * earlier for earlier, later in pairwise(errors))
