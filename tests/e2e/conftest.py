"""The running product as people and programs use it: a page in Chromium, and the API."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.browser import LIVE_MS
from tests.product import Product

#: Far beyond the product's own deadlines, each of which a slow machine may use up in turn.
PATIENCE_S = 300.0
PATIENCE_MS = PATIENCE_S * 1000

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TOKEN = """
from controlplane.accounts import actions
from controlplane.accounts.models import SYSTEM, User
_, text = actions.create_token(
    SYSTEM, User.objects.get(), name="mover", scope="operator", cluster_id=None, ttl_s=3600
)
print(text)
"""


@dataclass
class Api:
    """The product's API, as an operator's program uses it."""

    url: str
    token: str

    def __call__(self, path: str, **order: Any) -> Any:
        """What a GET answers, or a POST of `order`."""
        request = urllib.request.Request(  # noqa: S310 - the product's own address
            f"{self.url}/api/v1/{path}",
            json.dumps(order).encode() if order else None,
            {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as refused:
            refused.add_note(refused.read().decode())
            raise


@pytest.fixture(scope="module")
def api(product: Product) -> Api:
    made = product.manage("shell", "--no-imports", "-v0", "-c", TOKEN)
    return Api(product.url, made.stdout.strip().splitlines()[-1])


@dataclass(frozen=True)
class Seen:
    """A process as it was when it was looked at; it may have ended since."""

    process: psutil.Process
    parent: int
    environment: dict[str, str]
    words: list[str]


def seen(product: Product) -> list[Seen]:
    """The product's processes, without those that end meanwhile."""
    found = []
    for one in product.processes():
        with suppress(psutil.Error):
            found.append(Seen(one, one.ppid(), one.environ(), one.cmdline()))
    return found


def process_of(product: Product, placement: str) -> int:
    """The demo job's rank there, itself: its loaders and writers have its environment too."""
    found = [
        one
        for one in seen(product)
        if one.environment.get("DRYDOCK_PLACEMENT") == placement
        and "examples/train_gpt.py" in one.words
    ]
    pids = {one.process.pid for one in found}
    (rank,) = [one for one in found if one.parent not in pids]
    return int(rank.process.pid)


@pytest.fixture
def page(chromium: str, product: Product) -> Iterator[Page]:
    """A logged-in page; whatever it complains of fails the test."""
    complaints: list[str] = []
    expect.set_options(timeout=LIVE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type == "error" else None,
        )
        page.goto(product.url)
        page.fill("input[name=username]", "admin")
        page.fill("input[name=password]", product.password)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(lambda url: "login" not in url)
        yield page
        browser.close()
    assert complaints == []
