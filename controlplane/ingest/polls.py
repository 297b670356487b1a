"""Long polls: a node waits here for orders, at the cost of neither a thread nor a connection.

Redis says "look" at once; one query a second for all who wait makes up for whatever it loses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import redis.asyncio
import structlog
from redis.exceptions import RedisError

from controlplane import doorbell
from controlplane.errors import Refused
from controlplane.ingest import metrics
from controlplane.ingest.http import unavailable
from node_agent import wire

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 1.0
MAX_WAITING = 20_000
#: An order stands as unfinished while the agent works on it. It is not carried down again before
#: this many seconds have passed, or the agent's next poll would come straight back with it.
CARRY_AGAIN_S = 3.0

#: Id and signed text of each unfinished order, by node.
Orders = dict[str, list[tuple[str, wire.SignedCommand]]]
Take = Callable[[list[str]], Awaitable[Orders]]


class _Waiter:
    def __init__(self) -> None:
        self.answer: asyncio.Future[list[wire.SignedCommand]] = (
            asyncio.get_running_loop().create_future()
        )
        self.looked = False  # the last look on its behalf succeeded
        self.overdue = False

    def end(self, commands: list[wire.SignedCommand]) -> None:
        if not self.answer.done():
            self.answer.set_result(commands)

    def refuse(self, refused: Refused) -> None:
        if not self.answer.done():
            self.answer.set_exception(refused)


class Polls:
    """Who waits for orders, and what was carried to whom a moment ago."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._waiters: dict[str, _Waiter] = {}
        self._due: set[str] = set()
        self._wake = asyncio.Event()
        self._carried: dict[str, dict[str, float]] = {}
        self._closing = False
        metrics.POLLS_HELD.set_function(lambda: len(self._waiters))

    async def wait(self, node_id: str, wait_s: float) -> wire.Commands:
        """The node's orders as soon as there are some, or none after `wait_s` seconds.

        A newer poll of the same node ends this one with none. Raises Refused (503) if the orders
        could not be looked up.
        """
        if self._closing:
            return wire.Commands()
        if len(self._waiters) >= MAX_WAITING:
            raise unavailable("too many nodes are waiting; try again")
        waiter = _Waiter()
        older = self._waiters.get(node_id)
        if older is not None:
            older.end([])
        self._waiters[node_id] = waiter
        self._look_for(node_id)
        timer = asyncio.get_running_loop().call_later(wait_s, self._expire, node_id, waiter)
        try:
            return wire.Commands(commands=await waiter.answer)
        finally:
            timer.cancel()
            if self._waiters.get(node_id) is waiter:
                del self._waiters[node_id]

    def close(self) -> None:
        """End every poll with none; later ones too."""
        self._closing = True
        for waiter in list(self._waiters.values()):
            waiter.end([])

    async def run(self) -> None:
        """Look for orders until cancelled: at once for those named, each second for all."""
        all_due = time.monotonic() + LOOK_EVERY_S
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(0.0, all_due - time.monotonic()))
            self._wake.clear()
            if time.monotonic() >= all_due:
                all_due = time.monotonic() + LOOK_EVERY_S
                self._due.update(self._waiters)
                self._forget_carried()
            due, self._due = self._due & self._waiters.keys(), set()
            if due:
                await self._look(sorted(due))

    async def listen(self, client: redis.asyncio.Redis) -> None:
        """Look for a node's orders as soon as they are announced, until cancelled."""
        while True:
            try:
                async with client.pubsub(ignore_subscribe_messages=True) as announcements:
                    await announcements.subscribe(doorbell.COMMANDS_CHANNEL)
                    while True:
                        announced = await announcements.get_message(timeout=5.0)
                        if announced is not None:
                            self._look_for(_text(announced["data"]))
            except (RedisError, OSError) as error:
                log.warning("ingest.announcements_lost", error=str(error))
                await asyncio.sleep(LOOK_EVERY_S)

    def _look_for(self, node_id: str) -> None:
        if node_id in self._waiters:
            self._due.add(node_id)
            self._wake.set()

    async def _look(self, node_ids: list[str]) -> None:
        try:
            orders = await self._take(node_ids)
        except Refused as refused:
            self._fail(node_ids, refused)
        except Exception:
            # One look that failed must not be the last one, or no poll is answered any more.
            log.exception("ingest.look_failed", nodes=len(node_ids))
            self._fail(node_ids, unavailable("orders could not be looked up; ask again"))
        else:
            for node_id in node_ids:
                self._hand_over(node_id, orders.get(node_id, []))

    def _fail(self, node_ids: list[str], refused: Refused) -> None:
        for waiter in self._present(node_ids):
            waiter.looked = False
            if waiter.overdue:
                waiter.refuse(refused)

    def _hand_over(self, node_id: str, orders: list[tuple[str, wire.SignedCommand]]) -> None:
        waiter = self._waiters.get(node_id)
        if waiter is None or waiter.answer.done():
            return
        waiter.looked = True
        now = time.monotonic()
        carried = self._carried.setdefault(node_id, {}) if orders else {}
        fresh = [(i, c) for i, c in orders if now - carried.get(i, -CARRY_AGAIN_S) >= CARRY_AGAIN_S]
        carried.update((command_id, now) for command_id, _ in fresh)
        if fresh or waiter.overdue:
            waiter.end([command for _, command in fresh])

    def _present(self, node_ids: list[str]) -> list[_Waiter]:
        return [self._waiters[node_id] for node_id in node_ids if node_id in self._waiters]

    def _expire(self, node_id: str, waiter: _Waiter) -> None:
        """Its time is up; "none" may be said only after a look that succeeded."""
        if waiter.looked:
            waiter.end([])
        else:
            waiter.overdue = True
            self._look_for(node_id)

    def _forget_carried(self) -> None:
        before = time.monotonic() - CARRY_AGAIN_S
        self._carried = {
            node_id: kept
            for node_id, carried in self._carried.items()
            if (kept := {i: at for i, at in carried.items() if at > before})
        }


def _text(data: bytes | str) -> str:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else data
