"""When an incident of replicas is over: by what is true of them, whatever ends last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.utils import timezone

from controlplane.errors import Conflict
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from controlplane.incidents import actions as incidents
from controlplane.incidents.actions.job_end import end_job
from controlplane.incidents.choices import ApprovalState, IncidentState, Mode, RunState
from controlplane.incidents.models import Approval, Incident
from controlplane.incidents.selectors import ask_of, restartable_losses, runs_of
from controlplane.jobs.choices import JobState, PlacementState
from controlplane.jobs.models import Job, Placement
from tests.factories import InterruptionFactory, PlacementFactory, ReplicaFactory
from tests.workers.moving import PERSON
from tests.workers.world import (
    HEALTHY,
    World,
    answer,
    drain,
    mend,
    quarantine,
    run_of,
    soaked,
)
from workers.playbooks import PLAYBOOKS

pytestmark = pytest.mark.django_db

XID_95 = "NVRM: Xid (PCI:0000:1b:00): 95, pid=7, name=python3, Ch 00000008"


def in_approve_mode(world: World) -> None:
    incidents.publish_playbooks([playbook.as_row() for playbook in PLAYBOOKS.values()])
    incidents.set_mode(PERSON, world.cluster.pk, "repair-node", Mode.APPROVE, "we look first")


def asked_to_sign(world: World) -> Approval:
    """A card of replica 1 is to be reset once somebody signs; the replica has died meanwhile."""
    in_approve_mode(world)
    lost = world.placements[1]
    world.kernel_says(lost.node, XID_95)
    world.kill(lost)
    drain()
    return Approval.objects.get(state=ApprovalState.WAITING)


def is_rejected(world: World, asked: Approval) -> None:
    incidents.reject(PERSON, asked.pk, "not like this")


def is_called_off(world: World, asked: Approval) -> None:
    incidents.call_off(PERSON, asked.run_id, "not like this")


def is_only_shown(world: World, asked: Approval) -> None:
    incidents.set_mode(PERSON, world.cluster.pk, "repair-node", Mode.DRY_RUN, "we look")
    drain()


def the_replica_is_back(world: World, asked: Approval) -> None:
    mend(world, 1)


@pytest.mark.parametrize("comes_to_nothing", [is_rejected, is_called_off, is_only_shown])
@pytest.mark.parametrize("back_first", [True, False])
def test_it_ends_once_its_replica_is_back_and_its_repair_over_in_either_order(
    world: World,
    comes_to_nothing: Callable[[World, Approval], None],
    back_first: bool,
) -> None:
    asked = asked_to_sign(world)
    events = sorted([comes_to_nothing, the_replica_is_back], key=_is_back, reverse=back_first)
    events[0](world, asked)
    incidents.resolve_losses()
    before = Incident.objects.get().unresolved
    events[1](world, asked)
    incidents.resolve_losses()

    assert before
    assert Incident.objects.get().state == IncidentState.RESOLVED


def _is_back(event: Callable[[World, Approval], None]) -> bool:
    return event is the_replica_is_back


@pytest.mark.parametrize("comes_to_nothing", [is_rejected, is_called_off, is_only_shown])
def test_one_of_a_node_whose_repair_came_to_nothing_stays_open(
    world: World, comes_to_nothing: Callable[[World, Approval], None]
) -> None:
    in_approve_mode(world)
    world.kernel_says(world.spares[0], XID_95)
    drain()
    comes_to_nothing(world, Approval.objects.get(state=ApprovalState.WAITING))
    incidents.resolve_losses()

    assert run_of("repair-node").state in (RunState.CANCELLED, RunState.SUCCEEDED)
    assert Incident.objects.get().unresolved


def test_one_of_a_job_that_was_ended_is_over_with_its_repair(world: World) -> None:
    asked = asked_to_sign(world)
    end_job(PERSON, world.job.pk, "enough")
    incidents.resolve_losses()
    before = Incident.objects.get().unresolved
    incidents.reject(PERSON, asked.pk, "nobody needs it")
    incidents.resolve_losses()

    assert before
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_one_whose_job_is_over_is_over_though_nobody_brought_its_replica_back(
    world: World,
) -> None:
    world.kill(world.placements[1])
    drain()
    incidents.call_off(PERSON, run_of("replica-lost").pk, "not today")
    incidents.resolve_losses()
    before = Incident.objects.get().unresolved
    Job.objects.filter(pk=world.job.pk).update(state=JobState.STOPPED)
    incidents.resolve_losses()

    assert before
    assert Incident.objects.get().state == IncidentState.RESOLVED


def emptied_and_watched(world: World) -> Node:
    """The node of replica 1 was emptied for its card, which is reset and watched by now."""
    node = world.placements[1].node
    world.kernel_says(node, XID_95)
    quarantine(world, node)
    answer("reset_gpus", reset=[world.card_of(node).uuid])
    drain()
    answer("diagnose", **HEALTHY)
    drain()
    return node


def test_it_does_not_end_with_its_repair_while_nobody_brings_its_replica_back(
    world: World,
) -> None:
    node = emptied_and_watched(world)
    incidents.call_off(PERSON, run_of("replica-lost").pk, "not today")
    soaked()
    drain()
    incidents.resolve_losses()

    node.refresh_from_db()
    assert (node.state, run_of("repair-node").state) == (NodeState.AVAILABLE, RunState.SUCCEEDED)
    assert Incident.objects.get().unresolved


def test_it_ends_once_its_replica_came_back_otherwise(world: World) -> None:
    emptied_and_watched(world)
    incidents.call_off(PERSON, run_of("replica-lost").pk, "its scheduler does it")
    soaked()
    drain()
    incidents.resolve_losses()
    before = Incident.objects.get().unresolved
    PlacementFactory(replica=world.placements[1].replica, node=world.spares[1])
    incidents.resolve_losses()

    assert before
    assert Incident.objects.get().state == IncidentState.RESOLVED


def called_off(world: World) -> Incident:
    """Replica 1 was lost, and nobody is to bring it back."""
    world.kill(world.placements[1])
    drain()
    incidents.call_off(PERSON, run_of("replica-lost").pk, "not today")
    return Incident.objects.get()


def test_what_was_called_off_is_brought_back_after_all(world: World) -> None:
    incident = called_off(world)
    asked = ask_of(incident, runs_of(incident))
    incidents.bring_back_missed(PERSON, incident.pk, "the storage is back")
    mend(world, 1)

    assert (asked.kind, asked.run) == ("bring-back", incident.runs.earliest("created_at"))
    assert "not today" in asked.text
    assert [run.state for run in incident.runs.order_by("created_at")] == ["cancelled", "succeeded"]
    incident.refresh_from_db()
    assert incident.state == IncidentState.RESOLVED
    assert incident.restored_at is not None
    told = incident.timeline.get(key__startswith="bring-back/").text
    assert told == "To be brought back after all: replica 1 (the storage is back)"


def test_what_is_being_brought_back_is_not_brought_back_twice(world: World) -> None:
    incident = called_off(world)
    incidents.bring_back_missed(PERSON, incident.pk, "the storage is back")

    with pytest.raises(Conflict, match="nothing is to be brought back"):
        incidents.bring_back_missed(PERSON, incident.pk, "the storage is back")
    assert incident.runs.count() == 2


def test_what_others_are_starting_is_not_brought_back_besides(world: World) -> None:
    incident = called_off(world)
    PlacementFactory(
        replica=world.placements[1].replica, node=world.spares[1], joined_at=None, state="running"
    )

    with pytest.raises(Conflict, match="nothing is to be brought back"):
        incidents.bring_back_missed(PERSON, incident.pk, "the storage is back")
    incidents.resolve_losses()
    assert Incident.objects.get().unresolved


def test_what_came_back_and_was_lost_again_meanwhile_is_not_taken_for_training(
    world: World,
) -> None:
    world.kill(world.placements[1])
    drain()
    answer("start_rank", pid=2)
    back = world.placement_of(1)
    incidents.pause_run(PERSON, run_of("replica-lost").pk, "wait")
    world.join(back)
    world.kill(back)
    drain()
    incidents.call_off(PERSON, run_of("replica-lost").pk, "not today")
    incidents.resolve_losses()
    incident = Incident.objects.get()

    assert incident.unresolved
    assert [run.context["replica"] for run in restartable_losses(runs_of(incident))] == [1]


def test_it_ends_once_the_same_process_is_let_in_again(world: World) -> None:
    starved = world.placements[1]
    world.peers_lose(starved)
    drain()
    incidents.call_off(PERSON, run_of("replica-lost").pk, "it is only slow")
    incidents.resolve_losses()
    before = Incident.objects.get().unresolved
    InterruptionFactory(job=world.job, entered=[starved.pk], started_at=timezone.now())
    incidents.resolve_losses()

    assert before
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_what_is_brought_back_later_goes_elsewhere_if_its_node_is_another_job_s_by_now(
    world: World,
) -> None:
    incident = called_off(world)
    lost = world.placements[1]
    Placement.objects.filter(pk=lost.pk).update(state=PlacementState.ENDED)
    PlacementFactory(node=lost.node, replica=ReplicaFactory(job__cluster=world.cluster))
    incidents.bring_back_missed(PERSON, incident.pk, "the storage is back")
    drain()

    again = world.placement_of(1)
    assert again.state == PlacementState.STARTING
    assert again.node_id in [spare.pk for spare in world.spares]


def test_nothing_is_brought_back_to_a_job_that_is_over(world: World) -> None:
    incident = called_off(world)
    Job.objects.filter(pk=world.job.pk).update(state=JobState.STOPPED)

    with pytest.raises(Conflict, match="nothing is to be brought back"):
        incidents.bring_back_missed(PERSON, incident.pk, "the storage is back")


def test_what_is_at_work_on_it_is_waited_for(world: World) -> None:
    world.kill(world.placements[1])
    drain()

    assert incidents.resolve_losses() == 0
    assert Incident.objects.get().unresolved
