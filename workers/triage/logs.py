"""One machine's kernel log, judged line by line with what stands near: by the stamps in its lines,
and by their order where there are none.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType

from node_agent.collectors import xid
from workers.triage import nvlink
from workers.triage.catalogue import Catalogue
from workers.triage.lines import (
    ANY,
    ANY_BUT_LINKS,
    CONSEQUENCE,
    DECIDING,
    LOST,
    NOTHING_NEAR,
    NVLINK,
    PROGRAM_CODES,
    RECOVERY_ACTION,
    Near,
    Parsed,
    decided_by,
    judge,
    parse,
    recovery_action,
)
from workers.triage.verdicts import ACTIONS, LineVerdict

#: Lines of one cause stand so near, in seconds; a longer gap begins another burst of a code.
NEAR_S = 180.0
#: The same where lines have no stamps.
NEAR_LINES = 100
DAY_S = 86_400.0
#: Of one code at one place, so many bursts are remembered.
MAX_BURSTS = 50
_EXCEPTION = 13
#: Codes of which the bursts of a day are counted.
IN_BURSTS = frozenset({*PROGRAM_CODES, LOST})
#: What a switch sees of a GPU that is gone, it may see a while later.
SEEN_LATER_S = 600.0
#: So many of one kind are looked at on either side.
AROUND = 3
#: The message of a lost card has three lines, and others may stand between.
_LINES_OF_LOST = 6
#: A machine says so when it boots, or its log does; else its uptime falls.
_BOOT = re.compile(r"\bLinux version \d|^-- (?:Reboot|Boot )")
_FALL_S = 5.0


@dataclass(frozen=True)
class Stamp:
    """When a line was written, by one of several clocks, of which no two can be compared."""

    clock: str  # "up": since the boot; "wall"; "year-less"
    seconds: float
    #: When it was heard last, if its repeats have no lines of their own, and how often.
    until: float | None = None
    count: int = 1

    @property
    def end(self) -> float:
        return self.seconds if self.until is None else self.until


@dataclass(frozen=True)
class Judged:
    """One line that means something."""

    parsed: Parsed
    verdict: LineVerdict


@dataclass(frozen=True)
class _Seen:
    """One observation, and where it stands."""

    number: int  # of the line
    boot: int  # how many times the machine booted in this log before it
    stamp: Stamp | None
    parsed: Parsed

    def apart_s(self, other: _Seen) -> float | None:
        """Seconds from the other, or the repeat of it that is nearest, to this one; None if their
        stamps cannot be compared."""
        if self.stamp is None or other.stamp is None or self.stamp.clock != other.stamp.clock:
            return None
        if self.stamp.clock == "up" and self.boot != other.boot:
            return None
        nearest = min(max(self.stamp.seconds, other.stamp.seconds), other.stamp.end)
        return self.stamp.seconds - nearest

    def outlasts(self, other: _Seen) -> bool:
        """Whether it was heard again after the other was for the last time."""
        if self.stamp is None or other.stamp is None or self.stamp.clock != other.stamp.clock:
            return False
        return self.stamp.until is not None and self.stamp.until > other.stamp.end

    def is_near(self, other: _Seen, within_s: float = NEAR_S) -> bool:
        """Nothing of before a boot is near what came after it."""
        if self.boot != other.boot:
            return False
        apart_s = self.apart_s(other)
        if apart_s is None:
            return abs(self.number - other.number) <= NEAR_LINES
        return abs(apart_s) <= within_s


@dataclass
class _Track:
    """All observations of one kind, in order: which of them are near a line is quick to find."""

    seen: list[_Seen] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def add(self, one: _Seen) -> None:
        self.seen.append(one)
        self.numbers.append(one.number)

    def near(self, one: _Seen) -> list[_Seen]:
        """The nearest ones before the line and after it."""
        at = bisect_left(self.numbers, one.number)
        around = self.seen[max(0, at - AROUND) : at + AROUND + 1]
        return [other for other in around if other.number != one.number and one.is_near(other)]

    def near_before(self, one: _Seen, within_s: float) -> bool:
        at = bisect_left(self.numbers, one.number)
        return at > 0 and one.is_near(self.seen[at - 1], within_s)


@dataclass
class _Bursts:
    """How often a code came at one place, counted in bursts."""

    began: deque[_Seen] = field(default_factory=lambda: deque(maxlen=MAX_BURSTS))
    last: _Seen | None = None
    count: int = 0

    def before(self, one: _Seen) -> int:
        """Bursts of the day before the one that this line belongs to; notes the line."""
        if self.last is None or not one.is_near(self.last):
            self.count = 0
            for other in reversed(self.began):
                apart_s = one.apart_s(other)
                if apart_s is not None and not 0 <= apart_s <= DAY_S:
                    break
                self.count += 1
            self.began.append(one)
        if self.last is None or not self.last.outlasts(one):
            self.last = one
        return self.count


def judge_log(
    lines: Sequence[str],
    catalogue: Catalogue,
    stamps: Sequence[Stamp | None] | None = None,
    elsewhere: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[Judged | None]:
    """What each line of one machine's log means, None where it means nothing. `stamps`: when each
    line was heard, where that is known better than from the lines. `elsewhere`: by code, how many
    other machines said it that day."""
    seen = {one.number: one for one in _observations(lines, stamps)}
    by_card: dict[str, dict[int, _Track]] = defaultdict(lambda: defaultdict(_Track))
    lost, switches = _Track(), _Track()
    for one in seen.values():
        if isinstance(one.parsed, xid.SxidLine):
            switches.add(one)
        code = _code(one.parsed)
        if code in DECIDING:
            by_card[_card(one.parsed)][code].add(one)
        if code is not None and code != CONSEQUENCE:
            by_card[_card(one.parsed)][ANY].add(one)
            if code != NVLINK:
                by_card[_card(one.parsed)][ANY_BUT_LINKS].add(one)
        if code == LOST:
            lost.add(one)
    messages: dict[tuple[str, int], _Seen] = {}  # of switches: the first of their three lines
    parity: dict[tuple[str, int | None], int] = defaultdict(int)
    bursts: dict[tuple[object, ...], _Bursts] = defaultdict(_Bursts)
    for number in range(len(lines)):
        found = seen.get(number)
        if found is None:
            yield None
            continue
        parsed = found.parsed
        if isinstance(parsed, xid.SxidLine):
            parsed = _with_its_message(found, parsed, messages)
        near = _near(found, by_card.get(_card(parsed), {}), lost, switches, catalogue)
        if isinstance(parsed, xid.XidLine):
            if parsed.code in IN_BURSTS:
                place = parsed.place_in_gpu if parsed.code != LOST else None
                count = bursts[parsed.code, _card(parsed), parsed.mig, place].before(found)
                # An exception of a shader that names no place says nothing of the card.
                if parsed.code != _EXCEPTION or place is not None:
                    others = elsewhere.get(parsed.code, 0)
                    near = replace(near, bursts_before=count, other_nodes=others)
            elif parsed.code == NVLINK:
                link = (_card(parsed), parsed.link)
                times = found.stamp.count if found.stamp is not None else 1
                near = replace(near, parity_before=parity[link] + times - 1)
                decoded = nvlink.decode_registers(parsed, catalogue, 0)
                if decoded is not None and decoded.parity:
                    parity[link] += times
        yield Judged(parsed, judge(parsed, catalogue, near))


def _observations(lines: Sequence[str], stamps: Sequence[Stamp | None] | None) -> Iterator[_Seen]:
    boot, up_s = 0, -1.0
    for number, line in enumerate(lines):
        if _BOOT.search(line):
            boot, up_s = boot + 1, -1.0
        parsed = parse(line)
        if parsed is None and xid.named_card(line):
            parsed = _part_of_lost(lines, number)
        elif isinstance(parsed, xid.LostGpu) and not parsed.pci:
            first = max(0, number - _LINES_OF_LOST + 1)
            names = [name for one in lines[first:number] if (name := xid.named_card(one))]
            parsed = replace(parsed, pci=names[-1]) if names else parsed
        if parsed is not None:
            stamp = stamp_of(line) if stamps is None else stamps[number]
            if stamp is not None and stamp.clock == "up":
                boot += stamp.seconds < up_s - _FALL_S
                up_s = stamp.seconds
            yield _Seen(number, boot, stamp, parsed)


def _part_of_lost(lines: Sequence[str], number: int) -> xid.LostGpu | None:
    """The first of the three lines, if the last one follows."""
    for later in lines[number + 1 : number + _LINES_OF_LOST]:
        found = xid.parse(later)
        if isinstance(found, xid.LostGpu) and not found.pci:
            return replace(found, pci=xid.named_card(lines[number]))
    return None


def _with_its_message(
    one: _Seen, parsed: xid.SxidLine, messages: dict[tuple[str, int], _Seen]
) -> xid.SxidLine:
    """The lines with severity and registers are about what the message before them says."""
    key = (parsed.pci, parsed.code)
    if parsed.fatal is not None and not parsed.text.startswith("Severity"):
        messages[key] = one
        return parsed
    message = messages.get(key)
    if message is None or not one.is_near(message):
        return parsed
    said = message.parsed
    assert isinstance(said, xid.SxidLine)  # noqa: S101 - nothing else was put there
    return replace(parsed, fatal=said.fatal, link=said.link, trunk=said.trunk)


def _near(
    one: _Seen, card: dict[int, _Track], lost: _Track, switches: _Track, catalogue: Catalogue
) -> Near:
    """Only what this line's own judgement asks for is looked up."""
    if isinstance(one.parsed, xid.SxidLine):
        return Near(lost_before=lost.near_before(one, SEEN_LATER_S))
    if not isinstance(one.parsed, xid.XidLine) or not one.parsed.pci:
        return NOTHING_NEAR
    there = {
        code: others
        for code in decided_by(one.parsed.code, catalogue)
        if code in card and (others := card[code].near(one))
    }
    switch = one.parsed.code == NVLINK and bool(switches.near(one))
    if not there and not switch:
        return NOTHING_NEAR
    said = [
        recovery_action(other.parsed)
        for other in there.get(RECOVERY_ACTION, ())
        if isinstance(other.parsed, xid.XidLine)
    ]
    return Near(
        codes=frozenset(_code(other.parsed) or 0 for others in there.values() for other in others),
        recovery=strongest(said),
        switch=switch,
    )


