"""A card that does not answer, of which no kernel line says why."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.utils import timezone
from pytest_django import Settings

from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from controlplane.health.choices import Action, Urgency
from controlplane.health.models import Failure, Signal
from controlplane.incidents.choices import StepState
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.jobs.models import Placement
from tests.workers.world import XID_79, World, come_back, drain, run_of, step_of

pytestmark = pytest.mark.django_db


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


@pytest.mark.parametrize(("ago_s", "code"), [(40, "gpu-unreadable"), (90, "process-exited")])
def test_a_silence_that_stands_explains_what_ends_on_its_card_however_long_ago_it_began(
    world: World, ago_s: float, code: str
) -> None:
    """The process was placed half a minute ago; the card was told of last `ago_s` ago."""
    lost = world.placements[1]
    Placement.objects.filter(pk=lost.pk).update(created_at=timezone.now() - timedelta(seconds=30))
    world.card_is_silent(lost.node, for_s=600, until=time.time() - ago_s)
    world.exits(lost, exit_code=1)
    drain()

    assert run_of("replica-lost").context["code"] == code


@pytest.mark.parametrize(("ago_s", "code"), [(10, "gpu-unreadable"), (40, "process-exited")])
def test_one_reading_that_was_missed_before_a_process_was_placed_explains_nothing(
    world: World, ago_s: float, code: str
) -> None:
    """The process was placed half a minute ago."""
    lost = world.placements[1]
    Placement.objects.filter(pk=lost.pk).update(created_at=timezone.now() - timedelta(seconds=30))
    world.card_is_silent(lost.node, for_s=0, until=time.time() - ago_s)
    Signal.objects.update(count=1, repeated_at=None)
    world.exits(lost, exit_code=1)
    drain()

    assert run_of("replica-lost").context["code"] == code
