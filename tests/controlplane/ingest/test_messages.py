"""What each message leaves behind, and what its answer promises."""

from __future__ import annotations

import json

import pytest
import redis as redis_client
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.crypto import command_public_keys
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Node
from controlplane.health.actions import record_signal
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from node_agent import wire
from tests.factories import JobFactory, PlacementFactory

from .door import Door, NodeClient, Server, enrolment, wait_until


def test_enrolment_gives_an_id_and_the_command_keys(door: Door, join_token: str) -> None:
    answer = door.post("/v1/enroll", enrolment(door, join_token, "n1").enroll_message())

    assert answer.status == 200
    assert Node.objects.get().pk == answer.json["node_id"]
    assert answer.json["command_keys"] == command_public_keys()


def test_a_lost_enrolment_answer_costs_nothing(door: Door, join_token: str) -> None:
    newcomer = enrolment(door, join_token, "n1").enrolled()

    again = door.post("/v1/enroll", newcomer.enroll_message())

    assert (again.status, again.json["node_id"]) == (200, newcomer.node_id)


def test_beat_goes_to_redis(node: NodeClient, redis: redis_client.Redis) -> None:
    answer = node.post("/v1/beat", node.beat(seq=7, readings=[{"uuid": "GPU-1", "power_w": 3.5}]))

    assert answer.status == 200
    stored = json.loads(str(redis.hget("drydock:beats", node.node_id)))
    assert (stored["seq"], stored["boot_id"], stored["digest"]) == (7, "boot-1", "")
    assert stored["readings"][0]["power_w"] == 3.5
    assert stored["received_at"] > 0


def test_ingest_says_that_it_hears(door: Door, redis: redis_client.Redis) -> None:
    wait_until(lambda: redis.exists("drydock:ingest:alive"))

    assert 0 < redis.ttl("drydock:ingest:alive") <= 5


def test_beat_asks_for_a_report_that_the_server_does_not_know(node: NodeClient) -> None:
    before = node.post("/v1/beat", node.beat(report_digest="d1"))
    node.post("/v1/report", node.report(digest="d1"))
    after = node.post("/v1/beat", node.beat(report_digest="d1"))

    assert (before.json["want_report"], after.json["want_report"]) == (True, False)


def test_beat_of_another_boot_asks_for_a_report(node: NodeClient) -> None:
    assert node.post("/v1/beat", node.beat(boot_id="boot-2")).json["want_report"] is True


def test_report_is_stored_before_it_is_answered(node: NodeClient) -> None:
    answer = node.post("/v1/report", node.report(digest="d9", switch="leaf-3"))

    assert (answer.status, answer.json["ids"]) == (200, ["d9"])
    assert (Node.objects.get().report_digest, Node.objects.get().switch) == ("d9", "leaf-3")


def test_events_sent_twice_are_stored_once(node: NodeClient) -> None:
    events = {"events": [node.event(), node.event()]}

    answers = [node.post("/v1/events", events) for _ in range(2)]

    ids = [event["id"] for event in events["events"]]
    assert [answer.json["ids"] for answer in answers] == [ids, ids]
    assert Signal.objects.count() == 2


def exit_of(sender: NodeClient, placement: object, **process: object) -> dict[str, object]:
    data = {"kind": "rank", "placement": placement, "exit_code": 1, **process}
    return sender.event(kind="process_exited", data=data)


def test_a_node_is_believed_about_its_own_processes_alone(
    node: NodeClient, other_node: NodeClient, transactional_db: None
) -> None:
    placement = PlacementFactory(node_id=node.node_id)
    job = placement.replica.job
    claims = [
        exit_of(sender, placement.pk, job=job.pk, replica=placement.replica.index)
        for sender in (other_node, node)
    ]

    odd = [exit_of(other_node, one, job=job.pk, replica=0) for one in ("", ["x"], 1)]
    other_node.post("/v1/events", {"events": [claims[0], *odd]})
    node.post("/v1/events", {"events": [claims[1]]})

    own = Signal.objects.get(node_id=node.node_id)
    assert (own.placement_id, own.job_id, own.replica) == (
        placement.pk,
        job.pk,
        placement.replica.index,
    )
    of_others = Signal.objects.filter(node_id=other_node.node_id)
    believed = of_others.values_list("placement_id", "job_id", "replica")
    assert list(believed) == [("", "", None)] * 4
    assert of_others.get(pk=claims[0]["id"]).data["said_of"]["placement"] == placement.pk


def test_a_process_of_another_node_is_not_believed_ended_under_an_id_that_is_told_twice(
    node: NodeClient, other_node: NodeClient, transactional_db: None
) -> None:
    claim = exit_of(other_node, PlacementFactory(node_id=node.node_id).pk)
    own = {**exit_of(other_node, "plc_nowhere"), "id": claim["id"]}

    answers = [
        other_node.post("/v1/events", {"events": events}) for events in ([claim, own], [own, claim])
    ]

    assert [(one.status, one.json["field"]) for one in answers] == [(422, "events[1].id")] * 2
    assert not Signal.objects.exists()


