"""Warm spares: started where they lack, told when they take a replica's place, missed by nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.choices import Action, Urgency
from controlplane.incidents import actions as incidents
from controlplane.incidents.actions.job_end import end_job
from controlplane.incidents.choices import Mode, RunState, StepState
from controlplane.incidents.models import (
    Incident,
    PlaybookMode,
    PlaybookRun,
    PlaybookStep,
    Reservation,
)
from controlplane.incidents.move_plans import SAVE_S
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState
from controlplane.jobs.models import Job, Placement, Replica
from controlplane.jobs.selectors import slots
from node_agent import wire
from runtime import client
from tests.workers.moving import (
    PERSON,
    XID_79,
    commands,
    committed,
    no_spare,
    regrouped,
    state,
    told_by,
    trains,
)
from tests.workers.world import World, answer, drain, run_of
from workers import losses

pytestmark = pytest.mark.django_db

START = "warm-spare"
XID_31 = "NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python3, Ch 0000000d, intr 0. MMU Fault"


@pytest.fixture(autouse=True)
def training(world: World) -> None:
    trains(world)
    jobs.set_warm_spares(PERSON, world.job.pk, 1, "it is precious")


@pytest.fixture
def spare(world: World) -> Placement:
    """The job's warm spare, which follows."""
    return follows(world)


def follows(world: World) -> Placement:
    incidents.keep_warm_spares()
    drain()
    answer("start_rank", pid=7)
    found = list(world.job.held_warm_spares)[-1]
    holds_the_state(found)
    drain()
    found.refresh_from_db()
    return found


def holds_the_state(spare: Placement) -> None:
    told_by(
        spare,
        client.Hello(pid=7, at=time.time()),
        client.Hello(pid=7, at=time.time(), stage="follows"),
    )


def takes_place(spare: Placement, index: int = 1) -> None:
    """Its process says that it makes steps in this replica's place."""
    batch = client.Batch(
        job=spare.replica.job_id,
        replica=index,
        rank=0,
        placement=spare.pk,
        sent_at=time.time(),
        messages=[],
    )
    hello = client.Hello(pid=7, at=time.time(), stage="entered")
    jobs.record_runtime_batch(spare.replica.job_id, batch, [hello])
    spare.refresh_from_db()


# --- started and ended ----------------------------------------------------------------------------


def test_what_lacks_is_started_on_a_node_of_its_own(world: World, spare: Placement) -> None:
    (start,) = commands("start_rank")
    assert isinstance(start, wire.StartRank)
    assert (start.standby, start.placement) == ("spare", spare.pk)
    assert (spare.standby, spare.warm, spare.state) == (True, True, PlacementState.RUNNING)
    assert state(world.spares[0]) == (NodeState.ALLOCATED, False)
    assert run_of(START).state == RunState.SUCCEEDED
    assert set(Replica.objects.values_list("state", flat=True)) == {ReplicaState.ACTIVE}


def test_nothing_is_started_where_none_lacks(world: World, spare: Placement) -> None:
    assert incidents.keep_warm_spares() == 0
    assert PlaybookRun.objects.filter(playbook=START).count() == 1


def test_one_is_started_after_the_other(world: World) -> None:
    jobs.set_warm_spares(PERSON, world.job.pk, 2, "two")
    incidents.keep_warm_spares()
    assert incidents.keep_warm_spares() == 0
    drain()
    answer("start_rank", pid=7)
    holds_the_state(next(iter(world.job.held_warm_spares)))
    drain()
    assert incidents.keep_warm_spares() == 1
    assert [one.node for one in list(world.job.held_warm_spares)] == world.spares[:2]


def _stops(world: World) -> None:
    Job.objects.update(state=JobState.STOPPING)


def _lives_as_one(world: World) -> None:
    Job.objects.update(whole=True)


def _foreign(world: World) -> None:
    Job.objects.update(coordinator_address="")


def _waits_for_a_node(world: World) -> None:
    jobs.end_placement(SYSTEM, world.placements[1].pk, "gone", free_node=False)


def _switched_off(world: World) -> None:
    PlaybookMode.objects.create(cluster=world.cluster, playbook=START, mode=Mode.OFF)


