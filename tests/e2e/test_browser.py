"""A person logs in, breaks something, and watches it being mended, in a real browser."""

from __future__ import annotations

import subprocess
import sys

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.conftest import PATIENCE_MS, PATIENCE_S
from tests.product import REPOSITORY, Product

pytestmark = [pytest.mark.e2e, pytest.mark.browser]


def test_a_killed_process_is_mended_before_ones_eyes(page: Page, product: Product) -> None:
    page.goto(product.url)
    playing = subprocess.Popen(
        [sys.executable, "manage.py", "scenario", "kill-process", "--json"],
        cwd=REPOSITORY,
        env=product.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The overview tells of it by itself; nothing is reloaded from here on.
    page.get_by_test_id("needs-incident").get_by_role("link").first.click(timeout=PATIENCE_MS)
    state = page.get_by_test_id("incident-state")
    expect(state).to_have_attribute("data-state", "resolved", timeout=PATIENCE_MS)
    expect(page.get_by_text("See it train again").first).to_be_visible()
    expect(page.get_by_text("Post-mortem").first).to_be_visible()
    output, errors = playing.communicate(timeout=PATIENCE_S)
    assert playing.returncode == 0, output + errors


def test_the_jobs_page_moves_without_a_reload(page: Page, product: Product) -> None:
    page.goto(f"{product.url}/jobs/")
    page.get_by_role("link", name="gpt-demo").first.click()
    step = page.get_by_test_id("job-step")
    before = step.inner_text()
    expect(step).not_to_have_text(before)
    expect(page.get_by_test_id("chart").locator("svg").first).to_be_visible()
