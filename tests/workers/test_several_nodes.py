"""A replica on several nodes: it starts, is lost, comes back and moves as one."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import timedelta

import msgspec
import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone
from pytest_django import Settings

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.actions import record_signal
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.ids import new_id
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RunState
from controlplane.incidents.models import Incident, PlaybookRun, PlaybookStep
from controlplane.incidents.move_plans import SAVE_S
from controlplane.incidents.plans import plan_of_order
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState
from controlplane.jobs.models import Job, Placement, Replica
from node_agent import wire
from runtime import client
from tests.factories import CheckpointFactory, JobFactory, PlacementFactory, ProgressSampleFactory
from tests.workers.moving import PERSON, committed, no_spare, state, told_by
from tests.workers.world import (
    XID_79,
    World,
    answer,
    drain,
    quarantine,
    run_of,
    step_of,
    unanswered,
)
from workers import engine

pytestmark = pytest.mark.django_db

LOSS, MOVE, START = "replica-lost", "move-job", "start-job"


@pytest.fixture(autouse=True)
def training(world: World) -> None:
    """The job is one replica on two nodes."""
    first, second = world.placements
    gone = second.replica
    second.replica, second.node_rank = first.replica, 1
    second.save()
    gone.delete()
    Job.objects.update(world_replicas=1, nodes_per_replica=2, gpus_per_replica=2, whole=True)
    world.job.refresh_from_db()
    ProgressSampleFactory(job=world.job, step=9, epoch=1, replicas=[0])
    world.placements = list(Replica.objects.get().alive)


def lost_a_peer(placement: Placement, *ranks: int) -> None:
    """These of its ranks say that they end, for a peer of theirs is gone."""
    for rank in ranks:
        record_signal(
            new_id("sig"),
            SignalKind.JOB_TROUBLE,
            source="replica 0",
            observed_at=timezone.now(),
            job_id=placement.replica.job_id,
            replica=0,
            placement_id=placement.pk,
            data={"kind": "exception", "text": "RuntimeError: closed", "rank": rank},
        )


def ended_by(world: World, placement: Placement) -> None:
    """Of the two ranks on this node one is killed; all others end for it, and so do both agents'
    programs."""
    other = next(one for one in world.placements if one != placement)
    lost_a_peer(placement, 2)
    lost_a_peer(other, 0, 1)
    world.exits(other, exit_code=1)
    world.exits(placement, exit_code=1)
    drain()


def widen(world: World, stack: ExitStack, nodes: int) -> None:
    """It is on so many nodes."""
    Job.objects.update(nodes_per_replica=nodes, gpus_per_replica=nodes)
    replica = Replica.objects.get()
    for node_rank in range(2, nodes):
        node = world.add_node(stack, f"node-{node_rank}", state=NodeState.ALLOCATED)
        PlacementFactory(replica=replica, node=node, node_rank=node_rank)


def present() -> list[Placement]:
    return list(Replica.objects.get().alive)


def names() -> list[str]:
    return [one.node.name for one in present()]


def orders(verb: str) -> list[tuple[str, wire.Verb]]:
    """To which node each order of this verb went, the oldest first."""
    found = Command.objects.filter(verb=verb).order_by("created_at", "requester")
    return [(one.node.name, _action(one)) for one in found.select_related("node")]


def unfinished(verb: str) -> list[str]:
    found = Command.objects.filter(verb=verb, state__in=["queued", "delivered"])
    return sorted(found.values_list("node__name", flat=True))


def _action(command: Command) -> wire.Verb:
    return msgspec.json.decode(command.payload, type=wire.Command).action


def all_train(world: World) -> None:
    """All that were told to start have started, and the job trains."""
    answer("start_rank", pid=7)
    for one in present():
        told_by(one, client.Hello(pid=7, at=time.time()))
    told_by(present()[0], committed(step=30, epoch=2, replicas=[0], whole=True))
    drain()


# --- it starts ------------------------------------------------------------------------------------


@pytest.fixture
def registered(world: World) -> Job:
    """One that nothing runs of yet; the other's nodes are free."""
    for one in world.placements:
        jobs.end_placement(SYSTEM, one.pk, "not of this test", free_node=True)
    return jobs.register(
        SYSTEM,
        cluster_id=world.cluster.pk,
        name="wide",
        program="train",
        world_replicas=1,
        gpus_per_replica=2,
        nodes_per_replica=2,
    )


