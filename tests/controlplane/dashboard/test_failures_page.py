"""The page of failures: what is listed, how it is filtered, what it cost."""

from __future__ import annotations

import html
import re
from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.actions import audit
from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor, User
from controlplane.dashboard.selectors import lemons
from controlplane.fleet.actions import set_hold
from controlplane.fleet.models import Cluster, Gpu, Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Failure
from controlplane.incidents.models import Incident
from tests.controlplane.dashboard.world import Fleet
from tests.factories import (
    ClusterFactory,
    FailureFactory,
    GpuFactory,
    GrantFactory,
    IncidentFactory,
    JobFactory,
    NodeExclusionFactory,
    NodeFactory,
    PlacementFactory,
    PlaybookRunFactory,
    ReplicaFactory,
    SignalFactory,
)
from workers.lemons import SIGNALS


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


@pytest.fixture
def beta(viewer: Client, fleet: Fleet) -> Cluster:
    """Another cluster that the viewer sees, with an incident of the same cause."""
    cluster = ClusterFactory(name="beta")
    GrantFactory(user=User.objects.get(grants__cluster=fleet.cluster), cluster=cluster)
    IncidentFactory(cluster=cluster, code="xid-79")
    return cluster


def _causes(client: Client, **query: str) -> list[tuple[str, str, str]]:
    """The cluster of each cause, where its count leads, and the count."""
    page = client.get(reverse("failures"), query).content.decode()
    table = html.unescape(page.split('data-testid="impacts"')[1].split("</table>")[0])
    return re.findall(r'<td>(\w+)</td><td class="num"><a href="([^"]+)">(\d+)', table)


def test_causes_are_priced_in_the_cluster_that_is_asked_for(
    viewer: Client, fleet: Fleet, beta: Cluster
) -> None:
    assert sorted(name for name, _, _ in _causes(viewer)) == ["alpha", "beta"]
    assert [name for name, _, _ in _causes(viewer, cluster=beta.pk)] == ["beta"]


def test_the_count_of_a_cause_leads_to_the_incidents_that_were_counted(
    viewer: Client, fleet: Fleet, beta: Cluster
) -> None:
    long_ago = timezone.now() - timedelta(days=20)
    IncidentFactory(cluster=fleet.cluster, code="xid-79", occurred_at=long_ago)
    IncidentFactory(cluster=fleet.cluster, code="xid-79")

    leads = {name: (address, count) for name, address, count in _causes(viewer)}
    listed = {
        name: str(viewer.get(address).content.decode().count('data-testid="incident-row"'))
        for name, (address, _) in leads.items()
    }
    assert listed == {name: count for name, (_, count) in leads.items()}
    assert listed == {"alpha": "2", "beta": "1"}


def test_a_failure_without_a_node_belongs_to_the_cluster_of_its_job_or_incident(
    viewer: Client, fleet: Fleet, beta: Cluster
) -> None:
    FailureFactory(node=None, code="exit-1", job_id=fleet.job.id)
    site = FailureFactory(node=None, code="site-power")
    fleet.incident.failures.add(site)

    assert {"exit-1", "site-power"} <= set(_codes(viewer, cluster=fleet.cluster.id))
    assert _codes(viewer, cluster=beta.pk) == []


def test_a_cluster_that_one_does_not_see_has_no_failures(viewer: Client, fleet: Fleet) -> None:
    site = FailureFactory(node=None, code="site-power")
    hidden = IncidentFactory(cluster=ClusterFactory())
    for incident in (fleet.incident, hidden):
        incident.failures.add(site)

    assert _codes(viewer, cluster=hidden.cluster.pk) == []


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


# --- by what, and where ---------------------------------------------------------------------------


def _legend(client: Client, by: str) -> list[str]:
    page = client.get(reverse("failures"), {"by": by}).content.decode()
    return re.findall(r'class="legend-item".*?</span>([^<]+) <strong>', html.unescape(page))


