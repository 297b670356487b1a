"""From a kernel line to a repaired node: triage, quarantine, the ladder, the vendor, the return."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.db.models import F
from django.utils import timezone
from pytest_django import Settings

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import Command, Gpu, Lease, Node, RepairRecord
from controlplane.health.choices import Action, SignalKind, Urgency
from controlplane.health.models import Failure, Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import (
    CaseState,
    IncidentState,
    RunState,
    Severity,
    StepState,
)
from controlplane.incidents.models import Incident, PlaybookRun, PlaybookStep, Reservation, RmaCase
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Job, Placement
from tests.factories import (
    CheckpointFactory,
    GpuFactory,
    NodeFactory,
    PlacementFactory,
    ReplicaFactory,
)
from tests.workers.world import (
    HEALTHY,
    XID_79,
    World,
    answer,
    come_back,
    comes_back_twice,
    drain,
    failed_before,
    quarantine,
    rejoin,
    reset_and_watched,
    run_of,
    saves_checkpoint,
    silent,
    step_of,
)
from workers.playbooks import PLAYBOOKS, site_silent

pytestmark = pytest.mark.django_db

LOST = "[ 12.4] NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus."
XID_31 = "NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python3, Ch 0000000d, intr 0. MMU Fault"
XID_63 = "NVRM: Xid (PCI:0000:1b:00): 63, pid=7, name=python3, Row Remapper: New row marked"
XID_94 = "NVRM: Xid (PCI:0000:1b:00): 94, pid=7, name=python3, Ch 00000008"
XID_48 = "NVRM: Xid (PCI:0000:1b:00): 48, An uncorrectable double bit error (DBE) has been detected"
XID_54 = "NVRM: Xid (PCI:0000:1b:00): 54, Auxiliary power is not connected"
XID_119 = "NVRM: Xid (PCI:0000:1b:00): 119, pid=1, name=q, Timeout waiting"
PERSON = Actor(ActorKind.USER, "1")


def test_a_lost_card_takes_its_node_out_and_its_replica_to_a_spare(world: World) -> None:
    lost = world.placements[1]
    node = lost.node
    card = world.card_of(node)
    world.kernel_says(node, XID_79, LOST)
    world.survivors_commit(lost)
    quarantine(world, node)
    rejoin(world, 1)

    failure = Failure.objects.get(code="xid-79")
    assert (failure.gpu, failure.needed, failure.rule) == (card, Action.REBOOT, "xid-catalogue")
    assert [signal.raw for signal in failure.signals.order_by("recorded_at")] == [XID_79, LOST]
    assert node.drained_by.startswith("drydock/inc_")
    assert world.placement_of(1).node == world.spares[0]
    assert world.bmcs[node.pk].orders == ["ForceRestart"]  # its ranks were killed by its agent

    come_back(world, node)
    incident = Incident.objects.get()
    assert (node.state, node.spare, node.drained_by) == (NodeState.AVAILABLE, True, "")
    assert incident.state == IncidentState.RESOLVED
    assert (incident.code, incident.node) == ("xid-79", node)
    assert XID_79 in str(list(incident.timeline.values_list("data__raw", flat=True)))
    assert "xid-79" in incident.postmortem
    assert RepairRecord.objects.get(gpu=card).rung == Rung.REBOOT


def test_nothing_starts_elsewhere_before_the_agent_says_that_nothing_runs(world: World) -> None:
    lost = world.placements[1]
    world.kernel_says(lost.node, XID_79)
    drain()
    assert not Command.objects.filter(verb="start_rank").exists()
    assert step_of("repair-node", "quarantine").state == StepState.WAITING


def test_an_agent_that_cannot_kill_has_its_node_switched_off(world: World) -> None:
    node = world.placements[1].node
    world.kernel_says(node, XID_79)
    drain()
    answer("stop_process", state="failed")
    drain()
    assert world.bmcs[node.pk].orders[0] == "ForceOff"
    assert step_of("repair-node", "quarantine").state == StepState.DONE


def test_an_agent_that_does_not_answer_has_its_node_switched_off(world: World) -> None:
    node = world.placements[1].node
    world.kernel_says(node, XID_79)
    drain()
    Command.objects.filter(verb="stop_process").update(
        created_at=timezone.now() - timedelta(seconds=60)
    )
    drain()
    assert world.bmcs[node.pk].orders[0] == "ForceOff"


def test_one_fault_that_speaks_often_is_one_failure(world: World) -> None:
    node = world.placements[1].node
    world.kernel_says(node, XID_79, XID_79, LOST, XID_79)
    drain()
    assert Failure.objects.get().count == 4
    assert Incident.objects.count() == 1


def test_the_code_names_the_fault_even_if_it_comes_second(world: World) -> None:
    world.kernel_says(world.placements[1].node, LOST, XID_79)
    drain()
    assert (Failure.objects.get().code, Incident.objects.get().code) == ("xid-79", "xid-79")


def test_the_end_of_the_process_joins_the_incident_of_its_card(world: World) -> None:
    lost = world.placements[1]
    world.kernel_says(lost.node, XID_79)
    world.kill(lost)
    world.peers_lose(lost)
    drain()
    assert Incident.objects.get().code == "xid-79"
    assert PlaybookRun.objects.count() == 2  # the replica's and the node's


def test_a_card_of_an_idle_node_is_an_incident_of_the_node(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_79)
    drain()
    come_back(world, node)
    incident = Incident.objects.get()
    assert (incident.subject, incident.state) == (f"node/{node.pk}", IncidentState.RESOLVED)
    assert incident.job is None


def test_an_error_of_the_program_restarts_it_in_place(world: World) -> None:
    lost = world.placements[1]
    world.kernel_says(lost.node, XID_31)
    world.kill(lost)
    drain()
    rejoin(world, 1)
    assert world.placement_of(1).node == lost.node
    assert Incident.objects.get().code == "xid-31"
    assert Incident.objects.get().state == IncidentState.RESOLVED
    assert not any(bmc.orders for bmc in world.bmcs.values())
    assert not PlaybookRun.objects.filter(playbook="repair-node").exists()


def met_before(world: World, node: Node) -> None:
    """Its card ended a program by the same code this morning."""
    Node.objects.update(enrolled_at=timezone.now() - timedelta(days=1))
    world.kernel_says(node, XID_31)
    drain()
    hours = timedelta(hours=6)
    Signal.objects.update(observed_at=F("observed_at") - hours)
    Failure.objects.update(
        observed_at=F("observed_at") - hours, last_seen_at=F("last_seen_at") - hours
    )
    Incident.objects.all().delete()
    PlaybookRun.objects.all().delete()


def test_what_its_card_meets_again_the_same_day_is_restarted_there_and_people_are_told(
    world: World,
) -> None:
    lost = world.placements[1]
    met_before(world, lost.node)
    world.kernel_says(lost.node, XID_31)
    world.kill(lost)
    drain()
    rejoin(world, 1)

    lost.node.refresh_from_db()
    assert (world.placement_of(1).node, lost.node.reset_pending) == (lost.node, "")
    of_replica = Incident.objects.get(replica=1)
    assert (of_replica.code, of_replica.state) == ("xid-31", IncidentState.RESOLVED)
    told = Incident.objects.get(subject=f"node/{lost.node_id}")
    assert (told.unresolved, told.failures.get().needed) == (True, Action.FIELD_DIAGNOSTIC)
    assert not PlaybookRun.objects.filter(playbook="repair-node").exists()


def test_what_cards_of_all_nodes_of_a_job_meet_again_is_an_incident_of_none(world: World) -> None:
    for placement in world.placements:
        met_before(world, placement.node)
    for placement in world.placements:
        world.kernel_says(placement.node, XID_31)
        drain()

    assert not Incident.objects.filter(subject__startswith="node/").exists()
    assert set(Failure.objects.values_list("needed", flat=True)) == {Action.RESTART_APP}


def test_what_a_card_meets_all_day_is_one_incident_of_its_node(world: World) -> None:
    node = world.spares[0]
    met_before(world, node)
    for minutes in (8, 4, 0):
        world.kernel_says(node, XID_31.replace("pid=7", f"pid={minutes}"))
        Signal.objects.filter(raw__contains=f"pid={minutes},").update(
            observed_at=timezone.now() - timedelta(minutes=minutes)
        )
        drain()

    incident = Incident.objects.get()
    assert (incident.subject, incident.failures.get().count) == (f"node/{node.pk}", 3)


def test_a_contained_error_moves_the_replica_and_resets_the_node(world: World) -> None:
    lost = world.placements[1]
    node = lost.node
    world.kernel_says(node, XID_63, XID_94)
    world.kill(lost)
    drain(6)
    rejoin(world, 1)
    assert world.placement_of(1).node == world.spares[0]
    assert Incident.objects.get().state == IncidentState.RESOLVED  # it waits for no reset
    reset_and_watched(world, node)
    node.refresh_from_db()
    assert (node.state, node.reset_pending) == (NodeState.AVAILABLE, "")
    assert RepairRecord.objects.get(gpu=world.card_of(node)).rung == Rung.RESET_GPU


def only_process(world: World, now: datetime, *, there_for: timedelta) -> Placement:
    """What is left of the job is one replica, which has been on its node for so long."""
    world.placements[0].delete()
    Job.objects.update(world_replicas=1, step=900, step_at=now)
    began = now - there_for
    Placement.objects.update(created_at=began, joined_at=began + timedelta(seconds=9))
    return world.placements[1]


def test_a_job_alone_stays_at_what_its_node_saved_rather_than_make_half_an_hour_again(
    world: World,
) -> None:
    now = timezone.now()
    alone = only_process(world, now, there_for=timedelta(hours=2))
    CheckpointFactory(job=world.job, step=900, tier="local", at=now - timedelta(seconds=2))
    CheckpointFactory(job=world.job, step=500, tier="shared", at=now - timedelta(minutes=30))
    world.kernel_says(alone.node, XID_94)
    world.exits(alone, signal=9)
    drain(6)

    choice = step_of("replica-lost", "choose-place")
    assert world.placement_of(1).node == alone.node
    assert choice.evidence["checkpoints"] == (
        "local disk: step 900, 2 s before its last step, on its own node alone; "
        "shared storage: step 500, 1800 s before its last step"
    )
    assert choice.evidence["on_spare"].endswith(
        "from step 500, shared storage, 1800 s of training before"
    )


def test_what_a_jobs_process_saved_on_a_node_that_it_left_is_not_on_the_one_it_was_lost_on(
    world: World,
) -> None:
    now = timezone.now()
    alone = only_process(world, now, there_for=timedelta(minutes=1))
    CheckpointFactory(job=world.job, tier="local", at=now - timedelta(minutes=2))
    CheckpointFactory(job=world.job, step=500, tier="shared", at=now - timedelta(minutes=30))
    world.kernel_says(alone.node, XID_94)
    world.exits(alone, signal=9)
    drain(6)

    assert world.placement_of(1).node in world.spares
    assert "local disk" not in step_of("replica-lost", "choose-place").evidence["checkpoints"]


def test_without_a_spare_the_program_restarts_in_place_and_the_reset_waits(
    poor_world: World,
) -> None:
    lost = poor_world.placements[1]
    poor_world.kernel_says(lost.node, XID_94)
    poor_world.kill(lost)
    drain(6)
    rejoin(poor_world, 1)
    assert poor_world.placement_of(1).node == lost.node
    assert step_of("repair-node", "decide").state == StepState.WAITING
    assert not Command.objects.filter(verb="reset_gpus").exists()

    jobs.end_placement(SYSTEM, poor_world.placement_of(1).pk, "the job ended", free_node=True)
    drain()
    assert Command.objects.filter(verb="reset_gpus").exists()


def test_a_graver_fault_overtakes_a_reset_that_waits(poor_world: World) -> None:
    lost = poor_world.placements[1]
    poor_world.kernel_says(lost.node, XID_94)
    poor_world.kill(lost)
    drain(6)
    rejoin(poor_world, 1)
    poor_world.kernel_says(lost.node, XID_79)
    quarantine(poor_world, lost.node)
    assert poor_world.bmcs[lost.node_id].orders == ["ForceRestart"]
    assert PlaybookRun.objects.filter(playbook="repair-node").count() == 1


def test_a_reset_that_fails_is_followed_by_a_reboot(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_119)
    drain()
    answer("reset_gpus", state="failed")
    drain()
    assert step_of("repair-node", "decide").outcome.startswith("Reboot")
    assert world.bmcs[node.pk].orders == ["ForceRestart"]


def test_a_node_that_fails_its_validation_climbs_the_ladder_to_the_vendor(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_79)
    comes_back_twice(world, node, **silent(world.card_of(node)))
    node.refresh_from_db()
    assert world.bmcs[node.pk].orders == ["ForceRestart", "ForceOff", "On"]
    assert node.state == NodeState.RMA
    assert RmaCase.objects.get().gpu == world.card_of(node)


def test_the_same_card_again_after_its_restart_goes_to_the_vendor(world: World) -> None:
    node = world.spares[0]
    card = world.card_of(node)
    failed_before(node, card)
    world.kernel_says(node, XID_79)
    drain()
    node.refresh_from_db()
    case = RmaCase.objects.get()
    assert (node.state, case.gpu, case.state) == (NodeState.RMA, card, CaseState.OPEN)
    assert case.bundle["card"]["serial"] == card.serial
    assert len(case.bundle["failures"]) == 2
    assert XID_79 in case.bundle["failures"][1]["lines"]
    assert [repair["rung"] for repair in case.bundle["repairs"]] == ["reboot"]
    assert not world.bmcs[node.pk].orders
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_a_card_that_changes_its_node_keeps_its_record(world: World) -> None:
    first, second = world.spares
    card = world.card_of(first)
    failed_before(first, card)
    Gpu.objects.filter(node=second).delete()
    Gpu.objects.filter(pk=card.pk).update(node=second)
    world.kernel_says(second, XID_79)
    drain()
    second.refresh_from_db()
    assert second.state == NodeState.RMA


@pytest.mark.parametrize(
    ("reading", "value"),
    [("remap_failed", 1.0), ("exhausted_banks", 1.0), ("remapped_rows", 512.0)],
)
def test_a_card_whose_memory_is_beyond_remapping_goes_to_the_vendor(
    world: World, reading: str, value: float
) -> None:
    node = world.spares[0]
    world.shows(node, reading, value)
    drain()

    node.refresh_from_db()
    case = RmaCase.objects.get()
    assert (node.state, case.gpu) == (NodeState.RMA, world.card_of(node))
    assert case.bundle["memory"] == {reading: value}
    assert "NVIDIA's memory guide" in case.reason


def test_a_card_beyond_remapping_is_given_back_whatever_fails_and_wherever_it_sits(
    world: World,
) -> None:
    first, second = world.spares
    card = world.card_of(first)
    Node.objects.filter(pk=first.pk).update(state=NodeState.QUARANTINED)
    world.shows(first, "remap_failed")
    drain()
    Gpu.objects.filter(node=second).delete()
    Gpu.objects.filter(pk=card.pk).update(node=second)
    world.kernel_says(second, XID_79)
    drain()

    second.refresh_from_db()
    assert second.state == NodeState.RMA
    evidence = step_of("repair-node", "decide").evidence
    assert evidence[f"card {card.serial}, memory"] == "remap failed: 1"


def test_a_replica_leaves_a_card_beyond_remapping_at_a_checkpoint(world: World) -> None:
    leaving = world.placements[1]
    node = leaving.node
    world.shows(node, "remap_failed")
    drain()
    assert step_of("repair-node", "decide").state == StepState.WAITING
    saves_checkpoint(world)
    quarantine(world, node)
    world.survivors_commit(leaving)
    drain()

    node.refresh_from_db()
    assert node.state == NodeState.RMA
    assert Incident.objects.get().replica == 1
    assert world.placement_of(1).node in world.spares


# --- the record -----------------------------------------------------------------------------------


def test_a_decision_shows_the_record_that_it_rests_on(world: World) -> None:
    node = world.spares[0]
    card = world.card_of(node)
    failed_before(node, card)
    world.kernel_says(node, XID_79)
    drain()

    evidence = step_of("repair-node", "decide").evidence
    assert evidence["tried in vain for this code"] == "reboot"
    assert f"reboot on {node.name}, " in evidence[f"card {card.serial}, repairs of 30 days"]


def three_days_pass() -> None:
    days = timedelta(days=3)
    for moment in ("observed_at", "last_seen_at"):
        Failure.objects.update(**{moment: F(moment) - days})
    Signal.objects.update(observed_at=F("observed_at") - days)
    RepairRecord.objects.update(at=F("at") - days)


def is_power_cycled_for_its_silence(world: World, node: Node) -> None:
    world.silence(node)
    drain()
    come_back(world, node)


def is_rebooted_by_a_person(world: World, node: Node) -> None:
    incidents.publish_playbooks([playbook.as_row() for playbook in PLAYBOOKS.values()])
    incidents.order_node(PERSON, node.pk, "reboot", "an upgrade")
    drain()
    come_back(world, node)


@pytest.mark.parametrize("happens", [is_power_cycled_for_its_silence, is_rebooted_by_a_person])
def test_what_was_done_for_another_reason_is_not_tried_in_vain_for_a_code(
    world: World, happens: Callable[[World, Node], None]
) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_119)
    drain()
    reset_and_watched(world, node)
    three_days_pass()
    happens(world, node)
    assert RepairRecord.objects.filter(gpu=world.card_of(node)).count() == 2
    assert node.state == NodeState.AVAILABLE
    three_days_pass()
    world.kernel_says(node, XID_119)
    drain()

    decision = step_of("repair-node", "decide")
    assert decision.outcome.startswith("Reboot: ")
    assert decision.evidence["tried in vain for this code"] == "reset_gpu"
    assert not RmaCase.objects.exists()


def test_another_card_of_the_same_node_begins_at_the_first_rung(world: World) -> None:
    node = world.spares[0]
    other = GpuFactory(node=node, index=1, pci_address="00000000:43:00.0")
    failed_before(node, other)
    world.kernel_says(node, XID_79)
    drain()
    assert world.bmcs[node.pk].orders == ["ForceRestart"]


def test_a_node_with_new_cards_is_admitted_again_by_itself(world: World) -> None:
    node = world.spares[0]
    card = world.card_of(node)
    failed_before(node, card)
    world.kernel_says(node, XID_79)
    drain()
    assert incidents.readmit_replaced() == 0
    other = GpuFactory(node=world.spares[1], index=1, pci_address="00000000:2B:00.0")
    Gpu.objects.filter(pk=card.pk).update(node=world.spares[1], index=2)  # somebody tries it there
    assert incidents.readmit_replaced() == 0
    Gpu.objects.filter(pk=other.pk).update(node=node)
    assert incidents.readmit_replaced() == 1
    assert incidents.readmit_replaced() == 0
    drain()
    answer("diagnose", **HEALTHY)
    drain()
    node.refresh_from_db()
    assert (node.state, node.spare) == (NodeState.AVAILABLE, True)
    assert RmaCase.objects.get().state == CaseState.CLOSED


@pytest.mark.parametrize(
    "line",
    [
        XID_63,
        "NVRM: Xid (PCI:0000:1b:00): 45, pid=7, name=a, ch 2",
        "NVRM: Xid (PCI:0000:1b:00): 56, CMDre 00000001 00000094",  # a code marked as unused
        "Out of memory: Killed process 4242 (somebody-elses) total-vm:1kB",
        "EDAC MC0: 1 UE memory read error on DIMM_B1",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 11012, Non-fatal, Link 01 corrected",
    ],
)
def test_a_note_or_a_consequence_opens_nothing(line: str, world: World) -> None:
    world.kernel_says(world.placements[1].node, line)
    drain()
    assert not Failure.objects.exists()
    assert not Incident.objects.exists()
    assert Signal.objects.get().triaged_at is not None


def test_what_stands_near_on_the_same_card_decides(world: World) -> None:
    world.kernel_says(world.spares[0], XID_63, XID_48)
    drain()

    failure = Failure.objects.get()
    assert (failure.code, failure.needed) == ("xid-48", Action.DRAIN_AND_RESET)
    assert failure.rule == "xid-catalogue: with 63"


def test_what_a_switch_sees_of_a_lost_card_is_no_fault_of_its_own(world: World) -> None:
    switch = "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    world.kernel_says(world.spares[0], XID_79, switch)
    drain()

    assert Failure.objects.get().code == "xid-79"


def test_what_only_a_person_can_mend_opens_an_incident_and_touches_nothing(world: World) -> None:
    world.kernel_says(world.spares[0], XID_54)
    drain()
    incident = Incident.objects.get()
    assert incident.unresolved
    assert not incident.runs.exists()
    assert not any(bmc.orders for bmc in world.bmcs.values())


def test_a_line_from_a_node_that_is_out_is_kept_and_starts_nothing(world: World) -> None:
    node = world.spares[0]
    fleet.transition(SYSTEM, node.pk, NodeState.QUARANTINED, reason="a person's doing")
    world.kernel_says(node, XID_79)
    drain()
    assert Failure.objects.get().code == "xid-79"
    assert not PlaybookRun.objects.exists()


# --- a site that goes quiet -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reading", "value", "code", "needed"),
    [
        ("remap_failed", 1.0, "remap-failed", Action.CONTACT_VENDOR),
        ("sram_over_threshold", 1.0, "sram-threshold", Action.FIELD_DIAGNOSTIC),
        ("recovery_action", 4.0, "recovery-action", Action.DRAIN_AND_RESET),
        ("recovery_action", 2.0, "recovery-action", Action.REBOOT),
    ],
)
def test_what_nvml_says_of_a_card_is_a_failure(
    world: World, reading: str, value: float, code: str, needed: Action
) -> None:
    world.shows(world.spares[0], reading, value)
    drain()

    failure = Failure.objects.get()
    assert (failure.code, failure.needed, failure.gpu) == (
        code, needed, world.card_of(world.spares[0])
    )  # fmt: skip
    assert Incident.objects.get().node == world.spares[0]


def test_a_remap_that_is_pending_waits_until_the_node_is_idle(world: World) -> None:
    """The replica on it is not lost, and nothing is done to it."""
    node = world.placements[1].node
    world.shows(node, "remap_pending")
    drain()

    node.refresh_from_db()
    assert (node.state, bool(node.reset_pending)) == (NodeState.ALLOCATED, True)
    assert Failure.objects.get().urgency == Urgency.IDLE
    assert Incident.objects.get().severity == Severity.MINOR
    assert not PlaybookRun.objects.filter(playbook="replica-lost").exists()


@pytest.mark.parametrize("heard", [True, False])
def test_a_node_that_was_given_work_before_its_repair_was_let_go_is_idle_no_more(
    world: World, heard: bool
) -> None:
    node = world.spares[0]
    fleet.set_hold(SYSTEM, node.pk, "not yet")
    world.shows(node, "remap_pending")
    drain()
    assert step_of("repair-node", "quarantine").state == StepState.WAITING
    Node.objects.filter(pk=node.pk).update(state=NodeState.ALLOCATED, hold_reason="")
    replica = ReplicaFactory(job=world.job, index=2)
    placement = PlacementFactory(replica=replica, node=node, state=PlacementState.RUNNING)
    Lease.objects.filter(node=node).update(reachable=heard)
    drain()

    assert not Command.objects.filter(verb="stop_process").exists()
    assert not world.bmcs[node.pk].orders
    decide = step_of("repair-node", "decide")
    assert decide.state == StepState.WAITING
    assert decide.outcome.endswith("once spare-0 is idle")
    assert not Reservation.objects.filter(released_at=None).exists()
    Lease.objects.filter(node=node).update(reachable=True)
    jobs.end_placement(SYSTEM, placement.pk, "its job is over", free_node=True)
    drain()
    assert Command.objects.filter(verb="reset_gpus", node=node).count() == 1


def all_silent(world: World, nodes: list[Node]) -> None:
    now = timezone.now()
    Lease.objects.filter(node__in=nodes).update(
        reachable=False, unreachable_since=now, last_beat_at=now - timedelta(seconds=25)
    )
    for node in nodes:
        world.lease_lost(node)


@pytest.fixture
def site(world: World) -> list[Node]:
    """The spares and two more, silent at once; the job's own nodes are heard by nobody either."""
    return [*world.spares, *NodeFactory.create_batch(2, cluster=world.cluster)]