def begin(job: Job) -> None:
    incidents.start_job(SYSTEM, job.pk)
    drain()
    answer("start_coordinator", address="127.0.0.1:4001")
    drain()


def test_it_is_started_on_all_of_its_nodes_at_once(world: World, registered: Job) -> None:
    begin(registered)

    (first, one), (second, other) = orders("start_rank")
    assert isinstance(one, wire.StartRank)
    assert isinstance(other, wire.StartRank)
    assert (first, second) == ("node-0", "node-1")
    assert one.together is not None
    assert other.together is not None
    assert (one.together.node_rank, other.together.node_rank) == (0, 1)
    assert one.together.start == other.together.start == one.placement
    assert one.together.port == other.together.port
    assert other.together.address == Node.objects.get(name="node-0").address


def test_it_has_started_once_it_trains(world: World, registered: Job) -> None:
    begin(registered)
    replica = registered.replicas.get()
    answer("start_rank", pid=7)
    for one in replica.alive:
        told_by(one, client.Hello(pid=7, at=time.time()))
    told_by(replica.alive[0], committed(step=0, epoch=1, replicas=[0], whole=True))
    drain()

    assert run_of(START).state == RunState.SUCCEEDED
    assert [one.joined_at is not None for one in replica.alive] == [True, True]
    registered.refresh_from_db()
    assert registered.state == JobState.RUNNING


def test_where_one_node_does_not_start_it_all_are_ended_and_chosen_anew(
    world: World, registered: Job
) -> None:
    begin(registered)
    fails, starts = Command.objects.filter(verb="start_rank").order_by("node__name")
    for command, word in ((fails, "failed"), (starts, "done")):
        result = wire.CommandResult(id=command.pk, state=word, at=time.time())  # type: ignore[arg-type]
        fleet.record_command_result(command.node_id, result)
    drain()
    assert unfinished("stop_process") == ["node-0", "node-1"]

    answer("stop_process", stopped=True)
    drain()
    answer("stop_process", stopped=True)  # the coordinator's
    answer("start_coordinator", address="127.0.0.1:4002")
    drain()

    assert unfinished("start_rank") == ["node-1", "spare-0"]


def test_a_person_s_word_has_nodes_tried_again_that_did_not_start_it(
    world: World, registered: Job
) -> None:
    begin(registered)
    answer("start_rank", "failed")
    drain()
    answer("stop_process", stopped=True)
    drain()
    run = run_of(START)
    assert run.context["passed_over"]
    PlaybookRun.objects.update(state=RunState.NEEDS_OPERATOR)

    incidents.resume_run(PERSON, run.pk, "the program is mended")

    assert run_of(START).context["passed_over"] == []


def test_nodes_that_fall_silent_together_are_awaited_and_started_on_again(
    world: World, registered: Job
) -> None:
    begin(registered)
    nodes = [one.node for one in registered.replicas.get().alive]
    world.silence_together(*nodes)
    unanswered()  # to start it
    unanswered()  # to end it
    run = run_of(START)
    silent = (run.state, unfinished("stop_process"), run.context.get("passed_over"))

    for node in nodes:
        world.hear(node)
    answer("stop_process", stopped=True)
    drain()
    answer("stop_process", stopped=True)  # the coordinator's
    answer("start_coordinator", address="127.0.0.1:4002")
    drain()

    assert silent == (RunState.WAITING, ["node-0", "node-1"], None)
    assert unfinished("start_rank") == ["node-0", "node-1"]
    assert not PlaybookRun.objects.filter(playbook=LOSS).exists()


