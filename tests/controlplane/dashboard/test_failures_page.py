"""The page of failures: what is listed, how it is filtered, what it cost."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.health.choices import SignalKind
from controlplane.health.models import Failure
from controlplane.incidents.models import Incident
from tests.controlplane.dashboard.world import Fleet
from tests.factories import FailureFactory, SignalFactory


def _codes(client: Client, **query: str) -> list[str]:
    page = client.get(reverse("failures"), query).content.decode()
    return re.findall(r'data-testid="failure-row" data-code="([^"]+)"', page)


def test_a_failure_is_told_with_its_raw_line_card_rule_and_incident(
    viewer: Client, fleet: Fleet
) -> None:
    page = viewer.get(reverse("failures")).content.decode()

    assert "Raw line, rule xid-79" in page
    assert "fallen off the bus. &lt;script&gt;" in page
    assert fleet.card.serial in page
    assert f'href="/nodes/{fleet.node.id}"' in page
    assert f'href="/incidents/{fleet.incident.id}"' in page
    assert f'href="/jobs/{fleet.job.id}"' in page


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, ["xid-31", "xid-79"]),
        ({"code": "xid-31"}, ["xid-31"]),
        ({"fault_class": "hardware"}, ["xid-79"]),
        ({"node": "ALPHA-01"}, ["xid-79"]),
        ({"node": "alpha-"}, ["xid-31", "xid-79"]),
        ({"window": "30d"}, ["xid-31", "xid-79", "xid-48"]),
        ({"window": "nonsense"}, ["xid-31", "xid-79"]),
        ({"sort": "code", "window": "30d"}, ["xid-31", "xid-48", "xid-79"]),
        ({"sort": "-count"}, ["xid-31", "xid-79"]),
    ],
)
def test_filters_and_sorting(
    query: dict[str, str], found: list[str], viewer: Client, fleet: Fleet
) -> None:
    FailureFactory(node=fleet.other, code="xid-31", fault_class="program", count=7)
    FailureFactory(node=fleet.node, code="xid-48", observed_at=timezone.now() - timedelta(days=20))

    assert _codes(viewer, **query) == found


def test_filters_by_card_and_cluster(viewer: Client, fleet: Fleet) -> None:
    FailureFactory(node=fleet.other, code="xid-31")

    assert _codes(viewer, card=fleet.card.serial) == ["xid-79"]
    assert _codes(viewer, cluster=fleet.cluster.id) == ["xid-31", "xid-79"]


def test_a_failure_of_a_job_is_seen_without_a_node(
    viewer: Client, stranger: Client, fleet: Fleet
) -> None:
    FailureFactory(node=None, code="exit-1", job_id=fleet.job.id)

    assert "exit-1" in _codes(viewer)
    assert _codes(stranger) == []


def test_the_chart_counts_each_code(viewer: Client, fleet: Fleet) -> None:
    for _ in range(3):
        FailureFactory(node=fleet.other, code="xid-31")

    page = viewer.get(reverse("failures")).content.decode()

    assert "<title>xid-31: 3, from" in page
    assert "<title>xid-79: 1, from" in page
    assert "xid-31 <strong>3</strong>" in page


def test_a_cause_is_priced(viewer: Client, fleet: Fleet) -> None:
    Incident.objects.filter(pk=fleet.incident.pk).update(gpu_seconds_lost=7200.0)

    page = viewer.get(reverse("failures")).content.decode()

    row = page[page.index('data-testid="impacts"') :].split("</tbody>")[0]
    assert "7\u202f200" in row
    assert "4.00\u202fUSD" in row  # two GPU-hours at two dollars


def test_a_calm_fleet_says_so(stranger: Client) -> None:
    page = stranger.get(reverse("failures")).content.decode()

    assert "Nothing has failed in the last 7 days" in page


# --- an edited rule -------------------------------------------------------------------------------

XID_119 = "NVRM: Xid (PCI:0000:1b:00): 119, pid=7, name=python3, Timeout waiting for RPC from GSP"


def _observed(fleet: Fleet, raw: str = XID_119, **failure: object) -> None:
    signal = SignalFactory(kind=SignalKind.KERNEL_LINE, node=fleet.other, raw=raw)
    made = FailureFactory(
        node=fleet.other, code="xid-119", needed="reset_gpu", urgency="now", **failure
    )
    made.signals.add(signal)


def _tried(client: Client, **query: str) -> tuple[str, list[str]]:
    """What is said of how many would change, and the rows of those."""
    page = client.get(reverse("failures-rule"), query).content.decode()
    tally = re.search(r'data-testid="rule-tally">([^<]+)<', page)
    return (tally[1] if tally else "", re.findall(r'data-testid="rule-change"', page))


def test_an_edited_rule_shows_what_it_would_change_and_changes_nothing(
    viewer: Client, fleet: Fleet
) -> None:
    _observed(fleet)
    before = list(Failure.objects.order_by("pk").values())
    page = viewer.get(
        reverse("failures-rule"), {"code": "119", "action": "reboot", "window": "1d"}
    ).content.decode()

    assert "1 of 1 decision" in page
    assert "<td>reset_gpu, now</td><td><strong>reboot, now</strong></td>" in page
    assert "rule site overlay as edited" in page
    assert "xid,immediate_action\n119,reboot" in page
    assert list(Failure.objects.order_by("pk").values()) == before


def test_a_rule_that_says_what_is_said_changes_nothing(viewer: Client, fleet: Fleet) -> None:
    _observed(fleet)
    assert _tried(viewer, code="119", action="reset_gpu") == ("0 of 1 decision", [])
    assert _tried(viewer, code="7", action="ignore") == ("0 of 0 decisions", [])
    assert _tried(viewer, code="119", action="ignore", kind="sxid")[0] == "0 of 0 decisions"


def test_nobody_sees_what_a_rule_would_change_elsewhere(stranger: Client, fleet: Fleet) -> None:
    _observed(fleet)
    assert _tried(stranger, code="119", action="ignore") == ("0 of 0 decisions", [])


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"code": "seventy"}, "The code is a number"),
        ({"code": "-1"}, "The code is a number"),
        ({"code": "79", "action": "explode"}, "No rule may say &#x27;explode&#x27;"),
        ({"code": "79"}, "No rule may say"),
    ],
)
def test_a_rule_that_is_none_is_refused_with_what_would_be(
    query: dict[str, str], says: str, viewer: Client, fleet: Fleet
) -> None:
    answer = viewer.get(reverse("failures-rule"), query)

    assert answer.status_code == 400
    assert says in answer.content.decode()
