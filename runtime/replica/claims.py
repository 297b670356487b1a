"""What members tell of an epoch that the coordinator's record does not know.

A record that was lost, or a coordinator on another machine: the epoch is taken from a majority of
its members, else from a person. Standard library only; decides nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.replica.connection import Peer


@dataclass(frozen=True)
class Claim:
    """One member's word."""

    placement: str
    epoch: int
    members: dict[int, str]  # replica -> placement, of that epoch
    step: int


class Claims:
    """By replica; only those whose connection stands."""

    def __init__(self, *, any_claim: bool) -> None:
        """`any_claim`: one member's word is enough, for a person says so."""
        self._any = any_claim
        self._claims: dict[int, Claim] = {}
        self._since = 0.0
        self._told = False

    def __bool__(self) -> bool:
        return bool(self._claims)

    def add(self, peer: Peer, epoch: int, members: Mapping[str, Any], now: float) -> None:
        if not self._claims:
            self._since, self._told = now, False
        named = {int(replica): str(name) for replica, name in members.items()}
        self._claims[peer.replica] = Claim(peer.placement, epoch, named, peer.step)

    def forget(self, replica: int) -> None:
        self._claims.pop(replica, None)

    def clear(self) -> None:
        self._claims.clear()

    def of(self, epoch: int) -> dict[int, Claim]:
        """Who says that it is a member of this epoch."""
        return {
            replica: claim
            for replica, claim in self._claims.items()
            if claim.epoch == epoch and claim.members.get(replica) == claim.placement
        }

    def outranks(self, replica: int, epoch: int) -> bool:
        """Whether this replica's number is claimed as of a later epoch."""
        claim = self._claims.get(replica)
        return claim is not None and claim.epoch > epoch

    def decided(self) -> Claim | None:
        """The highest epoch that is told of, with its furthest step, if enough members tell it."""
        if not self._claims:
            return None
        epoch = max(claim.epoch for claim in self._claims.values())
        tellers = self.of(epoch)
        if not tellers:
            return None
        furthest = max(tellers.values(), key=lambda claim: claim.step)
        enough = self._any or 2 * len(tellers) > len(furthest.members)
        return furthest if enough else None

    def overdue(self, now: float, limit_s: float) -> list[str]:
        """What to tell a person, once, if members have waited for so long."""
        if not self._claims or self._told or now - self._since < limit_s:
            return []
        self._told = True
        epoch = max(claim.epoch for claim in self._claims.values())
        tellers = self.of(epoch)
        members = sorted(next(iter(tellers.values())).members) if tellers else []
        return [
            f"the coordinator's record does not know epoch {epoch}, and only replicas "
            f"{sorted(tellers)} of its members {members} are here: bring back a majority, or if "
            "the others are surely dead start the coordinator with --adopt any"
        ]
