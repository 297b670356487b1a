"""One replica's connection as the coordinator sees it. Standard library only; decides nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from runtime.replica.plan import Report

MAX_PUT_OFF_S = 30.0
#: Of orders; never the same twice, so that what a peer says of an earlier one cannot be mistaken.
_numbers = itertools.count(1)


@dataclass(eq=False)
class Peer:
    """One replica's open connection and where it stands."""

    replica: int
    placement: str
    addresses: list[str]  # of its ranks' snapshot servers
    gloo: list[str]  # where its ranks' groups listen
    holders: list[dict[str, str]]  # of its ranks' nodes; see `checkpoint.peer.Place`
    shards: int
    shape: dict[str, str]  # what must be alike on all replicas
    writer: asyncio.StreamWriter
    heard: float  # by the coordinator's clock; ahead of it while its word is on its way
    spoke: float = field(default=0.0, kw_only=True)  # when it was heard itself
    #: it was given time for its word to arrive, and has not been heard since
    excused: bool = field(default=False, kw_only=True)
    #: claiming (of an epoch that we do not know), fresh (told nothing yet), loading, syncing, ready
    #: (holds a state), member
    phase: str = "fresh"
    #: "migrate" or "spare": it has no number of its own yet, and enters in the place of a member
    standby: str = ""
    place: int = -1  # the replica whose place it is to take, if it is known
    promoted: bool = False  # it stood by, and was given its number
    step: int = -1
    trained_in: int = 0  # the epoch in which that step was made
    loaded: bool = False  # from a checkpoint, an import or peers
    seen_epoch: int = 0  # the latest of which its node, or the folder of all, tells
    searched: bool = False  # it was told of the holders on nodes of which nobody came
    digest: str = ""
    report: Report | None = None
    leaving: bool = False  # its report said that it stops at this edge
    over: bool = False  # and that the job is over
    expected: tuple[int, str] | None = None  # step and digest of the state that it was sent for
    caught_up: bool = False  # follows the members, no step behind
    followed: int = -1  # the last step that it made of theirs, and when it first said so
    followed_at: float = 0.0
    behind_since: float | None = None  # since when it is more than a step behind the members
    #: after which marked steps it held what, as it said
    proofs: dict[int, str] = field(default_factory=dict)
    proven_after: int = -1  # the last step after which that was what a member held, and when that
    proven_at: float = 0.0  # was seen, by the coordinator's clock
    pinged: int = 0  # number of the last ping
    answered: int = 0  # number of the last ping that it answered
    orders: int = 0  # number of the last order; what it says of an older one counts no more
    asked: set[str] = field(default_factory=set)  # what this peer was already told this round
    refusals: int = 0  # how often it could not be let in since it last made a step with others
    why: str = ""  # and why not, the last time
    not_before: float = 0.0  # by the coordinator's clock: when it may try again

    @classmethod
    def of(cls, join: dict[str, Any], writer: asyncio.StreamWriter, now: float) -> Self:
        """Who says this first line."""
        return cls(
            replica=int(join["replica"]),
            placement=str(join["placement"]),
            addresses=[str(address) for address in join["addresses"]],
            gloo=[str(address) for address in join["gloo"]],
            holders=[dict(holder) for holder in join.get("holders", [])],
            shards=int(join["shards"]),
            shape=dict(join.get("shape", {})),
            writer=writer,
            heard=now,
            spoke=now,
            step=int(join["step"]),
        )

    def is_another(self, join: Mapping[str, Any]) -> bool:
        """Whether who says this first line is called as we are, and is another process: each has
        servers of its own, for as long as it lives."""
        named = self.placement == join["placement"]
        return named and self.addresses != list(join["addresses"])

    def put_off(self, now: float, why: str) -> None:
        """Let a newcomer begin anew, later each time."""
        self.begin()
        self.why = why
        self.refusals += 1
        self.not_before = now + min(2.0 ** (self.refusals - 1), MAX_PUT_OFF_S)

    def begin(self) -> None:
        """A newcomer that was told nothing yet."""
        self.phase = "fresh"
        self.orders = 0
        self.report, self.expected, self.proofs = None, None, {}
        self.leaving = self.over = self.caught_up = self.searched = False
        self.proven_after = -1
        self.asked.clear()

    @property
    def proven(self) -> bool:
        """Whether it showed that it makes of the members' steps what they make of them."""
        return self.proven_after >= 0

    def took(self, step: int) -> bool:
        """Whether what it holds is the copy that it took, of this step."""
        return self.step == step and self.expected is not None and self.expected[0] == step

    def enter(self) -> None:
        """A member of an epoch that begins."""
        self.begin()
        self.phase = "member"

    @property
    def held_at(self) -> list[str]:
        """The addresses of the holders on its ranks' nodes; none unless each has one."""
        found = [holder.get("address", "") for holder in self.holders]
        return found if all(found) else []

    def order(self, op: str, phase: str, **message: Any) -> None:
        """Tell a newcomer to get a state, and to say `ready` when it has."""
        self.phase = phase
        self.orders = next(_numbers)
        self.tell(op=op, order=self.orders, **message)

    def ping(self) -> int:
        """Ask for a sign of life; says which of its answers reached us last. Returns its number."""
        self.pinged += 1
        self.tell(op="ping", n=self.pinged, heard=self.answered)
        return self.pinged

    def tell(self, **message: Any) -> None:
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")

    def tell_once(self, op: str, **message: Any) -> None:
        if op not in self.asked:
            self.asked.add(op)
            self.tell(op=op, **message)


def introduce(seated: Mapping[int, Peer], behind: Collection[int]) -> dict[str, Any]:
    """To each other, as the members of an epoch that begins, by their numbers."""
    in_order = sorted(seated.items())
    old_hands = [(number, p) for number, p in in_order if p.phase == "member"]
    return {
        "members": [
            {
                "replica": number,
                "placement": p.placement,
                "gloo": p.gloo,
                "holders": p.holders,
            }
            for number, p in in_order
        ],
        "donors": [p.addresses for number, p in old_hands if number not in behind],
    }


async def read_line(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next JSON object, or None at the end of the stream."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a line must be a JSON object")
    return message
