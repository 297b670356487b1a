"""Lists of jobs and incidents: filtered by their address, paged without an end."""

from __future__ import annotations

import base64
import json
import re
from html import unescape
from urllib.parse import urljoin

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.accounts.choices import Role
from tests.controlplane.dashboard.world import Fleet, client_of
from tests.factories import AuditEventFactory, ClusterFactory, IncidentFactory, JobFactory


def _rows(client: Client, name: str, what: str, **query: str) -> list[str]:
    page = client.get(reverse(name), query).content.decode()
    return [row.split("</a>")[0].split(">")[-1] for row in page.split(f'data-testid="{what}"')[1:]]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, ["ended", "pretrain"]),
        ({"state": "active"}, ["pretrain"]),
        ({"state": "ended"}, ["ended"]),
        ({"sort": "-name"}, ["pretrain", "ended"]),
        ({"cluster": "nonsense"}, []),
    ],
)
def test_jobs_by_state_cluster_and_order(
    query: dict[str, str], found: list[str], viewer: Client, fleet: Fleet
) -> None:
    JobFactory(cluster=fleet.cluster, name="ended", state="stopped")

    assert _rows(viewer, "jobs", "job-row", **query) == found


def test_a_job_that_is_told_to_stop_has_not_ended(viewer: Client, fleet: Fleet) -> None:
    JobFactory(cluster=fleet.cluster, name="leaving", state="stopping")

    assert _rows(viewer, "jobs", "job-row", state="active") == ["leaving", "pretrain"]
    assert _rows(viewer, "jobs", "job-row", state="ended") == []
    assert "leaving" in viewer.get(reverse("overview")).content.decode()


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["jobs", "incidents", "failures"])
def test_a_list_without_a_row_says_the_same_when_it_is_refreshed(name: str) -> None:
    nobody = client_of(Role.VIEWER, ClusterFactory())
    words = [
        nobody.get(reverse(name), query, headers=headers).content.decode()
        for query, headers in (({}, {}), ({"after": "x.1"}, {"HX-Request": "true"}))
    ]

    assert ["fits th" in one for one in words] == [False, False]
    assert "fits th" in nobody.get(reverse(name), {"cluster": "nonsense"}).content.decode()


def test_no_job_is_left_off_the_list(viewer: Client, fleet: Fleet) -> None:
    for number in range(120):
        JobFactory(cluster=fleet.cluster, name=f"job-{number:03d}")
    seen: list[str] = []
    address = reverse("jobs")

    for _ in range(3):
        page = viewer.get(address).content.decode()
        seen += re.findall(r'data-testid="job-row"><td><a href="[^"]+">([^<]+)', page)
        link = re.search(r'href="([^"?]*\?cursor=[^"]+)" rel="next"', page)
        address = link[1] if link else reverse("jobs")

    assert len(seen) == len(set(seen)) == 121


@pytest.mark.parametrize(
    ("name", "beyond"),
    [
        ("jobs", ["", ""]),
        ("incidents", ["", ""]),
        ("failures", ["1970-01-01T00:00:00+00:00", ""]),
        ("automation-page", ["", ""]),
        ("audit", [0, 0]),
        ("cluster", ["zzz", "zzz"]),
        ("users", ["zzz", 2**31 - 1]),
    ],
)
def test_a_page_whose_rows_have_gone_leads_to_the_first(
    name: str, beyond: list[str | int], admin: Client, fleet: Fleet
) -> None:
    AuditEventFactory(cluster=fleet.cluster)
    address = reverse(name, args=[fleet.cluster.pk] * (name == "cluster"))
    cursor = base64.urlsafe_b64encode(json.dumps(beyond).encode()).decode()

    page = admin.get(address, {"cursor": cursor}).content.decode()

    assert "This page of the list is empty now" in page
    assert not re.search(
        r"enrolled yet|written yet|run in alpha yet|role in your clusters yet", page
    )
    first = re.search(r'<a href="([^"]*)"[^>]*>First page</a>', page)
    assert first
    shown = admin.get(urljoin(address, unescape(first[1])))
    assert (shown.status_code, "Nothing is left" in shown.content.decode()) == (200, False)
    assert "cursor" not in first[1]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"severity": "critical"}, ["Other"]),
        ({"code": "xid-79"}, ["First"]),
        ({"state": "resolved"}, ["Other"]),
        ({"state": "unresolved"}, ["First"]),
    ],
)
def test_incidents_by_what_the_address_says(
    query: dict[str, str], found: list[str], viewer: Client, fleet: Fleet
) -> None:
    fleet.incident.title = "First"
    fleet.incident.save()
    IncidentFactory(cluster=fleet.cluster, title="Other", severity="critical", state="resolved")

    page = viewer.get(reverse("incidents"), query).content.decode()

    assert [title for title in ("First", "Other") if title in page] == found


def test_incidents_of_one_node_and_one_job(viewer: Client, fleet: Fleet) -> None:
    IncidentFactory(cluster=fleet.cluster, title="Other")

    by_node = viewer.get(reverse("incidents"), {"node": fleet.node.id}).content.decode()
    by_job = viewer.get(reverse("incidents"), {"job": fleet.job.id}).content.decode()

    assert by_node.count('data-testid="incident-row"') == 1
    assert by_job.count('data-testid="incident-row"') == 1
