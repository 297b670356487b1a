"""Playbooks against a world that changes under them: second losses, vanished spares, rumours."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone
from pytest_django import Settings

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor, AuditEvent
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.actions.commands import RESULT_GRACE_S
from controlplane.fleet.choices import CommandState, NodeState, Rung
from controlplane.fleet.models import Command, Lease, Node, RepairRecord
from controlplane.health.actions import record_signal
from controlplane.health.choices import SignalKind, Urgency
from controlplane.ids import new_id
from controlplane.incidents import actions as incidents
from controlplane.incidents.candidates import free_nodes
from controlplane.incidents.choices import (
    ApprovalState,
    IncidentState,
    Mode,
    RunState,
    StepState,
)
from controlplane.incidents.models import Approval, Incident, PlaybookRun, PlaybookStep
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState, ReplicaState
from controlplane.jobs.models import Job, Placement, ProgressSample
from node_agent import wire
from runtime import client
from tests.factories import (
    ApprovalFactory,
    GpuFactory,
    MaintenanceWindowFactory,
    NodeFactory,
    PlacementFactory,
    PlaybookRunFactory,
    ProgressSampleFactory,
    ReplicaFactory,
)
from tests.workers.moving import commands
from tests.workers.world import World, answer, drain, mend, run_of, step_of, unanswered
from workers import guards
from workers.playbooks import PLAYBOOKS
from workers.playbooks.start_rank import START_ORDER_S

pytestmark = pytest.mark.django_db
PERSON = Actor(ActorKind.USER, "1")


def test_a_killed_process_returns_in_place_and_its_node_is_not_touched(world: World) -> None:
    world.kill(world.placements[1])
    mend(world, 1)
    incident = Incident.objects.get()
    assert incident.state == IncidentState.RESOLVED
    assert world.placement_of(1).node == world.placements[1].node
    assert not any(bmc.orders for bmc in world.bmcs.values())


def test_a_silent_node_is_off_before_its_replica_starts_elsewhere(world: World) -> None:
    lost = world.placements[1]
    world.silence(lost.node)
    world.peers_lose(lost)
    drain()
    assert world.bmcs[lost.node_id].orders[0] == "ForceOff"
    assert world.placement_of(1).node == world.spares[0]

    answer("start_rank", pid=2)
    world.join(world.placement_of(1))
    world.boot(lost.node)
    drain()
    answer("diagnose", tests=[{"name": "cards", "outcome": "passed"}])
    drain()
    PlaybookStep.objects.filter(key="soak").update(started_at=timezone.now() - timedelta(hours=1))
    PlaybookStep.objects.filter(key="soak").update(timeout_s=1e6)
    drain()

    lost.node.refresh_from_db()
    assert (lost.node.state, lost.node.spare) == (NodeState.AVAILABLE, True)
    assert world.bmcs[lost.node_id].orders == ["ForceOff", "On"]
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_a_silent_agent_whose_replica_trains_loses_neither(world: World) -> None:
    placement = world.placements[1]
    world.silence(placement.node)
    ProgressSampleFactory(job=world.job, at=timezone.now(), replicas=[0, 1])
    drain()
    assert step_of("replica-lost", "find-cause").state == StepState.WAITING
    world.hear(placement.node)
    drain()
    assert run_of("replica-lost").state == RunState.SUCCEEDED
    assert not world.bmcs[placement.node_id].orders
    assert world.placement_of(1).pk == placement.pk


def test_a_node_that_takes_the_coordinator_along_is_lost_once_the_job_stands_still(
    world: World, settings: Settings
) -> None:
    """The last that was told, after its last beat, is of a step that it was part of."""
    placement = world.placements[1]
    Job.objects.filter(pk=world.job.pk).update(coordinator_node=placement.node)
    world.silence(placement.node)
    sample = ProgressSampleFactory(job=world.job, at=timezone.now(), replicas=[0, 1])
    drain()
    assert step_of("replica-lost", "find-cause").state == StepState.WAITING

    long_ago = timezone.now() - timedelta(seconds=settings.LEASE_S + 1)
    Lease.objects.filter(node=placement.node).update(last_beat_at=long_ago - timedelta(seconds=1))
    ProgressSample.objects.filter(pk=sample.pk).update(at=long_ago)
    drain()
    assert step_of("replica-lost", "find-cause").state == StepState.DONE
    assert Incident.objects.get(replica=1).code == "node-lost"


def test_a_starved_rank_that_came_back_by_itself_is_left_alone(world: World) -> None:
    placement = world.placements[1]
    world.peers_lose(placement)
    drain()
    now = timezone.now().timestamp()
    batch = client.Batch(
        job=world.job.pk, replica=0, rank=0, placement="", sent_at=now, messages=[]
    )
    back = client.Regrouped(
        epoch=9,
        replicas=[0, 1],
        lost=[],
        joined=[1],
        started_at=now,
        committed_at=now + 1,
        step=9,
        gap_s=0.1,
        entered=[placement.pk],
    )
    jobs.record_runtime_batch(world.job.pk, batch, [back])
    drain()
    assert run_of("replica-lost").state == RunState.SUCCEEDED
    assert not world.bmcs[placement.node_id].orders


def test_steps_of_a_later_epoch_show_that_a_rank_was_let_in_again(world: World) -> None:
    """Who was to tell that it was let in died before they could."""
    placement = world.placements[1]
    world.peers_lose(placement)
    drain()
    assert step_of("replica-lost", "find-cause").state == StepState.WAITING
    ProgressSampleFactory(job=world.job, epoch=3, replicas=[0, 1])
    drain()
    assert run_of("replica-lost").state == RunState.SUCCEEDED
    assert not world.bmcs[placement.node_id].orders


@pytest.mark.parametrize(("epoch", "replicas"), [(1, [0, 1]), (2, [0])])
def test_steps_that_are_not_its_own_since_show_nothing(
    world: World, epoch: int, replicas: list[int]
) -> None:
    world.peers_lose(world.placements[1])
    ProgressSampleFactory(job=world.job, epoch=epoch, replicas=replicas)
    drain()
    assert step_of("replica-lost", "find-cause").state == StepState.WAITING


def test_steps_of_the_process_that_stood_by_are_not_those_of_the_lost_one(world: World) -> None:
    lost = world.placements[1]
    PlacementFactory(replica=lost.replica, node=world.spares[0], moved_from=lost, standby=True)
    world.peers_lose(lost)
    ProgressSampleFactory(job=world.job, epoch=2, replicas=[0, 1])
    drain()
    assert step_of("replica-lost", "find-cause").state == StepState.WAITING


def test_a_silent_rank_that_trains_again_before_its_node_may_be_taken_out_is_left_alone(
    world: World, settings: Settings
) -> None:
    """Also while the guards still say no: what nobody wants any more waits for nobody."""
    settings.BUDGET_NODES_PER_CLUSTER = 0
    placement = world.placements[1]
    unresponsive(world, placement)
    assert "out for repair" in step_of("repair-node", "quarantine").outcome
    ProgressSampleFactory(job=world.job, epoch=3, replicas=[0, 1])
    drain()
    assert run_of("repair-node").state == RunState.SUCCEEDED
    assert run_of("replica-lost").state == RunState.SUCCEEDED
    assert Incident.objects.get().state == IncidentState.RESOLVED
    assert not Command.objects.exists()
    assert not world.bmcs[placement.node_id].orders


def test_a_silent_rank_that_is_being_killed_is_brought_back_whatever_it_says(world: World) -> None:
    """Its end is ordered already: that it trained once more changes nothing."""
    placement = world.placements[1]
    unresponsive(world, placement)
    assert Command.objects.get(verb="stop_process").node_id == placement.node_id
    ProgressSampleFactory(job=world.job, epoch=3, replicas=[0, 1])
    drain()
    answer("stop_process", stopped=True)
    drain()
    assert Node.objects.get(pk=placement.node_id).state != NodeState.ALLOCATED
    mend(world, 1)
    assert world.placement_of(1).node == world.spares[0]


def unresponsive(world: World, placement: Placement) -> None:
    """Its peers lost it and its node beats, for longer than a cause is looked for."""
    world.peers_lose(placement)
    drain()
    long_ago = timezone.now() - timedelta(hours=1)
    PlaybookStep.objects.filter(key="find-cause").update(started_at=long_ago, timeout_s=1e6)
    drain()
    assert Incident.objects.get().code == "replica-unresponsive"


def keep_out(world: World, node: Node, how: str) -> None:
    """Somebody keeps the job, or all work, from the node."""
    kept: dict[str, Callable[[], object]] = {
        "exclusion": lambda: jobs.exclude_node(PERSON, world.job.pk, node.pk, "it is slow there"),
        "window": lambda: MaintenanceWindowFactory(cluster=world.cluster, node=node),
        "drain": lambda: fleet.set_drained_by(PERSON, node.pk, "slurm", "new cables"),
    }
    kept[how]()


@pytest.mark.parametrize("how", ["exclusion", "window", "drain"])
def test_a_replica_does_not_return_to_a_node_that_it_is_kept_from(world: World, how: str) -> None:
    lost = world.placements[1]
    keep_out(world, lost.node, how)
    world.kill(lost)
    mend(world, 1)

    assert world.placement_of(1).node == world.spares[0]
    assert run_of("replica-lost").state == RunState.SUCCEEDED


@pytest.mark.parametrize("how", ["exclusion", "window", "drain"])
def test_a_node_that_a_replica_is_kept_from_after_it_was_chosen_is_not_taken(
    world: World, how: str
) -> None:
    lost = world.placements[1]
    jobs.end_placement(SYSTEM, lost.pk, "lost", free_node=False)
    keep_out(world, lost.node, how)

    with pytest.raises(Conflict, match="not free"):
        jobs.place(SYSTEM, lost.replica_id, lost.node_id, placement_id="plc_back")


def test_an_unfit_node_is_repaired_even_when_no_other_is_free(poor_world: World) -> None:
    lost = poor_world.placements[1]
    poor_world.silence(lost.node)
    poor_world.peers_lose(lost)
    drain()
    assert poor_world.bmcs[lost.node_id].orders == ["ForceOff", "On"]
    assert step_of("replica-lost", "choose-place").state == StepState.WAITING


@pytest.mark.parametrize(
    ("repair", "then"),
    [(RunState.RUNNING, RunState.WAITING), (RunState.NEEDS_OPERATOR, RunState.NEEDS_OPERATOR)],
)
def test_a_person_is_asked_for_a_node_once_none_is_being_repaired(
    repair: RunState, then: RunState, poor_world: World
) -> None:
    lost = poor_world.placements[1]
    poor_world.silence(lost.node)
    poor_world.peers_lose(lost)
    drain()
    hours_ago = timezone.now() - timedelta(hours=2)
    PlaybookRun.objects.filter(playbook="repair-node").update(state=repair)
    PlaybookStep.objects.filter(run__playbook="repair-node").update(wake_at=None)
    PlaybookStep.objects.filter(key="choose-place").update(started_at=hours_ago)
    drain()

    assert run_of("replica-lost").state == then


def until_it_is_idle(run: PlaybookRun) -> None:
    PlaybookRun.objects.filter(pk=run.pk).update(context={"urgency": Urgency.IDLE})


def until_it_is_signed(run: PlaybookRun) -> None:
    ApprovalFactory(run=run, cluster=run.cluster)


@pytest.mark.parametrize("waits", [until_it_is_idle, until_it_is_signed])
@pytest.mark.parametrize(
    ("state", "then"),
    [
        (NodeState.ALLOCATED, RunState.NEEDS_OPERATOR),
        (NodeState.SUSPECT, RunState.NEEDS_OPERATOR),
        (NodeState.QUARANTINED, RunState.WAITING),
    ],
)
def test_a_repair_that_is_put_off_while_its_node_works_is_not_waited_for(
    state: NodeState, then: RunState, waits: Callable[[PlaybookRun], None], poor_world: World
) -> None:
    lost = poor_world.placements[1]
    poor_world.silence(lost.node)
    poor_world.peers_lose(lost)
    drain()
    PlaybookRun.objects.filter(playbook="repair-node").update(state=RunState.NEEDS_OPERATOR)
    cluster = poor_world.cluster
    waits(
        PlaybookRunFactory(
            incident=None,
            cluster=cluster,
            node=NodeFactory(cluster=cluster, state=state),
            playbook="repair-node",
            state=RunState.WAITING,
        )
    )
    hours_ago = timezone.now() - timedelta(hours=2)
    PlaybookStep.objects.filter(key="choose-place").update(started_at=hours_ago)
    drain()

    assert run_of("replica-lost").state == then


def test_two_replicas_lost_at_once_get_two_spares(world: World) -> None:
    for _ in range(3):  # so that two are no large share of the cluster
        NodeFactory(cluster=world.cluster, state=NodeState.ALLOCATED)
    for placement in world.placements:
        world.silence(placement.node)
        world.peers_lose(placement)
    drain(8)
    nodes = {world.placement_of(0).node_id, world.placement_of(1).node_id}
    assert nodes == {spare.pk for spare in world.spares}


def test_however_many_replicas_want_the_same_spare_each_gets_one(world: World) -> None:
    lost = list(world.placements)
    for index in range(2, 8):
        replica = ReplicaFactory(job=world.job, index=index)
        card = GpuFactory(node__cluster=world.cluster, node__state=NodeState.ALLOCATED)
        lost.append(PlacementFactory(replica=replica, node=card.node))
    for placement in lost:
        GpuFactory(node__cluster=world.cluster, node__spare=True)
        fleet.set_hold(SYSTEM, placement.node_id, "nobody starts anything here")
        world.kill(placement)
    drain(12)

    assert PlaybookRun.objects.filter(state=RunState.NEEDS_OPERATOR).count() == 0
    told = Command.objects.filter(verb="start_rank").values_list("node", flat=True)
    assert (len(told), len(set(told))) == (8, 8)


def test_a_second_loss_while_the_first_is_being_mended_is_mended_too(world: World) -> None:
    world.kill(world.placements[1])
    drain()
    answer("start_rank", pid=2)
    again = world.placement_of(1)
    world.join(again)
    world.kill(again)  # before anybody looked
    mend(world, 1)
    assert world.placement_of(1).pk != again.pk
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_a_loss_after_the_run_finished_gets_a_run_of_its_own(world: World) -> None:
    world.kill(world.placements[1])
    mend(world, 1)
    world.kill(world.placement_of(1))
    mend(world, 1)
    assert PlaybookRun.objects.filter(playbook="replica-lost", state="succeeded").count() == 2


def test_a_spare_that_refuses_is_passed_over_and_stays_on(world: World) -> None:
    lost = world.placements[1]
    world.silence(lost.node)
    world.peers_lose(lost)
    drain()
    answer("start_rank", state="refused")
    drain()
    assert world.placement_of(1).node == world.spares[1]
    assert not world.bmcs[world.spares[0].pk].orders
    world.spares[0].refresh_from_db()
    assert world.spares[0].state == NodeState.AVAILABLE


def test_a_start_that_nobody_answered_is_stopped_before_another_is_made(world: World) -> None:
    world.kill(world.placements[1])
    drain()
    Command.objects.filter(verb="start_rank").update(state=CommandState.EXPIRED)
    drain()
    assert Placement.objects.filter(state__in=["starting", "running"]).count() == 2
    answer("stop_process", stopped=True)
    drain()
    assert world.placement_of(1).node != world.placements[1].node


def start_came_to_nothing(world: World) -> Placement:
    """Replica 1 was killed; its node answered neither the order to start it nor that to stop it."""
    world.kill(world.placements[1])
    drain()
    unanswered()
    unanswered()
    assert run_of("replica-lost").state == RunState.NEEDS_OPERATOR
    return world.placement_of(1)


def test_a_start_that_is_tried_again_is_made_once_the_one_before_is_ended(world: World) -> None:
    begun = start_came_to_nothing(world)
    incidents.retry_run(PERSON, run_of("replica-lost").pk, "its agent answers again")
    drain()
    before = len(commands("start_rank"))
    answer("stop_process", stopped=True)
    mend(world, 1)

    assert before == 1
    assert commands("stop_process") == 2 * [wire.StopProcess(placement=begun.pk, grace_s=0)]
    assert run_of("replica-lost").state == RunState.SUCCEEDED
    assert world.placement_of(1).pk != begun.pk


def test_a_start_that_nobody_says_is_ended_is_not_made_again(world: World) -> None:
    start_came_to_nothing(world)
    incidents.retry_run(PERSON, run_of("replica-lost").pk, "once more")
    drain()
    answer("stop_process", "failed")
    drain()

    assert run_of("replica-lost").state == RunState.NEEDS_OPERATOR
    assert len(commands("start_rank")) == 1


def test_what_was_started_after_all_trains_on_when_its_start_is_tried_again(world: World) -> None:
    begun = start_came_to_nothing(world)
    world.join(begun)
    incidents.retry_run(PERSON, run_of("replica-lost").pk, "it is there")
    drain()

    assert run_of("replica-lost").state == RunState.SUCCEEDED
    assert world.placement_of(1) == begun


def test_a_node_that_falls_silent_after_a_start_came_to_nothing_is_taken_out(world: World) -> None:
    begun = start_came_to_nothing(world)
    world.silence(begun.node)
    drain()

    assert world.bmcs[begun.node_id].orders[0] == "ForceOff"
    assert world.placement_of(1).node == world.spares[0]


@pytest.mark.parametrize(
    ("name", "step"), [("replica-lost", "start-replica"), ("move-job", "start")]
)
def test_a_start_is_given_the_time_of_all_its_orders(name: str, step: str) -> None:
    started, ended = START_ORDER_S + RESULT_GRACE_S, 60 + RESULT_GRACE_S
    definition = PLAYBOOKS[name].step(step)
    assert definition is not None
    assert definition.timeout_s > started + 2 * ended


def test_a_node_that_was_only_silent_and_beats_again_is_left_alone(
    world: World, settings: Settings
) -> None:
    spare = world.spares[0]
    settings.BUDGET_NODES_PER_CLUSTER = 0
    world.silence(spare)
    drain()
    assert "out for repair" in step_of("repair-node", "quarantine").outcome
    world.hear(spare)
    settings.BUDGET_NODES_PER_CLUSTER = 2
    drain()
    assert not world.bmcs[spare.pk].orders
    assert run_of("repair-node").state == RunState.SUCCEEDED
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_nobody_is_asked_to_sign_for_a_node_that_beats_again(world: World) -> None:
    incidents.publish_playbooks([playbook.as_row() for playbook in PLAYBOOKS.values()])
    incidents.set_mode(PERSON, world.cluster.pk, "repair-node", Mode.APPROVE, "we look first")
    world.silence(world.spares[0])
    drain()
    approval = Approval.objects.get(state=ApprovalState.WAITING)
    world.hear(world.spares[0])
    drain()

    approval.refresh_from_db()
    assert run_of("repair-node").state == RunState.SUCCEEDED
    assert approval.state == ApprovalState.VOID
    with pytest.raises(Conflict, match="its run: succeeded"):
        incidents.approve(PERSON, approval.pk, approval.digest, "go")


def test_a_node_that_was_silent_while_it_started_a_rank_and_beats_again_is_left_alone(
    world: World, settings: Settings
) -> None:
    starting = world.placements[1]
    Placement.objects.filter(pk=starting.pk).update(state=PlacementState.STARTING, joined_at=None)
    settings.BUDGET_NODES_PER_CLUSTER = 0
    world.silence(starting.node)
    world.survivors_commit(starting)
    drain()
    assert "out for repair" in step_of("repair-node", "quarantine").outcome
    world.hear(starting.node)
    settings.BUDGET_NODES_PER_CLUSTER = 2
    drain()
    assert not world.bmcs[starting.node_id].orders
    assert run_of("repair-node").state == RunState.SUCCEEDED
    assert run_of("replica-lost").state == RunState.SUCCEEDED
    assert world.placement_of(1) == starting


def test_what_a_node_that_was_only_silent_did_not_start_it_is_told_to_start_again(
    world: World, settings: Settings
) -> None:
    world.kill(world.placements[1])
    drain()
    late, node = world.placement_of(1), world.placements[1].node
    settings.BUDGET_NODES_PER_CLUSTER = 0
    world.silence(node)
    unanswered()
    world.hear(node)
    settings.BUDGET_NODES_PER_CLUSTER = 2
    drain()
    assert commands("stop_process") == [wire.StopProcess(placement=late.pk, grace_s=0)]
    answer("stop_process", stopped=True)
    mend(world, 1)
    assert not world.bmcs[node.pk].orders
    assert run_of("replica-lost").state == RunState.SUCCEEDED
    assert world.placement_of(1).node == node


def test_a_node_that_is_about_to_be_repaired_takes_no_replica(
    world: World, settings: Settings
) -> None:
    settings.BUDGET_NODES_PER_CLUSTER = 0
    world.silence(world.spares[0])
    drain()
    world.hear(world.spares[0])
    assert [node.node_id for node in free_nodes(world.cluster.pk)] == [world.spares[1].pk]


def test_a_power_cycle_whose_worker_died_is_not_done_twice(world: World) -> None:
    lost = world.placements[1]
    world.silence(lost.node)
    world.peers_lose(lost)
    drain(1)
    step = step_of("repair-node", "repair")
    # As if the worker had switched it on and died before it wrote so.
    world.bmcs[lost.node_id].on = True
    world.bmcs[lost.node_id].boots = 2
    PlaybookStep.objects.filter(pk=step.pk).update(state=StepState.READY, wake_at=timezone.now())
    run = step.run
    run.context = {**run.context, "boot_before": "boot-1", "was_off": True}
    run.save()
    before = list(world.bmcs[lost.node_id].orders)
    drain()
    assert [o for o in world.bmcs[lost.node_id].orders if o != "ForceOff"] in ([], ["On"])
    assert world.bmcs[lost.node_id].orders[: len(before)] == before


def test_every_switch_of_power_stands_in_the_audit_trail_before_it_is_done(world: World) -> None:
    lost = world.placements[1]
    world.silence(lost.node)
    world.peers_lose(lost)
    drain()
    audited = AuditEvent.objects.filter(verb="node.power", object_id=lost.node_id)
    orders = [event.after["order"] for event in audited.order_by("id")]
    assert orders == world.bmcs[lost.node_id].orders


def test_a_node_without_cards_is_not_repaired_for_ever(world: World) -> None:
    node = world.spares[0]
    for attempt in range(2):
        fleet.record_repair(node.pk, Rung.POWER_CYCLE, f"stp_{attempt}")
    assert RepairRecord.objects.filter(node=node, gpu=None).count() == 2
    assert guards.attempts_at(node, Rung.POWER_CYCLE) == 2


def test_no_replica_is_brought_back_where_that_is_switched_off(world: World) -> None:
    incidents.publish_playbooks([playbook.as_row() for playbook in PLAYBOOKS.values()])
    incidents.set_mode(PERSON, world.cluster.pk, "replica-lost", Mode.OFF, "we do it by hand")
    world.kill(world.placements[1])
    world.peers_lose(world.placements[1])
    drain()
    assert run_of("replica-lost").state == RunState.NEEDS_OPERATOR
    assert not Command.objects.exists()


def test_a_node_that_has_enrolled_is_tested_by_itself_and_takes_work(world: World) -> None:
    node = world.spares[0]
    Node.objects.filter(pk=node.pk).update(state=NodeState.ENROLLED)
    assert incidents.admit_enrolled() == 1
    drain()
    answer("diagnose", tests=[{"name": "cards", "outcome": "passed"}])
    drain()
    node.refresh_from_db()
    assert node.state == NodeState.AVAILABLE
    assert incidents.admit_enrolled() == 0


def test_a_test_on_entry_that_a_person_called_off_is_not_begun_again(world: World) -> None:
    Node.objects.filter(pk=world.spares[0].pk).update(state=NodeState.ENROLLED)
    incidents.admit_enrolled()
    incidents.cancel_run(PERSON, run_of("admit-node").pk, "not cabled yet")
    assert incidents.admit_enrolled() == 0


@pytest.mark.parametrize("kept", ["held", "silent"])
def test_a_node_that_is_held_or_not_heard_is_not_tested_on_entry(world: World, kept: str) -> None:
    node = world.spares[0]
    reason = {"held": "not cabled yet", "silent": ""}[kept]
    Node.objects.filter(pk=node.pk).update(state=NodeState.ENROLLED, hold_reason=reason)
    Lease.objects.filter(node=node).update(reachable=kept != "silent")
    assert incidents.admit_enrolled() == 0


def test_a_person_can_have_a_refused_diagnostic_run_again(world: World) -> None:
    Node.objects.filter(pk=world.spares[0].pk).update(state=NodeState.ENROLLED)
    run = incidents.admit_node(SYSTEM, world.spares[0].pk)
    drain()
    answer("diagnose", state="failed")
    drain()
    incidents.retry_run(PERSON, run.pk, "cable was loose")
    drain()
    answer("diagnose", tests=[{"name": "cards", "outcome": "passed"}])
    drain()
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED


def test_cancelling_a_start_leaves_no_node_allocated(world: World) -> None:
    lost = world.placements[1]
    world.silence(lost.node)
    world.peers_lose(lost)
    drain()
    incidents.cancel_run(PERSON, run_of("replica-lost").pk, "by hand")
    world.spares[0].refresh_from_db()
    assert world.spares[0].state == NodeState.AVAILABLE
    assert Command.objects.get(verb="start_rank").state == CommandState.EXPIRED


def test_cancelling_ends_a_process_that_has_not_come_to_life(world: World) -> None:
    """Its node has started it, and it imports what it needs."""
    world.kill(world.placements[1])
    drain()
    answer("start_rank", pid=2)
    drain()
    back = world.placement_of(1)

    incidents.cancel_run(PERSON, run_of("replica-lost").pk, "by hand")

    assert commands("stop_process") == [wire.StopProcess(placement=back.pk, grace_s=0)]
    assert Command.objects.get(verb="stop_process").node == back.node


def test_cancelling_leaves_no_coordinator_that_its_job_does_not_know(world: World) -> None:
    """Its node has taken the order, and will start it."""
    coordinator_goes(world, world.spares[1])
    (start,) = commands("start_coordinator")
    assert isinstance(start, wire.StartCoordinator)

    incidents.cancel_run(PERSON, run_of("restore-coordinator").pk, "by hand")

    assert commands("stop_process") == [wire.StopProcess(placement=start.placement)]
    assert Command.objects.get(verb="stop_process").node == world.spares[1]


def test_a_rank_that_died_of_an_exception_is_mended(world: World) -> None:
    lost = world.placements[1]
    batch = client.Batch(
        job=world.job.pk, replica=1, rank=0, placement=lost.pk, sent_at=time.time(), messages=[]
    )
    stopped = client.Stopped(step=3, reason="exception", at=1.0, clean=False)
    jobs.record_runtime_batch(world.job.pk, batch, [stopped])
    world.kill(lost)
    mend(world, 1)
    assert Incident.objects.get().state == IncidentState.RESOLVED


def coordinator_runs(world: World, node: Node) -> None:
    Job.objects.filter(pk=world.job.pk).update(
        coordinator_node=node, coordinator_placement="plc_coordinator"
    )


def coordinator_exits(world: World, node: Node, **how: object) -> None:
    """Its node's agent says so."""
    record_signal(
        new_id("sig"),
        SignalKind.PROCESS_EXITED,
        source="agent",
        observed_at=timezone.now(),
        node=node,
        job_id=world.job.pk,
        placement_id="plc_coordinator",
        data={"kind": "coordinator", **how},
    )


