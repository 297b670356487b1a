"""One incident where there is one cause, whatever tells of it and in whatever order."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import Command, Gpu, Node
from controlplane.health.actions import record_events, record_signal
from controlplane.health.choices import SignalKind
from controlplane.health.models import Failure
from controlplane.incidents import actions as incidents
from controlplane.incidents import limits, pricing
from controlplane.incidents.choices import IncidentState, RunState
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.jobs.models import Job, Placement
from node_agent import wire
from tests.factories import (
    GpuFactory,
    InterruptionFactory,
    JobFactory,
    NodeFactory,
    PlacementFactory,
    PlaybookRunFactory,
    RackFactory,
    ReplicaFactory,
)
from tests.workers.world import World, answer, drain, rejoin, reset_and_watched
from workers import engine, intake

pytestmark = pytest.mark.django_db

PCI = "NVRM: Xid (PCI:0000:1b:00):"
XID_31 = f"{PCI} 31, pid=7, name=python3, Ch 0000000d, intr 0. MMU Fault"
XID_45 = f"{PCI} 45, pid=7, name=python3, Ch 00000008"
XID_54 = f"{PCI} 54, Auxiliary power is not connected"
XID_63 = f"{PCI} 63, pid=7, name=python3, Row Remapper: New row marked"
XID_79 = f"{PCI} 79, pid=7, name=python3, GPU has fallen off the bus."
XID_95 = f"{PCI} 95, pid=7, name=python3, Ch 00000008"
XID_119 = f"{PCI} 119, pid=7, name=python3, Timeout after 6s of waiting for RPC response"
LOST = "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus."
XID_74 = "NVRM: Xid (PCI:0000:{bus}:00): 74, pid=7, name=python3, NVLink: fatal error detected on link 0(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"  # noqa: E501


# --- one job ----------------------------------------------------------------------------------


def test_replicas_that_are_lost_together_are_one_incident(world: World) -> None:
    for placement in world.placements:
        world.exits(placement, exit_code=1)
    drain()

    incident = Incident.objects.get()
    assert (incident.job, incident.replica) == (world.job, None)
    assert incident.title == f"{world.job.name} lost 2 replicas: process-exited"
    assert pricing.replicas_of(incident) == [0, 1]
    assert Failure.objects.get().count == 2
    assert incident.runs.filter(playbook="replica-lost").count() == 2


def test_it_is_resolved_once_all_of_them_are_back(world: World) -> None:
    for placement in world.placements:
        world.exits(placement, exit_code=1)
        world.survivors_commit(placement)
    drain()
    answer("start_rank", pid=2)
    world.join(world.placement_of(0))
    drain()
    assert Incident.objects.get().unresolved
    answer("start_rank", pid=2)
    world.join(world.placement_of(1))
    drain(8)

    incident = Incident.objects.get()
    assert incident.state == IncidentState.RESOLVED
    assert "replica 0, 1" in incident.postmortem
    assert incident.gpu_seconds_lost is not None


def crash(world: World) -> None:
    """Both replicas end, and are told to start again."""
    for placement in world.placements:
        world.exits(placement, exit_code=1)
        world.survivors_commit(placement)
    drain()
    answer("start_rank", pid=2)
    drain()


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 0)])
def test_all_replicas_are_back_once_the_last_of_them_trains(
    world: World, first: int, last: int
) -> None:
    crash(world)
    world.join(world.placement_of(first))
    drain()
    early = Incident.objects.get().restored_at
    world.join(world.placement_of(last))
    drain()

    assert early is None
    assert Incident.objects.get().restored_at == world.placement_of(last).joined_at


@pytest.mark.parametrize("last", [0, 1])
def test_they_are_back_since_the_last_one_trained_whichever_is_looked_at_last(
    world: World, last: int
) -> None:
    crash(world)
    for index in (0, 1):
        world.join(world.placement_of(index))
    later = timezone.now() + timedelta(seconds=1)
    Placement.objects.filter(pk=world.placement_of(last).pk).update(joined_at=later)
    drain()

    assert Incident.objects.get().restored_at == later


def test_not_all_are_back_where_nobody_brings_one_back(world: World) -> None:
    crash(world)
    runs = PlaybookRun.objects.filter(playbook="replica-lost")
    incidents.cancel_run(SYSTEM, runs.get(context__replica=0).pk, "by hand")
    world.join(world.placement_of(1))
    drain()

    assert runs.get(context__replica=1).state == RunState.SUCCEEDED
    assert Incident.objects.get().restored_at is None


def test_all_are_back_once_the_last_one_is_known_to_train_on(world: World) -> None:
    lost, starved = world.placements
    world.kill(lost)
    world.peers_lose(starved)
    drain()
    answer("start_rank", pid=2)
    back = world.placement_of(0)
    world.join(back)
    drain()
    early = Incident.objects.get().restored_at
    InterruptionFactory(job=world.job, entered=[starved.pk], started_at=timezone.now())
    drain()

    assert early is None
    back.refresh_from_db()
    assert Incident.objects.get().restored_at == back.joined_at


def test_replicas_that_are_lost_one_after_the_other_are_told_apart(world: World) -> None:
    world.exits(world.placements[0], exit_code=1)
    drain()
    Incident.objects.update(occurred_at=timezone.now() - timedelta(minutes=2))
    world.exits(world.placements[1], exit_code=1)
    drain()

    assert set(Incident.objects.values_list("replica", flat=True)) == {0, 1}


@pytest.mark.parametrize("first", ["hardware", "programs"])
def test_of_a_crash_the_card_that_began_it_is_the_cause(world: World, first: str) -> None:
    broken, other = world.placements
    if first == "hardware":
        world.kernel_says(broken.node, XID_79)
        drain()
    world.exits(other, exit_code=1)
    world.exits(broken, signal=6)
    drain()
    if first == "programs":
        world.kernel_says(broken.node, XID_79)
        drain()

    incident = Incident.objects.get()
    assert incident.code == "xid-79"
    assert incident.title.endswith(": xid-79") or "xid-79" in incident.title
    assert set(Failure.objects.values_list("incidents", flat=True)) == {incident.pk}
    other.node.refresh_from_db()
    assert other.node.state == NodeState.ALLOCATED


class Crowd:
    """A job of many replicas, each on a node of its own."""

    def __init__(self, nodes: int) -> None:
        self.job: Job = JobFactory(world_replicas=nodes, gpus_per_replica=1)
        self.placements: list[Placement] = []
        for index in range(nodes):
            node = NodeFactory(cluster=self.job.cluster, state=NodeState.ALLOCATED, boot_id="b")
            GpuFactory(node=node, index=0, pci_address="00000000:1B:00.0")
            replica = ReplicaFactory(job=self.job, index=index)
            self.placements.append(PlacementFactory(replica=replica, node=node))

    def crash(self) -> None:
        """All processes end, and the driver tidies up after each."""
        for index, one in enumerate(self.placements):
            ended = {
                "job": self.job.pk, "replica": index, "rank": 0, "placement": one.pk, "pid": 7,
                "kind": "rank", "exit_code": 1, "signal": None, "requested": False,
            }  # fmt: skip
            told: dict[str, Any] = {"at": time.time(), "boot_id": "b", "source": "agent"}
            record_events(
                one.node_id,
                [
                    wire.Event(id=f"line-{index}", kind="kernel_line", raw=XID_45, **told),
                    wire.Event(id=f"exit-{index}", kind="process_exited", data=ended, **told),
                ],
            )


def test_one_job_s_crash_over_77_nodes_is_one_incident_and_no_node_is_drained() -> None:
    crowd = Crowd(77)
    crowd.crash()
    while intake.triage_signals() + engine.create_steps():
        pass
    for _ in range(4 * 77):  # whatever waits for its node is not waited for
        engine.take_step("test")

    incident = Incident.objects.get()
    assert incident.title == f"{crowd.job.name} lost 77 replicas: process-exited"
    assert incident.timeline.filter(kind="signal").count() == 2 * 77
    failure = Failure.objects.get()
    assert (failure.code, failure.count, failure.fault_class) == ("process-exited", 77, "program")
    assert set(Node.objects.values_list("state", flat=True)) == {NodeState.ALLOCATED}
    assert set(PlaybookRun.objects.values_list("playbook", flat=True)) == {"replica-lost"}
    assert not Command.objects.exclude(verb="start_rank").exists()


# --- one node, one rack ---------------------------------------------------------------------------


def test_nvlink_peers_of_one_node_are_one_incident(world: World) -> None:
    node = world.placements[1].node
    GpuFactory(node=node, index=1, pci_address="00000000:43:00.0")
    world.kernel_says(node, XID_74.format(bus="1b"), XID_74.format(bus="43"))
    drain()

    incident = Incident.objects.get()
    assert incident.failures.count() == 2


@pytest.fixture
def rack(world: World) -> list[Node]:
    """Four idle nodes of one rack."""
    rack = RackFactory(cluster=world.cluster)
    nodes = [
        NodeFactory(cluster=world.cluster, rack=rack, state=NodeState.AVAILABLE, boot_id="b")
        for _ in range(4)
    ]
    for node in nodes:
        GpuFactory(node=node, index=0, pci_address="00000000:1B:00.0")
    return nodes


def test_one_fault_on_many_nodes_of_a_rack_is_one_incident_of_the_rack(
    world: World, rack: list[Node]
) -> None:
    for node in rack[:2]:
        world.kernel_says(node, XID_54)
        drain()
    assert Incident.objects.count() == 2
    world.kernel_says(rack[2], XID_54)
    world.kernel_says(rack[3], XID_54)
    drain()

    incident = Incident.objects.get(state__in=["open", "mitigating"])
    name = rack[0].rack.name if rack[0].rack else ""
    assert incident.title == f"xid-54 on 4 of 4 nodes of rack {name}"
    assert incident.failures.count() == 4
    merged = Incident.objects.exclude(pk=incident.pk)
    assert {one.state for one in merged} == {IncidentState.RESOLVED}
    assert all(one.timeline.filter(key="merged", data__into=incident.pk).exists() for one in merged)


def test_what_a_rack_shares_began_with_the_first_of_its_nodes_and_costs_all_of_them(
    world: World, rack: list[Node]
) -> None:
    world.kernel_says(rack[0], XID_54)
    drain()
    first = Incident.objects.get()
    Incident.objects.update(occurred_at=first.occurred_at - timedelta(seconds=100))
    fleet.transition(SYSTEM, rack[0].pk, NodeState.QUARANTINED, reason="its power")
    out_at = first.occurred_at - timedelta(seconds=60)
    AuditEvent.objects.filter(object_id=rack[0].pk, verb="node.transition").update(at=out_at)
    for node in rack[1:]:
        world.kernel_says(node, XID_54)
    drain()

    shared = Incident.objects.exclude(state=IncidentState.RESOLVED).get()
    assert shared.occurred_at == first.occurred_at - timedelta(seconds=100)
    PlaybookRunFactory(incident=shared, node=rack[0])
    (part,) = pricing.parts(shared, first.occurred_at)
    assert part == {"part": pricing.NODE_OUT, "gpu_seconds": 60.0}


def test_what_a_rack_shares_did_not_begin_with_what_one_of_its_nodes_had_long_before(
    world: World, rack: list[Node]
) -> None:
    world.kernel_says(rack[0], XID_54)
    drain()
    Incident.objects.update(occurred_at=timezone.now() - timedelta(days=20))
    for node in rack[1:]:
        world.kernel_says(node, XID_54)
    drain()

    shared = Incident.objects.exclude(state=IncidentState.RESOLVED).get()
    assert shared.occurred_at > timezone.now() - timedelta(hours=1)


def test_what_a_rack_shares_keeps_no_job_from_being_mended(world: World) -> None:
    rack = RackFactory(cluster=world.cluster)
    nodes = [world.placements[0].node, world.placements[1].node, world.spares[0]]
    Node.objects.filter(pk__in=[node.pk for node in nodes]).update(rack=rack)
    for node in nodes:
        world.kernel_says(node, XID_79)
    for placement in world.placements:
        world.exits(placement, signal=6)
    drain()

    unresolved = Incident.objects.exclude(state=IncidentState.RESOLVED)
    subjects = set(unresolved.values_list("subject", flat=True))
    assert subjects == {f"job/{world.job.pk}", f"rack/{rack.pk}/xid-79"}
    lost = PlaybookRun.objects.filter(playbook="replica-lost")
    assert {run.incident.subject for run in lost if run.incident} == {f"job/{world.job.pk}"}
    assert Incident.objects.get(subject=f"job/{world.job.pk}").title.endswith("2 replicas: xid-79")
    assert not any("share" in objection for objection in limits.objections(nodes[2]))


def test_one_fault_on_many_nodes_of_a_switch_is_one_incident_of_the_switch(world: World) -> None:
    nodes = [
        NodeFactory(
            cluster=world.cluster, switch="leaf-3", state=NodeState.AVAILABLE,
            rack=RackFactory(cluster=world.cluster),
        )
        for _ in range(4)
    ]  # fmt: skip
    NodeFactory(cluster=world.cluster, switch="leaf-4")
    for node in nodes[:3]:
        GpuFactory(node=node, index=0, pci_address="00000000:1B:00.0")
        world.kernel_says(node, XID_54)
    drain()

    incident = Incident.objects.exclude(state=IncidentState.RESOLVED).get()
    assert incident.title == "xid-54 on 3 of 4 nodes of switch leaf-3"


def test_nodes_that_name_no_switch_share_none(world: World) -> None:
    for _ in range(4):
        node = NodeFactory(cluster=world.cluster, state=NodeState.AVAILABLE)
        GpuFactory(node=node, index=0, pci_address="00000000:1B:00.0")
        world.kernel_says(node, XID_54)
    drain()
    assert {one.subject.split("/")[0] for one in Incident.objects.all()} == {"node"}


def test_a_program_s_error_on_a_whole_rack_is_no_fault_of_the_rack(
    world: World, rack: list[Node]
) -> None:
    for node in rack:
        world.kernel_says(node, XID_31)
    drain()
    assert not Incident.objects.exists()


def test_nodes_that_failed_and_were_repaired_one_after_the_other_share_nothing(
    world: World, rack: list[Node]
) -> None:
    for node in rack:
        world.kernel_says(node, XID_54)
        drain()
        fleet.record_repair(node.pk, Rung.REBOOT, f"stp_{node.pk}")
    assert {one.subject.split("/")[0] for one in Incident.objects.all()} == {"node"}


def test_two_nodes_of_a_rack_are_not_many(world: World, rack: list[Node]) -> None:
    for node in rack[:2]:
        world.kernel_says(node, XID_54)
    drain()
    assert {one.subject for one in Incident.objects.all()} == {f"node/{n.pk}" for n in rack[:2]}


# --- one burst ------------------------------------------------------------------------------------


def test_a_fault_that_lasts_is_the_same_one_until_it_is_repaired(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_54)
    drain()
    Failure.objects.update(
        observed_at=timezone.now() - timedelta(hours=5),
        last_seen_at=timezone.now() - timedelta(hours=5),
    )
    Node.objects.update(enrolled_at=timezone.now() - timedelta(days=1))
    world.kernel_says(node, XID_54)
    drain()
    assert Failure.objects.get().count == 2

    Incident.objects.update(state=IncidentState.RESOLVED)
    Failure.objects.update(last_seen_at=timezone.now() - timedelta(hours=5))
    world.kernel_says(node, XID_54)
    drain()
    assert Failure.objects.count() == 2


@pytest.mark.parametrize("reading", [("remap_pending", 1.0), ("nvlink_errors", 20.0)])
@pytest.mark.parametrize("line", [XID_95, XID_79])
def test_what_cannot_wait_is_not_put_off_by_what_can(
    world: World, reading: tuple[str, float], line: str
) -> None:
    node = world.placements[1].node
    world.shows(node, *reading)
    drain()
    world.kernel_says(node, line)
    drain()

    failure = Failure.objects.get()
    assert failure.urgency == "now"
    assert Incident.objects.get(state="mitigating").severity == "major"
    repair = PlaybookRun.objects.get(playbook="repair-node")
    assert repair.context["urgency"] == "now"


def an_hour_passes() -> None:
    ago = timezone.now() - timedelta(hours=1)
    Failure.objects.update(observed_at=ago, last_seen_at=ago)


def test_what_waited_until_its_node_was_idle_goes_on_within_what_takes_its_repair_over(
    world: World,
) -> None:
    node = world.placements[1].node
    world.shows(node, "remap_pending")
    drain()
    waited = Incident.objects.get()
    an_hour_passes()
    world.kernel_says(node, XID_79)
    drain()

    graver = Incident.objects.exclude(pk=waited.pk).get()
    waited.refresh_from_db()
    assert waited.state == IncidentState.RESOLVED
    assert waited.timeline.filter(key="merged", data__into=graver.pk).exists()
    assert set(graver.failures.values_list("code", flat=True)) == {"remap-pending", "xid-79"}
    assert PlaybookRun.objects.get(playbook="repair-node").incident == graver


def test_what_somebody_has_to_look_at_stays_open_when_its_node_s_repair_is_taken_over(
    world: World,
) -> None:
    node = world.placements[1].node
    world.shows(node, "throttle_reasons", 64)
    world.shows(node, "remap_pending")
    drain()
    own = Incident.objects.get()
    an_hour_passes()
    world.kernel_says(node, XID_79)
    drain()

    own.refresh_from_db()
    assert own.unresolved
    assert PlaybookRun.objects.get(playbook="repair-node").incident != own


def test_what_only_a_repair_held_open_ends_when_that_goes_on_within_another(world: World) -> None:
    lost = world.placements[1]
    fleet.set_hold(SYSTEM, lost.node_id, "hands off")
    world.kernel_says(lost.node, XID_95)
    world.kill(lost)
    drain()
    rejoin(world, 1)
    left = Incident.objects.get()
    GpuFactory(node=lost.node, index=1, pci_address="00000000:43:00.0")
    world.kernel_says(lost.node, XID_79.replace("1b", "43"))
    drain()

    assert left.unresolved
    graver = Incident.objects.exclude(pk=left.pk).get()
    assert PlaybookRun.objects.get(playbook="repair-node").incident == graver
    left.refresh_from_db()
    assert left.state == IncidentState.RESOLVED
    story = left.timeline.filter(text__contains=f"the repair of {lost.node.name} goes on")
    assert story.exists()


def test_a_node_that_is_lost_is_called_so_though_it_was_hot(world: World) -> None:
    node = world.spares[0]
    world.shows(node, "throttle_reasons", 64)
    drain()
    world.silence(node)
    drain()

    assert Incident.objects.get().code == "node-lost"


def test_a_fault_that_a_person_closed_and_that_is_still_there_is_opened_again(
    world: World,
) -> None:
    world.kernel_says(world.spares[0], XID_54)
    drain()
    for ago in (timedelta(minutes=5), timedelta(hours=2)):
        Incident.objects.update(state=IncidentState.RESOLVED, resolved_at=timezone.now() - ago)
        world.kernel_says(world.spares[0], XID_54)
        drain()
        opened = Incident.objects.exclude(state=IncidentState.RESOLVED).count()
        assert opened == (ago > timedelta(hours=1))


def test_a_graver_word_is_heard_though_its_node_s_incident_becomes_the_rack_s(
    world: World, rack: list[Node]
) -> None:
    world.kernel_says(rack[0], XID_79)
    world.kernel_says(rack[1], XID_79)
    world.kernel_says(rack[2], XID_119)
    drain(1)
    world.kernel_says(rack[2], XID_79)
    drain(1)

    assert Failure.objects.get(node=rack[2]).code == "xid-79"
    repair = PlaybookRun.objects.get(playbook="repair-node", node=rack[2])
    assert repair.context["action"] == "reboot"


def test_however_often_a_lesser_word_is_said_it_hides_no_graver_one(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, *[f"{XID_119} {number}" for number in range(30)])
    while intake.triage_signals():
        pass
    world.kernel_says(node, XID_79)
    intake.triage_signals()

    failure = Failure.objects.get()
    assert (failure.code, failure.count) == ("xid-79", 31)


def second_card_fails(world: World, node: Node) -> None:
    GpuFactory(node=node, index=1, pci_address="00000000:43:00.0")
    world.kernel_says(node, XID_119.replace("1b", "43"))


@pytest.mark.parametrize("first", ["vendor", "reset"])
def test_a_repair_that_is_asked_for_twice_does_the_most_and_as_soon_as_wanted(
    world: World, first: str
) -> None:
    node = world.spares[0]
    card = world.card_of(node)
    told: list[Callable[[], None]] = [
        lambda: record_reading(world, node, "remap_failed"),
        lambda: second_card_fails(world, node),
    ]
    for tell in told if first == "vendor" else told[::-1]:
        tell()
        while intake.triage_signals():
            pass

    wanted = PlaybookRun.objects.get(playbook="repair-node").context
    assert (wanted["action"], wanted["gpu"]) == ("contact_vendor", card.pk)
    assert wanted["urgency"] == "now"


def record_reading(world: World, node: Node, reading: str) -> None:
    record_signal(
        f"{reading}-{node.pk}",
        SignalKind.READING,
        source="keeper",
        observed_at=timezone.now(),
        node=node,
        gpu=Gpu.objects.get(node=node, index=0),
        data={"reading": reading, "value": 1.0},
    )


def test_a_node_that_was_silent_and_comes_back_with_a_fault_is_repaired_for_that(
    world: World,
) -> None:
    node = world.spares[0]
    world.silence(node)
    intake.triage_signals()
    world.hear(node)
    world.kernel_says(node, XID_79)
    drain()

    repair = PlaybookRun.objects.get(playbook="repair-node")
    assert (repair.context["only_if_silent"], repair.context["hardware"]) == (False, True)
    node.refresh_from_db()
    assert node.state != NodeState.AVAILABLE


def test_what_waits_until_a_node_is_idle_ends_its_incident(world: World) -> None:
    node = world.spares[0]
    world.shows(node, "remap_pending")
    drain()
    reset_and_watched(world, node)

    assert Incident.objects.get().state == IncidentState.RESOLVED


def test_a_repair_does_not_end_what_somebody_has_to_look_at(world: World) -> None:
    node = world.spares[0]
    world.shows(node, "throttle_reasons", 64)
    world.shows(node, "remap_pending")
    drain()
    reset_and_watched(world, node)

    assert PlaybookRun.objects.get(playbook="repair-node").state == "succeeded"
    assert Incident.objects.get().unresolved


def test_ports_and_switches_of_a_node_are_not_one_fault(world: World) -> None:
    node = world.spares[0]
    for reading, value in (("port_flaps", 3), ("symbol_errors", 500)):
        record_signal(
            reading, SignalKind.READING, source="keeper", observed_at=timezone.now(), node=node,
            data={"reading": reading, "value": value, "port": "mlx5_0/1"},
        )  # fmt: skip
    drain()

    assert set(Failure.objects.values_list("code", flat=True)) == {"fabric-flaps", "fabric-errors"}
    assert Incident.objects.count() == 1


#: What one card may say in one burst.
LINES = (XID_31, XID_45, XID_63, XID_79, LOST, XID_95, XID_119)


@pytest.fixture
def card() -> Node:
    node = NodeFactory(state=NodeState.AVAILABLE, boot_id="b")
    GpuFactory(node=node, index=0, pci_address="00000000:1B:00.0")
    return node


def made_of(node: Node, events: list[wire.Event], splits: list[int]) -> set[tuple[str, ...]]:
    """The failures and incidents that come of these events, told in this order and these parts."""
    with transaction.atomic():
        begin = 0
        for end in [*sorted({split % (len(events) + 1) for split in splits}), len(events)]:
            if events[begin:end]:
                record_events(node.pk, events[begin:end])
                while intake.triage_signals():
                    pass
            begin = end
        found = {
            (f.code, f.needed, f.urgency, *sorted(i.subject for i in f.incidents.all()))
            for f in Failure.objects.filter(node=node)
        }
        titles = Incident.objects.filter(node=node, state__in=["open", "mitigating"])
        found |= {(one.subject, one.code) for one in titles}
        transaction.set_rollback(True)
    return found


@given(
    said=st.lists(st.sampled_from(LINES), min_size=1, max_size=6, unique=True),
    order=st.randoms(use_true_random=False),
    splits=st.lists(st.integers(0, 12), max_size=4),
    again=st.lists(st.integers(0, 5), max_size=4),
)
@hypothesis_settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_neither_order_nor_duplicates_nor_parts_change_what_comes_of_a_burst(
    card: Node, said: list[str], order: object, splits: list[int], again: list[int]
) -> None:
    now = time.time()
    events = [
        wire.Event(id=f"e{i}", kind="kernel_line", at=now + i, boot_id="b", source="kmsg", raw=line)
        for i, line in enumerate(said)
    ]
    shuffled = [*events, *(events[i % len(events)] for i in again)]
    order.shuffle(shuffled)  # type: ignore[attr-defined]

    assert made_of(card, shuffled, splits) == made_of(card, events, [])
