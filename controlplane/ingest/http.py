"""The little of HTTP that ingest needs: a bounded body, an answer, a refusal.

It must never hold more of a request than `wire.MAX_BODY_BYTES`, whatever a sender says or sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from controlplane.errors import Refused
from node_agent import wire

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: A sender has this long to send its body, in seconds.
BODY_DEADLINE_S = 20.0
#: Of a refused request this much is read and dropped, so that the sender gets to read the answer.
DISCARD_BYTES = 8 * wire.MAX_BODY_BYTES
DISCARD_DEADLINE_S = 5.0
#: A sender that was told 503 may come back after this many seconds.
RETRY_AFTER_S = 1


class DisconnectedError(Exception):
    """The sender is gone; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP answer, complete before it is sent."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    #: For the metrics: "accepted", or why not.
    outcome: str = "accepted"


class Budget:
    """How many bytes of bodies one process holds at once, over all its requests."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def take(self, count: int) -> None:
        """Raises Refused (503) if so much is not to be had."""
        if count > self._left:
            raise unavailable("too much is being received at once; keep this and send it again")
        self._left -= count

    def give_back(self, count: int) -> None:
        self._left += count


class Request:
    """One request: its head at once, its body when asked for."""

    def __init__(self, scope: Scope, receive: Receive, budget: Budget) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        #: The sender's address as the socket has it; "" on a Unix socket.
        self.address: str = (scope.get("client") or ("", 0))[0]
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._more = True
        self._budget = budget
        self._held = 0

    def header(self, name: str) -> str:
        """The header's text, or "" where it is absent."""
        return self._headers.get(name.lower().encode(), b"").decode("latin-1")

    async def body(self) -> bytes:
        """The whole body.

        Raises Refused if it is too large or too slow, DisconnectedError if it is cut off.
        """
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                return await self._read_bounded()
        except TimeoutError:
            raise Refused(
                408, "body_too_slow", "", f"send the body within {BODY_DEADLINE_S:.0f} seconds"
            ) from None

    def close(self) -> None:
        """Give back what the body took of the budget."""
        self._budget.give_back(self._held)
        self._held = 0

    async def discard(self) -> None:
        """Read and drop what is left of the body, within bounds."""
        left = DISCARD_BYTES
        try:
            async with asyncio.timeout(DISCARD_DEADLINE_S):
                while self._more and left > 0:
                    left -= len(await self._next_chunk())
        except TimeoutError:
            return  # it is answered with its body unread

    async def disconnected(self) -> None:
        """Return once the sender is gone; to be awaited after the body."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _read_bounded(self) -> bytes:
        chunks: list[bytes] = []
        total = 0
        while self._more:
            chunk = await self._next_chunk()
            total += len(chunk)
            if total > wire.MAX_BODY_BYTES:
                raise Refused(
                    413, "body_too_large", "", f"send at most {wire.MAX_BODY_BYTES} bytes at once"
                )
            self._budget.take(len(chunk))
            self._held += len(chunk)
            chunks.append(chunk)
        return b"".join(chunks)

    async def _next_chunk(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        self._more = message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk


def accepted(answer: object) -> Response:
    """A 200 with this struct or dataclass as JSON."""
    return Response(200, msgspec.json.encode(answer))


def problem(refused: Refused) -> Response:
    """The `wire.Problem` of a refusal, after RFC 9457."""
    body = msgspec.json.encode(
        wire.Problem(
            status=refused.status,
            code=refused.code,
            title=refused.code.replace("_", " ").capitalize(),
            detail=refused.detail,
            field=refused.field,
        )
    )
    headers = [(b"retry-after", b"%d" % RETRY_AFTER_S)] if refused.status == 503 else []
    return Response(refused.status, body, b"application/problem+json", headers, refused.code)


def unavailable(detail: str) -> Refused:
    """The refusal after which the sender keeps what it has and sends it again."""
    return Refused(503, "unavailable", "", detail)


async def respond(send: Send, response: Response) -> None:
    """Send one whole answer."""
    headers = [
        (b"content-type", response.content_type),
        (b"content-length", b"%d" % len(response.body)),
        *response.headers,
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
