"""A job whose ranks divide one model: started, brought back after a death, and moved, as its owner
does it by the API."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from runtime.ledger.check import check
from tests.e2e.conftest import PATIENCE_S, Api, seen
from tests.product import Product

pytestmark = pytest.mark.e2e

Eventually = Callable[..., Any]

NAME = "tensor-parallel"


@pytest.fixture(scope="module")
def path(api: Api, eventually: Eventually) -> Iterator[str]:
    """Where the API has the job, which trains; it is ended afterwards."""
    order = {"cluster": "harbor", "name": NAME, "program": "train-tensor-parallel"}
    options = {"nice": 10, "checkpoint_s": {"local": 1.0, "shared": 2.0}}
    made = api("jobs", **order, world_replicas=1, options=options)["result"]
    path = f"jobs/{made['id']}"
    api(f"{path}/start", reason="an end-to-end test")
    eventually(lambda: api(path)["step"] > 20, PATIENCE_S, "it trains")
    yield path
    api(f"{path}/end", reason="the test is over")
    eventually(lambda: api(path)["state"] == "stopped", PATIENCE_S, "it has ended")


def test_a_dead_rank_takes_all_along_and_all_go_on_from_the_newest_checkpoint(
    api: Api, path: str, product: Product, eventually: Eventually
) -> None:
    eventually(lambda: _saved(api, path), PATIENCE_S, "it has saved")
    before, saved = api(path), _saved(api, path)
    assert before["whole"]

    os.kill(_rank(product, before, 1).pid, signal.SIGKILL)
    eventually(lambda: _incidents(api, path), PATIENCE_S, "its incident is opened")
    told = api(path)["step"]  # a window of the next epoch that ends with this step takes its place

    after = eventually(lambda: _trains_anew(api, path, before), PATIENCE_S, "it trains again")
    assert after["epoch"] == before["epoch"] + 1
    assert after["replicas"][0]["node_id"] == before["replicas"][0]["node_id"]
    last, first = _steps(product, path, after["epoch"])
    assert saved < first <= max(last, told) + 1
    eventually(lambda: _incidents(api, path) == ["resolved"], PATIENCE_S, "its incident is over")


def test_it_moves_by_saving_and_going_on_elsewhere(
    api: Api, path: str, product: Product, eventually: Eventually
) -> None:
    before = api(path)
    here = before["replicas"][0]["node_name"]

    run = api(f"{path}/migrate", replica=0, reason="new cables")["result"]
    assert run["playbook"] == "move-job"
    ended = eventually(lambda: _finished(api(f"runs/{run['id']}")), PATIENCE_S, "it has moved")

    assert ended["state"] == "succeeded", ended["state_reason"]
    after = api(path)
    there = after["replicas"][0]["node_name"]
    assert f"{NAME} moved from {here} to {there}, and stood still for" in ended["state_reason"]
    assert there != here
    assert after["epoch"] == before["epoch"] + 1
    last, first = _steps(product, path, after["epoch"])
    assert first == last + 1  # nothing is lost, and nothing trained twice
    eventually(lambda: api(path)["ledger_step"] >= first, PATIENCE_S, "its ledger is told")
    report = check(api(f"{path}/ledger?limit=200")["results"])
    assert report.whole, report.problems
    assert api(f"incidents?state=open&job={_id(path)}")["results"] == []


def _id(path: str) -> str:
    return path.removeprefix("jobs/")


def _incidents(api: Api, path: str) -> list[str]:
    """The state of each incident of the job."""
    return [one["state"] for one in api(f"incidents?job={_id(path)}")["results"]]


def _saved(api: Api, path: str) -> int:
    """The newest step that was saved; 0 before the first."""
    told = api(f"checkpoints?job={_id(path)}")["results"]
    return max((one["step"] for one in told), default=0)


def _steps(product: Product, path: str, epoch: int) -> tuple[int, int]:
    """The last step that was told of the epoch before, and the first one of this."""
    code = (
        "import json; from controlplane.jobs.models import ProgressSample\n"
        f"told = ProgressSample.objects.filter(job_id={_id(path)!r}).order_by('step')\n"
        f"last = told.filter(epoch={epoch - 1}).last()\n"
        f"first = told.filter(epoch={epoch}).first()\n"
        "print(json.dumps([last.step, first.step - first.steps + 1]))"
    )
    done = product.manage("shell", "--no-imports", "-v0", "-c", code)
    last, first = json.loads(done.stdout.strip().splitlines()[-1])
    return last, first


def _rank(product: Product, job: dict[str, Any], rank: int) -> psutil.Process:
    """The process of one rank, which torchrun started."""
    placement = job["replicas"][0]["placement_id"]
    (found,) = [
        one.process
        for one in seen(product)
        if one.environment.get("DRYDOCK_PLACEMENT") == placement
        and one.environment.get("RANK") == str(rank)
        and "train_tensor_parallel.py" in " ".join(one.words)
    ]
    return found


def _trains_anew(api: Api, path: str, before: dict[str, Any]) -> dict[str, Any] | None:
    now: dict[str, Any] = api(path)
    return now if now["epoch"] > before["epoch"] and now["active_replicas"] == 1 else None


def _finished(run: dict[str, Any]) -> dict[str, Any] | None:
    return run if run["state"] in ("succeeded", "failed", "needs_operator") else None
