"""Every verb: who may, what a dry run leaves behind, done once per key, refused when stale."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.apps import apps
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.accounts.models import AuditEvent, IdempotentRequest
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Node
from node_agent import wire
from tests import factories as make
from tests.controlplane.rest.orders import ORDERS, Order, verbs
from tests.controlplane.rest.world import Caller, World

every_verb = pytest.mark.parametrize("verb", sorted(ORDERS))
#: Those that are sent to an object, and so may be bound to its tag.
OF_AN_OBJECT = sorted(set(ORDERS) - {"jobs/create", "maintenance/create", "spares/reserve"})


def send(caller: Caller, order: Order, *, dry_run: bool = False, **headers: str) -> Any:
    path = order.path
    if dry_run:
        path += "&dry_run=true" if "?" in path else "?dry_run=true"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    call = getattr(caller, order.method)
    return call(path, order.body, content_type="application/json", headers=named)


def rows() -> dict[str, int]:
    return {model._meta.label: model._default_manager.count() for model in apps.get_models()}


def test_no_verb_is_without_an_order() -> None:
    assert set(ORDERS) == verbs()


@every_verb
def test_whoever_holds_the_role_may_and_it_is_audited(
    verb: str, world: World, admin: Caller
) -> None:
    order = ORDERS[verb](world)

    answer = send(admin, order)

    assert answer.status_code == order.status, answer.content
    told = answer.json()
    assert told["dry_run"] is False
    events = AuditEvent.objects.filter(request_id=answer["X-Request-Id"]).order_by("pk")
    assert [change["verb"] for change in told["changes"]] == [event.verb for event in events]
    assert {event.actor_id for event in events} <= {str(admin.user.pk), "drydock"}


@every_verb
def test_a_viewer_may_not(verb: str, world: World, viewer: Caller) -> None:
    before = AuditEvent.objects.count()

    answer = send(viewer, ORDERS[verb](world))

    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert AuditEvent.objects.count() == before


@every_verb
def test_to_a_stranger_it_does_not_exist(verb: str, world: World, stranger: Caller) -> None:
    answer = send(stranger, ORDERS[verb](world))

    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@every_verb
def test_a_dry_run_says_what_it_would_do_and_changes_nothing(
    verb: str, world: World, admin: Caller
) -> None:
    order = ORDERS[verb](world)
    before = rows()

    rehearsed = send(admin, order, dry_run=True)

    assert rehearsed.status_code == 200, rehearsed.content
    assert rows() == before
    assert rehearsed.json()["dry_run"] is True
    done = send(admin, order)
    assert [change["verb"] for change in rehearsed.json()["changes"]] == [
        change["verb"] for change in done.json()["changes"]
    ]


@every_verb
def test_the_same_key_is_done_once_and_answered_twice(
    verb: str, world: World, admin: Caller
) -> None:
    order = ORDERS[verb](world)
    first = send(admin, order, idempotency_key="k-1")
    before = rows()

    again = send(admin, order, idempotency_key="k-1")

    assert (again.status_code, again.json()) == (first.status_code, first.json())
    assert again["Idempotent-Replay"] == "true"
    assert rows() == before


@pytest.mark.parametrize("verb", OF_AN_OBJECT)
def test_an_order_bound_to_an_older_state_is_refused(
    verb: str, world: World, admin: Caller
) -> None:
    before = AuditEvent.objects.count()

    answer = send(admin, ORDERS[verb](world), if_match='W/"0.0"')

    assert (answer.status_code, answer.json()["code"]) == (412, "changed")
    assert AuditEvent.objects.count() == before


@pytest.mark.parametrize("verb", OF_AN_OBJECT)
def test_an_order_bound_to_the_present_state_is_done(
    verb: str, world: World, admin: Caller
) -> None:
    order = ORDERS[verb](world)
    target = "/".join(order.path.split("/")[:5])
    tag = admin.get(target)["ETag"]

    assert send(admin, order, if_match=tag).status_code == order.status


@every_verb
def test_a_field_that_is_not_known_is_refused(verb: str, world: World, admin: Caller) -> None:
    order = ORDERS[verb](world)
    extra = {"dryrun": True}
    path = f"{order.path}&dryrun=true" if order.method == "delete" else order.path
    odd = Order(path, order.body | extra, order.status, order.method)

    answer = send(admin, odd)

    assert answer.status_code == 400
    assert [error["field"] for error in answer.json()["errors"]] == ["dryrun"]


@pytest.mark.parametrize("verb", ["approvals/approve", "approvals/reject", "runs/cancel"])
def test_an_order_bound_to_a_state_locks_in_the_order_in_which_all_do(
    verb: str, world: World, admin: Caller
) -> None:
    order = ORDERS[verb](world)
    tag = admin.get("/".join(order.path.split("/")[:5]))["ETag"]

    with CaptureQueriesContext(connection) as queries:
        send(admin, order, if_match=tag)

    texts = [query["sql"] for query in queries if "FOR NO KEY UPDATE" in query["sql"]]
    locked = re.findall(r'FROM "incidents_(\w+)"', " ".join(texts))
    assert locked[:2] == ["incident", "playbookrun"]


# --- single things --------------------------------------------------------------------------------


def test_a_disruptive_order_takes_a_reason(world: World, operator: Caller) -> None:
    answer = operator.order(f"{world.path('nodes')}/drain", {"reason": " "})

    assert answer.status_code == 400
    assert answer.json()["errors"][0]["field"] == "reason"


def test_the_dry_run_of_a_nodes_order_shows_its_plan(world: World, operator: Caller) -> None:
    path = f"{world.path('nodes')}/reboot"

    plan = operator.order(path, {"reason": "why", "dry_run": True}).json()["plan"]

    assert plan["playbook"] == "reboot-node"
    assert plan["steps"][0]["disruptive"]


def test_what_automation_does_in_the_same_write_is_told_too(world: World, operator: Caller) -> None:
    stopped = make.PlacementFactory(replica__job__cluster=world.cluster)
    make.SignalFactory(
        kind="process_exited",
        node=stopped.node,
        placement_id=stopped.pk,
        data={"requested": True},
    )
    run = make.PlaybookRunFactory(
        incident__cluster=world.cluster, playbook="drain-node", node=stopped.node
    )

    answer = operator.order(f"/api/v1/runs/{run.pk}/cancel", {"reason": "not today"})

    told = {change["verb"] for change in answer.json()["changes"]}
    assert {"run.cancel", "incident.open", "run.request"} <= told
    opened = AuditEvent.objects.get(verb="incident.open")
    assert (opened.actor_kind, opened.request_id) == ("system", answer["X-Request-Id"])


def test_only_an_admin_sets_a_playbooks_mode(world: World, operator: Caller) -> None:
    assert send(operator, ORDERS["playbooks/mode"](world)).status_code == 403


def test_only_an_admin_revokes_a_nodes_key(world: World, operator: Caller) -> None:
    assert send(operator, ORDERS["nodes/revoke_key"](world)).status_code == 403


def test_a_node_tells_when_its_key_was_revoked(world: World, admin: Caller) -> None:
    before = admin.get(world.path("nodes")).json()["key_revoked_at"]

    told = admin.order(f"{world.path('nodes')}/revoke-key", {"reason": "stolen"}).json()["result"]

    assert (before, told["key_revoked_at"] is None) == (None, False)


def test_a_new_fleet_is_given_a_spare_and_it_can_be_reserved(
    world: World, operator: Caller
) -> None:
    Node.objects.update(spare=False)
    wanted = {"cluster": world.cluster.name, "holder": "slurm", "ttl_s": 60, "reason": "mine"}
    before = operator.order("/api/v1/spares/reserve", wanted)

    operator.order(f"{world.path('nodes')}/spare", {"reason": "the pool is empty"})

    assert before.status_code == 409
    assert operator.order("/api/v1/spares/reserve", wanted).status_code == 201


def test_a_key_belongs_to_one_request(world: World, operator: Caller) -> None:
    path = f"{world.path('nodes')}/hold"
    operator.order(path, {"reason": "one"}, idempotency_key="k")

    answer = operator.order(path, {"reason": "another"}, idempotency_key="k")

    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
    assert [error["field"] for error in answer.json()["errors"]] == ["Idempotency-Key"]


def test_a_refused_order_may_be_sent_again_under_its_key(world: World, operator: Caller) -> None:
    path = f"{world.path('breakers')}/close"
    operator.order(path, {"reason": "over"})

    refused = operator.order(path, {"reason": "over"}, idempotency_key="k")

    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert not IdempotentRequest.objects.exists()


@pytest.mark.parametrize("key", ["", "x" * 101, "tab\there"])
def test_a_key_that_cannot_be_kept_is_refused(key: str, world: World, operator: Caller) -> None:
    answer = operator.order(f"{world.path('nodes')}/hold", {"reason": "x"}, idempotency_key=key)

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_parameter")


def test_a_heartbeat_does_not_void_an_order(world: World, operator: Caller) -> None:
    node: Any = world.objects["nodes"]
    tag = operator.get(world.path("nodes"))["ETag"]
    node.lease.last_beat_at = node.booted_at
    node.lease.save()

    answer = operator.order(f"{world.path('nodes')}/hold", {"reason": "x"}, if_match=tag)

    assert answer.status_code == 200
    assert operator.get(world.path("nodes"))["ETag"] != tag


def report(**changes: Any) -> wire.Report:
    inventory = wire.Inventory(
        gpus=[], cpus=8, memory_bytes=2**36, kernel="6.1", driver_version="550"
    )
    told = {"boot_id": "b", "at": 1.0, "digest": "d1", "agent_version": "1"}
    return wire.Report(**{**told, "inventory": inventory, **changes})


def test_an_agent_that_starts_anew_does_not_void_an_order(world: World, operator: Caller) -> None:
    fleet.record_report(world.objects["nodes"].pk, report())
    tag = operator.get(world.path("nodes"))["ETag"]
    rank = wire.ProcessInfo(kind="rank", job="job_1", placement="plc_1", pid=7, started_at=2.0)
    anew = report(at=2.0, digest="d2", processes=[rank])
    fleet.record_report(world.objects["nodes"].pk, anew)

    answer = operator.order(f"{world.path('nodes')}/hold", {"reason": "x"}, if_match=tag)

    assert answer.status_code == 200
    assert operator.get(world.path("nodes"))["ETag"] != tag


def test_a_node_that_is_fitted_otherwise_voids_an_order(world: World, operator: Caller) -> None:
    fleet.record_report(world.objects["nodes"].pk, report())
    tag = operator.get(world.path("nodes"))["ETag"]
    fleet.record_report(world.objects["nodes"].pk, report(field_diagnostic=True))

    answer = operator.order(f"{world.path('nodes')}/hold", {"reason": "x"}, if_match=tag)

    assert (answer.status_code, answer.json()["code"]) == (412, "changed")


def test_of_two_limits_for_the_same_state_the_second_is_refused(
    world: World, admin: Caller
) -> None:
    path = world.path("clusters")
    tag = admin.get(path)["ETag"]
    limit = {"scope": "rack", "reason": "why"}

    answers = [
        admin.order(f"{path}/limits", limit | {"nodes": nodes}, if_match=tag) for nodes in (1, 3)
    ]

    assert [answer.status_code for answer in answers] == [200, 412]
    assert admin.get(path).json()["limits"] == {"rack": 1}


@pytest.mark.parametrize(
    ("told", "status", "field"),
    [
        ({"rack": "rck_none"}, 404, "rack"),
        ({"node": "nod_none"}, 404, "node"),
        ({"rack": "rck_none", "node": "nod_none"}, 400, "node"),
        ({"ends_at": "2001-01-01T00:00:00Z"}, 400, "ends_at"),
        ({"starts_at": "2000-01-01T00:00:00Z", "ends_at": "2001-01-01T00:00:00Z"}, 400, "ends_at"),
        ({"starts_at": "2101-01-01T00:00:00Z", "ends_at": "2100-01-01T00:00:00Z"}, 400, "ends_at"),
    ],
)
def test_a_window_without_sense_is_refused_by_the_field(
    told: dict[str, str], status: int, field: str, world: World, operator: Caller
) -> None:
    order = ORDERS["maintenance/create"](world)

    answer = operator.order(order.path, order.body | told)

    assert answer.status_code == status
    assert [error["field"] for error in answer.json()["errors"]] == [field]


@pytest.mark.parametrize(
    ("name", "make_one"), [("rack", make.RackFactory), ("node", make.NodeFactory)]
)
def test_a_window_is_of_a_rack_or_node_of_its_cluster(
    name: str, make_one: Any, world: World, operator: Caller
) -> None:
    other = make.GrantFactory(user=operator.user, role="operator", cluster=make.ClusterFactory())
    order = ORDERS["maintenance/create"](world)

    answer = operator.order(order.path, order.body | {name: make_one(cluster=other.cluster).pk})

    assert answer.status_code == 404
    assert [error["field"] for error in answer.json()["errors"]] == [name]
