"""The pages of spares, repairs and RMA cases."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from html import unescape

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.fleet.models import Node
from controlplane.incidents.models import RmaCase
from tests.controlplane.dashboard.world import Fleet, hidden_of, reasons_in
from tests.factories import (
    GpuFactory,
    NodeFactory,
    RepairRecordFactory,
    RmaCaseFactory,
    SpareReservationFactory,
)


@pytest.fixture
def case(fleet: Fleet) -> RmaCase:
    bundle = {"serial": fleet.card.serial, "note": "<b>kept verbatim</b>"}
    return RmaCaseFactory(gpu=fleet.card, incident=fleet.incident, bundle=bundle)


def _page(client: Client, **query: str) -> str:
    return client.get(reverse("repairs"), query).content.decode()


def test_spares_are_told_against_the_nodes_they_cover(viewer: Client, fleet: Fleet) -> None:
    GpuFactory(node=fleet.other, index=0)

    pools = _page(viewer).split('data-testid="pools"')[1].split("</table>")[0]

    assert "NVIDIA H200" in pools
    assert "<strong>1</strong>" in pools


def test_a_reserved_spare_is_not_free(viewer: Client, fleet: Fleet) -> None:
    GpuFactory(node=fleet.other, index=0)
    SpareReservationFactory(cluster=fleet.cluster, node=fleet.other, holder="slurm-1")

    page = _page(viewer)

    assert "slurm-1" in page
    assert "<strong>0</strong>" in page.split('data-testid="pools"')[1].split("</table>")[0]


def test_a_reserved_spare_is_told_with_the_day_of_its_end(viewer: Client, fleet: Fleet) -> None:
    ends_at = datetime(2032, 2, 29, 14, tzinfo=UTC)
    SpareReservationFactory(cluster=fleet.cluster, node=fleet.other, expires_at=ends_at)

    assert ">29 Feb, 14:00:00<" in _page(viewer)


def test_a_node_out_of_service_is_told_with_its_rung(viewer: Client, fleet: Fleet) -> None:
    Node.objects.filter(pk=fleet.node.pk).update(state="quarantined", state_reason="xid-79")
    RepairRecordFactory(gpu=fleet.card, rung="reboot")

    out = _page(viewer).split('data-testid="out"')[1].split("</table>")[0]

    assert "alpha-01" in out
    assert "Reboot" in out


def test_the_record_follows_the_card(viewer: Client, fleet: Fleet) -> None:
    RepairRecordFactory(gpu=fleet.card, rung="reset_gpu")
    RepairRecordFactory(gpu=fleet.card, rung="reboot")
    fleet.card.node, fleet.card.index = fleet.other, 0
    fleet.card.save()

    records = _page(viewer).split('data-testid="records"')[1].split("</table>")[0]

    assert "Reboot 1, Reset the GPU 1" in records
    assert "alpha-02" in records


@pytest.mark.parametrize(
    ("chosen", "shown"), [("", True), ("open", True), ("sent", False), ("all", True)]
)
def test_cases_are_listed_by_their_state(
    chosen: str, shown: bool, viewer: Client, case: RmaCase
) -> None:
    assert ('data-testid="case-row"' in _page(viewer, cases=chosen)) is shown


def test_the_evidence_is_shown_and_downloaded(viewer: Client, case: RmaCase) -> None:
    page = viewer.get(reverse("rma-case", args=[case.id])).content.decode()
    file = viewer.get(reverse("rma-bundle", args=[case.id]))

    assert "&lt;b&gt;kept verbatim" in page
    assert json.loads(file.content) == case.bundle
    assert f"rma-{case.gpu.serial}" in file["Content-Disposition"]


def test_a_case_goes_to_the_vendor_and_is_closed(operator: Client, case: RmaCase) -> None:
    operator.post(
        reverse("rma-send", args=[case.id]),
        {"vendor_reference": "NV-123", "reason": "picked up"},
    )
    sent = RmaCase.objects.get(pk=case.pk)
    operator.post(reverse("rma-close", args=[case.id]), {"reason": "replaced"})
    closed = RmaCase.objects.get(pk=case.pk)

    assert (sent.state, sent.vendor_reference) == ("sent", "NV-123")
    assert closed.state == "closed"


def test_a_case_is_not_sent_without_a_reference(operator: Client, case: RmaCase) -> None:
    answer = operator.post(reverse("rma-send", args=[case.id]), {"reason": "picked up"})

    assert answer.status_code == 409
    assert RmaCase.objects.get(pk=case.pk).state == "open"


def test_a_case_that_was_not_sent_stands_there_as_it_was_typed(
    operator: Client, case: RmaCase
) -> None:
    page = operator.get(reverse("rma-case", args=[case.id])).content.decode()
    form, send = hidden_of(page, "send-reason"), reverse("rma-send", args=[case.id])

    lacks_reference = operator.post(send, form | {"vendor_reference": " ", "reason": "picked up"})
    lacks_reason = operator.post(send, form | {"vendor_reference": "NV-123", "reason": " "})

    assert reasons_in(lacks_reference.content.decode()) == {"send-reason": "picked up"}
    assert 'value="NV-123"' in lacks_reason.content.decode()


def _next(page: str) -> str:
    link = re.search(r'<a href="([^"]*)" rel="next"', page)
    assert link
    return unescape(link[1])


def test_a_page_of_nodes_that_are_back_does_not_call_the_others_so(
    viewer: Client, fleet: Fleet
) -> None:
    out = [NodeFactory(cluster=fleet.cluster, state="quarantined") for _ in range(51)]
    second = reverse("repairs") + _next(_page(viewer, cases="all"))

    Node.objects.filter(pk=out[-1].pk).update(state="available")

    page = viewer.get(second).content.decode()
    first = re.search(r'<a href="([^"]*)"[^>]*>First page</a>', page)
    assert "Every node is in service" not in page
    assert first
    answer = viewer.get(unescape(first[1])).content.decode()
    assert answer.count('data-testid="out-row"') == 50
    assert first[1].endswith("?cases=all")


def test_a_page_of_cases_that_were_closed_does_not_say_that_there_is_none(
    viewer: Client, fleet: Fleet
) -> None:
    gpus = [GpuFactory(node=fleet.node, index=100 + number) for number in range(51)]
    cases = [RmaCaseFactory(gpu=gpu) for gpu in gpus]
    second = reverse("repairs") + _next(_page(viewer))

    RmaCase.objects.filter(pk=cases[0].pk).update(state="closed")

    page = viewer.get(second).content.decode()
    assert "No such case" not in page
    assert "This page of the list is empty now" in page


def test_a_fleet_in_service_says_so(stranger: Client) -> None:
    assert "Every node is in service" in _page(stranger)
