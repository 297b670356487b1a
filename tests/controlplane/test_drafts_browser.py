"""A long text that is half written, in a real browser: only saving it takes it away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from pytest_django.live_server_helper import LiveServer

from controlplane.accounts.choices import Role
from controlplane.incidents.models import Incident
from tests.browser import operator_page
from tests.factories import PASSWORD, GrantFactory, IncidentFactory

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
]

#: What the console says of an order that was refused, and of one that did not arrive.
EXPECTED = "status of 409|ERR_FAILED"
NOTE, TEXT = "#note", "#postmortem-text"
WORDS = "The fan was replaced.\nThe second one is loud: order it."


@pytest.fixture
def incident() -> Incident:
    return IncidentFactory(title="Replica lost")


@pytest.fixture
def page(browser: Browser, live_server: LiveServer, incident: Incident) -> Iterator[Page]:
    with operator_page(browser, live_server.url, incident.cluster, expected=EXPECTED) as page:
        page.goto(f"/incidents/{incident.id}")
        yield page


def _notes(incident: Incident) -> list[str]:
    return list(incident.timeline.filter(kind="note").values_list("text", flat=True))


def _sign_in(page: Page, username: str) -> None:
    page.fill("#id_username", username)
    page.fill("#id_password", PASSWORD)
    page.get_by_role("button", name="Sign in").click()


def test_a_note_outlives_another_deed_and_is_gone_once_it_is_told(
    page: Page, incident: Incident
) -> None:
    page.fill(NOTE, WORDS)

    page.get_by_test_id("acknowledge").click()
    expect(page.get_by_test_id("acknowledge")).to_have_count(0)
    expect(page.locator(NOTE)).to_have_value(WORDS)

    page.get_by_role("button", name="Add note").click()
    expect(page.get_by_text("The second one is loud")).to_be_visible()
    expect(page.locator(NOTE)).to_have_value("")
    page.reload()
    expect(page.locator(NOTE)).to_have_value("")
    assert [note.splitlines() for note in _notes(incident)] == [WORDS.splitlines()]


def test_a_note_that_did_not_arrive_is_still_there(page: Page, incident: Incident) -> None:
    page.fill(NOTE, WORDS)
    page.route("**/note", lambda route: route.abort(), times=1)
    with page.expect_event("requestfailed"):
        page.get_by_role("button", name="Add note").click()
    page.wait_for_url("chrome-error://**")

    page.goto(f"/incidents/{incident.id}")

    expect(page.locator(NOTE)).to_have_value(WORDS)
    assert _notes(incident) == []


def test_what_is_put_back_says_so_and_can_be_discarded(page: Page) -> None:
    page.fill(NOTE, WORDS)
    page.reload()
    expect(page.get_by_text("Typed here before, and not saved.")).to_be_visible()

    page.get_by_role("button", name="Discard").click()

    expect(page.get_by_text("Typed here before, and not saved.")).to_have_count(0)
    expect(page.locator(NOTE)).to_have_value("")


def test_what_was_taken_back_stays_so(page: Page) -> None:
    page.fill(NOTE, WORDS)
    page.fill(NOTE, "")

    page.reload()

    expect(page.locator(NOTE)).to_have_value("")


def test_a_post_mortem_outlives_another_deed_and_overwrites_nothing_unread(
    page: Page, incident: Incident
) -> None:
    page.get_by_text("Edit the post-mortem").click()
    page.fill(TEXT, "Mine.")
    Incident.objects.filter(pk=incident.pk).update(postmortem="Drafted.")

    page.get_by_test_id("acknowledge").click()
    expect(page.get_by_test_id("postmortem")).to_have_text("Drafted.")
    expect(page.locator(TEXT)).to_be_visible()
    expect(page.locator(TEXT)).to_have_value("Mine.")
    page.get_by_role("button", name="Save the post-mortem").click()

    expect(page.get_by_role("alert")).to_contain_text("yours is not saved")
    expect(page.locator(TEXT)).to_have_value("Mine.")
    page.goto("/")
    page.goto(f"/incidents/{incident.id}")
    expect(page.locator(TEXT)).to_have_value("Mine.")
    page.get_by_role("button", name="Save the post-mortem").click()
    expect(page.get_by_test_id("postmortem")).to_have_text("Mine.")


def test_a_note_outlives_the_session_of_whoever_types_it(page: Page) -> None:
    username = page.locator(".menu-name").inner_text()
    page.fill(NOTE, WORDS)

    page.context.clear_cookies()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    _sign_in(page, username)

    expect(page.locator(NOTE)).to_have_value(WORDS)


def test_nobody_finds_the_note_of_whoever_was_signed_in_before(
    page: Page, incident: Incident
) -> None:
    other = GrantFactory(role=Role.OPERATOR, cluster=incident.cluster).user
    page.fill(NOTE, WORDS)

    page.context.clear_cookies()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    _sign_in(page, other.username)

    expect(page.locator(".menu-name")).to_have_text(other.username)
    expect(page.locator(NOTE)).to_have_value("")
    kept = page.evaluate("Object.keys(sessionStorage).filter((key) => key.startsWith('drydock'))")
    assert kept == []