def coordinator_goes(world: World, node: Node) -> None:
    """With this node, which comes back, and is told to start it anew."""
    coordinator_runs(world, node)
    world.silence(node)
    drain()
    coordinator_exits(world, node, reason="reboot")
    world.boot(node)
    drain()
    answer("diagnose", tests=[{"name": "cards", "outcome": "passed"}])
    drain()
    PlaybookStep.objects.filter(key="soak").update(
        started_at=timezone.now() - timedelta(hours=1), timeout_s=1e6
    )
    drain()


def test_a_coordinator_that_went_with_its_node_is_started_where_it_was(world: World) -> None:
    node = world.spares[1]
    coordinator_goes(world, node)
    order = Command.objects.get(verb="start_coordinator")
    assert (order.node, '"port":4000' in order.payload) == (node, True)
    answer("start_coordinator", address="127.0.0.1:4000", pid=5)
    drain()
    assert not Incident.objects.exclude(state=IncidentState.RESOLVED).exists()


def test_a_coordinator_that_its_agent_had_started_again_is_not_started_once_more(
    world: World, settings: Settings
) -> None:
    """It was killed long before its node fell silent, which says nothing of it now."""
    settings.BUDGET_NODES_PER_CLUSTER = 0
    node = world.spares[1]
    coordinator_runs(world, node)
    coordinator_exits(world, node, signal=9)
    world.silence(node)
    drain()
    world.hear(node)
    drain()

    assert run_of("restore-coordinator").state == RunState.SUCCEEDED
    assert run_of("restore-coordinator").state_reason.endswith("the coordinator never went")
    assert commands("start_coordinator") == []


