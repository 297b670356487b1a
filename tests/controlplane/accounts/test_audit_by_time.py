"""A window of the audit trail is found by its time, however long the trail is."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.accounts.models import AuditEvent
from tests.factories import UserFactory

ROWS = 5000

pytestmark = pytest.mark.django_db


@pytest.fixture
def client() -> Client:
    """A superuser, who sees all of a trail with a row for each minute."""
    AuditEvent.objects.bulk_create(
        AuditEvent(actor_kind="system", actor_id="drydock", verb="a.b", object_type="x")
        for _ in range(ROWS)
    )
    first = AuditEvent.objects.order_by("pk").values_list("pk", flat=True)[0]
    began = timezone.now() - timedelta(minutes=ROWS)
    AuditEvent.objects.update(at=began + (F("pk") - first) * timedelta(minutes=1))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE accounts_auditevent")
    client = Client()
    client.force_login(UserFactory(is_superuser=True))
    return client


def test_an_hour_of_long_ago_is_found_without_walking_what_came_since(client: Client) -> None:
    now = timezone.now()
    hour = {"at__gte": now - timedelta(minutes=4000), "at__lt": now - timedelta(minutes=3940)}

    with CaptureQueriesContext(connection) as asked:
        answer = client.get("/api/v1/audit", {name: at.isoformat() for name, at in hour.items()})
    (read,) = (one["sql"] for one in asked if 'ORDER BY "accounts_auditevent"' in one["sql"])

    assert len(answer.json()["results"]) == 60
    assert "audit_by_time" in _plan_of(read)


def _plan_of(sql: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {sql}")
        return "\n".join(row[0] for row in cursor.fetchall())
