"""A coordinator whose peers a test speaks for, message by message: no sockets, its own clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.replica.connection import Peer
from runtime.replica.coordinator import Coordinator
from runtime.replica.record import RecordFile


class Wire:
    """Keeps what the coordinator says."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def write(self, data: bytes) -> None:
        self.said += [json.loads(line) for line in data.splitlines()]

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """The coordinator hangs up."""


class Replica:
    """One process's side, spoken by the test."""

    def __init__(
        self,
        scene: Scene,
        number: int,
        placement: str,
        epoch: int,
        step: int,
        standby: str,
        port: int = 1,
    ) -> None:
        self.scene = scene
        self.placement = placement
        self.wire = Wire()
        self.first = {
            "op": "join", "token": "t", "job": "j", "replica": number, "placement": placement,
            "standby": standby, "epoch": epoch, "step": step, "members": {}, "world": scene.world,
            "addresses": [f"{placement}:{port}"], "gloo": ["127.0.0.1:1"], "shards": 12,
            "shape": {},
        }  # fmt: skip
        self.refused = scene.coordinator.refusal(self.first)
        self.peer: Peer | None = None
        if not self.refused:
            self.peer = scene.coordinator.join(self.first, self.wire)  # type: ignore[arg-type]

    def say(self, op: str, **message: Any) -> None:
        assert self.peer is not None
        self.scene.coordinator.hear(self.peer, {"op": op, **message})

    def heard(self, op: str) -> list[dict[str, Any]]:
        return [message for message in self.wire.said if message["op"] == op]

    def say_ready(self, step: int, digest: str = "d") -> None:
        order = [m["order"] for m in self.wire.said if m["op"] in ("load", "sync")][-1]
        self.say("ready", order=order, step=step, digest=digest)

    def say_proved(self, step: int, digest: str = "d", *, order: int = 0) -> None:
        """What it held after this step; of the last copy that it was sent for, if of no other."""
        last = [m["order"] for m in self.wire.said if m["op"] in ("load", "sync")][-1]
        self.say("proved", epoch=0, order=order or last, step=step, digest=digest)

    def hang_up(self) -> None:
        assert self.peer is not None
        self.scene.coordinator.gone(self.peer, "reset")


class Scene:
    """A coordinator, its clock, and a job of so many replicas that trains in epoch 1."""

    def __init__(self, folder: Path, world: int) -> None:
        self.now = 1000.0
        self.world = world
        self.coordinator = Coordinator(
            RecordFile(folder, "j"), "t", world, 1, clock=lambda: self.now
        )
        self.replicas = [self.join(number, f"p{number}") for number in range(world)]
        for replica in self.replicas:
            replica.say_ready(-1)
        self.pass_time(3.0, *self.replicas)  # nobody else claims to train already
        assert self.epoch == 1

    def join(
        self,
        number: int,
        placement: str,
        *,
        epoch: int = 0,
        step: int = -1,
        standby: str = "",
        port: int = 1,
    ) -> Replica:
        """`port`: another one of a process of the same name."""
        return Replica(self, number, placement, epoch, step, standby, port)

    @property
    def epoch(self) -> int:
        return self.coordinator.record.epoch

    @property
    def members(self) -> dict[int, str]:
        return self.coordinator.record.members

    def bring_level(self, newcomer: Replica, step: int) -> None:
        """The members copy before this step, the newcomer takes it, follows and makes it too."""
        self.hand_over(newcomer, step - 1)
        self.witness(step)
        newcomer.say_proved(step)
        newcomer.say("caught_up", step=step)

    def hand_over(self, newcomer: Replica, step: int) -> None:
        for member in self.replicas:
            member.say("staged", step=step, digest="d")
        newcomer.say_ready(step)

    def witness(self, step: int, digest: str = "d", *, by: int = 0, epoch: int = 0) -> None:
        """The member that was asked for it shows what it held after this step."""
        assert self.replicas[by].heard("prove")
        told = {"epoch": epoch or self.epoch, "order": 0, "step": step, "digest": digest}
        self.replicas[by].say("proved", **told)

    def reach_edge(self, step: int, *, planned: bool = True, leaving: bool = False) -> None:
        for member in self.replicas:
            member.say(
                "report", epoch=self.epoch, step=step, held=[], planned=planned, leaving=leaving
            )

    def pass_time(self, seconds: float, *alive: Replica) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for replica in alive:
                assert replica.peer is not None
                replica.say("pong", n=0, step=replica.peer.step)
            self.coordinator.tick()

    def end(self, replica: Replica, number: int) -> None:
        """An agent says that its process has ended."""
        self.coordinator.answer({"op": "exit", "replica": number, "placement": replica.placement})


Play = Callable[[int], Scene]


def phase_of(replica: Replica) -> tuple[str, int]:
    assert replica.peer is not None
    return replica.peer.phase, replica.peer.refusals


def compare(scene: Scene, *digests: str, step: int = 9) -> None:
    for replica, digest in zip(scene.replicas, digests, strict=False):
        replica.say("compared", epoch=scene.epoch, step=step, digest=digest)
