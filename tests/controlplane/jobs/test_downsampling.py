"""What a job told of its progress long ago is thinned, and tells the same as before."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F, Max, Sum
from django.test.utils import CaptureQueriesContext

from controlplane.jobs import actions, selectors
from controlplane.jobs.actions import downsampling
from controlplane.jobs.models import Job, ProgressSample
from tests.factories import JobFactory, ProgressSampleFactory

pytestmark = pytest.mark.django_db

MINUTE = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
LATER = MINUTE + timedelta(days=30)


@pytest.fixture
def job() -> Job:
    made: Job = JobFactory()
    return made


def told(job: Job, second: float, step: int | None = None, **fields: Any) -> ProgressSample:
    sample: ProgressSample = ProgressSampleFactory(
        job=job,
        step=int(second) if step is None else step,
        at=MINUTE + timedelta(seconds=second),
        **fields,
    )
    return sample


def thin(now: datetime = LATER) -> None:
    while actions.thin_progress(now):
        pass


def sums(job: Job) -> dict[str, Any]:
    """What sums, means and extremes are made of."""
    with_loss = job.progress.exclude(loss=None).aggregate(
        made=Sum("steps"), loss_in_all=Sum(F("loss") * F("steps"))
    )
    return with_loss | job.progress.aggregate(
        steps_in_all=Sum("steps"),
        samples_in_all=Sum("samples"),
        seconds=Sum(F("step_s") * F("steps")),
        longest=Max("max_gap_s"),
        last=Max("step"),
        until=Max("at"),
    )


def varied(job: Job) -> None:
    """Three minutes of it, in two epochs, some of it without a loss."""
    for second in range(180):
        told(
            job,
            second,
            steps=1 + second % 7,
            epoch=1 + second // 100,
            loss=None if second % 11 == 0 else 5.0 - second / 50,
            step_s=0.1 + second / 1000,
            max_gap_s=0.2 + (second % 13) / 10,
            samples=48 * (1 + second % 7),
        )


def test_sums_means_and_longest_gaps_stay_the_same(job: Job) -> None:
    varied(job)
    before = sums(job)

    thin()

    assert sums(job) == {
        name: pytest.approx(value) if isinstance(value, float) else value
        for name, value in before.items()
    }
    assert job.progress.count() == 2 * 4  # each epoch's part of each minute, with a loss or without


def test_the_curves_go_on_through_the_same_points(job: Job) -> None:
    for second in range(0, 600, 2):
        told(job, second, loss=4.0, step_s=0.2)

    thin()

    curve = selectors.series(job, after=None, window_s=None) or {}
    assert curve["step"] == [60 * minute + 58 for minute in range(10)]
    assert curve["loss"] == [4.0] * 10
    assert curve["throughput"] == [240.0] * 10


def test_what_is_kept_is_the_last_that_was_told_in_its_minute(job: Job) -> None:
    told(job, 5, step=90)
    last = told(job, 40, step=70, epoch=1, replicas=[0, 2], grad_norm=7.0)  # it had gone back

    thin()

    kept = job.progress.get()
    assert (kept.pk, kept.step, kept.at) == (last.pk, 70, last.at)
    assert (kept.replicas, kept.grad_norm) == ([0, 2], 7.0)


def test_jobs_are_thinned_each_by_itself(job: Job) -> None:
    for one in (job, JobFactory()):
        told(one, 1)
        told(one, 2)

    thin()

    assert sorted(ProgressSample.objects.values_list("steps", flat=True)) == [20, 20]


def test_what_is_young_stays_as_it_was_told_and_no_minute_is_cut(job: Job) -> None:
    for second in (10, 20, 70, 80):
        told(job, second)

    thin(MINUTE + downsampling.EACH_KEPT + timedelta(seconds=75))

    assert list(job.progress.order_by("step").values_list("step", "thinned")) == [
        (20, True),
        (70, False),
        (80, False),
    ]


def test_a_batch_is_bounded_and_the_next_one_goes_on_where_it_ended(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downsampling, "BATCH", 7)
    varied(job)
    before = sums(job)

    actions.thin_progress(LATER)
    once = job.progress.count()
    thin()

    assert 180 - 7 <= once < 180
    assert job.progress.count() == 2 * 4
    assert sums(job)["steps_in_all"] == before["steps_in_all"]
    assert sums(job)["loss_in_all"] == pytest.approx(before["loss_in_all"])


def test_what_is_told_late_joins_what_stands_for_its_minute(job: Job) -> None:
    told(job, 10, loss=1.0)
    told(job, 20, loss=2.0)
    thin()
    told(job, 15, loss=6.0)

    thin()

    kept = job.progress.get()
    assert (kept.step, kept.steps, kept.samples) == (20, 30, 3 * 480)
    assert kept.loss == pytest.approx(3.0)


def test_thinning_again_changes_nothing(job: Job) -> None:
    varied(job)
    thin()
    before = list(job.progress.order_by("pk").values())

    with CaptureQueriesContext(connection) as queries:
        thin()

    assert len(queries) == 1
    assert list(job.progress.order_by("pk").values()) == before


@pytest.mark.parametrize("extreme", [1e300, -1e300, 5e-324, 0.0])
def test_no_number_that_a_rank_may_tell_holds_it_up(job: Job, extreme: float) -> None:
    for second in (1, 2):
        told(job, second, steps=2**31 - 1, samples=2**31 - 1, loss=extreme, step_s=extreme)

    thin()

    kept = job.progress.get()
    assert (kept.steps, kept.samples) == (2**31 - 1, 2**31 - 1)
    assert kept.loss == pytest.approx(extreme)
