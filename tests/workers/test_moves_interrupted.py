"""A replica is being moved, and something comes between: it trains on and nothing is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.fleet.choices import NodeState
from controlplane.incidents import actions as incidents
from controlplane.incidents.actions.job_end import end_job
from controlplane.incidents.choices import IncidentState, RunState
from controlplane.incidents.models import Incident, PlaybookRun, PlaybookStep
from controlplane.incidents.move_plans import SAVE_S
from controlplane.jobs.choices import PlacementState, ReplicaState
from controlplane.jobs.models import Placement, Replica
from node_agent import wire
from runtime import client
from tests.workers.moving import (
    PERSON,
    XID_79,
    commands,
    heard_long_ago,
    left,
    move,
    no_spare,
    regrouped,
    replica,
    state,
    told_by,
    told_by_itself,
    told_by_the_one_that_left,
    trains,
)
from tests.workers.world import World, answer, drain, run_of

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def training(world: World) -> None:
    trains(world)


# --- what may come between ------------------------------------------------------------------------


def given_up(world: World, standby: Placement) -> None:
    standby.refresh_from_db()
    assert (standby.state, standby.standby) == (PlacementState.ENDED, True)
    assert replica().state == ReplicaState.ACTIVE
    assert world.placement_of(1) == world.placements[1]
    assert not Incident.objects.filter(replica=1).exists()
    assert not PlaybookRun.objects.filter(
        playbook="move-replica", state=RunState.SUCCEEDED
    ).exists()


def test_a_standby_that_dies_costs_its_replica_nothing(world: World) -> None:
    standby = move(world)
    world.exits(standby, signal=9)
    drain()
    heard_long_ago()
    drain()
    answer("stop_process", stopped=True)
    drain()

    given_up(world, standby)
    assert state(standby.node) == (NodeState.AVAILABLE, True)
    assert run_of("move-replica").state == RunState.FAILED
    assert "ended, signal 9" in run_of("move-replica").state_reason


def test_a_standby_that_is_never_level_is_ended_at_once(world: World) -> None:
    standby = move(world)
    long_ago = timezone.now() - timedelta(hours=1)
    PlaybookStep.objects.filter(key="await-place").update(started_at=long_ago, timeout_s=1e6)
    drain()
    (stop,) = commands("stop_process")
    answer("stop_process", stopped=True)
    drain()

    given_up(world, standby)
    assert stop == wire.StopProcess(placement=standby.pk, grace_s=0)


def test_a_node_that_does_not_start_it_is_free_again(world: World) -> None:
    incidents.move_replica(PERSON, world.job.pk, 1, reason="x")
    standby = Placement.objects.get(standby=True)
    drain()
    answer("start_rank", state="refused")
    drain()
    answer("stop_process", stopped=True)
    drain()

    given_up(world, standby)
    assert state(standby.node) == (NodeState.AVAILABLE, True)
    assert "spare-0 did not start it" in run_of("move-replica").state_reason


def test_a_standbys_node_that_goes_silent_is_taken_out_and_nobody_misses_a_replica(
    world: World,
) -> None:
    standby = move(world)
    world.silence(standby.node)
    drain()

    given_up(world, standby)
    assert world.bmcs[standby.node_id].orders[0] == "ForceOff"
    assert run_of("move-replica").state == RunState.FAILED
    assert Incident.objects.get().node == standby.node


def test_a_fault_of_the_standbys_card_is_no_loss_of_the_replica(world: World) -> None:
    standby = move(world)
    world.kernel_says(standby.node, XID_79)
    drain()
    answer("stop_process", stopped=True)
    drain()

    given_up(world, standby)
    assert state(standby.node)[0] not in (NodeState.AVAILABLE, NodeState.ALLOCATED)


def test_the_standby_takes_the_place_of_one_that_dies_and_no_other_is_started(
    world: World,
) -> None:
    standby = move(world)
    world.kill(world.placements[1])
    drain()
    standby.refresh_from_db()
    assert not standby.standby

    told_by(world.placements[0], regrouped(epoch=10_000, lost=[1], entered=[standby.pk]))
    told_by_itself(world, standby)
    drain()

    assert world.placement_of(1) == standby
    assert replica().state == ReplicaState.ACTIVE
    assert len(commands("start_rank")) == 1
    assert Incident.objects.get().state == IncidentState.RESOLVED
    assert run_of("move-replica").state == RunState.SUCCEEDED
    assert state(world.placements[1].node)[0] == NodeState.AVAILABLE


def test_the_standby_takes_the_place_when_the_old_node_is_taken_out(world: World) -> None:
    standby = move(world)
    world.kernel_says(world.placements[1].node, XID_79)
    drain()
    answer("stop_process", stopped=True)
    drain()
    told_by_itself(world, standby)
    drain()

    assert world.placement_of(1) == standby
    assert replica().state == ReplicaState.ACTIVE
    assert len(commands("start_rank")) == 1
    assert state(world.placements[1].node)[0] not in (NodeState.AVAILABLE, NodeState.ALLOCATED)


def test_one_that_took_the_place_and_died_unheard_is_brought_back(world: World) -> None:
    standby = move(world)
    world.exits(standby, signal=9)
    drain()
    told_by(world.placements[1], left(standby))
    drain()

    assert Incident.objects.get().replica == 1
    assert run_of("replica-lost").context["lost_placement"] == standby.pk


def _missed_by_peers(world: World, standby: Placement) -> None:
    lost = client.PeerLost(
        epoch=2, replica=1, placement=standby.pk, step=21, at=time.time(), how="reset"
    )
    told_by(world.placements[0], lost)


@pytest.mark.parametrize("tell", [_missed_by_peers, told_by_the_one_that_left])
def test_one_that_took_the_place_and_died_while_it_was_given_up_is_brought_back(
    world: World, tell: Callable[[World, Placement], None]
) -> None:
    standby = move(world)
    incidents.cancel_run(PERSON, run_of("move-replica").pk, "no")

    tell(world, standby)
    drain()

    world.placements[1].refresh_from_db()
    assert world.placements[1].state == PlacementState.ENDED
    assert run_of("replica-lost").context["lost_placement"] == standby.pk


# --- people ---------------------------------------------------------------------------------------


def test_a_cancelled_move_leaves_nothing(world: World) -> None:
    standby = move(world)

    incidents.cancel_run(PERSON, run_of("move-replica").pk, "no")

    given_up(world, standby)
    assert commands("stop_process") == [wire.StopProcess(placement=standby.pk, grace_s=0)]
    assert state(standby.node) == (NodeState.AVAILABLE, True)


def test_what_was_replaced_is_ended_though_its_move_is_cancelled(world: World) -> None:
    standby, old = move(world), world.placements[1]
    told_by(world.placements[0], regrouped(entered=[standby.pk]))
    incidents.cancel_run(PERSON, run_of("move-replica").pk, "no")
    incidents.finish_ending_jobs()
    leaving = state(old.node)
    Placement.objects.update(ended_at=timezone.now() - timedelta(seconds=2 * SAVE_S))
    incidents.finish_ending_jobs()
    answer("stop_process", stopped=True)
    incidents.finish_ending_jobs()

    assert commands("stop_process") == [wire.StopProcess(placement=old.pk, grace_s=0)]
    assert leaving == (NodeState.ALLOCATED, False)
    assert state(old.node) == (NodeState.AVAILABLE, True)  # it takes the part of the spare


def test_a_job_that_ends_takes_its_moves_along(world: World) -> None:
    standby = move(world)

    end_job(PERSON, world.job.pk, "done")

    standby.refresh_from_db()
    assert standby.state == PlacementState.ENDED
    assert run_of("move-replica").state == RunState.CANCELLED


def test_a_job_that_is_started_anew_takes_its_moves_along(world: World) -> None:
    standby = move(world)

    incidents.restart_job(PERSON, world.job.pk, "again")

    standby.refresh_from_db()
    assert standby.state == PlacementState.ENDED
    assert set(Replica.objects.values_list("state", flat=True)) == {ReplicaState.PENDING}


def moves_off(world: World, placement: Placement) -> Placement:
    """Its node is drained, and another process takes its place. Returns that."""
    incidents.order_node(PERSON, placement.node_id, "drain", "new cables")
    drain()
    answer("start_rank", pid=7)
    standby = Placement.objects.get(standby=True)
    told_by(standby, client.Hello(pid=7, at=time.time()))
    told_by(world.placements[0], regrouped(entered=[standby.pk]))
    return standby


def test_a_drain_lets_the_replica_move_first(world: World) -> None:
    node = world.placements[1].node
    standby = moves_off(world, world.placements[1])
    world.exits(world.placements[1], requested=True)
    drain()

    assert state(node)[0] == NodeState.QUARANTINED
    assert world.placement_of(1) == standby
    assert not commands("stop_process")
    assert not Incident.objects.exists()
    assert {run.requested_by for run in PlaybookRun.objects.all()} == {"1"}


def test_a_drained_node_is_not_empty_before_the_old_process_was_seen_to_end(world: World) -> None:
    old = world.placements[1]
    standby = moves_off(world, old)
    drain()
    before = (state(old.node)[0], commands("stop_process"))
    answer("stop_process", stopped=True)
    drain()

    assert before == (NodeState.DRAINING, [wire.StopProcess(placement=old.pk, grace_s=0)])
    assert state(old.node)[0] == NodeState.QUARANTINED
    assert world.placement_of(1) == standby
    assert not Incident.objects.exists()


def test_a_drain_without_a_free_node_stops_the_replica(world: World) -> None:
    node = world.placements[1].node
    no_spare(world)
    incidents.order_node(PERSON, node.pk, "drain", "new cables")
    drain()
    world.peers_lose(world.placements[1])
    answer("stop_process", stopped=True)
    drain()

    assert state(node)[0] == NodeState.QUARANTINED
    assert replica().state == ReplicaState.LOST
    assert run_of("replica-lost").state in (RunState.RUNNING, RunState.WAITING)
