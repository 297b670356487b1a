"""The pages in a real browser: live, keeping the reader's place, honest when they are stale."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
import redis
from django.conf import settings
from django.db.models import F
from django.utils import timezone
from playwright.sync_api import Browser, Page, Response, expect
from pytest_django.live_server_helper import LiveServer

from controlplane import redis_keys
from controlplane.fleet.models import Cluster
from controlplane.incidents.models import Approval, Incident, PlaybookRun, PlaybookStep
from controlplane.jobs.models import Job
from tests.browser import LIVE_MS, operator_page
from tests.factories import (
    ApprovalFactory,
    CheckpointFactory,
    IncidentFactory,
    InterruptionFactory,
    JobFactory,
    PlaybookRunFactory,
    PlaybookStepFactory,
    ProgressSampleFactory,
    TimelineEntryFactory,
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


@pytest.fixture
def plans(incident: Incident) -> list[Approval]:
    """Two that wait for a signature, the older one first."""
    plan = {"steps": [{"title": "Reboot it", "does": ["power cycle it"]}]}
    others = IncidentFactory.create_batch(2, cluster=incident.cluster)
    return [ApprovalFactory(run=PlaybookRunFactory(incident=one), plan=plan) for one in others]


@pytest.mark.parametrize(
    "what", ["[data-testid=approve]", "[data-testid=reject]", ".need-title", "summary", "pre"]
)
def test_the_focus_stays_with_the_plan_that_it_is_on(
    what: str, page: Page, plans: list[Approval]
) -> None:
    page.goto("/")
    needs = page.get_by_test_id("needs-approval")
    needs.nth(1).locator("summary").click()
    needs.nth(1).locator(what).focus()

    Incident.objects.filter(pk=plans[0].run.incident_id).update(title="It is seen that")
    _changed(plans[0].cluster)

    expect(needs.first).to_contain_text("It is seen that", timeout=LIVE_MS)
    expect(needs.nth(1).locator(what)).to_be_focused()


@pytest.mark.parametrize("deed", ["approve", "reject"])
def test_the_focus_goes_to_no_other_plan_when_one_is_gone(
    deed: str, page: Page, plans: list[Approval]
) -> None:
    page.goto("/")
    needs = page.get_by_test_id("needs-approval")
    needs.nth(1).locator("summary").click()
    needs.first.locator("summary").click()
    needs.first.get_by_test_id(deed).focus()

    Approval.objects.filter(pk=plans[0].pk).update(state="void")
    _changed(plans[0].cluster)

    expect(needs).to_have_count(1, timeout=LIVE_MS)
    expect(page.locator(":focus")).to_have_count(0)


def test_the_focus_stays_on_one_of_several_that_look_alike(page: Page, incident: Incident) -> None:
    for _ in range(2):
        TimelineEntryFactory(incident=incident, data={"raw": "NVRM: Xid 79"})
    page.goto(f"/incidents/{incident.id}")
    raw = page.get_by_test_id("raw")
    raw.nth(1).focus()

    TimelineEntryFactory(incident=incident, kind="note", text="Ada looks at it")
    _changed(incident.cluster)

    expect(page.get_by_text("Ada looks at it")).to_be_visible(timeout=LIVE_MS)
    expect(raw.nth(1)).to_be_focused()


def _is_poll(response: Response) -> bool:
    return "after=" in response.url


def _is_news(response: Response) -> bool:
    return _is_poll(response) and response.status == 200


def test_a_click_is_not_lost_to_a_change_while_the_button_is_down(
    page: Page, incident: Incident
) -> None:
    page.goto(f"/incidents/{incident.id}")
    page.fill(REASON, "cable reseated")
    page.get_by_test_id("retry").hover()
    page.mouse.down()

    with page.expect_response(_is_news):
        Incident.objects.filter(pk=incident.pk).update(cause="The node lost power.")
        _changed(incident.cluster)
    with page.expect_response(_is_poll):
        pass  # so the page has done with the one before it
    page.mouse.up()

    expect(page.get_by_test_id("ask")).to_have_attribute("data-ask", "watch")
    expect(page.get_by_test_id("incident-cause")).to_have_text("The node lost power.")


def test_a_button_whose_release_is_never_told_holds_nothing_back(
    page: Page, incident: Incident
) -> None:
    page.goto(f"/incidents/{incident.id}")
    page.get_by_test_id("incident-cause").hover()
    page.mouse.down()
    page.evaluate("dispatchEvent(new FocusEvent('blur'))")

    Incident.objects.filter(pk=incident.pk).update(cause="The node lost power.")
    _changed(incident.cluster)

    expect(page.get_by_test_id("incident-cause")).to_have_text("The node lost power.")


def test_what_is_selected_stays_and_the_page_says_what_it_waits_for(
    page: Page, incident: Incident
) -> None:
    page.goto(f"/incidents/{incident.id}")
    cause = page.get_by_test_id("incident-cause")
    cause.select_text()

    Incident.objects.filter(pk=incident.pk).update(cause="The node lost power.")
    TimelineEntryFactory(incident=incident, kind="note", text="Ada looks at it")
    _changed(incident.cluster)

    beacon = page.get_by_test_id("live")
    expect(beacon).to_have_text("Waits for your selection")
    expect(beacon).to_have_attribute("title", re.compile(r"after \d\d:\d\d:\d\d UTC"))
    expect(page.get_by_text("Ada looks at it")).to_be_visible()
    assert page.evaluate("String(getSelection())").strip() == "Not known."

    page.get_by_role("heading", level=1).click()
    expect(cause).to_have_text("The node lost power.", timeout=LIVE_MS)
    expect(beacon).to_have_text("Live")


def test_what_is_selected_in_a_field_holds_nothing_back(page: Page, incident: Incident) -> None:
    page.goto(f"/incidents/{incident.id}")
    page.fill(REASON, "cable reseated")
    page.locator(REASON).select_text()

    Incident.objects.filter(pk=incident.pk).update(cause="The node lost power.")
    _changed(incident.cluster)

    expect(page.get_by_test_id("incident-cause")).to_have_text("The node lost power.")
    page.keyboard.type("power is back")
    expect(page.locator(REASON)).to_have_value("power is back")


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


def test_a_page_whose_polls_do_not_run_never_says_that_it_is_live(
    browser: Browser, live_server: LiveServer, incident: Incident
) -> None:
    url, cluster = live_server.url, incident.cluster
    with operator_page(browser, url, cluster, expected="ERR_FAILED") as page:
        page.route("**/htmx*", lambda route: route.abort())
        page.goto(f"/incidents/{incident.id}")

        expect(page.get_by_test_id("live")).to_have_text("Not live yet")
        expect(page.get_by_test_id("automation")).to_have_text("Automation")


def test_what_automation_does_is_unknown_while_nobody_answers(
    page: Page, incident: Incident
) -> None:
    redis.Redis.from_url(settings.REDIS_URL).delete(redis_keys.KEEPER_ALIVE)
    page.goto(f"/incidents/{incident.id}")
    told = page.get_by_test_id("automation")
    expect(told).to_have_text("Automation silent")

    page.context.set_offline(True)
    expect(told).to_have_text("Automation unknown")
    expect(told.locator("use")).to_have_attribute("href", re.compile("#quiet$"))

    page.context.set_offline(False)
    expect(told).to_have_text("Automation silent")


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


@pytest.fixture
def ended_job(incident: Incident) -> Job:
    job = JobFactory(cluster=incident.cluster, state="stopped", ended_at=timezone.now())
    for step in (9, 19):
        ProgressSampleFactory(job=job, step=step)
    return job


def test_the_curves_of_an_ended_job_are_drawn_once_their_tab_is_looked_at(
    page: Page, ended_job: Job
) -> None:
    page.add_init_script(
        "away = true; Object.defineProperty(Document.prototype, 'hidden', { get: () => away });"
    )
    page.goto(f"/jobs/{ended_job.id}")

    page.evaluate("away = false; document.dispatchEvent(new Event('visibilitychange'))")

    expect(page.locator("#chart svg")).to_be_visible()


def test_the_curves_of_an_ended_job_are_asked_for_until_they_come(
    browser: Browser, live_server: LiveServer, ended_job: Job
) -> None:
    url, cluster = live_server.url, ended_job.cluster
    with operator_page(browser, url, cluster, expected="ERR_FAILED") as page:
        page.route("**/series?*", lambda route: route.abort(), times=1)
        page.goto(f"/jobs/{ended_job.id}")

        expect(page.locator("#chart svg")).to_be_visible()


def _edges(page: Page) -> list[list[int]]:
    """From where to where the curves are shaded."""
    edges: list[list[int]] = page.locator(".c-degraded").evaluate_all("""
        (all) => all.map(({ x, width }) =>
          [x.baseVal.value, x.baseVal.value + width.baseVal.value].map(Math.round))
    """)
    return edges


def _lines(page: Page) -> list[int]:
    """Where the marks stand."""
    lines: list[int] = page.locator(".c-mark line").evaluate_all(
        "(all) => all.map(({ x1 }) => Math.round(x1.baseVal.value))"
    )
    return lines


def test_the_curves_are_shaded_until_every_lost_replica_is_back(
    page: Page, incident: Incident
) -> None:
    job = JobFactory(cluster=incident.cluster)
    began = timezone.now() - timedelta(seconds=100)
    for step in range(0, 1000, 100):
        ProgressSampleFactory(job=job, step=step, began=began)
    for after, lost, joined in [(20, [0, 2], []), (40, [], [0]), (60, [], [2]), (70, [3], [3])]:
        at = began + timedelta(seconds=after)
        InterruptionFactory(job=job, started_at=at, lost=lost, joined=joined)

    page.goto(f"/jobs/{job.id}")

    expect(page.locator(".c-mark")).to_have_count(4)
    lines = _lines(page)
    assert _edges(page) == [[lines[0], lines[2]]]


def test_the_curves_are_shaded_from_their_edge_where_a_replica_was_lost_before(
    page: Page, incident: Incident
) -> None:
    job = JobFactory(cluster=incident.cluster)
    began = timezone.now() - timedelta(seconds=900)
    for step in (8000, 8500, 9000):
        ProgressSampleFactory(job=job, step=step, began=began)
    InterruptionFactory(job=job, started_at=began, lost=[1])
    at = began + timedelta(seconds=850)
    InterruptionFactory(job=job, started_at=at, joined=[1])

    page.goto(f"/jobs/{job.id}?window=5m")

    expect(page.locator(".c-mark")).to_have_count(1)
    left = page.evaluate("Math.round(document.querySelector('.c-base').x1.baseVal.value)")
    assert _edges(page) == [[left, *_lines(page)]]


@pytest.mark.parametrize("days", [3, 60, 700])
def test_curves_over_days_tell_the_day(days: int, page: Page, incident: Incident) -> None:
    job = JobFactory(cluster=incident.cluster)
    now = timezone.now()
    for part in range(5):
        at = now - timedelta(days=days) * (4 - part) / 4
        ProgressSampleFactory(job=job, step=part, at=at)
    before = now - timedelta(days=1)
    CheckpointFactory(job=job, at=before)
    InterruptionFactory(job=job, started_at=before)

    page.goto(f"/jobs/{job.id}?window=all")
    page.get_by_text("The numbers").click()
    page.get_by_role("img", name="Loss and throughput").press("ArrowRight")

    told = page.locator(".c-notch + .c-tick").all_text_contents()
    assert 2 <= len(told) <= 9
    assert "00:00" not in told
    assert any(re.fullmatch(r"\d\d-\d\d", one) for one in told)
    expect(page.locator(".chart-read")).to_contain_text(f"{now:%Y-%m-%d %H:%M}")
    expect(page.locator("#chart-table tbody tr").first).to_contain_text(f"{now:%Y-%m-%d %H:%M}")
    expect(page.locator(".c-ckpt title")).to_contain_text(f"{before:%Y-%m-%d %H:%M}")
    expect(page.locator(".c-mark title")).to_contain_text(f"{before:%Y-%m-%d}")


def test_ages_are_told_by_the_servers_clock(page: Page, incident: Incident) -> None:
    before = timezone.now() - timedelta(seconds=90)
    Incident.objects.filter(pk=incident.pk).update(occurred_at=before)
    page.clock.install(time=timezone.now() + timedelta(hours=1))
    page.goto(f"/incidents/{incident.id}")
    age = page.locator(".title-state time").first
    expect(age).to_have_text(re.compile(r"^[12] min$"))

    page.clock.fast_forward("02:00:00")  # as of a machine that slept, by another clock than ours

    expect(age).to_have_text(re.compile(r"^[1-4] min$"))


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
