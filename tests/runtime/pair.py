"""A replica of two ranks: a real first one, and another whose answers are given by the test."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint import Checkpointer
from runtime.data import Batches
from runtime.job import Job
from runtime.replica.all_ranks import AllRanks
from runtime.replica.fsdp import ShardGroup
from runtime.replica.gloo import Gloo
from runtime.replica.gradients import Wishes
from runtime.replica.link import Link
from runtime.replica.observing import Observer
from runtime.replica.peers import Reduced
from runtime.replica.rank import Rank
from runtime.replica.reporting import Reporter
from runtime.replica.siblings import Siblings
from runtime.replica.state import TrainingState
from runtime.replica.step import StepEngine
from tests.runtime.told import Told

TOKEN = "of this test"
GRANT = {
    "epoch": 1, "members": [{"replica": 0, "placement": "p", "gloo": ["here:1", "here:2"]}],
    "lost": [], "begins": True, "joined": [], "step": -1, "started_at": 1.0,
}  # fmt: skip


class Other:
    """The other rank: does nothing, and answers what it is told to."""

    def __init__(self, address: str) -> None:
        #: empty where it says nothing
        self.answers: dict[str, Any] = {"seen_epoch": {"value": 0}, "broken": {}, "give_up": {}}
        self.heard: list[str] = []
        host, _, port = address.rpartition(":")
        self.connection = socket.create_connection((host, int(port)))
        self._say(
            {"op": "join", "token": TOKEN, "rank": 1, "address": "a:1", "gloo": "g:1", "holder": {}}
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for line in self.connection.makefile("r"):
            op = json.loads(line)["op"]
            self.heard.append(op)
            if answer := self.answers.get(op, {"value": None}):
                self._say({"op": "answer", **answer})

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the test is over
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class Counted:
    """Of the script's own."""

    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Pair:
    """A replica of two ranks."""

    def __init__(self, folder: Path) -> None:
        self.told = Told()
        job = Job(
            name="j", replica=0, rank=0, ranks=2, world_replicas=1, placement="p",
            coordinator="127.0.0.1:1", token=TOKEN, state_dir=folder, sender=self.told,
            stop=threading.Event(),
        )  # fmt: skip
        self.state = new_state()
        gloo = Gloo("127.0.0.1")
        shard_group = ShardGroup(self.state.model, 0)
        engine = StepEngine(
            self.state, gloo, Observer(), shard_group, mode="cover", max_grad_norm=None
        )
        self.saver = Checkpointer(job)
        self.rank = Rank(
            job, self.state, engine, gloo, self.saver, Observer(), host="127.0.0.1", on_step=None
        )
        link = Link("127.0.0.1:1", list, lambda _epoch, _message: None)
        self.rank.link = link
        siblings = Siblings("127.0.0.1", TOKEN, 2, link, lambda _r, _m: None, lambda _r: None)
        self.other = Other(siblings.address)
        siblings.meet()
        self.together = AllRanks(self.rank, siblings, Reporter(job, self.state.ledger, 1))
        self.together.member.replica = 0


def new_state(*, frozen: bool = False) -> TrainingState:
    """`frozen`: one of its weights is not trained."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingState(model, [optimizer], Batches(samples=24, shards=2))


def trained(step: int) -> TrainingState:
    state = new_state()
    state.committed = step
    return state


def hold_summed(pair: Pair, gradient: float) -> None:
    """A step whose loss is 1, and whose gradients are this."""
    gradients = pair.rank.engine.gradients
    gradients.samples, gradients.losses = 2, [1.0, 1.0]
    gradients.coverage = gradients.who = [1.0, 1.0]
    gradients.touched = [1.0] * len(gradients.parameters)
    summed = torch.full((gradients.size,), gradient)
    buffer = torch.cat([summed, gradients.tail(Wishes())])
    pair.rank.hold(Reduced(pair.rank.engine.pending, 1, buffer))
    pair.other.answers["commit"] = {"value": 1.0}