def test_a_silent_site_is_one_incident_and_nothing_is_done(world: World, site: list[Node]) -> None:
    all_silent(world, site)
    drain()
    incident = Incident.objects.get()
    assert incident.subject == f"silence/{world.cluster.pk}"
    assert "went quiet together" in incident.title
    assert not any(bmc.orders for bmc in world.bmcs.values())
    assert not PlaybookRun.objects.filter(playbook="repair-node").exists()
    assert incident.failures.get().count >= 4


def test_a_site_that_is_heard_again_resolves_by_itself(world: World, site: list[Node]) -> None:
    all_silent(world, site)
    drain()
    Lease.objects.update(reachable=True, last_beat_at=timezone.now())
    drain()
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_who_stays_silent_when_the_site_is_back_is_looked_at_alone(
    world: World, site: list[Node]
) -> None:
    all_silent(world, site)
    drain()
    dead = world.spares[0]
    Lease.objects.exclude(node=dead).update(reachable=True, last_beat_at=timezone.now())
    drain()
    assert Signal.objects.filter(kind=SignalKind.LEASE_LOST, node=dead).count() == 2
    assert world.bmcs[dead.pk].orders[0] == "ForceOff"
    assert run_of("site-silent").state == RunState.SUCCEEDED


def test_who_was_silent_long_before_its_site_is_not_told_of_again(
    world: World, site: list[Node]
) -> None:
    known, *others = site
    weeks_ago = timezone.now() - timedelta(weeks=3)
    Lease.objects.filter(node=known).update(
        reachable=False, unreachable_since=weeks_ago, last_beat_at=weeks_ago
    )
    all_silent(world, others)
    drain()
    watched = run_of("site-silent").state
    Lease.objects.exclude(node=known).update(reachable=True, last_beat_at=timezone.now())
    drain()

    assert (watched, run_of("site-silent").state) == (RunState.WAITING, RunState.SUCCEEDED)
    assert not Signal.objects.filter(node=known).exists()
    assert not world.bmcs[known.pk].orders