@pytest.mark.parametrize(
    "obstacle",
    [no_spare, _stops, _lives_as_one, _foreign, _waits_for_a_node, _switched_off],
)
def test_none_is_started_where_it_would_be_in_the_way(
    world: World, obstacle: Callable[[World], None]
) -> None:
    obstacle(world)
    assert incidents.keep_warm_spares() == 0
    assert list(world.job.held_warm_spares) == []


def test_one_that_its_node_does_not_start_is_given_up_and_tried_again_later(world: World) -> None:
    incidents.keep_warm_spares()
    drain()
    answer("start_rank", "refused")
    drain()
    answer("stop_process", stopped=True)
    drain()

    assert run_of(START).state == RunState.FAILED
    assert state(world.spares[0]) == (NodeState.AVAILABLE, True)
    assert incidents.keep_warm_spares() == 0
    PlaybookRun.objects.update(finished_at=timezone.now() - timedelta(minutes=5))
    assert incidents.keep_warm_spares() == 1


def test_what_is_too_much_is_ended(world: World, spare: Placement) -> None:
    jobs.set_warm_spares(PERSON, world.job.pk, 0, "not any more")
    assert incidents.keep_warm_spares() == 1
    assert incidents.keep_warm_spares() == 0  # it has been told
    (stop,) = commands("stop_process")
    assert stop == wire.StopProcess(placement=spare.pk, grace_s=0)

    world.exits(spare, signal=9, requested=True)
    drain()

    assert list(world.job.held_warm_spares) == []
    assert state(spare.node) == (NodeState.AVAILABLE, True)
    assert not Incident.objects.exists()


def test_one_whose_agent_did_not_hear_is_told_again(world: World, spare: Placement) -> None:
    jobs.set_warm_spares(PERSON, world.job.pk, 0, "not any more")
    incidents.keep_warm_spares()
    answer("stop_process", "failed")
    assert incidents.keep_warm_spares() == 0
    Command.objects.update(created_at=timezone.now() - timedelta(minutes=2))
    assert incidents.keep_warm_spares() == 1
    answer("stop_process", stopped=True)
    incidents.keep_warm_spares()

    assert not world.job.held_warm_spares
    assert state(spare.node) == (NodeState.AVAILABLE, True)


def test_one_that_is_about_to_be_started_is_not(world: World) -> None:
    incidents.keep_warm_spares()
    jobs.set_warm_spares(PERSON, world.job.pk, 0, "not any more")
    incidents.keep_warm_spares()
    drain()

    assert run_of(START).state == RunState.CANCELLED
    assert commands("start_rank") == []
    assert state(world.spares[0]) == (NodeState.AVAILABLE, True)


def test_none_is_placed_for_a_job_that_has_ended_meanwhile(world: World) -> None:
    _stops(world)
    with pytest.raises(Conflict, match="needs no warm spare"):
        jobs.place_warm_spare(SYSTEM, world.job.pk, world.spares[0].pk, placement_id="plc_x")


def test_a_common_node_is_no_spare_afterwards(world: World) -> None:
    Node.objects.filter(pk__in=[one.pk for one in world.spares]).update(spare=False)
    spare = follows(world)
    world.exits(spare, signal=9)
    drain()

    assert state(spare.node) == (NodeState.AVAILABLE, False)


def test_one_that_leaves_with_its_job_leaves_a_spare(world: World, spare: Placement) -> None:
    told_by(spare, client.Stopped(step=20, reason="dismissed", at=time.time()))
    leaving = state(spare.node)
    world.exits(spare, exit_code=0)
    drain()

    assert leaving == (NodeState.ALLOCATED, False)
    assert state(spare.node) == (NodeState.AVAILABLE, True)


def test_a_state_that_takes_long_to_arrive_keeps_nobody_from_it(world: World) -> None:
    incidents.keep_warm_spares()
    drain()
    answer("start_rank", pid=7)
    (found,) = world.job.held_warm_spares
    told_by(found, client.Hello(pid=7, at=time.time()))
    long_ago = timezone.now() - timedelta(hours=2)
    PlaybookStep.objects.filter(key="await-state").update(started_at=long_ago)
    drain()
    assert run_of(START).state == RunState.WAITING

    holds_the_state(found)
    drain()
    assert run_of(START).state == RunState.SUCCEEDED


