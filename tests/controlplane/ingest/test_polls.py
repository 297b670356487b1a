"""Orders reach a waiting node at once, and waiting costs nobody anything."""

from __future__ import annotations

from typing import Any

import msgspec
from redis import Redis

from controlplane.accounts.models import SYSTEM
from controlplane.doorbell import COMMANDS_CHANNEL
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import CommandState
from controlplane.fleet.models import Command
from node_agent import wire

from .door import NodeClient, Pending, Server

#: Within this a held poll is answered only if something ended it.
SOONER_S = wire.MAX_POLL_S - 5.0


def poll(node: NodeClient, wait_s: float = 20.0) -> Any:
    return node.post("/v1/commands/poll", {"boot_id": node.boot_id, "wait_s": wait_s})


def order(node: NodeClient, requester: str = "test") -> Command:
    return fleet.queue_command(SYSTEM, node.node_id, wire.Diagnose(), requester=requester)


def ids(answer: Any) -> list[str]:
    payloads = [command["payload"] for command in answer.json["commands"]]
    return [msgspec.json.decode(payload, type=wire.Command).id for payload in payloads]


def waits(node: NodeClient) -> Pending:
    """A poll that the server holds: what was sent after it has been answered."""
    pending = node.begin("/v1/commands/poll", {"boot_id": node.boot_id, "wait_s": wire.MAX_POLL_S})
    assert node.door.request("GET", "/readyz").status == 200
    return pending


def test_an_order_that_waits_is_given_at_once_and_marked_delivered(node: NodeClient) -> None:
    row = order(node)

    answer = poll(node, 20.0)

    row.refresh_from_db()
    assert ids(answer) == [row.pk]
    assert answer.json["commands"][0]["signature"] == row.signature
    assert row.state == CommandState.DELIVERED


def test_a_poll_without_orders_ends_empty(node: NodeClient) -> None:
    assert poll(node, 0.0).json == {"commands": []}


def test_an_announcement_wakes_the_poll(node: NodeClient, redis: Redis) -> None:
    call = waits(node)
    assert redis.pubsub_numsub(COMMANDS_CHANNEL)[0][1] >= 1

    row = order(node)

    assert ids(call.answer(timeout=60)) == [row.pk]


def test_an_order_is_found_without_any_announcement(node: NodeClient) -> None:
    row = order(node)
    Command.objects.filter(pk=row.pk).update(state=CommandState.DONE)
    pending = waits(node)

    Command.objects.filter(pk=row.pk).update(state=CommandState.QUEUED)

    assert ids(pending.answer(timeout=60)) == [row.pk]


def test_an_order_being_worked_on_is_not_given_again_at_once(node: NodeClient) -> None:
    order(node)
    assert len(ids(poll(node, 20.0))) == 1

    assert ids(poll(node, 0.2)) == []


def test_an_order_whose_answer_was_lost_is_given_again(node: NodeClient) -> None:
    row = order(node)
    poll(node, 20.0)

    assert ids(poll(node, 20.0)) == [row.pk]


def test_a_newer_poll_ends_the_older_one(node: NodeClient) -> None:
    older = waits(node)

    newer = poll(node, 0.0)

    assert (older.answer(timeout=SOONER_S).json, newer.json) == ({"commands": []}, {"commands": []})


def test_orders_of_other_nodes_are_not_given(node: NodeClient, other_node: NodeClient) -> None:
    order(other_node)

    assert ids(poll(node, 0.0)) == []


def test_a_stopping_server_answers_those_who_wait(node: NodeClient) -> None:
    stopping = Server()
    stopping.start()
    node.door = stopping.door()
    call = waits(node)

    stopping.terminate()

    assert call.answer(timeout=SOONER_S).json == {"commands": []}
    assert stopping.wait() == 0


def test_a_node_that_hangs_up_does_not_take_its_orders_with_it(node: NodeClient) -> None:
    waits(node).hang_up()
    row = order(node)

    assert ids(poll(node)) == [row.pk]
