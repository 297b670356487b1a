"""What schedulers ask: which nodes may I use, what changed, keep a spare, not this node."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.utils import timezone

from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Cluster, MaintenanceWindow, Node, Rack
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import ApprovalState, Mode, RunState
from controlplane.incidents.models import PlaybookRun
from controlplane.incidents.plans import plan_of_order
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job, SpareReservation
from node_agent import wire
from tests.controlplane.rest.world import Caller, World, playbooks
from tests.factories import (
    ApprovalFactory,
    ClusterFactory,
    GpuFactory,
    IncidentFactory,
    JobFactory,
    NodeFactory,
    PlaybookRunFactory,
    RackFactory,
    ReplicaFactory,
)


@pytest.fixture
def yard(db: None) -> World:
    """A cluster with nothing in it but what the test puts there."""
    playbooks()
    return World(ClusterFactory())


@pytest.fixture
def scheduler(yard: World) -> Caller:
    return yard.caller("operator")


def node(yard: World, **fields: Any) -> Node:
    made = NodeFactory(cluster=yard.cluster, **fields)
    GpuFactory(node=made, index=0)
    return made


def usable(scheduler: Caller, yard: World, **query: str) -> list[str]:
    answer = scheduler.get(f"/api/v1/clusters/{yard.cluster.pk}/usable-nodes", query)
    assert answer.status_code == 200, answer.content
    return sorted(row["id"] for row in answer.json()["nodes"])


# --- which nodes may I use now --------------------------------------------------------------------


def _held(it: Node) -> None:
    fleet.set_hold(SYSTEM, it.pk, "hands off")


def _drained(it: Node) -> None:
    fleet.set_drained_by(SYSTEM, it.pk, "slurm", "theirs")


def _silent(it: Node) -> None:
    it.lease.last_beat_at = timezone.now() - timedelta(hours=1)
    it.lease.save()


def _revoked(it: Node) -> None:
    fleet.revoke_node_key(SYSTEM, it.pk, "stolen")


def _in_maintenance(it: Node) -> None:
    _window(it, node=it)


def _in_a_rack_in_maintenance(it: Node) -> None:
    _window(it, rack=it.rack)


def _in_a_cluster_in_maintenance(it: Node) -> None:
    _window(it)


def _ordered_out(it: Node) -> None:
    incidents.order_node(SYSTEM, it.pk, "drain", "to be emptied")


def _reserved(it: Node) -> None:
    Node.objects.filter(pk=it.pk).update(spare=True)
    jobs.reserve_spare(SYSTEM, it.cluster_id, holder="another", ttl_s=60, reason="theirs")


def _window(it: Node, rack: Rack | None = None, node: Node | None = None) -> None:
    now = timezone.now()
    MaintenanceWindow.objects.create(
        cluster=it.cluster,
        rack=rack,
        node=node,
        starts_at=now - timedelta(minutes=1),
        ends_at=now + timedelta(minutes=1),
        owner="1",
        reason="cables",
    )


STANDS_IN_THE_WAY = [
    _held,
    _drained,
    _silent,
    _revoked,
    _in_maintenance,
    _in_a_rack_in_maintenance,
    _in_a_cluster_in_maintenance,
    _ordered_out,
    _reserved,
]


@pytest.mark.parametrize("obstacle", STANDS_IN_THE_WAY)
def test_a_node_with_something_in_its_way_is_not_usable(
    obstacle: Any, yard: World, scheduler: Caller
) -> None:
    it = node(yard, rack=RackFactory(cluster=yard.cluster))
    assert usable(scheduler, yard) == [it.pk]

    obstacle(it)

    assert usable(scheduler, yard) == []


def test_a_window_that_is_over_stands_in_nobodys_way(yard: World, scheduler: Caller) -> None:
    it = node(yard)
    _in_a_cluster_in_maintenance(it)
    fleet.close_maintenance(SYSTEM, MaintenanceWindow.objects.get().pk, "done early")

    assert usable(scheduler, yard) == [it.pk]


def test_nodes_are_asked_for_by_model_rack_and_kind(yard: World, scheduler: Caller) -> None:
    rack = RackFactory(cluster=yard.cluster, name="r1")
    near, far = node(yard, rack=rack), node(yard, spare=True)
    far.gpus.update(model="NVIDIA B200")

    assert usable(scheduler, yard, rack="r1") == usable(scheduler, yard, rack=rack.pk) == [near.pk]
    assert usable(scheduler, yard, gpu_model="NVIDIA B200") == [far.pk]
    assert usable(scheduler, yard, spare="true") == [far.pk]


def test_a_job_may_use_what_is_kept_for_it_and_not_what_it_avoids(
    yard: World, scheduler: Caller
) -> None:
    job = JobFactory(cluster=yard.cluster)
    kept, avoided = node(yard, spare=True), node(yard)
    jobs.reserve_spare(
        SYSTEM, yard.cluster.pk, holder="slurm", ttl_s=60, reason="mine", job_id=job.pk
    )
    jobs.exclude_node(SYSTEM, job.pk, avoided.pk, "slow")

    assert usable(scheduler, yard) == [avoided.pk]
    assert usable(scheduler, yard, job=job.pk) == [kept.pk]


def test_what_is_said_of_a_usable_node_is_enough_to_use_it(yard: World, scheduler: Caller) -> None:
    it = node(yard, rack=RackFactory(cluster=yard.cluster, name="r7"), address="10.0.0.7")

    told = scheduler.get(f"/api/v1/clusters/{yard.cluster.pk}/usable-nodes").json()

    assert told["nodes"] == [
        {
            "id": it.pk,
            "name": it.name,
            "address": "10.0.0.7",
            "rack_id": it.rack_id,
            "rack_name": "r7",
            "spare": False,
            "gpu_model": "NVIDIA H200",
            "gpu_count": 1,
        }
    ]
    assert told["change_seq"] == yard.cluster.change_seq


# --- what changed ---------------------------------------------------------------------------------


def changes(scheduler: Caller, yard: World, after: int) -> tuple[int, list[tuple[str, str]]]:
    told = scheduler.get(f"/api/v1/clusters/{yard.cluster.pk}/changes?after={after}").json()
    return told["seq"], [(one["type"], one["id"]) for one in told["changes"]]


def test_what_was_written_since_is_told_once_each_in_the_order_of_commits(
    yard: World, scheduler: Caller
) -> None:
    first, second = node(yard), node(yard)
    seq, _ = changes(scheduler, yard, 0)
    fleet.set_hold(SYSTEM, first.pk, "a")
    fleet.set_hold(SYSTEM, second.pk, "b")
    fleet.set_hold(SYSTEM, first.pk, "c")

    new, told = changes(scheduler, yard, seq)

    assert told == [("node", second.pk), ("node", first.pk)]
    assert new == seq + 3
    assert changes(scheduler, yard, new) == (new, [])


def test_a_node_that_falls_silent_or_returns_is_a_change(yard: World, scheduler: Caller) -> None:
    it = node(yard)
    it.lease.deadline = timezone.now() - timedelta(seconds=1)
    it.lease.save()
    seq, _ = changes(scheduler, yard, 0)

    fleet.lose_leases(timezone.now())
    lost = changes(scheduler, yard, seq)
    fleet.renew_leases({it.pk: timezone.now()}, 30)

    assert lost[1] == changes(scheduler, yard, lost[0])[1] == [("node", it.pk)]


def _placed(job: Job, spare: Node) -> None:
    jobs.place(SYSTEM, ReplicaFactory(job=job).pk, spare.pk, placement_id="plc_1")


def _ended(job: Job, _spare: Node) -> None:
    jobs.end_job(SYSTEM, job.pk, "converged")


def _reserved_anew(job: Job, _spare: Node) -> None:
    SpareReservation.objects.update(expires_at=timezone.now())
    jobs.reserve_spare(SYSTEM, job.cluster_id, holder="another", ttl_s=60, reason="its turn")


@pytest.mark.parametrize("over", [_placed, _ended, _reserved_anew])
def test_a_reservation_that_is_over_is_a_change_and_on_record(
    over: Any, yard: World, scheduler: Caller
) -> None:
    job, spare = JobFactory(cluster=yard.cluster), node(yard, spare=True)
    kept = jobs.reserve_spare(
        SYSTEM, yard.cluster.pk, holder="slurm", ttl_s=60, reason="mine", job_id=job.pk
    )
    seq, _ = changes(scheduler, yard, 0)

    over(job, spare)

    kept.refresh_from_db()
    assert kept.released_at is not None
    assert ("spare_reservation", kept.pk) in changes(scheduler, yard, seq)[1]
    assert AuditEvent.objects.filter(verb="spare.release", object_id=kept.pk).count() == 1


def _automatic(run: PlaybookRun) -> None:
    incidents.set_mode(SYSTEM, run.cluster_id, run.playbook, Mode.AUTOMATIC, "it is trusted")


def _planned_anew(run: PlaybookRun) -> None:
    incidents.request_approval(run, plan_of_order(NodeFactory(cluster=run.cluster), "reboot"))


def _tried_again(run: PlaybookRun) -> None:
    PlaybookRun.objects.update(state=RunState.NEEDS_OPERATOR)
    incidents.retry_run(SYSTEM, run.pk, "the cable is in")


def _cancelled(run: PlaybookRun) -> None:
    incidents.cancel_run(SYSTEM, run.pk, "not now")


@pytest.mark.parametrize("void", [_automatic, _planned_anew, _tried_again, _cancelled])
def test_a_plan_that_is_to_be_signed_no_more_is_a_change(
    void: Any, yard: World, scheduler: Caller
) -> None:
    approval = ApprovalFactory(run__incident__cluster=yard.cluster)
    seq, _ = changes(scheduler, yard, 0)

    void(approval.run)

    approval.refresh_from_db()
    assert approval.state == ApprovalState.VOID
    assert ("approval", approval.pk) in changes(scheduler, yard, seq)[1]


def test_a_repair_that_is_about_more_by_now_is_a_change(yard: World, scheduler: Caller) -> None:
    it = node(yard)
    run = incidents.repair_node(SYSTEM, it.pk, None, "it fell silent", only_if_silent=True)
    seq, _ = changes(scheduler, yard, 0)

    incidents.repair_node(SYSTEM, it.pk, None, "its card fell off the bus")

    assert changes(scheduler, yard, seq)[1] == [("run", run.pk)]


def test_a_run_that_goes_over_to_another_incident_is_a_change(
    yard: World, scheduler: Caller
) -> None:
    other, into = (IncidentFactory(cluster=yard.cluster) for _ in range(2))
    run = PlaybookRunFactory(incident=other)
    seq, _ = changes(scheduler, yard, 0)

    incidents.merge_into(into, [other])

    run.refresh_from_db()
    assert run.incident == into
    assert ("run", run.pk) in changes(scheduler, yard, seq)[1]


def test_long_news_come_in_parts_and_none_is_missed(
    yard: World, scheduler: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.incidents.api.CHANGES_WINDOW", 2)
    nodes = [node(yard) for _ in range(7)]
    for it in nodes:
        fleet.set_hold(SYSTEM, it.pk, "x")

    told, seq, more = [], 0, True
    while more:
        path = f"/api/v1/clusters/{yard.cluster.pk}/changes?after={seq}"
        part = scheduler.get(path).json()
        told += [one["id"] for one in part["changes"]]
        seq, more = part["seq"], part["more"]

    assert told == [it.pk for it in nodes]
    assert seq == Cluster.objects.get().change_seq


def test_a_change_that_was_rolled_back_is_none(yard: World, scheduler: Caller) -> None:
    it = node(yard)
    seq, _ = changes(scheduler, yard, 0)

    scheduler.order(f"/api/v1/nodes/{it.pk}/hold?dry_run=true", {"reason": "x"})

    assert changes(scheduler, yard, seq) == (seq, [])


def test_another_clusters_news_are_nobodys_business(yard: World, stranger_to: Caller) -> None:
    path = f"/api/v1/clusters/{yard.cluster.pk}/changes"

    assert stranger_to.get(path).status_code == 404


@pytest.fixture
def stranger_to(yard: World) -> Caller:
    return World(ClusterFactory()).caller("admin")


# --- a job, from its scheduler --------------------------------------------------------------------


def test_a_job_from_registration_to_its_end(yard: World, scheduler: Caller) -> None:
    body = {"cluster": yard.cluster.name, "name": "llm", "program": "train", "world_replicas": 2}
    job = scheduler.order("/api/v1/jobs", body).json()["result"]
    path = f"/api/v1/jobs/{job['id']}"
    assert [replica["state"] for replica in job["replicas"]] == ["pending", "pending"]

    told = scheduler.order(f"{path}/progress", {"step": 12, "loss": 2.5}).json()["result"]
    assert (told["state"], told["step"], told["loss"]) == ("running", 12, 2.5)

    ended = scheduler.order(f"{path}/end", {"reason": "converged"}).json()["result"]
    assert (ended["state"], ended["ended_at"] is not None) == ("stopped", True)
    assert scheduler.order(f"{path}/progress", {"step": 13}).status_code == 409
    assert scheduler.order(f"{path}/end", {"reason": "again"}).status_code == 409


def test_a_replica_may_be_on_several_nodes(yard: World, scheduler: Caller) -> None:
    body = {"cluster": yard.cluster.name, "name": "wide", "program": "train", "world_replicas": 1}
    job = scheduler.order("/api/v1/jobs", {**body, "nodes_per_replica": 2}).json()["result"]

    shape = (job["nodes_per_replica"], job["gpus_per_replica"], job["whole"])
    assert shape == (2, 16, True)
    assert job["replicas"][0]["placements"] == []


@pytest.mark.parametrize(
    ("fields", "field", "told"),
    [
        ({"world_replicas": 2}, "nodes_per_replica", "set world_replicas to 1"),
        ({"warm_spares": 1}, "warm_spares", "leave it at 0"),
        ({"gpus_per_replica": 9}, "gpus_per_replica", "give a multiple of 2"),
        ({"nodes_per_replica": 0}, "nodes_per_replica", "greater than or equal to 1"),
    ],
)
def test_what_several_nodes_do_not_allow_is_refused_with_the_remedy(
    yard: World, scheduler: Caller, fields: dict[str, int], field: str, told: str
) -> None:
    body = {"cluster": yard.cluster.name, "name": "wide", "program": "train", "world_replicas": 1}
    answer = scheduler.order("/api/v1/jobs", {**body, "nodes_per_replica": 2, **fields})

    assert answer.status_code == 400
    (error,) = answer.json()["errors"]
    assert error["field"] == field
    assert told in error["detail"]


@pytest.mark.parametrize("program", ["Train", "train_gpt", "train."])
def test_a_program_that_no_agent_can_name_is_refused(
    yard: World, scheduler: Caller, program: str
) -> None:
    body = {"cluster": yard.cluster.name, "name": "llm", "program": program, "world_replicas": 1}
    answer = scheduler.order("/api/v1/jobs", body)

    assert answer.status_code == 400
    assert [error["field"] for error in answer.json()["errors"]] == ["program"]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(program, wire.Name)


@pytest.mark.parametrize("state", ["pending", "starting", "stopping", "stopped"])
def test_of_a_job_that_does_not_run_no_checkpoint_is_asked(
    yard: World, scheduler: Caller, state: str
) -> None:
    job = JobFactory(cluster=yard.cluster, name="llm", state=state)
    order = {"verb": "checkpoint", "reason": "maintenance at six"}
    answer = scheduler.order(f"/api/v1/jobs/{job.pk}/directives", order)

    assert answer.status_code == 409
    assert answer.json()["detail"] == f"llm is {state}: nobody is there to obey"
    assert not job.directives.exists()


def test_two_reservations_never_hold_the_same_spare(yard: World, scheduler: Caller) -> None:
    spares = {node(yard, spare=True).pk for _ in range(2)}
    body = {"cluster": yard.cluster.pk, "holder": "slurm", "ttl_s": 60, "reason": "x"}

    first, second = (scheduler.order("/api/v1/spares/reserve", body).json() for _ in range(2))
    third = scheduler.order("/api/v1/spares/reserve", body)

    assert {first["result"]["node_id"], second["result"]["node_id"]} == spares
    assert third.status_code == 409


def test_a_spare_that_is_about_to_be_taken_out_is_not_reserved(
    yard: World, scheduler: Caller
) -> None:
    leaving, staying = (node(yard, spare=True, name=name) for name in ("a", "b"))
    _ordered_out(leaving)
    body = {"cluster": yard.cluster.pk, "holder": "slurm", "ttl_s": 60, "reason": "x"}

    reserved = scheduler.order("/api/v1/spares/reserve", body).json()["result"]
    refused = scheduler.order("/api/v1/spares/reserve", body)

    assert reserved["node_id"] == staying.pk
    assert refused.status_code == 409


def test_a_reservation_whose_time_is_up_holds_nothing(yard: World, scheduler: Caller) -> None:
    it = node(yard, spare=True)
    body = {"cluster": yard.cluster.pk, "holder": "slurm", "ttl_s": 60, "reason": "x"}
    scheduler.order("/api/v1/spares/reserve", body)
    SpareReservation.objects.update(expires_at=timezone.now())

    assert usable(scheduler, yard) == [it.pk]
    assert scheduler.order("/api/v1/spares/reserve", body).status_code == 201


def test_the_keeper_gives_back_what_has_expired(yard: World) -> None:
    node(yard, spare=True)
    jobs.reserve_spare(SYSTEM, yard.cluster.pk, holder="slurm", ttl_s=60, reason="x")

    assert jobs.expire_reservations(timezone.now()) == 0
    assert jobs.expire_reservations(timezone.now() + timedelta(minutes=2)) == 1
    assert SpareReservation.objects.get().released_at is not None
