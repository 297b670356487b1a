"""States given to a holder and asked of it, for tests."""

from __future__ import annotations

import socket
from typing import Any

from runtime.checkpoint import peer
from runtime.checkpoint.holder import Label
from runtime.checkpoint.peer import Keeping
from runtime.framing import receive_json, send_chunk, send_json
from runtime.image import Staged, chunks_of
from runtime.serving import Requests, RequestServer
from tests.runtime.checkpoint.states import staged_at

TOKEN = "right"
PATIENCE_S = 30.0


def label(step: int, **more: Any) -> Label:
    plain: dict[str, Any] = {"run": "r", "rank": 0, "ranks": 1, "epoch": 1, "save": f"save{step}"}
    return Label(**{**plain, "step": step, "bytes": staged_at(step).table.bytes, **more})


def hold(keeping: Keeping, staged: Staged, **more: Any) -> tuple[str, int]:
    """Its digest, and how many bytes were sent."""
    image = memoryview(staged.buffer)
    kept = more.pop("kept", None)
    return keeping.hold(label(staged.step, **more), staged.table, {"job": "j"}, image, kept)


def keep(address: str, step: int, *, token: str = TOKEN, **more: Any) -> str:
    """Have the state of this step kept there; its digest."""
    staged = staged_at(step)
    keeping = Keeping(address, token)
    try:
        digest, _sent = hold(keeping, staged, **more)
        return digest
    finally:
        keeping.close()


def kept(address: str) -> list[tuple[int, int]]:
    """Ranks and steps."""
    return [(one["rank"], one["step"]) for one in peer.held(address, TOKEN)]


def read(address: str, step: int, rank: int = 0) -> Staged:
    """What is listed there of that step."""
    listed = {(one["rank"], one["step"]): one["digest"] for one in peer.held(address, TOKEN)}
    return peer.read(address, TOKEN, rank, f"save{step}", listed.get((rank, step), ""))


def in_the_middle(address: str, step: int, **more: Any) -> socket.socket:
    """A connection of a replica that has sent the first chunk of a state, and its table."""
    staged = staged_at(step)
    connection = Requests(address, TOKEN).ask(op="hold", **vars(label(step, **more)))
    receive_json(connection)
    send_json(connection, {"table": staged.table.describe(), "facts": {}, "same": 0})
    receive_json(connection)
    send_chunk(connection, next(chunks_of(staged.buffer)))
    return connection


def answering(answer: Any) -> RequestServer:
    """A holder that answers whatever is asked so."""
    return RequestServer(
        "127.0.0.1", TOKEN, lambda connection, _request: send_json(connection, answer)
    )
