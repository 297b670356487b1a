"""Beats go to Redis, many to a round trip, and never to Postgres.

A beat is replaceable: while Redis is away it is refused, and the next one counts as well.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import redis.asyncio
import structlog
from redis.exceptions import RedisError

from controlplane import redis_keys
from controlplane.ingest.http import unavailable
from node_agent import wire

log = structlog.get_logger(__name__)

ALIVE_TTL_S = 5
ALIVE_EVERY_S = 0.5
GATHER_S = 0.008
MAX_WAITING = 20_000


class StoredBeat(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper finds in the hash."""

    boot_id: str
    seq: int
    at: float
    received_at: float
    digest: str
    readings: list[wire.GpuReading]
    ports: list[wire.PortReading]


class Beats:
    """Collects beats and writes them out together."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._since = time.time()
        self._due: dict[str, bytes] = {}
        self._waiting = 0
        self._written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._wake = asyncio.Event()

    async def record(self, node_id: str, beat: wire.Beat) -> None:
        """Return once the beat is in Redis. Raises Refused (503) if Redis does not take it."""
        if self._waiting >= MAX_WAITING:
            raise unavailable("too many beats are waiting; the next one will do")
        self._due[node_id] = msgspec.json.encode(
            StoredBeat(
                boot_id=beat.boot_id,
                seq=beat.seq,
                at=beat.at,
                received_at=time.time(),
                digest=beat.report_digest,
                readings=beat.readings,
                ports=beat.ports,
            )
        )
        self._wake.set()
        self._waiting += 1
        try:
            written = await asyncio.shield(self._written)
        finally:
            self._waiting -= 1
        if not written:
            raise unavailable("Redis does not answer; the next beat will do")

    async def run(self) -> None:
        """Write beats out until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            due, self._due = self._due, {}
            written, self._written = self._written, asyncio.get_running_loop().create_future()
            try:
                await self._redis.hset(redis_keys.BEATS, mapping=due)  # type: ignore[arg-type]
            except (RedisError, OSError) as error:
                log.warning("ingest.beats_refused", error=str(error), beats=len(due))
                written.set_result(False)
            else:
                written.set_result(True)

    async def say_alive(self) -> None:
        """Tell the keeper again and again that somebody listens, until cancelled."""
        while True:
            try:
                said = msgspec.json.encode({"at": time.time(), "since": self._since})
                await self._redis.set(redis_keys.INGEST_ALIVE, said, ex=ALIVE_TTL_S)
            except (RedisError, OSError) as error:
                log.warning("ingest.alive_untold", error=str(error))
            await asyncio.sleep(ALIVE_EVERY_S)
