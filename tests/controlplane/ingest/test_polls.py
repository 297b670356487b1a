"""Orders reach a waiting node at once, and waiting costs nobody anything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from redis import Redis

from controlplane.accounts.models import SYSTEM
from controlplane.doorbell import COMMANDS_CHANNEL
from controlplane.errors import Refused
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import CommandState
from controlplane.fleet.models import Command
from controlplane.ingest.polls import Polls
from node_agent import wire

from .door import SOONER_S, NodeClient, Pending, Server, speaking_to, wait_until


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
    wait_until(lambda: node.door.request("GET", "/readyz").status == 200)
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


@pytest.mark.usefixtures("stopping")
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


def test_a_stopping_server_answers_those_who_wait(node: NodeClient, stopping: Server) -> None:
    call = waits(node)

    stopping.terminate()

    assert call.answer(timeout=SOONER_S).json == {"commands": []}
    assert stopping.wait() == 0


def test_a_node_that_hangs_up_does_not_take_its_orders_with_it(node: NodeClient) -> None:
    waits(node).hang_up()
    row = order(node)

    assert ids(poll(node)) == [row.pk]


def test_a_look_that_fails_unforeseen_is_not_the_last() -> None:
    order = wire.SignedCommand(payload="p", signature="s")
    take = AsyncMock(side_effect=RuntimeError("a fault of ours"))

    async def two_polls() -> wire.Commands:
        polls = Polls(take)
        looking = asyncio.create_task(polls.run())
        with pytest.raises(Refused, match="could not be looked up"):
            await polls.wait("nod_1", 0.0)
        take.side_effect = None
        take.return_value = {"nod_1": [("cmd_1", order)]}
        commands = await polls.wait("nod_1", 20.0)
        looking.cancel()
        return commands

    assert asyncio.run(asyncio.wait_for(two_polls(), SOONER_S)).commands == [order]


@pytest.fixture
def mortal(node: NodeClient) -> Iterator[Server]:
    """A server that loses a task with the first order."""
    with speaking_to("tests.controlplane.ingest.mortal:app", node) as server:
        yield server


def test_a_server_that_one_of_its_tasks_left_ends_to_be_started_again(
    node: NodeClient, mortal: Server
) -> None:
    call = waits(node)

    order(node)

    assert call.answer(timeout=SOONER_S).status == 200
    assert mortal.wait() == 1