def test_a_job_of_one_replica_that_no_other_covers_is_started_anew_as_a_whole(
    world: World,
) -> None:
    world.placements[1].replica.delete()
    Job.objects.filter(pk=world.job.pk).update(world_replicas=1)
    lost = world.placements[0]
    world.exits(lost, exit_code=1)  # torchrun, one of whose ranks was killed
    drain()
    takeover = step_of("replica-lost", "confirm-takeover")
    assert (takeover.state, takeover.outcome[:28]) == (
        StepState.SKIPPED,
        "the job has no other replica",
    )

    answer("start_rank", pid=2)
    back = world.placement_of(0)
    now = timezone.now().timestamp()
    batch = client.Batch(
        job=world.job.pk, replica=0, rank=0, placement=back.pk, sent_at=now, messages=[]
    )
    step = client.Progress(
        step=24,
        steps=1,
        epoch=2,
        at=now + 1,
        loss=0.5,
        grad_norm=0.0,
        step_s=0.1,
        max_gap_s=0.1,
        samples=8,
        tokens=0,
        replicas=[0],
    )
    jobs.record_runtime_batch(world.job.pk, batch, [client.Hello(pid=2, at=now), step])
    drain()

    assert (back.node, back.pk != lost.pk) == (lost.node, True)
    assert Incident.objects.get().state == IncidentState.RESOLVED
    assert world.job.replicas.get().state == ReplicaState.ACTIVE
