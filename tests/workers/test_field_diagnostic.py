"""The vendor's field diagnostic as a rung of the ladder: its verdicts, and having none."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone
from pytest_django import Settings

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import Command, Gpu, Lease, Node, RepairRecord
from controlplane.health.catalogue import catalogue
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import (
    IncidentState,
    Mode,
    StepState,
)
from controlplane.incidents.models import Incident, PlaybookMode, RmaCase
from tests.factories import (
    BreakerFactory,
    GpuFactory,
)
from tests.workers.world import (
    XID_79,
    World,
    answer,
    comes_back_twice,
    drain,
    failed_before,
    never_comes_back,
    pass_validation,
    quarantine,
    rejoin,
    saves_checkpoint,
    silent,
    step_of,
)
from workers import engine, triage

pytestmark = pytest.mark.django_db


def can_examine(*nodes: Node) -> None:
    """Their agents say that the vendor's field diagnostic is set up there."""
    Node.objects.filter(pk__in=[node.pk for node in nodes]).update(
        report={"field_diagnostic": True}
    )


#: What automation is told while it waits.
MEANWHILE: dict[str, Callable[[Node], object]] = {
    "breaker": lambda node: BreakerFactory(cluster=node.cluster, code=""),
    "dry_run": lambda node: PlaybookMode.objects.create(
        cluster=node.cluster, playbook="repair-node", mode=Mode.DRY_RUN
    ),
}


def orders_to_examine() -> list[Command]:
    return list(Command.objects.filter(verb="field_diagnose").order_by("created_at"))


