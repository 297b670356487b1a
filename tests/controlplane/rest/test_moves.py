"""Moving a replica over the API: done once, shown first, refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.fleet.models import Node
from controlplane.incidents.models import PlaybookRun
from controlplane.jobs.models import Job, Placement
from tests import factories as make
from tests.controlplane.rest.world import Caller, World, playbooks

pytestmark = pytest.mark.django_db


@pytest.fixture
def job() -> Job:
    playbooks()
    return make.JobFactory(coordinator_address="127.0.0.1:4000", gpus_per_replica=1)


@pytest.fixture
def here(job: Job) -> Placement:
    return make.PlacementFactory(replica=make.ReplicaFactory(job=job, index=2))


@pytest.fixture
def there(job: Job) -> Node:
    return make.NodeFactory(cluster=job.cluster, name="alpha-09")


@pytest.fixture
def operator(job: Job) -> Caller:
    return World(job.cluster).caller("operator")


def move(caller: Caller, job: Job, query: str = "", key: str = "", **body: Any) -> Any:
    headers = {"idempotency_key": key} if key else {}
    order = {"replica": 2, "reason": "cables"} | body
    return caller.order(f"/api/v1/jobs/{job.pk}/migrate{query}", order, **headers)


def test_the_answer_is_the_run_that_moves_it(
    operator: Caller, job: Job, here: Placement, there: Node
) -> None:
    answer = move(operator, job)

    run = answer.json()["result"]
    assert (answer.status_code, run["playbook"]) == (202, "move-replica")
    assert run["title"] == f"Move replica 2 of {job.name} to alpha-09"
    assert run["requested_by"] == str(operator.user.pk)
    assert Placement.objects.get(standby=True).node == there


def test_the_dry_run_tells_what_starts_where_and_what_is_freed(
    operator: Caller, job: Job, here: Placement, there: Node
) -> None:
    answer = move(operator, job, "?dry_run=true", node=there.pk)

    plan = answer.json()["plan"]
    assert plan["node"]["name"] == "alpha-09"
    assert any(f"{here.node.name} is free" in note for note in plan["notes"])
    assert "replica.move" in [change["verb"] for change in answer.json()["changes"]]
    assert not PlaybookRun.objects.exists()


def test_the_same_key_moves_it_once(
    operator: Caller, job: Job, here: Placement, there: Node
) -> None:
    first, second = move(operator, job, key="k"), move(operator, job, key="k")

    assert first.json() == second.json()
    assert second["Idempotent-Replay"] == "true"
    assert PlaybookRun.objects.count() == 1


def test_a_second_order_is_refused_while_the_first_is_under_way(
    operator: Caller, job: Job, here: Placement, there: Node
) -> None:
    move(operator, job)
    answer = move(operator, job)

    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert "is under way" in answer.json()["detail"]


def test_the_replicas_list_shows_where_it_trains_not_where_it_will(
    operator: Caller, job: Job, here: Placement, there: Node
) -> None:
    move(operator, job)

    (replica,) = operator.get(f"/api/v1/replicas?job={job.pk}").json()["results"]
    assert replica["placement_id"] == here.pk
    (shown,) = operator.get(f"/api/v1/jobs/{job.pk}").json()["replicas"]
    assert shown["node_id"] == here.node_id


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"replica": "two"}, 400, "invalid_body"),
        ({"replica": -1}, 400, "invalid_body"),
        ({"reason": ""}, 400, "invalid_body"),
        ({"to": "alpha-09"}, 400, "invalid_body"),
        ({"node": "nod_nowhere"}, 404, "not_found"),
        ({"replica": 7}, 409, "conflict"),
    ],
)
def test_what_makes_no_sense_is_refused(
    operator: Caller,
    job: Job,
    here: Placement,
    there: Node,
    body: dict[str, Any],
    status: int,
    code: str,
) -> None:
    answer = move(operator, job, **body)

    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert not Placement.objects.filter(standby=True).exists()


def test_a_node_of_a_cluster_that_the_caller_does_not_see_does_not_exist(
    operator: Caller, job: Job, here: Placement
) -> None:
    assert move(operator, job, node=make.NodeFactory().pk).status_code == 404