def test_the_chart_tells_apart_what_it_is_asked_to(viewer: Client, fleet: Fleet) -> None:
    Failure.objects.all().delete()
    old = GpuFactory(node=fleet.other, model="NVIDIA B200", index=7)
    Gpu.objects.filter(pk=old.pk).update(first_seen_at=timezone.now() - timedelta(days=400))
    Node.objects.filter(pk=fleet.other.pk).update(
        report={"inventory": {"driver_version": "570.86.15"}}, rack=fleet.rack
    )
    FailureFactory(node=fleet.other, gpu=old, code="xid-31")
    FailureFactory(node=None, gpu=None, code="site-silent")

    assert _legend(viewer, "code") == ["xid-31"]
    assert _legend(viewer, "model") == ["NVIDIA B200"]
    assert _legend(viewer, "driver") == ["570.86.15"]
    assert _legend(viewer, "rack") == [fleet.rack.name]
    assert _legend(viewer, "age") == ["6 months and more"]
    assert _legend(viewer, "nonsense") == ["xid-31"]


def test_a_card_is_as_old_as_it_was_when_it_failed(viewer: Client, fleet: Fleet) -> None:
    Failure.objects.all().delete()
    card = GpuFactory(node=fleet.other, index=7)
    Gpu.objects.filter(pk=card.pk).update(first_seen_at=timezone.now() - timedelta(days=20))
    FailureFactory(node=fleet.other, gpu=card, observed_at=timezone.now() - timedelta(days=6))
    FailureFactory(node=fleet.other, gpu=None)

    assert sorted(_legend(viewer, "age")) == ["below 1 month", "not known"]


# --- lemons ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wide", [{"world_replicas": 4}, {"world_replicas": 1, "nodes_per_replica": 4}]
)
def test_the_record_of_a_node_is_counted_from_the_rows(fleet: Fleet, wide: dict[str, int]) -> None:
    node = fleet.other
    before = lemons.histories([fleet.cluster])[fleet.cluster.pk][node.pk]
    job = JobFactory(cluster=fleet.cluster, **wide)
    PlacementFactory(replica=ReplicaFactory(job=job), node=node, state="ended")
    alone = JobFactory(cluster=fleet.cluster, world_replicas=1)
    for _ in range(2):
        PlacementFactory(replica=ReplicaFactory(job=alone), node=node, state="ended")
    for about, code in ((job, "xid-79"), (alone, "xid-48")):
        incident = IncidentFactory(cluster=fleet.cluster, job=about, node=node, code=code)
        incident.failures.add(FailureFactory(node=node, code=code, fault_class="hardware"))
    FailureFactory(node=node, code="xid-31", fault_class="program")
    FailureFactory(
        node=node, fault_class="hardware", observed_at=timezone.now() - timedelta(days=40)
    )
    PlaybookRunFactory(cluster=fleet.cluster, node=node, playbook="repair-node")
    NodeExclusionFactory(job=job, node=node)
    audit(
        SYSTEM, "node.transition", "node", node.pk,
        cluster_id=fleet.cluster.pk, after={"state": "quarantined"},
    )  # fmt: skip

    now = lemons.histories([fleet.cluster])[fleet.cluster.pk][node.pk]

    grown = {name: getattr(now, name) - getattr(before, name) for name in SIGNALS}
    assert grown == {
        "exclusions": 1, "xids": 2, "tickets": 1, "outs": 1,
        "multi_node_failures": 1, "single_node_failures": 1, "single_node_failure_rate": 0.5,
    }  # fmt: skip


def test_a_hold_counts_once_however_it_is_reworded_and_lifted(fleet: Fleet) -> None:
    person = Actor(kind=ActorKind.USER, id="7")
    for reason in ("fan rattles", "fan rattles, part ordered", "", "again", ""):
        set_hold(person, fleet.other.pk, reason)

    now = lemons.histories([fleet.cluster])[fleet.cluster.pk][fleet.other.pk]

    assert now.exclusions == 2


def test_a_node_that_fails_far_more_than_others_is_shown_with_why(
    viewer: Client, stranger: Client, fleet: Fleet
) -> None:
    for _ in range(30):
        NodeFactory(cluster=fleet.cluster)
    for _ in range(9):
        FailureFactory(node=fleet.other, fault_class="hardware")
        PlaybookRunFactory(cluster=fleet.cluster, node=fleet.other, playbook="repair-node")

    page = viewer.get(reverse("failures-lemons")).content.decode()

    (row,) = re.findall(r'<tr data-testid="lemon-row" class="row--bad">.*?</tr>', page)
    assert f"{fleet.other.name}</a> <span" in row
    assert "faults of its own <strong>9</strong>" in row
    assert "repairs and RMA cases <strong>9</strong>" in row
    assert (
        'data-testid="lemon-row"' not in stranger.get(reverse("failures-lemons")).content.decode()
    )
