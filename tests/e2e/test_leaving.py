"""What leaves by itself: a replica that somebody sends away, which comes back, and a job that has
done all its steps, which is over."""

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


def test_a_replica_that_is_sent_away_leaves_between_two_steps_and_is_brought_back(
    api: Api, product: Product, eventually: Eventually
) -> None:
    (listed,) = api("jobs?state=running&name=gpt-demo")["results"]
    path = f"jobs/{listed['id']}"
    eventually(lambda: api(path)["active_replicas"] == 4, PATIENCE_S, "all replicas train")
    before = api(path)
    sent_away = before["replicas"][2]

    os.kill(process_of(product, sent_away["placement_id"]), signal.SIGTERM)

    eventually(lambda: _is_back(api(path), sent_away), PATIENCE_S, "another process has its place")
    (newest,) = api(f"incidents?job={listed['id']}&sort=-id&limit=1")["results"]
    assert newest["code"] == "process-sent-away"
    assert api(path)["recomputed_steps"] == before["recomputed_steps"]
    told = api(f"{path}/ledger?limit=200")["results"]
    assert [one for one in told if one["lost"] or one["duplicated"] or one["dropped"]] == []


def test_a_job_that_has_done_all_its_steps_is_over(api: Api, eventually: Eventually) -> None:
    order = {"cluster": "harbor", "name": "short", "program": "train-gpt"}
    made = api("jobs", **order, world_replicas=1, options={"steps": 30, "nice": 10})["result"]
    path = f"jobs/{made['id']}"

    api(f"{path}/start", reason="an end-to-end test")
    eventually(lambda: api(path)["state"] == "stopped", PATIENCE_S, "it is over")

    assert api(path)["step"] == 29
    assert api(f"incidents?job={made['id']}")["results"] == []


def _is_back(job: dict[str, Any], sent_away: dict[str, Any]) -> bool:
    seat = job["replicas"][sent_away["index"]]
    came = seat["placement_id"] not in (None, sent_away["placement_id"])
    return came and seat["state"] == "active"
