"""Every list: its filters, sorts, pages, fields and tags, as each resource declares them."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from controlplane.api import RESOURCES
from controlplane.health.choices import SignalKind
from controlplane.rest.filters import Parameter
from tests.controlplane.rest.world import ROWS, Caller, World
from tests.factories import (
    CheckpointFactory,
    ClusterFactory,
    FailureFactory,
    IncidentFactory,
    JobFactory,
    NodeFactory,
    PlacementFactory,
    RackFactory,
    ReplicaFactory,
    SignalFactory,
)

every_list = pytest.mark.parametrize("name", sorted(RESOURCES))
EVERY_SORT = [
    pytest.param(name, way + sort, id=f"{name}-{way}{sort}")
    for name, resource in sorted(RESOURCES.items())
    for sort in resource.sorts
    for way in ("", "-")
]
#: A value that fits each kind of parameter.
FITTING = {"boolean": "true", "integer": "1", "string": "x", "date-time": "2026-11-21T12:00:00Z"}


def results(caller: Caller, path: str) -> list[dict[str, Any]]:
    answer = caller.get(path)
    assert answer.status_code == 200, answer.content
    found: list[dict[str, Any]] = answer.json()["results"]
    return found


def parameters_of(name: str) -> list[Parameter]:
    """What this list may be asked with; cursors are asked for by following them."""
    told = RESOURCES[name].list_parameters()
    return [parameter for parameter in told if parameter.name not in ("cursor", "fields")]


def _fitting(parameter: Parameter) -> str:
    kind = parameter.schema.get("format", parameter.schema["type"])
    return str(parameter.schema.get("enum", [FITTING[kind]])[0])


@every_list
def test_a_viewer_sees_what_is_in_the_cluster(name: str, world: World, viewer: Caller) -> None:
    shown = results(viewer, f"/api/v1/{name}")

    key = "uuid" if name == "gpus" else "name" if name == "playbooks" else "id"
    assert world.objects[name].pk in [row[key] for row in shown]


@every_list
def test_an_object_is_shown_with_all_that_its_list_shows(
    name: str, world: World, viewer: Caller
) -> None:
    whole = viewer.get(world.path(name)).json()

    assert set(RESOURCES[name].serializer_class.Meta.fields) <= set(whole)


@pytest.mark.parametrize("name", sorted(set(RESOURCES) - {"playbooks"}))
def test_a_stranger_sees_nothing_of_it(name: str, world: World, stranger: Caller) -> None:
    own = world.objects[name].pk

    assert all(own not in row.values() for row in results(stranger, f"/api/v1/{name}"))
    assert stranger.get(world.path(name)).status_code == 404


@every_list
def test_every_parameter_is_understood(name: str, world: World, viewer: Caller) -> None:
    given = {parameter.name: _fitting(parameter) for parameter in parameters_of(name)}

    statuses = {key: viewer.get(f"/api/v1/{name}", {key: given[key]}).status_code for key in given}

    assert set(statuses.values()) == {200}, statuses
    assert viewer.get(f"/api/v1/{name}", given).status_code == 200


@every_list
def test_a_value_that_cannot_be_is_refused_by_name(name: str, world: World, viewer: Caller) -> None:
    keys = [parameter.name for parameter in parameters_of(name)]

    answers = {key: viewer.get(f"/api/v1/{name}", {key: "\0"}) for key in keys}

    assert {answer.status_code for answer in answers.values()} == {400}
    assert [answer.json()["errors"][0]["field"] for answer in answers.values()] == keys


@every_list
def test_a_parameter_that_is_not_known_is_refused_by_name(
    name: str, world: World, viewer: Caller
) -> None:
    answer = viewer.get(f"/api/v1/{name}?colour=red")

    assert (answer.status_code, answer.json()["code"]) == (400, "unknown_parameter")
    assert answer.json()["errors"][0]["field"] == "colour"


@pytest.mark.parametrize(("name", "sort"), EVERY_SORT)
def test_pages_in_any_order_show_every_row_once(
    name: str, sort: str, world: World, viewer: Caller
) -> None:
    for _ in range(4):
        ROWS[name](world.cluster)
    whole = results(viewer, f"/api/v1/{name}?sort={sort}&limit=500")

    there: list[Any] = []
    pages = []
    path = f"/api/v1/{name}?sort={sort}&limit=2"
    while path:
        page = viewer.get(path).json()
        pages.append(page)
        there += page["results"]
        path = page["next"]

    assert there == whole
    back: list[Any] = []
    path = pages[-1]["previous"]
    while path:
        page = viewer.get(path).json()
        back = page["results"] + back
        path = page["previous"]
    assert back == whole[: len(back)]
    assert len(back) == len(whole) - len(pages[-1]["results"])


@every_list
def test_only_the_fields_that_are_asked_for_are_shown(
    name: str, world: World, viewer: Caller
) -> None:
    first, second = RESOURCES[name].serializer_class.Meta.fields[:2]

    for row in results(viewer, f"/api/v1/{name}?fields={first},{second}"):
        assert set(row) == {first, second}
    assert set(viewer.get(f"{world.path(name)}?fields={first}").json()) == {first}
    assert viewer.get(f"/api/v1/{name}?fields=secret").status_code == 400


@every_list
def test_what_has_not_changed_is_not_sent_again(name: str, world: World, viewer: Caller) -> None:
    for path in (f"/api/v1/{name}", world.path(name)):
        tag = viewer.get(path)["ETag"]

        again = viewer.get(path, headers={"If-None-Match": tag})

        assert (again.status_code, again.content) == (304, b"")
        assert viewer.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", sorted(set(RESOURCES) - {"clusters"}))  # a viewer sees one of them
def test_a_page_between_others_that_has_not_changed_is_not_sent_again_later(
    name: str, world: World, viewer: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        ROWS[name](world.cluster)
    path = viewer.get(f"/api/v1/{name}?limit=1").json()["next"]
    first = viewer.get(path)
    later = time.time() + 60
    monkeypatch.setattr("time.time", lambda: later)

    again = viewer.get(path, headers={"If-None-Match": first["ETag"]})

    assert all(first.json()[way] for way in ("next", "previous"))
    assert (again.status_code, again["ETag"], again.content) == (304, first["ETag"], b"")


# --- nodes, as an example of the rest -------------------------------------------------------------


def names(caller: Caller, query: str) -> list[str]:
    return [row["name"] for row in results(caller, f"/api/v1/nodes?{query}&fields=name")]


@pytest.fixture
def fleet(world: World) -> None:
    for name, state in (("a1", "available"), ("a2", "allocated"), ("b1", "repairing")):
        NodeFactory(
            cluster=world.cluster,
            name=name,
            state=state,
            **({"state_deadline": "2030-01-01T00:00:00Z"} if state == "repairing" else {}),
        )


def test_values_of_one_filter_are_alternatives(fleet: None, viewer: Caller) -> None:
    assert names(viewer, "name=a1,b1") == ["a1", "b1"]
    assert names(viewer, "name=a1&name=b1") == ["a1", "b1"]


def test_several_filters_all_hold(fleet: None, viewer: Caller) -> None:
    assert names(viewer, "q=A&state=allocated") == ["a2"]


def test_a_cluster_is_named_by_id_or_name(fleet: None, world: World, viewer: Caller) -> None:
    by_id = names(viewer, f"cluster={world.cluster.pk}&q=a")

    assert by_id == names(viewer, f"cluster={world.cluster.name}&q=a") != []


def replicas_of(caller: Caller, jobs: str) -> list[str]:
    return [row["id"] for row in results(caller, f"/api/v1/replicas?job={jobs}&sort=index")]


def test_a_name_may_begin_as_an_id_does(world: World, viewer: Caller) -> None:
    job, other = JobFactory(cluster=world.cluster, name="job_7b"), JobFactory(cluster=world.cluster)
    replica, last = ReplicaFactory(job=job, index=0), ReplicaFactory(job=other, index=1)
    rack = RackFactory(cluster=world.cluster, name="rck_9")
    node = NodeFactory(cluster=world.cluster, rack=rack)

    assert replicas_of(viewer, "job_7b") == replicas_of(viewer, job.pk) == [replica.pk]
    assert replicas_of(viewer, f"{other.pk},job_7b") == [replica.pk, last.pk]
    assert names(viewer, "rack=rck_9") == names(viewer, f"rack={rack.pk}") == [node.name]


def test_what_no_node_is_blamed_for_is_of_its_cluster_too(world: World, viewer: Caller) -> None:
    of_job = FailureFactory(node=None, job_id=JobFactory(cluster=world.cluster).pk)
    of_site = FailureFactory(node=None)
    IncidentFactory(cluster=world.cluster).failures.add(of_site)
    every = results(viewer, "/api/v1/failures")
    told = {of_job.pk, of_site.pk, world.objects["failures"].pk}

    for named in (world.cluster.pk, world.cluster.name):
        assert results(viewer, f"/api/v1/failures?cluster={named}") == every
    assert told <= {row["id"] for row in every}
    assert results(viewer, f"/api/v1/failures?cluster={ClusterFactory().name}") == []


def test_rows_that_come_in_between_shift_no_page(fleet: None, world: World, viewer: Caller) -> None:
    first = viewer.get("/api/v1/nodes?q=1&limit=1&name=a1,a15,b1").json()
    NodeFactory(cluster=world.cluster, name="a0-1")

    second = viewer.get(first["next"]).json()

    assert [row["name"] for row in first["results"] + second["results"]] == ["a1", "b1"]


@pytest.mark.parametrize("cursor", ["abc", "eyJ4IjoxfQ:1:2", "%00"])
def test_a_cursor_of_ones_own_making_is_refused(cursor: str, world: World, viewer: Caller) -> None:
    answer = viewer.get(f"/api/v1/nodes?cursor={cursor}")

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_cursor")


def test_a_cursor_belongs_to_its_sort(fleet: None, viewer: Caller) -> None:
    onward = viewer.get("/api/v1/nodes?limit=1").json()["next"]

    answer = viewer.get(f"{onward}&sort=-name")

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_cursor")
    assert urlsplit(onward).path == "/api/v1/nodes"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("incidents", "audit", id="whose ids are of another type"),
        pytest.param("incidents", "runs", id="with ids alike"),
        pytest.param("nodes", "racks", id="with names alike"),
    ],
)
def test_a_cursor_belongs_to_its_list(one: str, other: str, world: World, viewer: Caller) -> None:
    ROWS[one](world.cluster)
    onward = viewer.get(f"/api/v1/{one}?limit=1").json()["next"]

    answer = viewer.get(f"/api/v1/{other}?{urlsplit(onward).query}")

    assert viewer.get(onward).status_code == 200
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_cursor")


def test_a_cursor_is_a_place_in_its_list_under_any_filter(fleet: None, viewer: Caller) -> None:
    onward = viewer.get("/api/v1/nodes?name=a1,a2,b1&limit=1").json()["next"]
    cursor = parse_qs(urlsplit(onward).query)["cursor"][0]

    assert names(viewer, f"name=a1,b1&cursor={cursor}") == ["b1"]


@pytest.mark.parametrize("limit", ["0", "501", "many", "-1", "9" * 30])
def test_a_limit_is_from_1_to_500(limit: str, world: World, viewer: Caller) -> None:
    assert viewer.get(f"/api/v1/nodes?limit={limit}").status_code == 400


@pytest.mark.parametrize("moment", ["yesterday", "2026-11-21", "2026-11-21T12:00:00", "2026-13-01"])
def test_a_time_needs_its_zone(moment: str, world: World, viewer: Caller) -> None:
    assert viewer.get(f"/api/v1/nodes?state_since__gte={moment}").status_code == 400


def test_a_zone_written_plainly_is_understood(world: World, viewer: Caller) -> None:
    path = "/api/v1/nodes?state_since__gte=2026-01-01T00:00:00+01:00"

    assert viewer.get(path).status_code == 200


@pytest.mark.parametrize("stored", [6, None])
def test_a_checkpoint_says_what_its_tier_holds_of_it(
    stored: int | None, world: World, viewer: Caller
) -> None:
    one = CheckpointFactory(job__cluster=world.cluster, bytes=9, stored=stored)

    shown = viewer.get(f"/api/v1/checkpoints/{one.pk}").json()

    assert (shown["bytes"], shown["stored"]) == (9, stored)


def test_a_job_names_the_tiers_to_which_saves_fail_and_that_voids_no_order_to_it(
    world: World, viewer: Caller
) -> None:
    well = ROWS["jobs"](world.cluster)
    placement = PlacementFactory(replica__job=world.objects["jobs"])
    before = viewer.get(world.path("jobs"))
    SignalFactory(
        kind=SignalKind.JOB_TROUBLE,
        job_id=placement.replica.job_id,
        placement_id=placement.pk,
        data={"kind": "checkpoint_failed", "subject": "shared", "text": "full", "rank": 0},
    )
    after = viewer.get(world.path("jobs"))

    listed = {row["id"]: row["failing_tiers"] for row in results(viewer, "/api/v1/jobs")}
    assert (before.json()["failing_tiers"], after.json()["failing_tiers"]) == ([], ["shared"])
    assert (listed[placement.replica.job_id], listed[well.pk]) == (["shared"], [])
    assert after["ETag"] != before["ETag"]
    assert after["ETag"].split(".")[0] == before["ETag"].split(".")[0]
