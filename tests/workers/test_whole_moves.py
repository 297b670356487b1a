"""A job that restarts as a whole is moved: it saves, ends, and is started elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import CommandState, NodeState
from controlplane.fleet.models import Command
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RunState
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.incidents.move_plans import SAVE_S, plan_move, plan_of_move
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState, ReplicaState
from controlplane.jobs.models import Job, Placement, ProgressSample, Replica
from node_agent import wire
from runtime import client
from tests.factories import ProgressSampleFactory
from tests.workers import moving
from tests.workers.moving import PERSON, commands, no_spare, state, told_by
from tests.workers.world import World, answer, drain, run_of, step_of, unanswered
from workers.playbooks import PLAYBOOKS

pytestmark = pytest.mark.django_db

MOVE = "move-job"


@pytest.fixture(autouse=True)
def training(world: World) -> None:
    """The job is one replica, whose processes say that they restart as a whole."""
    other = world.placements.pop()
    fleet.transition(SYSTEM, other.node_id, NodeState.QUARANTINED, reason="not of this test")
    Placement.objects.filter(pk=other.pk).delete()
    Replica.objects.filter(index=1).delete()
    Job.objects.update(world_replicas=1)
    ProgressSampleFactory(job=world.job, step=9, epoch=1, replicas=[0])
    told_by(world.placements[0], committed())


def committed(step: int = 10, epoch: int = 1) -> client.Progress:
    """What a job that restarts as a whole says of its steps."""
    return moving.committed(step=step, epoch=epoch, replicas=[0], whole=True)


def order(world: World, node_id: str = "") -> None:
    """The move is ordered, and its job has saved."""
    incidents.move_replica(PERSON, world.job.pk, 0, node_id=node_id, reason="it is warm there")
    drain()
    saves(world)


def saves(world: World, step: int = 11, took_s: float = 1.0) -> None:
    told_by(
        world.placements[0],
        client.CheckpointSaved(
            step=step,
            tier="shared",
            path="/c",
            bytes=10,
            digest="d",
            stall_s=0.0,
            seconds=took_s,
            at=time.time(),
        ),
    )
    drain()


def saves_and_ends(world: World) -> None:
    """It obeys: its word, its agent's word of the end, and the answer to the order."""
    told_by(world.placements[0], client.Stopped(step=12, reason="left the loop", at=time.time()))
    world.exits(world.placements[0], exit_code=0, requested=True)
    answer("stop_process", stopped=True)
    drain()


def present() -> Placement:
    return Placement.objects.get(state__in=[PlacementState.STARTING, PlacementState.RUNNING])


def replica() -> Replica:
    return Replica.objects.get()


# --- as it should be ------------------------------------------------------------------------------


def test_it_saves_and_ends_before_it_is_started_on_the_other_node(world: World) -> None:
    order(world)

    (stop,) = commands("stop_process")
    assert stop == wire.StopProcess(placement=world.placements[0].pk, grace_s=SAVE_S)
    assert commands("start_rank") == []
    assert not Placement.objects.filter(standby=True).exists()

    saves_and_ends(world)

    (start,) = commands("start_rank")
    assert isinstance(start, wire.StartRank)
    assert (start.standby, start.placement) == ("", present().pk)
    assert present().node == world.spares[0]
    assert state(world.placements[0].node) == (NodeState.AVAILABLE, True)
    assert state(world.spares[0]) == (NodeState.ALLOCATED, False)


def test_it_saves_before_it_is_told_to_end(world: World) -> None:
    incidents.move_replica(PERSON, world.job.pk, 0, reason="it is warm there")
    drain()

    assert world.job.directives.get().verb == "checkpoint"
    assert commands("stop_process") == []
    saves(world)
    assert len(commands("stop_process")) == 1


def test_a_save_that_had_begun_before_is_not_the_one_that_it_waits_for(world: World) -> None:
    incidents.move_replica(PERSON, world.job.pk, 0, reason="it is warm there")
    drain()
    saves(world, took_s=600.0)
    before = commands("stop_process")
    saves(world, step=12)

    assert before == []
    assert len(commands("stop_process")) == 1


