"""The command palette and the keys, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from django.db.models import F
from playwright.sync_api import Browser, Locator, Page, Route, expect
from pytest_django.live_server_helper import LiveServer

from controlplane.fleet.models import Cluster, Node
from controlplane.incidents.models import Incident, PlaybookRun
from tests.browser import LIVE_MS, await_drawn, operator_page
from tests.controlplane.dashboard.world import Fleet, one_fleet
from tests.factories import IncidentFactory, NodeFactory

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture
def fleet(transactional_db: None) -> Fleet:
    return one_fleet()


@pytest.fixture
def page(browser: Browser, live_server: LiveServer, fleet: Fleet) -> Iterator[Page]:
    with operator_page(browser, live_server.url, fleet.cluster) as page:
        yield page


def _palette(page: Page) -> Locator:
    return page.get_by_test_id("palette")


def _chosen(page: Page) -> Locator:
    return _palette(page).locator('[role="option"][aria-selected="true"]')


def _changed(fleet: Fleet) -> None:
    Cluster.objects.filter(pk=fleet.cluster.pk).update(change_seq=F("change_seq") + 1)


def _open(page: Page, address: str) -> None:
    page.goto(address)
    await_drawn(page)


def _at(path: str) -> re.Pattern[str]:
    return re.compile(rf"^https?://[^/]+{re.escape(path)}$")


# --- The palette ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["/", "Control+k", "Meta+k"])
def test_a_key_opens_the_palette_and_escape_gives_the_focus_back(key: str, page: Page) -> None:
    before = page.get_by_role("link", name="Clusters", exact=True)
    before.focus()

    page.keyboard.press(key)
    expect(page.get_by_role("combobox")).to_be_focused()

    page.keyboard.press("Escape")
    expect(_palette(page)).to_be_hidden()
    expect(before).to_be_focused()


def test_what_is_typed_is_found_and_enter_opens_it(page: Page, fleet: Fleet) -> None:
    page.keyboard.press("/")
    page.keyboard.type("alpha-02")
    expect(_chosen(page)).to_contain_text("alpha-02")
    field = page.get_by_role("combobox")
    expect(field).to_have_attribute(
        "aria-activedescendant", _chosen(page).get_attribute("id") or ""
    )

    page.keyboard.press("Enter")

    expect(page).to_have_url(_at(f"/nodes/{fleet.other.id}"))


def test_enter_waits_for_what_belongs_to_the_words(page: Page, fleet: Fleet) -> None:
    page.keyboard.press("/")
    page.keyboard.type("alpha-0")
    expect(_chosen(page)).to_contain_text("alpha-01")

    page.keyboard.type("2")
    page.keyboard.press("Enter")

    expect(page).to_have_url(_at(f"/nodes/{fleet.other.id}"))


def test_an_answer_that_comes_late_is_dropped(page: Page, fleet: Fleet) -> None:
    held: list[Route] = []
    page.route("**/search?q=alpha-01", lambda route: held.append(route))
    page.keyboard.press("/")
    with page.expect_request("**/search?q=alpha-01"):
        page.keyboard.type("alpha-01")

    page.get_by_role("combobox").fill("alpha-02")
    expect(_chosen(page)).to_contain_text("alpha-02")
    held[0].fulfill(body="<a role='option' href='/late'>late</a>")

    expect(page.get_by_test_id("found").get_by_role("option")).to_have_count(1)
    expect(_chosen(page)).to_contain_text("alpha-02")


def test_arrows_go_through_all_kinds_and_round(page: Page) -> None:
    page.keyboard.press("/")
    expect(_chosen(page)).to_contain_text("Overview")

    page.keyboard.press("ArrowDown")
    expect(_chosen(page)).to_contain_text("Clusters")

    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(_chosen(page)).to_contain_text("Show all keys")


def test_nothing_found_is_said(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("zzz")

    expect(page.get_by_test_id("palette-status")).to_have_text(
        "Nothing that you may see fits “zzz”."
    )


def test_an_order_is_told_in_its_own_words(page: Page, fleet: Fleet) -> None:
    _open(page, f"/nodes/{fleet.node.id}")
    page.keyboard.press("/")
    page.keyboard.type("spare")

    expect(_chosen(page)).to_contain_text("Make alpha-01 a spare…")


def test_an_order_from_the_palette_is_only_its_dry_run(page: Page, fleet: Fleet) -> None:
    _open(page, f"/nodes/{fleet.node.id}")
    page.keyboard.press("/")
    page.keyboard.type("quar")
    expect(_chosen(page)).to_contain_text("Quarantine alpha-01…")

    page.keyboard.press("Enter")
    expect(page.get_by_test_id("order")).to_have_attribute("data-verb", "quarantine")
    assert list(PlaybookRun.objects.all()) == [fleet.run]

    page.keyboard.press("/")
    expect(_chosen(page)).to_contain_text("Give the reason: Quarantine alpha-01.")
    page.keyboard.press("Enter")
    expect(page.locator("#order-reason")).to_be_focused()


def test_the_name_of_a_node_means_the_node_and_not_its_orders(page: Page, fleet: Fleet) -> None:
    _open(page, f"/nodes/{fleet.node.id}")
    page.keyboard.press("/")
    page.keyboard.type("alpha-01")
    expect(_chosen(page)).to_have_attribute("href", f"/nodes/{fleet.node.id}")

    page.get_by_role("combobox").fill("reboot alpha-01")
    expect(_chosen(page)).to_contain_text("Reboot alpha-01…")


def test_an_incident_offers_what_its_page_can_do(page: Page, fleet: Fleet) -> None:
    _open(page, f"/incidents/{fleet.incident.id}")
    page.keyboard.press("/")
    page.keyboard.type("ackn")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("acknowledge")).to_be_focused()
    assert Incident.objects.get(pk=fleet.incident.pk).owner is None

    page.keyboard.press("/")
    page.keyboard.type("note")
    page.keyboard.press("Enter")
    expect(page.locator("#note")).to_be_focused()


def test_the_theme_is_a_command(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.keyboard.press("/")
    page.keyboard.type("dark")
    page.keyboard.press("Enter")

    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(_palette(page)).to_be_hidden()


def test_focus_returns_though_a_live_update_replaced_what_had_it(page: Page, fleet: Fleet) -> None:
    _open(page, "/incidents/")
    page.keyboard.press("j")
    page.keyboard.press("/")

    Incident.objects.filter(pk=fleet.incident.pk).update(title="Told anew")
    _changed(fleet)
    expect(page.locator("#incidents")).to_contain_text("Told anew", timeout=LIVE_MS)
    page.keyboard.press("Escape")

    expect(page.get_by_role("link", name="Told anew")).to_be_focused()


@pytest.mark.parametrize("width", [390, 1280])
def test_a_finger_opens_it_and_it_fits(width: int, page: Page) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.get_by_role("button", name="Search and commands").click()
    page.keyboard.type("alpha")
    expect(_chosen(page)).to_contain_text("alpha-01")

    expect(_palette(page)).to_be_in_viewport(ratio=1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.mouse.click(3, 3)
    expect(_palette(page)).to_be_hidden()


# --- Keys -----------------------------------------------------------------------------------------

#: In one go: keys that come too long after one another are no sequence.
PRESS = """(keys) => keys.forEach((key) => {
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
})"""


@pytest.mark.parametrize(
    ("letter", "heading"),
    [
        ("j", "Jobs"),
        ("i", "Incidents"),
        ("f", "Failures"),
        ("r", "Spares and repairs"),
        ("a", "Automation"),
        ("t", "Audit"),
        ("c", "alpha"),  # whoever sees one cluster is led to it
    ],
)
def test_g_and_a_letter_go_to_a_page(letter: str, heading: str, page: Page) -> None:
    page.evaluate(PRESS, ["g", letter])

    expect(page.get_by_role("heading", level=1)).to_have_text(heading)


def test_the_help_tells_every_key(page: Page) -> None:
    _open(page, "/jobs/")
    page.keyboard.press("?")
    told = page.get_by_test_id("keys")

    expect(told).to_be_visible()
    expect(told.locator("dl > div")).to_have_count(6 + 8)
    page.keyboard.press("g")
    page.keyboard.press("i")
    page.keyboard.press("Escape")
    expect(told).to_be_hidden()
    expect(page).to_have_url(_at("/jobs/"))


def test_keys_rest_while_somebody_types_or_holds_another_key(page: Page, fleet: Fleet) -> None:
    _open(page, "/incidents/")
    code = page.get_by_label("Code")
    code.focus()
    page.keyboard.type("/?gjk")
    expect(code).to_have_value("/?gjk")
    expect(_palette(page)).to_be_hidden()

    page.get_by_label("Severity").focus()
    page.keyboard.press("j")
    page.locator("body").evaluate("() => document.activeElement.blur()")
    page.keyboard.press("Alt+j")
    page.keyboard.press("Control+j")
    assert page.evaluate("document.activeElement === document.body")
    expect(page.get_by_test_id("keys")).to_be_hidden()


def test_j_and_k_move_through_rows_and_o_opens(page: Page, fleet: Fleet) -> None:
    rows = sorted(IncidentFactory.create_batch(3, cluster=fleet.cluster), key=lambda one: one.id)
    for number, row in enumerate(rows, 1):
        Incident.objects.filter(pk=row.pk).update(title=f"Number {number}")
    _open(page, "/incidents/")

    page.keyboard.press("j")
    expect(page.get_by_role("link", name="Number 3")).to_be_focused()
    page.keyboard.press("k")
    expect(page.get_by_role("link", name="Number 3")).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(page.get_by_role("link", name="Number 2")).to_be_focused()
    page.keyboard.press("o")

    expect(page).to_have_url(_at(f"/incidents/{rows[1].id}"))


def test_the_row_is_kept_through_live_updates(page: Page, fleet: Fleet) -> None:
    NodeFactory(cluster=fleet.cluster, name="alpha-03")
    _open(page, f"/clusters/{fleet.cluster.id}")
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.get_by_role("link", name="alpha-02", exact=True)).to_be_focused()

    Node.objects.filter(pk=fleet.other.pk).update(state="quarantined")
    _changed(fleet)
    row = page.locator('[data-node="alpha-02"]')
    expect(row).to_have_attribute("data-state", "quarantined", timeout=LIVE_MS)
    expect(page.get_by_role("link", name="alpha-02", exact=True)).to_be_focused()
    assert row.locator("a").first.evaluate("(link) => link.matches(':focus-visible')")

    page.keyboard.press("j")
    expect(page.get_by_role("link", name="alpha-03", exact=True)).to_be_focused()


def test_a_row_that_left_the_list_passes_its_place_on(page: Page, fleet: Fleet) -> None:
    gone = [NodeFactory(cluster=fleet.cluster, name=f"alpha-{number}") for number in ("03", "04")]
    _open(page, f"/clusters/{fleet.cluster.id}?text=alpha-0")
    for _ in range(3):
        page.keyboard.press("j")
    expect(page.get_by_role("link", name="alpha-03", exact=True)).to_be_focused()

    Node.objects.filter(pk=gone[0].pk).update(name="other-03")
    _changed(fleet)
    expect(page.get_by_test_id("node-row")).to_have_count(3, timeout=LIVE_MS)
    page.keyboard.press("j")

    expect(page.get_by_role("link", name="alpha-04", exact=True)).to_be_focused()


def test_on_an_incident_they_move_through_the_steps(page: Page, fleet: Fleet) -> None:
    _open(page, f"/incidents/{fleet.incident.id}")

    page.keyboard.press("j")
    page.keyboard.press("Enter")

    expect(page.get_by_test_id("step").locator("details")).to_have_attribute("open", "")


def test_rows_are_about_things_and_not_about_the_list_itself(page: Page, fleet: Fleet) -> None:
    _open(page, "/failures")
    page.keyboard.press("j")

    expect(page.get_by_test_id("failure-row").get_by_role("link", name="alpha-01")).to_be_focused()
