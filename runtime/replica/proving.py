"""Whether newcomers make of the members' steps what the members make of them, before they enter.

Standard library only. The copy that a newcomer took is proven by its hash; what it has applied
since, by its state after one of these steps. A mark that travels with the sum of a step says after
which: one member that asked for it, the witness, and all who follow hash what they hold then.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.replica.connection import Peer


class Proofs:
    """Which member was asked, and what it held."""

    def __init__(self) -> None:
        self._asked = False
        self._turn = 0  # whose it is to be the witness: another's each time that a state differed
        #: after which step who held what
        self._held: dict[int, tuple[int, str]] = {}

    def seek(self, newcomers: Sequence[Peer], members: Sequence[Peer]) -> None:
        """Have a member bear witness if one of these that follow has no proof, and comes to none.

        To be called while the members train."""
        unproven = [peer for peer in newcomers if not peer.proven]
        if not unproven:
            self._held.clear()
        elif not self._asked and any(map(self._comes_to_none, unproven)):
            self._asked = True
            members[self._turn % len(members)].tell(op="prove")

    def witnessed(self, replica: int, step: int, digest: str) -> None:
        """What a member held; "" if it could not say."""
        self._asked = False
        if digest:
            self._held[step] = (replica, digest)

    def judge(self, peer: Peer) -> tuple[int, dict[int, str]] | None:
        """Compare what a newcomer said that it held, which is its proof if it is the same. If it is
        not: after which step, and what both held."""
        taken, _digest = peer.expected or (-1, "")
        for step in [one for one in peer.proofs if one in self._held and one > taken]:
            witness, held = self._held[step]
            peer.proven = peer.proofs[step] == held
            if not peer.proven:
                self._turn += 1
                return step, {witness: held, peer.replica: peer.proofs[step]}
        return None

    def interrupt(self) -> None:
        """Whoever was asked may not have heard it, or may never come to do it: ask anew."""
        self._asked = False

    def begin(self) -> None:
        """An epoch: what was hashed in the one before may be of a step that was made anew."""
        self.interrupt()
        self._held.clear()

    def _comes_to_none(self, peer: Peer) -> bool:
        """Whether a witness is lacking for the steps that it follows from where its copy ended."""
        taken, _digest = peer.expected or (-1, "")
        return not any(step > taken for step in self._held)