def test_one_that_cannot_save_is_moved_all_the_same(world: World) -> None:
    incidents.move_replica(PERSON, world.job.pk, 0, reason="it is warm there")
    drain()
    long_ago = (timezone.now() - timedelta(seconds=SAVE_S + 1)).isoformat()
    run = run_of(MOVE)
    PlaybookRun.objects.filter(pk=run.pk).update(context={**run.context, "asked_at": long_ago})
    drain()

    assert len(commands("stop_process")) == 1
    assert "told of no checkpoint" in step_of(MOVE, "save").outcome


def test_it_has_moved_once_it_trains_there(world: World) -> None:
    order(world)
    saves_and_ends(world)
    answer("start_rank", pid=7)
    now = present()
    told_by(now, client.Hello(pid=7, at=time.time()))
    drain()
    assert run_of(MOVE).state == RunState.WAITING

    told_by(now, committed(step=13, epoch=2))
    drain()

    run = run_of(MOVE)
    assert run.state == RunState.SUCCEEDED
    assert run.state_reason.startswith("job-")
    assert "moved from node-0 to spare-0, and stood still for" in run.state_reason
    assert replica().state == ReplicaState.ACTIVE
    assert not Incident.objects.exists()


def test_the_dry_run_says_that_it_stands_still(world: World) -> None:
    incidents.publish_playbooks([one.as_row() for one in PLAYBOOKS.values()])
    world.job.refresh_from_db()

    plan = plan_of_move(plan_move(world.job, 0))

    assert (plan.playbook, plan.title) == (MOVE, f"Move {world.job.name} to spare-0")
    assert [step["key"] for step in plan.steps] == [
        "save",
        "save-and-end",
        "choose-place",
        "start",
        "await-step",
    ]
    assert any("restarts as a whole" in note for note in plan.notes)
    assert any("stands still meanwhile" in note for note in plan.notes)


def test_a_drain_lets_it_save_before_its_node_is_emptied(world: World) -> None:
    incidents.order_node(PERSON, world.placements[0].node_id, "drain", "new cables")
    drain()
    saves(world)

    (stop,) = commands("stop_process")
    assert stop == wire.StopProcess(placement=world.placements[0].pk, grace_s=SAVE_S)
    saves_and_ends(world)

    assert present().node == world.spares[0]
    world.placements[0].node.refresh_from_db()
    assert world.placements[0].node.state == NodeState.QUARANTINED


def test_the_one_that_trains_is_moved_once_only(world: World) -> None:
    order(world)
    with pytest.raises(Conflict, match="is under way"):
        incidents.move_replica(PERSON, world.job.pk, 0, reason="again")


# --- what may go wrong ----------------------------------------------------------------------------


def test_an_agent_that_refuses_leaves_it_training_where_it_was(world: World) -> None:
    order(world)
    answer("stop_process", "refused")
    drain()

    assert run_of(MOVE).state == RunState.FAILED
    assert present() == world.placements[0]
    assert state(world.spares[0]) == (NodeState.AVAILABLE, True)


def test_what_may_still_run_is_started_nowhere_else(world: World) -> None:
    order(world)
    answer("stop_process", "failed")
    drain()

    assert run_of(MOVE).state == RunState.NEEDS_OPERATOR
    assert commands("start_rank") == []


def test_it_goes_on_once_a_person_has_seen_to_the_end(world: World) -> None:
    order(world)
    answer("stop_process", "failed")
    drain()
    world.exits(world.placements[0], signal=9, requested=True)
    incidents.retry_run(PERSON, run_of(MOVE).pk, "killed by hand")
    drain()

    assert present().node == world.spares[0]


def test_a_node_that_falls_silent_with_others_is_awaited_and_told_again(world: World) -> None:
    order(world)
    node = world.placements[0].node
    world.silence_together(node, world.spares[0])
    unanswered()
    silent, words = run_of(MOVE).state, step_of(MOVE, "save-and-end").outcome
    world.hear(node)
    world.hear(world.spares[0])
    drain()

    assert silent == RunState.WAITING
    assert words == "node-0 went silent before saying that nothing of it runs: awaited"
    assert commands("start_rank") == []
    saves_and_ends(world)
    assert present().node == world.spares[0]


def test_one_that_ended_while_its_node_was_silent_goes_on(world: World) -> None:
    order(world)
    node = world.placements[0].node
    world.silence_together(node, world.spares[0])
    unanswered()
    world.hear(node)
    world.hear(world.spares[0])
    world.exits(world.placements[0], exit_code=0, requested=True)
    drain()

    assert present().node == world.spares[0]


