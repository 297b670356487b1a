"""Whether all members hold the same state, as they must after each step.

Standard library only. Nothing that a replica computes shows it that its memory or its card made an
error in silence: only the others do.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from runtime.replica.connection import Peer

log = logging.getLogger("drydock.coordinator")


class Comparison:
    """Digests of members' state after one step, until all that compare theirs are known."""

    def __init__(self) -> None:
        self._of = (0, -1)  # epoch and step: a job that went back makes a step anew
        self._digests: dict[int, str] = {}
        #: all are to compare theirs soon: a newcomer differs from one member, or what some of them
        #: hold was not compared lately
        self.doubt = False

    def hear(
        self, replica: int, epoch: int, step: int, digest: str, members: Iterable[int]
    ) -> dict[int, str] | None:
        """One member's; the digests of all these `members` once the last one is there, None
        before."""
        if (epoch, step) < self._of:
            return None  # it comes late: others have gone on
        if (epoch, step) != self._of:
            self._of, self._digests = (epoch, step), {}
        self._digests[replica] = digest
        states = {one: self._digests[one] for one in members if one in self._digests}
        if set(states) != set(members):
            return None
        self._digests = {}
        return states


def most_common(states: Mapping[int, str]) -> str:
    """What most members hold; of equally many, what the lowest one of them holds."""
    ((digest, _count),) = Counter(states[one] for one in sorted(states)).most_common(1)
    return digest


def odd_ones(states: Mapping[int, str]) -> list[int]:
    """Who does not hold what more than half of all hold; nobody where no state is held so."""
    common = most_common(states)
    odd = sorted(one for one, digest in states.items() if digest != common)
    return odd if 2 * len(odd) < len(states) else []


def tell_difference(peers: Iterable[Peer], step: int, states: Mapping[int, str]) -> None:
    """If there is one: an engineer has to know."""
    if len(set(states.values())) > 1:
        log.critical("members_differ step=%s states=%s", step, states)
        for peer in peers:
            peer.tell(op="diverged", step=step, states=states, odd=odd_ones(states))
