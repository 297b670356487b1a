"""What is watched in the readings of one card, or of one port: pure rules with their memory.

Each finding is told once: again only after the reading was well, so that one that wavers about its
bound does not speak all the time. No Django, no I/O, no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Reading = Mapping[str, float | None]

#: What a card says of itself, each told whenever it changes, by the reading's name. One that is
#: well shows 0, but for its remapped rows.
CARD_FLAGS = (
    "remap_pending",
    "remap_failed",
    "sram_over_threshold",
    "recovery_action",
    "remapped_rows",
    "exhausted_banks",
)
#: Below this share of its own baseline a card's NVLink is slow; above the second it is well.
NVLINK_SLOW, NVLINK_WELL = 0.8, 0.9
#: PCIe replays in a minute that a healthy link does not exceed (NVIDIA's DCGM, hardware limits).
PCIE_REPLAYS_A_MINUTE = 8
#: The same for replays and recoveries of NVLinks. DCGM condemns the first one; a link that
#: recovered works, and what is asked for here is a look.
NVLINK_ERRORS_A_MINUTE = 8
#: NVML's clocks event reasons that a healthy card under load does not show: HW slowdown, thermal
#: slowdown by software and by hardware, power brake.
THROTTLE = 0x8 | 0x20 | 0x40 | 0x80
#: A card this near to its own limit, or on its way to it, is too hot, in degrees C; well again that
#: far below. Without a limit of its own: where cards are warned of.
NEAR_LIMIT_C, WELL_BELOW_C = 3.0, 10.0
WARN_C = 80.0
#: A trend counts from here on, this far below the limit: what warms up after a start is no trend.
TREND_FROM_C = 15.0
#: In an hour, for each counter of a port. Symbol errors: InfiniBand's bit error rate of 1e-12 is
#: 120 in an hour; a link that is trained anew, or goes down, is seen by the programs.
PORT_ERRORS_AN_HOUR = {
    "symbol_errors": 120,
    "link_recoveries": 10,
    "link_downs": 3,
    "receive_errors": 120,
    "discards": 1000,
}
#: A flap is so many downs of so many seconds each, within the time; a drop lasts this long (gpud).
FLAP_DOWNS, FLAP_DOWN_S, FLAP_WITHIN_S = 3, 25.0, 6 * 3600.0
DROP_S = 240.0
HOUR_S, MINUTE_S = 3600.0, 60.0
#: What was read is kept of about so many moments of a window.
MOMENTS = 12
#: Corrected memory errors: a window is looked at in so many equal parts, oldest first.
GROWTH_PARTS = 3
#: Fewer corrected errors than this, in each part, are what healthy memory does.
GROWTH_MIN_ERRORS = (3, 10, 30)
#: Each part must hold this many times the errors of the one before.
GROWTH_FACTOR = 2.0


@dataclass(frozen=True)
class Finding:
    """A reading that is not as it should be; `values`: what shows it, by name."""

    reading: str
    values: dict[str, float]


@dataclass
class Bound:
    """Whether a reading stays beyond its bound: for `hold_s` in a row, told once, and again only
    after it was well. Between two bounds it is neither."""

    hold_s: float
    told: bool = False
    _since: float | None = None

    def read(self, at: float, *, beyond: bool, well: bool) -> bool:
        """Take in what it is at this moment (seconds, rising); whether it is to be told now."""
        if well:
            self.told = False
        if not beyond or well:
            self._since = None
            return False
        if self._since is None:
            self._since = at
        if self.told or at - self._since < self.hold_s:
            return False
        self.told = True
        return True


@dataclass
class Rate:
    """Whether a counter rises by more than `limit` within `window_s`: told once, and again only
    after it rose by less than half of that. What it showed at first counts for nothing."""

    limit: float
    window_s: float
    told: bool = False
    _points: list[tuple[float, float]] = field(default_factory=list)
    _last_at: float = 0.0

    def read(self, at: float, count: float) -> float | None:
        """Take in the counter's value at a moment. By how much it rose, if that is to be told."""
        unheard_s, self._last_at = at - self._last_at, at
        if self._points and count < self._points[-1][1]:  # a reset began it anew
            self._points, self.told = [], False
        if not self._points or unheard_s > self.window_s:  # when it rose is not known
            self._points = [(at, count)]
            return None
        begin = bisect_right(self._points, at - self.window_s, key=lambda point: point[0]) - 1
        if begin > 0:
            self._points = self._points[begin:]
        risen = count - self._points[0][1]
        last_at, last = self._points[-1]
        if count > last and at - last_at >= self.window_s / MOMENTS:
            self._points.append((at, count))
        if risen <= self.limit / 2 and at - self._points[0][0] >= self.window_s:
            self.told = False
        if risen <= self.limit or self.told:
            return None
        self.told = True
        return risen


