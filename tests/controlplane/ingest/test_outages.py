"""What ingest says while Postgres or Redis is away, and that nothing answered is ever lost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit, urlunsplit

import pytest
from django.db import connection, transaction

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Node
from controlplane.health.models import Signal
from node_agent import wire
from tests.ports import free_port

from .door import SOONER_S, NodeClient, Server, database_url, wait_until
from .relay import Relay, postgres_relay, tcp_relay

pytestmark = pytest.mark.skipif(
    "host=" not in os.environ["DATABASE_URL"], reason="needs Postgres on a local socket"
)


@pytest.fixture(scope="module")
def postgres() -> Iterator[tuple[Relay, str]]:
    """A relay to Postgres, and the address behind which it stands."""
    with tempfile.TemporaryDirectory() as folder:
        relay = postgres_relay(Path(folder), str(connection.settings_dict["HOST"])).restore()
        yield relay, folder
        relay.cut()


@pytest.fixture(scope="module")
def redis_relay() -> Iterator[tuple[Relay, str]]:
    parts = urlsplit(os.environ["REDIS_URL"])
    port = free_port()
    relay = tcp_relay(port, str(parts.hostname), int(parts.port or 6379)).restore()
    credentials = parts.netloc.rpartition("@")[0]
    yield relay, urlunsplit(parts._replace(netloc=f"{credentials}@127.0.0.1:{port}"))
    relay.cut()


@pytest.fixture(scope="module")
def fragile(
    django_db_setup: None, postgres: tuple[Relay, str], redis_relay: tuple[Relay, str]
) -> Iterator[Server]:
    """A server that reaches Postgres and Redis through the relays."""
    url = urlsplit(database_url())._replace(query=urlencode({"host": postgres[1]}))
    server = Server(DATABASE_URL=urlunsplit(url), REDIS_URL=redis_relay[1])
    server.start()
    yield server
    server.stop()


@pytest.fixture
def sender(fragile: Server, node: NodeClient) -> NodeClient:
    """A node that speaks to the fragile server, which is ready."""
    node.door = fragile.door()
    wait_until(lambda: node.door.request("GET", "/readyz").status == 200)
    # A connection of before an outage may fail once more, as a node that tries again finds.
    wait_until(lambda: node.post("/v1/beat", node.beat()).status == 200)
    return node


@pytest.fixture
def without_postgres(sender: NodeClient, postgres: tuple[Relay, str]) -> Iterator[Relay]:
    postgres[0].cut()
    yield postgres[0]
    postgres[0].cut()
    postgres[0].restore()


@pytest.fixture
def without_redis(sender: NodeClient, redis_relay: tuple[Relay, str]) -> Iterator[Relay]:
    redis_relay[0].cut()
    yield redis_relay[0]
    redis_relay[0].cut()
    redis_relay[0].restore()


def test_without_postgres_events_are_put_back_and_later_taken(
    sender: NodeClient, without_postgres: Relay
) -> None:
    events = {"events": [sender.event()]}

    refused = sender.post("/v1/events", events)
    without_postgres.restore()
    wait_until(lambda: sender.post("/v1/events", events).status == 200)

    assert (refused.status, refused.code) == (503, "unavailable")
    assert int(refused.headers["retry-after"]) > 0
    assert Signal.objects.count() == 1


def test_without_postgres_beats_are_still_heard(
    sender: NodeClient, without_postgres: Relay
) -> None:
    assert sender.post("/v1/beat", sender.beat()).status == 200


def test_without_postgres_a_stranger_is_not_called_unknown(
    sender: NodeClient, without_postgres: Relay
) -> None:
    sender.node_id = "nod_new"

    assert sender.post("/v1/beat", sender.beat()).status == 503


def test_without_postgres_a_poll_does_not_say_that_there_is_nothing(
    sender: NodeClient, without_postgres: Relay
) -> None:
    assert sender.post("/v1/commands/poll", {"boot_id": "b", "wait_s": 0.1}).status == 503


def test_without_postgres_the_server_is_up_but_not_ready(
    sender: NodeClient, without_postgres: Relay
) -> None:
    answers = [sender.door.request("GET", path) for path in ("/healthz", "/readyz")]

    assert [answer.status for answer in answers] == [200, 503]
    assert "postgres" in answers[1].json["detail"]


def test_without_redis_beats_are_refused_and_events_are_taken(
    sender: NodeClient, without_redis: Relay
) -> None:
    beat = sender.post("/v1/beat", sender.beat())
    event = sender.post("/v1/events", {"events": [sender.event()]})

    assert (beat.status, beat.code, event.status) == (503, "unavailable", 200)
    assert Signal.objects.count() == 1


def test_without_redis_orders_still_arrive(sender: NodeClient, without_redis: Relay) -> None:
    pending = sender.begin("/v1/commands/poll", {"boot_id": "b", "wait_s": wire.MAX_POLL_S})
    row = fleet.queue_command(SYSTEM, sender.node_id, wire.Diagnose(), requester="test")

    assert row.pk in pending.answer(timeout=SOONER_S).json["commands"][0]["payload"]


def test_without_redis_the_server_is_not_ready_and_recovers(
    sender: NodeClient, without_redis: Relay
) -> None:
    assert "redis" in sender.door.request("GET", "/readyz").json["detail"]

    without_redis.restore()

    wait_until(lambda: sender.post("/v1/beat", sender.beat()).status == 200)


def test_one_bad_item_does_not_spoil_the_commit_of_others(
    node: NodeClient, other_node: NodeClient
) -> None:
    spoilt = node.report()
    spoilt["inventory"]["gpus"][0]["memory_bytes"] = 2**63
    pending = [
        *(other_node.begin("/v1/events", {"events": [other_node.event()]}) for _ in range(5)),
        node.begin("/v1/report", spoilt),
        *(other_node.begin("/v1/events", {"events": [other_node.event()]}) for _ in range(5)),
    ]

    statuses = [one.answer().status for one in pending]

    assert statuses == [200] * 5 + [422] + [200] * 5
    assert Signal.objects.count() == 10


def test_a_locked_row_holds_up_only_who_needs_it(node: NodeClient, other_node: NodeClient) -> None:
    with transaction.atomic():
        Node.objects.select_for_update().get(pk=node.node_id)
        blocked = node.begin("/v1/report", node.report())
        free = other_node.begin("/v1/events", {"events": [other_node.event()]})
        answers = [blocked.answer(), free.answer()]

    assert [answer.status for answer in answers] == [503, 200]
    assert node.post("/v1/report", node.report()).status == 200
