"""What a line means after what its card, or its machine, said long before."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from controlplane.fleet.models import Cluster, Gpu
from controlplane.health.models import Failure, Signal
from controlplane.jobs.models import Placement
from tests.factories import (
    GpuFactory,
    JobFactory,
    NodeFactory,
    PlacementFactory,
    ReplicaFactory,
    SignalFactory,
)
from tests.workers.world import World
from workers import intake
from workers.signal_triage import verdict_of
from workers.triage import LineVerdict, condemns_node

pytestmark = pytest.mark.django_db

XID = "NVRM: Xid (PCI:0000:1b:00):"
XID_13 = f"{XID} 13, pid=1, name=a, Graphics SM Warp Exception on (GPC 8, TPC 5, SM 1): Out"
XID_31 = f"{XID} 31, pid=7, name=python3, Ch 0000000d, intr 0. MMU Fault"
XID_43 = f"{XID} 43, pid=7, name=python3, Ch 0000000d"
XID_79 = f"{XID} 79, pid=7, name=python3, GPU has fallen off the bus."
LOST = "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."
PARITY = f"{XID} 74, NVLink: fatal error detected on link 1(0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
SXID = "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
NOW = timezone.now()


@pytest.fixture
def card() -> Gpu:
    return GpuFactory(pci_address="00000000:1B:00.0")


def told(card: Gpu, raw: str, at: datetime = NOW, **fields: Any) -> Signal:
    """One that was taken up as its card's."""
    return SignalFactory(node=card.node, gpu=card, raw=raw, observed_at=at, **fields)


def said_now(card: Gpu, raw: str, **fields: Any) -> LineVerdict:
    """Of a line of which nobody has said yet which card it is about."""
    verdict = verdict_of(SignalFactory(node=card.node, raw=raw, observed_at=NOW, **fields))
    assert verdict is not None
    return verdict


def ago(**time: float) -> datetime:
    return NOW - timedelta(**time)


@pytest.mark.parametrize(
    ("line", "once"), [(XID_13, "restart_app"), (XID_31, "restart_app"), (XID_43, "ignore")]
)
@pytest.mark.parametrize(("hours", "repeats"), [(1, True), (23, True), (25, False)])
def test_what_a_program_met_on_a_card_is_met_there_again_the_same_day(
    card: Gpu, line: str, once: str, hours: float, repeats: bool
) -> None:
    told(card, line, ago(hours=hours))

    verdict = said_now(card, line)

    assert verdict.action == ("field_diagnostic" if repeats else once)
    assert not condemns_node(verdict)


@pytest.fixture
def cluster(card: Gpu) -> Cluster:
    return Cluster.objects.get(nodes=card.node)


@pytest.fixture
def placed(card: Gpu, cluster: Cluster) -> Placement:
    """What its node holds of a job, since long ago."""
    job = JobFactory(cluster=cluster)
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=0), node=card.node)
    Placement.objects.filter(pk=placement.pk).update(created_at=ago(days=9))
    return placement


@pytest.mark.parametrize(
    ("line", "action"), [(XID_13, "restart_app"), (XID_31, "restart_app"), (XID_43, "ignore")]
)
def test_what_cards_of_other_nodes_of_its_job_show_that_day_is_the_programs(
    card: Gpu, placed: Placement, line: str, action: str
) -> None:
    told(card, line, ago(hours=6))
    for index in (1, 2):
        replica = ReplicaFactory(job=placed.replica.job, index=index)
        SignalFactory(
            node=PlacementFactory(replica=replica).node, raw=line, observed_at=ago(hours=6)
        )

    verdict = said_now(card, line)

    assert verdict.action == action
    assert "on cards of 2 other nodes too" in verdict.summary


@pytest.mark.parametrize(("hours", "other_job"), [(25, False), (6, True)])
def test_what_others_showed_another_day_or_under_another_job_says_nothing_of_its_program(
    card: Gpu, placed: Placement, hours: float, other_job: bool
) -> None:
    told(card, XID_31, ago(hours=6))
    job = {True: JobFactory(cluster=placed.node.cluster), False: placed.replica.job}[other_job]
    other = PlacementFactory(replica=ReplicaFactory(job=job, index=1)).node
    SignalFactory(node=other, raw=XID_31, observed_at=ago(hours=hours))

    assert said_now(card, XID_31).action == "field_diagnostic"


