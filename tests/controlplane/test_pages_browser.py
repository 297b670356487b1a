"""The pages in a real browser: live, keeping the reader's place, honest when they are stale."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from django.db.models import F
from django.utils import timezone
from playwright.sync_api import Browser, Page, expect
from pytest_django.live_server_helper import LiveServer

from controlplane.fleet.models import Cluster
from controlplane.incidents.models import Incident, PlaybookRun, PlaybookStep
from tests.browser import LIVE_MS, operator_page
from tests.factories import (
    IncidentFactory,
    InterruptionFactory,
    JobFactory,
    PlaybookRunFactory,
    PlaybookStepFactory,
    ProgressSampleFactory,
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
]

#: What the console says of requests that failed while the network was cut off.
CUT_OFF = "INTERNET_DISCONNECTED|htmx:(sendError|afterRequest)"


@pytest.fixture
def incident() -> Incident:
    incident = IncidentFactory(title="Replica lost", cause="Not known.")
    run = PlaybookRunFactory(incident=incident, state="needs_operator", state_reason="It is stuck.")
    PlaybookStepFactory(run=run, key="look", state="done", outcome="looked", prose="Look there.")
    PlaybookStepFactory(run=run, key="cycle", state="needs_operator", outcome="no beat")
    return incident


REASON = "[id^=run-reason]"


@pytest.fixture
def page(browser: Browser, live_server: LiveServer, incident: Incident) -> Iterator[Page]:
    with operator_page(browser, live_server.url, incident.cluster, expected=CUT_OFF) as page:
        yield page


def _changed(cluster: Cluster) -> None:
    Cluster.objects.filter(pk=cluster.pk).update(change_seq=F("change_seq") + 1)


def test_a_change_arrives_and_the_reader_keeps_their_place(page: Page, incident: Incident) -> None:
    page.goto(f"/incidents/{incident.id}")
    page.locator("[data-step=look] summary").click()
    page.fill(REASON, "cable reseated")

    Incident.objects.filter(pk=incident.pk).update(cause="The node lost power.")
    PlaybookStep.objects.filter(key="cycle").update(outcome="still no beat")
    _changed(incident.cluster)

    expect(page.get_by_text("still no beat")).to_be_visible(timeout=LIVE_MS)
    expect(page.get_by_test_id("incident-cause")).to_have_text("The node lost power.")
    expect(page.get_by_text("Look there.")).to_be_visible()
    expect(page.locator(REASON)).to_have_value("cable reseated")
    expect(page.locator(REASON)).to_be_focused()


def test_a_reason_is_given_for_no_other_playbook_than_it_was_typed_for(
    page: Page, incident: Incident
) -> None:
    page.goto(f"/incidents/{incident.id}")
    page.fill(REASON, "cable reseated")

    PlaybookRun.objects.filter(incident=incident).update(state="running")
    other = PlaybookRunFactory(
        incident=incident, state="needs_operator", title="Bring it back", state_reason="No spare."
    )
    _changed(incident.cluster)

    expect(page.get_by_test_id("ask")).to_contain_text("“Bring it back” waits", timeout=LIVE_MS)
    expect(page.locator(REASON)).to_have_value("")
    expect(page.locator(REASON)).not_to_be_focused()
    form = page.locator("form", has=page.locator(REASON))
    expect(form).to_have_attribute("action", f"/runs/{other.pk}/retry")


def test_the_one_button_lets_the_playbook_go_on(page: Page, incident: Incident) -> None:
    page.goto(f"/incidents/{incident.id}")
    page.fill(REASON, "cable reseated")

    page.get_by_test_id("retry").click()

    expect(page.get_by_test_id("ask")).to_have_attribute("data-ask", "watch")
    expect(page.get_by_text("cable reseated").first).to_be_visible()


def test_a_page_that_hears_nothing_says_since_when(page: Page, incident: Incident) -> None:
    page.goto(f"/incidents/{incident.id}")
    beacon = page.get_by_test_id("live")
    expect(beacon).to_have_text("Live")

    page.context.set_offline(True)
    expect(beacon).to_have_text(re.compile(r"Stale since \d\d:\d\d:\d\d UTC"))

    page.context.set_offline(False)
    expect(beacon).to_have_text("Live")


def test_the_curves_grow_and_their_marks_lead_to_incidents(page: Page, incident: Incident) -> None:
    job = JobFactory(cluster=incident.cluster)
    now = timezone.now()
    explained = IncidentFactory(cluster=incident.cluster, job=job, replica=1, occurred_at=now)
    for step in (9, 19, 29):
        ProgressSampleFactory(job=job, step=step, began=now)
    InterruptionFactory(job=job, lost=[1], started_at=now, gap_s=2)
    page.goto(f"/jobs/{job.id}")
    page.get_by_text("The numbers").click()
    expect(page.locator("#chart-table tbody tr")).to_have_count(3)

    ProgressSampleFactory(job=job, step=39, began=now)

    expect(page.locator("#chart-table tbody tr")).to_have_count(4, timeout=LIVE_MS)
    expect(page.locator("a.c-mark")).to_have_attribute("href", f"/incidents/{explained.id}")


def test_the_chosen_theme_outlives_the_page(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.get_by_label("Switch between light and dark").click()

    page.goto("/jobs/")

    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_an_incident_fits_a_phone(page: Page, incident: Incident) -> None:
    page.set_viewport_size({"width": 390, "height": 844})

    page.goto(f"/incidents/{incident.id}")

    expect(page.get_by_test_id("retry")).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
