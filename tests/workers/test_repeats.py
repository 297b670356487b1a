"""Repeats that an agent counted: rows stay few, and nothing that matters is hidden by them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import Command, Node, RepairRecord
from controlplane.health.models import Failure, Signal
from controlplane.incidents.choices import IncidentState
from controlplane.incidents.models import Incident
from tests.factories import NodeFactory
from tests.workers.world import HEALTHY, World, answer, drain, soaked

pytestmark = pytest.mark.django_db

XID_31 = "NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python3, Ch 0000000d, intr 0. MMU Fault"
XID_45 = "NVRM: Xid (PCI:0000:1b:00): 45, pid=7, name=python3, Ch 00000008"
XID_54 = "NVRM: Xid (PCI:0000:1b:00): 54, Auxiliary power is not connected"  # for a person
XID_63 = "NVRM: Xid (PCI:0000:1b:00): 63, pid=7, name=python3, Row Remapper: New row marked"
XID_79 = "[ 12.3] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=python3, GPU has fallen off the bus."


def test_a_hundred_thousand_repeats_are_one_row_and_one_failure(world: World) -> None:
    world.kernel_says(world.spares[0], XID_54)
    drain()
    for count in (2, 500, 100_000):
        world.kernel_repeats(XID_54, count)
        drain()

    failure = Failure.objects.get()
    assert (failure.count, Signal.objects.count(), Incident.objects.count()) == (100_000, 1, 1)
    assert failure.last_seen_at == Signal.objects.get().repeated_at


def test_a_count_that_is_told_again_or_late_changes_nothing(world: World) -> None:
    world.kernel_says(world.spares[0], XID_79)
    world.kernel_repeats(XID_79, 500)
    drain()
    world.kernel_repeats(XID_79, 500)
    world.kernel_repeats(XID_79, 20)

    signal = Signal.objects.get()
    assert (signal.count, signal.triaged_at is not None) == (500, True)


@pytest.mark.parametrize("count", [-1, 0, 1, 10**12])
def test_a_count_that_is_none_is_not_kept(world: World, count: int) -> None:
    world.kernel_says(world.spares[0], XID_79)
    world.kernel_repeats(XID_79, count)

    assert Signal.objects.get().count == 1


@pytest.mark.parametrize("last_at", [1e300, -1.0, None, "soon"])
def test_a_moment_that_is_none_is_not_kept(world: World, last_at: object) -> None:
    world.kernel_says(world.spares[0], XID_79)
    world.kernel_repeats(XID_79, 5, last_at=last_at)

    assert Signal.objects.get().count == 1


def test_seventy_seven_nodes_with_torn_down_channels_are_left_alone(world: World) -> None:
    """One job's crash, which a monitor once took for 77 broken nodes (NVSentinel, PR 1629)."""
    nodes = [NodeFactory(cluster=world.cluster) for _ in range(77)]
    for node in nodes:
        world.kernel_says(node, XID_45)
    drain()

    assert not Failure.objects.exists()
    assert not Incident.objects.exists()
    assert not Command.objects.exists()
    assert {node.state for node in Node.objects.filter(pk__in=[n.pk for n in nodes])} == {
        NodeState.AVAILABLE
    }


def test_repeats_of_a_note_stay_a_note(world: World) -> None:
    world.kernel_says(world.spares[0], XID_63)
    world.kernel_repeats(XID_63, 9)
    drain()

    assert not Failure.objects.exists()


def test_what_comes_again_after_a_repair_is_a_failure_of_its_own(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_79)
    drain()
    RepairRecord.objects.all().delete()
    fleet.record_repair(node.pk, Rung.REBOOT, "stp_done")
    world.kernel_repeats(XID_79, 2)
    drain()

    assert Failure.objects.filter(code="xid-79").count() == 2


def test_old_repeats_that_are_told_after_a_repair_are_history(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_79)
    drain()
    fleet.record_repair(node.pk, Rung.REBOOT, "stp_done")
    RepairRecord.objects.update(at=timezone.now() + timedelta(minutes=1))
    world.kernel_repeats(XID_79, 50)
    drain()

    assert Failure.objects.get().count == 50


@pytest.mark.parametrize(("ago", "opened"), [(timedelta(minutes=5), 1), (timedelta(hours=2), 2)])
def test_what_goes_on_long_after_its_incident_was_closed_is_opened_again(
    world: World, ago: timedelta, opened: int
) -> None:
    world.kernel_says(world.spares[0], XID_54)
    drain()
    Incident.objects.update(state=IncidentState.RESOLVED, resolved_at=timezone.now() - ago)
    for count in (2, 3):
        world.kernel_repeats(XID_54, count)
        drain()

    assert Incident.objects.count() == opened
    assert Failure.objects.get().count == 3


def test_what_was_seen_before_its_incident_was_closed_opens_none_however_late_it_is_told(
    world: World,
) -> None:
    world.kernel_says(world.spares[0], XID_54)
    drain()
    seen_at, closed_at = (timezone.now() - timedelta(hours=hours) for hours in (3, 2))
    Signal.objects.update(observed_at=seen_at)
    Incident.objects.update(state=IncidentState.RESOLVED, resolved_at=closed_at)
    world.kernel_repeats(XID_54, 50, last_at=seen_at.timestamp() + 60.0)
    drain()

    assert Incident.objects.count() == 1
    assert Failure.objects.get().count == 50


def test_what_a_program_does_wrong_where_none_of_ours_runs_is_nobody_s_however_often(
    world: World,
) -> None:
    world.kernel_says(world.spares[0], XID_31)
    drain()
    world.kernel_repeats(XID_31, 9)
    drain()

    assert Failure.objects.get().count == 9
    assert not Incident.objects.exists()


def test_a_repeat_while_a_node_is_watched_speaks_against_it(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_79)
    drain()
    world.boot(node)
    drain()
    answer("diagnose", **HEALTHY)
    drain()
    world.kernel_repeats(XID_79, 2)
    soaked()
    drain()

    node.refresh_from_db()
    assert node.state != NodeState.AVAILABLE
