"""One replica's connection as the coordinator sees it. Standard library only; decides nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Self

from runtime.replica.plan import Report

log = logging.getLogger("drydock.coordinator")

MAX_PUT_OFF_S = 30.0


@dataclass(eq=False)
class Peer:
    """One replica's open connection and where it stands."""

    replica: int
    placement: str
    address: str  # its snapshot server
    gloo_port: int
    shards: int
    shape: dict[str, str]  # what must be alike on all replicas
    writer: asyncio.StreamWriter
    #: fresh (told nothing yet), loading, syncing, ready (holds a state), member
    phase: str = "fresh"
    step: int = -1
    digest: str = ""
    report: Report | None = None
    leaving: bool = False  # its report said that all stop at this edge
    proof: str = ""
    caught_up: bool = False
    heard: float = field(default_factory=time.monotonic)
    asked: set[str] = field(default_factory=set)  # what this peer was already told this round
    refusals: int = 0  # how often it could not be let in
    not_before: float = 0.0  # monotonic: when it may try again

    @classmethod
    def of(cls, join: dict[str, Any], writer: asyncio.StreamWriter) -> Self:
        """Who says this first line."""
        return cls(
            replica=int(join["replica"]),
            placement=str(join["placement"]),
            address=str(join["address"]),
            gloo_port=int(join["gloo_port"]),
            shards=int(join["shards"]),
            shape=dict(join.get("shape", {})),
            writer=writer,
            step=int(join["step"]),
        )

    def put_off(self) -> None:
        """Let a newcomer begin anew, later each time."""
        self.phase = "fresh"
        self.asked.clear()
        self.refusals += 1
        self.not_before = time.monotonic() + min(2.0 ** (self.refusals - 1), MAX_PUT_OFF_S)

    def tell(self, **message: Any) -> None:
        if not self.writer.is_closing():
            self.writer.write(json.dumps(message).encode() + b"\n")

    def tell_once(self, op: str, **message: Any) -> None:
        if op not in self.asked:
            self.asked.add(op)
            self.tell(op=op, **message)


def tell_difference(members: list[Peer], step: int) -> None:
    """Members that should be equal hold different states: no newcomer is to blame for it."""
    states = {member.replica: member.proof for member in members}
    log.critical("members_differ step=%s states=%s", step, states)
    for member in members:
        member.tell_once("diverged", step=step, states=states)


async def read_line(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next JSON object, or None at the end of the stream."""
    line = await reader.readline()
    if not line.endswith(b"\n"):
        return None
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a line must be a JSON object")
    return message
