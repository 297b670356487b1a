"""What holds of every page of the fleet: live, without inline code, at a constant cost."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from typing import Any
from urllib.parse import urljoin

import pytest
from django.db.models import F
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM
from controlplane.fleet.models import Cluster
from controlplane.incidents.models import RmaCase
from tests.controlplane.dashboard.world import Fleet
from tests.factories import (
    ApprovalFactory,
    BreakerFactory,
    ClusterFactory,
    CommandFactory,
    FailureFactory,
    GpuFactory,
    IncidentFactory,
    MaintenanceWindowFactory,
    NodeFactory,
    PlaybookFactory,
    PlaybookRunFactory,
    PlaybookStepFactory,
    RackFactory,
    RepairRecordFactory,
    ReservationFactory,
    RmaCaseFactory,
    SignalFactory,
    SpareReservationFactory,
    UserFactory,
)

#: Sessions, users and grants are read on every page. Lists go with a cluster, the rest with an
#: object of it.
QUERIES = {
    "clusters": 12,
    "cluster": 16,
    "node": 30,
    "failures": 12,
    "repairs": 14,
    "rma-case": 6,
    "automation-page": 25,
    "run": 9,
}
MAX_BYTES = 300_000


@pytest.fixture
def case(fleet: Fleet) -> RmaCase:
    return RmaCaseFactory(gpu=fleet.card)


def _address(page: str, fleet: Fleet, case: RmaCase) -> str:
    objects = {"cluster": fleet.cluster, "node": fleet.node, "run": fleet.run, "rma-case": case}
    # Whoever sees one cluster only is led to it from the list of all.
    return reverse(page, args=[objects[page].pk] if page in objects else [])


def _get(client: Client, address: str, **query: str) -> Any:
    return client.get(address, query, headers={"HX-Request": "true"})


def _token(body: str) -> str:
    found = re.search(r'data-token="([^"]+)"', body)
    assert found
    return found[1]


@pytest.mark.parametrize("page", list(QUERIES))
def test_a_page_says_what_is_new_and_nothing_else(
    page: str, viewer: Client, fleet: Fleet, case: RmaCase
) -> None:
    address = _address(page, fleet, case)
    token = _token(_get(viewer, address).content.decode())

    same = _get(viewer, address, after=token)
    Cluster.objects.filter(pk=fleet.cluster.pk).update(change_seq=F("change_seq") + 1)
    changed = _get(viewer, address, after=token)

    assert same.status_code == 204
    body = changed.content.decode()
    assert changed.status_code == 200
    assert "<html" not in body
    assert 'hx-swap-oob="true"' in body
    assert "after=" not in re.sub(r'hx-get="[^"]*"', "", body)


@pytest.mark.parametrize("page", list(QUERIES))
def test_a_page_needs_no_inline_script_or_style(
    page: str, admin: Client, fleet: Fleet, case: RmaCase
) -> None:
    body = admin.get(_address(page, fleet, case), follow=True).content.decode()

    assert not re.search(r"<[^>]+\sstyle=", body)
    assert not re.search(r"<[^>]+\son[a-z]+=", body)
    assert not re.search(r"<script(?![^>]*\ssrc=)", body)
    assert "79, pid=4121, GPU has fallen off the bus. <script>" not in body


@pytest.mark.parametrize("page", list(QUERIES))
def test_a_stranger_sees_nothing_of_it(
    page: str, stranger: Client, fleet: Fleet, case: RmaCase
) -> None:
    body = stranger.get(_address(page, fleet, case), follow=True).content.decode()

    assert "alpha" not in body
    assert "pretrain" not in body


@pytest.mark.parametrize("page", list(QUERIES))
def test_queries_do_not_grow_with_what_is_shown(
    page: str,
    fleet: Fleet,
    case: RmaCase,
    django_assert_max_num_queries: Callable[..., Any],
) -> None:
    _much_more(fleet)
    client = Client()
    client.force_login(UserFactory(is_superuser=True))

    with django_assert_max_num_queries(QUERIES[page]):
        answer = client.get(_address(page, fleet, case))

    assert answer.status_code == 200
    assert len(answer.content) < MAX_BYTES


@pytest.mark.parametrize("order", ["job-move", "node-order"])
def test_below_an_order_that_was_refused_all_links_lead_on(
    order: str, operator: Client, fleet: Fleet
) -> None:
    address = reverse(order, args=[{"job-move": fleet.job, "node-order": fleet.node}[order].pk])

    refused = operator.post(address)

    # The browser now stands at the order's address, which answers nobody who only looks.
    links = re.findall(r'href="([^"]*\?[^"]*)"', refused.content.decode())
    answers = [operator.get(urljoin(address, unescape(link))).status_code for link in links]
    assert refused.status_code == 409
    assert set(answers) == {200}


def _much_more(fleet: Fleet) -> None:
    ClusterFactory()
    for number in range(5):
        rack = RackFactory(cluster=fleet.cluster)
        node = NodeFactory(cluster=fleet.cluster, rack=rack, state="quarantined")
        gpu = GpuFactory(node=node, index=0)
        failure = FailureFactory(node=node, gpu=gpu, code=f"xid-{number}")
        FailureFactory(node=fleet.node, gpu=fleet.card, code=f"xid-{number}")
        failure.signals.add(SignalFactory(node=node, gpu=gpu, raw="told"))
        incident = IncidentFactory(cluster=fleet.cluster, node=fleet.node, code=f"xid-{number}")
        incident.failures.add(failure)
        run = PlaybookRunFactory(incident=incident, node=fleet.node)
        PlaybookStepFactory(run=run, state="done", finished_at=timezone.now(), outcome="done")
        ApprovalFactory(run=run)
        ReservationFactory(run=run, node=node)
        RepairRecordFactory(gpu=gpu)
        RepairRecordFactory(gpu=fleet.card)
        RmaCaseFactory(gpu=gpu, incident=incident)
        BreakerFactory(cluster=fleet.cluster, code=f"xid-{number}")
        BreakerFactory(cluster=fleet.cluster, code="old", closed_at=timezone.now(), closed_by="1")
        MaintenanceWindowFactory(cluster=fleet.cluster, owner=str(number))
        SpareReservationFactory(cluster=fleet.cluster)
        PlaybookFactory()
        CommandFactory(node=fleet.node)
        audit(SYSTEM, "node.drain", "node", fleet.node.pk, cluster_id=fleet.cluster.pk)