def test_a_node_is_believed_about_its_own_cards_alone(
    node: NodeClient, other_node: NodeClient, transactional_db: None
) -> None:
    events = [node.event(gpu_uuid=uuid) for uuid in ("GPU-node-1", "GPU-node-2", "GPU-none")]

    node.post("/v1/events", {"events": events})

    told = dict(Signal.objects.values_list("pk", "gpu_id"))
    assert [told[str(event["id"])] for event in events] == ["GPU-node-1", None, None]


def test_a_coordinator_is_its_own_node_s_too(
    node: NodeClient, other_node: NodeClient, transactional_db: None
) -> None:
    job = JobFactory(coordinator_node_id=node.node_id, coordinator_placement="crd_1")

    for sender in (node, other_node):
        sender.post("/v1/events", {"events": [exit_of(sender, "crd_1", job=job.pk)]})

    assert Signal.objects.get(placement_id="crd_1").node_id == node.node_id


def test_whoever_guesses_the_ids_of_another_nodes_events_hides_none(
    node: NodeClient, other_node: NodeClient, transactional_db: None
) -> None:
    event = node.event(raw="NVRM: Xid (PCI:0000:04:00): 79")

    other_node.post("/v1/events", {"events": [{**event, "raw": "nothing"}]})
    answers = [node.post("/v1/events", {"events": [event]}) for _ in range(2)]

    assert [answer.json["ids"] for answer in answers] == [[event["id"]]] * 2
    assert Signal.objects.get(node_id=node.node_id).raw == event["raw"]


def test_what_the_control_plane_will_tell_is_hidden_by_no_event_under_its_id(
    node: NodeClient, other_node: NodeClient, transactional_db: None
) -> None:
    foreseen = f"lease:{node.node_id}:1000.000"
    event = other_node.event(id=foreseen)

    answers = [other_node.post("/v1/events", {"events": [event]}) for _ in range(2)]
    record_signal(foreseen, SignalKind.LEASE_LOST, source="keeper", observed_at=timezone.now())

    assert [answer.json["ids"] for answer in answers] == [[foreseen]] * 2
    assert Signal.objects.get(pk=foreseen).kind == SignalKind.LEASE_LOST
    assert Signal.objects.get(node_id=other_node.node_id).raw == event["raw"]


def test_answered_events_survive_a_killed_server(
    server: Server, node: NodeClient, transactional_db: None
) -> None:
    doomed = Server()
    doomed.start()
    node.door = doomed.door()

    answer = node.post("/v1/events", {"events": [node.event() for _ in range(50)]})
    doomed.kill()

    assert set(Signal.objects.values_list("pk", flat=True)) == set(answer.json["ids"])


def test_command_result_is_stored_and_may_be_repeated(node: NodeClient) -> None:
    row = fleet.queue_command(SYSTEM, node.node_id, wire.Diagnose(), requester="test")
    result = {"id": row.pk, "state": "done", "at": 1.0, "output": {"passed": True}}

    answers = [node.post("/v1/commands/result", result) for _ in range(2)]

    row.refresh_from_db()
    assert [(a.status, a.json["ids"]) for a in answers] == [(200, [row.pk])] * 2
    assert (row.state, row.output) == ("done", {"passed": True})


def test_many_senders_at_once_share_commits_and_all_are_answered(
    node: NodeClient, other_node: NodeClient
) -> None:
    calls = [
        sender.begin("/v1/events", {"events": [sender.event()]})
        for sender in (node, other_node) * 10
    ]

    statuses = [call.answer().status for call in calls]

    assert statuses == [200] * 20
    assert Signal.objects.count() == 20


@pytest.mark.parametrize("name", ["mlx5\0/1", "", "mlx5_0", "a" * 300 + "/1", "mlx5_0/one"])
def test_a_port_that_no_adapter_has_is_refused(node: NodeClient, name: str) -> None:
    answer = node.post("/v1/beat", node.beat(seq=7, ports=[{"name": name, "up": 1}]))

    assert (answer.status, answer.json["field"]) == (422, "ports[0].name")


def test_ports_go_to_redis(node: NodeClient, redis: redis_client.Redis) -> None:
    node.post("/v1/beat", node.beat(seq=7, ports=[{"name": "mlx5_0/1", "up": 1}]))

    stored = json.loads(str(redis.hget("drydock:beats", node.node_id)))
    assert (stored["ports"][0]["name"], stored["ports"][0]["up"]) == ("mlx5_0/1", 1)