def test_one_that_was_killed_after_its_grace_is_started_all_the_same(world: World) -> None:
    order(world)
    world.exits(world.placements[0], signal=9, requested=True)
    answer("stop_process", stopped=True)
    drain()

    assert present().node == world.spares[0]
    assert not Incident.objects.exists()


def test_a_node_that_was_taken_meanwhile_is_passed_over(world: World) -> None:
    order(world, world.spares[0].pk)
    fleet.set_hold(PERSON, world.spares[0].pk, "mine")
    saves_and_ends(world)

    assert present().node == world.spares[1]


def test_where_no_other_is_free_it_goes_on_where_it_was(world: World) -> None:
    order(world)
    no_spare(world)
    saves_and_ends(world)

    assert present().node == world.placements[0].node


def test_a_node_that_does_not_start_it_is_passed_over(world: World) -> None:
    order(world)
    saves_and_ends(world)
    answer("start_rank", "failed")
    drain()

    assert present().node == world.spares[1]
    assert state(world.spares[0]) == (NodeState.AVAILABLE, False)


def start_came_to_nothing(world: World) -> Placement:
    """The new node answered neither the order to start it nor that to stop it."""
    order(world)
    saves_and_ends(world)
    unanswered()
    unanswered()
    assert run_of(MOVE).state == RunState.NEEDS_OPERATOR
    return present()


def test_a_start_that_is_tried_again_is_made_once_the_one_before_is_ended(world: World) -> None:
    begun = start_came_to_nothing(world)
    incidents.retry_run(PERSON, run_of(MOVE).pk, "its agent answers again")
    drain()
    before = len(commands("start_rank"))
    answer("stop_process", stopped=True)
    drain()

    assert (before, len(commands("start_rank"))) == (1, 2)
    assert present().pk != begun.pk
    assert present().node == begun.node


def test_one_that_is_lost_before_it_ends_is_brought_back_by_its_incident(world: World) -> None:
    order(world)
    Command.objects.filter(verb="stop_process").update(state=CommandState.DELIVERED)
    world.silence(world.placements[0].node)
    drain()

    assert run_of(MOVE).state == RunState.FAILED
    assert run_of("replica-lost").state not in (RunState.SUCCEEDED, RunState.FAILED)


def test_one_that_dies_on_its_new_node_is_brought_back_by_its_incident(world: World) -> None:
    order(world)
    saves_and_ends(world)
    answer("start_rank", pid=7)
    now = present()
    told_by(now, client.Hello(pid=7, at=time.time()))
    world.exits(now, signal=9)
    drain()

    assert run_of(MOVE).state == RunState.FAILED
    assert "brought back by a run of its own" in run_of(MOVE).state_reason
    assert run_of("replica-lost").context["lost_placement"] == now.pk


def test_one_that_had_nothing_left_to_do_has_moved(world: World) -> None:
    order(world)
    saves_and_ends(world)
    answer("start_rank", pid=7)
    now = present()
    told_by(now, client.Hello(pid=7, at=time.time()))
    told_by(now, client.Stopped(step=12, reason="left the loop", at=time.time()))
    drain()

    assert run_of(MOVE).state == RunState.SUCCEEDED
    assert "nothing left to do" in run_of(MOVE).state_reason


# --- called off -----------------------------------------------------------------------------------


def test_an_order_that_was_not_carried_yet_is_called_back(world: World) -> None:
    order(world)
    incidents.call_off(PERSON, run_of(MOVE).pk, "not today")

    assert present() == world.placements[0]
    assert run_of(MOVE).state == RunState.CANCELLED
    assert not PlaybookRun.objects.filter(playbook="replica-lost").exists()


def test_one_that_is_ending_cannot_be_called_off(world: World) -> None:
    order(world)
    Command.objects.filter(verb="stop_process").update(state=CommandState.DELIVERED)

    with pytest.raises(Conflict, match="wait until it has"):
        incidents.call_off(PERSON, run_of(MOVE).pk, "not today")
    assert run_of(MOVE).state == RunState.WAITING


