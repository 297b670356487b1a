"""How often nodes that run jobs fail: what trainers choose their intervals by."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from controlplane.health.choices import Urgency
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Job
from controlplane.jobs.reliability import PUBLISHED_NODE_DAYS, failures_per_node_day
from runtime.checkpoint.interval import FAILURES_PER_NODE_DAY
from tests.factories import FailureFactory, JobFactory, NodeFactory, PlacementFactory

pytestmark = pytest.mark.django_db

EXPECTED = FAILURES_PER_NODE_DAY * PUBLISHED_NODE_DAYS


@pytest.fixture
def job() -> Job:
    made: Job = JobFactory()
    return made


def ran(job: Job, *, began_days_ago: float, ended_days_ago: float | None) -> None:
    """A replica's stay on a node."""
    now = timezone.now()
    placement = PlacementFactory(
        replica__job=job,
        node__cluster=job.cluster,
        state=PlacementState.RUNNING if ended_days_ago is None else PlacementState.ENDED,
        ended_at=None if ended_days_ago is None else now - timedelta(days=ended_days_ago),
    )
    type(placement).objects.filter(pk=placement.pk).update(
        created_at=now - timedelta(days=began_days_ago)
    )


def failed(job: Job, **more: Any) -> None:
    plain: dict[str, Any] = {
        "node": NodeFactory(cluster=job.cluster),
        "job_id": job.pk,
        "urgency": Urgency.NOW,
        "observed_at": timezone.now() - timedelta(days=1),
    }
    FailureFactory(**{**plain, **more})


def test_a_fleet_that_knows_nothing_of_itself_has_the_published_rate(job: Job) -> None:
    assert failures_per_node_day(job.cluster_id) == pytest.approx(FAILURES_PER_NODE_DAY)


def test_failures_count_over_the_days_on_which_nodes_ran_a_job(job: Job) -> None:
    ran(job, began_days_ago=20, ended_days_ago=10)
    ran(job, began_days_ago=5, ended_days_ago=None)
    ran(job, began_days_ago=90, ended_days_ago=40)  # too long ago
    for _ in range(3):
        failed(job)

    rate = failures_per_node_day(job.cluster_id)
    assert rate == pytest.approx((3 + EXPECTED) / (15 + PUBLISHED_NODE_DAYS), rel=1e-3)


def test_what_could_wait_or_hurt_no_job_does_not_count(job: Job) -> None:
    failed(job, urgency=Urgency.IDLE)
    failed(job, job_id="")
    failed(job, observed_at=timezone.now() - timedelta(days=31))
    failed(job, node=NodeFactory())

    assert failures_per_node_day(job.cluster_id) == pytest.approx(FAILURES_PER_NODE_DAY)