def test_who_died_while_we_were_away_and_is_missed_with_its_site_is_looked_at_alone(
    world: World, site: list[Node]
) -> None:
    all_silent(world, site)
    dead = world.spares[0]
    hours_ago = timezone.now() - timedelta(hours=5)
    Lease.objects.filter(node__in=site).update(last_beat_at=hours_ago)
    drain()
    Lease.objects.exclude(node=dead).update(reachable=True, last_beat_at=timezone.now())
    drain()

    assert Signal.objects.filter(node=dead, source="site-silent").count() == 1


@pytest.fixture
def asking(world: World, site: list[Node]) -> PlaybookRun:
    """The watch over a site that was silent for so long that it asked for a person."""
    all_silent(world, site)
    drain()
    long_ago = timezone.now() - timedelta(hours=1)
    PlaybookStep.objects.filter(key="watch").update(started_at=long_ago)
    drain()
    run = run_of("site-silent")
    assert run.state == RunState.NEEDS_OPERATOR
    return run


def test_a_site_that_asked_for_a_person_resolves_once_it_is_heard(asking: PlaybookRun) -> None:
    Lease.objects.update(reachable=True, last_beat_at=timezone.now())
    site_silent.look_again_once_heard()
    drain()

    assert run_of("site-silent").state == RunState.SUCCEEDED
    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_who_stays_silent_after_its_site_asked_for_a_person_is_looked_at_alone(
    world: World, asking: PlaybookRun
) -> None:
    dead = world.spares[0]
    Lease.objects.exclude(node=dead).update(reachable=True, last_beat_at=timezone.now())
    site_silent.look_again_once_heard()
    drain()

    assert run_of("site-silent").state == RunState.SUCCEEDED
    assert Signal.objects.filter(node=dead, source="site-silent").count() == 1