def test_a_node_that_is_heard_and_does_not_answer_is_for_a_person(
    world: World, registered: Job
) -> None:
    begin(registered)
    unanswered()
    unanswered()

    assert run_of(START).state == RunState.NEEDS_OPERATOR
    assert "does not say that nothing of it runs there" in run_of(START).state_reason


def test_two_processes_of_one_place_are_never_written_down(world: World) -> None:
    with pytest.raises(Conflict, match="is placed already"):
        jobs.place(
            SYSTEM, Replica.objects.get().pk, world.spares[0].pk, placement_id="plc_x", node_rank=1
        )
    with pytest.raises(IntegrityError), transaction.atomic():
        PlacementFactory(replica=Replica.objects.get(), node=world.spares[0], node_rank=1)


# --- it is lost -----------------------------------------------------------------------------------


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_killed_rank_is_one_incident_of_its_node(world: World, node_rank: int) -> None:
    ended_by(world, world.placements[node_rank])

    incident = Incident.objects.get()
    assert incident.title == f"{world.job.name} lost replica 0 on node-{node_rank}: process-exited"
    assert incident.node == world.placements[node_rank].node
    assert PlaybookRun.objects.filter(playbook=LOSS).count() == 1


def test_another_job_s_words_do_not_say_which_node_s_rank_ended_first(world: World) -> None:
    killed = world.placements[0]
    lost_a_peer(killed, 4, 5, 6)
    Signal.objects.filter(placement_id=killed.pk).update(job_id=JobFactory().pk)
    ended_by(world, killed)

    assert Incident.objects.get().node == killed.node


def test_all_are_started_anew_where_they_were(world: World) -> None:
    ended_by(world, world.placements[1])
    before = world.placements

    assert names() == ["node-0", "node-1"]
    assert {one.pk for one in present()}.isdisjoint(one.pk for one in before)
    first, second = [order for _, order in orders("start_rank")]
    assert isinstance(first, wire.StartRank)
    assert isinstance(second, wire.StartRank)
    assert first.together is not None
    assert second.together is not None
    assert first.together.start == second.together.start

    all_train(world)

    assert run_of(LOSS).state == RunState.SUCCEEDED
    assert Replica.objects.get().state == ReplicaState.ACTIVE
    assert Incident.objects.get().restored_at is not None


def test_one_that_was_sent_away_is_started_anew_once_nothing_of_it_runs(world: World) -> None:
    first, second = world.placements
    farewell = client.Stopped(step=12, reason=client.TOLD_TO_END, at=time.time(), because="told")
    told_by(first, farewell)
    world.exits(second, exit_code=0)  # the other saves still
    drain()
    waiting = incidents.bring_back_sent_away()
    world.exits(first, exit_code=0)
    drain()
    brought = incidents.bring_back_sent_away()
    drain()

    assert (waiting, brought) == (0, 1)
    assert Incident.objects.get().code == "process-sent-away"
    assert len(unfinished("start_rank")) == 2


def test_what_is_left_of_it_is_ended_before_anything_is_started(world: World) -> None:
    world.exits(world.placements[1], signal=9)
    drain()

    assert orders("start_rank") == []
    ((name, stop),) = orders("stop_process")
    assert name == "node-0"
    assert stop == wire.StopProcess(placement=world.placements[0].pk, grace_s=0)

    answer("stop_process", stopped=True)
    drain()

    assert unfinished("start_rank") == ["node-0", "node-1"]


def test_one_that_only_lost_a_peer_is_not_blamed_before_the_other_is_heard_of(
    world: World,
) -> None:
    lost_a_peer(world.placements[0], 0)
    world.exits(world.placements[0], exit_code=1)
    drain()
    assert run_of(LOSS).state == RunState.WAITING
    assert "lost a peer on another node" in step_of(LOSS, "find-cause").outcome

    world.silence(world.placements[1].node)
    drain()

    assert Incident.objects.get().code == "node-lost"
    assert run_of(LOSS).context["lost_placement"] == world.placements[1].pk


