"""Whether newcomers make of the members' steps what the members make of them, before they enter.

Standard library only. The copy that a newcomer took is proven by its hash; what it has applied
since, by its state after one of these steps. A mark that travels with the sum of a step says after
which: one member that asked for it, the witness, and all who follow hash what they hold then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.replica.connection import Peer

#: Who stands by for long shows again after so many seconds what it holds: about as often as all
#: members are compared, by default, where a step takes half a second.
AGAIN_S = 600.0
MAX_KEPT = 8  # of what one said that no witness has spoken of


@dataclass(frozen=True)
class Difference:
    """A newcomer and a witness do not hold the same."""

    step: int
    witness: int  # the number of the replica
    held: str  # by the witness
    said: str  # by the newcomer


class Proofs:
    """Which member was asked, and what it held."""

    def __init__(self) -> None:
        self._asked = False
        self._turn = 0  # whose it is to be the witness: another's once one is in doubt
        self._doubted: set[tuple[int, int]] = set()  # witnesses that were, and the step
        #: after which step who held what
        self._held: dict[int, tuple[int, str]] = {}

    def seek(self, newcomers: Sequence[Peer], members: Sequence[Peer], now: float) -> None:
        """Have a member bear witness if one of these that follow, or will, has no proof, or an old
        one, and comes to none. To be called while the members train."""
        wanting = [p for p in newcomers if not p.proven or now - p.proven_at > AGAIN_S]
        if not wanting:
            self._held.clear()
        elif not self._asked and any(map(self._comes_to_none, wanting)):
            self._asked = True
            members[self._turn % len(members)].tell(op="prove")

    def witnessed(self, replica: int, step: int, digest: str) -> None:
        """What a member held; "" if it could not say."""
        self._asked = False
        if digest:
            self._held[step] = (replica, digest)
        else:
            self._turn += 1

    def judge(self, peer: Peer, now: float) -> Difference | None:
        """Compare what one that follows said that it held, which is its proof if it is the
        same."""
        for step in sorted(peer.proofs.keys() & self._held.keys()):
            said = peer.proofs.pop(step)
            witness, held = self._held[step]
            if said != held:
                peer.proven_after = -1
                if (witness, step) not in self._doubted:
                    self._doubted.add((witness, step))
                    self._turn += 1
                return Difference(step, witness, held, said)
            peer.proven_after, peer.proven_at = step, now
        for step in sorted(peer.proofs)[:-MAX_KEPT]:
            del peer.proofs[step]
        return None

    def interrupt(self) -> None:
        """Whoever was asked may not have heard it, or may never come to do it: ask anew."""
        self._asked = False

    def begin(self) -> None:
        """An epoch: what was hashed in the one before may be of a step that was made anew."""
        self.interrupt()
        self._held.clear()
        self._doubted.clear()

    def _comes_to_none(self, peer: Peer) -> bool:
        """Whether a witness is lacking for the steps that it follows from where its copy ended, or
        its last proof."""
        taken, _digest = peer.expected or (-1, "")
        return not any(step > max(taken, peer.proven_after) for step in self._held)
