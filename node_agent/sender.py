"""The urgent path: sends what is spooled the moment it is there, again and again until accepted.

One message that is refused for what it is never holds up the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from node_agent import wire
from node_agent.link import Backoff, Link, Refused, Unreachable
from node_agent.log import log
from node_agent.spool import Spool

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0
#: Events in one request: with the longest text in each still well under wire.MAX_BODY_BYTES.
EVENTS_AT_ONCE = 64

Messages = list[dict[str, Any]]


def events_body(messages: Messages) -> bytes:
    """Return the JSON body of `POST /v1/events` for these events; see `wire.Events`."""
    return msgspec.json.encode({"events": messages})


def result_body(messages: Messages) -> bytes:
    """Return the JSON body of `POST /v1/commands/result` for one result; see `wire.CommandResult`.

    Only the first message is encoded, because that request carries a single result.
    """
    return msgspec.json.encode(messages[0])


class Sender:
    """Empties one spool into one path over its own connection."""

    def __init__(
        self,
        spool: Spool,
        link: Link,
        path: str,
        body: Callable[[Messages], bytes],
        at_once: int,
        wait: Callable[[float], bool],
    ) -> None:
        self._spool = spool
        self._link = link
        self._path = path
        self._body = body
        self._at_once = at_once
        self._wait = wait
        self._size = at_once

    def run(self) -> None:
        """Send until the agent stops."""
        backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        while True:
            batch = self._spool.oldest(self._size)
            try:
                settled = self._send(batch)
            except Unreachable as error:
                settled = False
                log("send_unreachable", "warning", path=self._path, error=str(error))
            if settled:
                backoff.reset()
            elif self._wait(backoff.next()):
                return

    def _send(self, batch: Messages) -> bool:
        """One request. True if it brought the spool forward or showed how to."""
        try:
            answer = self._link.post(self._path, self._body(batch), wire.Accepted)
        except Refused as refused:
            return self._on_refusal(batch, refused)
        self._size = self._at_once
        self._spool.acknowledge(answer.ids, batch)
        accepted = set(answer.ids).intersection(message["id"] for message in batch)
        if not accepted:
            log("send_not_acknowledged", "warning", path=self._path, sent=len(batch))
        return bool(accepted)

    def _on_refusal(self, batch: Messages, refused: Refused) -> bool:
        problem = refused.problem
        log("send_refused", "warning", path=self._path, problem=msgspec.to_builtins(problem))
        if not refused.about_the_message:
            return False
        culprit = named_message(problem, batch)
        if culprit is not None:
            self._spool.bury(culprit, msgspec.to_builtins(problem))
            self._size = self._at_once
        else:
            # Nobody is named: halve the batch until the culprit stands alone.
            self._size = max(1, len(batch) // 2)
        return True


def named_message(problem: wire.Problem, batch: Messages) -> str | None:
    """The id of the message that a refusal is about, if it can be told."""
    if len(batch) == 1:
        return str(batch[0]["id"])
    for message in batch:
        if message["id"] in problem.field or message["id"] in problem.detail:
            return str(message["id"])
    match = re.search(r"events\W{0,2}(\d+)", f"{problem.field} {problem.detail}")
    if match is not None and int(match[1]) < len(batch):
        return str(batch[int(match[1])]["id"])
    return None
