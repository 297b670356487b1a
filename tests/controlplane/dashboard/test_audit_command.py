"""`manage.py audit`: says whether the trail is whole, names what is not, and prints it."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from controlplane.accounts import chain
from controlplane.accounts.actions import chain_audit
from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from tests.factories import AuditEventFactory, NodeFactory

pytestmark = pytest.mark.django_db


def say(*arguments: str) -> str:
    out = StringIO()
    call_command("audit", *arguments, stdout=out)
    return out.getvalue()


def fail(*arguments: str) -> str:
    out = StringIO()
    with pytest.raises(SystemExit) as end:
        call_command("audit", *arguments, stdout=out)
    assert end.value.code == 1
    return out.getvalue()


@pytest.fixture
def node() -> Node:
    """A node with its whole life on record."""
    node = NodeFactory(name="node-01", state=NodeState.AVAILABLE)
    AuditEventFactory(
        verb="node.enroll", object_type="node", object_id=node.pk, after={"state": "available"}
    )
    fleet.transition(SYSTEM, node.pk, NodeState.SUSPECT, reason="odd")
    fleet.transition(SYSTEM, node.pk, NodeState.QUARANTINED, reason="worse")
    chain_audit()
    return node


def test_a_whole_trail_is_called_whole_and_the_verification_is_on_record(node: Node) -> None:
    head = chain.head()

    answer = say("verify")

    assert (
        "The chain of 3 rows is intact; 0 not chained yet; 0 nodes whose state does not match"
        in answer
    )
    assert f"head {head}" in answer
    record = AuditEvent.objects.latest("pk")
    assert (record.verb, record.after["ok"], record.after["head"]) == (
        "audit.verify",
        True,
        str(head),
    )


def test_an_edit_is_named_with_its_place_and_the_status_is_one(node: Node) -> None:
    AuditEvent.objects.filter(position=2).update(reason="nothing was odd")

    answer = fail("verify")

    assert "position 2, row" in answer
    assert "changed after it was chained" in answer
    assert "BROKEN" in answer


def test_the_json_answer_holds_all_of_it(node: Node) -> None:
    AuditEvent.objects.filter(position=1).update(actor_id="nobody")

    told: dict[str, Any] = json.loads(fail("verify", "--json", "--no-record"))

    assert (told["ok"], told["rows"], told["problem_count"], told["strays"]) == (False, 3, 1, [])
    assert told["problems"][0]["position"] == 1
    assert not AuditEvent.objects.filter(verb="audit.verify").exists()


def test_the_head_in_the_json_answer_is_what_the_option_takes(node: Node) -> None:
    told: dict[str, Any] = json.loads(say("verify", "--json"))

    assert told["head"] == str(chain.head())
    assert json.loads(say("verify", "--json", "--head", told["head"]))["ok"]


def test_a_pinned_head_finds_what_was_cut_off(node: Node) -> None:
    head = str(chain.head())
    say("verify", "--head", head)
    AuditEvent.objects.filter(position__gte=3).delete()

    assert "cut off" in fail("verify", "--head", head)


@pytest.mark.parametrize("head", ["", "12", "x:" + "0" * 64, "3:abc"])
def test_a_head_must_be_one(head: str) -> None:
    with pytest.raises(CommandError, match="POSITION:HASH"):
        say("verify", "--head", head)


# --- A node's state is the fold of its events -----------------------------------------------------


def test_a_state_that_was_set_behind_the_trails_back_is_named(node: Node) -> None:
    Node.objects.filter(pk=node.pk).update(state=NodeState.AVAILABLE)

    assert "node node-01: it is available, but its events end with quarantined" in fail("verify")


def test_a_node_without_a_past_is_named() -> None:
    NodeFactory(name="from-nowhere")

    assert "node from-nowhere: it is available, but no event says" in fail("verify")


def test_a_hole_in_the_middle_of_a_nodes_life_is_named(node: Node) -> None:
    AuditEvent.objects.filter(after__state="suspect").delete()
    AuditEvent.objects.update(position=None, hash="")

    assert "an event leads from suspect, while the one before it had led to available" in fail(
        "verify"
    )


# --- Printing it ----------------------------------------------------------------------------------


def test_the_tail_is_the_newest_rows_in_their_order(node: Node) -> None:
    lines = [json.loads(line) for line in say("tail", "-n", "2").splitlines()]

    assert [line["after"] for line in lines] == [{"state": "suspect"}, {"state": "quarantined"}]
    assert lines[0]["before"] == {"state": "available"}


def test_the_export_goes_on_after_a_position(node: Node) -> None:
    AuditEventFactory()  # not chained yet: it is not exported

    lines = [json.loads(line) for line in say("export", "--after", "1").splitlines()]

    assert [line["position"] for line in lines] == [2, 3]
    assert all(len(line["hash"]) == 64 for line in lines)