def test_one_that_never_says_that_it_is_up_is_given_up(world: World) -> None:
    incidents.keep_warm_spares()
    drain()
    answer("start_rank", pid=7)
    drain()
    long_ago = timezone.now() - timedelta(hours=2)
    PlaybookStep.objects.filter(key="await-state").update(started_at=long_ago)
    drain()
    answer("stop_process", stopped=True)
    drain()

    assert run_of(START).state == RunState.FAILED
    assert state(world.spares[0]) == (NodeState.AVAILABLE, True)


def test_a_node_whose_start_was_only_called_off_is_not_passed_over(world: World) -> None:
    test_one_that_is_about_to_be_started_is_not(world)
    jobs.set_warm_spares(PERSON, world.job.pk, 1, "after all")
    PlaybookRun.objects.update(finished_at=timezone.now() - timedelta(minutes=5))

    assert follows(world).node == world.spares[0]


def test_a_node_where_one_was_given_up_is_passed_over(world: World) -> None:
    incidents.keep_warm_spares()
    drain()
    answer("start_rank", "refused")
    drain()
    answer("stop_process", stopped=True)
    drain()
    PlaybookRun.objects.update(finished_at=timezone.now() - timedelta(minutes=5))

    assert follows(world).node == world.spares[1]


def test_a_node_that_is_to_be_reset_when_idle_does_not_wait_for_it(
    world: World, spare: Placement
) -> None:
    incidents.repair_node(
        SYSTEM, spare.node_id, None, "x", action=Action.RESET_GPU, urgency=Urgency.IDLE
    )
    drain()

    (stop,) = commands("stop_process")
    assert stop == wire.StopProcess(placement=spare.pk, grace_s=0)


def test_one_that_dies_is_missed_by_nobody_and_replaced(world: World, spare: Placement) -> None:
    world.exits(spare, signal=9)
    drain()

    assert list(world.job.held_warm_spares) == []
    assert not Incident.objects.exists()
    assert incidents.keep_warm_spares() == 1


def test_they_end_with_their_job(world: World, spare: Placement) -> None:
    jobs.request_stop(PERSON, world.job.pk, "enough")
    for placement in world.placements:
        jobs.end_placement(SYSTEM, placement.pk, "left", free_node=True)
    incidents.finish_ending_jobs()
    assert Command.objects.filter(verb="stop_process").count() == 1

    world.exits(spare, signal=9, requested=True)
    drain()

    world.job.refresh_from_db()
    assert world.job.state == JobState.STOPPED


def test_a_job_that_lives_as_one_can_have_none(world: World) -> None:
    _lives_as_one(world)
    with pytest.raises(Conflict, match="restarts as a whole"):
        jobs.set_warm_spares(PERSON, world.job.pk, 1, "x")


def test_a_replica_can_be_moved_beside_it(world: World, spare: Placement) -> None:
    incidents.move_replica(PERSON, world.job.pk, 0, reason="it is warm there")

    (mover,) = Placement.objects.filter(standby=True, warm=False)
    assert mover.replica.index == 0
    assert list(world.job.held_warm_spares) == [spare]


def test_its_seat_is_nobodys_on_the_page(world: World, spare: Placement) -> None:
    assert [slot.moving for slot in slots(world.job)] == [None, None]
    assert [slot.before for slot in slots(world.job)] == [[], []]


# --- taking a place -------------------------------------------------------------------------------


def _died_first(world: World, spare: Placement) -> None:
    world.exits(world.placements[1], signal=9)
    drain()
    takes_place(spare)


def _was_replaced_first(world: World, spare: Placement) -> None:
    takes_place(spare)
    drain()
    world.exits(world.placements[1], signal=9)


def _peers_spoke_first(world: World, spare: Placement) -> None:
    lost = client.PeerLost(
        epoch=1, replica=1, placement=world.placements[1].pk, step=19, at=time.time(), how="reset"
    )
    told_by(world.placements[0], lost)
    takes_place(spare)
    world.exits(world.placements[1], signal=9)


