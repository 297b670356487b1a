"""The forms of the automation page in a real browser: what was typed in them stays, and the rest
follows the server."""

from __future__ import annotations

import pytest
from django.db.models import F
from playwright.sync_api import Browser, expect
from pytest_django.live_server_helper import LiveServer

from controlplane.accounts.choices import Role
from controlplane.accounts.models import SYSTEM, Grant
from controlplane.fleet.models import Cluster, MaintenanceWindow
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import Scope
from tests.browser import LIVE_MS, operator_page
from tests.controlplane.dashboard.world import Fleet, one_fleet
from tests.factories import MaintenanceWindowFactory

pytestmark = [
    pytest.mark.browser,
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture
def fleet(transactional_db: None) -> Fleet:
    return one_fleet()


def test_what_was_refused_outlives_what_changes_meanwhile(
    browser: Browser, live_server: LiveServer, fleet: Fleet
) -> None:
    refusal = "status of 409"
    with operator_page(browser, live_server.url, fleet.cluster, expected=refusal) as page:
        page.goto("/playbooks")
        page.get_by_text("Announce maintenance").click()
        page.locator("#rack").select_option("alpha-r1")
        page.get_by_label("for hours").fill("some")
        page.fill("#window-reason", "switch firmware")
        page.get_by_role("button", name="Announce").click()
        expect(page.get_by_role("alert")).to_contain_text("for how many hours")

        MaintenanceWindowFactory(cluster=fleet.cluster, node=fleet.other, reason="new fans")
        Cluster.objects.filter(pk=fleet.cluster.pk).update(change_seq=F("change_seq") + 1)

        expect(page.get_by_text("new fans")).to_be_visible(timeout=LIVE_MS)
        expect(page.get_by_label("for hours")).to_have_value("some")
        page.get_by_label("for hours").fill("3")
        page.get_by_role("button", name="Announce").click()
        expect(page.get_by_test_id("window")).to_have_count(2)
    assert MaintenanceWindow.objects.get(reason="switch firmware").rack == fleet.rack


def test_a_field_follows_the_server_until_somebody_types_in_it(
    browser: Browser, live_server: LiveServer, fleet: Fleet
) -> None:
    with operator_page(browser, live_server.url, fleet.cluster) as page:
        Grant.objects.update(role=Role.ADMIN)
        page.goto("/playbooks")
        budget, nodes = page.locator('[data-scope="cluster"]'), page.locator("#nodes-cluster")
        budget.get_by_text("Change").click()

        incidents.set_limit(SYSTEM, fleet.cluster.pk, Scope.CLUSTER, 7, "more spares")
        expect(budget).to_contain_text("of 7", timeout=LIVE_MS)
        expect(nodes).to_have_value("7")

        nodes.fill("3")
        incidents.set_limit(SYSTEM, fleet.cluster.pk, Scope.CLUSTER, 9, "and more")
        expect(budget).to_contain_text("of 9", timeout=LIVE_MS)
        expect(nodes).to_have_value("3")
