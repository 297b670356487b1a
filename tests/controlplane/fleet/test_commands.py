"""Commands: signed, one per asker, their results taken from their own node only."""

from __future__ import annotations

import base64
import json
import time
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from django.utils import timezone

from controlplane import crypto
from controlplane.accounts.models import SYSTEM
from controlplane.errors import Refused
from controlplane.fleet import actions
from controlplane.fleet.actions import commands
from controlplane.fleet.choices import CommandState
from controlplane.fleet.models import Command
from controlplane.incidents.choices import RunState
from controlplane.incidents.models import PlaybookStep
from node_agent import wire
from tests.factories import NodeFactory, PlaybookStepFactory

pytestmark = pytest.mark.django_db


def result(command: Command, state: str = "done") -> wire.CommandResult:
    return wire.CommandResult(id=command.pk, state=state, at=time.time(), output={"pid": 7})  # type: ignore[arg-type]


def test_a_command_carries_a_signature_that_the_enrolled_key_verifies() -> None:
    node = NodeFactory()
    command = actions.queue_command(SYSTEM, node.pk, wire.Diagnose(), requester="stp_1")
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(crypto.command_public_keys()[0]))
    key.verify(base64.b64decode(command.signature), wire.COMMAND_CONTEXT + command.payload.encode())
    assert json.loads(command.payload)["node_id"] == node.pk


def test_asking_again_finds_the_same_command() -> None:
    node = NodeFactory()
    first = actions.queue_command(SYSTEM, node.pk, wire.Diagnose(), requester="stp_1")
    again = actions.queue_command(SYSTEM, node.pk, wire.Diagnose(), requester="stp_1")
    assert again.pk == first.pk
    assert Command.objects.count() == 1


def test_a_delivered_command_is_handed_out_until_its_result_is_known() -> None:
    node = NodeFactory()
    command = actions.queue_command(SYSTEM, node.pk, wire.Diagnose(), requester="stp_1")
    assert actions.take_commands([node.pk])[node.pk][0].pk == command.pk
    assert actions.take_commands([node.pk])[node.pk][0].pk == command.pk
    actions.record_command_result(node.pk, result(command))
    assert actions.take_commands([node.pk]) == {}


def test_a_node_whose_key_was_revoked_is_handed_no_order() -> None:
    node, other = NodeFactory(), NodeFactory()
    for one in (node, other):
        actions.queue_command(SYSTEM, one.pk, wire.Diagnose(), requester=one.pk)
    actions.revoke_node_key(SYSTEM, node.pk, "stolen")

    assert set(actions.take_commands([node.pk, other.pk])) == {other.pk}
    assert node.commands.get().state == CommandState.QUEUED


def test_the_first_result_stands() -> None:
    node = NodeFactory()
    command = actions.queue_command(SYSTEM, node.pk, wire.Diagnose(), requester="stp_1")
    actions.record_command_result(node.pk, result(command, "done"))
    actions.record_command_result(node.pk, result(command, "failed"))
    command.refresh_from_db()
    assert command.state == CommandState.DONE
    assert command.output == {"pid": 7}


def test_a_result_from_another_node_is_refused_and_changes_nothing() -> None:
    command = actions.queue_command(SYSTEM, NodeFactory().pk, wire.Diagnose(), requester="stp_1")
    with pytest.raises(Refused) as refusal:
        actions.record_command_result(NodeFactory().pk, result(command))
    command.refresh_from_db()
    assert (refusal.value.status, refusal.value.field) == (403, "id")
    assert command.state == CommandState.QUEUED


def test_an_order_that_nobody_answers_expires() -> None:
    node = NodeFactory()
    command = actions.queue_command(SYSTEM, node.pk, wire.Diagnose(), requester="s", ttl_s=1)
    assert actions.expire_commands(timezone.now() + timedelta(seconds=60)) == 1
    command.refresh_from_db()
    assert command.state == CommandState.EXPIRED


def finished(requester: str, *, days: int) -> Command:
    """Its asker's order came to its end so long ago."""
    command = actions.queue_command(
        SYSTEM, NodeFactory().pk, wire.Diagnose(), requester=f"{requester}.0-0"
    )
    actions.record_command_result(command.node_id, result(command))
    Command.objects.filter(pk=command.pk).update(finished_at=timezone.now() - timedelta(days=days))
    return command


def forget() -> int:
    at_work = PlaybookStep.objects.filter(run__state=RunState.NEEDS_OPERATOR)
    return actions.forget_commands(timezone.now(), at_work.values_list("pk", flat=True))


def test_what_came_of_an_order_is_forgotten_after_a_month() -> None:
    lately, long_ago = finished("stp_1", days=29), finished("stp_2", days=31)
    pending = actions.queue_command(SYSTEM, lately.node_id, wire.Diagnose(), requester="stp_3")

    assert forget() == 1
    assert set(Command.objects.all()) == {lately, pending}
    assert not Command.objects.filter(pk=long_ago.pk).exists()


def test_the_orders_of_a_step_that_is_not_over_are_kept() -> None:
    step = PlaybookStepFactory(run__state=RunState.NEEDS_OPERATOR)
    finished(step.pk, days=90)

    assert forget() == 0


def test_orders_are_forgotten_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "DELETE_BATCH", 2)
    for n in range(3):
        finished(f"stp_{n}", days=31)

    assert (forget(), forget(), forget()) == (2, 1, 0)


def expired_order(action: wire.Verb) -> Command:
    command = actions.queue_command(SYSTEM, NodeFactory().pk, action, requester="stp_1.0-0")
    actions.expire_commands(timezone.now() + timedelta(hours=1))
    return command


def start_of(placement: str) -> wire.StartCoordinator:
    return wire.StartCoordinator(job="job_1", placement=placement, token="t", min_replicas=1)


@pytest.mark.parametrize(
    ("action", "state"),
    [
        (wire.StopProcess(placement="plc_1"), "done"),
        (wire.StopProcess(placement="plc_1"), "failed"),
        (start_of("plc_1"), "failed"),
    ],
)
def test_a_result_that_comes_late_stands(action: wire.Verb, state: str) -> None:
    command = expired_order(action)
    actions.record_command_result(command.node_id, result(command, state))
    actions.record_command_result(command.node_id, result(command, "refused"))
    command.refresh_from_db()
    assert (command.state, command.output, command.error) == (state, {"pid": 7}, "")


def test_that_a_process_was_started_is_only_noted_once_it_was_given_up() -> None:
    command = expired_order(start_of("plc_1"))
    actions.record_command_result(command.node_id, result(command))
    command.refresh_from_db()
    assert (command.state, command.output) == (CommandState.EXPIRED, {"pid": 7})


def test_an_order_that_was_called_back_stays_so_whatever_came_of_it() -> None:
    node = NodeFactory()
    command = actions.queue_command(SYSTEM, node.pk, wire.Diagnose(), requester="stp_1.0-0")
    actions.call_back_commands("stp_1")
    actions.record_command_result(node.pk, result(command))
    command.refresh_from_db()
    assert (command.state, command.error) == (CommandState.EXPIRED, "called back")
    assert command.output == {"pid": 7}
