"""How newcomers come to hold the members' state: copies held ready, taken, and proven equal.

Standard library only. Decides who may be asked for a copy and who is sent to it, never who trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.replica.comparing import most_common, tell_difference
from runtime.replica.connection import Peer

COPIES = 2


@dataclass
class Staging:
    """Copies of one step's state, held ready by those who have it."""

    asked: set[int]  # replicas that are to hold one
    at_edge: bool  # they were asked one by one where they wait, not through a step's agreement
    step: int = -1
    digests: dict[int, str] = field(default_factory=dict)  # replica -> of its copy
    taken: bool = False  # newcomers were sent to it

    @property
    def complete(self) -> bool:
        return bool(self.asked) and self.asked <= set(self.digests)


class Admission:
    """One round of newcomers after another.

    Two of those who could hold a copy do, so that one may die: a copy costs a step some of its time
    wherever it is made. If the two differ all make one, and what most hold counts.
    """

    def __init__(self) -> None:
        self.staging: Staging | None = None
        self._vote = False
        #: what members may hold for newcomers: copies, more steps than they need themselves, and
        #: wishes to make one; after our own restart nobody knows
        self.copies = self.logs = True

    def advance(
        self,
        takers: Sequence[Peer],
        holders: Sequence[Peer],
        members: Sequence[Peer],
        *,
        at_edge: bool,
    ) -> None:
        """Bring `takers` one message nearer to the state of `holders`.

        `members`: whom a taker must reach, for it is to train with all of them. `at_edge`: the
        holders wait; otherwise they train, and agree in a step on when to copy.
        """
        if self.staging is not None and self.staging.at_edge != at_edge:
            self.interrupt()  # a wish that no step will carry any more, or the reverse
        if not takers:
            return
        if self.staging is None:
            self._ask(holders, at_edge=at_edge)
        elif self.staging.complete and not self.staging.taken:
            self._send(takers, holders, members)

    def release(self, holders: Sequence[Peer], *, wanted: bool, followed: bool) -> None:
        """Free copies that were taken or that no newcomer wants, and steps that none follows.

        To be called only while nobody takes a copy.
        """
        if self.staging is not None and wanted and not self.staging.taken:
            return
        self.staging, self._vote = None, False
        logs = self.logs and not wanted and not followed
        if self.copies or logs:
            for peer in holders:
                peer.tell(op="release", log=logs)
            self.copies, self.logs = False, self.logs and not logs

    def staged(self, peer: Peer, step: int, digest: str) -> None:
        """A copy is held ready; one that was asked for long ago counts no more."""
        staging = self.staging
        if staging is None or peer.replica not in staging.asked or step < staging.step:
            return
        if step > staging.step:
            staging.step = step
            staging.digests.clear()
        staging.digests[peer.replica] = digest

    def not_staged(self, peer: Peer) -> bool:
        """A copy could not be made; whether one was asked for, which is to be asked for anew."""
        if self.staging is None or peer.replica not in self.staging.asked:
            return False
        self.staging = None
        return True

    def forget(self, replica: int) -> None:
        """It is gone, and its copy with it."""
        if self.staging is None or replica not in self.staging.asked:
            return
        self.interrupt()  # all had to agree, and it will not
        if self.staging is not None:
            self.staging.asked.discard(replica)
            self.staging.digests.pop(replica, None)
            if not self.staging.asked:
                self.staging = None

    def returned(self) -> None:
        """A member is back on a new connection: what it was told last, to free what it holds for
        newcomers, may have been lost with the old one."""
        self.copies = self.logs = True

    def interrupt(self) -> None:
        """Whoever was asked may not have heard it, or may never come to do it: ask anew."""
        if self.staging is not None and not self.staging.complete:
            self.staging = None

    def _ask(self, holders: Sequence[Peer], *, at_edge: bool) -> None:
        # The same ones in each round of an epoch: who was asked before and did not come to it acts
        # together with those who are asked now.
        asked = holders if self._vote else holders[:COPIES]
        self.staging = Staging({peer.replica for peer in asked}, at_edge)
        self.copies = self.logs = True
        for peer in asked:
            peer.tell(op="stage", now=at_edge, holders=len(asked))

    def _send(
        self, takers: Sequence[Peer], holders: Sequence[Peer], members: Sequence[Peer]
    ) -> None:
        staging = self.staging
        assert staging is not None  # noqa: S101 - advance() looked
        states = staging.digests
        if len(set(states.values())) > 1 and len(states) < len(holders) and not self._vote:
            self._vote = True
            self._ask(holders, at_edge=staging.at_edge)
            return
        self._vote = False
        tell_difference(holders, staging.step, states)
        # No newcomer is to blame for a difference: it takes what most hold.
        digest = most_common(states)
        donors = [p.addresses for p in holders if states.get(p.replica) == digest]
        staging.taken = True
        for peer in takers:
            peer.expected = (staging.step, digest)
            peer.order(
                "sync",
                "syncing",
                step=staging.step,
                digest=digest,
                donors=donors,
                members=[p.addresses for p in members if not _replaces(peer, p)],
                refusals=peer.refusals,
                why=peer.why,
            )


def _replaces(newcomer: Peer, member: Peer) -> bool:
    """Whether it is to move into this one's place, and will never train beside it."""
    return newcomer.standby == "migrate" and newcomer.place == member.replica
