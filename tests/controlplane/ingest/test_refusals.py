"""Every way to be refused: the status, the stable code, the field, and that nothing changed."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.crypto import job_token
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Cluster, JoinToken, Node
from controlplane.health.models import Signal
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Checkpoint, Job, ProgressSample
from node_agent import wire
from tests.factories import PlacementFactory

from .door import Answer, Door, NodeClient, enrolment, wait_until

POST_PATHS = [
    "/v1/enroll",
    "/v1/beat",
    "/v1/report",
    "/v1/events",
    "/v1/commands/poll",
    "/v1/commands/result",
    "/v1/runtime",
]
SIGNED_PATHS = POST_PATHS[1:-1]


def refusal(answer: Answer) -> tuple[int, str, str]:
    """Status, code and field of a well-formed problem."""
    problem = msgspec.convert(answer.json, wire.Problem)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (problem.status, bool(problem.title), bool(problem.detail)) == (
        answer.status,
        True,
        True,
    )
    return answer.status, problem.code, problem.field


# --- paths, methods, sizes ------------------------------------------------------------------------


def test_unknown_path(door: Door) -> None:
    assert refusal(door.post("/v1/nothing", {})) == (404, "unknown_path", "")


@pytest.mark.parametrize("path", POST_PATHS)
def test_messages_are_posted(door: Door, path: str) -> None:
    answer = door.request("GET", path)

    assert refusal(answer) == (405, "method_not_allowed", "")
    assert answer.headers["allow"] == "POST"


def test_health_is_read(door: Door) -> None:
    assert refusal(door.post("/healthz", {})) == (405, "method_not_allowed", "")


@pytest.mark.parametrize("path", SIGNED_PATHS)
def test_a_body_over_the_limit(node: NodeClient, path: str) -> None:
    answer = node.post_bytes(path, b" " * (wire.MAX_BODY_BYTES + 1))

    assert refusal(answer) == (413, "body_too_large", "")


def test_a_large_body_from_nobody_still_gets_its_answer(door: Door) -> None:
    answer = door.request("POST", "/v1/events", b" " * (3 * wire.MAX_BODY_BYTES))

    assert refusal(answer) == (401, "unknown_node", "Drydock-Node")


# --- who speaks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SIGNED_PATHS)
def test_nobody(door: Door, path: str) -> None:
    assert refusal(door.post(path, {})) == (401, "unknown_node", "Drydock-Node")


def test_a_node_that_was_never_enrolled(node: NodeClient) -> None:
    node.node_id = "nod_unheard_of"

    assert refusal(node.post("/v1/beat", node.beat())) == (401, "unknown_node", "Drydock-Node")


def test_a_revoked_node(node: NodeClient) -> None:
    fleet.revoke_node_key(SYSTEM, node.node_id, "stolen")

    wait_until(lambda: node.post("/v1/beat", node.beat()).status == 403)

    answer = node.post("/v1/events", {"events": [node.event()]})
    assert refusal(answer) == (403, "node_revoked", "Drydock-Node")
    assert not Signal.objects.exists()


def test_another_nodes_signature(node: NodeClient, other_node: NodeClient) -> None:
    node.key = other_node.key

    answer = node.post("/v1/events", {"events": [node.event()]})

    assert refusal(answer) == (401, "bad_signature", "Drydock-Signature")
    assert not Signal.objects.exists()


def test_a_body_that_was_changed_on_the_way(node: NodeClient) -> None:
    headers = node.headers("/v1/events", b'{"events": []}')
    changed = msgspec.json.encode({"events": [node.event()]})

    answer = node.door.request("POST", "/v1/events", changed, headers)

    assert refusal(answer) == (401, "bad_signature", "Drydock-Signature")
    assert not Signal.objects.exists()


def test_a_signature_for_another_path(node: NodeClient) -> None:
    headers = node.headers("/v1/report", b"{}")

    answer = node.door.request("POST", "/v1/beat", b"{}", headers)

    assert refusal(answer) == (401, "bad_signature", "Drydock-Signature")


@pytest.mark.parametrize("signature", ["", "!", "AAAA", "é"])
def test_a_signature_that_is_none(node: NodeClient, signature: str) -> None:
    headers = {**node.headers("/v1/beat", b"{}"), wire.HEADER_SIGNATURE: signature}

    answer = node.door.request("POST", "/v1/beat", b"{}", headers)

    assert refusal(answer) == (401, "bad_signature", "Drydock-Signature")


@pytest.mark.parametrize("at", ["1000.5", "99999999999.5", "yesterday", "nan", "inf", "-inf"])
def test_a_clock_that_is_off(node: NodeClient, at: str) -> None:
    headers = node.headers("/v1/beat", b"{}", at=at)

    answer = node.door.request("POST", "/v1/beat", b"{}", headers)

    assert refusal(answer) == (401, "clock_skew", "Drydock-Time")


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"events": NaN}', b"{}x"])
def test_what_is_not_json(node: NodeClient, body: bytes) -> None:
    assert refusal(node.post_bytes("/v1/events", body))[:2] in {
        (400, "malformed_json"),
        (422, "invalid_field"),
    }


def test_half_a_json_text(node: NodeClient) -> None:
    assert refusal(node.post_bytes("/v1/events", b'{"events": [')) == (400, "malformed_json", "")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"id": "no spaces"}, "events[0].id"),
        ({"kind": "gossip"}, "events[0].kind"),
        ({"at": -1}, "events[0].at"),
        ({"raw": "x" * 8193}, "events[0].raw"),
        ({"raw": "a\0b"}, "events[0].raw"),
        ({"data": {"deep": {"key": "\0"}}}, "events[0].data.deep.key"),
        ({"colour": "red"}, "events[0].colour"),
    ],
)
def test_a_field_at_fault_is_named(node: NodeClient, changes: dict[str, Any], field: str) -> None:
    answer = node.post("/v1/events", {"events": [{**node.event(), **changes}]})

    assert refusal(answer) == (422, "invalid_field", field)
    assert not Signal.objects.exists()


def test_a_missing_field_is_named(node: NodeClient) -> None:
    event = node.event()
    del event["source"]

    answer = node.post("/v1/events", {"events": [event]})

    assert refusal(answer) == (422, "invalid_field", "events[0].source")


def test_an_empty_list_of_events(node: NodeClient) -> None:
    assert refusal(node.post("/v1/events", {"events": []})) == (422, "invalid_field", "events")


def test_values_nested_without_end(node: NodeClient) -> None:
    body = msgspec.json.encode({"events": [node.event(data={"a": "@"})]})
    nested = body.replace(b'"@"', b"[" * 100 + b"]" * 100)

    status, code, field = refusal(node.post_bytes("/v1/events", nested))

    assert (status, code) == (422, "invalid_field")
    assert field.startswith("events[0].data.a[0]")


def test_a_number_too_large_for_the_database(node: NodeClient) -> None:
    report = node.report()
    report["inventory"]["gpus"][0]["memory_bytes"] = 2**63

    answer = node.post("/v1/report", report)

    assert refusal(answer) == (422, "invalid_field", "inventory.gpus[0].memory_bytes")
    assert Node.objects.get().report_digest == ""


def test_a_poll_longer_than_allowed(node: NodeClient) -> None:
    answer = node.post("/v1/commands/poll", {"boot_id": "b", "wait_s": 26})

    assert refusal(answer) == (422, "invalid_field", "wait_s")


# --- enrolment ------------------------------------------------------------------------------------


def test_join_token_nobody_made(door: Door, cluster: Cluster) -> None:
    answer = door.post("/v1/enroll", enrolment(door, "ddk_no", "n1").enroll_message())

    assert refusal(answer) == (403, "token_unknown", "join_token")
    assert not Node.objects.exists()


def test_join_token_used_up(door: Door, cluster: Cluster) -> None:
    token = fleet.create_join_token(SYSTEM, cluster.pk, max_uses=1)
    enrolment(door, token, "n1").enrolled()

    answer = door.post("/v1/enroll", enrolment(door, token, "n2").enroll_message())

    assert refusal(answer) == (403, "token_used", "join_token")
    assert Node.objects.count() == 1


def test_join_token_expired(door: Door, join_token: str) -> None:
    JoinToken.objects.update(expires_at=timezone.now())

    answer = door.post("/v1/enroll", enrolment(door, join_token, "n1").enroll_message())

    assert refusal(answer) == (403, "token_expired", "join_token")


def test_join_token_revoked(door: Door, join_token: str) -> None:
    fleet.revoke_join_token(SYSTEM, JoinToken.objects.get().pk, "leaked")

    answer = door.post("/v1/enroll", enrolment(door, join_token, "n1").enroll_message())

    assert refusal(answer) == (403, "token_revoked", "join_token")


def test_a_card_larger_than_the_database_holds_is_named(door: Door, join_token: str) -> None:
    message = enrolment(door, join_token, "n1").enroll_message()
    message["inventory"]["gpus"][0]["memory_bytes"] = 2**63

    answer = door.post("/v1/enroll", message)

    assert refusal(answer) == (422, "invalid_field", "inventory.gpus[0].memory_bytes")
    assert not Node.objects.exists()


def test_name_of_another_node(node: NodeClient, door: Door, join_token: str) -> None:
    answer = door.post("/v1/enroll", enrolment(door, join_token, node.name).enroll_message())

    assert refusal(answer) == (409, "name_taken", "name")
    assert JoinToken.objects.get().uses == 1


@pytest.mark.parametrize("key", ["é" * 44, "!" * 44, "A" * 44])
def test_public_key_that_is_none(door: Door, join_token: str, key: str) -> None:
    newcomer = enrolment(door, join_token, "n1")

    answer = door.post("/v1/enroll", newcomer.enroll_message(public_key=key))

    assert refusal(answer) == (422, "invalid_field", "public_key")


@pytest.mark.parametrize("rack", ["r" * 64, "r" * 255])
def test_a_rack_whose_name_is_too_long_is_named(door: Door, join_token: str, rack: str) -> None:
    answer = door.post("/v1/enroll", enrolment(door, join_token, "n1").enroll_message(rack=rack))

    assert refusal(answer) == (422, "invalid_field", "rack")
    assert not Node.objects.exists()


# --- command results ------------------------------------------------------------------------------


def test_result_of_a_command_nobody_gave(node: NodeClient) -> None:
    answer = node.post("/v1/commands/result", {"id": "cmd_no", "state": "done", "at": 1})

    assert refusal(answer) == (404, "unknown_command", "id")


def test_result_of_another_nodes_command(node: NodeClient, other_node: NodeClient) -> None:
    row = fleet.queue_command(SYSTEM, other_node.node_id, wire.Diagnose(), requester="test")

    answer = node.post("/v1/commands/result", {"id": row.pk, "state": "done", "at": 1})

    row.refresh_from_db()
    assert refusal(answer) == (403, "command_of_other_node", "id")
    assert row.state == "queued"


# --- the runtime ----------------------------------------------------------------------------------


@pytest.fixture
def job(cluster: Cluster) -> Job:
    return jobs.register(
        SYSTEM, cluster_id=cluster.pk, name="train", program="demo", world_replicas=2
    )


def progress(step: object = 1, **changes: Any) -> dict[str, Any]:
    return {
        "type": "progress",
        "step": step,
        "steps": 1,
        "epoch": 1,
        "at": time.time(),
        "loss": 2.5,
        "grad_norm": 1.0,
        "step_s": 0.1,
        "max_gap_s": 0.1,
        "samples": 64,
        "tokens": 4096,
        "replicas": [0, 1],
        **changes,
    }


def ledger(**changes: Any) -> dict[str, Any]:
    return {"type": "ledger", "step_from": 0, "step_to": 1, "epoch": 1, "samples": 128, **changes}


def saved(**changes: Any) -> dict[str, Any]:
    said = {"step": 1, "tier": "shared", "path": "p", "bytes": 9, "digest": "d"}
    return {"type": "checkpoint", **said, "stall_s": 0.1, "seconds": 0.2, "at": 1.0, **changes}


def regrouped(**changes: Any) -> dict[str, Any]:
    said = {"epoch": 2, "replicas": [0, 9], "lost": [], "joined": [9], "entered": ["plc_1"]}
    times = {"started_at": 1.0, "committed_at": 1.0, "step": 2, "gap_s": 0.1}
    return {"type": "regrouped", **said, **times, **changes}


def tell(
    door: Door,
    job_id: str,
    *messages: dict[str, Any],
    token: str = "",
    replica: int = 0,
    sent_at: float | None = None,
) -> Answer:
    batch = {
        "job": job_id,
        "replica": replica,
        "rank": 0,
        "placement": "plc_1",
        "sent_at": time.time() if sent_at is None else sent_at,
        "messages": list(messages),
    }
    bearer = {"Authorization": f"Bearer {token or job_token(job_id)}"}
    return door.request("POST", "/v1/runtime", json.dumps(batch).encode(), bearer)


def test_runtime_batch_is_stored_once_and_answered(door: Door, job: Job) -> None:
    answers = [tell(door, job.pk, progress(), ledger()) for _ in range(2)]

    assert [(a.status, a.json["ledger_step"]) for a in answers] == [(200, 1)] * 2
    assert ProgressSample.objects.count() == 1


def test_a_loss_that_is_not_a_number_is_told_as_null(door: Door, job: Job) -> None:
    assert tell(door, job.pk, progress(loss=None)).status == 200
    assert ProgressSample.objects.get().loss is None


def test_what_an_older_job_does_not_say_of_a_checkpoint_is_not_known(door: Door, job: Job) -> None:
    assert tell(door, job.pk, saved(step=1), saved(step=2, stored=6)).status == 200
    assert [*Checkpoint.objects.order_by("step").values_list("stored", flat=True)] == [None, 6]


@pytest.mark.parametrize(
    "message",
    [
        {"type": "hello", "pid": 7, "at": 1.0, "stage": "entered"},
        progress(),
        regrouped(),
    ],
)
def test_a_place_that_the_job_does_not_have_is_taken_by_nobody(
    door: Door, job: Job, message: dict[str, Any]
) -> None:
    spare = PlacementFactory(id="plc_1", replica=job.replicas.first(), standby=True, warm=True)

    assert tell(door, job.pk, message, replica=9).status == 200
    spare.refresh_from_db()
    assert spare.standby


def test_runtime_without_a_token(door: Door, job: Job) -> None:
    answer = door.post("/v1/runtime", {"job": job.pk})

    assert refusal(answer) == (401, "wrong_job_token", "Authorization")


def test_token_of_another_job(door: Door, job: Job) -> None:
    answer = tell(door, job.pk, progress(), token=job_token("job_other"))

    assert refusal(answer) == (401, "wrong_job_token", "Authorization")
    assert not ProgressSample.objects.exists()


def test_a_job_that_is_gone(door: Door, cluster: Cluster) -> None:
    assert refusal(tell(door, "job_gone", progress())) == (404, "unknown_job", "job")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"type": "gossip"}, "messages[0].type"),
        (progress(step="one"), "messages[0].step"),
        (progress(steps=0), "messages[0].steps"),
        (progress(at=1e12), "messages[0].at"),
        (progress(extra=1), "messages[0].extra"),
        (progress(step=2**63), "messages[0].step"),
        (ledger(computed=[[0, 1]]), "messages[0].computed[0]"),
        (ledger(computed=[[-1, 0, 1]]), "messages[0].computed[0][0]"),
        (ledger(merged=[0, 0, 0, 0]), "messages[0].merged"),
        (ledger(proof="p" * 33), "messages[0].proof"),
        (ledger(order={"samples": "many"}), "messages[0].order[...]"),
        (ledger(order={"samples": -1}), "messages[0].order[...]"),
        (saved(stored=-1), "messages[0].stored"),
        (saved(stored="all"), "messages[0].stored"),
        (regrouped(entered=["p" * 41]), "messages[0].entered[0]"),
        (regrouped(entered=[""] * 4097), "messages[0].entered"),
    ],
)
def test_a_runtime_message_at_fault(
    door: Door, job: Job, message: dict[str, Any], field: str
) -> None:
    assert refusal(tell(door, job.pk, message)) == (422, "invalid_field", field)


def test_too_many_runtime_messages(door: Door, job: Job) -> None:
    answer = tell(door, job.pk, *[progress(step) for step in range(501)])

    assert refusal(answer) == (422, "invalid_field", "messages")
    assert not ProgressSample.objects.exists()


@pytest.mark.parametrize(("sent_at", "at"), [(1e11, 0.0), (0.0, 1e11)])
def test_a_clock_by_which_there_is_no_time_is_named(
    door: Door, job: Job, sent_at: float, at: float
) -> None:
    answer = tell(door, job.pk, progress(at=at), sent_at=sent_at)

    assert refusal(answer) == (422, "invalid_field", "sent_at")
    assert not ProgressSample.objects.exists()


def test_a_ledger_that_ends_before_it_begins(door: Door, job: Job) -> None:
    assert refusal(tell(door, job.pk, ledger(step_to=-1)))[:2] == (422, "invalid_field")
