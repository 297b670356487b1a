"""The job's page: what its tiers hold, and a checkpoint on demand."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.models import AuditEvent
from controlplane.jobs.models import Directive, Job
from tests.controlplane.dashboard.world import Fleet
from tests.factories import CheckpointFactory


@pytest.fixture
def job(fleet: Fleet) -> Job:
    return fleet.job


def page(client: Client, job: Job) -> str:
    answer = client.get(reverse("job", args=[job.pk]))
    assert answer.status_code == 200
    return answer.content.decode()


def test_each_tier_is_shown_with_its_age_and_whether_it_is_late(operator: Client, job: Job) -> None:
    now = timezone.now()
    for age in (100, 105, 110):
        CheckpointFactory(job=job, tier="local", at=now - timedelta(seconds=age))
        CheckpointFactory(job=job, tier="shared", at=now - timedelta(seconds=3 * age - 290))

    shown = page(operator, job)

    local, shared = shown.split('data-tier="')[1:3]
    assert local.startswith('local"')
    assert "late" in local
    assert shared.startswith('shared"')
    assert "verified" in shared.split("</tr>")[0]


def test_an_operator_has_a_checkpoint_saved_and_a_viewer_cannot(
    operator: Client, viewer: Client, job: Job
) -> None:
    url = reverse("job-checkpoint", args=[job.pk])
    assert 'data-testid="checkpoint-now"' in page(operator, job)
    assert 'data-testid="checkpoint-now"' not in page(viewer, job)

    refused = viewer.post(url)
    done = operator.post(url)

    assert (refused.status_code, done.status_code) == (403, 302)
    assert Directive.objects.get(job=job).verb == "checkpoint"
    assert AuditEvent.objects.filter(verb="job.direct.checkpoint", object_id=job.pk).count() == 1


def test_of_a_job_that_does_not_run_none_can_be_had(operator: Client, job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(state="stopped")

    answer = operator.post(reverse("job-checkpoint", args=[job.pk]))

    assert answer.status_code == 409
    assert "nobody is there to save a checkpoint" in answer.content.decode()
    assert not Directive.objects.exists()