@pytest.mark.parametrize("order", [_died_first, _was_replaced_first, _peers_spoke_first])
def test_the_loss_is_looked_into_and_nothing_else_is_started(
    world: World, spare: Placement, order: Callable[[World, Placement], None]
) -> None:
    order(world, spare)
    told_by(world.placements[0], regrouped(lost=[1], entered=[spare.pk]))
    drain()

    run = run_of("replica-lost")
    assert run.state == RunState.SUCCEEDED, run.state_reason
    assert run.context["strategy"] == "standby"
    assert PlaybookRun.objects.filter(playbook="replica-lost").count() == 1
    assert len(commands("start_rank")) == 1  # its own
    incident = Incident.objects.get()
    assert incident.restored_at == spare.joined_at
    assert (spare.standby, spare.replica.index) == (False, 1)
    assert spare.moved_from == world.placements[1]
    assert Replica.objects.get(index=1).state == ReplicaState.ACTIVE
    assert state(world.placements[1].node) == (NodeState.AVAILABLE, True)


def _job_is_ended(world: World) -> None:
    end_job(PERSON, world.job.pk, "enough")


def _run_is_cancelled(world: World) -> None:
    incidents.cancel_run(PERSON, run_of("replica-lost").pk, "not today")


@pytest.mark.parametrize("call_off", [_job_is_ended, _run_is_cancelled])
def test_a_node_whose_run_is_called_off_is_given_back(
    world: World, spare: Placement, call_off: Callable[[World], None]
) -> None:
    _died_first(world, spare)
    told_by(world.placements[0], regrouped(lost=[1], entered=[spare.pk]))
    incidents.finish_ending_jobs()
    seen_to = state(world.placements[1].node)
    call_off(world)
    incidents.finish_ending_jobs()

    assert seen_to == (NodeState.ALLOCATED, False)
    assert state(world.placements[1].node) == (NodeState.AVAILABLE, True)


def test_a_node_of_which_nobody_has_heard_yet_waits_for_what_is_found_out(
    world: World, spare: Placement
) -> None:
    takes_place(spare)
    world.exits(world.placements[1], signal=9)
    incidents.finish_ending_jobs()

    assert state(world.placements[1].node) == (NodeState.ALLOCATED, False)


def test_what_hangs_and_whose_run_is_called_off_is_killed(world: World, spare: Placement) -> None:
    hung = _is_replaced_while_it_hangs(world, spare)
    drain()
    _run_is_cancelled(world)
    early = incidents.finish_ending_jobs()
    Placement.objects.update(ended_at=timezone.now() - timedelta(seconds=2 * SAVE_S))
    late = incidents.finish_ending_jobs()
    answer("stop_process", stopped=True)
    incidents.finish_ending_jobs()

    assert (early, late) == (0, 1)
    assert commands("stop_process") == [wire.StopProcess(placement=hung.pk, grace_s=0)]
    assert state(hung.node) == (NodeState.AVAILABLE, True)


def test_another_is_started_after_it_has_a_place(world: World, spare: Placement) -> None:
    _died_first(world, spare)
    drain()

    assert incidents.keep_warm_spares() == 1
    (following,) = list(world.job.held_warm_spares)
    assert following.node == world.spares[1]


def test_a_process_that_was_started_in_vain_makes_way(world: World, spare: Placement) -> None:
    world.kill(world.placements[1])
    drain()
    answer("start_rank", pid=9)
    assert Placement.objects.filter(replica__index=1, state=PlacementState.STARTING).exists()

    takes_place(spare)
    drain()
    (stop,) = commands("stop_process")
    assert isinstance(stop, wire.StopProcess)
    late = Placement.objects.get(pk=stop.placement)
    world.exits(late, signal=9, requested=True)
    answer("stop_process", stopped=True)
    drain()

    run = run_of("replica-lost")
    assert run.state == RunState.SUCCEEDED, run.state_reason
    assert state(late.node) == (NodeState.AVAILABLE, True)
    assert Incident.objects.count() == 1
    alive = Placement.objects.filter(replica__index=1).exclude(state=PlacementState.ENDED)
    assert alive.get() == spare