def test_a_lost_node_is_taken_out_and_only_its_place_goes_to_a_spare(world: World) -> None:
    out = world.placements[1].node
    world.silence(out)
    drain()
    answer("stop_process", stopped=True)
    drain()

    out.refresh_from_db()
    assert out.state in (NodeState.QUARANTINED, NodeState.REPAIRING)
    assert not world.bmcs[out.pk].on or world.bmcs[out.pk].boots > 1
    assert names() == ["node-0", "spare-0"]
    all_train(world)
    assert Incident.objects.count() == 1
    assert run_of(LOSS).state == RunState.SUCCEEDED


def test_the_end_of_its_other_process_begins_no_repair_anew_that_a_person_called_off(
    world: World,
) -> None:
    lost, other = world.placements
    Node.objects.filter(pk=lost.node_id).update(bmc_url="")
    world.silence(lost.node)
    lost_a_peer(other, 2)
    drain()
    incidents.cancel_run(PERSON, run_of("repair-node").pk, "I look myself")
    drain()
    asked = step_of("replica-lost", "take-node-out").state
    world.exits(other, exit_code=1)
    drain()

    assert asked == "needs_operator"
    assert PlaybookRun.objects.filter(playbook="repair-node").count() == 1
    assert step_of("replica-lost", "take-node-out").state == "needs_operator"


def test_a_node_that_was_lost_just_after_its_job_told_of_a_step_is_found_out(world: World) -> None:
    world.silence(world.placements[1].node)
    ProgressSampleFactory(job=world.job, step=19, epoch=1, replicas=[0], at=timezone.now())
    lost_a_peer(world.placements[0], 0, 1)
    world.exits(world.placements[0], exit_code=1)
    drain()

    assert names() == ["node-0", "spare-0"]
    assert Incident.objects.get(job=world.job).code == "node-lost"


def test_the_first_node_s_place_goes_to_a_spare_too_and_all_meet_there(world: World) -> None:
    world.silence(world.placements[0].node)
    drain()
    answer("stop_process", stopped=True)
    drain()

    assert names() == ["spare-0", "node-1"]
    addresses = {
        order.together.address
        for _, order in orders("start_rank")
        if isinstance(order, wire.StartRank) and order.together is not None
    }
    assert addresses == {world.spares[0].address}


def test_a_card_that_fell_off_the_bus_takes_its_node_out_and_no_other(world: World) -> None:
    out = world.placements[1].node
    world.kernel_says(out, XID_79)
    quarantine(world, out)
    answer("stop_process", stopped=True)
    drain()

    assert out.state != NodeState.ALLOCATED
    assert names() == ["node-0", "spare-0"]
    assert Incident.objects.filter(job=world.job).count() == 1


def test_two_nodes_that_are_lost_one_after_the_other_are_both_replaced(world: World) -> None:
    world.silence(world.placements[1].node)
    drain()
    world.silence(world.placements[0].node)
    drain(8)

    assert names() == ["spare-0", "spare-1"]
    assert Incident.objects.filter(job=world.job).count() == 1


def test_it_waits_where_no_node_is_free_for_the_lost_one(world: World) -> None:
    no_spare(world)
    world.silence(world.placements[1].node)
    drain()
    answer("stop_process", stopped=True)
    drain()

    assert orders("start_rank") == []
    assert "no node is free for the place of node-1" in step_of(LOSS, "choose-place").outcome


def test_a_node_that_does_not_start_it_is_passed_over_once_all_are_ended(world: World) -> None:
    ended_by(world, world.placements[1])
    fails, starts = Command.objects.filter(verb="start_rank").order_by("node__name")
    for command, word in ((fails, "failed"), (starts, "done")):
        result = wire.CommandResult(id=command.pk, state=word, at=time.time())  # type: ignore[arg-type]
        fleet.record_command_result(command.node_id, result)
    drain()
    answer("stop_process", stopped=True)
    drain()

    assert names() == ["spare-0", "node-1"]
    assert state(world.placements[0].node) == (NodeState.AVAILABLE, False)