def strongest(actions: list[str]) -> str:
    """Of what several XID 154 call for; "" if nothing: one that clears another says nothing of a
    fault beside it."""
    asked = [one for one in actions if one not in ("", "ignore")]
    return max(asked, key=ACTIONS.index, default="")


def _code(parsed: Parsed) -> int | None:
    if isinstance(parsed, xid.XidLine):
        return parsed.code
    return LOST if isinstance(parsed, xid.LostGpu) else None


def _card(parsed: Parsed) -> str:
    """However a line writes its address."""
    if not isinstance(parsed, xid.XidLine | xid.LostGpu):
        return ""
    found = xid.address(parsed.pci)
    return ":".join(map(str, found)) if found is not None else ""


# --- stamps -------------------------------------------------------------------------------------

_RECORD = re.compile(r"\d{1,4},\d{1,20},(?P<us>\d{1,18}),[^;]{0,40};")
_UP = re.compile(r"\[\s*(?P<up>\d{1,10}\.\d{1,9})\s*\]")
_ISO = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[T ](?P<time>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
    r"\s?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_DATED = re.compile(
    r"(?P<month>[^\W\d_]{3,9})\.?\s+(?P<day>\d{1,2}),?\s+(?P<time>\d\d:\d\d:\d\d)"
    r"(?:\.(?P<part>\d{1,9}))?(?:\s+(?P<year>\d{4})\b)?"
)
_DAY_FIRST = re.compile(
    r"\b(?P<day>\d{1,2})\s+(?P<month>[^\W\d_]{3,9})\.?\s+(?P<time>\d\d:\d\d:\d\d)"
)
#: A stamp stands before the driver's or the kernel's words.
_HEAD = 160
#: By the first letters, in the languages of Linux's locales that systems are often run in.
_MONTHS = {
    name: number
    for number, names in enumerate(
        (
            "jan ene gen jän", "feb fév fev févr fevr", "mar mär mrz maa", "apr abr avr",
            "may mai mag mei maj", "jun jui giu juin", "jul lug juil", "aug ago aoû août",
            "sep set", "oct okt ott out", "nov", "dec dez dic déc",
        ),
        start=1,
    )
    for name in names.split()
}  # fmt: skip


