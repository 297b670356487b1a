"""The page of failures: what is listed, how it is filtered, what it cost."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.incidents.models import Incident
from tests.controlplane.dashboard.world import Fleet
from tests.factories import FailureFactory


def _codes(client: Client, **query: str) -> list[str]:
    page = client.get(reverse("failures"), query).content.decode()
    return re.findall(r'data-testid="failure-row" data-code="([^"]+)"', page)


def test_a_failure_is_told_with_its_raw_line_card_rule_and_incident(
    viewer: Client, fleet: Fleet
) -> None:
    page = viewer.get(reverse("failures")).content.decode()

    assert "Raw line, rule xid-79" in page
    assert "fallen off the bus. &lt;script&gt;" in page
    assert fleet.card.serial in page
    assert f'href="/nodes/{fleet.node.id}"' in page
    assert f'href="/incidents/{fleet.incident.id}"' in page
    assert f'href="/jobs/{fleet.job.id}"' in page


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, ["xid-31", "xid-79"]),
        ({"code": "xid-31"}, ["xid-31"]),
        ({"fault_class": "hardware"}, ["xid-79"]),
        ({"node": "ALPHA-01"}, ["xid-79"]),
        ({"node": "alpha-"}, ["xid-31", "xid-79"]),
        ({"window": "30d"}, ["xid-31", "xid-79", "xid-48"]),
        ({"window": "nonsense"}, ["xid-31", "xid-79"]),
        ({"sort": "code", "window": "30d"}, ["xid-31", "xid-48", "xid-79"]),
        ({"sort": "-count"}, ["xid-31", "xid-79"]),
    ],
)
def test_filters_and_sorting(
    query: dict[str, str], found: list[str], viewer: Client, fleet: Fleet
) -> None:
    FailureFactory(node=fleet.other, code="xid-31", fault_class="program", count=7)
    FailureFactory(node=fleet.node, code="xid-48", observed_at=timezone.now() - timedelta(days=20))

    assert _codes(viewer, **query) == found


def test_filters_by_card_and_cluster(viewer: Client, fleet: Fleet) -> None:
    FailureFactory(node=fleet.other, code="xid-31")

    assert _codes(viewer, card=fleet.card.serial) == ["xid-79"]
    assert _codes(viewer, cluster=fleet.cluster.id) == ["xid-31", "xid-79"]


def test_a_failure_of_a_job_is_seen_without_a_node(
    viewer: Client, stranger: Client, fleet: Fleet
) -> None:
    FailureFactory(node=None, code="exit-1", job_id=fleet.job.id)

    assert "exit-1" in _codes(viewer)
    assert _codes(stranger) == []


def test_the_chart_counts_each_code(viewer: Client, fleet: Fleet) -> None:
    for _ in range(3):
        FailureFactory(node=fleet.other, code="xid-31")

    page = viewer.get(reverse("failures")).content.decode()

    assert "<title>xid-31: 3, from" in page
    assert "<title>xid-79: 1, from" in page
    assert "xid-31 <strong>3</strong>" in page


def test_a_cause_is_priced(viewer: Client, fleet: Fleet) -> None:
    Incident.objects.filter(pk=fleet.incident.pk).update(gpu_seconds_lost=7200.0)

    page = viewer.get(reverse("failures")).content.decode()

    row = page[page.index('data-testid="impacts"') :].split("</tbody>")[0]
    assert "7\u202f200" in row
    assert "4.00\u202fUSD" in row  # two GPU-hours at two dollars


def test_a_calm_fleet_says_so(stranger: Client) -> None:
    page = stranger.get(reverse("failures")).content.decode()

    assert "Nothing has failed in the last 7 days" in page
