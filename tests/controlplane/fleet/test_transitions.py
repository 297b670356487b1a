"""The node's life: only the table's edges exist, and the audit trail folds to the present state."""

from __future__ import annotations

from importlib import import_module

import pytest
from django.apps import apps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.errors import Conflict
from controlplane.fleet import actions
from controlplane.fleet.choices import (
    COLOURS,
    EDGES,
    FAILED_TWIN,
    STABLE,
    TAKEN_OUT,
    TRANSIENT,
    NodeState,
)
from controlplane.fleet.models import Node
from tests.factories import AuditEventFactory, NodeFactory

NO_FIXTURE_RESET = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
states = st.sampled_from(list(NodeState))


def deadline_of(state: NodeState) -> float | None:
    return 60.0 if state in TRANSIENT else None


def move(node: Node, to: NodeState) -> bool:
    """Whether the node took the step; a refusal must leave it as it was."""
    try:
        actions.transition(SYSTEM, node.pk, to, reason="test", deadline_s=deadline_of(to))
    except Conflict:
        return False
    return True


def node_in(state: NodeState) -> Node:
    node: Node = NodeFactory(state=NodeState.ENROLLED)
    audited_start(node)
    Node.objects.filter(pk=node.pk).update(
        state=state, state_deadline=node.state_since if state in TRANSIENT else None
    )
    return node


def audited_start(node: Node) -> None:
    AuditEvent.objects.create(
        actor_kind="system",
        actor_id="test",
        cluster=node.cluster,
        verb="node.enroll",
        object_type="node",
        object_id=node.pk,
        after={"state": NodeState.ENROLLED},
    )


def fold(node: Node) -> str:
    """The node's state as its audit events tell it."""
    events = AuditEvent.objects.filter(object_type="node", object_id=node.pk).order_by("id")
    states: list[str] = [event.after["state"] for event in events if "state" in event.after]
    return states[-1]


def test_every_state_is_stable_or_transient_with_a_failed_twin() -> None:
    assert frozenset(NodeState) == STABLE | TRANSIENT
    assert not STABLE & TRANSIENT
    assert set(FAILED_TWIN.values()) <= STABLE
    assert set(EDGES) == set(NodeState) == set(COLOURS)


def test_each_transient_state_can_fall_into_its_twin() -> None:
    assert all(FAILED_TWIN[state] in EDGES[state] for state in TRANSIENT)


def test_nothing_that_was_emptied_comes_back_to_work_but_through_validation() -> None:
    called_off = {NodeState.DRAINING, NodeState.DRAIN_FAILED}  # never emptied
    doors = {state for state in NodeState if NodeState.AVAILABLE in EDGES[state]}
    assert doors == {NodeState.VALIDATING, NodeState.ALLOCATED} | called_off
    assert {s for s in NodeState if NodeState.ALLOCATED in EDGES[s]} == {
        NodeState.AVAILABLE
    } | called_off
    assert all(EDGES[s].isdisjoint(called_off) for s in TAKEN_OUT - called_off)


def test_every_state_but_retired_has_a_way_out() -> None:
    assert [state for state in NodeState if not EDGES[state]] == [NodeState.RETIRED]


@pytest.mark.django_db
@NO_FIXTURE_RESET
@given(frm=states, to=states)
def test_only_the_tables_edges_are_taken(frm: NodeState, to: NodeState) -> None:
    node = node_in(frm)
    taken = move(node, to)
    node.refresh_from_db()
    assert taken == (to in EDGES[frm])
    assert node.state == (to if taken else frm)


@pytest.mark.django_db
@NO_FIXTURE_RESET
@given(path=st.lists(states, max_size=12))
def test_the_audit_trail_folds_to_the_state(path: list[NodeState]) -> None:
    node = NodeFactory(state=NodeState.ENROLLED)
    audited_start(node)
    for to in path:
        move(node, to)
    node.refresh_from_db()
    assert fold(node) == node.state


@pytest.mark.django_db
def test_a_node_is_admitted_once_when_it_first_may_take_work() -> None:
    node = NodeFactory(state=NodeState.ENROLLED, admitted_at=None)
    actions.transition(SYSTEM, node.pk, NodeState.VALIDATING, reason="test", deadline_s=60.0)
    node.refresh_from_db()
    untested = node.admitted_at
    first = actions.transition(SYSTEM, node.pk, NodeState.AVAILABLE, reason="test").admitted_at
    actions.transition(SYSTEM, node.pk, NodeState.ALLOCATED, reason="test")
    again = actions.transition(SYSTEM, node.pk, NodeState.AVAILABLE, reason="test").admitted_at
    assert untested is None
    assert first is not None
    assert again == first


@pytest.mark.django_db
def test_an_upgrade_reads_from_the_trail_which_nodes_were_admitted() -> None:
    served, new = NodeFactory.create_batch(2, admitted_at=None)
    for node, state in [(served, "validating"), (served, "available"), (new, "validating")]:
        AuditEventFactory(
            verb="node.transition", object_type="node", object_id=node.pk, after={"state": state}
        )
    import_module("controlplane.fleet.migrations.0005_admitted").read_the_trail(apps, None)
    served.refresh_from_db()
    new.refresh_from_db()
    assert served.admitted_at is not None
    assert new.admitted_at is None


@pytest.mark.django_db
def test_a_transient_state_past_its_deadline_falls_into_its_twin() -> None:
    node = NodeFactory(state=NodeState.QUARANTINED)
    actions.transition(SYSTEM, node.pk, NodeState.REPAIRING, reason="test", deadline_s=0.0)
    node.refresh_from_db()
    assert node.state_deadline is not None

    failed = actions.fail_overdue_nodes(SYSTEM, node.state_deadline.replace(year=2100))

    node.refresh_from_db()
    assert failed == [node.pk]
    assert node.state == NodeState.REPAIR_FAILED
    assert node.state_deadline is None


@pytest.mark.django_db
def test_a_transient_state_without_deadline_is_a_mistake_of_the_caller() -> None:
    node = NodeFactory(state=NodeState.QUARANTINED)
    with pytest.raises(ValueError, match="deadline"):
        actions.transition(SYSTEM, node.pk, NodeState.REPAIRING, reason="test")


@pytest.mark.django_db
def test_a_change_of_state_is_a_visible_change_of_its_cluster() -> None:
    node = NodeFactory()
    before = node.cluster.change_seq
    actions.transition(SYSTEM, node.pk, NodeState.QUARANTINED, reason="test")
    node.cluster.refresh_from_db()
    assert node.cluster.change_seq == before + 1
