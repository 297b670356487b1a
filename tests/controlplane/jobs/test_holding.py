"""Spares kept for jobs, nodes kept from jobs, and how a job ends."""

from __future__ import annotations

import time

import pytest

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet.models import Cluster, Node
from controlplane.incidents.actions.job_end import end_job
from controlplane.incidents.candidates import free_nodes
from controlplane.incidents.choices import IncidentState, RunState
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JobState, PlacementState
from controlplane.jobs.models import Directive, Job, Placement, SpareReservation
from runtime import client
from tests.factories import (
    ClusterFactory,
    IncidentFactory,
    JobFactory,
    NodeFactory,
    PlacementFactory,
    PlaybookRunFactory,
    ProgressSampleFactory,
    ReplicaFactory,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def cluster() -> Cluster:
    return ClusterFactory()


def reserve(cluster: Cluster, job_id: str | None = None) -> SpareReservation:
    return jobs.reserve_spare(
        SYSTEM, cluster.pk, holder="slurm", ttl_s=60, reason="x", job_id=job_id
    )


def free(cluster: Cluster, job_id: str | None = None) -> set[str]:
    return {candidate.node_id for candidate in free_nodes(cluster.pk, job_id)}


def test_a_reserved_spare_is_free_for_its_job_only(cluster: Cluster) -> None:
    job, spare = JobFactory(cluster=cluster), NodeFactory(cluster=cluster, spare=True)

    reserve(cluster, job.pk)

    assert free(cluster) == free(cluster, JobFactory(cluster=cluster).pk) == set()
    assert free(cluster, job.pk) == {spare.pk}


def test_an_excluded_node_is_free_for_others(cluster: Cluster) -> None:
    job, node = JobFactory(cluster=cluster), NodeFactory(cluster=cluster)

    jobs.exclude_node(SYSTEM, job.pk, node.pk, "slow")
    assert (free(cluster, job.pk), free(cluster)) == (set(), {node.pk})

    jobs.include_node(SYSTEM, job.pk, node.pk, "repaired")
    assert free(cluster, job.pk) == {node.pk}


def test_a_node_is_excluded_once_and_only_in_its_cluster(cluster: Cluster) -> None:
    job, node = JobFactory(cluster=cluster), NodeFactory(cluster=cluster)
    jobs.exclude_node(SYSTEM, job.pk, node.pk, "slow")

    with pytest.raises(Conflict, match="already"):
        jobs.exclude_node(SYSTEM, job.pk, node.pk, "slow")
    with pytest.raises(Conflict, match="no such node"):
        jobs.exclude_node(SYSTEM, job.pk, NodeFactory().pk, "slow")
    with pytest.raises(Conflict, match="not kept"):
        jobs.include_node(SYSTEM, job.pk, NodeFactory(cluster=cluster).pk, "why")


def test_placing_the_job_uses_its_reservation_up(cluster: Cluster) -> None:
    replica = ReplicaFactory(job__cluster=cluster)
    spare: Node = NodeFactory(cluster=cluster, spare=True)
    reservation = reserve(cluster, replica.job_id)

    jobs.place(SYSTEM, replica.pk, spare.pk, placement_id="plc_1")

    reservation.refresh_from_db()
    assert reservation.released_at is not None
    with pytest.raises(Conflict, match="over"):
        jobs.release_spare(SYSTEM, reservation.pk, "again")


@pytest.mark.parametrize("model", ["NVIDIA B200", ""])
def test_a_spare_that_does_not_fit_is_not_kept(cluster: Cluster, model: str) -> None:
    NodeFactory(cluster=cluster, spare=False)

    with pytest.raises(Conflict, match="no spare that fits"):
        jobs.reserve_spare(
            SYSTEM, cluster.pk, holder="slurm", ttl_s=60, reason="x", gpu_model=model
        )


# --- how a job ends -------------------------------------------------------------------------------


def test_a_job_ends_when_its_last_rank_has_left() -> None:
    first: Placement = PlacementFactory()
    job = first.replica.job
    second: Placement = PlacementFactory(replica__job=job)

    assert jobs.request_stop(SYSTEM, job.pk, "done").state == JobState.STOPPING
    assert Directive.objects.get(job=job).verb == "stop"
    with pytest.raises(Conflict, match="still run"):
        jobs.end_job(SYSTEM, job.pk, "done")

    states = []
    for placement in (first, second):
        jobs.end_placement(SYSTEM, placement.pk, "left", free_node=True)
        job.refresh_from_db()
        states.append(job.state)
    assert states == [JobState.STOPPING, JobState.STOPPED]
    assert job.ended_at is not None


def test_nothing_brings_an_ended_job_back() -> None:
    placement: Placement = PlacementFactory()
    job = placement.replica.job
    incident = IncidentFactory(cluster=job.cluster, job=job)
    run = PlaybookRunFactory(incident=incident, job=job, state=RunState.RUNNING)

    end_job(SYSTEM, job.pk, "converged")

    run.refresh_from_db()
    incident.refresh_from_db()
    assert (run.state, incident.state) == (RunState.CANCELLED, IncidentState.RESOLVED)
    placement.refresh_from_db()
    assert placement.state == PlacementState.RUNNING  # it leaves by itself, at a step's edge


def told(job: Job, *messages: client.Message) -> client.Reply:
    """What a rank hears that the job's own scheduler started."""
    batch = client.Batch(
        job=job.pk, replica=0, rank=0, placement="step-7", sent_at=time.time(), messages=[]
    )
    return jobs.record_runtime_batch(job.pk, batch, list(messages))


def test_ranks_that_a_scheduler_started_are_heard_and_hear_that_their_job_is_ended() -> None:
    job = JobFactory(state=JobState.PENDING, started_at=None)
    told(
        job,
        client.Progress(
            step=4, steps=5, epoch=1, at=time.time(), loss=3.0, grad_norm=1.0, step_s=0.1,
            max_gap_s=0.2, samples=120, tokens=120, replicas=[0],
        ),
    )  # fmt: skip
    job.refresh_from_db()
    assert (job.state, job.started_at is not None) == (JobState.RUNNING, True)

    ended = jobs.request_stop(SYSTEM, job.pk, "converged")

    assert ended.state == JobState.STOPPED
    assert [one["verb"] for one in told(job).directives] == ["stop"]


def test_ranks_that_have_not_told_of_a_step_yet_are_told_to_stop_once_they_do() -> None:
    job = JobFactory()

    assert jobs.request_stop(SYSTEM, job.pk, "converged").state == JobState.STOPPED
    assert [one["verb"] for one in told(job).directives] == ["stop"]


def test_ranks_that_report_are_believed_more_than_their_scheduler() -> None:
    job = JobFactory()
    ProgressSampleFactory(job=job)

    with pytest.raises(Conflict, match="own progress"):
        jobs.record_progress(SYSTEM, job.pk, step=3)


def test_progress_that_is_told_late_changes_nothing() -> None:
    job = JobFactory()
    jobs.record_progress(SYSTEM, job.pk, step=10)
    newest = jobs.record_progress(SYSTEM, job.pk, step=9, at=job.created_at)

    assert newest.step == 10