def stamp_of(line: str) -> Stamp | None:
    """When a line was written: the wall clock if it says so, else the time since the boot."""
    head = line[:_HEAD]
    if found := _RECORD.match(head):
        return Stamp("up", int(found["us"]) / 1e6)
    if found := _ISO.search(head):
        moment = (
            datetime.fromisoformat(f"{found['date']}T{found['time']}")
            if _is_time(found["date"], found["time"])
            else None
        )
        if moment is not None:
            seconds = moment.replace(tzinfo=UTC).timestamp() - _offset(found["zone"] or "")
            return Stamp("wall", seconds + _fraction(found["part"]))
    if found := _DATED.search(head) or _DAY_FIRST.search(head):
        groups = found.groupdict()
        return _dated(found["month"], found["day"], found["time"], groups.get("year"))
    if found := _UP.search(head):
        return Stamp("up", float(found["up"]))
    return None


def _dated(month: str, day: str, time: str, year: str | None) -> Stamp | None:
    """Without a year only the order within one counts. A month of a language that is not known
    here is taken for the first: then only its days count."""
    name = month.lower()
    number = _MONTHS.get(name[:4]) or _MONTHS.get(name[:3], 1)
    date = f"{year or '2000'}-{number:02d}-{int(day):02d}"
    if not _is_time(date, time):
        return None
    moment = datetime.fromisoformat(f"{date}T{time}").replace(tzinfo=UTC)
    return Stamp("wall" if year else "year-less", moment.timestamp())


def _is_time(date: str, time: str) -> bool:
    try:
        datetime.fromisoformat(f"{date}T{time}")
    except ValueError:
        return False
    return True


def _offset(zone: str) -> float:
    if zone in ("", "Z"):
        return 0.0
    sign = -1.0 if zone[0] == "-" else 1.0
    digits = zone[1:].replace(":", "")
    return sign * (int(digits[:2]) * 3600.0 + int(digits[2:4]) * 60.0)


def _fraction(part: str | None) -> float:
    return float(f"0.{part}") if part else 0.0