@pytest.mark.parametrize("last", [0, 1])
def test_a_site_whose_nodes_are_put_on_hold_is_not_taken_for_heard(
    world: World, asking: PlaybookRun, last: int
) -> None:
    left = Node.objects.filter(lease__reachable=False).values_list("pk", flat=True)[:last]
    Node.objects.exclude(pk__in=list(left)).update(hold_reason="its switch is exchanged")
    site_silent.look_again_once_heard()
    drain()

    assert run_of("site-silent").state == RunState.NEEDS_OPERATOR
    assert not Signal.objects.filter(source="site-silent").exists()


def test_a_site_that_is_silent_still_goes_on_asking(asking: PlaybookRun) -> None:
    site_silent.look_again_once_heard()
    drain()
    again = run_of("site-silent")

    assert (again.state, again.state_reason) == (RunState.NEEDS_OPERATOR, asking.state_reason)


def test_a_watch_that_asked_for_another_reason_is_left_to_people(asking: PlaybookRun) -> None:
    PlaybookRun.objects.filter(pk=asking.pk).update(state_reason="gave up after 5 attempts")
    Lease.objects.update(reachable=True, last_beat_at=timezone.now())
    site_silent.look_again_once_heard()
    drain()

    assert run_of("site-silent").state == RunState.NEEDS_OPERATOR