def test_a_start_that_is_tried_again_is_made_once_all_of_the_one_before_are_ended(
    world: World,
) -> None:
    ended_by(world, world.placements[1])
    unanswered()
    unanswered()
    asked = run_of(LOSS).state
    incidents.retry_run(PERSON, run_of(LOSS).pk, "they answer again")
    drain()
    before, told = len(orders("start_rank")), unfinished("stop_process")
    answer("stop_process", stopped=True)
    drain()

    assert (asked, before, told) == (RunState.NEEDS_OPERATOR, 2, ["node-0", "node-1"])
    assert unfinished("start_rank") == ["node-0", "node-1"]
    all_train(world)
    assert run_of(LOSS).state == RunState.SUCCEEDED


def test_its_place_goes_elsewhere_where_the_job_is_kept_from_the_node(world: World) -> None:
    jobs.exclude_node(PERSON, world.job.pk, world.placements[0].node_id, "it is slow there")
    ended_by(world, world.placements[1])

    assert names() == ["spare-0", "node-1"]


def test_one_that_is_lost_again_while_it_starts_is_brought_back_by_the_same_run(
    world: World,
) -> None:
    ended_by(world, world.placements[1])
    answer("start_rank", pid=7)
    world.exits(present()[0], signal=9)
    drain()
    answer("stop_process", stopped=True)
    drain()

    assert unfinished("start_rank") == ["node-0", "node-1"]
    assert PlaybookRun.objects.filter(playbook=LOSS).count() == 1
    all_train(world)
    assert run_of(LOSS).state == RunState.SUCCEEDED


def test_where_an_agent_cannot_end_it_its_node_is_unfit(world: World) -> None:
    world.exits(world.placements[1], signal=9)
    drain()
    answer("stop_process", "failed")
    drain()

    repair = run_of("repair-node")
    assert repair.node == world.placements[0].node
    assert orders("start_rank") == []


def test_however_many_nodes_are_unfit_all_are_taken_out_one_by_one(
    world: World, settings: Settings
) -> None:
    for scope in ("CLUSTER", "RACK", "JOB", "CODE"):
        setattr(settings, f"BUDGET_NODES_PER_{scope}", 100)
    unfit = engine.MAX_ROUNDS + 1
    with ExitStack() as stack:
        widen(world, stack, unfit + 1)
        world.exits(present()[-1], signal=9)
        drain()
        for _ in range(2 * unfit):  # its own order, and that of its repair
            answer("stop_process", "failed")
            drain()

        assert PlaybookRun.objects.filter(playbook="repair-node").count() == unfit
        assert step_of(LOSS, "choose-place").outcome.startswith("no node is free for the place of")


def test_an_agent_that_cannot_end_it_is_no_silent_one_that_is_back(world: World) -> None:
    world.silence(world.placements[1].node)
    drain()
    answer("stop_process", "failed")
    drain()

    assert PlaybookRun.objects.filter(playbook="repair-node").count() == 2
    assert run_of("repair-node").node == world.placements[0].node
    assert run_of(LOSS).state == RunState.WAITING


def test_one_that_hangs_on_a_silent_card_took_the_others_along(world: World) -> None:
    record_signal(
        new_id("sig"),
        SignalKind.GPU_UNREADABLE,
        source="agent",
        observed_at=timezone.now(),
        node=world.placements[1].node,
        data={"reason": "no answer"},
    )
    lost_a_peer(world.placements[0], 0, 1)
    world.exits(world.placements[0], exit_code=1)
    drain()

    assert Incident.objects.get(job=world.job).code == "gpu-unreadable"
    assert run_of("repair-node").node == world.placements[1].node