@pytest.mark.parametrize(
    ("same_cluster", "action"), [(True, "restart_app"), (False, "field_diagnostic")]
)
def test_where_none_of_ours_ran_all_nodes_of_its_cluster_count(
    card: Gpu, cluster: Cluster, same_cluster: bool, action: str
) -> None:
    told(card, XID_31, ago(hours=6))
    there = {True: {"cluster": cluster}, False: {}}[same_cluster]
    SignalFactory(node=NodeFactory(**there), raw=XID_31, observed_at=ago(hours=6))

    assert said_now(card, XID_31).action == action


def test_a_card_off_the_bus_a_second_time_was_not_mended_by_its_restart(card: Gpu) -> None:
    told(card, XID_79, ago(hours=20))

    assert "again on the same card" in said_now(card, XID_79).summary


@pytest.mark.parametrize(("hours", "again"), [(1, True), (3, False)])
def test_a_line_whose_card_nobody_named_counts_if_the_card_was_there(
    card: Gpu, hours: float, again: bool
) -> None:
    """As of one that had left its node's report by the time that it was said to be lost."""
    Gpu.objects.filter(pk=card.pk).update(first_seen_at=ago(hours=2))
    SignalFactory(node=card.node, gpu=None, raw=XID_79, observed_at=ago(hours=hours))

    assert ("again on the same card" in said_now(card, XID_79).summary) is again


@pytest.mark.parametrize("line", [XID_31, XID_79])
def test_what_another_card_said_in_its_place_is_not_this_ones(card: Gpu, line: str) -> None:
    replaced = GpuFactory(node=None, index=None, pci_address="00000000:1B:00.0")
    SignalFactory(node=card.node, gpu=replaced, raw=line, observed_at=ago(hours=1))

    assert "again on" not in said_now(card, line).summary


def test_one_burst_that_goes_on_is_one(card: Gpu) -> None:
    told(card, XID_31, ago(minutes=59), repeated_at=ago(minutes=2), count=900)
    told(card, XID_31.replace("pid=7", "pid=8"), ago(minutes=30))

    assert said_now(card, XID_31.replace("pid=7", "pid=9")).action == "restart_app"


def test_a_third_error_of_parity_is_the_vendors_however_long_ago_the_others_were(
    card: Gpu,
) -> None:
    told(card, PARITY, ago(days=400))
    assert said_now(card, PARITY).action == "reset_gpu"
    told(card, PARITY, ago(days=30))

    assert said_now(card, PARITY).action == "contact_vendor"
    assert said_now(card, PARITY.replace("link 1", "link 2")).action == "reset_gpu"


def test_errors_of_parity_that_an_agent_counted_are_as_many(card: Gpu) -> None:
    assert said_now(card, PARITY, count=2).action == "reset_gpu"
    assert said_now(card, PARITY, count=3).action == "contact_vendor"


def test_a_link_of_a_new_card_has_no_errors_of_parity(card: Gpu) -> None:
    replaced = GpuFactory(node=None, index=None, pci_address="00000000:1B:00.0")
    SignalFactory(node=card.node, gpu=replaced, raw=PARITY, observed_at=ago(days=9), count=5)

    assert said_now(card, PARITY).action == "reset_gpu"


@pytest.mark.parametrize("lost", [XID_79, LOST])
@pytest.mark.parametrize(
    ("minutes", "action"), [(2, "follow_primary"), (9, "follow_primary"), (11, "reset_gpu")]
)
def test_a_switch_sees_a_card_that_is_gone_for_ten_minutes(
    card: Gpu, lost: str, minutes: float, action: str
) -> None:
    told(card, lost, ago(minutes=minutes))

    assert said_now(card, SXID).action == action


def test_a_line_that_calls_for_more_once_it_was_repeated_is_acted_on(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, PARITY)
    intake.triage_signals()
    for count in (2, 3, 4):
        world.kernel_repeats(PARITY, count)
        intake.triage_signals()

    failures = Failure.objects.filter(gpu=world.card_of(node)).order_by("created_at")
    assert [(one.needed, one.count) for one in failures] == [
        ("reset_gpu", 2), ("contact_vendor", 4)
    ]  # fmt: skip