def test_a_card_that_fails_the_field_diagnostic_goes_back_with_its_words(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    order = json.loads(orders_to_examine()[0].payload)["action"]
    assert (order["uuid"], order["limit_s"]) == (world.card_of(node).uuid, 6 * 3600)
    answer("field_diagnose", outcome="failed", said="FAIL 0x3: SRAM test")
    drain()

    node.refresh_from_db()
    case = RmaCase.objects.get()
    assert (node.state, case.gpu) == (NodeState.RMA, world.card_of(node))
    assert [repair["rung"] for repair in case.bundle["repairs"]] == ["field_diagnostic"]
    assert case.bundle["diagnostics"][0]["said"] == "FAIL 0x3: SRAM test"
    assert "the card failed the field diagnostic" in case.reason
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_a_replica_leaves_a_card_that_is_to_be_examined_at_a_checkpoint(world: World) -> None:
    leaving = world.placements[1]
    node = leaving.node
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    assert not Command.objects.filter(verb="stop_process").exists()
    saves_checkpoint(world)
    quarantine(world, node)
    world.survivors_commit(leaving)
    drain()

    node.refresh_from_db()
    assert node.state == NodeState.REPAIRING
    assert len(orders_to_examine()) == 1
    assert world.placement_of(1).node in world.spares


def test_a_card_that_passes_the_field_diagnostic_returns_and_the_next_time_goes_back(
    world: World,
) -> None:
    node = world.spares[0]
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    answer("field_diagnose", outcome="passed", said="PASS")
    drain()
    pass_validation()
    node.refresh_from_db()
    assert node.state == NodeState.AVAILABLE
    assert RepairRecord.objects.get(gpu=world.card_of(node)).rung == Rung.FIELD_DIAGNOSTIC
    assert Incident.objects.get().state == IncidentState.RESOLVED

    world.shows(node, "sram_over_threshold")
    drain()
    node.refresh_from_db()
    assert node.state == NodeState.RMA
    assert "the failure came again after a field diagnostic" in RmaCase.objects.get().reason
    assert len(orders_to_examine()) == 1


@pytest.mark.parametrize("detail", ["No space left", "{uuid}: sram_over_threshold 1"])
def test_no_card_goes_back_that_the_vendors_own_tool_found_well(world: World, detail: str) -> None:
    node = world.spares[0]
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    answer("field_diagnose", outcome="passed", said="PASS")
    drain()
    said = detail.format(uuid=world.card_of(node).uuid)
    answer("diagnose", tests=[{"name": "remapping", "outcome": "failed", "detail": said}])
    drain()

    step = step_of("repair-node", "validate")
    assert step.state == StepState.NEEDS_OPERATOR
    assert step.outcome.startswith("the card passed the field diagnostic; not validated")
    assert not RmaCase.objects.exists()


def test_a_card_off_the_bus_again_is_not_examined(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    failed_before(node, world.card_of(node))
    world.kernel_says(node, XID_79)
    drain()

    node.refresh_from_db()
    assert node.state == NodeState.RMA
    assert not orders_to_examine()


def test_a_card_that_is_not_listed_is_a_persons_matter(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    answer("field_diagnose", outcome="absent")
    drain()

    assert step_of("repair-node", "verdict").state == StepState.NEEDS_OPERATOR
    assert not RmaCase.objects.exists()


def test_a_card_that_is_not_listed_after_restarts_goes_back(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    world.kernel_says(node, XID_79)
    comes_back_twice(world, node, **silent(world.card_of(node)))
    answer("field_diagnose", outcome="absent")
    drain()

    node.refresh_from_db()
    assert node.state == NodeState.RMA
    assert "not even listed after a restart" in RmaCase.objects.get().reason


def test_a_verdict_is_read_as_soon_as_it_is_told(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    answer("field_diagnose", outcome="failed", said="FAIL")
    engine.drain(f"step/{orders_to_examine()[0].requester}", owner="test")

    node.refresh_from_db()
    assert node.state == NodeState.RMA


def test_where_the_diagnostic_comes_to_no_verdict_a_person_looks(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    answer("field_diagnose", state="failed")
    drain()
    step = step_of("repair-node", "verdict")
    node.refresh_from_db()
    assert (step.state, node.state) == (StepState.NEEDS_OPERATOR, NodeState.REPAIR_FAILED)
    assert step.outcome == "the field diagnostic came to no verdict: no"
    assert not RmaCase.objects.exists()
    assert not RepairRecord.objects.exists()  # a tool that does not work says nothing of the card

    incidents.retry_run(SYSTEM, step.run_id, "the tool is set up now")
    drain()
    answer("field_diagnose", outcome="passed")
    drain()
    assert len(orders_to_examine()) == 2
    assert step_of("repair-node", "verdict").state == StepState.DONE


@pytest.mark.parametrize("trouble", ["breaker", "dry_run"])
def test_an_examination_that_has_begun_is_seen_to_its_end(world: World, trouble: str) -> None:
    node = world.spares[0]
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    MEANWHILE[trouble](node)
    drain()
    answer("field_diagnose", outcome="failed", said="FAIL")
    drain(1)

    assert RepairRecord.objects.get(gpu=world.card_of(node)).rung == Rung.FIELD_DIAGNOSTIC
    assert len(orders_to_examine()) == 1


def test_of_two_cards_to_be_examined_none_is_forgotten(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    second = GpuFactory(node=node, index=1, pci_address="00000000:2B:00.0")
    first = Gpu.objects.get(node=node, index=0)
    for card in (first, second):
        world.shows(node, "sram_over_threshold", card=card)
    drain()
    answer("field_diagnose", outcome="failed", said="FAIL")
    drain()

    assert RmaCase.objects.get().gpu == first
    assert Incident.objects.get().unresolved


def test_of_two_cards_under_a_job_none_is_forgotten(world: World) -> None:
    leaving = world.placements[1]
    node = leaving.node
    can_examine(node)
    second = GpuFactory(node=node, index=1, pci_address="00000000:2B:00.0")
    for card in (Gpu.objects.get(node=node, index=0), second):
        world.shows(node, "sram_over_threshold", card=card)
    drain()
    saves_checkpoint(world)
    quarantine(world, node)
    world.survivors_commit(leaving)
    drain()
    answer("field_diagnose", outcome="failed", said="FAIL")
    rejoin(world, 1)

    incident = Incident.objects.get()
    assert RmaCase.objects.get().gpu.index == 0
    assert (incident.replica, incident.unresolved) == (1, True)


def test_a_card_to_be_examined_keeps_nobody_from_restarting_the_node_for_another(
    world: World,
) -> None:
    node = world.spares[0]
    can_examine(node)
    GpuFactory(node=node, index=1, pci_address="00000000:2B:00.0")
    fleet.set_hold(SYSTEM, node.pk, "wait")
    world.shows(node, "sram_over_threshold", card=Gpu.objects.get(node=node, index=0))
    drain()
    world.kernel_says(node, XID_79.replace("1b:00", "2b:00"))
    fleet.set_hold(SYSTEM, node.pk, "")
    drain()

    assert world.bmcs[node.pk].orders == ["ForceRestart"]
    assert not orders_to_examine()


def test_a_card_off_the_bus_is_restarted_before_it_is_examined(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    fleet.set_hold(SYSTEM, node.pk, "wait")
    world.shows(node, "sram_over_threshold")
    drain()
    world.kernel_says(node, XID_79)
    fleet.set_hold(SYSTEM, node.pk, "")
    drain()

    assert world.bmcs[node.pk].orders == ["ForceRestart"]


def test_a_machine_that_falls_silent_while_it_examines_is_told_of(
    world: World, settings: Settings
) -> None:
    settings.BOOT_DEADLINE_S = 5
    node = world.spares[0]
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    told = timezone.now() - timedelta(seconds=10)
    Command.objects.update(state="delivered", created_at=told)
    Lease.objects.filter(node=node).update(
        reachable=False, last_beat_at=timezone.now() - timedelta(seconds=6)
    )
    drain()

    step = step_of("repair-node", "verdict")
    assert (step.state, orders_to_examine()[0].state) == (StepState.NEEDS_OPERATOR, "expired")
    assert f"{node.name} has not been heard for 5 s" in step.outcome


def test_a_machine_that_was_off_for_long_may_boot_before_it_examines(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    long_ago = timezone.now() - timedelta(days=3)
    Lease.objects.filter(node=node).update(reachable=False, last_beat_at=long_ago)
    drain()

    step = step_of("repair-node", "verdict")
    assert (step.state, orders_to_examine()[0].state) == (StepState.WAITING, "queued")


def test_an_order_to_examine_that_nobody_takes_is_called_back(
    world: World, settings: Settings
) -> None:
    settings.BOOT_DEADLINE_S = 5
    node = world.spares[0]
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    Command.objects.update(created_at=timezone.now() - timedelta(seconds=6))
    drain()

    assert orders_to_examine()[0].state == "expired"
    assert step_of("repair-node", "verdict").state == StepState.NEEDS_OPERATOR


def test_a_node_that_was_emptied_by_its_power_is_switched_on_to_be_examined(world: World) -> None:
    leaving = world.placements[1]
    node = leaving.node
    can_examine(node)
    world.shows(node, "sram_over_threshold")
    drain()
    saves_checkpoint(world)
    drain()
    answer("stop_process", state="failed")
    drain()

    assert world.bmcs[node.pk].orders == ["ForceOff", "On"]
    assert len(orders_to_examine()) == 1


def test_a_node_that_does_not_come_back_is_not_asked_to_examine(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    world.kernel_says(node, XID_79)
    never_comes_back(node)

    assert step_of("repair-node", "await-boot").state == StepState.NEEDS_OPERATOR
    assert not orders_to_examine()
    assert not RmaCase.objects.exists()


def test_resets_and_restarts_that_did_not_help_lead_to_the_field_diagnostic(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    world.kernel_says(node, "NVRM: Xid (PCI:0000:1b:00): 119, pid=1, name=q, Timeout waiting")
    drain()
    answer("reset_gpus", state="failed")
    comes_back_twice(world, node, **silent(world.card_of(node)))
    answer("field_diagnose", outcome="failed", said="FAIL")
    drain()

    node.refresh_from_db()
    rungs = RepairRecord.objects.filter(gpu=world.card_of(node)).order_by("at")
    assert node.state == NodeState.RMA
    assert list(rungs.values_list("rung", flat=True)) == [
        "reset_gpu", "reboot", "power_cycle", "field_diagnostic", "rma"
    ]  # fmt: skip


def test_a_host_that_errs_is_no_card_to_examine(world: World) -> None:
    node = world.spares[0]
    can_examine(node)
    verdict = triage.judge_line("EDAC MC0: 1 UE memory read error on DIMM_B1", catalogue())
    assert verdict is not None
    assert triage.is_for_people(verdict.action, verdict.fault, can_examine=node.can_examine)