def test_one_that_is_heard_again_is_not_all_of_it(world: World) -> None:
    world.silence(world.placements[1].node)
    drain()
    back = world.placements[0]
    run = run_of(LOSS)
    find, end = step_of(LOSS, "find-cause"), step_of(LOSS, "end-what-is-left")
    run.context |= {"lost_placement": back.pk, "round": 1}
    run.save()
    PlaybookStep.objects.filter(pk=end.pk).update(state="blocked", started_at=None)
    PlaybookStep.objects.filter(pk=find.pk).update(state="ready", wake_at=timezone.now())
    drain()
    answer("stop_process", stopped=True)
    drain()

    assert names() == ["node-0", "spare-0"]
    assert unfinished("start_rank") == ["node-0", "spare-0"]


def test_the_plan_of_taking_one_of_its_nodes_out_says_that_it_stands_still(world: World) -> None:
    plan = plan_of_order(world.placements[1].node, "quarantine")

    assert any("stands still, and goes on from its newest" in note for note in plan.notes)
    assert not any("survivors" in note for note in plan.notes)


# --- it moves -------------------------------------------------------------------------------------


def order(world: World, node_rank: int = 1) -> None:
    """The move of one of its nodes is ordered, and the job has saved."""
    leaving = world.placements[node_rank].node_id
    incidents.move_replica(PERSON, world.job.pk, 0, leaving=leaving, reason="it is warm there")
    drain()
    CheckpointFactory(job=world.job, tier="shared", at=timezone.now())
    drain()


def saves_and_ends(world: World) -> None:
    told_by(world.placements[0], client.Stopped(step=12, reason="left the loop", at=time.time()))
    for one in world.placements:
        world.exits(one, exit_code=0, requested=True)
    answer("stop_process", stopped=True)
    drain()


@pytest.mark.parametrize(
    ("node_rank", "there"), [(0, ["spare-0", "node-1"]), (1, ["node-0", "spare-0"])]
)
def test_it_ends_everywhere_and_goes_on_with_another_node_in_that_place(
    world: World, node_rank: int, there: list[str]
) -> None:
    order(world, node_rank)
    stops = orders("stop_process")
    assert [name for name, _ in stops] == ["node-0", "node-1"]
    assert {one.grace_s for _, one in stops if isinstance(one, wire.StopProcess)} == {SAVE_S}
    assert orders("start_rank") == []

    saves_and_ends(world)
    assert names() == there
    all_train(world)

    run = run_of(MOVE)
    assert run.state == RunState.SUCCEEDED
    assert f"moved from node-{node_rank} to spare-0" in run.state_reason
    assert state(world.placements[node_rank].node) == (NodeState.AVAILABLE, True)
    assert not Incident.objects.exists()


def test_nothing_is_started_while_one_node_has_not_ended_it(world: World) -> None:
    order(world)
    told_by(world.placements[0], client.Stopped(step=12, reason="left the loop", at=time.time()))
    world.exits(world.placements[0], exit_code=0, requested=True)
    drain()

    assert orders("start_rank") == []


def test_nodes_that_fall_silent_together_are_told_again_to_end_it(world: World) -> None:
    order(world)
    nodes = [one.node for one in world.placements]
    world.silence_together(*nodes)
    unanswered()
    for node in nodes:
        world.hear(node)
    drain()

    assert run_of(MOVE).state == RunState.WAITING
    assert orders("start_rank") == []
    saves_and_ends(world)
    assert names() == ["node-0", "spare-0"]


def test_nodes_that_are_silent_when_they_are_to_be_told_have_not_ended_it(world: World) -> None:
    leaving = world.placements[1].node_id
    incidents.move_replica(PERSON, world.job.pk, 0, leaving=leaving, reason="it is warm there")
    drain()
    nodes = [one.node for one in world.placements]
    world.silence_together(*nodes)
    CheckpointFactory(job=world.job, tier="shared", at=timezone.now())
    drain()

    assert run_of(MOVE).state == RunState.WAITING
    assert [name for name, _ in orders("stop_process")] == ["node-0", "node-1"]


def test_agents_that_refuse_leave_it_training_where_it_was(world: World) -> None:
    order(world)
    answer("stop_process", "refused")
    drain()

    assert run_of(MOVE).state == RunState.FAILED
    assert "not moved: node-0, node-1 refused to end it: no" in run_of(MOVE).state_reason
    assert present() == world.placements
    assert state(world.spares[0]) == (NodeState.AVAILABLE, True)