@dataclass
class Trend:
    """Where a reading goes that rises steadily, by its last `window_s` seconds."""

    window_s: float
    _points: list[tuple[float, float]] = field(default_factory=list)

    def note(self, at: float, value: float) -> None:
        """Take in its value at a moment."""
        if self._points and at - self._points[-1][0] < self.window_s / MOMENTS:
            return
        first = bisect_right(self._points, at - self.window_s, key=lambda point: point[0]) - 1
        self._points = [*self._points[max(0, first) :], (at, value)]

    def ahead(self, at: float) -> float | None:
        """What it will be a window from now, if it rises as steadily as it did; None if it does
        not, or before a window is full.

        What warms up to a new load rises ever more slowly: of a window's three parts each must
        rise, and the last at least half as much as the first.
        """
        if not self._points or at - self._points[0][0] < self.window_s:
            return None
        edges = [self._value_at(at - self.window_s * part / 3) for part in (3, 2, 1, 0)]
        first, middle, last = (after - before for before, after in pairwise(edges))
        if min(first, middle, last) <= 0 or last < first / 2:
            return None
        return edges[-1] + (edges[-1] - edges[0])

    def _value_at(self, moment: float) -> float:
        place = bisect_right(self._points, moment, key=lambda point: point[0])
        return self._points[max(0, place - 1)][1]


class CardWatch:
    """One card: its NVLink, its heat, its clocks, its place on the bus."""

    def __init__(
        self, hold_s: float, nvlink_baseline: float = 0.0, told: Collection[str] = ()
    ) -> None:
        """`hold_s`: a reading counts once it has been so for this long. `nvlink_baseline`: the most
        that its links were ever seen to do together, in MB/s. `told`: the readings of which was
        told before: they are told again once they were well."""
        self.nvlink_baseline = nvlink_baseline
        self._nvlink = Bound(hold_s, "nvlink_mb_s" in told)
        self._heat = Bound(hold_s, "temperature_c" in told)
        self._clocks = Bound(hold_s, "throttle_reasons" in told)
        self._lanes = Bound(hold_s, "pcie_lanes" in told)
        self._trend = Trend(5 * hold_s)
        self._replays = Rate(PCIE_REPLAYS_A_MINUTE, MINUTE_S, "pcie_replays" in told)
        self._link_errors = Rate(NVLINK_ERRORS_A_MINUTE, MINUTE_S, "nvlink_errors" in told)

    def read(self, at: float, card: Reading) -> list[Finding]:
        """Take in what it shows at this moment; what is to be told of it now."""
        found = (
            self._read_nvlink(at, card.get("nvlink_mb_s")),
            self._read_heat(at, card.get("temperature_c"), card.get("slowdown_c")),
            self._read_clocks(at, card.get("throttle_reasons")),
            self._read_lanes(at, card.get("pcie_lanes"), card.get("pcie_lanes_max")),
            _rate(self._replays, at, "pcie_replays", card),
            _rate(self._link_errors, at, "nvlink_errors", card),
        )
        return [one for one in found if one is not None]

    def _read_nvlink(self, at: float, mb_s: float | None) -> Finding | None:
        if mb_s is None:
            return None
        self.nvlink_baseline = max(self.nvlink_baseline, mb_s)
        base = self.nvlink_baseline
        slow = self._nvlink.read(
            at, beyond=mb_s < NVLINK_SLOW * base, well=mb_s >= NVLINK_WELL * base
        )
        return Finding("nvlink_mb_s", {"value": mb_s, "baseline": base}) if slow else None

    def _read_heat(self, at: float, heat: float | None, slowdown: float | None) -> Finding | None:
        if heat is None:
            return None
        bound = WARN_C if slowdown is None else slowdown - NEAR_LIMIT_C
        limit = bound if slowdown is None else slowdown
        self._trend.note(at, heat)
        expected = self._trend.ahead(at) if heat >= limit - TREND_FROM_C else None
        rising = expected is not None and expected >= limit
        hot = self._heat.read(
            at, beyond=heat >= bound or rising, well=heat < bound - WELL_BELOW_C and not rising
        )
        if not hot:
            return None
        values = {"value": heat, "limit": limit}
        return Finding("temperature_c", {**values, "expected": round(expected or heat, 1)})

    def _read_clocks(self, at: float, reasons: float | None) -> Finding | None:
        if reasons is None:
            return None
        held = int(reasons) & THROTTLE
        slow = self._clocks.read(at, beyond=held != 0, well=held == 0)
        return Finding("throttle_reasons", {"value": held}) if slow else None

    def _read_lanes(self, at: float, lanes: float | None, most: float | None) -> Finding | None:
        if lanes is None or most is None:
            return None
        fewer = self._lanes.read(at, beyond=lanes < most, well=lanes >= most)
        return Finding("pcie_lanes", {"value": lanes, "most": most}) if fewer else None


