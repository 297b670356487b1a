"""A run that stands still for a person: what it did not know lets it go on by itself, but no pause
is broken by that, and the time of a pause is no step's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.choices import Action, Urgency
from controlplane.incidents import actions as incidents
from controlplane.incidents.candidates import free_nodes
from controlplane.incidents.choices import IncidentState, RunState, StepState
from controlplane.incidents.models import (
    Breaker,
    Incident,
    PlaybookRun,
    PlaybookStep,
    Reservation,
)
from tests.factories import ProgressSampleFactory
from tests.workers.moving import PERSON, commands
from tests.workers.world import World, answer, drain, mend, run_of, step_of
from workers.engine import MAX_ROUNDS
from workers.playbooks import node_steps

pytestmark = pytest.mark.django_db

LOSS, REPAIR = "replica-lost", "repair-node"
XID_79 = "NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=python3, GPU has fallen off the bus."


def waited_long(key: str) -> None:
    """The step has waited for an hour, and the playbooks go on."""
    long_ago = timezone.now() - timedelta(hours=1)
    PlaybookStep.objects.filter(key=key).update(started_at=long_ago)
    drain()


def agent_is_away(world: World) -> None:
    """That of replica 1, which trains."""
    world.silence(world.placements[1].node)
    ProgressSampleFactory(job=world.job, at=timezone.now(), replicas=[0, 1])
    drain()


def asks_before_it_trains(world: World) -> None:
    """Replica 1 was killed, and has not begun to train again in time."""
    world.kill(world.placements[1])
    drain()
    answer("start_rank", pid=2)
    drain()
    waited_long("await-rejoin")
    assert run_of(LOSS).state == RunState.NEEDS_OPERATOR


# --- a replica ------------------------------------------------------------------------------------


def test_an_agent_that_is_away_for_long_while_its_replica_trains_is_nothing_to_ask_about(
    world: World,
) -> None:
    agent_is_away(world)
    waited_long("find-cause")
    meanwhile = run_of(LOSS).state
    world.hear(world.placements[1].node)
    drain()

    assert meanwhile == RunState.WAITING
    assert run_of(LOSS).state == RunState.SUCCEEDED
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_a_replica_that_dies_after_a_false_alarm_was_left_open_is_brought_back(
    world: World,
) -> None:
    agent_is_away(world)
    PlaybookStep.objects.filter(key="find-cause").update(timeout_s=300)
    waited_long("find-cause")
    asked = run_of(LOSS).state
    world.hear(world.placements[1].node)
    world.kill(world.placements[1])
    mend(world, 1)

    assert asked == RunState.NEEDS_OPERATOR
    assert run_of(LOSS).state == RunState.SUCCEEDED
    assert world.placement_of(1).pk != world.placements[1].pk


def test_what_came_back_after_its_run_had_asked_and_is_lost_later_is_brought_back(
    world: World,
) -> None:
    asks_before_it_trains(world)
    back = world.placement_of(1)
    world.join(back)
    world.kill(back)
    mend(world, 1)

    run = run_of(LOSS)
    assert (run.state, PlaybookRun.objects.filter(playbook=LOSS).count()) == ("succeeded", 1)
    assert world.placement_of(1).pk != back.pk
    audited = AuditEvent.objects.get(verb="run.news", object_id=run.pk)
    assert audited.reason == f"what it has by now, on {back.node.name}, was lost too"
    assert Incident.objects.get().timeline.filter(text__contains=audited.reason).exists()


def test_a_paused_run_is_not_woken_by_what_it_did_not_know(world: World) -> None:
    asks_before_it_trains(world)
    PlaybookRun.objects.filter(playbook=LOSS).update(state=RunState.PAUSED)
    world.join(world.placement_of(1))
    world.kill(world.placement_of(1))
    drain()

    assert run_of(LOSS).state == RunState.PAUSED
    assert len(commands("start_rank")) == 1


def test_the_time_of_a_pause_is_not_a_step_s_that_was_about_to_be_tried_again(
    poor_world: World,
) -> None:
    """It was worked on, or had failed, when its run was paused."""
    lost = poor_world.placements[1]
    poor_world.silence(lost.node)
    poor_world.peers_lose(lost)
    drain()
    hours_ago = timezone.now() - timedelta(hours=2)
    PlaybookRun.objects.filter(playbook=REPAIR).update(state=RunState.NEEDS_OPERATOR)
    step = step_of(LOSS, "choose-place")
    PlaybookStep.objects.filter(pk=step.pk).update(state=StepState.READY, started_at=hours_ago)
    incidents.pause_run(PERSON, step.run_id, "a moment")
    incidents.resume_run(PERSON, step.run_id, "go on")
    drain()

    assert step_of(LOSS, "choose-place").state == StepState.WAITING
    assert run_of(LOSS).state == RunState.WAITING


def test_a_program_that_never_trains_is_not_started_for_ever(world: World) -> None:
    """Each of its processes is another, and all of them say the same."""
    world.kill(world.placements[1])
    for _ in range(MAX_ROUNDS + 1):
        drain()
        answer("start_rank", pid=2)
        world.kill(world.placement_of(1))
    drain()
    asked, told = run_of(LOSS).state, len(commands("start_rank"))
    world.peers_lose(world.placement_of(1))
    drain()

    assert (asked, run_of(LOSS).state) == (RunState.NEEDS_OPERATOR, RunState.NEEDS_OPERATOR)
    assert len(commands("start_rank")) == told


def test_a_process_that_hung_and_dies_later_is_started_as_often_as_any_other(
    world: World,
) -> None:
    asks_before_it_trains(world)
    PlaybookRun.objects.filter(playbook=LOSS).update(
        context={**run_of(LOSS).context, "round": MAX_ROUNDS}
    )
    world.kill(world.placement_of(1))
    drain()

    assert run_of(LOSS).state == RunState.NEEDS_OPERATOR
    assert len(commands("start_rank")) == 1


def test_a_replica_whose_node_nobody_takes_out_goes_on_once_its_process_has_ended(
    world: World,
) -> None:
    lost = world.placements[1]
    world.silence(lost.node)
    world.peers_lose(lost)
    Node.objects.filter(pk=lost.node_id).update(bmc_url="")
    drain()
    incidents.cancel_run(PERSON, run_of(REPAIR).pk, "I look myself")
    drain()
    asked = step_of(LOSS, "take-node-out").state
    world.hear(lost.node)
    world.kill(lost)
    mend(world, 1)

    lost.node.refresh_from_db()
    assert asked == "needs_operator"
    assert world.placement_of(1).node == world.spares[0]
    assert lost.node.state == NodeState.SUSPECT


def test_a_replica_goes_on_once_a_person_had_its_silent_node_quarantined(world: World) -> None:
    lost = world.placements[1]
    address = Node.objects.get(pk=lost.node_id).bmc_url
    Node.objects.filter(pk=lost.node_id).update(bmc_url="")
    world.silence(lost.node)
    world.peers_lose(lost)
    drain()
    incidents.cancel_run(PERSON, run_of(REPAIR).pk, "its address was missing")
    drain()
    asked = step_of(LOSS, "take-node-out").state
    Node.objects.filter(pk=lost.node_id).update(bmc_url=address)
    incidents.order_node(PERSON, lost.node_id, "quarantine", "it is dead")
    drain()

    assert asked == "needs_operator"
    assert world.placement_of(1).node == world.spares[0]


def test_a_repair_that_asked_before_a_replica_was_lost_there_is_asked_again(world: World) -> None:
    lost = world.placements[1]
    breaker = Breaker.objects.create(cluster=world.cluster, code="", reason="burst")
    card = world.card_of(lost.node).pk
    incidents.repair_node(SYSTEM, lost.node_id, None, "its card", gpu_uuid=card, code="xid-79")
    drain()
    incidents.close_breaker(PERSON, breaker.pk, "it is over")
    asked = run_of(REPAIR).state
    world.silence(lost.node)
    world.peers_lose(lost)
    drain()

    assert asked == RunState.NEEDS_OPERATOR
    assert world.bmcs[lost.node_id].orders[0] == "ForceOff"
    assert world.placement_of(1).node == world.spares[0]


# --- a node that was silent -----------------------------------------------------------------------


def has_no_bmc(world: World, node: Node) -> None:
    Node.objects.filter(pk=node.pk).update(bmc_url="")


def has_a_mute_bmc(world: World, node: Node) -> None:
    world.bmcs[node.pk].body = b"<html>Log in</html>"


@pytest.mark.parametrize("beyond_reach", [has_no_bmc, has_a_mute_bmc])
def test_a_node_that_is_heard_again_after_its_repair_asked_is_left_alone(
    world: World, beyond_reach: Callable[[World, Node], None]
) -> None:
    node = world.spares[0]
    beyond_reach(world, node)
    world.silence(node)
    drain()
    waited_long("quarantine")
    node_steps.look_again_once_heard()
    asked = run_of(REPAIR).state
    world.hear(node)
    node_steps.look_again_once_heard()
    drain()

    assert (asked, run_of(REPAIR).state) == (RunState.NEEDS_OPERATOR, RunState.SUCCEEDED)
    assert Incident.objects.get().state == IncidentState.RESOLVED
    assert not Reservation.objects.filter(released_at=None).exists()
    assert node.pk in [one.node_id for one in free_nodes(world.cluster.pk)]


def test_a_replica_goes_on_once_the_node_whose_repair_asked_has_booted_by_itself(
    world: World,
) -> None:
    lost = world.placements[1]
    has_no_bmc(world, lost.node)
    world.silence(lost.node)
    world.peers_lose(lost)
    drain()
    asked = run_of(REPAIR).state
    world.hear(lost.node)
    world.exits(lost, reason="reboot")
    drain()
    target = world.placement_of(1).node
    lost.node.refresh_from_db()
    meanwhile = lost.node.state
    node_steps.look_again_once_heard()
    drain()

    lost.node.refresh_from_db()
    assert (asked, target) == (RunState.NEEDS_OPERATOR, world.spares[0])
    assert (meanwhile, lost.node.state) == (NodeState.SUSPECT, NodeState.QUARANTINED)


# --- a node ---------------------------------------------------------------------------------------


def reset_when_idle(world: World, node: Node) -> PlaybookRun:
    """Asked for a week ago; the node was never idle."""
    run = incidents.repair_node(
        SYSTEM,
        node.pk,
        None,
        "a row waits to be remapped",
        action=Action.RESET_GPU,
        gpu_uuid=world.card_of(node).pk,
        code="remap_pending",
        urgency=Urgency.IDLE,
    )
    drain()
    PlaybookRun.objects.filter(pk=run.pk).update(deadline=timezone.now() - timedelta(seconds=1))
    incidents.pause_overdue_runs(timezone.now())
    run.refresh_from_db()
    assert run.state == RunState.NEEDS_OPERATOR
    return run


def test_a_card_that_fails_while_its_reset_waits_for_a_person_is_repaired_at_once(
    world: World,
) -> None:
    node = world.placements[1].node
    run = reset_when_idle(world, node)
    world.kernel_says(node, XID_79)
    drain()
    answer("stop_process", stopped=True)
    drain()

    run.refresh_from_db()
    assert run.state in (RunState.RUNNING, RunState.WAITING)
    assert run.deadline > timezone.now()
    assert world.bmcs[node.pk].orders == ["ForceRestart"]
    story = Incident.objects.get().timeline.filter(text__contains="a graver failure")
    assert story.exists()


def test_the_same_need_again_wakes_no_repair_that_asked(world: World) -> None:
    node = world.spares[0]
    breaker = Breaker.objects.create(cluster=world.cluster, code="xid-79", reason="burst")
    world.kernel_says(node, XID_79)
    drain()
    incidents.close_breaker(PERSON, breaker.pk, "it is over")
    world.kernel_says(node, f"{XID_79} again")
    drain()

    node.refresh_from_db()
    assert (run_of(REPAIR).state, node.state) == (RunState.NEEDS_OPERATOR, NodeState.AVAILABLE)
    assert not Command.objects.exists()