def test_one_that_may_have_ended_cannot_be_called_off_before_that_is_known(world: World) -> None:
    order(world)
    answer("stop_process", "failed")
    drain()
    with pytest.raises(Conflict, match="wait until it has"):
        incidents.call_off(PERSON, run_of(MOVE).pk, "not today")

    world.exits(world.placements[0], signal=9, requested=True)
    incidents.call_off(PERSON, run_of(MOVE).pk, "not today")

    assert run_of("replica-lost").context["lost_placement"] == world.placements[0].pk
    assert not Placement.objects.exclude(state=PlacementState.ENDED).exists()


def test_one_that_is_being_started_cannot_be_called_off(world: World) -> None:
    order(world)
    saves_and_ends(world)
    answer("start_rank", pid=7)
    drain()

    with pytest.raises(Conflict, match="being started on spare-0"):
        incidents.call_off(PERSON, run_of(MOVE).pk, "not today")
    assert run_of(MOVE).state == RunState.WAITING
    assert not PlaybookRun.objects.filter(playbook="replica-lost").exists()


def test_one_whose_start_was_never_carried_is_called_off_and_brought_back(world: World) -> None:
    begun = start_came_to_nothing(world)
    incidents.call_off(PERSON, run_of(MOVE).pk, "not today")
    begun.refresh_from_db()

    assert (begun.state, run_of(MOVE).state) == (PlacementState.ENDED, RunState.CANCELLED)
    assert state(begun.node)[0] == NodeState.AVAILABLE
    assert run_of("replica-lost").context["lost_placement"] == world.placements[0].pk


def test_one_that_may_have_been_started_cannot_be_called_off_before_that_is_known(
    world: World,
) -> None:
    begun = start_came_to_nothing(world)
    Command.objects.filter(verb="start_rank").update(delivered_at=timezone.now())
    with pytest.raises(Conflict, match="may have started it"):
        incidents.call_off(PERSON, run_of(MOVE).pk, "not today")

    world.exits(begun, signal=9)
    incidents.call_off(PERSON, run_of(MOVE).pk, "not today")

    assert run_of(MOVE).state == RunState.CANCELLED
    assert not Placement.objects.exclude(state=PlacementState.ENDED).exists()


def test_one_that_ended_without_a_word_is_brought_back_when_it_is_called_off(
    world: World,
) -> None:
    order(world)
    incidents.pause_run(PERSON, run_of(MOVE).pk, "a moment")
    answer("stop_process", stopped=True)
    incidents.call_off(PERSON, run_of(MOVE).pk, "not today")

    assert run_of("replica-lost").context["replica"] == 0
    assert state(world.placements[0].node) == (NodeState.AVAILABLE, False)


def test_one_that_trains_again_is_not_brought_back_by_a_stale_run(world: World) -> None:
    order(world)
    answer("stop_process", "failed")
    drain()
    world.exits(world.placements[0], signal=9, requested=True)
    jobs.end_placement(SYSTEM, world.placements[0].pk, "x", free_node=True)
    jobs.place(SYSTEM, replica().pk, world.spares[1].pk, placement_id="plc_back")
    incidents.call_off(PERSON, run_of(MOVE).pk, "it is back")

    assert run_of(MOVE).state == RunState.CANCELLED
    assert not PlaybookRun.objects.filter(playbook="replica-lost").exists()


def _nowhere_free(world: World) -> None:
    no_spare(world)
    fleet.set_hold(PERSON, world.placements[0].node_id, "mine")


def test_one_that_had_ended_is_brought_back_when_its_move_is_called_off(world: World) -> None:
    order(world)
    _nowhere_free(world)
    saves_and_ends(world)
    incidents.call_off(PERSON, run_of(MOVE).pk, "not today")
    drain()

    assert run_of(MOVE).state == RunState.CANCELLED
    assert run_of("replica-lost").context["replica"] == 0


# --- lost with its node ---------------------------------------------------------------------------


def test_one_that_told_of_a_step_after_its_nodes_last_beat_is_lost_with_it_all_the_same(
    world: World,
) -> None:
    long_ago = timezone.now() - timedelta(seconds=50)
    ProgressSampleFactory(job=world.job, step=19, epoch=1, replicas=[0], at=long_ago)
    ProgressSample.objects.exclude(step=19).delete()
    world.silence(world.placements[0].node)
    drain()

    assert Incident.objects.get(job=world.job).code == "node-lost"
