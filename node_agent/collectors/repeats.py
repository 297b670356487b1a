"""Lines that say the same again: told as one, with a count.

A driver may print one fault a hundred thousand times. The first line is told at once; how often it
came again, and when last, is told of now and then.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from node_agent.collectors import host_lines, xid

#: After so long without it the same words are another event, in seconds: another burst.
GAP_S = 180.0
#: A count that grew is told so often at most, in seconds.
TELL_S = 5.0
#: So many different ones are remembered; the one not heard for longest gives way.
MAX_KNOWN = 200

#: What differs between two lines of one fault: places in memory, channels, times.
_VARYING = re.compile(r"0x[0-9a-fA-F_]+|\b[0-9a-fA-F]{8,}\b|\b[0-9]{4,}\b")
#: Codes of which every word says something else: the values are what is decoded.
_VERBATIM = frozenset({74, *range(144, 151), 154})
_DRIVER = re.compile(r"NVRM|nvidia|mce:|Out of memory")


@dataclass
class Told:
    """One event: its first line, and how often it came by now."""

    key: str  # of the first line
    line: str
    first_at: float  # Unix time
    last_at: float
    count: int = 1
    told: int = 0  # the count that was told last
    told_at: float = 0.0


class Repeats:
    """All that were heard of late. What it holds is kept by whoever keeps the log's cursor."""

    def __init__(self, state: list[dict[str, Any]] | None = None) -> None:
        """`state`: what `state` gave. Raises TypeError for anything else."""
        self._known = {meaning_of(one["line"]): Told(**one) for one in state or []}

    def state(self) -> list[dict[str, Any]]:
        """As JSON."""
        return [asdict(one) for one in self._known.values()]

    def clear(self, now: float) -> list[Told]:
        """What is heard from now on is news, whatever was heard before: cards were reset. What is
        still to be told of that."""
        left = [self._tell(one, now) for one in self._known.values() if one.count > one.told]
        self._known.clear()
        return left

    def take(self, key: str, line: str, now: float) -> Told | None:
        """A line that was read. What is to be told of it at once, if anything."""
        meaning = meaning_of(line)
        known = self._known.get(meaning)
        if known is None or not 0 <= now - known.last_at <= GAP_S:
            self._known.pop(meaning, None)
            known = self._known[meaning] = Told(key, line, now, now)
            if len(self._known) > MAX_KNOWN:
                del self._known[min(self._known, key=lambda one: self._known[one].last_at)]
            return self._tell(known, now)
        known.count += 1
        known.last_at = now
        return self._tell(known, now) if now - known.told_at >= TELL_S else None

    def due(self, now: float) -> list[Told]:
        """Whose count grew, and was not told for a while."""
        grown = [one for one in self._known.values() if one.count > one.told]
        return [self._tell(one, now) for one in grown if now - one.told_at >= TELL_S]

    def wait_s(self, now: float) -> float | None:
        """How long until one is due; None if none will be."""
        grown = [one.told_at for one in self._known.values() if one.count > one.told]
        return max(0.0, min(grown) + TELL_S - now) if grown else None

    def _tell(self, one: Told, now: float) -> Told:
        one.told, one.told_at = one.count, now
        return Told(**asdict(one))


def meaning_of(line: str) -> str:
    """Equal for two lines that say the same of the same thing."""
    parsed = xid.parse(line)
    if isinstance(parsed, xid.XidLine):
        text = parsed.text if parsed.code in _VERBATIM else _VARYING.sub("#", parsed.text)
        return f"xid {parsed.code} {parsed.pci} {parsed.mig} {parsed.pid} {text}"
    if isinstance(parsed, xid.SxidLine):
        return f"sxid {parsed.code} {parsed.pci} {parsed.text}"
    if isinstance(parsed, xid.LostGpu):
        return f"lost {parsed.pci} {parsed.text}"
    host = host_lines.parse(line)
    if host is not None:
        return f"{host.kind} {host.subject} {host.corrected}"
    said = _DRIVER.search(line)
    return f"said {_VARYING.sub('#', line[said.start() :] if said else line)}"
