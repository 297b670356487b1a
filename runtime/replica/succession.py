"""Which process holds a replica's number: the newest start that was let in, for good.

A process that was stopped or cut off may wake after its successor was started; it must never take
the place back. Standard library only.
"""

from __future__ import annotations

from runtime.replica.record import Record


class Superseded(str):
    """Why a process may not join, and never will: another has its place."""

    __slots__ = ()


MAX_SUPERSEDED = 256  # processes older than that many restarts have long ended


class Succession:
    """Who last held each number, and the placements that may never come back."""

    def __init__(self, record: Record) -> None:
        self.holders: dict[int, str] = dict(record.members)
        self.superseded: list[str] = list(record.superseded)

    def refusal(self, replica: int, placement: str, was_member: bool) -> str:
        """Why this placement may not join, or nothing.

        Who was a member once and holds no place is refused too: our memory of it may be lost.
        """
        holder = self.holders.get(replica, placement)
        if placement in self.superseded or (was_member and holder != placement):
            by = "another start" if holder == placement else holder  # which nobody remembers
            return Superseded(f"{placement} was replaced by {by}: this process must end")
        return ""

    def take(self, replica: int, placement: str) -> str:
        """Give the number to this placement. Returns the one it had before, if another."""
        before = self.holders.get(replica, placement)
        self.holders[replica] = placement
        if before == placement:
            return ""
        self.superseded = [*self.superseded, before][-MAX_SUPERSEDED:]
        return before

    def stand_by(self, placement: str) -> None:
        """It holds no number: of one that it was given it never heard."""
        self.holders = {n: name for n, name in self.holders.items() if name != placement}
