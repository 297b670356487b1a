"""The draft of a post-mortem, and how it is saved over the API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client

from controlplane.incidents import postmortem
from controlplane.incidents.models import Incident
from tests.factories import GrantFactory, IncidentFactory, TimelineEntryFactory

pytestmark = pytest.mark.django_db


def test_the_timeline_tells_the_date_where_it_changes() -> None:
    incident = IncidentFactory()
    for day, text in ((29, "one"), (29, "two"), (30, "three")):
        at = datetime(2026, 11, day, 23, 59, 1, 250_000, tzinfo=UTC)
        TimelineEntryFactory(incident=incident, at=at, text=text)

    draft = postmortem.draft(incident)

    assert (
        "- `2026-11-29 23:59:01.250` one\n- `23:59:01.250` two\n- `2026-11-30 23:59:01.250` three\n"
    ) in draft


@pytest.fixture
def incident() -> Incident:
    made: Incident = IncidentFactory(postmortem="Drafted.")
    return made


@pytest.fixture
def operator(incident: Incident) -> Client:
    client = Client()
    client.force_login(GrantFactory(role="operator", cluster=incident.cluster).user)
    return client


def save(client: Client, incident: Incident, **order: str) -> Any:
    path = f"/api/v1/incidents/{incident.pk}/postmortem"
    return client.post(path, order, content_type="application/json")


def test_the_api_saves_the_text_as_it_was_written(operator: Client, incident: Incident) -> None:
    told = operator.get(f"/api/v1/incidents/{incident.pk}").json()

    answer = save(operator, incident, text="  # Mine\n", edited=told["postmortem_digest"])

    incident.refresh_from_db()
    assert (answer.status_code, incident.postmortem) == (200, "  # Mine\n")
    assert answer.json()["result"]["postmortem_digest"] == incident.postmortem_digest


def test_the_api_saves_over_no_text_that_was_not_read(operator: Client, incident: Incident) -> None:
    read = incident.postmortem_digest
    Incident.objects.filter(pk=incident.pk).update(postmortem="Drafted anew.")

    answer = save(operator, incident, text="Mine.", edited=read)

    incident.refresh_from_db()
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert incident.postmortem == "Drafted anew."
