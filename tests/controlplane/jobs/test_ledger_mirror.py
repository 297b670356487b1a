"""The control plane's copy of a sample ledger can be checked alone, whatever was rolled back."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from controlplane.accounts.choices import Role
from controlplane.jobs import actions, selectors
from controlplane.jobs.models import Job, LedgerRange
from runtime import client
from runtime.data import Batches
from runtime.ledger import SampleLedger, Summed
from runtime.ledger.__main__ import main
from runtime.ledger.check import check
from tests.factories import ClusterFactory, GrantFactory, JobFactory

pytestmark = pytest.mark.django_db

HEALTHY = [0, 0, 1, 1]  # who computes which shard
ALONE = [0, 0, 0, 0]


@pytest.fixture
def job() -> Job:
    made: Job = JobFactory()
    return made


def trained(*steps: list[int], epoch: int = 1) -> SampleLedger:
    """The ledger of a run in which these replicas computed the shards of each step."""
    data = Batches(samples=22, shards=4, shard_size=2, seed=3)
    ledger = SampleLedger(data.state_dict())
    for step, who in enumerate(steps):
        summed = Summed(
            coverage=[1] * 4, checksums=data.checksums(step), who=[replica + 1 for replica in who]
        )
        ledger.record(step, epoch, summed, data.shard_size)
    return ledger


def tell(job: Job, *messages: client.Message) -> int:
    """Returns how far the control plane holds the ledger."""
    return answered(job, *messages)[0]


def answered(job: Job, *messages: client.Message) -> tuple[int, int]:
    """Step and epoch of the last entry that the control plane says it holds."""
    batch = client.Batch(
        job=job.pk, replica=0, rank=0, placement="", sent_at=time.time(), messages=[]
    )
    reply = actions.record_runtime_batch(job.pk, batch, list(messages))
    return reply.ledger_step, reply.ledger_epoch


def mirrored(caller: Client, job: Job, limit: int = 100) -> list[dict[str, Any]]:
    """All pages of what the API says."""
    path, found = f"/api/v1/jobs/{job.pk}/ledger?limit={limit}", []
    while path:
        page = caller.get(path).json()
        found += page["results"]
        path = page["next"]
    return found


@pytest.fixture
def viewer(job: Job) -> Client:
    caller = Client()
    caller.force_login(GrantFactory(role=Role.VIEWER, cluster=job.cluster).user)
    return caller


def test_what_was_told_in_parts_is_whole_by_the_command(
    job: Job, viewer: Client, tmp_path: Path
) -> None:
    steps = [HEALTHY, HEALTHY, ALONE, ALONE, HEALTHY, HEALTHY]
    for end in range(1, 7):
        tell(job, *trained(*steps[:end]).since(end - 2, 1))
    path = tmp_path / "ledger.json"
    path.write_text(json.dumps(viewer.get(f"/api/v1/jobs/{job.pk}/ledger").json()))

    assert main([str(path)]) == 0
    assert len(mirrored(viewer, job, limit=2)) == LedgerRange.objects.count() == 3


def test_what_is_told_each_second_is_one_range_while_nothing_changes(
    job: Job, viewer: Client
) -> None:
    steps = [HEALTHY] * 6
    for end in range(1, 7):
        tell(job, *trained(*steps[:end]).since(end - 2, 1))

    (row,) = mirrored(viewer, job)
    assert (row["step_from"], row["step_to"]) == (0, 5)
    (told,) = trained(*steps).since()
    assert (row["samples"], row["proof"]) == (told.samples, told.proof)
    assert check([row]).whole


def test_a_range_cut_by_a_roll_back_is_proven_by_the_next(job: Job, viewer: Client) -> None:
    tell(job, *trained(*[HEALTHY] * 6).since())
    resumed = trained(*[HEALTHY] * 4)
    data = Batches(samples=22, shards=4, shard_size=2, seed=3)
    for step in (4, 5):
        summed = Summed(coverage=[1] * 4, checksums=data.checksums(step), who=[1] * 4)
        resumed.record(step, 2, summed, 2)

    # Whoever tells it first, and however far the resumed job went meanwhile, knows this only:
    held = answered(job)
    assert held == (5, 1)
    assert answered(job, *resumed.since(*held)) == (5, 2)
    assert resumed.since(5, 2) == []

    ranges = mirrored(viewer, job)
    assert [(r["step_from"], r["step_to"], r["proof"] == "") for r in ranges] == [
        (0, 3, True),
        (4, 5, False),
    ]
    assert check(ranges).whole
    job.refresh_from_db()
    assert job.recomputed_steps == 2


def added_up(last: int, counts: list[int], epoch: int = 9) -> client.Ledger:
    return client.Ledger(
        step_from=0, step_to=last, epoch=epoch, samples=8 * (last + 1), merged=counts, proof="p"
    )


def test_steps_added_up_meanwhile_replace_what_was_known_of_them(job: Job) -> None:
    tell(job, *trained(*[HEALTHY] * 6).since())

    assert tell(job, added_up(99, [1, 2, 3])) == 99
    assert tell(job, added_up(99, [1, 2, 3])) == 99

    (row,) = LedgerRange.objects.all()
    assert (row.step_from, row.step_to, row.samples) == (0, 99, 800)
    told = selectors.sample_ledger(job)
    assert (told.lost, told.duplicated, told.dropped) == (1, 2, 3)
    job.refresh_from_db()
    assert job.recomputed_steps == 0


def test_steps_added_up_long_ago_are_not_told_twice(job: Job) -> None:
    tell(job, *trained(*[HEALTHY] * 6, epoch=9).since())

    assert tell(job, added_up(3, [0, 0, 0])) == 5

    assert LedgerRange.objects.get().step_to == 5


def test_a_stranger_sees_no_ledger(job: Job) -> None:
    stranger = Client()
    stranger.force_login(GrantFactory(role=Role.ADMIN, cluster=ClusterFactory()).user)

    assert stranger.get(f"/api/v1/jobs/{job.pk}/ledger").status_code == 404
