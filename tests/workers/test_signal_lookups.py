"""Among all that a fleet has told in its time, what is told of one process or job is found at
once: ingest's writer and the keeper have seconds for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import DjangoDbBlocker

from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.incidents import actions as incidents
from controlplane.jobs import durability
from controlplane.jobs.choices import JobState
from controlplane.jobs.models import Job
from runtime import client
from tests.factories import CheckpointFactory, JobFactory, SignalFactory
from tests.once import around_tests
from tests.workers.moving import told_by
from tests.workers.test_earlier_lines import PARITY, SXID, XID_31
from tests.workers.world import XID_79, World
from workers import losses
from workers.signal_triage import verdict_of

pytestmark = pytest.mark.django_db

EACH = 10_000
LINE = SignalKind.KERNEL_LINE
KINDS = (SignalKind.PROCESS_EXITED, SignalKind.PEER_LOST, SignalKind.JOB_TROUBLE)


@pytest.fixture(scope="module")
def signals(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Many jobs have told much, and many nodes kernel lines."""
    with around_tests(django_db_blocker):
        with django_db_blocker.unblock():
            many_signals()
        yield


def many_signals() -> None:
    now = timezone.now()
    Signal.objects.bulk_create(
        Signal(id=f"{kind}-{n}", kind=kind, job_id=f"job_{n}", placement_id=f"plc_{n}",
               observed_at=now, triaged_at=now)
        for kind in KINDS
        for n in range(EACH)
    )  # fmt: skip
    Signal.objects.bulk_create(
        Signal(id=f"line-{n}", kind=LINE, observed_at=now, triaged_at=now) for n in range(EACH)
    )


@pytest.fixture
def told(signals: None, world: World) -> World:
    """Among them two replicas."""
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE health_signal, jobs_placement")
    return world


def _farewell(world: World) -> None:
    told_by(world.placements[0], client.Stopped(step=9, reason="left the loop", at=time.time()))


def _endings(world: World) -> None:
    Job.objects.update(state=JobState.STOPPING)
    incidents.finish_ending_jobs()


def _cause_of_loss(world: World) -> None:
    losses.evidence_of(world.placements[0], timezone.now(), timezone.now())


def _first_to_go(world: World) -> None:
    losses.first_of(world.placements, timezone.now(), timezone.now())


def _may_run_on(world: World) -> None:
    losses.may_run_on(world.placements[0].node)


def _all_of_it(world: World) -> None:
    list(Signal.objects.filter(placement_id=world.placements[0].pk))


def _troubles(world: World) -> None:
    durability.troubles_of(world.job)


def _failing(world: World) -> None:
    durability.failing_tiers(world.job, [])


def _failing_of_many(world: World) -> None:
    durability.failing_tiers_of([world.job, JobFactory()])


def _kept_near(world: World) -> None:
    durability.kept_near(world.job)


def _not_taken(world: World) -> None:
    durability.tiers_not_taken(world.job, [CheckpointFactory(job=world.job)])


def _verdicts(world: World) -> None:
    node, now = world.placements[0].node, timezone.now()
    for card in (None, world.card_of(node)):
        for line in (XID_79, PARITY, SXID):
            verdict_of(Signal(node=node, gpu=card, raw=line, kind=LINE, observed_at=now))


def _verdicts_on_repeats(world: World) -> None:
    now = timezone.now()
    for node in (world.placements[0].node, world.spares[0]):
        card = world.card_of(node)
        SignalFactory(node=node, gpu=card, raw=XID_31, observed_at=now - timedelta(hours=6))
        verdict_of(Signal(node=node, gpu=card, raw=XID_31, kind=LINE, observed_at=now))


@pytest.mark.parametrize(
    "lookup",
    [
        _farewell,
        _endings,
        _cause_of_loss,
        _first_to_go,
        _may_run_on,
        _all_of_it,
        _troubles,
        _failing,
        _failing_of_many,
        _kept_near,
        _not_taken,
        _verdicts,
        _verdicts_on_repeats,
    ],
)
def test_what_is_told_of_a_process_or_a_job_is_found_by_an_index(
    told: World, lookup: Callable[[World], Any]
) -> None:
    with CaptureQueriesContext(connection) as asked:
        lookup(told)
    found = [one["sql"] for one in asked if "health_signal" in one["sql"]]
    reads = [sql for sql in found if sql.startswith("SELECT")]

    assert reads
    assert [sql for sql in reads if "Seq Scan on health_signal" in plan_of(sql)] == []


def plan_of(sql: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {sql}")
        return "\n".join(row[0] for row in cursor.fetchall())
