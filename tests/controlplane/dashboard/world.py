"""A cluster with a faulty card in it, and how its parts are reached."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from django.test import Client
from django.utils import timezone

from controlplane.accounts.choices import Role
from controlplane.fleet.models import Cluster, Gpu, Node, Rack
from controlplane.health.models import Failure, NodeSample
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.jobs.models import Job
from tests.factories import (
    ClusterFactory,
    FailureFactory,
    GpuFactory,
    GrantFactory,
    IncidentFactory,
    JobFactory,
    NodeFactory,
    PlacementFactory,
    PlaybookRunFactory,
    PlaybookStepFactory,
    RackFactory,
    ReplicaFactory,
    SignalFactory,
)

RAW = "NVRM: Xid (PCI:0000:4b:00): 79, pid=4121, GPU has fallen off the bus. <script>"


@dataclass(frozen=True)
class Fleet:
    """One cluster, told by its parts: card 3 of the first node is faulty."""

    cluster: Cluster
    rack: Rack
    node: Node
    card: Gpu
    other: Node
    job: Job
    failure: Failure
    incident: Incident
    run: PlaybookRun


def one_fleet() -> Fleet:
    cluster = ClusterFactory(name="alpha")
    rack = RackFactory(cluster=cluster, name="alpha-r1")
    job = JobFactory(cluster=cluster, name="pretrain")
    node = NodeFactory(cluster=cluster, rack=rack, name="alpha-01", state="allocated")
    cards = [GpuFactory(node=node, index=index) for index in range(8)]
    other = NodeFactory(cluster=cluster, rack=rack, name="alpha-02", spare=True)
    PlacementFactory(replica=ReplicaFactory(job=job, index=0), node=node)
    failure = FailureFactory(node=node, gpu=cards[3], code="xid-79", job_id=job.id, replica=0)
    failure.signals.add(SignalFactory(node=node, gpu=cards[3], raw=RAW))
    incident = IncidentFactory(cluster=cluster, node=node, job=job, replica=0, code="xid-79")
    incident.failures.add(failure)
    run = PlaybookRunFactory(incident=incident, node=node, title="Repair alpha-01")
    PlaybookStepFactory(run=run, title="Reboot it", disruptive=True)
    return Fleet(cluster, rack, node, cards[3], other, job, failure, incident, run)


def ten_samples(fleet: Fleet) -> list[NodeSample]:
    """Ten readings of all cards, a second apart; card 3 cannot be read in the last five."""
    now = timezone.now()
    cards = list(fleet.node.gpus.order_by("index"))
    return NodeSample.objects.bulk_create(
        NodeSample(
            node=fleet.node,
            at=now - timedelta(seconds=10 - number),
            gpus=[
                {"uuid": card.uuid, "temperature_c": 50.0 + number, "sm_clock_mhz": 1900.0}
                for card in cards
                if number < 5 or card.index != 3
            ],
        )
        for number in range(10)
    )


def client_of(role: Role, cluster: Cluster) -> Client:
    client = Client()
    client.force_login(GrantFactory(role=role, cluster=cluster).user)
    return client


def hidden_of(page: str, field: str) -> dict[str, str]:
    """What the form of this field sends beside what is typed in it."""
    forms = (rest.split("</form>")[0] for rest in page.split("<form")[1:])
    form = next(one for one in forms if f'id="{field}"' in one)
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form))


def reasons_in(page: str) -> dict[str, str]:
    """The reasons that stand in the forms of a page, by their fields."""
    return dict(re.findall(r'<input id="([^"]+)" name="reason"[^>]* value="([^"]*)"', page))
