"""Every queue has an end, and whoever meets it is told to come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import msgspec
import pytest
import redis.asyncio
from django.conf import settings

from controlplane.errors import Conflict, Refused
from controlplane.fleet.models import Cluster
from controlplane.ingest import app, authentication, beats, http, polls, service, writer
from node_agent import wire

from .door import Door, enrolment

Message = MutableMapping[str, Any]


def code_of(work: Callable[[], Awaitable[object]]) -> tuple[int, str]:
    """Status and code with which this is refused."""

    async def run() -> object:
        return await work()

    with pytest.raises(Refused) as caught:
        asyncio.run(run())
    return caught.value.status, caught.value.code


async def written(*writes: Callable[[], object], size: int = 0, kind: str = "") -> list[Any]:
    """What becomes of these writes when they share a commit."""
    running = writer.Writer()
    submitted = [running.submit(write, size, kind) for write in writes]
    outcomes = await asyncio.gather(*submitted, return_exceptions=True)
    await running.close()
    return outcomes


def receiving(*messages: Message) -> http.Receive:
    """A connection on which these arrive, and then nothing more."""
    left: Iterator[Message] = iter(messages)

    async def receive() -> Message:
        return next(left, None) or await asyncio.get_running_loop().create_future()

    return receive


def request_of(receive: http.Receive, budget: int = 100) -> http.Request:
    scope = {"method": "POST", "path": "/v1/beat", "headers": []}
    return http.Request(scope, receive, http.Budget(budget))


async def answer_of(application: app.App, path: str) -> Message:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    await application(scope, receiving({"type": "http.request", "more_body": False}), send)
    return sent[0]


def test_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING", 0)

    assert [o.status for o in asyncio.run(written(lambda: 1))] == [503]


def test_writer_by_size(monkeypatch: pytest.MonkeyPatch, transactional_db: None) -> None:
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 10)

    assert [o.status for o in asyncio.run(written(lambda: 1, size=11))] == [503]


def test_the_writer_keeps_places_for_those_who_signed(
    monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    monkeypatch.setitem(writer.MAX_WAITING_OF, "enroll", 1)

    async def submitted() -> list[Any]:
        running = writer.Writer()
        kinds = ["enroll", "enroll", "events", "events"]
        waiting = [running.submit(lambda: 1, kind=kind) for kind in kinds]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        outcomes.append(await running.submit(lambda: 2, kind="enroll"))
        await running.close()
        return outcomes

    assert [getattr(o, "status", o) for o in asyncio.run(submitted())] == [1, 503, 1, 1, 2]


def test_an_enrolment_is_counted_as_one(
    monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    monkeypatch.setitem(writer.MAX_WAITING_OF, "enroll", 0)
    node = enrolment(Door(0), "ddk_no", "n1")
    body = msgspec.json.encode(node.enroll_message())
    message = {"type": "http.request", "body": body, "more_body": False}

    async def enroll() -> object:
        running = service.Service()
        _, handler = running.routes["/v1/enroll"]
        try:
            return await handler(request_of(receiving(message), budget=len(body)))
        finally:
            await running.close()

    assert code_of(enroll) == (503, "unavailable")


def test_a_value_that_is_refused_is_named_by_its_column(transactional_db: None) -> None:
    nameless: Any = {"name": None}

    (refused,) = asyncio.run(written(lambda: Cluster.objects.create(**nameless), kind="report"))

    assert (refused.status, refused.code, refused.field) == (422, "invalid_field", "name")


def test_a_value_whose_column_nobody_tells_is_named_by_its_message(transactional_db: None) -> None:
    (refused,) = asyncio.run(written(lambda: Cluster.objects.create(name="x" * 999), kind="report"))

    assert (refused.status, refused.code, refused.field) == (422, "invalid_field", "report")


def test_a_write_that_takes_too_long_is_put_back(
    monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> None:
    monkeypatch.setattr(writer, "ANSWER_S", 0.0)

    assert [o.status for o in asyncio.run(written(lambda: 1))] == [503]


def test_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "MAX_WAITING", 0)

    async def record() -> None:
        client = redis.asyncio.Redis.from_url(settings.REDIS_URL)
        await beats.Beats(client).record("nod_1", wire.Beat(boot_id="b", seq=1, at=1.0))

    assert code_of(record) == (503, "unavailable")


def test_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polls, "MAX_WAITING", 0)

    async def take(_: list[str]) -> polls.Orders:
        return {}

    async def wait() -> object:
        return await polls.Polls(take).wait("nod_1", 1.0)

    assert code_of(wait) == (503, "unavailable")


def test_unknown_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "MAX_MISSES", 0)
    scope = {"method": "POST", "path": "/v1/beat", "headers": [(b"drydock-node", b"nod_1")]}

    async def find() -> object:
        request = http.Request(scope, receiving(), http.Budget(1))
        return await authentication.Directory().authenticate(request)

    assert code_of(find) == (503, "unavailable")


def test_bodies_of_all_requests_together() -> None:
    chunk = {"type": "http.request", "body": b"x" * 11, "more_body": False}

    assert code_of(lambda: request_of(receiving(chunk), budget=10).body()) == (503, "unavailable")


def test_a_body_that_never_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_DEADLINE_S", 0.01)
    chunk = {"type": "http.request", "body": b"x", "more_body": True}

    assert code_of(lambda: request_of(receiving(chunk)).body()) == (408, "body_too_slow")


def test_a_sender_that_hangs_up_amid_its_body() -> None:
    receive = receiving({"type": "http.disconnect"})

    with pytest.raises(http.DisconnectedError):
        asyncio.run(request_of(receive).body())


def test_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_IN_FLIGHT", 0)

    assert asyncio.run(answer_of(app.App(), "/healthz"))["status"] == 503


def test_before_the_server_has_started() -> None:
    assert asyncio.run(answer_of(app.App(), "/healthz"))["status"] == 503


def test_items_of_one_commit_fail_alone(transactional_db: None) -> None:
    def contradiction() -> object:
        raise Conflict("the node is retired")

    def mistake() -> object:
        return [][1]

    def clash() -> object:
        Cluster.objects.create(name="same")
        return Cluster.objects.create(name="same")

    def fine() -> object:
        return Cluster.objects.create(name="fine").name

    outcomes = asyncio.run(written(contradiction, mistake, clash, fine))

    assert [getattr(o, "code", type(o).__name__) for o in outcomes[:3]] == [
        "conflict",
        "IndexError",
        "conflict",
    ]
    assert outcomes[3] == "fine"
    assert list(Cluster.objects.values_list("name", flat=True)) == ["fine"]
