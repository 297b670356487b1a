"""A replica is moved: who may be, where to, and the job's word for it in every order."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RunState
from controlplane.incidents.models import Incident, PlaybookStep
from controlplane.incidents.move_plans import plan_move, plan_of_move
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState
from controlplane.jobs.models import Job, Placement, Replica
from node_agent import wire
from runtime import client
from tests.factories import (
    MaintenanceWindowFactory,
    NodeExclusionFactory,
    NodeFactory,
)
from tests.workers.moving import (
    PERSON,
    TELLINGS,
    commands,
    committed,
    move,
    no_spare,
    regrouped,
    replica,
    state,
    told_by,
    trains,
)
from tests.workers.world import World, answer, drain, run_of, unanswered
from workers.playbooks import PLAYBOOKS

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def training(world: World) -> None:
    trains(world)


# --- the order ------------------------------------------------------------------------------------


def test_the_order_starts_a_second_process_beside_the_one_that_trains(world: World) -> None:
    before = world.placements[1]

    standby = move(world)

    (start,) = commands("start_rank")
    assert isinstance(start, wire.StartRank)
    assert (start.standby, start.replica, start.placement) == ("migrate", 1, standby.pk)
    assert (standby.node, standby.moved_from) == (world.spares[0], before)
    assert state(standby.node) == (NodeState.ALLOCATED, False)
    assert replica().state == ReplicaState.ACTIVE
    assert not Incident.objects.exists()


def test_the_record_says_who_and_why(world: World) -> None:
    move(world)

    event = AuditEvent.objects.get(verb="replica.move")
    assert (event.actor_id, event.reason) == ("1", "it is warm there")
    assert event.before["node"] == world.placements[1].node_id
    assert event.after["node"] == world.spares[0].pk


def test_the_dry_run_names_both_nodes_and_changes_nothing(world: World) -> None:
    incidents.publish_playbooks([one.as_row() for one in PLAYBOOKS.values()])
    audited = AuditEvent.objects.count()

    plan = plan_of_move(plan_move(world.job, 1))

    assert plan.node["name"] == "spare-0"
    assert plan.jobs[0]["placement"] == world.placements[1].pk
    assert "agent of spare-0: start_rank" in plan.steps[0]["does"][0]
    assert any("node-1 is free" in note for note in plan.notes)
    assert AuditEvent.objects.count() == audited


def test_it_goes_where_it_is_told_to(world: World) -> None:
    assert move(world, world.spares[1].pk).node == world.spares[1]


def _stop(world: World) -> None:
    Job.objects.update(state=JobState.STOPPING)


def _foreign(world: World) -> None:
    Job.objects.update(coordinator_address="")


def _lose(world: World) -> None:
    Replica.objects.filter(index=1).update(state=ReplicaState.LOST)


def _moving(world: World) -> None:
    move(world)


@pytest.mark.parametrize(
    ("obstacle", "words"),
    [
        (_stop, "is stopping; only a replica of a running job"),
        (_foreign, "started by its own scheduler"),
        (_lose, "is lost; only one that trains"),
        (_moving, "is under way"),
        (no_spare, "no node is free"),
    ],
)
def test_a_replica_that_cannot_be_moved_is_refused_with_the_reason(
    world: World, obstacle: Callable[[World], None], words: str
) -> None:
    obstacle(world)
    with pytest.raises(Conflict, match=words):
        incidents.move_replica(PERSON, world.job.pk, 1, reason="x")


def _quarantined(world: World, node: Node) -> None:
    fleet.transition(SYSTEM, node.pk, NodeState.QUARANTINED, reason="x")


def _silent(world: World, node: Node) -> None:
    world.silence(node)


def _held(world: World, node: Node) -> None:
    fleet.set_hold(PERSON, node.pk, "mine")


def _drained(world: World, node: Node) -> None:
    fleet.set_drained_by(PERSON, node.pk, "slurm", "x")


def _excluded(world: World, node: Node) -> None:
    NodeExclusionFactory(job=world.job, node=node, reason="slow")


def _in_maintenance(world: World, node: Node) -> None:
    MaintenanceWindowFactory(cluster=world.cluster, node=node)


def _reserved(world: World, node: Node) -> None:
    jobs.reserve_spare(SYSTEM, world.cluster.pk, holder="slurm", ttl_s=60, reason="x")


def _small(world: World, node: Node) -> None:
    Job.objects.update(gpus_per_replica=2)


@pytest.mark.parametrize(
    ("obstacle", "words"),
    [
        (_quarantined, "it is quarantined"),
        (_silent, "it is not heard"),
        (_held, "it is on hold: mine"),
        (_drained, "it was drained by slurm"),
        (_excluded, "is kept from it: slow"),
        (_in_maintenance, "it is in maintenance"),
        (_reserved, "it is reserved"),
        (_small, "it has 1 cards"),
    ],
)
def test_a_node_that_cannot_take_it_is_refused_with_the_reason(
    world: World, obstacle: Callable[[World, Node], None], words: str
) -> None:
    obstacle(world, world.spares[0])
    with pytest.raises(Conflict, match=words):
        incidents.move_replica(PERSON, world.job.pk, 1, node_id=world.spares[0].pk, reason="x")


def test_a_node_elsewhere_and_its_own_are_refused(world: World) -> None:
    with pytest.raises(Conflict, match="not in the cluster"):
        plan_move(world.job, 1, NodeFactory().pk)
    with pytest.raises(Conflict, match="runs there already"):
        plan_move(world.job, 1, world.placements[1].node_id)
    with pytest.raises(Conflict, match="has no replica 7"):
        plan_move(world.job, 7)
    with pytest.raises(Conflict, match="reason"):
        incidents.move_replica(PERSON, world.job.pk, 1, reason=" ")


# --- what the job tells, in every order -----------------------------------------------------------


@pytest.mark.parametrize("first", TELLINGS)
@pytest.mark.parametrize("second", TELLINGS)
def test_whatever_is_told_first_the_replica_has_moved(
    world: World,
    first: Callable[[World, Placement], None],
    second: Callable[[World, Placement], None],
) -> None:
    standby = move(world)
    for tell in (first, second, *TELLINGS):
        tell(world, standby)
        drain()

    standby.refresh_from_db()
    world.placements[1].refresh_from_db()
    assert (standby.standby, standby.state) == (False, PlacementState.RUNNING)
    assert world.placements[1].state == PlacementState.ENDED
    assert replica().state == ReplicaState.ACTIVE
    assert state(world.placements[1].node) == (NodeState.AVAILABLE, True)
    assert state(standby.node) == (NodeState.ALLOCATED, False)
    run = run_of("move-replica")
    assert run.state == RunState.SUCCEEDED
    assert "replica 1 moved from node-1 to spare-0" in run.state_reason
    assert not Incident.objects.exists()


def test_its_record_says_how_long_the_job_paused(world: World) -> None:
    standby = move(world)
    told_by(world.placements[0], regrouped(entered=[standby.pk], joined=[1], gap_s=0.42))
    for tell in TELLINGS:
        tell(world, standby)
        drain()

    said = run_of("move-replica").state_reason
    assert said.startswith("replica 1 moved from node-1 to spare-0, pause 0.42 s")


def test_the_standby_itself_is_heard_last(world: World) -> None:
    incidents.move_replica(PERSON, world.job.pk, 1, reason="x")
    standby = Placement.objects.get(standby=True)

    told_by(world.placements[0], regrouped(entered=[standby.pk]))
    told_by(standby, client.Hello(pid=9, at=time.time()))

    standby.refresh_from_db()
    assert (standby.state, standby.pid) == (PlacementState.RUNNING, 9)
    assert replica().state == ReplicaState.ACTIVE


def test_a_hello_and_the_others_progress_say_nothing_of_the_replica(world: World) -> None:
    standby = move(world)
    _told_by_peers_progress(world)

    standby.refresh_from_db()
    assert (standby.standby, standby.joined_at) == (True, None)
    assert replica().state == ReplicaState.ACTIVE
    assert world.placements[1].state == PlacementState.RUNNING


def _told_by_peers_progress(world: World) -> None:
    told_by(world.placements[0], committed(step=30, epoch=1, at=time.time() + 1))


def test_one_that_was_dropped_and_came_back_itself_has_not_moved(world: World) -> None:
    standby = move(world)

    told_by(world.placements[0], regrouped(epoch=2, replicas=[0], lost=[1], joined=[]))
    told_by(world.placements[0], regrouped(epoch=3, entered=[world.placements[1].pk]))

    standby.refresh_from_db()
    assert standby.standby


def test_the_old_node_is_free_only_once_its_process_has_ended(world: World) -> None:
    standby = move(world)
    told_by(world.placements[0], regrouped(entered=[standby.pk]))
    drain()
    assert state(world.placements[1].node)[0] == NodeState.ALLOCATED

    long_ago = timezone.now() - timedelta(minutes=1)
    PlaybookStep.objects.filter(key="free-node").update(started_at=long_ago)
    drain()
    (stop,) = commands("stop_process")
    answer("stop_process", stopped=True)
    drain()

    assert isinstance(stop, wire.StopProcess)
    assert stop.placement == world.placements[1].pk
    assert state(world.placements[1].node) == (NodeState.AVAILABLE, True)
    assert standby.node == world.placement_of(1).node


def has_moved(world: World) -> Node:
    """Replica 1 has the place elsewhere, and its old process does not leave. Returns its old node,
    which is told to end that."""
    standby = move(world)
    told_by(world.placements[0], regrouped(entered=[standby.pk]))
    drain()
    long_ago = timezone.now() - timedelta(minutes=1)
    PlaybookStep.objects.filter(key="free-node").update(started_at=long_ago)
    drain()
    assert len(commands("stop_process")) == 1
    return world.placements[1].node


def test_an_old_node_that_fell_silent_before_it_answered_is_told_again_once_it_is_heard(
    world: World,
) -> None:
    node = has_moved(world)
    fleet.set_hold(PERSON, node.pk, "mine")  # else it is repaired
    world.silence(node)
    drain()
    unanswered()
    waits, told = run_of("move-replica").state, len(commands("stop_process"))
    world.hear(node)
    drain()
    answer("stop_process", stopped=True)
    drain()

    assert (waits, told) == (RunState.WAITING, 1)
    assert len(commands("stop_process")) == 2
    assert state(node) == (NodeState.AVAILABLE, True)
    assert run_of("move-replica").state == RunState.SUCCEEDED


def test_an_old_node_that_is_heard_and_does_not_answer_is_a_person_s_matter(world: World) -> None:
    node = has_moved(world)
    unanswered()

    assert run_of("move-replica").state == RunState.NEEDS_OPERATOR
    assert state(node)[0] == NodeState.ALLOCATED


def test_a_move_that_asked_for_a_person_goes_on_once_its_old_process_was_seen_to_end(
    world: World,
) -> None:
    node = has_moved(world)
    answer("stop_process", state="failed")
    drain()
    asked = run_of("move-replica").state
    world.exits(world.placements[1], exit_code=0)
    drain()

    assert asked == RunState.NEEDS_OPERATOR
    assert run_of("move-replica").state == RunState.SUCCEEDED
    assert state(node) == (NodeState.AVAILABLE, True)


def test_a_node_that_was_taken_out_meanwhile_stays_out(world: World) -> None:
    standby = move(world)
    node = world.placements[1].node
    fleet.transition(PERSON, node.pk, NodeState.QUARANTINED, reason="mine")

    told_by(world.placements[0], regrouped(entered=[standby.pk]))
    drain()

    assert state(node) == (NodeState.QUARANTINED, False)
    assert run_of("move-replica").state == RunState.SUCCEEDED
