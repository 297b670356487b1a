"""A job that is told to end is over in the end, whatever its processes do; and may be started anew
where its start came to nothing."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet.actions import queue_command
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.models import Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.actions.job_end import RESEND_AFTER, end_job
from controlplane.incidents.choices import IncidentState, RunState, Severity
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.incidents.move_plans import SAVE_S
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JobState, PlacementState
from controlplane.jobs.models import LEFT, Directive, Job, Placement
from node_agent import wire
from runtime import client
from tests.factories import PlaybookRunFactory
from tests.workers.moving import PERSON, commands, move, regrouped, state, told_by, trains
from tests.workers.world import World, answer, drain, run_of

pytestmark = pytest.mark.django_db


def job_state() -> str:
    return Job.objects.get().state


@pytest.mark.parametrize("requested", [True, False])
def test_a_rank_that_dies_while_it_was_to_leave_has_left(world: World, requested: bool) -> None:
    end_job(PERSON, world.job.pk, "enough")
    for placement in world.placements:
        world.exits(placement, signal=9, requested=requested)
    drain()

    assert job_state() == JobState.STOPPED
    assert not Incident.objects.exists()
    assert state(world.placements[0].node)[0] == NodeState.AVAILABLE


def test_a_rank_that_never_trained_is_in_no_loop_to_leave(world: World) -> None:
    Placement.objects.update(state=PlacementState.STARTING, joined_at=None)
    end_job(PERSON, world.job.pk, "enough")

    assert incidents.finish_ending_jobs() == 2
    assert {one.placement for one in commands("stop_process")} == {  # type: ignore[union-attr]
        one.pk for one in world.placements
    }
    answer("stop_process", stopped=True)  # nothing had been started
    incidents.finish_ending_jobs()

    assert job_state() == JobState.STOPPED


def test_a_rank_that_had_died_before_has_left(world: World) -> None:
    world.exits(world.placements[1], signal=9)
    drain()
    end_job(PERSON, world.job.pk, "enough")
    jobs.end_placement(SYSTEM, world.placements[0].pk, "left", free_node=True)
    assert job_state() == JobState.STOPPING

    incidents.finish_ending_jobs()
    answer("stop_process", stopped=True)
    incidents.finish_ending_jobs()

    assert job_state() == JobState.STOPPED


def told_to_end_long_ago(world: World) -> None:
    end_job(PERSON, world.job.pk, "enough")
    Directive.objects.update(created_at=timezone.now() - timedelta(seconds=2 * SAVE_S))


def test_what_stands_still_and_hears_of_no_end_is_told_by_its_agent(world: World) -> None:
    told_to_end_long_ago(world)

    assert incidents.finish_ending_jobs() == 2
    assert incidents.finish_ending_jobs() == 0
    orders = {wire.StopProcess(placement=one.pk, grace_s=SAVE_S) for one in world.placements}
    assert set(commands("stop_process")) == orders
    for order in Command.objects.all():  # so long it may save still
        assert order.expires_at > timezone.now() + timedelta(seconds=SAVE_S)
    answer("stop_process", stopped=True)
    incidents.finish_ending_jobs()

    assert job_state() == JobState.STOPPED
    assert {state(one.node)[0] for one in world.placements} == {NodeState.AVAILABLE}


def test_what_trains_has_the_time_to_hear_of_the_end_and_to_save(world: World) -> None:
    end_job(PERSON, world.job.pk, "enough")

    assert incidents.finish_ending_jobs() == 0


def test_a_job_of_which_nothing_is_left_is_over_whoever_saw_it_first(world: World) -> None:
    end_job(PERSON, world.job.pk, "enough")
    Placement.objects.update(state=PlacementState.ENDED)  # two at once, and neither saw both

    incidents.finish_ending_jobs()

    assert job_state() == JobState.STOPPED


def test_the_coordinator_of_a_start_in_vain_ends(world: World) -> None:
    jobs.set_coordinator(SYSTEM, world.job.pk, world.spares[0].pk, "127.0.0.1:1", "plc_led")
    jobs.begin_start(SYSTEM, world.job.pk, "again")

    (stop,) = commands("stop_process")
    assert isinstance(stop, wire.StopProcess)
    assert stop.placement == "plc_led"


def test_its_coordinator_ends_with_it(world: World) -> None:
    jobs.set_coordinator(SYSTEM, world.job.pk, world.spares[0].pk, "127.0.0.1:1", "plc_led")
    end_job(PERSON, world.job.pk, "enough")
    assert commands("stop_process") == []
    for placement in world.placements:
        jobs.end_placement(SYSTEM, placement.pk, "left", free_node=True)

    (stop,) = commands("stop_process")
    assert isinstance(stop, wire.StopProcess)
    assert stop.placement == "plc_led"


def test_a_start_that_came_to_nothing_may_be_made_again(world: World) -> None:
    for placement in world.placements:
        jobs.end_placement(SYSTEM, placement.pk, "x", free_node=True)
    Job.objects.update(state=JobState.PENDING)
    incidents.start_registered(PERSON, world.job.pk, "once")
    assert not incidents.may_be_started(Job.objects.get())
    with pytest.raises(Conflict, match="is starting"):
        incidents.start_registered(PERSON, world.job.pk, "twice")

    incidents.cancel_run(PERSON, run_of("start-job").pk, "no node is free")
    incidents.start_registered(PERSON, world.job.pk, "again")

    assert run_of("start-job").context["reason"] == "again"
    assert job_state() == JobState.STARTING


def test_a_running_job_of_which_nothing_is_left_may_be_started_again(world: World) -> None:
    jobs.end_placement(SYSTEM, world.placements[0].pk, "x", free_node=True)
    world.kill(world.placements[1])
    drain()
    while_it_is_brought_back = incidents.may_be_started(Job.objects.get())
    incidents.cancel_run(PERSON, run_of("replica-lost").pk, "not today")
    left = Placement.objects.exclude(state=PlacementState.ENDED).count()
    incidents.start_registered(PERSON, world.job.pk, "again")

    assert (while_it_is_brought_back, left) == (False, 0)
    assert run_of("start-job").context["reason"] == "again"
    assert job_state() == JobState.STARTING


@pytest.mark.parametrize(("ago_s", "may"), [(1, False), (120, True)])
def test_a_job_is_not_started_while_what_left_it_saves(
    world: World, ago_s: float, may: bool
) -> None:
    ended_at = timezone.now() - timedelta(seconds=ago_s)
    Placement.objects.update(
        state=PlacementState.ENDED, end_reason=f"{LEFT}told to end", ended_at=ended_at
    )

    assert incidents.may_be_started(Job.objects.get()) == may


def test_what_was_seen_to_end_and_is_brought_back_by_nobody_is_not_left(world: World) -> None:
    for placement in world.placements:
        world.exits(placement, signal=9)
    drain()
    for run in PlaybookRun.objects.filter(playbook="replica-lost"):
        incidents.cancel_run(PERSON, run.pk, "not today")
    incidents.start_registered(PERSON, world.job.pk, "again")

    assert job_state() == JobState.STARTING
    assert {state(one.node)[0] for one in world.placements} == {NodeState.AVAILABLE}


def test_what_nobody_saw_end_may_be_there_still(world: World) -> None:
    world.exits(world.placements[1], signal=9)
    drain()
    incidents.cancel_run(PERSON, run_of("replica-lost").pk, "not today")

    assert not incidents.may_be_started(Job.objects.get())


def test_a_running_job_that_its_own_scheduler_starts_is_not_started_beside_it(world: World) -> None:
    for placement in world.placements:
        jobs.end_placement(SYSTEM, placement.pk, "x", free_node=True)
    Job.objects.update(coordinator_address="")

    with pytest.raises(Conflict, match="is running"):
        incidents.start_registered(PERSON, world.job.pk, "once")


# --- a process that leaves holds its cards until it has ended -------------------------------------


def leaves(world: World) -> Placement:
    """One of its processes has said farewell, and runs still."""
    told_by(world.placements[0], client.Stopped(step=12, reason="left the loop", at=time.time()))
    return Placement.objects.get(pk=world.placements[0].pk)


def long_since() -> None:
    Placement.objects.update(ended_at=timezone.now() - timedelta(seconds=2 * SAVE_S))


@pytest.mark.parametrize("requested", [True, False])
def test_its_node_is_free_once_its_agent_says_that_it_has_ended(
    world: World, requested: bool
) -> None:
    left = leaves(world)
    drain()
    leaving = state(left.node)
    world.exits(left, exit_code=0, requested=requested)
    drain()

    assert leaving == (NodeState.ALLOCATED, False)
    assert state(left.node) == (NodeState.AVAILABLE, False)
    assert not Incident.objects.exists()


def test_its_node_is_free_though_its_farewell_and_its_end_came_at_once(world: World) -> None:
    left = leaves(world)
    world.exits(left, exit_code=0)
    Signal.objects.update(triaged_at=timezone.now())  # by a worker that saw no farewell

    incidents.finish_ending_jobs()

    assert state(left.node) == (NodeState.AVAILABLE, False)


def test_what_hangs_after_its_farewell_is_killed(world: World) -> None:
    left = leaves(world)
    assert incidents.finish_ending_jobs() == 0
    long_since()

    assert incidents.finish_ending_jobs() == 1
    assert commands("stop_process") == [wire.StopProcess(placement=left.pk, grace_s=0)]
    answer("stop_process", stopped=True)  # as an agent says that knows of no such process
    incidents.finish_ending_jobs()
    assert state(left.node) == (NodeState.AVAILABLE, False)


def test_a_silent_node_is_told_to_kill_it_once_it_is_heard(world: World) -> None:
    left = leaves(world)
    world.silence(left.node)
    long_since()
    assert incidents.finish_ending_jobs() == 0

    world.hear(left.node)
    assert incidents.finish_ending_jobs() == 1


def test_a_node_that_cannot_kill_it_is_repaired(world: World) -> None:
    left = leaves(world)
    long_since()
    for _ in range(2):
        incidents.finish_ending_jobs()
        assert not Incident.objects.exists()
        answer("stop_process", "failed")
        Command.objects.update(created_at=timezone.now() - 2 * RESEND_AFTER)

    incidents.finish_ending_jobs()

    title = f"{left.node.name} cannot end a process of {world.job.name}"
    assert Incident.objects.get().title == title
    assert run_of("repair-node").node == left.node


def test_a_node_that_is_emptied_while_it_leaves_is_told_to_kill_it(world: World) -> None:
    left = leaves(world)
    incidents.order_node(PERSON, left.node_id, "quarantine", "because")
    drain()
    waiting = state(left.node)
    answer("stop_process", stopped=True)
    drain()

    assert commands("stop_process") == [wire.StopProcess(placement=left.pk, grace_s=0)]
    assert waiting == (NodeState.ALLOCATED, False)
    assert state(left.node) == (NodeState.QUARANTINED, False)


# --- a job that is over by its own word -----------------------------------------------------------


def test_a_job_that_has_done_all_its_steps_is_over(world: World) -> None:
    for placement in world.placements:
        told_by(placement, farewell("all steps done", "over"))
        world.exits(placement, exit_code=0)
    drain()

    job = Job.objects.get()
    assert job.state == JobState.STOPPED
    assert job.ended_at is not None
    assert not Incident.objects.exists()
    assert state(world.placements[0].node)[0] == NodeState.AVAILABLE


def test_what_a_job_that_ends_itself_had_lost_before_is_not_brought_back(world: World) -> None:
    trains(world)
    world.exits(world.placements[1], signal=9)
    drain()
    told_by(world.placements[0], farewell("stop wanted", "over"))

    stopping = job_state()
    incidents.finish_ending_jobs()
    answer("stop_process", stopped=True)
    incidents.finish_ending_jobs()
    drain()

    assert (stopping, job_state()) == (JobState.STOPPING, JobState.STOPPED)
    assert run_of("replica-lost").state == RunState.CANCELLED
    assert [one.state for one in Incident.objects.all()] == [IncidentState.RESOLVED]


def test_no_replica_of_a_job_that_is_over_is_placed(world: World) -> None:
    lost = world.placements[1]
    jobs.end_placement(SYSTEM, lost.pk, "x", free_node=True)
    Job.objects.update(state=JobState.STOPPED)

    with pytest.raises(Conflict, match="is stopped"):
        jobs.place(SYSTEM, lost.replica_id, world.spares[0].pk, placement_id="plc_late")
    assert state(world.spares[0])[0] == NodeState.AVAILABLE


def test_what_waits_to_be_brought_back_when_its_job_ends_takes_no_node(world: World) -> None:
    trains(world)
    Node.objects.update(hold_reason="mine")
    world.kill(world.placements[1])
    drain()
    told_by(world.placements[0], farewell("stop wanted", "over"))
    Node.objects.update(hold_reason="")
    drain()
    waiting = run_of("replica-lost").state
    incidents.finish_ending_jobs()
    answer("stop_process", stopped=True)
    incidents.finish_ending_jobs()
    drain()

    assert commands("start_rank") == []
    assert (waiting, job_state()) == (RunState.WAITING, JobState.STOPPED)
    assert {state(one)[0] for one in world.spares} == {NodeState.AVAILABLE}


def test_a_job_all_of_whose_replicas_left_their_loops_is_over(world: World) -> None:
    told_by(world.placements[0], farewell("left the loop"))
    before = job_state()
    told_by(world.placements[1], farewell("left the loop"))

    assert (before, job_state()) == (JobState.RUNNING, JobState.STOPPED)


def test_a_job_that_moves_or_was_told_to_end_is_not_over(world: World) -> None:
    told_by(world.placements[0], farewell(client.TOLD_TO_END, "told"))
    told_by(world.placements[1], farewell(client.TOLD_TO_END, "told"))

    assert job_state() == JobState.RUNNING


@pytest.fixture
def training(world: World) -> World:
    """Both of its replicas have told of their steps."""
    trains(world)
    return world


def is_sent_away(world: World) -> Placement:
    """One of two replicas leaves between two steps, and the other tells that it went on."""
    told_by(world.placements[0], regrouped(lost=[1], replicas=[0], joined=[]))
    told_by(world.placements[1], farewell(client.TOLD_TO_END, "told"))
    return Placement.objects.get(pk=world.placements[1].pk)


def comes_back(world: World) -> Placement:
    """What takes the place of the one that was sent away."""
    assert incidents.bring_back_sent_away() == 1
    assert incidents.bring_back_sent_away() == 0
    drain()
    answer("stop_process", stopped=True)  # where nobody saw its process end
    drain()
    answer("start_rank", pid=8)
    return Placement.objects.exclude(state=PlacementState.ENDED).get(
        replica=world.placements[1].replica
    )


def test_a_replica_that_somebody_sent_away_is_brought_back_elsewhere(training: World) -> None:
    left = is_sent_away(training)
    waiting = incidents.bring_back_sent_away()
    training.exits(left, exit_code=0)
    drain()

    assert comes_back(training).node_id != left.node_id
    assert waiting == 0
    incident = Incident.objects.get()
    assert "SIGTERM that Drydock had not sent" in incident.cause
    assert incident.mitigated_at is not None
    assert state(left.node)[0] == NodeState.AVAILABLE
    assert job_state() == JobState.RUNNING


def test_it_is_brought_back_where_it_was_if_there_is_no_other_node(training: World) -> None:
    Node.objects.filter(pk__in=[one.pk for one in training.spares]).update(hold_reason="ours")
    left = is_sent_away(training)
    training.exits(left, exit_code=0)
    drain()

    assert comes_back(training).node_id == left.node_id


def test_one_whose_machine_went_down_with_it_is_brought_back_too(training: World) -> None:
    left = is_sent_away(training)
    training.silence(left.node)

    assert comes_back(training).node_id != left.node_id


def test_one_that_lingers_is_ended_and_brought_back_elsewhere(training: World) -> None:
    left = is_sent_away(training)
    long_since()
    incidents.finish_ending_jobs()

    assert comes_back(training).node_id != left.node_id


def test_an_earlier_false_alarm_about_it_does_not_count(training: World) -> None:
    left = is_sent_away(training)
    PlaybookRunFactory(
        playbook="replica-lost", job=training.job, state=RunState.SUCCEEDED,
        finished_at=timezone.now() - timedelta(days=9), context={"lost_placement": left.pk},
    )  # fmt: skip
    training.exits(left, exit_code=0)
    drain()

    assert incidents.bring_back_sent_away() == 1


def test_an_order_that_no_agent_heard_is_not_why_it_left(training: World) -> None:
    left = training.placements[1]
    stop = wire.StopProcess(placement=left.pk)
    queue_command(SYSTEM, left.node_id, stop, requester="pbs_step.stop")
    answer("stop_process", state="refused")
    is_sent_away(training)
    training.exits(left, exit_code=0)
    drain()

    assert comes_back(training).node_id != left.node_id


def test_a_place_that_a_move_gave_up_does_not_hide_who_was_sent_away(training: World) -> None:
    move(training)
    incidents.cancel_run(PERSON, run_of("move-replica").pk, "it is cool again")
    answer("stop_process", stopped=True)
    drain()
    left = is_sent_away(training)
    training.exits(left, exit_code=0)
    drain()

    assert comes_back(training).node_id != left.node_id


def test_what_was_told_to_end_by_us_is_not_brought_back_for_that(training: World) -> None:
    left = training.placements[1]
    stop = wire.StopProcess(placement=left.pk)
    queue_command(SYSTEM, left.node_id, stop, requester="pbs_step.stop")
    is_sent_away(training)
    training.exits(left, exit_code=0)
    drain()

    assert incidents.bring_back_sent_away() == 0


def test_a_job_that_was_started_anew_since_brings_back_all_by_itself(training: World) -> None:
    is_sent_away(training)
    incidents.restart_job(SYSTEM, training.job.pk, reason="the machine was stopped")

    assert incidents.bring_back_sent_away() == 0


def test_what_leaves_its_loop_because_we_told_it_to_end_ends_no_job(world: World) -> None:
    for placement in world.placements:
        stop = wire.StopProcess(placement=placement.pk)
        queue_command(SYSTEM, placement.node_id, stop, requester=f"pbs_{placement.pk}.stop")
        told_by(placement, farewell("left the loop"))

    assert job_state() == JobState.RUNNING


def test_a_job_whose_last_word_comes_with_its_first_steps_is_over(world: World) -> None:
    Job.objects.update(state=JobState.STARTING)
    last = client.Progress(
        step=99, steps=1, epoch=1, at=time.time(), loss=1.0, grad_norm=1.0, step_s=0.1,
        max_gap_s=0.1, samples=8, tokens=0, replicas=[0, 1],
    )  # fmt: skip
    for placement in world.placements:
        told_by(placement, farewell("all steps done", "over"), last)

    assert job_state() == JobState.STOPPED


def test_who_hears_nothing_of_its_end_is_told_that_the_job_is_over(world: World) -> None:
    told_by(world.placements[0], farewell("stop wanted", "over"))

    assert [one.verb for one in Directive.objects.all()] == ["stop"]


def test_an_incident_that_waits_for_a_person_outlives_its_job(world: World) -> None:
    repair = incidents.open_or_merge(
        f"node/{world.placements[0].node_id}", cluster_id=world.job.cluster_id, title="a card",
        severity=Severity.MINOR, occurred_at=timezone.now(), job_id=world.job.pk,
    )  # fmt: skip
    for placement in world.placements:
        told_by(placement, farewell("all steps done", "over"))
    incidents.finish_ending_jobs()

    assert Incident.objects.get(pk=repair.pk).state == IncidentState.OPEN


def farewell(reason: str, because: client.Because = "") -> client.Stopped:
    return client.Stopped(step=99, reason=reason, at=time.time(), because=because)
