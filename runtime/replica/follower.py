"""The loop of every rank of a replica but the first: does what that one decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from runtime.client import CheckpointSaved
from runtime.data import Shard
from runtime.replica.link import Link, Refused
from runtime.replica.rank import Rank

LEAVING_S = 1.0  # how long an order to leave, which came last of all, may take to be read


class Follower:
    """Speaks to its replica's first rank alone."""

    def __init__(
        self,
        rank: Rank,
        first: str,
        shape: dict[str, str],
        *,
        leave: Callable[..., None],
        abandon: Callable[[str], None],
    ) -> None:
        """`first`: the address of the first rank, which lets us in if it has the same `shape`: see
        `shape.of_ranks`. `leave`, `abandon`: see `leader.Leader`."""
        self.job = rank.job
        self.rank = rank
        self.link = rank.link = Link(
            first, self.introduce, self.on_break, on_end=self.on_end, silent_s=None
        )
        self.link.on_give_up = self.on_give_up
        self._shape = shape
        self._leave_job = leave
        self._abandon = abandon
        rank.saver.dispatcher.on_saved = self._say_saved
        rank.saver.dispatcher.on_shared_failed = self._say_shared_failed
        self._left = threading.Event()
        self._passed_on: set[str] = set()  # of our wishes to end, to the first rank

    def start(self) -> None:
        """Go to the first rank."""
        self.link.start()

    def shards(self) -> Iterator[Shard]:
        """Shards to compute, as the first rank gives them."""
        while not self._left.is_set():
            order = self.link.inbox.get()
            op = order.pop("op")
            self._pass_on("stop", self.job.stop)
            self._pass_on("told", self.job.told)
            if op == "compute":
                with self.rank.stalls.computing():
                    yield from self.rank.engine.compute(int(order["index"]))
            elif op == "leave":
                self.leave(str(order["reason"]), goodbye=True)
            elif op == "refused":
                raise Refused(f"the first rank of this replica: {order['error']}")
            elif op not in ("broken", "wished"):  # broken was obeyed when it came
                self.link.say("answer", **self.rank.obey(op, order))

    def leave(self, reason: str, *, goodbye: bool) -> None:
        self.rank.preemption.edge()  # what was to be saved was asked for before
        self._left.set()
        self._leave_job(reason, goodbye=goodbye)

    def close(self, *, goodbye: bool) -> None:
        """The first rank hears of what we still write; without a goodbye it goes on at once, and so
        do all other replicas."""
        if not goodbye:
            self.link.close(goodbye=False)
        self.rank.saver.finish()
        self.link.close(goodbye=goodbye)

    def _pass_on(self, wish: str, made: threading.Event) -> None:
        if made.is_set() and wish not in self._passed_on and self.link.say(wish):
            self._passed_on.add(wish)

    def wish_stop(self) -> None:
        self.job.stop.set()
        self.link.inbox.put({"op": "wished"})

    def wish_leave(self) -> None:
        """May be called by a signal's handler, in the middle of anything."""
        self.job.told.set()
        self.link.inbox.put({"op": "wished"})

    def introduce(self) -> list[dict[str, Any]]:
        """What we say first."""
        return [
            {
                "op": "join",
                "token": self.job.token,
                "rank": self.job.rank,
                "address": self.rank.address,
                "holder": self.rank.holder,
                "gloo": self.rank.gloo.address,
                "shape": self._shape,
            }
        ]

    def _say_saved(self, saved: CheckpointSaved) -> None:
        """On the writer's thread: our part is durable."""
        self.link.say("saved", **asdict(saved))

    def _say_shared_failed(self, shared_out: bool) -> None:
        """On the writer's thread: what we write to the folder of all failed."""
        self.link.say("shared_failed", shared_out=shared_out)

    def on_break(self, epoch: int, _message: dict[str, Any]) -> None:
        """On the link's thread."""
        self.rank.gloo.sever(epoch)

    def on_give_up(self, number: int) -> None:
        """On the link's thread: another rank refuses what we may be reading."""
        self.rank.give_up(number)

    def on_end(self) -> None:
        """On the link's thread: the first rank hung up, or we did."""
        if not self._left.wait(LEAVING_S):
            self._abandon("the first rank of this replica is gone")
