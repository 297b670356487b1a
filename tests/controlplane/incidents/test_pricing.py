"""What incidents cost: time that a replica trained is not lost, and no time is lost twice."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from controlplane.accounts.models import AuditEvent
from controlplane.fleet.models import Node
from controlplane.health.choices import SignalKind
from controlplane.incidents import pricing
from controlplane.incidents.models import Incident
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Job, Placement
from tests.factories import (
    AuditEventFactory,
    GpuFactory,
    IncidentFactory,
    InterruptionFactory,
    JobFactory,
    PlacementFactory,
    PlaybookRunFactory,
    ProgressSampleFactory,
    ReplicaFactory,
    SignalFactory,
)

pytestmark = pytest.mark.django_db

GPUS = 8
STEP_S = 0.5


class Past:
    """A job of four replicas that began half a day ago; moments are in seconds since then."""

    def __init__(self) -> None:
        self.began = timezone.now() - timedelta(hours=12)
        self.job: Job = JobFactory(gpus_per_replica=GPUS, world_replicas=4)
        self.replicas = [ReplicaFactory(job=self.job, index=index) for index in range(4)]
        self.commits(9)

    def at(self, second: float) -> datetime:
        return self.began + timedelta(seconds=second)

    def stays(self, index: int, joined: float, ended: float | None = None) -> Placement:
        placement: Placement = PlacementFactory(
            replica=self.replicas[index],
            joined_at=self.at(joined),
            state=PlacementState.RUNNING if ended is None else PlacementState.ENDED,
            ended_at=None if ended is None else self.at(ended),
        )
        return placement

    def exits(self, placement: Placement, second: float) -> None:
        SignalFactory(
            kind=SignalKind.PROCESS_EXITED,
            node=placement.node,
            placement_id=placement.pk,
            observed_at=self.at(second),
        )

    def pauses(self, second: float, seconds: float, **told: list[int]) -> None:
        """Its replicas go on after a gap; by default all four do."""
        told = {"replicas": [0, 1, 2, 3], **told}
        InterruptionFactory(
            job=self.job,
            started_at=self.at(second),
            committed_at=self.at(second + seconds),
            gap_s=seconds + STEP_S,
            **told,
        )

    def commits(self, second: float, replicas: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        ProgressSampleFactory(
            job=self.job,
            step=int(second),
            at=self.at(second),
            step_s=STEP_S,
            replicas=list(replicas),
        )

    def incident(self, second: float, index: int | None, **fields: Any) -> Incident:
        incident: Incident = IncidentFactory(
            cluster=self.job.cluster,
            job=self.job,
            replica=index,
            occurred_at=self.at(second),
            **fields,
        )
        return incident

    def moves(self, node: Node, second: float, state: str) -> None:
        event = AuditEventFactory(
            object_type="node", object_id=node.pk, verb="node.transition", after={"state": state}
        )
        AuditEvent.objects.filter(pk=event.pk).update(at=self.at(second))

    def costs(self, incident: Incident, until: float) -> dict[str, float]:
        parts = pricing.parts(incident, self.at(until))
        return {one["part"]: one["gpu_seconds"] for one in parts}


@pytest.fixture
def past() -> Past:
    return Past()


def test_what_a_replica_trained_between_two_losses_is_not_lost(past: Past) -> None:
    past.stays(1, joined=10, ended=110)
    past.pauses(100, 2, lost=[1], replicas=[0, 2, 3])
    past.stays(1, joined=160, ended=3010)
    past.pauses(159, 1, joined=[1])
    past.pauses(3000, 2, lost=[1], replicas=[0, 2, 3])
    past.stays(1, joined=3100)
    past.pauses(3099, 1, joined=[1])
    incident = past.incident(100, 1, restored_at=past.at(3100))

    cost = past.costs(incident, until=5000)

    assert cost[pricing.REPLICA_AWAY] == (60 + 100) * GPUS
    assert cost[pricing.STOOD_STILL] == (2 + 1 + 2 + 1) * 3 * GPUS


def test_the_only_replica_of_a_job_is_away_from_the_end_of_its_process_each_time(
    past: Past,
) -> None:
    past.exits(past.stays(0, joined=10, ended=900), 100)
    past.exits(past.stays(0, joined=1000, ended=2900), 2000)
    past.stays(0, joined=3000)

    cost = past.costs(past.incident(100, 0), until=5000)

    assert cost[pricing.REPLICA_AWAY] == (900 + 1000) * GPUS


def test_what_nobody_saw_leave_is_away_since_its_last_commit(past: Past) -> None:
    past.stays(0, joined=10, ended=900)
    past.commits(130)
    past.stays(0, joined=1000)

    cost = past.costs(past.incident(100, 0), until=5000)

    assert cost[pricing.REPLICA_AWAY] == (1000 - 130) * GPUS


def test_what_was_silent_when_it_was_given_up_was_away(past: Past) -> None:
    past.stays(0, joined=10)

    cost = past.costs(past.incident(100, 0), until=400)

    assert cost[pricing.REPLICA_AWAY] == 300 * GPUS


def test_a_replica_that_trained_on_cost_nothing(past: Past) -> None:
    past.stays(0, joined=10)
    past.commits(399)

    assert past.costs(past.incident(100, 0), until=400) == {}


def test_on_a_node_whose_fault_is_known_a_replica_trains_until_it_is_ended(past: Past) -> None:
    past.exits(past.stays(1, joined=10, ended=505), 500)
    past.pauses(500, 1, lost=[1], replicas=[0, 2, 3])
    past.stays(1, joined=600)

    cost = past.costs(past.incident(100, 1), until=5000)

    assert cost[pricing.REPLICA_AWAY] == 100 * GPUS


def test_a_rank_that_was_starved_and_let_in_again_was_away_so_long(past: Past) -> None:
    past.stays(1, joined=10)
    past.pauses(100, 1, lost=[1], replicas=[0, 2, 3])
    past.pauses(129, 1, joined=[1])

    cost = past.costs(past.incident(100, 1), until=5000)

    assert cost[pricing.REPLICA_AWAY] == 30 * GPUS


def test_a_replica_that_moves_meanwhile_is_not_away(past: Past) -> None:
    past.exits(past.stays(1, joined=10, ended=105), 100)
    past.pauses(100, 1, lost=[1], replicas=[0, 2, 3])
    past.exits(past.stays(1, joined=160, ended=701), 705)
    past.stays(1, joined=700)
    past.pauses(699, 1, joined=[1])

    cost = past.costs(past.incident(100, 1), until=5000)

    assert cost == {pricing.REPLICA_AWAY: 60 * GPUS, pricing.STOOD_STILL: 3 * GPUS}


def test_nobody_misses_a_replica_whose_job_is_over(past: Past) -> None:
    lost = past.stays(1, joined=10, ended=205)
    GpuFactory.create_batch(GPUS, node=lost.node)
    past.pauses(100, 1, lost=[1], replicas=[0, 2, 3])
    past.moves(lost.node, 150, "quarantined")
    Job.objects.filter(pk=past.job.pk).update(ended_at=past.at(200))
    past.job.refresh_from_db()

    cost = past.costs(past.incident(100, 1, node=lost.node), until=5000)

    assert cost[pricing.REPLICA_AWAY] == (200 - 100) * GPUS
    assert cost[pricing.NODE_OUT] == (5000 - 200) * GPUS


def test_of_a_replica_that_is_away_still_its_node_is_not_counted_too(past: Past) -> None:
    lost = past.stays(1, joined=10, ended=120)
    GpuFactory.create_batch(GPUS, node=lost.node)
    past.pauses(100, 1, lost=[1], replicas=[0, 2, 3])
    past.moves(lost.node, 110, "quarantined")

    cost = past.costs(past.incident(100, 1, node=lost.node), until=5000)

    assert cost == {pricing.REPLICA_AWAY: 4900 * GPUS, pricing.STOOD_STILL: 3 * GPUS}


def test_a_node_is_out_from_when_what_it_held_trains_again_elsewhere(past: Past) -> None:
    lost = past.stays(1, joined=10, ended=120)
    GpuFactory.create_batch(GPUS, node=lost.node)
    past.pauses(100, 1, lost=[1, 2], replicas=[0, 3])
    past.moves(lost.node, 110, "quarantined")
    past.stays(1, joined=160)
    past.moves(lost.node, 500, "available")
    past.exits(past.stays(2, joined=10, ended=900), 100)
    past.stays(2, joined=1000)
    incident = past.incident(100, None, node=lost.node, restored_at=past.at(1000))
    for index in (1, 2):
        PlaybookRunFactory(incident=incident, context={"replica": index})

    cost = past.costs(incident, until=5000)

    assert cost[pricing.REPLICA_AWAY] == (60 + 900) * GPUS
    assert cost[pricing.NODE_OUT] == (500 - 160) * GPUS


def test_incidents_of_one_job_count_their_own_pauses_and_none_that_was_planned(
    past: Past,
) -> None:
    for index, lost_at in ((1, 100), (2, 150)):
        past.exits(past.stays(index, joined=10, ended=lost_at + 5), lost_at)
        past.pauses(lost_at, 2, lost=[index], replicas=[0, 3])
        past.stays(index, joined=lost_at + 100)
    past.pauses(180, 4, joined=[0], replicas=[0, 3])  # another one moves

    first = past.costs(past.incident(100, 1), until=5000)
    second = past.costs(past.incident(150, 2), until=5000)

    assert first[pricing.STOOD_STILL] == second[pricing.STOOD_STILL] == 2 * 2 * GPUS


def test_a_pause_for_replicas_of_two_incidents_is_counted_once(past: Past) -> None:
    for index in (1, 2):
        past.exits(past.stays(index, joined=10, ended=105), 100)
        past.stays(index, joined=200)
    past.pauses(100, 2, lost=[1, 2], replicas=[0, 3])

    costs = [past.costs(past.incident(100, index), until=5000) for index in (1, 2)]

    assert sum(cost[pricing.STOOD_STILL] for cost in costs) == 2 * 2 * GPUS


def test_whoever_is_back_stands_still_when_the_next_one_is_let_in(past: Past) -> None:
    for index, back_at in ((1, 200), (2, 300)):
        past.exits(past.stays(index, joined=10, ended=105), 100)
        past.stays(index, joined=back_at)
    past.pauses(299, 1, joined=[2])
    incident = past.incident(100, None)
    for index in (1, 2):
        PlaybookRunFactory(incident=incident, context={"replica": index})

    cost = past.costs(incident, until=5000)

    assert cost[pricing.STOOD_STILL] == 3 * GPUS