def test_the_peers_word_of_it_is_enough(world: World, spare: Placement) -> None:
    world.exits(world.placements[1], signal=9)
    told_by(world.placements[0], regrouped(lost=[1], entered=[spare.pk]))
    drain()

    assert run_of("replica-lost").context["strategy"] == "standby"
    assert len(commands("start_rank")) == 1
    spare.refresh_from_db()
    assert (spare.standby, spare.replica.index) == (False, 1)


def test_who_has_a_place_is_not_taken_for_the_one_that_was_lost(
    world: World, spare: Placement
) -> None:
    """The peers tell of both before the spare or the lost one's agent says a word."""
    lost = world.placements[1]
    gone = client.PeerLost(
        epoch=1, replica=1, placement=lost.pk, step=19, at=time.time(), how="reset"
    )
    told_by(world.placements[0], gone, regrouped(lost=[1], entered=[spare.pk]), committed())
    drain()
    assert run_of("replica-lost").state == RunState.WAITING
    assert losses.told_gone(lost)

    world.silence(lost.node)
    drain()
    assert Incident.objects.get().code == "node-lost"


def _is_replaced_while_it_hangs(world: World, spare: Placement) -> Placement:
    """Its peers lost it; its agent says nothing of its process."""
    hung = world.placements[1]
    gone = client.PeerLost(
        epoch=1, replica=1, placement=hung.pk, step=19, at=time.time(), how="heartbeat"
    )
    told_by(world.placements[0], gone, regrouped(lost=[1], entered=[spare.pk]))
    return hung


def test_what_hangs_on_a_node_that_stays_is_killed_before_that_is_a_spare(
    world: World, spare: Placement
) -> None:
    hung = _is_replaced_while_it_hangs(world, spare)
    world.kernel_says(hung.node, XID_31)
    drain()
    assert commands("stop_process") == [wire.StopProcess(placement=hung.pk, grace_s=0)]
    assert state(hung.node) == (NodeState.ALLOCATED, False)

    answer("stop_process", stopped=True)
    drain()
    assert run_of("replica-lost").state == RunState.SUCCEEDED
    assert state(hung.node) == (NodeState.AVAILABLE, True)


def _hangs(world: World) -> Placement:
    """Its peers lost it, a line of its kernel says why, and nobody saw it end."""
    hung = world.placements[1]
    world.peers_lose(hung)
    world.kernel_says(hung.node, XID_31)
    drain()
    assert commands("stop_process") == [wire.StopProcess(placement=hung.pk, grace_s=0)]
    return hung


def test_a_node_that_goes_silent_before_it_ends_what_hangs_is_lost(world: World) -> None:
    hung = _hangs(world)
    world.silence(hung.node)
    drain()

    assert Incident.objects.get().code == "node-lost"
    assert state(hung.node)[0] != NodeState.ALLOCATED
    assert [one.replica for one in commands("start_rank")] == [1]  # type: ignore[union-attr]


def test_a_node_that_cannot_end_what_hangs_is_taken_out(world: World) -> None:
    hung = _hangs(world)
    answer("stop_process", "failed")
    drain()

    repair = PlaybookRun.objects.get(playbook="repair-node")
    assert repair.node == hung.node
    assert repair.context["action"] == Action.POWER_CYCLE


def test_what_hangs_on_a_node_that_is_taken_out_is_killed(world: World, spare: Placement) -> None:
    hung = _is_replaced_while_it_hangs(world, spare)
    world.kernel_says(hung.node, XID_79)
    drain()
    assert commands("stop_process") == [wire.StopProcess(placement=hung.pk, grace_s=0)]
    assert state(hung.node)[0] != NodeState.QUARANTINED

    world.exits(hung, signal=9, requested=True)
    answer("stop_process", stopped=True)
    drain()
    step = PlaybookStep.objects.get(run__playbook="repair-node", key="quarantine")
    assert step.state == StepState.DONE


def test_a_move_of_the_replica_goes_on_from_the_spare(world: World, spare: Placement) -> None:
    incidents.move_replica(PERSON, world.job.pk, 1, reason="it is warm there")
    drain()
    (mover,) = Placement.objects.filter(standby=True, warm=False)
    world.exits(world.placements[1], signal=9)
    drain()
    takes_place(spare)

    mover.refresh_from_db()
    assert (mover.standby, mover.moved_from) == (True, spare)
    jobs.take_place(mover, timezone.now())
    spare.refresh_from_db()
    assert spare.state == PlacementState.ENDED
    assert Replica.objects.get(index=1).state == ReplicaState.ACTIVE


