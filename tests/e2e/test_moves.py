"""A replica of the running job moves to another node, by the API and from the job's page, and
nobody misses a sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.conftest import PATIENCE_MS, PATIENCE_S, Api
from tests.product import Product

pytestmark = pytest.mark.e2e

Eventually = Callable[..., Any]


def test_a_replica_moves_without_a_loss(api: Api, product: Product, eventually: Eventually) -> None:
    before = _trains_whole(api, eventually)

    run = api(f"jobs/{before['id']}/migrate", replica=1, reason="an end-to-end test")["result"]
    ended = eventually(lambda: _succeeded(api(f"runs/{run['id']}")), PATIENCE_S, "it has moved")

    after = _trains_on(api, before, eventually)
    here, there = (one["replicas"][1] for one in (before, after))
    moved = f"replica 1 moved from {here['node_name']} to {there['node_name']}"
    assert ended["state_reason"].startswith(moved)
    _assert_only_moved(api, product, before, after, 1)


@pytest.mark.browser
def test_a_person_moves_a_replica_on_the_jobs_page(
    page: Page, api: Api, product: Product, eventually: Eventually
) -> None:
    before = _trains_whole(api, eventually)
    here = before["replicas"][2]["node_name"]
    seat = page.locator('[data-testid="replica"][data-replica="2"]')
    node, moved = seat.locator(".slot-node"), page.get_by_test_id("job-move").first

    # They ask, choose another node than the one proposed, and read what would be done.
    page.goto(f"{product.url}/jobs/")
    page.get_by_role("link", name="gpt-demo").first.click()
    expect(node).to_contain_text(here)
    page.get_by_role("link", name="Move replica 2").click()
    offered = page.get_by_label("To node")
    other = offered.locator("option:not([selected])").first
    there, target = other.inner_text().split(",")[0], other.get_attribute("value")
    offered.select_option(target)
    page.get_by_role("button", name="Show its dry run").click()
    title = f"Move replica 2 of gpt-demo to {there}"
    expect(page.get_by_test_id("move-order")).to_contain_text(f"{title}. It trains on meanwhile.")
    expect(page.get_by_test_id("plan")).to_contain_text(f"agent of {there}: start_rank")
    assert api(f"jobs/{before['id']}")["replicas"] == before["replicas"]

    # They order it, and watch it come true; nothing is reloaded from here on.
    page.get_by_label("Reason").fill("its rack is rewired")
    page.get_by_role("button", name=title).click()
    expect(seat.get_by_test_id("moving")).to_contain_text(f"moving to {there}")
    expect(seat.get_by_test_id("moving")).to_be_in_viewport()
    expect(node).to_contain_text(here)
    expect(node).to_contain_text(there, timeout=PATIENCE_MS)
    expect(moved).to_contain_text(f"replica 2 moved from {here} to {there}", timeout=PATIENCE_MS)
    expect(moved).to_have_attribute("data-state", "succeeded", timeout=PATIENCE_MS)
    expect(moved).to_contain_text("admin: its rack is rewired")
    told = page.get_by_test_id("interruptions").locator("tbody tr")
    expect(told.filter(has_text=f"replica 2 moved from {here} to {there}")).to_have_count(1)
    expect(seat).to_have_attribute("data-state", "active")
    expect(seat.get_by_role("link", name="Move replica 2")).to_be_visible()
    expect(page.get_by_test_id("job-replicas")).to_have_text("4 of 4")

    after = _trains_on(api, before, eventually)
    assert after["replicas"][2]["node_id"] == target
    _assert_only_moved(api, product, before, after, 2)
    expect(page.get_by_test_id("ledger")).to_contain_text(
        "complete: every sample trained exactly once"
    )


def _trains_whole(api: Api, eventually: Eventually) -> Any:
    """The running job, once all its replicas train."""
    (listed,) = api("jobs?state=running")["results"]
    path = f"jobs/{listed['id']}"
    eventually(lambda: api(path)["active_replicas"] == 4, PATIENCE_S, "all replicas train")
    return api(path)


def _succeeded(run: dict[str, Any]) -> dict[str, Any] | None:
    return run if run["state"] == "succeeded" else None


def _trains_on(api: Api, before: dict[str, Any], eventually: Eventually) -> Any:
    """The job, once the ledger of the steps after its move has come."""

    def told() -> dict[str, Any] | None:
        now: dict[str, Any] = api(f"jobs/{before['id']}")
        moved = now["epoch"] > before["epoch"] and now["active_replicas"] == 4
        return now if moved and now["ledger_step"] > before["step"] + 5 else None

    return eventually(told, PATIENCE_S, "it trains on")


def _assert_only_moved(
    api: Api, product: Product, before: dict[str, Any], after: dict[str, Any], index: int
) -> None:
    """The replica trains on another node, the others never stopped, and no sample was lost."""
    here, there = (one["replicas"][index] for one in (before, after))
    stayed, stay = (
        [*one["replicas"][:index], *one["replicas"][index + 1 :]] for one in (before, after)
    )
    assert stay == stayed
    assert there["node_id"] != here["node_id"]
    assert there["placement_id"] != here["placement_id"]
    assert there["state"] == "active"
    # Where processors are short a rank may be silent for longer than the others wait: they go on
    # without it, and it comes back as itself.
    membership = product.membership()
    since = membership.partition(f" granted epoch={before['epoch']} ")[2]
    silences = since.count("how=heartbeat")
    assert 1 <= after["epoch"] - before["epoch"] <= 1 + 2 * silences, membership
    assert after["recomputed_steps"] == before["recomputed_steps"]
    assert api(f"nodes/{here['node_id']}")["state"] == "available"
    assert api(f"nodes/{there['node_id']}")["state"] == "allocated"
    told = api(f"jobs/{before['id']}/ledger?limit=200")["results"]
    assert [one for one in told if one["lost"] or one["duplicated"] or one["dropped"]] == []
    assert len(api(f"incidents?state=open&job={before['id']}")["results"]) <= silences, membership
