"""A card that does not answer, of which no kernel line says why."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone
from pytest_django import Settings

from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from controlplane.health.choices import Action, Urgency
from controlplane.health.models import Failure, Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, Mode, StepState
from controlplane.incidents.models import Approval, Incident, PlaybookRun
from controlplane.jobs.models import Placement
from tests.workers.moving import PERSON
from tests.workers.world import (
    XID_79,
    World,
    come_back,
    drain,
    mend,
    quarantine,
    reset_and_watched,
    run_of,
    step_of,
)
from workers.playbooks import PLAYBOOKS

pytestmark = pytest.mark.django_db
XID_119 = "[ 12.3] NVRM: Xid (PCI:0000:1b:00): 119, pid=1, name=q, Timeout waiting"


@pytest.fixture(autouse=True)
def a_minute_counts(settings: Settings) -> None:
    settings.READING_HOLD_S = 60


def test_a_free_node_with_a_silent_card_is_restarted(world: World) -> None:
    node = world.spares[0]
    world.card_is_silent(node, for_s=61)
    drain()
    failure = Failure.objects.get()
    assert (failure.code, failure.gpu) == ("gpu-unreadable", world.card_of(node))
    assert (failure.needed, failure.urgency) == (Action.REBOOT, Urgency.IDLE)
    assert world.bmcs[node.pk].orders == ["ForceRestart"]

    come_back(world, node)
    assert (node.state, Incident.objects.get().unresolved) == (NodeState.AVAILABLE, False)


def test_what_trains_beside_a_silent_card_trains_on(world: World) -> None:
    node = world.placements[1].node
    world.card_is_silent(node, for_s=61)
    drain()

    assert Incident.objects.get().subject == f"node/{node.pk}"
    assert step_of("repair-node", "decide").state == StepState.WAITING
    assert not PlaybookRun.objects.filter(playbook="replica-lost").exists()
    assert not any(bmc.orders for bmc in world.bmcs.values())


def test_a_card_that_is_silent_for_moments_is_none(world: World) -> None:
    world.card_is_silent(world.spares[0], for_s=59)
    drain()

    assert not Failure.objects.exists()
    assert not Incident.objects.exists()


def test_a_card_that_falls_silent_again_and_again_is_one_failure(world: World) -> None:
    Node.objects.update(enrolled_at=timezone.now() - timedelta(hours=1))
    for minutes in (9, 5, 0):
        world.card_is_silent(world.placements[1].node, for_s=61, until=time.time() - 60.0 * minutes)
        drain()

    assert Failure.objects.get().signals.count() == 3
    assert Incident.objects.count() == 1


def test_the_kernel_names_the_fault_of_a_card_that_is_silent_too(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_79)
    world.card_is_silent(node, for_s=61)
    drain()

    assert Failure.objects.get().code == "xid-79"
    assert Incident.objects.get().code == "xid-79"


def waits_to_be_signed(world: World) -> None:
    incidents.publish_playbooks([playbook.as_row() for playbook in PLAYBOOKS.values()])
    incidents.set_mode(PERSON, world.cluster.pk, "repair-node", Mode.APPROVE, "we look first")


def is_timed_out(world: World, node: Node) -> None:
    world.kernel_says(node, XID_119)
    drain()


def is_silent(world: World, node: Node) -> None:
    world.card_is_silent(node, for_s=61)
    drain()


@pytest.mark.parametrize("told", [(is_timed_out, is_silent), (is_silent, is_timed_out)])
def test_a_silent_card_of_which_a_fault_was_told_is_a_part_of_that(
    world: World, told: tuple[Callable[[World, Node], None], ...]
) -> None:
    node = world.placements[1].node
    waits_to_be_signed(world)
    for one in told:
        one(world, node)

    failure = Failure.objects.get()
    assert (failure.code, failure.signals.count()) == ("xid-119", 2)
    assert (failure.needed, failure.urgency) == (Action.RESET_GPU, Urgency.NOW)
    assert [one.code for one in Incident.objects.all() if one.unresolved] == ["xid-119"]


def test_the_repair_of_a_fault_ends_what_was_told_of_the_silence_of_its_card(world: World) -> None:
    lost = world.placements[1]
    node = lost.node
    waits_to_be_signed(world)
    is_timed_out(world, node)
    is_silent(world, node)
    approval = Approval.objects.get(state="waiting")
    incidents.approve(PERSON, approval.pk, approval.digest, "go")
    quarantine(world, node)
    world.survivors_commit(lost)
    mend(world, 1)
    reset_and_watched(world, node)

    node.refresh_from_db()
    assert node.state == NodeState.AVAILABLE
    assert not Incident.objects.filter(state__in=INCIDENT_UNRESOLVED).exists()
    assert not world.bmcs[node.pk].orders


def silent_while_it_is_reset(world: World) -> Node:
    node = world.spares[0]
    is_timed_out(world, node)
    is_silent(world, node)
    reset_and_watched(world, node)
    node.refresh_from_db()
    return node


def test_a_card_that_is_silent_while_it_is_reset_is_cured_by_that(world: World) -> None:
    node = silent_while_it_is_reset(world)

    assert node.state == NodeState.AVAILABLE
    assert not Incident.objects.filter(state__in=INCIDENT_UNRESOLVED).exists()
    assert not world.bmcs[node.pk].orders


def test_a_card_that_is_silent_still_after_its_reset_is_told_of_again(world: World) -> None:
    node = silent_while_it_is_reset(world)
    world.card_is_silent_still(node)
    drain()

    assert world.bmcs[node.pk].orders == ["ForceRestart"]


def placed_lately(world: World) -> Placement:
    """Half a minute ago."""
    lost = world.placements[1]
    Placement.objects.filter(pk=lost.pk).update(created_at=timezone.now() - timedelta(seconds=30))
    return lost


@pytest.mark.parametrize(("ago_s", "code"), [(40, "gpu-unreadable"), (90, "process-exited")])
def test_a_silence_that_stands_explains_what_ends_on_its_card_however_long_ago_it_began(
    world: World, ago_s: float, code: str
) -> None:
    """The process was placed half a minute ago; the card was told of last `ago_s` ago."""
    lost = placed_lately(world)
    world.card_is_silent(lost.node, for_s=600, until=time.time() - ago_s)
    world.exits(lost, exit_code=1)
    drain()

    assert run_of("replica-lost").context["code"] == code


@pytest.mark.parametrize(("ago_s", "code"), [(10, "gpu-unreadable"), (40, "process-exited")])
def test_one_reading_that_was_missed_before_a_process_was_placed_explains_nothing(
    world: World, ago_s: float, code: str
) -> None:
    """The process was placed half a minute ago."""
    lost = placed_lately(world)
    world.card_is_silent(lost.node, for_s=0, until=time.time() - ago_s)
    Signal.objects.update(count=1, repeated_at=None)
    world.exits(lost, exit_code=1)
    drain()

    assert run_of("replica-lost").context["code"] == code
