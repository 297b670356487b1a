"""Among all that automation has done in its time, the latest is found at once: each overview that
is open asks for it whenever anything changes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.accounts.choices import Role
from controlplane.accounts.models import User
from controlplane.incidents import selectors
from controlplane.incidents.models import Incident, PlaybookRun, PlaybookStep
from tests.factories import ClusterFactory, GrantFactory

pytestmark = pytest.mark.django_db

INCIDENTS = 1000
STEPS = 5  # of each incident's run
TABLES = "fleet_cluster, incidents_incident, incidents_playbookrun, incidents_playbookstep"


@pytest.fixture
def viewer() -> User:
    """Sees one of two clusters, in each of which much has happened."""
    clusters = ClusterFactory.create_batch(2)
    now = timezone.now()
    incidents = Incident.objects.bulk_create(
        Incident(cluster=clusters[n % 2], subject=f"node/nod_{n}", title="Node lost",
                 severity="minor", state="resolved", occurred_at=now,
                 resolved_at=now - timedelta(minutes=n))
        for n in range(INCIDENTS)
    )  # fmt: skip
    runs = PlaybookRun.objects.bulk_create(
        PlaybookRun(incident=incident, cluster=incident.cluster, playbook="repair-node", version=1,
                    title="Repair it", subject=incident.subject, state="succeeded", deadline=now)
        for incident in incidents
    )  # fmt: skip
    PlaybookStep.objects.bulk_create(
        PlaybookStep(run=run, position=position, key="do", title="Do it", effect="none",
                     timeout_s=60, state="done", outcome="done so",
                     finished_at=now - timedelta(minutes=age))
        for age, run in enumerate(runs)
        for position in range(STEPS)
    )  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {TABLES}")
    return GrantFactory(role=Role.VIEWER, cluster=clusters[0]).user


def _resolved(viewer: User) -> None:
    list(selectors.resolved_for(viewer, limit=8))


def _decisions(viewer: User) -> None:
    list(selectors.decisions_for(viewer, limit=8))


def _decisions_by_page(viewer: User) -> None:
    client = Client()
    client.force_login(viewer)
    first = client.get("/api/v1/decisions?limit=20").json()
    assert client.get(first["next"]).status_code == 200


@pytest.mark.parametrize(
    ("lookup", "table"),
    [
        (_resolved, "incidents_incident"),
        (_decisions, "incidents_playbookstep"),
        (_decisions_by_page, "incidents_playbookstep"),
    ],
)
def test_the_latest_is_found_without_sorting_all_there_is(
    lookup: Callable[[User], None], table: str, viewer: User
) -> None:
    with CaptureQueriesContext(connection) as asked:
        lookup(viewer)
    reads = [one["sql"] for one in asked if f'FROM "{table}"' in one["sql"]]

    assert reads
    assert [sql for sql in reads if "Sort" in plan_of(sql)] == []


def plan_of(sql: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {sql}")
        return "\n".join(row[0] for row in cursor.fetchall())
