"""The post-mortem's editor in a real browser: it follows the server until somebody types in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db.models import F
from playwright.sync_api import Browser, Page, expect
from pytest_django.live_server_helper import LiveServer

from controlplane.fleet.models import Cluster
from controlplane.incidents.models import Incident
from tests.browser import LIVE_MS, operator_page
from tests.factories import IncidentFactory

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
]

REFUSED = "status of 409"
TEXT = "#postmortem-text"


@pytest.fixture
def incident() -> Incident:
    return IncidentFactory(title="Replica lost")


@pytest.fixture
def page(browser: Browser, live_server: LiveServer, incident: Incident) -> Iterator[Page]:
    with operator_page(browser, live_server.url, incident.cluster, expected=REFUSED) as page:
        page.goto(f"/incidents/{incident.id}")
        page.get_by_text("Edit the post-mortem").click()
        yield page


def _written(incident: Incident, text: str) -> None:
    Incident.objects.filter(pk=incident.pk).update(postmortem=text)
    Cluster.objects.filter(pk=incident.cluster_id).update(change_seq=F("change_seq") + 1)


def test_what_was_drafted_before_ones_eyes_is_edited_and_saved(
    page: Page, incident: Incident
) -> None:
    _written(incident, "Drafted.")
    expect(page.locator(TEXT)).to_have_value("Drafted.", timeout=LIVE_MS)

    page.fill(TEXT, "Drafted. And read.")
    page.get_by_role("button", name="Save the post-mortem").click()

    expect(page.get_by_test_id("postmortem")).to_have_text("Drafted. And read.")
    incident.refresh_from_db()
    assert incident.postmortem == "Drafted. And read."


def test_what_was_typed_stays_and_overwrites_nothing_unread(page: Page, incident: Incident) -> None:
    shown = page.get_by_test_id("postmortem")
    page.fill(TEXT, "Mine.")

    _written(incident, "Drafted.")
    expect(shown).to_have_text("Drafted.", timeout=LIVE_MS)
    expect(page.locator(TEXT)).to_have_value("Mine.")
    page.get_by_role("button", name="Save the post-mortem").click()

    expect(page.get_by_role("alert")).to_contain_text("yours is not saved")
    _written(incident, "Drafted anew.")
    expect(shown).to_have_text("Drafted anew.", timeout=LIVE_MS)
    expect(page.locator(TEXT)).to_have_value("Mine.")
    incident.refresh_from_db()
    assert incident.postmortem == "Drafted anew."
