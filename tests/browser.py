"""A real browser, and a page in it that an operator has signed in to."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

if TYPE_CHECKING:
    from controlplane.fleet.models import Cluster

#: A change is seen by itself, at the latest after this many milliseconds on a busy machine.
LIVE_MS = 30_000
#: Until a connection of a closed page has ended, at most.
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright, pytest.MonkeyPatch.context() as patch:
        expect.set_options(timeout=LIVE_MS)
        # Playwright's loop lives in this thread; the tests themselves are not asynchronous.
        patch.setitem(os.environ, "DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        running = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
        )
        yield running
        running.close()


@contextmanager
def operator_page(
    browser: Browser, url: str, cluster: Cluster, *, expected: str = "(?!)"
) -> Iterator[Page]:
    """A page of a signed-in operator that must end without an error in its console.

    `expected`: what of its messages is none, as a pattern.
    """
    from controlplane.accounts.choices import Role  # Django has its settings only by now
    from tests.factories import PASSWORD, GrantFactory

    user = GrantFactory(role=Role.OPERATOR, cluster=cluster).user
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text))
    page.goto("/login")
    page.fill("#id_username", user.username)
    page.fill("#id_password", PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(url + "/")
    page.wait_for_load_state("load")  # keys pressed before its scripts ran would be lost
    await_drawn(page)
    yield page
    context.close()
    _await_answers()
    assert [trouble for trouble in troubles if not re.search(expected, trouble)] == []


def await_drawn(page: Page) -> None:
    """Keys that are pressed before that Chromium drops."""
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))")


def _await_answers() -> None:
    """Until the server has done with what the page asked last: it would still be reading tables
    that are emptied after a test."""
    answering = [one for one in threading.enumerate() if "process_request_thread" in one.name]
    for thread in answering:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in answering)
