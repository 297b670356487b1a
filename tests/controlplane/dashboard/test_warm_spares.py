"""The job's and the node's page show warm spares, and what they do."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Placement
from tests.controlplane.dashboard.world import Fleet
from tests.factories import NodeFactory


@pytest.fixture
def spare(fleet: Fleet) -> Placement:
    """The one warm spare of two that the job is to have."""
    jobs.set_warm_spares(SYSTEM, fleet.job.pk, 2, "it is precious")
    node = NodeFactory(cluster=fleet.job.cluster, name="alpha-03")
    return jobs.place_warm_spare(SYSTEM, fleet.job.pk, node.pk, placement_id="plc_spare")


def page(client: Client, fleet: Fleet) -> str:
    shown = client.get(reverse("job", args=[fleet.job.pk])).content.decode()
    there = shown[shown.index('data-testid="warm-spares"') :]
    return there[: there.index("</p>")]


def test_the_jobs_page_shows_how_far_each_is(
    viewer: Client, fleet: Fleet, spare: Placement
) -> None:
    starting = page(viewer, fleet)
    now = timezone.now()
    Placement.objects.filter(pk=spare.pk).update(started_at=now - timedelta(seconds=3))
    up = page(viewer, fleet)
    Placement.objects.filter(pk=spare.pk).update(follows_since=now)
    follows = page(viewer, fleet)

    assert "1 of 2 warm spares" in starting
    assert "alpha-03" in starting
    assert "starting for" in starting
    assert "takes the state" in up
    assert "holds the state for" in follows


def test_a_job_that_is_to_have_none_says_nothing_of_them(viewer: Client, fleet: Fleet) -> None:
    shown = viewer.get(reverse("job", args=[fleet.job.pk])).content.decode()
    assert 'data-testid="warm-spares"' not in shown


def test_the_nodes_page_calls_it_by_its_name(
    viewer: Client, fleet: Fleet, spare: Placement
) -> None:
    shown = viewer.get(reverse("node", args=[spare.node_id])).content.decode()
    assert "warm spare</span>" in shown
    assert "replica 0" not in shown[shown.index("Jobs on it") : shown.index("Playbook runs")]
