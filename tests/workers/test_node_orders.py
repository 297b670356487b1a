"""What people order for a node: the dry run shows it, the run does it, once, with their name."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor, AuditEvent
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.models import Failure, Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.candidates import free_nodes
from controlplane.incidents.choices import IncidentState, RunState, StepState
from controlplane.incidents.models import Incident, PlaybookRun, PlaybookStep, Reservation
from controlplane.incidents.plans import NODE_ORDERS, ORDER_STATES, plan_of_order
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Job, Placement
from node_agent import wire
from tests.factories import ApprovalFactory, PlaybookRunFactory, UserFactory
from tests.workers.moving import commands, no_spare
from tests.workers.world import HEALTHY, XID_79, World, answer, drain, run_of, saves_checkpoint
from workers import engine, intake
from workers.playbooks import PLAYBOOKS
from workers.playbooks.base import StepContext
from workers.playbooks.node_steps import quarantine

pytestmark = pytest.mark.django_db
PERSON = Actor(ActorKind.USER, "1")
XID_54 = "NVRM: Xid (PCI:0000:1b:00): 54, Auxiliary power is not connected"  # for a person


@pytest.fixture(autouse=True)
def catalogue() -> None:
    incidents.publish_playbooks([playbook.as_row() for playbook in PLAYBOOKS.values()])


def order(node: Node, verb: str) -> PlaybookRun:
    run = incidents.order_node(PERSON, node.pk, verb, "because")
    drain()
    return run


def state_of(node: Node) -> str:
    node.refresh_from_db()
    return node.state


def test_every_order_has_a_playbook() -> None:
    assert set(NODE_ORDERS.values()) <= set(PLAYBOOKS)


@pytest.mark.parametrize("verb", NODE_ORDERS)
def test_a_dry_run_shows_the_steps_and_changes_nothing(world: World, verb: str) -> None:
    node = world.placements[1].node
    audited = AuditEvent.objects.count()
    plan = plan_of_order(node, verb)
    assert plan.steps
    assert [job["name"] for job in plan.jobs] == [world.job.name]
    assert node.name in " ".join(line for step in plan.steps for line in step["does"]) or not any(
        step["disruptive"] for step in plan.steps
    )
    assert AuditEvent.objects.count() == audited
    assert not PlaybookRun.objects.exists()


def test_the_dry_run_shows_what_the_guards_say(world: World) -> None:
    node = world.spares[0]
    fleet.set_hold(PERSON, node.pk, "mine")
    node.refresh_from_db()
    assert plan_of_order(node, "reboot").objections == [f"{node.name} is on hold: mine"]


def test_a_drain_moves_the_replica_and_keeps_the_node_out_under_the_persons_name(
    world: World,
) -> None:
    lost = world.placements[1]
    order(lost.node, "drain")
    world.kill(lost, requested=True)
    world.peers_lose(lost)
    answer("stop_process", stopped=True)
    drain()
    answer("start_rank", pid=2)
    world.join(world.placement_of(1))
    drain()
    assert state_of(lost.node) == NodeState.QUARANTINED
    assert lost.node.drained_by == "user/1"
    assert world.placement_of(1).node == world.spares[0]
    assert not world.bmcs[lost.node_id].orders
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_a_returned_node_is_validated_first_and_given_back(world: World) -> None:
    node = world.spares[0]
    order(node, "drain")
    run = order(node, "return")
    assert state_of(node) == NodeState.VALIDATING
    answer("diagnose", **HEALTHY)
    drain()
    run.refresh_from_db()
    assert (state_of(node), node.drained_by, run.state) == (
        NodeState.AVAILABLE,
        "",
        RunState.SUCCEEDED,
    )


def test_a_node_that_fails_its_validation_does_not_return(world: World) -> None:
    node = world.spares[0]
    order(node, "quarantine")
    order(node, "return")
    answer("diagnose", tests=[{"name": "cards", "outcome": "failed"}])
    drain()
    assert state_of(node) == NodeState.VALIDATION_FAILED
    assert run_of("return-node").state == RunState.NEEDS_OPERATOR


def test_a_node_whose_validation_ran_out_before_its_return_is_tested_again(world: World) -> None:
    node = world.spares[0]
    order(node, "quarantine")
    order(node, "return")
    answer("diagnose", **HEALTHY)
    Node.objects.filter(pk=node.pk).update(state="validation_failed", state_deadline=None)
    drain()
    tested = len(commands("diagnose"))
    answer("diagnose", **HEALTHY)
    drain()

    assert (tested, state_of(node)) == (2, NodeState.AVAILABLE)
    assert run_of("return-node").state == RunState.SUCCEEDED


def test_a_reset_empties_resets_validates_and_returns(world: World) -> None:
    node = world.spares[0]
    order(node, "reset")
    answer("reset_gpus", reset=[])
    drain()
    answer("diagnose", **HEALTHY)
    drain()
    assert state_of(node) == NodeState.AVAILABLE


def test_a_reboot_is_proven_by_the_boot_id(world: World) -> None:
    node = world.spares[0]
    order(node, "reboot")
    assert world.bmcs[node.pk].orders == ["ForceRestart"]
    assert state_of(node) == NodeState.REPAIRING
    world.boot(node)
    drain()
    answer("diagnose", **HEALTHY)
    drain()
    assert state_of(node) == NodeState.AVAILABLE


def test_a_node_that_another_person_drained_is_quarantined_again_once_it_has_passed(
    world: World,
) -> None:
    node = world.spares[0]
    UserFactory(pk=7, username="anna")
    Node.objects.filter(pk=node.pk).update(state="quarantined", drained_by="user/7")
    order(node, "reboot")
    world.boot(node)
    drain()
    answer("diagnose", **HEALTHY)
    drain()

    assert (state_of(node), node.state_deadline) == (NodeState.QUARANTINED, None)
    assert node.drained_by == "user/7"
    run = run_of("reboot-node")
    assert run.state == RunState.SUCCEEDED
    assert run.state_reason == f"done; {node.name} stays out, for anna drained it"


def test_a_diagnosis_leaves_the_node_at_work(world: World) -> None:
    node = world.placements[0].node
    order(node, "diagnose")
    answer("diagnose", tests=[{"name": "cards", "outcome": "failed"}])
    drain()
    assert state_of(node) == NodeState.ALLOCATED
    assert run_of("diagnose-node").state == RunState.SUCCEEDED
    assert run_of("diagnose-node").state_reason.startswith("not healthy")


def test_a_diagnosis_that_asks_keeps_its_node_from_no_work(world: World) -> None:
    node = world.spares[0]
    order(node, "diagnose")
    answer("diagnose", state="failed")
    drain()

    assert run_of("diagnose-node").state == RunState.NEEDS_OPERATOR
    assert node.pk in [one.node_id for one in free_nodes(world.cluster.pk)]


def test_one_order_at_a_time(world: World) -> None:
    order(world.spares[0], "diagnose")
    with pytest.raises(Conflict, match="under way"):
        incidents.order_node(PERSON, world.spares[0].pk, "reboot", "because")


@pytest.mark.parametrize(("verb", "reason"), [("explode", "because"), ("reboot", " ")])
def test_an_unknown_verb_or_no_reason_is_refused(world: World, verb: str, reason: str) -> None:
    with pytest.raises(Conflict):
        incidents.order_node(PERSON, world.spares[0].pk, verb, reason)
    assert not PlaybookRun.objects.exists()


@pytest.mark.parametrize("verb", ["return", "drain", "reboot"])
def test_an_order_that_its_state_does_not_allow_is_refused_at_once(world: World, verb: str) -> None:
    state = NodeState.AVAILABLE if verb == "return" else NodeState.RETIRED
    Node.objects.filter(pk=world.spares[0].pk).update(state=state)
    with pytest.raises(Conflict, match="cannot"):
        incidents.order_node(PERSON, world.spares[0].pk, verb, "because")


#: Where each order has brought its node once the workers have done what they can.
LEADS_TO = {
    "drain": NodeState.QUARANTINED,
    "quarantine": NodeState.QUARANTINED,
    "reset": NodeState.REPAIRING,
    "reboot": NodeState.REPAIRING,
    "return": NodeState.VALIDATING,
    "retire": NodeState.RETIRED,
}


@pytest.mark.parametrize(
    ("verb", "state"), [(verb, state) for verb in LEADS_TO for state in sorted(ORDER_STATES[verb])]
)
def test_an_order_that_a_state_allows_leads_where_it_says(
    world: World, verb: str, state: NodeState
) -> None:
    node = world.spares[0]
    Node.objects.filter(pk=node.pk).update(state=state)
    order(node, verb)
    assert state_of(node) == LEADS_TO[verb]


def test_a_node_that_is_to_be_repaired_is_not_retired_meanwhile(world: World) -> None:
    node = world.spares[0]
    incidents.repair_node(SYSTEM, node.pk, None, "it is slow")
    Node.objects.filter(pk=node.pk).update(state=NodeState.REPAIR_FAILED)
    PlaybookRun.objects.update(state=RunState.NEEDS_OPERATOR)
    run = order(node, "retire")
    run.refresh_from_db()
    assert (state_of(node), run.state) == (NodeState.REPAIR_FAILED, RunState.FAILED)
    assert "cancel it" in run.state_reason


def test_a_node_that_is_to_be_repaired_is_returned_once_that_is_called_off(world: World) -> None:
    node = world.spares[0]
    repair = incidents.repair_node(SYSTEM, node.pk, None, "it is slow")
    Node.objects.filter(pk=node.pk).update(state=NodeState.REPAIR_FAILED)
    PlaybookRun.objects.update(state=RunState.NEEDS_OPERATOR)
    with pytest.raises(Conflict, match="cancel it, then return spare-0"):
        incidents.order_node(PERSON, node.pk, "return", "it is well")
    incidents.call_off(PERSON, repair.pk, "it is well")
    order(node, "return")

    assert state_of(node) == NodeState.VALIDATING


def test_a_node_that_is_back_in_service_is_not_restarted_by_a_repair_that_is_tried_again(
    world: World,
) -> None:
    node = world.spares[0]
    bmc = world.bmcs[node.pk]
    bmc.broken = True
    repair = incidents.repair_node(SYSTEM, node.pk, None, "it is slow")
    drain()
    refused = list(bmc.orders)
    PlaybookStep.objects.filter(key="repair").update(state=StepState.NEEDS_OPERATOR)
    PlaybookRun.objects.update(state=RunState.NEEDS_OPERATOR)
    Node.objects.filter(pk=node.pk).update(state=NodeState.AVAILABLE, state_deadline=None)
    bmc.broken = False
    incidents.retry_run(PERSON, repair.pk, "its BMC answers")
    drain()

    assert set(refused) == {"ForceOff"}
    assert bmc.orders == refused
    assert state_of(node) == NodeState.AVAILABLE


def test_what_a_person_ordered_carries_their_name(world: World) -> None:
    order(world.spares[0], "quarantine")
    event = AuditEvent.objects.filter(verb="node.transition").latest("id")
    assert (event.actor_kind, event.actor_id, event.reason) == (ActorKind.USER, "1", "because")
    assert not Command.objects.exists()


# --- what is started there while it is being emptied ----------------------------------------------


def test_what_is_started_after_the_order_to_kill_is_killed_too(world: World) -> None:
    """What was killed is brought back in place before the node says that it did so."""
    killed = world.placements[1]
    incidents.order_node(PERSON, killed.node_id, "quarantine", "because")
    engine.drain("", owner="test")
    world.kill(killed, requested=True)
    world.peers_lose(killed)
    only_advances("replica-lost")
    back = world.placement_of(1)
    answer("start_rank", pid=2)
    answer("stop_process", stopped=True)
    drain()

    asked = (state_of(killed.node), commands("stop_process")[1:])
    back.refresh_from_db()
    alive = back.state
    answer("stop_process", stopped=True)
    drain()
    back.refresh_from_db()

    assert back.node == killed.node
    assert asked == (NodeState.ALLOCATED, [wire.StopProcess(placement=back.pk, grace_s=0)])
    assert alive == PlacementState.STARTING
    assert state_of(killed.node) == NodeState.QUARANTINED
    assert back.state == PlacementState.ENDED
    assert not world.bmcs[killed.node_id].orders


def test_a_node_that_is_given_work_in_that_very_moment_is_not_taken_out_yet(world: World) -> None:
    node = world.spares[0]
    run = incidents.order_node(PERSON, node.pk, "quarantine", "because")
    engine.create_steps()
    outcome = quarantine(StepContext(run.steps.get(key="quarantine")))
    Placement.objects.filter(pk=world.placements[1].pk).update(node=node)

    assert outcome.apply is not None
    with pytest.raises(Conflict, match="was given work meanwhile"):
        outcome.apply()


# --- a drain that is called off -------------------------------------------------------------------


@pytest.mark.parametrize("state", ["draining", "drain_failed"])
def test_a_node_whose_drain_is_called_off_goes_on_with_its_work(world: World, state: str) -> None:
    node = world.placements[1].node
    run = incidents.order_node(PERSON, node.pk, "drain", "new cables")
    engine.create_steps()
    engine.take_step("test")
    before = (state_of(node), node.drained_by)
    deadline = {"draining": node.state_deadline, "drain_failed": None}[state]
    Node.objects.filter(pk=node.pk).update(state=state, state_deadline=deadline)
    incidents.call_off(PERSON, run.pk, "the cables did not come")
    drain()

    assert before == (NodeState.DRAINING, "user/1")
    assert (state_of(node), node.drained_by) == (NodeState.ALLOCATED, "")
    assert world.placement_of(1) == world.placements[1]
    assert AuditEvent.objects.filter(verb="node.undrain", reason__contains="did not come").exists()


@pytest.mark.parametrize("before", ["available", "suspect"])
def test_an_idle_node_whose_drain_is_called_off_is_what_it_was(world: World, before: str) -> None:
    node = world.spares[0]
    Node.objects.filter(pk=node.pk).update(state=before, drained_by="slurm")
    run = incidents.order_node(PERSON, node.pk, "drain", "new cables")
    engine.create_steps()
    engine.take_step("test")
    incidents.call_off(PERSON, run.pk, "the cables did not come")

    assert (state_of(node), node.drained_by) == (before, "slurm")


@pytest.mark.parametrize("failed", ["user/1", "user/2"])
def test_a_second_drain_of_one_that_failed_leaves_no_name_once_called_off(
    world: World, failed: str
) -> None:
    """What the first one wrote is no drain of its own any more."""
    node = world.spares[0]
    Node.objects.filter(pk=node.pk).update(state="drain_failed", drained_by=failed)
    run = incidents.order_node(PERSON, node.pk, "drain", "new cables")
    engine.create_steps()
    engine.take_step("test")
    incidents.call_off(PERSON, run.pk, "the cables did not come")

    assert (state_of(node), node.drained_by) == (NodeState.AVAILABLE, "")


def test_a_drain_of_ones_own_is_not_found_again_once_called_off(world: World) -> None:
    node = world.spares[0]
    Node.objects.filter(pk=node.pk).update(drained_by="user/1")
    run = incidents.order_node(PERSON, node.pk, "drain", "new cables")
    engine.create_steps()
    engine.take_step("test")
    incidents.call_off(PERSON, run.pk, "the cables did not come")

    assert (state_of(node), node.drained_by) == (NodeState.AVAILABLE, "")


def begun_to_drain(node: Node) -> PlaybookRun:
    run = incidents.order_node(PERSON, node.pk, "drain", "new cables")
    engine.create_steps()
    engine.take_step("test")
    assert state_of(node) == NodeState.DRAINING
    return run


@pytest.mark.parametrize(
    ("reading", "action"), [("remap_pending", "reset_gpu"), ("remap_failed", "contact_vendor")]
)
def test_what_a_card_showed_while_its_node_drained_is_acted_on_once_that_is_called_off(
    world: World, reading: str, action: str
) -> None:
    """It trains on, and the keeper tells of it once."""
    node = world.placements[1].node
    run = begun_to_drain(node)
    world.shows(node, reading)
    intake.triage_signals()
    before = (Failure.objects.count(), Incident.objects.count())
    incidents.call_off(PERSON, run.pk, "the cables did not come")
    drain()

    assert before == (1, 0)
    assert Failure.objects.get().incidents.get().unresolved
    repair = run_of("repair-node")
    assert (repair.node, repair.context["action"]) == (node, action)


def test_what_a_card_showed_in_a_drain_that_failed_is_acted_on_once_the_next_is_called_off(
    world: World,
) -> None:
    node = world.placements[1].node
    first = begun_to_drain(node)
    world.shows(node, "remap_failed")
    intake.triage_signals()
    PlaybookRun.objects.filter(pk=first.pk).update(state=RunState.CANCELLED)
    fleet.transition(PERSON, node.pk, NodeState.DRAIN_FAILED, reason="it took too long")
    second = begun_to_drain(node)
    incidents.call_off(PERSON, second.pk, "the cables did not come")
    drain()

    assert Failure.objects.get().incidents.get().unresolved


def test_a_line_that_went_on_while_its_node_drained_is_acted_on_once_that_is_called_off(
    world: World,
) -> None:
    node = world.spares[0]
    run = begun_to_drain(node)
    world.kernel_says(node, XID_54)
    world.kernel_repeats(XID_54, 9)
    intake.triage_signals()
    incidents.call_off(PERSON, run.pk, "the cables did not come")
    drain()

    failure = Failure.objects.get()
    assert (failure.count, failure.incidents.get().subject) == (9, f"node/{node.pk}")


def test_what_was_acted_on_before_its_node_drained_is_not_acted_on_again(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_54)
    drain()
    run = begun_to_drain(node)
    incidents.call_off(PERSON, run.pk, "the cables did not come")

    assert not Signal.objects.filter(triaged_at=None).exists()


def test_a_graver_word_that_came_while_its_node_drained_is_acted_on_once_that_is_called_off(
    world: World,
) -> None:
    """It waits for the node to be idle before, and cannot after."""
    node = world.placements[1].node
    world.shows(node, "remap_pending")
    drain()
    run = begun_to_drain(node)
    world.kernel_says(node, XID_79)
    intake.triage_signals()
    before = run_of("repair-node").context["action"]
    incidents.call_off(PERSON, run.pk, "the cables did not come")
    drain()

    failure, after = Failure.objects.get(), run_of("repair-node").context["action"]
    assert (before, after, failure.code) == ("reset_gpu", "reboot", "xid-79")


def to_be_emptied(node: Node) -> PlaybookRun:
    """A drain whose next step is to empty its node."""
    run = incidents.order_node(PERSON, node.pk, "drain", "new cables")
    engine.create_steps()
    engine.take_step("test")
    engine.take_step("test")
    assert run.steps.get(key="quarantine").state == StepState.READY
    return run


def test_a_node_that_the_guards_kept_from_being_emptied_is_what_it_was(world: World) -> None:
    node = world.spares[0]
    other = PlaybookRunFactory(incident__cluster=world.cluster, node=node)
    Reservation.objects.create(cluster=world.cluster, node=node, run=other)
    run = to_be_emptied(node)
    engine.take_step("test")
    refused = run.steps.get(key="quarantine")
    incidents.call_off(PERSON, run.pk, "the cables did not come")

    assert refused.started_at is not None
    assert "another run" in refused.outcome
    assert (state_of(node), node.drained_by) == (NodeState.AVAILABLE, "")


def test_a_node_whose_emptying_was_put_off_is_what_it_was(world: World) -> None:
    node = world.spares[0]
    run = to_be_emptied(node)
    incidents.pause_run(PERSON, run.pk, "wait a moment")
    incidents.resume_run(PERSON, run.pk, "go on")
    resumed = run.steps.get(key="quarantine")
    incidents.call_off(PERSON, run.pk, "the cables did not come")

    assert resumed.started_at is not None
    assert (state_of(node), node.drained_by) == (NodeState.AVAILABLE, "")


def test_a_node_whose_power_may_be_cut_in_this_moment_stays_out(world: World) -> None:
    run = to_be_emptied(world.spares[0])
    assert engine.claim("test") is not None
    incidents.call_off(PERSON, run.pk, "too late")

    assert state_of(world.spares[0]) == NodeState.DRAINING


def test_a_node_whose_replica_has_moved_away_is_free_once_its_process_has_ended(
    world: World,
) -> None:
    moved = world.placements[1]
    run = incidents.order_node(PERSON, moved.node_id, "drain", "new cables")
    engine.create_steps()
    engine.take_step("test")
    jobs.end_placement(SYSTEM, moved.pk, "moved to spare-0", free_node=False)
    incidents.call_off(PERSON, run.pk, "the cables did not come")
    leaving = state_of(moved.node)
    world.exits(moved, exit_code=0, requested=True)
    drain()

    assert leaving == NodeState.ALLOCATED
    assert state_of(moved.node) == NodeState.AVAILABLE


def test_a_node_that_is_being_emptied_stays_out_when_its_drain_is_called_off(
    world: World, only_one: Placement
) -> None:
    no_spare(world)  # it cannot move away
    run = kill_ordered(only_one, "drain")
    incidents.call_off(PERSON, run.pk, "too late")

    assert state_of(only_one.node) == NodeState.DRAINING


# --- called off when what runs there has been killed ----------------------------------------------


def kill_ordered(placement: Placement, verb: str = "quarantine") -> PlaybookRun:
    """A run that has told its node to kill what it holds."""
    run = incidents.order_node(PERSON, placement.node_id, verb, "because")
    drain()
    assert commands("stop_process") == [wire.StopProcess(placement=placement.pk, grace_s=0)]
    return run


@pytest.fixture
def only_one(world: World) -> Placement:
    """The process of a job with one replica: no peer would miss it."""
    world.placements[1].replica.delete()
    Job.objects.filter(pk=world.job.pk).update(world_replicas=1)
    return Placement.objects.get(pk=world.placements[0].pk)


@pytest.mark.parametrize("verb", ["quarantine", "reboot", "reset"])
def test_what_a_run_killed_that_is_called_off_is_brought_back(
    world: World, only_one: Placement, verb: str
) -> None:
    run = kill_ordered(only_one, verb)
    world.exits(only_one, signal=9, requested=True)
    drain()
    before = Incident.objects.exists()

    incidents.call_off(PERSON, run.pk, "another time")
    drain()

    assert not before
    assert Incident.objects.get().replica == 0
    assert run_of("replica-lost").context["lost_placement"] == only_one.pk
    assert world.placement_of(0).state == PlacementState.STARTING


def test_what_a_repair_killed_before_the_fault_and_that_is_called_off_is_brought_back(
    world: World, only_one: Placement
) -> None:
    """The incident of the replica that was to be saved first is open, with nothing in it that
    would bring the replica back."""
    world.errors_accelerate(only_one.node)
    drain()
    saves_checkpoint(world, tier="shared")
    drain()
    repair = run_of("repair-node")
    told = commands("stop_process")
    incidents.pause_run(PERSON, repair.pk, "wait")
    world.exits(only_one, signal=9, requested=True)
    drain()
    before = PlaybookRun.objects.filter(playbook="replica-lost").exists()

    incidents.call_off(PERSON, repair.pk, "another time")
    drain()

    assert told == [wire.StopProcess(placement=only_one.pk, grace_s=0)]
    assert not before
    assert Incident.objects.get().unresolved
    assert run_of("replica-lost").context["lost_placement"] == only_one.pk
    assert world.placement_of(0).state == PlacementState.STARTING


def test_what_a_run_killed_whose_next_plan_is_rejected_is_brought_back(
    world: World, only_one: Placement
) -> None:
    run = kill_ordered(only_one)
    world.exits(only_one, signal=9, requested=True)
    drain()
    asked = ApprovalFactory(run=run, cluster=world.cluster)

    incidents.reject(PERSON, asked.pk, "not like this")

    assert run_of("replica-lost").context["lost_placement"] == only_one.pk


def test_what_is_seen_to_be_killed_after_its_run_was_called_off_is_brought_back(
    world: World, only_one: Placement
) -> None:
    run = kill_ordered(only_one)
    fleet.take_commands([only_one.node_id])
    incidents.call_off(PERSON, run.pk, "another time")
    drain()
    before = Incident.objects.exists()

    world.exits(only_one, signal=9, requested=True)
    drain()

    assert not before
    assert Incident.objects.get().replica == 0
    assert world.placement_of(0).state == PlacementState.STARTING


def test_what_nobody_killed_before_its_run_was_called_off_trains_on(
    world: World, only_one: Placement
) -> None:
    run = kill_ordered(only_one)

    incidents.call_off(PERSON, run.pk, "another time")
    drain()

    assert not Incident.objects.exists()
    assert world.placement_of(0).state == PlacementState.RUNNING


@pytest.mark.parametrize("order_of_ends", [(0, 1), (1, 0)])
def test_what_a_person_keeps_from_being_brought_back_is_not(
    world: World, order_of_ends: tuple[int, int]
) -> None:
    """Its incident is open: who called off the run that was to bring it back knows of it."""
    killed = world.placements[1]
    run = kill_ordered(killed)
    ends = [
        lambda: world.exits(killed, signal=9, requested=True),
        lambda: incidents.call_off(PERSON, run.pk, "another time"),
    ]
    world.peers_lose(killed)
    only_advances("replica-lost", times=1)
    incidents.call_off(PERSON, run_of("replica-lost").pk, "not now")

    for end in order_of_ends:
        ends[end]()
        drain()

    assert run_of("replica-lost").state == RunState.CANCELLED
    assert Incident.objects.get().state == IncidentState.OPEN


def only_advances(playbook: str, times: int = 4) -> None:
    """Its runs go on, timers included, while every other step sleeps."""
    for _ in range(times):
        steps = PlaybookStep.objects.filter(state__in=["ready", "waiting"])
        steps.update(wake_at=timezone.now() + timedelta(hours=1))
        steps.filter(run__playbook=playbook).update(wake_at=timezone.now())
        engine.drain("", owner="test")
