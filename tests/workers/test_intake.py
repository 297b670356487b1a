"""From signal to incident: merged by what it is about, old news ignored, each handled once."""

from __future__ import annotations

from unittest.mock import DEFAULT, Mock

import pytest
from django.utils import timezone

from controlplane.fleet.models import Lease
from controlplane.health.choices import SignalKind
from controlplane.health.models import Failure, Signal
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Placement
from tests.factories import JobFactory, NodeFactory, PlacementFactory, ReplicaFactory, SignalFactory
from workers import intake, losses
from workers.intake.silence import node_went_silent

pytestmark = pytest.mark.django_db


@pytest.fixture
def placement() -> Placement:
    made: Placement = PlacementFactory(replica=ReplicaFactory(index=2))
    return made


def peer_lost(placement: Placement) -> Signal:
    signal: Signal = SignalFactory(
        kind=SignalKind.PEER_LOST,
        node=None,
        job_id=placement.replica.job_id,
        replica=placement.replica.index,
        placement_id=placement.pk,
        data={"how": "reset", "step": 7},
    )
    return signal


def process_exited(placement: Placement) -> Signal:
    signal: Signal = SignalFactory(
        kind=SignalKind.PROCESS_EXITED,
        node=placement.node,
        job_id=placement.replica.job_id,
        replica=placement.replica.index,
        placement_id=placement.pk,
        data={"kind": "rank", "signal": 9, "pid": 1},
    )
    return signal


def lease_lost(placement: Placement) -> Signal:
    signal: Signal = SignalFactory(kind=SignalKind.LEASE_LOST, node=placement.node)
    return signal


def test_peers_agent_and_lease_speak_of_one_incident(placement: Placement) -> None:
    peer_lost(placement)
    process_exited(placement)
    Lease.objects.filter(pk=placement.node_id).update(reachable=False)
    lease_lost(placement)
    assert intake.triage_signals() == 3
    incident = Incident.objects.get()
    assert incident.replica == 2
    assert incident.timeline.filter(kind="signal").count() == 3
    assert PlaybookRun.objects.get().playbook == "replica-lost"


def test_another_job_s_word_is_no_loss_of_a_process(placement: Placement) -> None:
    told = peer_lost(placement)
    Signal.objects.filter(pk=told.pk).update(job_id=JobFactory().pk)
    intake.triage_signals()

    assert not Incident.objects.exists()
    assert not losses.told_gone(placement)


def test_the_incident_began_when_the_first_observer_saw_it(placement: Placement) -> None:
    late, early = process_exited(placement), peer_lost(placement)
    earlier = timezone.now().replace(year=2020)
    Signal.objects.filter(pk=early.pk).update(observed_at=earlier)
    Signal.objects.filter(pk=late.pk).update(recorded_at=earlier)  # triaged first
    intake.triage_signals()
    assert Incident.objects.get().occurred_at == earlier


def test_a_signal_is_handled_once(placement: Placement) -> None:
    peer_lost(placement)
    assert intake.triage_signals() == 1
    assert intake.triage_signals() == 0


def test_news_of_a_placement_that_has_ended_opens_nothing(placement: Placement) -> None:
    Placement.objects.filter(pk=placement.pk).update(state=PlacementState.ENDED)
    process_exited(placement)
    intake.triage_signals()
    assert not Incident.objects.exists()


def test_a_rank_of_a_job_that_was_told_to_stop_is_no_incident(placement: Placement) -> None:
    job = placement.replica.job
    job.state = "stopping"
    job.save()
    process_exited(placement)
    intake.triage_signals()
    assert not Incident.objects.exists()


def test_a_silent_node_without_a_replica_is_an_incident_of_its_own() -> None:
    node = NodeFactory()
    Lease.objects.filter(pk=node.pk).update(reachable=False)
    SignalFactory(kind=SignalKind.LEASE_LOST, node=node)
    intake.triage_signals()
    assert Incident.objects.get().subject == f"node/{node.pk}"
    assert PlaybookRun.objects.get().playbook == "repair-node"


def test_a_lost_lease_of_a_node_that_is_heard_again_is_old_news() -> None:
    SignalFactory(kind=SignalKind.LEASE_LOST, node=NodeFactory())
    intake.triage_signals()
    assert not Incident.objects.exists()


def test_the_coordinator_of_a_job_goes_with_its_node() -> None:
    job = JobFactory(coordinator_node=NodeFactory(), coordinator_address="127.0.0.1:4000")
    Lease.objects.filter(pk=job.coordinator_node_id).update(reachable=False)
    SignalFactory(kind=SignalKind.LEASE_LOST, node=job.coordinator_node)
    intake.triage_signals()
    runs = set(PlaybookRun.objects.values_list("playbook", flat=True))
    assert runs == {"repair-node", "restore-coordinator"}


def test_the_end_of_a_coordinator_that_was_replaced_is_old_news() -> None:
    job = JobFactory(coordinator_node=NodeFactory(), coordinator_placement="plc_new")
    data = {"kind": "coordinator", "reason": "reboot"}
    SignalFactory(
        kind=SignalKind.PROCESS_EXITED,
        node=job.coordinator_node,
        placement_id="plc_old",
        data=data,
    )
    intake.triage_signals()
    assert not Incident.objects.exists()


def test_a_signal_that_cannot_be_handled_stops_no_other(placement: Placement) -> None:
    broken = SignalFactory(kind=SignalKind.LEASE_LOST, node=None)
    peer_lost(placement)
    intake.triage_signals()
    broken.refresh_from_db()
    assert broken.triaged_at is not None
    assert Incident.objects.count() == 1


