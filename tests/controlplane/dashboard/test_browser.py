"""The fleet's pages in a real browser: the map by pointer and keys, orders, moves, approvals."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db.models import F
from django.utils import timezone
from playwright.sync_api import APIResponse, Browser, Page, Route, expect
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from controlplane import redis_keys
from controlplane.fleet.models import Cluster, Node
from controlplane.health.models import NodeSample
from controlplane.incidents.models import Approval, Incident, PlaybookRun
from controlplane.jobs.models import Job
from tests.browser import LIVE_MS, await_drawn, operator_page
from tests.controlplane.dashboard.world import RAW, Fleet, one_fleet, ten_samples
from tests.factories import ApprovalFactory, GpuFactory, NodeFactory, PlaybookFactory

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
]

#: A page that nobody looks at, and that somebody looks at again.
AWAY = """
away = true;
Object.defineProperty(Document.prototype, "hidden", { get: () => away });
"""
BACK = "away = false; document.dispatchEvent(new Event('visibilitychange'))"

PLAN: dict[str, Any] = {
    "steps": [{"title": "Reboot it", "disruptive": True, "does": ["power cycle alpha-01"]}],
    "jobs": [],
    "gpu_hours_at_stake": 0.5,
    "money": "1.00 USD",
    "objections": [],
    "budgets": [],
    "notes": [],
}


@pytest.fixture
def fleet(transactional_db: None) -> Fleet:
    return one_fleet()


@pytest.fixture
def samples(fleet: Fleet, settings: Settings) -> list[NodeSample]:
    settings.SAMPLE_INTERVAL_S = 60  # so long that no slow page finds them old
    return ten_samples(fleet)


@pytest.fixture
def page(browser: Browser, live_server: LiveServer, fleet: Fleet) -> Iterator[Page]:
    with operator_page(browser, live_server.url, fleet.cluster) as page:
        yield page


def _changed(fleet: Fleet) -> None:
    Cluster.objects.filter(pk=fleet.cluster.pk).update(change_seq=F("change_seq") + 1)


# --- The map --------------------------------------------------------------------------------------


def test_the_keyboard_reaches_each_card_and_opens_its_node(page: Page, fleet: Fleet) -> None:
    page.goto(f"/clusters/{fleet.cluster.id}")
    await_drawn(page)
    told = page.get_by_test_id("map-read")
    page.get_by_test_id("map").focus()
    expect(told).to_contain_text("alpha-01 GPU 0")

    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(told).to_contain_text("alpha-01 GPU 3 · Allocated · xid-79")

    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("alpha-01")


def test_the_pointer_is_told_what_it_points_at(page: Page, fleet: Fleet) -> None:
    page.goto(f"/clusters/{fleet.cluster.id}")
    page.get_by_test_id("map").focus()
    expect(page.get_by_test_id("map-read")).to_contain_text("alpha-01")

    page.get_by_test_id("map").hover(position={"x": 75, "y": 24})

    expect(page.locator(".map-tip")).to_contain_text("alpha-01 GPU")


def test_map_and_table_are_live(page: Page, fleet: Fleet) -> None:
    page.goto(f"/clusters/{fleet.cluster.id}")
    page.get_by_test_id("map").focus()
    expect(page.get_by_test_id("map-read")).to_contain_text("Allocated")

    Node.objects.filter(pk=fleet.node.pk).update(state="quarantined")
    _changed(fleet)

    row = page.locator('[data-node="alpha-01"]')
    expect(row).to_have_attribute("data-state", "quarantined", timeout=LIVE_MS)
    page.keyboard.press("ArrowRight")
    expect(page.get_by_test_id("map-read")).to_contain_text("Quarantined", timeout=LIVE_MS)


def test_a_filter_is_applied_at_once_and_stands_in_the_address(page: Page, fleet: Fleet) -> None:
    page.goto(f"/clusters/{fleet.cluster.id}")

    page.get_by_label("State").select_option("allocated")

    expect(page).to_have_url(f"{page.url.split('?')[0]}?state=allocated")
    expect(page.get_by_test_id("node-row")).to_have_count(1)


def test_a_list_is_downloaded_as_it_is_filtered(page: Page, fleet: Fleet) -> None:
    page.goto(f"/failures?node={fleet.node.pk}&sort=code")
    with page.expect_download() as download:
        page.get_by_test_id("export-csv").click()
    assert download.value.suggested_filename.startswith("drydock-failures-")
    assert RAW in download.value.path().read_text()


@pytest.fixture
def failing_page(browser: Browser, live_server: LiveServer, fleet: Fleet) -> Iterator[Page]:
    """One that may be cut off for a moment."""
    with operator_page(browser, live_server.url, fleet.cluster, expected="ERR_FAILED") as page:
        yield page


def test_what_the_map_missed_it_asks_for_again(failing_page: Page, fleet: Fleet) -> None:
    page = failing_page
    page.goto(f"/clusters/{fleet.cluster.id}")
    told = page.get_by_test_id("map-read")
    page.get_by_test_id("map").focus()
    expect(told).to_contain_text("Allocated")
    page.route("**/map", lambda route: route.abort(), times=1)

    Node.objects.filter(pk=fleet.node.pk).update(state="quarantined")
    _changed(fleet)

    expect(told).to_contain_text("Quarantined", timeout=LIVE_MS)


def test_a_resting_pointer_is_told_what_changes_below_it(page: Page, fleet: Fleet) -> None:
    page.goto(f"/clusters/{fleet.cluster.id}")
    page.get_by_test_id("map").focus()
    expect(page.get_by_test_id("map-read")).to_contain_text("alpha-01")
    page.get_by_test_id("map").blur()
    page.get_by_test_id("map").hover(position={"x": 75, "y": 24})
    expect(page.locator(".map-tip")).to_contain_text("Allocated")

    Node.objects.filter(pk=fleet.node.pk).update(state="quarantined")
    _changed(fleet)

    expect(page.locator(".map-tip")).to_contain_text("Quarantined", timeout=LIVE_MS)
    expect(page.get_by_test_id("map-read")).to_contain_text("Quarantined")


def test_an_older_answer_never_overtakes_a_newer_map(page: Page, fleet: Fleet) -> None:
    page.goto(f"/clusters/{fleet.cluster.id}")
    told, row = page.get_by_test_id("map-read"), page.locator('[data-node="alpha-01"]')
    page.get_by_test_id("map").focus()
    expect(told).to_contain_text("Allocated")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    held: list[tuple[Route, APIResponse]] = []
    page.route("**/map", lambda route: held.append((route, route.fetch())), times=1)

    Node.objects.filter(pk=fleet.node.pk).update(state="quarantined")
    _changed(fleet)
    expect(row).to_have_attribute("data-state", "quarantined", timeout=LIVE_MS)
    Node.objects.filter(pk=fleet.node.pk).update(state="suspect")
    _changed(fleet)
    expect(row).to_have_attribute("data-state", "suspect", timeout=LIVE_MS)
    assert sum(url.endswith("/map") for url in asked) == 1

    [(route, answer)] = held
    route.fulfill(response=answer)

    expect(told).to_contain_text("Suspect", timeout=LIVE_MS)
    assert sum(url.endswith("/map") for url in asked) == 2


# --- A node ---------------------------------------------------------------------------------------


def test_an_order_shows_its_dry_run_then_is_given(page: Page, fleet: Fleet) -> None:
    step = {"key": "cycle", "title": "Reboot it", "disruptive": True, "does": ["cycle {node}"]}
    PlaybookFactory(name="reboot-node", steps=[step])
    page.goto(f"/nodes/{fleet.node.id}")

    page.get_by_test_id("ask-reboot").click()
    expect(page.get_by_test_id("plan")).to_contain_text("cycle alpha-01")
    assert not PlaybookRun.objects.filter(playbook="reboot-node").exists()

    page.fill("#order-reason", "fan rattles")
    page.get_by_test_id("do-order").click()

    expect(page.locator('[data-testid="node-run"][data-playbook="reboot-node"]')).to_be_visible()
    assert PlaybookRun.objects.get(playbook="reboot-node").context["reason"] == "fan rattles"


def test_what_was_typed_outlives_what_changes_meanwhile(page: Page, fleet: Fleet) -> None:
    page.goto(f"/nodes/{fleet.node.id}?order=drain")
    page.fill("#order-reason", "fan rattles")

    Node.objects.filter(pk=fleet.node.pk).update(hold_reason="Ada looks at it")
    _changed(fleet)

    expect(page.get_by_test_id("objections")).to_contain_text("Ada", timeout=LIVE_MS)
    expect(page.locator("#order-reason")).to_have_value("fan rattles")


def test_what_was_refused_outlives_what_changes_meanwhile(
    browser: Browser, live_server: LiveServer, fleet: Fleet
) -> None:
    refusal = "status of 409"
    with operator_page(browser, live_server.url, fleet.cluster, expected=refusal) as page:
        page.goto(f"/nodes/{fleet.node.id}?order=maintenance")
        page.fill("#hours", "some")
        page.fill("#order-reason", "fan rattles")
        page.get_by_test_id("do-order").click()
        expect(page.get_by_role("alert")).to_contain_text("for how many hours")

        Job.objects.filter(pk=fleet.job.pk).update(name="finetune")
        _changed(fleet)

        expect(page.get_by_text("finetune").first).to_be_visible(timeout=LIVE_MS)
        expect(page.locator("#hours")).to_have_value("some")
        expect(page.locator("#order-reason")).to_have_value("fan rattles")


def test_readings_are_drawn_and_told_in_numbers(
    page: Page, fleet: Fleet, samples: list[NodeSample]
) -> None:
    page.goto(f"/nodes/{fleet.node.id}")
    expect(page.locator("#readings svg")).to_have_count(8)
    expect(page.locator(".r-line--chosen").first).to_have_attribute("data-card", "3")

    page.get_by_role("button", name="GPU 2").click()
    page.get_by_text("The numbers").click()

    expect(page.locator('[data-last="temperature_c"]')).to_have_text("59")
    expect(page.locator("#readings-table tbody tr").first).to_contain_text("59")


def test_cards_to_choose_from_are_those_that_there_are_and_the_faulty_ones_are_red(
    page: Page, fleet: Fleet, samples: list[NodeSample]
) -> None:
    page.goto(f"/nodes/{fleet.node.id}")
    buttons = page.locator("#readings-cards button")
    expect(buttons).to_have_count(8)
    expect(page.locator("#readings-cards .picker--bad")).to_have_text(["GPU 3"])

    Incident.objects.filter(pk=fleet.incident.pk).update(state="resolved")
    GpuFactory(node=fleet.node, index=8)
    _changed(fleet)

    expect(page.locator("#readings-cards .picker--bad")).to_have_count(0, timeout=LIVE_MS)
    expect(buttons).to_have_count(9, timeout=LIVE_MS)
    expect(page.get_by_role("button", name="GPU 3")).to_have_attribute("aria-pressed", "true")


def test_what_a_card_reads_stays_true_without_any_change(
    page: Page, fleet: Fleet, samples: list[NodeSample]
) -> None:
    page.goto(f"/nodes/{fleet.node.id}")
    cell = page.get_by_test_id("card").nth(2).locator('[data-reading="temperature_c"]')
    expect(cell).to_have_text("59")
    reading = {"uuid": fleet.node.gpus.get(index=2).uuid, "temperature_c": 71.4}

    NodeSample.objects.create(node=fleet.node, at=timezone.now(), gpus=[reading])

    expect(cell).to_have_text("71", timeout=LIVE_MS)


def test_old_readings_are_not_told_as_of_now(
    page: Page, fleet: Fleet, samples: list[NodeSample]
) -> None:
    page.goto(f"/nodes/{fleet.node.id}")
    expect(page.locator("#readings-read")).to_have_text("GPU 3, now")

    NodeSample.objects.update(at=F("at") - timedelta(minutes=5))
    page.reload()

    at = NodeSample.objects.latest("at").at
    expect(page.locator("#readings-read")).to_have_text(f"GPU 3, last read {at:%H:%M:%S} UTC")


def test_without_a_reading_left_there_is_nothing_to_be_read(
    page: Page, fleet: Fleet, samples: list[NodeSample]
) -> None:
    page.clock.install()
    page.goto(f"/nodes/{fleet.node.id}")
    page.get_by_text("The numbers").click()
    expect(page.locator("#readings-table tbody tr")).not_to_have_count(0)

    NodeSample.objects.all().delete()
    page.clock.fast_forward(10_000)

    expect(page.get_by_text("No reading was kept")).to_be_visible()
    expect(page.locator("#readings-read")).to_have_text("")
    expect(page.locator("#readings-table tbody tr")).to_have_count(0)
    chosen = page.get_by_role("button", name="GPU 2")
    chosen.click()
    expect(chosen).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#readings-read")).to_have_text("")


def test_readings_are_drawn_once_their_tab_is_looked_at(
    page: Page, fleet: Fleet, samples: list[NodeSample]
) -> None:
    page.add_init_script(AWAY)
    page.clock.install()
    page.goto(f"/nodes/{fleet.node.id}")
    page.clock.pause_at(timezone.now() + timedelta(hours=1))

    page.evaluate(BACK)

    expect(page.locator("#readings svg")).to_have_count(8)


# --- A job's replica moves ------------------------------------------------------------------------


def test_a_chosen_node_outlives_what_changes_meanwhile(page: Page, fleet: Fleet) -> None:
    Job.objects.filter(pk=fleet.job.pk).update(
        coordinator_address="127.0.0.1:4000", gpus_per_replica=0
    )
    third = NodeFactory(cluster=fleet.cluster, name="alpha-03")
    page.goto(f"/jobs/{fleet.job.id}?move=0")
    nodes = page.get_by_label("To node")
    nodes.select_option("alpha-03")
    unrolled = nodes.element_handle()

    Node.objects.filter(pk=fleet.node.pk).update(reset_pending="xid-94")
    _changed(fleet)
    expect(page.get_by_test_id("plan")).to_contain_text("xid-94", timeout=LIVE_MS)
    assert unrolled.is_visible()

    NodeFactory(cluster=fleet.cluster, name="alpha-04")
    _changed(fleet)
    expect(nodes.locator("option")).to_have_count(3, timeout=LIVE_MS)
    expect(nodes).to_have_value(third.id)


# --- Signing --------------------------------------------------------------------------------------


def test_a_plan_is_read_and_signed(page: Page, fleet: Fleet) -> None:
    approval = ApprovalFactory(run=fleet.run, plan=PLAN, digest="d" * 64)
    page.goto("/")
    page.get_by_text("Show the exact plan and approve it").click()
    expect(page.get_by_test_id("plan")).to_contain_text("power cycle alpha-01")

    page.fill(f"#approval-{approval.id}", "the card is dead")
    page.get_by_test_id("approve").click()

    expect(page).to_have_url(f"{page.url.split('/incidents')[0]}/incidents/{fleet.incident.id}")
    assert Approval.objects.get(pk=approval.pk).state == "approved"


#: Tells which button of the page sent a form, and sends none.
NOTE_PRESSED = """
pressed = [];
document.addEventListener("submit", (event) => {
  event.preventDefault();
  pressed.push(event.submitter.dataset.testid);
});
"""


def test_enter_in_the_reason_for_a_plan_neither_signs_nor_rejects(page: Page, fleet: Fleet) -> None:
    approval = ApprovalFactory(run=fleet.run, plan=PLAN)
    page.goto("/")
    page.evaluate(NOTE_PRESSED)
    page.get_by_text("Show the exact plan and approve it").click()

    page.fill(f"#approval-{approval.id}", "not on a Friday")
    page.keyboard.press("Enter")
    page.get_by_test_id("reject").click()

    assert page.evaluate("pressed") == ["reject"]


@pytest.mark.parametrize(
    ("path", "state", "field", "deed"),
    [
        ("incidents", "needs_operator", "run-reason-", "cancel"),
        ("incidents", "paused", "resume-reason-", "cancel"),
        ("incidents", "paused", "deed-", "cancel-run"),
        ("incidents", "running", "deed-", "cancel-run"),
        ("runs", "needs_operator", "run-reason", "cancel"),
    ],
)
def test_enter_in_the_reason_for_a_playbook_does_neither_of_two_deeds(
    path: str, state: str, field: str, deed: str, page: Page, fleet: Fleet
) -> None:
    PlaybookRun.objects.filter(pk=fleet.run.pk).update(state=state)
    found = {"incidents": fleet.incident.id, "runs": fleet.run.id}[path]
    page.goto(f"/{path}/{found}")
    page.evaluate(NOTE_PRESSED)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")

    page.fill(f"[id^={field}]", "not on a Friday")
    page.keyboard.press("Enter")
    page.get_by_test_id(deed).click()

    assert page.evaluate("pressed") == [deed]


@pytest.mark.parametrize("path", ["incidents", "nodes"])
def test_a_plan_fits_a_phone(path: str, page: Page, fleet: Fleet) -> None:
    ApprovalFactory(run=fleet.run, plan=PLAN)
    page.set_viewport_size({"width": 390, "height": 844})

    page.goto(
        {"incidents": f"/incidents/{fleet.incident.id}", "nodes": f"/nodes/{fleet.node.id}"}[path]
    )

    expect(page.get_by_role("heading", level=1)).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# --- The header -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [390, 700, 1000])
def test_that_nobody_keeps_watch_is_seen_however_narrow_the_page(
    width: int, page: Page, fleet: Fleet
) -> None:
    redis.Redis.from_url(settings.REDIS_URL).delete(redis_keys.KEEPER_ALIVE)
    page.set_viewport_size({"width": width, "height": 844})

    page.goto("/")

    told = page.get_by_test_id("automation")
    expect(told).to_have_text("Automation silent")
    expect(told).to_be_in_viewport(ratio=1)
    expect(told.locator(".icon")).to_be_in_viewport(ratio=1)
    expect(page.get_by_test_id("account")).to_be_in_viewport(ratio=1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# --- Refused --------------------------------------------------------------------------------------


def test_below_a_refused_order_the_browser_stands_at_the_page(
    browser: Browser, live_server: LiveServer, fleet: Fleet
) -> None:
    refusal = "status of 409"
    with operator_page(browser, live_server.url, fleet.cluster, expected=refusal) as page:
        page.goto("/playbooks")
        page.get_by_text("Announce maintenance").click()
        page.get_by_label("for hours").fill("some")
        page.fill("#window-reason", "switch firmware")

        page.get_by_role("button", name="Announce").click()

        expect(page.get_by_role("alert")).to_contain_text("for how many hours")
        expect(page).to_have_url(f"{live_server.url}/playbooks?cluster={fleet.cluster.id}")
