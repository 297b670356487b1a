"""A job whose one replica is on two nodes: a rank dies on the second, and all go on together."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import PATIENCE_S, Api, seen
from tests.product import Product

pytestmark = pytest.mark.e2e

Eventually = Callable[..., Any]

RANKS = 4  # two on each node
TIERS = {"peer", "local", "shared"}
SPARE_AGAIN = """
from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions, models
for node in models.Node.objects.filter(cluster__name="quay", name="quay-02"):
    actions.set_spare(SYSTEM, node.pk, True)
"""


@pytest.fixture(scope="module")
def path(api: Api, product: Product, eventually: Eventually) -> Iterator[str]:
    """Where the API has the job, which trains and has saved; it is ended afterwards."""
    order = {"cluster": "quay", "name": "two-nodes", "program": "train-tensor-parallel"}
    options = {"nice": 10, "checkpoint_s": {"peer": 1.0, "local": 1.0, "shared": 2.0}}
    made = api("jobs", **order, world_replicas=1, nodes_per_replica=2, options=options)["result"]
    path = f"jobs/{made['id']}"
    api(f"{path}/start", reason="an end-to-end test")
    eventually(lambda: api(path)["step"] > 20, PATIENCE_S, "it trains")
    eventually(lambda: _saved_to(api, made["id"]) == TIERS, PATIENCE_S, "it has saved everywhere")
    yield path
    api(f"{path}/end", reason="the test is over")
    eventually(lambda: api(path)["state"] == "stopped", PATIENCE_S, "it has ended")
    product.manage("shell", "--no-imports", "-v0", "-c", SPARE_AGAIN)


def test_a_rank_that_dies_on_the_second_node_is_one_incident_and_all_go_on(
    api: Api, path: str, product: Product, eventually: Eventually
) -> None:
    before = api(path)
    first, second = before["replicas"][0]["placements"]
    ranks = {rank: _rank(product, before, rank) for rank in range(RANKS)}
    placed = [one.environ()["DRYDOCK_PLACEMENT"] for one in ranks.values()]
    assert placed == [first["id"], first["id"], second["id"], second["id"]]

    os.kill(ranks[3].pid, signal.SIGKILL)

    after = eventually(lambda: _trains_anew(api, path, before), PATIENCE_S, "it trains again")
    assert not any(rank.is_running() for rank in ranks.values())
    assert after["epoch"] == before["epoch"] + 1
    assert after["step"] > before["step"]
    again = after["replicas"][0]["placements"]
    assert [one["node_id"] for one in again] == [first["node_id"], second["node_id"]]
    assert {one["id"] for one in again}.isdisjoint({first["id"], second["id"]})
    eventually(lambda: _states(api, path) == ["resolved"], PATIENCE_S, "its one incident is over")
    (incident,) = api(f"incidents?job={_id(path)}")["results"]
    assert f"lost replica 0 on {second['node_name']}" in incident["title"]


def _saved_to(api: Api, job: str) -> set[str]:
    return {one["tier"] for one in api(f"checkpoints?job={job}")["results"]}


def _id(path: str) -> str:
    return path.removeprefix("jobs/")


def _states(api: Api, path: str) -> list[str]:
    """Of the job's incidents."""
    return [one["state"] for one in api(f"incidents?job={_id(path)}")["results"]]


def _rank(product: Product, job: dict[str, Any], rank: int) -> psutil.Process:
    """The process of one rank, which a torchrun of its node started."""
    placements = [one["id"] for one in job["replicas"][0]["placements"]]
    (found,) = [
        one.process
        for one in seen(product)
        if one.environment.get("DRYDOCK_PLACEMENT") in placements
        and one.environment.get("RANK") == str(rank)
        and "train_tensor_parallel.py" in " ".join(one.words)
    ]
    return found


def _trains_anew(api: Api, path: str, before: dict[str, Any]) -> dict[str, Any] | None:
    now: dict[str, Any] = api(path)
    again = now["epoch"] > before["epoch"] and now["active_replicas"] == 1
    return now if again and now["step"] > before["step"] else None
