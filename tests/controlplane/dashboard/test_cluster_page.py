"""The page of a cluster: its map, its table, and the filters that stand in the address."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.fleet.models import Lease, Node
from tests.controlplane.dashboard.world import Fleet
from tests.factories import GpuFactory, NodeFactory, RmaCaseFactory


def _names(client: Client, fleet: Fleet, **query: str) -> list[str]:
    page = client.get(reverse("cluster", args=[fleet.cluster.id]), query).content.decode()
    return re.findall(r'data-testid="node-row" data-node="([^"]+)"', page)


def _map(client: Client, fleet: Fleet, **query: str) -> dict[str, Any]:
    answer: dict[str, Any] = client.get(
        reverse("cluster-map", args=[fleet.cluster.id]), query
    ).json()
    return answer


def test_the_table_shows_where_a_fault_and_a_job_are(viewer: Client, fleet: Fleet) -> None:
    page = viewer.get(reverse("cluster", args=[fleet.cluster.id])).content.decode()

    row = page[page.index('data-node="alpha-01"') :].split("</tr>")[0]
    assert "xid-79" in row
    assert "GPU 3" in row
    assert f'href="/jobs/{fleet.job.id}"' in row
    assert f'href="/nodes/{fleet.node.id}"' in row


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, ["alpha-01", "alpha-02", "beta-03"]),
        ({"state": "allocated"}, ["alpha-01"]),
        ({"code": "xid-79"}, ["alpha-01"]),
        ({"code": "xid-48"}, []),
        ({"reachable": "no"}, ["beta-03"]),
        ({"reachable": "yes"}, ["alpha-01", "alpha-02"]),
        ({"spare": "yes"}, ["alpha-02", "beta-03"]),
        ({"spare": "ready"}, []),
        ({"spare": "no"}, ["alpha-01"]),
        ({"held": "yes"}, ["alpha-02"]),
        ({"text": "BETA"}, ["beta-03"]),
        ({"spare": "yes", "held": "no"}, ["beta-03"]),
        ({"sort": "-name"}, ["beta-03", "alpha-02", "alpha-01"]),
        ({"sort": "nonsense"}, ["alpha-01", "alpha-02", "beta-03"]),
    ],
)
def test_filters_and_sorting(
    query: dict[str, str], found: list[str], viewer: Client, fleet: Fleet
) -> None:
    silent = NodeFactory(cluster=fleet.cluster, name="beta-03", spare=True)
    Lease.objects.filter(node=silent).update(reachable=False)
    Node.objects.filter(pk=fleet.other.pk).update(hold_reason="look at it")

    assert _names(viewer, fleet, **query) == found


def test_filters_by_job_rack_and_serial(viewer: Client, fleet: Fleet) -> None:
    NodeFactory(cluster=fleet.cluster, name="rackless")

    assert _names(viewer, fleet, job=fleet.job.id) == ["alpha-01"]
    assert _names(viewer, fleet, rack=fleet.rack.id) == ["alpha-01", "alpha-02"]
    assert _names(viewer, fleet, text=fleet.card.serial) == ["alpha-01"]


def test_a_retired_node_is_shown_only_when_asked_for(viewer: Client, fleet: Fleet) -> None:
    NodeFactory(cluster=fleet.cluster, name="gone", state="retired")

    assert "gone" not in _names(viewer, fleet)
    assert _names(viewer, fleet, state="retired") == ["gone"]


@pytest.mark.parametrize("sort", ["name", "-name", "state", "since", "rack"])
def test_pages_follow_one_another_without_gap_or_repeat(
    sort: str, viewer: Client, fleet: Fleet
) -> None:
    for number in range(130):
        NodeFactory(cluster=fleet.cluster, name=f"more-{number:03d}")
    address = reverse("cluster", args=[fleet.cluster.id])

    first = viewer.get(address, {"sort": sort}).content.decode()
    link = re.search(r'href="[^"?]*\?([^"]+)" rel="next"', first)
    assert link
    second = viewer.get(f"{address}?{link[1].replace('&amp;', '&')}").content.decode()

    names = [re.findall(r'data-testid="node-row" data-node="([^"]+)"', p) for p in (first, second)]
    assert [len(page) for page in names] == [100, 32]
    assert len(set(names[0] + names[1])) == 132


def test_a_made_up_cursor_is_not_found(viewer: Client, fleet: Fleet) -> None:
    address = reverse("cluster", args=[fleet.cluster.id])

    assert viewer.get(address, {"cursor": "nonsense"}).status_code == 404
    assert viewer.get(address, {"cursor": "WzEsIDJd", "sort": "since"}).status_code == 404


def test_the_map_holds_every_card_and_where_it_hurts(viewer: Client, fleet: Fleet) -> None:
    rack = _map(viewer, fleet)["racks"][0]

    assert rack["name"] == "alpha-r1"
    assert [rack["prefix"] + name for name in rack["names"].split(" ")] == ["alpha-01", "alpha-02"]
    assert rack["cards"] == "80"
    assert rack["faults"] == [[0, 3, "xid-79"]]
    assert rack["jobs"] == [0, -1]


def test_the_map_knows_what_the_filter_lets_through(viewer: Client, fleet: Fleet) -> None:
    everything = _map(viewer, fleet)["racks"][0]["flags"]
    spares = _map(viewer, fleet, spare="yes")["racks"][0]["flags"]

    assert everything == "37"  # heard and matching, the second a spare as well
    assert spares == "27"


def test_a_card_that_is_out_for_replacement_is_marked(viewer: Client, fleet: Fleet) -> None:
    card = GpuFactory(node=fleet.other, index=0)
    RmaCaseFactory(gpu=card)

    assert [1, 0, "RMA"] in _map(viewer, fleet)["racks"][0]["faults"]


def test_the_map_leads_to_a_node_by_its_name(viewer: Client, fleet: Fleet) -> None:
    address = reverse("node-by-name", args=[fleet.cluster.id, "alpha-01"])

    assert viewer.get(address)["Location"] == reverse("node", args=[fleet.node.id])
    assert viewer.get(address.replace("alpha-01", "alpha-99")).status_code == 404


def test_whoever_sees_one_cluster_is_led_to_it(viewer: Client, fleet: Fleet) -> None:
    answer = viewer.get(reverse("clusters"))

    assert answer["Location"] == reverse("cluster", args=[fleet.cluster.id])