def test_old_news_of_a_spare_takes_no_place_from_who_has_it_since(
    world: World, spare: Placement
) -> None:
    Placement.objects.filter(pk=world.placements[1].pk).update(
        joined_at=timezone.now() + timedelta(seconds=5)
    )
    world.peers_lose(spare)
    takes_place(spare)

    assert (spare.standby, spare.state) == (True, PlacementState.ENDED)
    assert (
        Replica.objects.get(index=1).placements.exclude(state="ended").get()
        == (world.placements[1])
    )


def test_a_process_that_is_believed_to_have_joined_is_no_reason_to_write_it_off(
    world: World, spare: Placement
) -> None:
    Placement.objects.filter(pk=world.placements[1].pk).update(
        joined_at=timezone.now() + timedelta(seconds=5)
    )
    takes_place(spare)

    assert (spare.standby, spare.state) == (False, PlacementState.RUNNING)


def test_a_node_that_is_silent_too_is_one_incident(world: World, spare: Placement) -> None:
    takes_place(spare)
    told_by(
        world.placements[0],
        client.PeerLost(
            epoch=1,
            replica=1,
            placement=world.placements[1].pk,
            step=19,
            at=time.time(),
            how="reset",
        ),
    )
    drain()
    world.silence(world.placements[1].node)
    drain()

    incident = Incident.objects.get()
    assert incident.replica == 1


def test_a_node_lost_with_a_place_that_was_taken_counts_against_its_job(
    world: World, spare: Placement
) -> None:
    node = world.placements[1].node
    _peers_spoke_first(world, spare)
    told_by(world.placements[0], regrouped(lost=[1], entered=[spare.pk]))
    world.silence(node)
    drain()

    assert run_of("replica-lost").context["code"] == "node-lost"
    assert Reservation.objects.get(node=node).job == world.job


def test_a_replica_whose_formality_it_is_can_be_lost(world: World, spare: Placement) -> None:
    assert spare.replica.index == 0
    jobs.end_placement(SYSTEM, world.placements[0].pk, "gone", free_node=False)
    world.placements[0].refresh_from_db()

    now = timezone.now()
    assert losses.evidence_of(world.placements[0], now, now).ended


def test_one_that_takes_a_place_and_dies_is_brought_back(world: World, spare: Placement) -> None:
    _died_first(world, spare)
    told_by(world.placements[0], regrouped(lost=[1], entered=[spare.pk]))
    drain()
    world.exits(spare, signal=9)
    drain()

    assert PlaybookRun.objects.filter(playbook="replica-lost").count() == 2
    assert run_of("replica-lost").context["lost_placement"] == spare.pk


def test_steps_that_it_tells_of_say_that_it_has_a_place(world: World, spare: Placement) -> None:
    world.exits(world.placements[0], signal=9)
    drain()
    batch = client.Batch(
        job=world.job.pk, replica=0, rank=0, placement=spare.pk, sent_at=time.time(), messages=[]
    )
    jobs.record_runtime_batch(world.job.pk, batch, [committed()])

    spare.refresh_from_db()
    assert (spare.standby, spare.replica.index) == (False, 0)


def test_a_drain_ends_the_one_on_its_node(world: World, spare: Placement) -> None:
    incidents.order_node(PERSON, spare.node_id, "drain", "new cables")
    drain()
    answer("stop_process", stopped=True)
    world.exits(spare, signal=9, requested=True)
    drain()

    spare.node.refresh_from_db()
    assert spare.node.state == NodeState.QUARANTINED
    assert not Incident.objects.exists()
    assert incidents.keep_warm_spares() == 1
    (following,) = list(world.job.held_warm_spares)
    assert following.node == world.spares[1]


def test_a_hold_keeps_it_from_a_node(world: World) -> None:
    fleet.set_hold(PERSON, world.spares[0].pk, "mine")
    assert follows(world).node == world.spares[1]