def test_what_one_agent_refuses_to_end_leaves_with_the_other(world: World) -> None:
    order(world)
    refuses = Command.objects.get(verb="stop_process", node=world.placements[1].node)
    no = wire.CommandResult(id=refuses.pk, state="refused", at=time.time(), error="no")
    fleet.record_command_result(refuses.node_id, no)
    drain()
    answer("stop_process", stopped=True)
    drain()
    assert run_of(MOVE).state == RunState.WAITING
    assert orders("start_rank") == []

    saves_and_ends(world)
    assert names() == ["node-0", "spare-0"]


def test_which_node_it_is_to_leave_must_be_said(world: World) -> None:
    with pytest.raises(Conflict, match=r"say in `leaving` which it is to leave: node-0 \(nod_"):
        incidents.move_replica(PERSON, world.job.pk, 0, reason="it is warm there")
    with pytest.raises(Conflict, match="is not on that node; it is on node-0"):
        incidents.move_replica(
            PERSON, world.job.pk, 0, leaving=world.spares[0].pk, reason="it is warm there"
        )


def test_a_drain_of_one_of_its_nodes_moves_it_first(world: World) -> None:
    incidents.order_node(PERSON, world.placements[1].node_id, "drain", "new cables")
    drain()
    CheckpointFactory(job=world.job, tier="shared", at=timezone.now())
    drain()
    saves_and_ends(world)

    assert names() == ["node-0", "spare-0"]
    all_train(world)
    drain()
    world.placements[1].node.refresh_from_db()
    assert world.placements[1].node.state == NodeState.QUARANTINED
    assert not Incident.objects.exists()


def test_a_drain_of_another_of_its_nodes_waits_for_that_move(world: World) -> None:
    for one in world.placements:
        incidents.order_node(PERSON, one.node_id, "drain", "new cables")
    drain()
    CheckpointFactory(job=world.job, tier="shared", at=timezone.now())
    drain()
    stops = [one for _, one in orders("stop_process") if isinstance(one, wire.StopProcess)]
    assert [one.grace_s for one in stops] == [SAVE_S, SAVE_S]

    saves_and_ends(world)
    all_train(world)
    drain()

    assert names() == ["spare-0", "spare-1"]
    assert {Node.objects.get(pk=one.node_id).state for one in world.placements} == {
        NodeState.QUARANTINED
    }
    assert not Incident.objects.exists()


def test_nodes_are_free_also_where_it_left_and_the_move_was_called_off(world: World) -> None:
    order(world)
    told_by(world.placements[0], client.Stopped(step=12, reason="left the loop", at=time.time()))
    incidents.restart_job(PERSON, world.job.pk, "anew")
    for one in world.placements:
        world.exits(one, exit_code=0, requested=True)
    drain(1)

    assert NodeState.ALLOCATED not in {
        Node.objects.get(pk=one.node_id).state for one in world.placements
    }


def test_a_move_that_is_called_off_after_the_end_brings_all_back(world: World) -> None:
    order(world)
    no_spare(world)
    Node.objects.filter(pk=world.placements[0].node_id).update(hold_reason="mine")
    saves_and_ends(world)
    Node.objects.filter(pk=world.placements[0].node_id).update(hold_reason="")
    incidents.call_off(PERSON, run_of(MOVE).pk, "not today")
    drain()

    assert run_of(LOSS).context["replica"] == 0
    assert names() == ["node-0", "node-1"]


def test_what_waits_for_the_others_is_ended_when_its_start_is_cancelled(
    world: World, registered: Job
) -> None:
    begin(registered)
    answer("start_rank", pid=7)
    incidents.cancel_run(PERSON, run_of(START).pk, "not today")

    assert {"node-0", "node-1"} <= set(unfinished("stop_process"))


# --- it ends --------------------------------------------------------------------------------------