def test_a_signal_whose_failure_another_worker_joins_with_one_meanwhile_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = NodeFactory()
    Lease.objects.filter(pk=silent.pk).update(reachable=False)
    SignalFactory(kind=SignalKind.LEASE_LOST, node=silent)
    went_silent = Mock(
        wraps=node_went_silent, side_effect=[Failure.DoesNotExist("joined"), DEFAULT]
    )
    monkeypatch.setattr(intake, "node_went_silent", went_silent)

    intake.triage_signals()

    assert Incident.objects.get().subject == f"node/{silent.pk}"


def test_a_silent_node_that_is_out_for_repair_opens_nothing() -> None:
    SignalFactory(kind=SignalKind.LEASE_LOST, node=NodeFactory(state="quarantined"))
    intake.triage_signals()
    assert not Incident.objects.exists()


def test_a_silent_node_on_hold_is_in_somebodys_hands() -> None:
    node = NodeFactory(hold_reason="new cables")
    Lease.objects.filter(pk=node.pk).update(reachable=False)
    SignalFactory(kind=SignalKind.LEASE_LOST, node=node)
    intake.triage_signals()
    assert not Incident.objects.exists()


def test_a_signal_about_an_unknown_placement_is_kept_and_harmless() -> None:
    SignalFactory(kind=SignalKind.PROCESS_EXITED, placement_id="plc_x", data={"kind": "rank"})
    assert intake.triage_signals() == 1
    assert not Incident.objects.exists()


def blames(placement: Placement, **data: object) -> Signal:
    """A job says that the replica there is slower than the others, or what else `data` says."""
    told = {"kind": "straggler", "subject": f"replica {placement.replica.index}", "text": "slow"}
    signal: Signal = SignalFactory(
        kind=SignalKind.JOB_TROUBLE,
        node=None,
        job_id=placement.replica.job_id,
        replica=0,
        placement_id="plc_of_who_speaks",
        data={**told, **data},
    )
    return signal


@pytest.mark.parametrize("kind", ["straggler", "diverged"])
def test_what_its_peers_say_of_a_replica_is_a_failure_of_the_node_that_holds_it(
    placement: Placement, kind: str
) -> None:
    blames(placement, kind=kind)
    intake.triage_signals()

    failure = Failure.objects.get()
    assert (failure.code, failure.node, failure.urgency) == (kind, placement.node, "idle")
    assert failure.confidence == "medium"
    assert Incident.objects.get().node == placement.node
    assert not PlaybookRun.objects.exists()


def test_a_straggler_that_is_told_again_is_the_same_one(placement: Placement) -> None:
    for _ in range(2):
        blames(placement)
        intake.triage_signals()

    assert Failure.objects.get().count == 2


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "straggler_recovered"},
        {"subject": "replica x"},
        {"subject": "replica 999"},
        {"subject": None},
        {"kind": "diverged", "subject": ""},
    ],
)
def test_what_blames_no_replica_opens_nothing(
    placement: Placement, data: dict[str, object]
) -> None:
    blames(placement, **data)
    intake.triage_signals()
    assert not Failure.objects.exists()


def reads_back_otherwise(placement: Placement, **data: object) -> None:
    """A rank there says that a tier did not give back what it wrote."""
    told = {"kind": "checkpoint_damaged", "subject": "local", "text": "step 5, local: a bit"}
    SignalFactory(
        kind=SignalKind.JOB_TROUBLE,
        node=None,
        job_id=placement.replica.job_id,
        replica=placement.replica.index,
        placement_id=placement.pk,
        data={**told, **data},
    )


@pytest.mark.parametrize(
    ("tier", "code"), [("local", "checkpoint_damaged"), ("peer", "memory_damaged")]
)
def test_a_disk_or_memory_that_gives_back_other_bytes_is_a_failure_of_its_node_alone(
    placement: Placement, tier: str, code: str
) -> None:
    """Also where the replica is on several, of which each has its own."""
    other = PlacementFactory(replica=placement.replica, node_rank=1)
    reads_back_otherwise(other, subject=tier)
    intake.triage_signals()

    failure = Failure.objects.get()
    assert (failure.code, failure.node, failure.urgency) == (code, other.node, "idle")
    assert Incident.objects.get().node == other.node
    assert not PlaybookRun.objects.exists()


def test_a_node_s_disk_and_its_memory_are_two_faults(placement: Placement) -> None:
    for tier in ("local", "peer"):
        reads_back_otherwise(placement, subject=tier)
    intake.triage_signals()

    found = {*Failure.objects.values_list("code", "node", "count")}
    assert found == {
        ("checkpoint_damaged", placement.node_id, 1),
        ("memory_damaged", placement.node_id, 1),
    }


@pytest.mark.parametrize(
    "data", [{"subject": "shared"}, {"subject": "object"}, {"kind": "checkpoint_stale"}]
)
def test_what_is_no_fault_of_a_node_s_own_disk_or_memory_opens_nothing(
    placement: Placement, data: dict[str, object]
) -> None:
    reads_back_otherwise(placement, **data)
    intake.triage_signals()
    assert not Failure.objects.exists()


def test_of_several_nodes_of_a_replica_none_is_blamed(placement: Placement) -> None:
    PlacementFactory(replica=placement.replica, node_rank=1)
    blames(placement)
    intake.triage_signals()
    assert not Failure.objects.exists()