def test_a_card_that_drifts_is_emptied_at_a_checkpoint_before_the_fault(world: World) -> None:
    moved = world.placements[1]
    node = moved.node
    world.errors_accelerate(node)
    drain()
    assert step_of("repair-node", "decide").state == StepState.WAITING
    assert not Command.objects.filter(verb="stop_process").exists()
    assert not PlaybookRun.objects.filter(playbook="replica-lost").exists()
    began_before = {"step": 7, "seconds": 600.0, "at": timezone.now()}
    CheckpointFactory(job=world.job, tier="local", **began_before)
    drain()
    assert step_of("repair-node", "decide").state == StepState.WAITING

    saves_checkpoint(world)
    quarantine(world, node)
    world.survivors_commit(moved)
    drain()
    rejoin(world, 1)
    assert world.placement_of(1).node == world.spares[0]
    reset_and_watched(world, node)

    node.refresh_from_db()
    incident = Incident.objects.get()
    failure = Failure.objects.get()
    assert (node.state, node.spare) == (NodeState.AVAILABLE, True)
    assert (incident.state, incident.severity) == (IncidentState.RESOLVED, Severity.MINOR)
    assert (incident.code, incident.replica) == ("ecc-drift", 1)
    assert (failure.urgency, failure.gpu) == (Urgency.NEXT_CHECKPOINT, world.card_of(node))
    assert not world.bmcs[node.pk].orders