def test_it_is_over_on_all_nodes_once_its_first_rank_says_so(world: World) -> None:
    jobs.request_stop(PERSON, world.job.pk, "converged")
    told_by(world.placements[0], client.Stopped(step=12, reason="left the loop", at=time.time()))

    assert present() == []
    world.job.refresh_from_db()
    assert world.job.state == JobState.STOPPED
    ends = Placement.objects.values_list("end_reason", "state")
    assert set(ends) == {("left: left the loop", PlacementState.ENDED)}


def test_each_of_its_nodes_is_free_once_its_own_process_has_ended(world: World) -> None:
    told_by(world.placements[0], client.Stopped(step=12, reason="left the loop", at=time.time()))
    busy = [state(one.node) for one in world.placements]
    for one in world.placements:
        world.exits(one, exit_code=0)
    drain()

    assert busy == [(NodeState.ALLOCATED, False)] * 2
    assert [state(one.node) for one in world.placements] == [(NodeState.AVAILABLE, False)] * 2
    assert not Incident.objects.exists()


def test_a_node_whose_process_ended_before_that_was_said_is_free_too(world: World) -> None:
    jobs.request_stop(PERSON, world.job.pk, "converged")
    world.exits(world.placements[1], exit_code=0)
    told_by(world.placements[0], client.Stopped(step=12, reason="left the loop", at=time.time()))
    drain()

    assert state(world.placements[1].node) == (NodeState.AVAILABLE, False)


def test_what_waits_for_a_lost_node_is_ended_with_its_job(world: World) -> None:
    begun = timezone.now() - timedelta(seconds=3 * SAVE_S)
    Placement.objects.update(created_at=begun, joined_at=begun)
    jobs.request_stop(PERSON, world.job.pk, "converged")
    world.exits(world.placements[1], exit_code=0)
    drain()
    assert incidents.finish_ending_jobs() == 0

    Placement.objects.filter(pk=world.placements[1].pk).update(
        ended_at=timezone.now() - timedelta(seconds=2 * SAVE_S)
    )
    assert incidents.finish_ending_jobs() == 1
    assert unfinished("stop_process") == ["node-0"]


def leaves_and_hangs(world: World) -> None:
    """It has left; of the process on its second node nobody saw the end, for a long time."""
    told_by(world.placements[0], client.Stopped(step=12, reason="left the loop", at=time.time()))
    world.exits(world.placements[0], exit_code=0)
    drain()
    assert incidents.finish_ending_jobs() == 0
    Placement.objects.update(ended_at=timezone.now() - timedelta(seconds=2 * SAVE_S))


def test_what_hangs_after_it_left_is_killed_once_and_its_exit_frees_the_node(world: World) -> None:
    leaves_and_hangs(world)

    assert incidents.finish_ending_jobs() == 1
    assert incidents.finish_ending_jobs() == 0
    ((name, stop),) = orders("stop_process")
    assert name == "node-1"
    assert stop == wire.StopProcess(placement=world.placements[1].pk, grace_s=0)
    world.exits(world.placements[1], signal=9, requested=True)
    drain()
    assert state(world.placements[1].node) == (NodeState.AVAILABLE, False)


def test_a_node_is_free_too_where_nothing_hangs_and_the_exit_was_never_told(world: World) -> None:
    leaves_and_hangs(world)
    incidents.finish_ending_jobs()
    answer("stop_process", stopped=True)
    incidents.finish_ending_jobs()

    assert state(world.placements[1].node) == (NodeState.AVAILABLE, False)
    assert incidents.finish_ending_jobs() == 0


def test_what_a_node_holds_since_is_none_that_hangs(world: World) -> None:
    leaves_and_hangs(world)
    PlacementFactory(node=world.placements[1].node)

    assert incidents.finish_ending_jobs() == 0


def test_that_it_left_is_no_word_of_what_was_started_since(world: World) -> None:
    ended_by(world, world.placements[1])
    all_train(world)
    told_by(world.placements[0], client.Stopped(step=12, reason="left the loop", at=time.time()))

    assert names() == ["node-0", "node-1"]
