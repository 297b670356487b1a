"""A replica of the running job moves to another node, by the API, and nobody misses a sample."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.product import Product

pytestmark = pytest.mark.e2e

TOKEN = """
from controlplane.accounts import actions
from controlplane.accounts.models import SYSTEM, User
_, text = actions.create_token(
    SYSTEM, User.objects.get(), name="mover", scope="operator", cluster_id=None, ttl_s=3600
)
print(text)
"""
MOVED_S = 90.0


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
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)


@pytest.fixture
def api(product: Product) -> Api:
    made = product.manage("shell", "--no-imports", "-v0", "-c", TOKEN)
    return Api(product.url, made.stdout.strip().splitlines()[-1])


def test_a_replica_moves_without_a_loss(
    api: Api, product: Product, eventually: Callable[..., Any]
) -> None:
    (listed,) = api("jobs?state=running")["results"]
    job = f"jobs/{listed['id']}"
    eventually(lambda: api(job)["active_replicas"] == 4, 60.0, "all replicas train")
    before = api(job)

    run = api(f"{job}/migrate", replica=1, reason="an end-to-end test")["result"]
    ended = eventually(lambda: _succeeded(api(f"runs/{run['id']}")), MOVED_S, "it has moved")
    after = eventually(lambda: _trained_on(api(job), before), 60.0, "it trains on")

    here, there = (one["replicas"][1] for one in (before, after))
    moved = f"replica 1 moved from {here['node_name']} to {there['node_name']}, pause "
    assert ended["state_reason"].startswith(moved)
    assert float(re.findall(r"pause ([0-9.]+) s", ended["state_reason"])[0]) < 10
    assert after["epoch"] == before["epoch"] + 1
    assert [one["state"] for one in after["replicas"]] == ["active"] * 4
    assert after["recomputed_steps"] == before["recomputed_steps"]
    assert api(f"nodes/{here['node_id']}")["state"] == "available"
    assert api(f"nodes/{there['node_id']}")["state"] == "allocated"
    told = api(f"{job}/ledger?limit=200")["results"]
    assert [one for one in told if one["lost"] or one["duplicated"] or one["dropped"]] == []
    assert api(f"incidents?state=open&job={listed['id']}")["results"] == []


def _succeeded(run: dict[str, Any]) -> dict[str, Any] | None:
    return run if run["state"] == "succeeded" else None


def _trained_on(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any] | None:
    """The job, once the ledger of the steps after its move has come."""
    return (
        now if now["epoch"] > before["epoch"] and now["ledger_step"] > before["step"] + 5 else None
    )
