"""What ingest does with each message, and the tasks that run beside the requests.

It decides nothing: a message is checked, handed to the action that records it, and answered.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import redis.asyncio
import structlog
from django.conf import settings
from django.db import connection
from redis.exceptions import RedisError

from controlplane import crypto
from controlplane import metrics as prometheus
from controlplane.errors import Refused
from controlplane.fleet import actions as fleet
from controlplane.ingest import authentication, decoding
from controlplane.ingest.authentication import Directory, Identity
from controlplane.ingest.beats import Beats
from controlplane.ingest.event_ownership import record_events
from controlplane.ingest.http import DisconnectedError, Request, Response, accepted, unavailable
from controlplane.ingest.polls import Orders, Polls
from controlplane.ingest.writer import Writer
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job
from node_agent import wire
from runtime import client

log = structlog.get_logger(__name__)

#: A part that does not answer within this many seconds makes /readyz say no.
READY_DEADLINE_S = 3.0
#: A process that one of its tasks left has this long to end gracefully, in seconds.
END_S = 20.0

Handler = Callable[[Request], Awaitable[Response]]
NodeHandler = Callable[[Identity, bytes, Request], Awaitable[Response]]


class Service:
    """Everything that one running ingest holds."""

    def __init__(self) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            settings.REDIS_URL, socket_timeout=2, socket_connect_timeout=2
        )
        self._writer = Writer()
        self._directory = Directory()
        self._beats = Beats(self._redis)
        self._polls = Polls(self._take_commands)
        self._tasks = [
            asyncio.create_task(run)
            for run in (
                self._directory.run(),
                self._beats.run(),
                self._beats.say_alive(),
                self._polls.run(),
                self._polls.listen(self._redis),
            )
        ]
        for task in self._tasks:
            task.add_done_callback(_end_without)
        self.routes: dict[str, tuple[str, Handler]] = {
            "/healthz": ("GET", self._healthz),
            "/readyz": ("GET", self._readyz),
            "/metrics": ("GET", self._metrics),
            "/v1/enroll": ("POST", self._enroll),
            "/v1/runtime": ("POST", self._runtime),
            "/v1/beat": ("POST", self._signed(self._beat)),
            "/v1/report": ("POST", self._signed(self._report)),
            "/v1/events": ("POST", self._signed(self._events)),
            "/v1/commands/poll": ("POST", self._signed(self._poll)),
            "/v1/commands/result": ("POST", self._signed(self._command_result)),
        }

    def release_polls(self) -> None:
        """Answer all who wait, because the server is about to stop."""
        self._polls.close()

    async def close(self) -> None:
        """Commit what was taken in, then let go of everything."""
        self.release_polls()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._writer.close()
        await self._redis.aclose()

    # --- for those who watch the process ----------------------------------------------------------

    async def _healthz(self, _: Request) -> Response:
        return accepted({"status": "up"})

    async def _readyz(self, _: Request) -> Response:
        postgres, redis_answers = await asyncio.gather(
            _answers(self._writer.submit(_select_one)), _answers(self._redis.ping())
        )
        parts = {
            "writer": self._writer.alive,
            "postgres": postgres,
            "redis": redis_answers,
            "tasks": not any(task.done() for task in self._tasks),
        }
        missing = sorted(part for part, fine in parts.items() if not fine)
        if missing:
            raise unavailable(f"not ready: {', '.join(missing)}")
        return accepted(parts)

    async def _metrics(self, request: Request) -> Response:
        allowed = prometheus.may_read(
            request.address,
            request.header("Authorization"),
            relayed=any(request.header(name) for name in prometheus.RELAYED),
        )
        if not allowed:
            raise Refused(403, "metrics_denied", "", prometheus.DENIED.strip())
        content = await asyncio.to_thread(prometheus.exposition)
        return Response(200, content, prometheus.CONTENT_TYPE.encode())

    # --- messages ---------------------------------------------------------------------------------

    async def _enroll(self, request: Request) -> Response:
        body = await request.body()
        message = decoding.decode_enroll(body)
        node = await self._writer.submit(lambda: fleet.enroll(message), len(body), "enroll")
        self._directory.learn(node)
        return accepted(
            wire.EnrollAnswer(
                node_id=node.pk,
                command_keys=crypto.command_public_keys(),
                beat_interval_s=settings.BEAT_INTERVAL_S,
                lease_s=settings.LEASE_S,
            )
        )

    async def _runtime(self, request: Request) -> Response:
        token = authentication.bearer_token(request)
        body = await request.body()
        job_id = decoding.decode_job_name(body)
        authentication.verify_job_token(job_id, token)
        batch, messages = decoding.decode_batch(body)
        reply = await self._writer.submit(
            lambda: _record_batch(batch, messages), len(body), "runtime", job_id
        )
        return accepted(reply)

    def _signed(self, handler: NodeHandler) -> Handler:
        """Let a message through to `handler` only if a known node signed it."""

        async def handle(request: Request) -> Response:
            identity = await self._directory.authenticate(request)
            body = await request.body()
            authentication.verify_signature(identity, request, body)
            return await handler(identity, body, request)

        return handle

    async def _beat(self, node: Identity, body: bytes, _: Request) -> Response:
        beat = decoding.decode(body, wire.Beat)
        await self._beats.record(node.node_id, beat)
        known = (node.boot_id, node.report_digest)
        return accepted(
            wire.BeatAnswer(
                next_in_s=settings.BEAT_INTERVAL_S,
                want_report=known != (beat.boot_id, beat.report_digest),
            )
        )

    async def _report(self, node: Identity, body: bytes, _: Request) -> Response:
        report = decoding.decode(body, wire.Report)
        await self._writer.submit(
            lambda: fleet.record_report(node.node_id, report), len(body), "report"
        )
        self._directory.learn_report(node.node_id, report.digest)
        return accepted(wire.Accepted(ids=[report.digest]))

    async def _events(self, node: Identity, body: bytes, _: Request) -> Response:
        events = decoding.decode(body, wire.Events).events
        ids = await self._writer.submit(
            lambda: record_events(node.node_id, events), len(body), "events"
        )
        return accepted(wire.Accepted(ids=ids))

    async def _command_result(self, node: Identity, body: bytes, _: Request) -> Response:
        result = decoding.decode(body, wire.CommandResult)
        await self._writer.submit(
            lambda: fleet.record_command_result(node.node_id, result), len(body), "commands/result"
        )
        return accepted(wire.Accepted(ids=[result.id]))

    async def _poll(self, node: Identity, body: bytes, request: Request) -> Response:
        poll = decoding.decode(body, wire.CommandPoll)
        waiting = asyncio.create_task(self._polls.wait(node.node_id, poll.wait_s))
        gone = asyncio.ensure_future(request.disconnected())
        try:
            await asyncio.wait([waiting, gone], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise DisconnectedError
            return accepted(waiting.result())
        finally:
            waiting.cancel()
            gone.cancel()

    async def _take_commands(self, node_ids: list[str]) -> Orders:
        taken = await self._writer.submit(lambda: fleet.take_commands(node_ids))
        return {
            node_id: [
                (row.pk, wire.SignedCommand(payload=row.payload, signature=row.signature))
                for row in rows
            ]
            for node_id, rows in taken.items()
        }


def _record_batch(batch: client.Batch, messages: list[client.Message]) -> client.Reply:
    try:
        return jobs.record_runtime_batch(batch.job, batch, messages)
    except Job.DoesNotExist:
        raise Refused(404, "unknown_job", "job", "this job is not registered here") from None


async def _answers(question: Awaitable[object]) -> bool:
    try:
        async with asyncio.timeout(READY_DEADLINE_S):
            await question
    except (Refused, RedisError, OSError, TimeoutError):
        return False
    return True


def _select_one() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def _end_without(task: asyncio.Task[None]) -> None:
    """End the process, which cannot do its work without this task: whatever keeps the process
    running starts it again, where one that stayed would leave some messages unanswered for ever."""
    if task.cancelled():
        return
    log.critical("ingest.task_ended", exc_info=task.exception())
    task.get_loop().call_later(END_S, os._exit, 1)  # what waits for the task may never be answered
    os.kill(os.getpid(), signal.SIGTERM)
