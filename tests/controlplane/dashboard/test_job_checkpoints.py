"""What a job's page and the list of jobs show of its tiers, and a checkpoint on demand."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.models import AuditEvent
from controlplane.health.choices import SignalKind
from controlplane.jobs.durability import TROUBLES
from controlplane.jobs.models import Directive, Job, Placement
from tests.controlplane.dashboard.world import Fleet
from tests.factories import (
    CheckpointFactory,
    JobFactory,
    PlacementFactory,
    ReplicaFactory,
    SignalFactory,
)


@pytest.fixture
def job(fleet: Fleet) -> Job:
    return fleet.job


def page(client: Client, job: Job) -> str:
    answer = client.get(reverse("job", args=[job.pk]))
    assert answer.status_code == 200
    return answer.content.decode()


def test_each_tier_is_shown_with_its_age_and_whether_it_is_late(operator: Client, job: Job) -> None:
    now = timezone.now()
    for age in (100, 105, 110):
        CheckpointFactory(job=job, tier="local", at=now - timedelta(seconds=age))
        CheckpointFactory(job=job, tier="shared", at=now - timedelta(seconds=3 * age - 290))

    shown = page(operator, job)

    local, shared = shown.split('data-tier="')[1:3]
    assert local.startswith('local"')
    assert "data-is-late" in local
    assert 'data-late="25"' in local  # three times five seconds, and ten
    assert "data-is-late" not in shared.split("</tr>")[0]
    assert (now - timedelta(seconds=100)).isoformat() in local  # its age, kept ticking
    assert (now - timedelta(seconds=10)).isoformat() in shared
    assert shared.startswith('shared"')
    assert "verified" in shared.split("</tr>")[0]


def told(
    job: Job,
    kind: str,
    replica: int,
    *,
    ago_s: float,
    placement: Placement,
    rank: int = 0,
    tier: str = "local",
) -> None:
    SignalFactory(
        kind=SignalKind.JOB_TROUBLE,
        job_id=job.pk,
        replica=replica,
        placement_id=placement.pk,
        observed_at=timezone.now() - timedelta(seconds=ago_s),
        data={
            "kind": kind,
            "text": f"No space left on the device of rank {rank}",
            "subject": tier,
            "rank": rank,
        },
    )


def test_a_tier_that_fails_on_a_replica_is_shown_until_it_is_well(
    operator: Client, job: Job
) -> None:
    CheckpointFactory(job=job, tier="local")
    first, second = [
        PlacementFactory(replica=ReplicaFactory(job=job, index=index)) for index in (10, 11)
    ]
    told(job, "checkpoint_failed", 10, ago_s=30, placement=first)
    told(job, "checkpoint_failed", 11, ago_s=20, placement=second)
    told(job, "checkpoint_recovered", 10, ago_s=10, placement=first)

    failing = page(operator, job)
    told(job, "checkpoint_recovered", 11, ago_s=5, placement=second)
    well = page(operator, job)

    row = failing.split('data-tier="local"')[1].split("</tr>")[0]
    assert "failing on replica 11" in row
    assert "No space left on the device" in row
    assert "failing" not in well.split('data-tier="local"')[1].split("</tr>")[0]
    assert "checkpoint_recovered (local), replica 10, 11" in well.split('data-testid="troubles"')[1]


def test_a_tier_is_well_again_also_if_the_node_s_clock_was_put_back_meanwhile(
    operator: Client, job: Job
) -> None:
    CheckpointFactory(job=job, tier="local")
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    told(job, "checkpoint_failed", 10, ago_s=-3000, placement=placement)
    told(job, "checkpoint_recovered", 10, ago_s=10, placement=placement)

    assert "failing" not in page(operator, job).split('data-tier="local"')[1].split("</tr>")[0]


def test_a_tier_that_fails_is_shown_whatever_else_was_told_since(
    operator: Client, job: Job
) -> None:
    """Of a failure that lasts it is told once."""
    CheckpointFactory(job=job, tier="local")
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    told(job, "checkpoint_failed", 10, ago_s=TROUBLES + 100, placement=placement)
    for ago_s in range(TROUBLES + 1):
        told(job, "holder_out_of_reach", 10, ago_s=ago_s, placement=placement, tier="")

    row = page(operator, job).split('data-tier="local"')[1].split("</tr>")[0]

    assert "failing on replica 10" in row


def test_a_rank_that_is_well_hides_no_other_of_its_replica(operator: Client, job: Job) -> None:
    CheckpointFactory(job=job, tier="local")
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    for rank in (0, 1):
        told(job, "checkpoint_failed", 10, ago_s=30 - rank, placement=placement, rank=rank)
    told(job, "checkpoint_recovered", 10, ago_s=10, placement=placement, rank=1)

    row = page(operator, job).split('data-tier="local"')[1].split("</tr>")[0]

    assert "failing on replica 10" in row
    assert "No space left on the device of rank 0" in row


@pytest.mark.parametrize(("whole_ago_s", "failing"), [(10, False), (40, True)])
def test_the_object_store_is_well_once_any_replica_wrote_there(
    operator: Client, job: Job, whole_ago_s: float, failing: bool
) -> None:
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    told(job, "checkpoint_failed", 10, ago_s=30, placement=placement, tier="object")
    CheckpointFactory(job=job, tier="object", at=timezone.now() - timedelta(seconds=whole_ago_s))

    row = page(operator, job).split('data-tier="object"')[1].split("</tr>")[0]

    assert ("failing on replica 10" in row) == failing


@pytest.mark.parametrize("kind", ["checkpoint_refused", "checkpoints_out_of_reach"])
def test_what_was_not_taken_is_not_called_verified_until_that_tier_is_saved_to_again(
    operator: Client, job: Job, kind: str
) -> None:
    now = timezone.now()
    for tier in ("local", "shared"):
        CheckpointFactory(job=job, tier=tier, step=90, at=now - timedelta(seconds=40))
    told(job, kind, 0, ago_s=50, placement=Placement(pk="plc_0"), tier="shared")
    told(job, kind, 0, ago_s=30, placement=Placement(pk="plc_0"), tier="local")
    told(job, kind, 0, ago_s=20, placement=Placement(pk="plc_0"), tier="")

    local, shared = (row.split("</tr>")[0] for row in page(operator, job).split("data-tier=")[1:3])
    CheckpointFactory(job=job, tier="local", step=70, at=now - timedelta(seconds=10))
    again = page(operator, job).split('data-tier="local"')[1].split("</tr>")[0]

    assert "not taken" in local
    assert "No space left on the device" in local  # why
    assert "verified" not in local
    assert "verified" in shared
    assert "verified" in again


def test_what_many_replicas_say_alike_is_one_line(operator: Client, job: Job) -> None:
    """As of a shared folder that has gone: each of a thousand says so."""
    for index in (10, 11, 12, 14):
        placement = PlacementFactory(replica=ReplicaFactory(job=job, index=index))
        told(job, "checkpoint_failed", index, ago_s=30 - index, placement=placement)
    told(job, "checkpoint_recovered", 10, ago_s=3, placement=placement)
    told(job, "checkpoint_failed", 10, ago_s=2, placement=placement)

    shown = page(operator, job).split('data-testid="troubles"')[1].split("</section>")[0]

    lines = [line.split("</span>")[0] for line in shown.split('<span class="told"><span>')[1:]]
    assert lines == [
        "checkpoint_failed (local), replica 10 to 12, 14",
        "checkpoint_recovered (local), replica 10",
    ]


def test_the_expected_share_of_time_is_shown_with_the_interval(operator: Client, job: Job) -> None:
    CheckpointFactory(job=job, tier="local", every_s=42.0, ettr=0.98765)

    row = page(operator, job).split('data-tier="local"')[1].split("</tr>")[0]

    assert "42.0 s" in row
    assert "0.9877" in row


def test_what_is_stored_packed_is_shown_beside_its_size(operator: Client, job: Job) -> None:
    CheckpointFactory(job=job, tier="shared", bytes=64 * 2**20, stored=40 * 2**20)

    shown = page(operator, job)

    tiers, saves = shown.split('data-testid="tiers"')[1].split('data-testid="checkpoints"')
    assert 'title="0.63 of 64.0 MiB">stored 40.0 MiB<' in tiers
    assert "64.0 MiB</td>" in saves
    assert "stored 40.0 MiB (0.63)" in saves


@pytest.mark.parametrize("stored", [64 * 2**20, None])
def test_of_what_is_stored_as_it_is_or_not_known_the_size_alone_is_shown(
    operator: Client, job: Job, stored: int | None
) -> None:
    CheckpointFactory(job=job, tier="shared", bytes=64 * 2**20, stored=stored)

    shown = page(operator, job)

    assert shown.count("64.0 MiB") == 1
    assert "stored" not in shown


def test_what_a_process_that_is_gone_said_of_a_tier_counts_no_more(
    operator: Client, job: Job
) -> None:
    CheckpointFactory(job=job, tier="local")
    gone = Placement.objects.filter(replica__job=job)[0]
    told(job, "checkpoint_failed", 0, ago_s=30, placement=gone)
    Placement.objects.filter(pk=gone.pk).update(state="ended")

    assert "failing" not in page(operator, job).split('data-tier="local"')[1].split("</tr>")[0]


def test_an_operator_has_a_checkpoint_saved_and_a_viewer_cannot(
    operator: Client, viewer: Client, job: Job
) -> None:
    url = reverse("job-checkpoint", args=[job.pk])
    assert 'data-testid="checkpoint-now"' in page(operator, job)
    assert 'data-testid="checkpoint-now"' not in page(viewer, job)

    refused = viewer.post(url)
    done = operator.post(url)

    assert (refused.status_code, done.status_code) == (403, 302)
    assert Directive.objects.get(job=job).verb == "checkpoint"
    assert AuditEvent.objects.filter(verb="job.direct.checkpoint", object_id=job.pk).count() == 1


def test_of_a_job_that_does_not_run_none_can_be_had(operator: Client, job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(state="stopped")

    answer = operator.post(reverse("job-checkpoint", args=[job.pk]))

    assert answer.status_code == 409
    assert "nobody is there to obey" in answer.content.decode()
    assert not Directive.objects.exists()


def test_nor_of_one_whose_ranks_do_not_listen(operator: Client, job: Job) -> None:
    job.progress.all().delete()
    Placement.objects.filter(replica__job=job).delete()

    answer = operator.post(reverse("job-checkpoint", args=[job.pk]))

    assert answer.status_code == 409
    assert "Give its ranks DRYDOCK_URL and DRYDOCK_TOKEN" in answer.content.decode()
    assert not Directive.objects.exists()


def test_what_was_told_once_is_not_hidden_by_what_is_told_often(operator: Client, job: Job) -> None:
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    told(job, "no_holder", 10, ago_s=90, placement=placement, tier="")
    for ago_s in range(20):
        kind = ("straggler", "straggler_recovered")[ago_s % 2]
        told(job, kind, 10, ago_s=ago_s, placement=placement, tier="replica 10")

    shown = page(operator, job).split('data-testid="troubles"')[1].split("</section>")[0]

    assert "no_holder" in shown


@pytest.mark.parametrize(("whole_ago_s", "failing"), [(None, True), (40, True), (10, False)])
def test_a_tier_in_which_nothing_comes_whole_fails_until_something_does(
    operator: Client, job: Job, whole_ago_s: float | None, failing: bool
) -> None:
    """Each rank's own part is well: only where they lie together it shows that others' lack."""
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    told(job, "checkpoint_not_whole", 10, ago_s=30, placement=placement, tier="shared")
    for ago_s in [one for one in [whole_ago_s] if one is not None]:
        CheckpointFactory(job=job, tier="shared", at=timezone.now() - timedelta(seconds=ago_s))

    row = page(operator, job).split('data-tier="shared"')[1].split("</tr>")[0]

    assert ("failing on replica 10" in row) == failing


def test_a_tier_that_fails_still_does_if_it_is_late_too(operator: Client, job: Job) -> None:
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    CheckpointFactory(job=job, tier="shared", at=timezone.now() - timedelta(seconds=90))
    told(job, "checkpoint_failed", 10, ago_s=60, placement=placement, tier="shared")
    told(job, "checkpoint_late", 10, ago_s=30, placement=placement, tier="shared")

    row = page(operator, job).split('data-tier="shared"')[1].split("</tr>")[0]

    assert "failing on replica 10" in row


def test_what_a_replica_says_to_be_over_is_not_shown_beside_others(
    operator: Client, job: Job
) -> None:
    for index, ago_s in ((10, 30), (11, 5)):
        placement = PlacementFactory(replica=ReplicaFactory(job=job, index=index))
        told(job, "checkpoint_failed", index, ago_s=ago_s, placement=placement)
    told(job, "checkpoint_recovered", 10, ago_s=20, placement=placement)

    shown = page(operator, job).split('data-testid="troubles"')[1].split("</section>")[0]

    assert "checkpoint_failed (local), replica 11<" in shown


def test_a_store_that_hangs_from_the_first_save_is_shown(operator: Client, job: Job) -> None:
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    told(job, "checkpoint_late", 10, ago_s=30, placement=placement, tier="shared")
    told(job, "checkpoint_late", 10, ago_s=30, placement=placement, tier="local")
    CheckpointFactory(job=job, tier="local", at=timezone.now() - timedelta(seconds=40))

    local, shared = (row.split("</tr>")[0] for row in page(operator, job).split("data-tier=")[1:3])

    assert "failing" not in local
    assert "failing on replica 10" in shared


@pytest.mark.parametrize(
    ("kind", "of", "saved_to", "replicas", "over"),
    [
        ("checkpoint_late", "shared", "shared", 4, True),
        ("checkpoint_late", "shared", "local", 4, False),
        ("checkpoint_late", "local", "local", 1, True),
        ("checkpoint_late", "local", "local", 4, False),  # which others may have saved
        ("no_room_for_checkpoints", "", "local", 1, True),
        ("no_room_for_checkpoints", "", "shared", 4, False),
        ("checkpoint_failed", "shared", "shared", 1, False),
    ],
)
def test_what_held_up_checkpoints_is_over_once_a_later_one_came_whole(
    operator: Client, job: Job, kind: str, of: str, saved_to: str, replicas: int, over: bool
) -> None:
    Job.objects.filter(pk=job.pk).update(world_replicas=replicas)
    now = timezone.now()
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    told(job, kind, 10, ago_s=30, placement=placement, tier=of)
    CheckpointFactory(job=job, tier=saved_to, at=now - timedelta(seconds=40))
    earlier = page(operator, job)
    CheckpointFactory(job=job, tier=saved_to, at=now - timedelta(seconds=20))

    assert kind in earlier
    assert (kind not in page(operator, job)) == over


@pytest.fixture
def kept_near(job: Job) -> Placement:
    """A process that told half a minute ago that no other node keeps what it saves to memory."""
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    CheckpointFactory(job=job, tier="peer")
    told(job, "checkpoint_not_apart", 10, ago_s=30, placement=placement, tier="")
    return placement


def of_peers(client: Client, job: Job) -> str:
    return page(client, job).split('data-tier="peer"')[1].split("</tr>")[0]


def test_what_lies_in_the_own_node_s_memory_is_not_called_verified_until_it_is_taken_back(
    operator: Client, job: Job, kept_near: Placement
) -> None:
    before = of_peers(operator, job)
    told(job, "checkpoint_apart", 10, ago_s=5, placement=kept_near, tier="")
    after = of_peers(operator, job)

    assert "not on another node" in before
    assert "verified" not in before
    assert "not on another node" not in after
    assert "verified" in after


def test_who_saves_to_another_node_takes_back_nothing_that_another_told(
    operator: Client, job: Job, kept_near: Placement
) -> None:
    other = PlacementFactory(replica=ReplicaFactory(job=job, index=11))
    told(job, "checkpoint_apart", 11, ago_s=5, placement=other, tier="")

    assert "not on another node" in of_peers(operator, job)


def test_what_a_process_that_is_gone_said_of_that_counts_no_more(
    operator: Client, job: Job, kept_near: Placement
) -> None:
    Placement.objects.filter(pk=kept_near.pk).update(state="ended")

    assert "not on another node" not in of_peers(operator, job)


# --- the list of jobs -----------------------------------------------------------------------------


def marks(client: Client) -> list[str]:
    """What the list says of tiers to which saves fail, job by job."""
    shown = client.get(reverse("jobs")).content.decode()
    found = shown.split('data-testid="failing-tiers"')[1:]
    return [one.split("</a>")[0].split("</svg> ")[1] for one in found]


def test_the_list_of_jobs_names_the_tiers_to_which_saves_fail(operator: Client, job: Job) -> None:
    JobFactory(cluster=job.cluster, name="well")
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    for tier in ("shared", "local"):
        told(job, "checkpoint_failed", 10, ago_s=30, placement=placement, tier=tier)
    failing = marks(operator)
    told(job, "checkpoint_recovered", 10, ago_s=5, placement=placement, tier="shared")

    assert failing == ["saves fail: local disk, shared storage"]
    assert marks(operator) == ["saves fail: local disk"]


@pytest.mark.parametrize(
    ("state", "age_s", "found"),
    [
        ("running", 140, ["saves fail: shared storage"]),
        ("running", 110, []),  # not three times as old yet as it is saved to, and ten seconds
        ("stopping", 140, []),
    ],
)
def test_it_names_a_tier_that_was_late_before_and_takes_nothing_any_more(
    operator: Client, job: Job, state: str, age_s: int, found: list[str]
) -> None:
    Job.objects.filter(pk=job.pk).update(state=state)
    placement = PlacementFactory(replica=ReplicaFactory(job=job, index=10))
    at = timezone.now() - timedelta(seconds=age_s)
    CheckpointFactory(job=job, tier="shared", every_s=40.0, at=at)
    CheckpointFactory(job=job, tier="local", every_s=1.0, at=at)  # of which nobody says so
    told(job, "checkpoint_late", 10, ago_s=500, placement=placement, tier="shared")

    assert marks(operator) == found


def test_what_the_list_says_of_many_jobs_costs_no_more_queries_than_of_one(
    operator: Client, job: Job
) -> None:
    counts = []
    for more in (1, 5):
        for _ in range(more):
            placement = PlacementFactory(replica__job__cluster=job.cluster)
            failing = placement.replica.job
            CheckpointFactory(job=failing, tier="local")
            told(failing, "checkpoint_failed", 0, ago_s=30, placement=placement)
        with CaptureQueriesContext(connection) as queries:
            assert len(marks(operator)) >= more
        counts.append(len(queries))

    assert counts[0] == counts[1]
