"""Rubbish in addresses and forms: an answer that says so, never an error of ours."""

from __future__ import annotations

import threading

import pytest
from django.db import connection
from django.test import Client

from controlplane.accounts.choices import Role
from controlplane.jobs.models import SpareReservation
from tests.factories import (
    ClusterFactory,
    GpuFactory,
    GrantFactory,
    NodeFactory,
    RepairRecordFactory,
    UserFactory,
)

NUL = "%00"


@pytest.fixture
def client() -> Client:
    client = Client(raise_request_exception=False)
    client.force_login(UserFactory(is_superuser=True))
    return client


@pytest.mark.django_db
@pytest.mark.parametrize(
    "address",
    [
        f"/nodes/{NUL}",
        f"/jobs/{NUL}",
        f"/incidents/{NUL}",
        f"/audit?actor={NUL}",
        f"/failures?code={NUL}",
        f"/users?q={NUL}",
        f"/users?user={'1' * 5000}",
        "/failures?sort=-count&cursor=W0luZmluaXR5LCJ4Il0",
        "/audit?since=9999-12-31T23:59:59-23:59",
        "/api/v1/nodes?state_since__gte=2026-11-21T12:00:00%2B16:00",
        "/api/v1/audit?at__lt=9999-12-31T23:59:59-23:59",
        "/api/v1/incidents?opened_at__gte=0001-01-01T00:00:00%2B23:59",
    ],
)
def test_an_address_that_cannot_be_read_is_no_error_of_ours(client: Client, address: str) -> None:
    assert client.get(address).status_code < 500


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("address", "form"),
    [
        ("/tokens/create", {"name": "a\0b", "scope": "viewer", "days": "30"}),
        ("/tokens/create", {"name": "x" * 64, "scope": "viewer", "days": "30"}),
        ("/tokens/create", {"name": "x", "scope": "viewer", "days": "1" * 5000}),
        ("/tokens/create", {"name": "x", "scope": "viewer", "days": "²"}),
        ("/users/create", {"username": "u" * 151, "email": ""}),
        ("/users/create", {"username": "u", "email": "e" * 300}),
    ],
)
def test_a_form_that_cannot_be_kept_is_no_error_of_ours(
    client: Client, address: str, form: dict[str, str]
) -> None:
    assert client.post(address, form).status_code < 500


@pytest.mark.django_db
def test_options_without_end_are_refused_by_name(client: Client) -> None:
    cluster = ClusterFactory()
    options: dict[str, object] = {}
    for _ in range(900):
        options = {"a": options}
    job = {"cluster": cluster.pk, "name": "j", "program": "p", "world_replicas": 1}
    answer = client.post("/api/v1/jobs", {**job, "options": options}, "application/json")
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["field"] == "options"


@pytest.mark.django_db
def test_a_card_that_moved_on_does_not_tell_where_it_is() -> None:
    here, elsewhere = ClusterFactory(), ClusterFactory()
    card = GpuFactory(node=NodeFactory(cluster=elsewhere, name="hidden-node"))
    RepairRecordFactory(gpu=card, node=NodeFactory(cluster=here))
    client = Client()
    client.force_login(GrantFactory(cluster=here, role=Role.VIEWER).user)
    answer = client.get("/repairs").content.decode()
    assert card.serial in answer
    assert "hidden-node" not in answer


@pytest.mark.django_db(transaction=True)
def test_who_ask_at_once_each_get_a_spare_of_their_own() -> None:
    cluster = ClusterFactory()
    NodeFactory.create_batch(4, cluster=cluster, spare=True)
    user = UserFactory(is_superuser=True)
    statuses = []

    def ask() -> None:
        client = Client(raise_request_exception=False)
        client.force_login(user)
        body = {"cluster": cluster.pk, "ttl_s": 60, "holder": "x", "reason": "now"}
        answer = client.post("/api/v1/spares/reserve", body, "application/json")
        statuses.append((answer.status_code, answer.content))
        connection.close()

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(status for status, _ in statuses) == [201] * 4, statuses
    assert SpareReservation.objects.values("node").distinct().count() == 4
