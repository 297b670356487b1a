"""The running job is given a warm spare, which takes the place of a replica that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import PATIENCE_S, Api, process_of
from tests.product import Product

pytestmark = pytest.mark.e2e

Eventually = Callable[..., Any]


def test_a_warm_spare_takes_the_place_of_a_replica_that_dies(
    api: Api, product: Product, eventually: Eventually
) -> None:
    (listed,) = api("jobs?state=running&name=gpt-demo")["results"]
    path = f"jobs/{listed['id']}"
    eventually(lambda: api(path)["active_replicas"] == 4, PATIENCE_S, "all replicas train")
    api(f"{path}/warm-spares", count=1, reason="an end-to-end test")
    (spare,) = eventually(lambda: _following(api(path)), PATIENCE_S, "the spare holds the state")
    before, earlier = api(path), _newest_incident(api, listed["id"])
    lost = before["replicas"][1]

    os.kill(process_of(product, lost["placement_id"]), signal.SIGKILL)

    seat = eventually(lambda: _moved(api(path), lost), PATIENCE_S, "the spare has the place")
    assert (seat["placement_id"], seat["node_name"]) == (spare["id"], spare["node_name"])
    eventually(lambda: _ended_since(api, listed["id"], earlier), PATIENCE_S, "its incident is over")
    after = api(path)
    assert after["recomputed_steps"] == before["recomputed_steps"]
    told = api(f"{path}/ledger?limit=200")["results"]
    assert [one for one in told if one["lost"] or one["duplicated"] or one["dropped"]] == []

    # The next one is made ready where the lost one was; then none is wanted any more.
    eventually(lambda: _following(api(path)), PATIENCE_S, "the next spare holds the state")
    api(f"{path}/warm-spares", count=0, reason="the test is over")
    eventually(lambda: api(path)["warm_spares_held"] == [], PATIENCE_S, "the spare has ended")
    assert api(path)["active_replicas"] == 4


def _following(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in job["warm_spares_held"] if one["follows_since"]]


def _moved(job: dict[str, Any], lost: dict[str, Any]) -> dict[str, Any] | None:
    """The lost replica's seat, once another process has it."""
    seat: dict[str, Any] = job["replicas"][lost["index"]]
    there = seat["placement_id"] not in (None, lost["placement_id"])
    return seat if there and seat["state"] == "active" else None


def _newest_incident(api: Api, job_id: str) -> dict[str, Any]:
    newest = api(f"incidents?job={job_id}&sort=-id&limit=1")["results"]
    return newest[0] if newest else {}


def _ended_since(api: Api, job_id: str, earlier: dict[str, Any]) -> bool:
    newest = _newest_incident(api, job_id)
    return newest.get("id") != earlier.get("id") and newest["state"] == "resolved"