def test_a_drifting_card_of_an_idle_node_is_reset_at_once(world: World) -> None:
    world.errors_accelerate(world.spares[0])
    drain()
    assert Command.objects.filter(verb="reset_gpus", node=world.spares[0]).exists()
    assert not world.job.directives.exists()


@pytest.mark.parametrize("tier", ["shared", "object"])
def test_what_a_jobs_only_process_saved_on_its_node_alone_is_no_checkpoint_to_leave_by(
    world: World, tier: str
) -> None:
    world.placements[0].delete()
    world.errors_accelerate(world.placements[1].node)
    drain()
    for of_the_node in ("peer", "local"):
        saves_checkpoint(world, of_the_node)
    drain()
    assert step_of("repair-node", "decide").state == StepState.WAITING
    assert not Command.objects.filter(verb="stop_process").exists()

    saves_checkpoint(world, tier)
    drain()
    assert step_of("repair-node", "decide").state == StepState.DONE
    assert Command.objects.filter(verb="stop_process").exists()


def test_a_job_that_saves_no_checkpoint_keeps_a_drifting_node_no_longer_than_allowed(
    world: World, settings: Settings
) -> None:
    world.errors_accelerate(world.placements[1].node)
    drain()
    settings.CHECKPOINT_WAIT_S = 0
    drain()
    step = step_of("repair-node", "decide")
    assert step.state == StepState.DONE
    assert "saved none within 0 s" in step.evidence["checkpoint"]
    assert Command.objects.filter(verb="stop_process").exists()


def test_the_fault_itself_overtakes_a_repair_that_waits_for_a_checkpoint(world: World) -> None:
    lost = world.placements[1]
    world.errors_accelerate(lost.node)
    drain()
    world.kernel_says(lost.node, XID_48)
    quarantine(world, lost.node)
    assert lost.node.state != NodeState.ALLOCATED
    assert run_of("repair-node").context["urgency"] == Urgency.NOW
    assert set(Failure.objects.values_list("code", flat=True)) == {"ecc-drift", "xid-48"}
    assert Incident.objects.get().severity == Severity.MAJOR


def test_a_replica_that_dies_on_a_drifting_node_waits_for_no_checkpoint(world: World) -> None:
    lost = world.placements[1]
    world.errors_accelerate(lost.node)
    drain()
    world.kill(lost)
    drain()
    assert run_of("repair-node").context["urgency"] == Urgency.NOW
    assert step_of("repair-node", "decide").state == StepState.DONE


def test_errors_that_come_at_a_steady_pace_are_nothing(world: World) -> None:
    world.errors_accelerate(world.placements[1].node, errors=(500.0, 500.0, 500.0))
    drain()
    assert not Failure.objects.exists()
    assert not Incident.objects.exists()
