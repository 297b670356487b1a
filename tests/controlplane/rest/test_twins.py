"""The same request from two connections at the same moment: it is done once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from controlplane.accounts.models import AuditEvent, IdempotentRequest
from controlplane.fleet.models import Node
from controlplane.rest import idempotency
from tests.controlplane.rest.world import Caller, World
from tests.factories import ClusterFactory, NodeFactory

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def node() -> Node:
    return NodeFactory(cluster=ClusterFactory())


@pytest.fixture
def operator(node: Node) -> Caller:
    return World(node.cluster).caller("operator")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def _hold(operator: Caller, node: Node, start: threading.Barrier, key: str) -> Any:
    client = Caller()
    client.force_login(operator.user)
    start.wait(120)
    try:
        path = f"/api/v1/nodes/{node.pk}/hold"
        return client.order(path, {"reason": "x"}, idempotency_key=key)
    finally:
        connection.close()


def test_of_two_at_once_one_is_done_and_both_are_answered(
    operator: Caller, node: Node, pool: ThreadPoolExecutor
) -> None:
    start = threading.Barrier(2)

    twins = [pool.submit(_hold, operator, node, start, "k") for _ in range(2)]
    answers = [twin.result(120) for twin in twins]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()
    assert sum("Idempotent-Replay" in answer for answer in answers) == 1
    assert AuditEvent.objects.filter(verb="node.hold").count() == 1


def test_a_write_that_cannot_have_its_rows_says_so_and_changes_nothing(
    operator: Caller, node: Node, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.rest.verbs.LOCK_TIMEOUT_MS", 50)

    with transaction.atomic():
        Node.objects.select_for_update().get(pk=node.pk)
        answer = pool.submit(_hold, operator, node, threading.Barrier(1), "k").result(30)

    assert (answer.status_code, answer.json()["code"]) == (503, "busy")
    assert answer["Retry-After"] == "1"
    assert not IdempotentRequest.objects.exists()


def test_answers_are_kept_for_a_day(operator: Caller, node: Node) -> None:
    _hold(operator, node, threading.Barrier(1), "k")
    now = timezone.now()

    assert idempotency.forget_old_answers(now + timedelta(hours=23)) == 0
    assert idempotency.forget_old_answers(now + timedelta(hours=25)) == 1
