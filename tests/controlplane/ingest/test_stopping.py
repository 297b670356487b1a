"""An ingest that is told to end: what it took in is committed and answered; and its metrics."""

from __future__ import annotations

import pytest
from django.db import connection, transaction
from prometheus_client.parser import text_string_to_metric_families

from controlplane.health.models import Signal
from controlplane.ingest.metrics import WATCHED
from tests.running import get

from .door import Door, NodeClient, Server, wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return bool(cursor.fetchone()[0])


def test_events_under_way_are_committed_and_answered(node: NodeClient, stopping: Server) -> None:
    event = node.event()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {Signal._meta.db_table} IN EXCLUSIVE MODE")
        sent = node.begin("/v1/events", {"events": [event]})
        wait_until(waits_for_a_lock)
        stopping.terminate()

    answer = sent.answer()
    assert (answer.status, answer.json["ids"]) == (200, [event["id"]])
    assert Signal.objects.filter(pk=event["id"]).exists()
    assert stopping.wait() == 0


def samples(port: int) -> dict[tuple[str, ...], float]:
    _, text = get(port, "/metrics")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_messages_are_counted_by_kind_and_outcome(node: NodeClient, stopping: Server) -> None:
    held = node.begin("/v1/commands/poll", {"boot_id": "boot-1", "wait_s": 20.0})
    node.post("/v1/beat", node.beat())
    node.post("/v1/events", {"events": [node.event()]})
    node.post("/v1/beat", {"boot_id": "boot-1"})
    node.door.request("POST", "/v1/beat")
    node.door.request("GET", "/made-up")
    wait_until(lambda: samples(stopping.port)["drydock_ingest_polls_held",] == 1)

    told = samples(stopping.port)

    count = "drydock_ingest_messages_total"
    assert told[count, "beat", "accepted"] == 1
    assert told[count, "events", "accepted"] == 1
    assert told[count, "beat", "invalid_field"] == 1
    assert told[count, "beat", "unknown_node"] == 1
    assert told[count, "unknown", "unknown_path"] == 1
    assert told["drydock_ingest_commit_duration_seconds_count",] >= 1
    assert told["drydock_ingest_writes_waiting",] == 0
    held.hang_up()


def test_what_is_alerted_on_is_told_before_it_comes(door: Door) -> None:
    kinds = ("beat", "commands/poll", "enroll", "events", "runtime", "readyz", "unknown")
    expected = {
        ("drydock_ingest_messages_total", kind, outcome) for kind in kinds for outcome in WATCHED
    }
    assert expected <= samples(door.port).keys()


def test_metrics_are_not_for_everybody(door: Door) -> None:
    refused = door.request("GET", "/metrics", headers={"X-Forwarded-For": "198.51.100.7"})
    assert (refused.status, refused.code) == (403, "metrics_denied")
    assert get(door.port, "/metrics")[0] == 200
