"""The job's page: a job that was registered is started, by whoever may."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.incidents.models import PlaybookRun
from controlplane.jobs.choices import JobState
from controlplane.jobs.models import Job
from tests.controlplane.dashboard.world import Fleet, reasons_in


@pytest.fixture
def job(fleet: Fleet) -> Job:
    """One that was registered, and that nobody has started."""
    fleet.job.state = JobState.PENDING
    fleet.job.save()
    return fleet.job


def page(client: Client, job: Job) -> str:
    return client.get(reverse("job", args=[job.pk])).content.decode()


def start(client: Client, job: Job, reason: str = "the night run") -> tuple[int, str]:
    form = {"form": "start-reason", "reason": reason}
    answer = client.post(reverse("job-start", args=[job.pk]), form)
    return answer.status_code, answer.content.decode()


def test_an_operator_starts_a_job_that_waits_for_it(
    operator: Client, viewer: Client, job: Job
) -> None:
    assert 'data-testid="start-job"' in page(operator, job)
    assert 'data-testid="start-job"' not in page(viewer, job)

    assert start(operator, job)[0] == 302

    run = PlaybookRun.objects.get(playbook="start-job")
    assert (run.job, run.context["reason"]) == (job, "the night run")
    job.refresh_from_db()
    assert job.state == JobState.STARTING
    assert 'data-testid="start-job"' not in page(operator, job)


def test_without_a_reason_nothing_is_started(operator: Client, job: Job) -> None:
    status, shown = start(operator, job, reason=" ")

    assert status == 409
    assert "give a reason" in shown
    assert reasons_in(shown) == {"start-reason": " "}
    assert not PlaybookRun.objects.filter(playbook="start-job").exists()


def test_one_that_was_started_is_not_started_again(operator: Client, job: Job) -> None:
    start(operator, job)

    status, shown = start(operator, job)

    assert status == 409
    assert "only a job of which nothing runs can be started" in shown


def test_a_viewer_starts_nothing(viewer: Client, job: Job) -> None:
    assert start(viewer, job)[0] == 403