class PortWatch:
    """One port of a fabric adapter: its errors, and how it goes down and comes up."""

    def __init__(self, told: Collection[str] = ()) -> None:
        """`told`: the readings of which was told before."""
        self._rates = {
            name: Rate(most, HOUR_S, name in told) for name, most in PORT_ERRORS_AN_HOUR.items()
        }
        self._drop = Bound(DROP_S, "port_drop" in told)
        self.heard_at = math.inf  # when it was last told of
        self._was_up = False  # else nobody has plugged anything in
        self._down_since: float | None = None
        self._downs: list[float] = []  # when each that was long enough ended

    def read(self, at: float, port: Reading) -> list[Finding]:
        """Take in what it shows at this moment; what is to be told of it now."""
        self.heard_at = at
        found = [_rate(rate, at, name, port) for name, rate in self._rates.items()]
        up = port.get("up")
        if up is not None:
            found += [self._read_drop(at, bool(up)), self._read_flaps(at, bool(up))]
        return [one for one in found if one is not None]

    def _read_drop(self, at: float, up: bool) -> Finding | None:
        self._was_up |= up
        down = self._drop.read(at, beyond=not up and self._was_up, well=up)
        return Finding("port_drop", {"value": DROP_S}) if down else None

    def _read_flaps(self, at: float, up: bool) -> Finding | None:
        if not up:
            if self._down_since is None and self._was_up:
                self._down_since = at
            return None
        if self._down_since is None:
            return None
        lasted, self._down_since = at - self._down_since, None
        if lasted < FLAP_DOWN_S:
            return None
        self._downs = [one for one in self._downs if at - one < FLAP_WITHIN_S] + [at]
        if len(self._downs) < FLAP_DOWNS:
            return None
        self._downs.clear()  # it speaks again after as many more
        return Finding("port_flaps", {"value": FLAP_DOWNS})


def _rate(rate: Rate, at: float, name: str, reading: Reading) -> Finding | None:
    count = reading.get(name)
    risen = None if count is None else rate.read(at, count)
    return None if risen is None else Finding(name, {"value": risen, "window_s": rate.window_s})


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
        if errors[-1] < GROWTH_MIN_ERRORS[-1] / 2:
            self._told = False
        if self._told or at - self._since < self.window_s or not accelerates(errors):
            return None
        self._told = True
        return Growth(errors, self.window_s, count)

    def _errors(self, at: float, count: float) -> tuple[float, ...]:
        part = self.window_s / GROWTH_PARTS
        edges = [self._value_at(at - part * back) for back in range(GROWTH_PARTS, 0, -1)] + [count]
        return tuple(edges[i + 1] - edges[i] for i in range(GROWTH_PARTS))

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
    enough = len(errors) == GROWTH_PARTS and all(
        count >= least for count, least in zip(errors, GROWTH_MIN_ERRORS, strict=True)
    )
    return enough and all(later >= GROWTH_FACTOR * earlier for earlier, later in pairwise(errors))
