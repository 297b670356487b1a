"""What a job tells of itself: told twice it stands once, and the ledger has no gap."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Refused
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.jobs import actions, durability, selectors
from controlplane.jobs.actions import reports
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState
from controlplane.jobs.models import (
    Checkpoint,
    Interruption,
    Job,
    LedgerRange,
    Placement,
    ProgressSample,
)
from runtime import client
from runtime.checkpoint.tiers import TierName
from tests.factories import (
    DirectiveFactory,
    JobFactory,
    PlacementFactory,
    ReplicaFactory,
    SignalFactory,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def placement() -> Placement:
    job = JobFactory(state=JobState.STARTING)
    made: Placement = PlacementFactory(
        replica=ReplicaFactory(job=job, index=0, state=ReplicaState.STARTING),
        state=PlacementState.STARTING,
        started_at=None,
        joined_at=None,
    )
    return made


def tell(
    placement: Placement, *messages: client.Message, sent_at: float | None = None
) -> client.Reply:
    batch = client.Batch(
        job=placement.replica.job_id,
        replica=placement.replica.index,
        rank=0,
        placement=placement.pk,
        sent_at=time.time() if sent_at is None else sent_at,
        messages=[],
    )
    return actions.record_runtime_batch(placement.replica.job_id, batch, list(messages))


def regrouped(epoch: int, entered: list[str]) -> client.Regrouped:
    return client.Regrouped(
        epoch=epoch, replicas=[0], lost=[], joined=[*range(len(entered))], entered=entered,
        started_at=1000.0, committed_at=1000.2, step=5, gap_s=0.2,
    )  # fmt: skip


def progress(
    step: int, at: float = 1000.0, epoch: int = 1, *, whole: bool = False
) -> client.Progress:
    return client.Progress(
        step=step,
        steps=5,
        epoch=epoch,
        at=at,
        loss=3.0,
        grad_norm=1.0,
        step_s=0.1,
        max_gap_s=0.2,
        samples=120,
        tokens=120,
        replicas=[0],
        whole=whole,
    )


def ledger(first: int, last: int, epoch: int = 1) -> client.Ledger:
    return client.Ledger(
        step_from=first, step_to=last, epoch=epoch, samples=24 * (last - first + 1)
    )


def job_of(placement: Placement) -> Job:
    return Job.objects.get(pk=placement.replica.job_id)


def test_who_only_asks_hears_of_orders_and_writes_nothing(placement: Placement) -> None:
    actions.direct(SYSTEM, placement.replica.job_id, "stop")
    with CaptureQueriesContext(connection) as queries:
        reply = tell(placement)

    assert [one["verb"] for one in reply.directives] == ["stop"]
    assert [one for one in queries if "UPDATE" in one["sql"]] == []


def test_a_hello_makes_the_placement_run_and_progress_makes_the_replica_active(
    placement: Placement,
) -> None:
    tell(placement, client.Hello(pid=42, at=999.0))
    placement.refresh_from_db()
    assert (placement.state, placement.pid) == (PlacementState.RUNNING, 42)

    tell(placement, progress(4))

    placement.replica.refresh_from_db()
    assert placement.replica.state == ReplicaState.ACTIVE
    assert job_of(placement).state == JobState.RUNNING
    assert job_of(placement).step == 4


def test_a_message_told_twice_stands_once(placement: Placement) -> None:
    lost = client.PeerLost(epoch=1, replica=3, placement="plc", step=4, at=5.0, how="reset")
    regrouped = client.Regrouped(
        epoch=2,
        replicas=[0],
        lost=[3],
        joined=[],
        started_at=5.0,
        committed_at=5.2,
        step=5,
        gap_s=0.2,
    )
    for _ in range(2):
        tell(placement, progress(4), ledger(0, 4), lost, regrouped)
    assert ProgressSample.objects.count() == 1
    assert LedgerRange.objects.count() == 1
    assert Signal.objects.count() == 1
    assert Interruption.objects.count() == 1


def test_a_job_cannot_tell_of_the_loss_of_another_job_s_process(placement: Placement) -> None:
    other = PlacementFactory()
    lost = client.PeerLost(epoch=1, replica=3, placement=other.pk, step=4, at=5.0, how="reset")

    with pytest.raises(Refused) as refused:
        tell(placement, lost)

    assert (refused.value.status, refused.value.field) == (422, "placement")
    assert not Signal.objects.exists()


def test_a_job_cannot_tell_of_trouble_in_another_job_s_process(placement: Placement) -> None:
    batch = client.Batch(
        job=placement.replica.job_id,
        replica=0,
        rank=0,
        placement=PlacementFactory().pk,
        sent_at=time.time(),
        messages=[],
    )
    trouble = client.Trouble(kind="exception", text="", subject="", at=time.time())

    with pytest.raises(Refused) as refused:
        actions.record_runtime_batch(batch.job, batch, [trouble])

    assert (refused.value.status, refused.value.field) == (422, "placement")
    assert not Signal.objects.exists()


def test_the_loss_of_a_process_that_ended_before_is_taken(placement: Placement) -> None:
    past = PlacementFactory(replica=placement.replica, state=PlacementState.ENDED)
    tell(
        placement,
        client.PeerLost(epoch=1, replica=0, placement=past.pk, step=4, at=5.0, how="reset"),
    )
    assert Signal.objects.get().placement_id == past.pk


def test_who_entered_is_looked_up_at_once_however_many_they_are(placement: Placement) -> None:
    asked = []
    for epoch, count in ((2, 1), (3, 1000)):
        with CaptureQueriesContext(connection) as queries:
            tell(placement, regrouped(epoch, [f"plc_{number}" for number in range(count)]))
        asked.append(len(queries))

    assert asked[1] == asked[0]
    assert Interruption.objects.count() == 2


def test_of_those_who_entered_each_that_stood_by_has_its_place(placement: Placement) -> None:
    job = placement.replica.job
    others = [ReplicaFactory(job=job, index=index) for index in (1, 2)]
    spares = [PlacementFactory(replica=placement.replica, standby=True, warm=True) for _ in others]

    tell(placement, regrouped(2, [placement.pk, *(spare.pk for spare in spares)]))

    for spare in spares:
        spare.refresh_from_db()
    assert [(spare.replica, spare.standby) for spare in spares] == [
        (other, False) for other in others
    ]


def test_progress_told_late_does_not_turn_the_clock_back(placement: Placement) -> None:
    tell(placement, progress(9, at=1001.0))
    tell(placement, progress(4, at=1000.0))
    assert job_of(placement).step == 9


def test_a_later_epoch_counts_though_its_node_s_clock_is_behind(placement: Placement) -> None:
    tell(placement, progress(9, at=1005.0))
    tell(placement, progress(4, at=1001.0, epoch=2))
    tell(placement, progress(10, at=1006.0))  # of the epoch before, told late

    job = job_of(placement)
    assert (job.epoch, job.step, job.step_at) == (2, 4, datetime.fromtimestamp(1001.0, UTC))


def test_who_goes_on_after_a_loss_counts_though_its_node_s_clock_is_behind(
    placement: Placement,
) -> None:
    regrouped = client.Regrouped(
        epoch=2, replicas=[0], lost=[3], joined=[], started_at=1000.8, committed_at=1001.0,
        step=10, gap_s=0.2,
    )  # fmt: skip
    tell(placement, progress(9, at=1005.0))
    tell(placement, regrouped, progress(10, at=1001.0, epoch=2))

    assert job_of(placement).step == 10


def anew(placement: Placement) -> Placement:
    """It is started anew, on another node."""
    Placement.objects.filter(pk=placement.pk).update(state=PlacementState.ENDED)
    made: Placement = PlacementFactory(replica=placement.replica)
    return made


def test_what_lives_as_one_and_begins_anew_is_heard_from_its_first_epoch_on(
    placement: Placement,
) -> None:
    tell(placement, progress(9, epoch=5, whole=True))
    begun = anew(placement)
    tell(begun, progress(0, at=time.time(), whole=True))
    tell(begun, progress(1, at=time.time(), whole=True))

    job = job_of(placement)
    assert (job.epoch, job.step) == (1, 1)


@pytest.mark.parametrize("epoch", [1, 5])
def test_where_it_begins_anew_the_ledger_begins_anew_too(placement: Placement, epoch: int) -> None:
    tell(placement, progress(9, epoch=epoch, whole=True), ledger(0, 9, epoch))
    begun = anew(placement)
    reply = tell(begun, progress(4, at=time.time(), whole=True))
    tell(begun, ledger(0, 4))

    job = job_of(placement)
    assert (reply.ledger_step, reply.ledger_epoch) == (-1, -1)
    assert (job.ledger_step, job.recomputed_steps) == (4, 10)
    assert [one.epoch for one in LedgerRange.objects.filter(job=job)] == [1]


def test_progress_that_is_told_again_takes_no_ledger_back(placement: Placement) -> None:
    tell(placement, progress(9, whole=True), ledger(0, 9))
    tell(placement, progress(9, at=1002.5, whole=True))  # by a clock that is ahead, more slowly

    job = job_of(placement)
    assert (job.ledger_step, job.recomputed_steps) == (9, 0)


def test_a_start_that_has_the_number_of_another_takes_back_what_it_trains_again(
    placement: Placement,
) -> None:
    tell(placement, progress(19, whole=True), ledger(0, 9), ledger(10, 19))
    tell(anew(placement), progress(14, at=time.time(), whole=True))

    job = job_of(placement)
    assert (job.ledger_step, job.recomputed_steps) == (9, 10)


def test_what_its_own_scheduler_starts_anew_is_heard_too(placement: Placement) -> None:
    tell(placement, progress(9, epoch=5, whole=True), ledger(0, 9, epoch=5))
    unknown = Placement(pk="pid-7", replica=placement.replica)
    tell(unknown, progress(4, at=time.time(), whole=True), ledger(0, 4))

    job = job_of(placement)
    assert (job.epoch, job.step, job.ledger_step) == (1, 4, 4)


def test_one_that_goes_on_keeps_the_ledger_of_the_steps_before(placement: Placement) -> None:
    tell(placement, progress(9, whole=True), ledger(0, 9))
    tell(placement, progress(14, at=1001.0, whole=True), ledger(10, 14))
    tell(anew(placement), progress(12, at=time.time(), epoch=2, whole=True))

    assert job_of(placement).ledger_step == 14


def test_what_it_told_before_it_began_anew_is_not_heard(placement: Placement) -> None:
    tell(placement, progress(9, epoch=5, whole=True))
    anew(placement)
    tell(placement, progress(8, at=time.time(), epoch=4, whole=True))

    assert job_of(placement).step == 9


def test_what_lives_as_one_and_trains_on_is_not_heard_of_an_earlier_epoch(
    placement: Placement,
) -> None:
    tell(placement, progress(9, at=time.time(), epoch=5, whole=True))
    tell(placement, progress(8, at=time.time(), epoch=4, whole=True))

    assert job_of(placement).step == 9


def test_an_earlier_epoch_of_replicas_that_follow_each_other_is_not_heard(
    placement: Placement,
) -> None:
    tell(placement, progress(9, epoch=5))
    tell(anew(placement), progress(4, at=time.time()))

    assert job_of(placement).step == 9


def test_the_ledger_accepts_no_gap_and_says_where_to_go_on(placement: Placement) -> None:
    tell(placement, ledger(0, 4))
    assert tell(placement, ledger(7, 9)).ledger_step == 4
    assert tell(placement, ledger(5, 9)).ledger_step == 9


def test_a_resumed_job_takes_back_the_steps_that_it_trains_again(placement: Placement) -> None:
    tell(placement, ledger(0, 9), ledger(10, 19))
    tell(placement, ledger(15, 24, epoch=2))
    job = job_of(placement)
    ranges = list(
        LedgerRange.objects.order_by("step_from").values_list("step_from", "step_to", "samples")
    )
    assert ranges == [(0, 9, 240), (10, 14, 120), (15, 24, 240)]
    assert job.ledger_step == 24
    assert job.recomputed_steps == 5


@pytest.mark.parametrize(("seen_to_end", "node"), [(0, "allocated"), (1, "available")])
def test_the_node_of_a_rank_that_leaves_is_free_once_its_process_has_ended(
    placement: Placement, seen_to_end: int, node: str
) -> None:
    SignalFactory.create_batch(
        seen_to_end, kind=SignalKind.PROCESS_EXITED, placement_id=placement.pk
    )
    tell(placement, client.Stopped(step=9, reason="asked to", at=1.0))
    placement.refresh_from_db()
    placement.node.refresh_from_db()
    assert placement.state == PlacementState.ENDED
    assert placement.node.state == node


def test_a_job_that_was_told_to_stop_is_over_once_its_last_process_says_that_it_leaves(
    placement: Placement,
) -> None:
    tell(placement, client.Hello(pid=7, at=1.0), progress(9))
    job = actions.request_stop(SYSTEM, placement.replica.job_id, "done")

    tell(placement, progress(10, at=1001.0), client.Stopped(step=10, reason="asked to", at=1002.0))

    job.refresh_from_db()
    assert (job.state, job.step) == (JobState.STOPPED, 10)
    assert job.ended_at is not None


def test_a_stranger_cannot_end_a_placement_of_another_job(placement: Placement) -> None:
    other = PlacementFactory()
    batch = client.Batch(
        job=placement.replica.job_id,
        replica=0,
        rank=0,
        placement=other.pk,
        sent_at=time.time(),
        messages=[],
    )
    actions.record_runtime_batch(
        placement.replica.job_id, batch, [client.Stopped(step=1, reason="x", at=1.0)]
    )
    other.refresh_from_db()
    assert other.state == PlacementState.RUNNING


def saved(step: int, at: float, digest: str) -> client.CheckpointSaved:
    return client.CheckpointSaved(
        step=step, tier="local", path="/c", bytes=10, digest=digest, stall_s=0.0, seconds=1.0, at=at
    )


def test_a_step_that_is_made_and_saved_again_shows_the_later_save(placement: Placement) -> None:
    tell(placement, saved(20, 1000.0, "first"), saved(30, 1010.0, "given up"))
    tell(placement, saved(20, 1020.0, "second"))
    tell(placement, saved(20, 1000.0, "first"))  # told once more

    job = placement.replica.job
    digests = dict(Checkpoint.objects.filter(job=job).values_list("step", "digest"))
    assert digests == {20: "second", 30: "given up"}
    assert durability.last_checkpoints(job)[0].step == 20


def test_the_curve_of_a_job_that_went_back_runs_forward_in_time(placement: Placement) -> None:
    tell(placement, *(progress(step, at=1000.0 + step) for step in (10, 20, 30)))
    tell(placement, *(progress(step, at=1030.0 + step, epoch=2) for step in (15, 25, 35)))

    shown = selectors.series(placement.replica.job, after=None, window_s=None)

    assert shown is not None
    assert shown["at"] == sorted(shown["at"])
    assert shown["step"][-1] == 35


def test_what_comes_after_a_point_is_nothing_that_was_made_before_the_job_went_back(
    placement: Placement,
) -> None:
    tell(placement, *(progress(step, at=1000.0 + step) for step in (10, 20, 30)))
    tell(placement, *(progress(step, at=1030.0 + step, epoch=2) for step in (15, 25)))

    news = selectors.series(placement.replica.job, after=1045.0, window_s=None)

    assert news is not None
    assert (news["step"], news["at"]) == ([25], [1055.0])


def saved_to(
    tier: TierName, step: int, at: float, stored: int | None = None
) -> client.CheckpointSaved:
    return client.CheckpointSaved(
        step=step, tier=tier, path="p", bytes=9, digest="d", stall_s=0.1, seconds=0.2,
        every_s=2.0, ettr=0.9, at=at, stored=stored,
    )  # fmt: skip


def test_how_much_of_a_checkpoint_is_stored_is_kept_with_it(placement: Placement) -> None:
    """A job of an older version does not say it; one that went back may have packed it since."""
    tell(placement, saved_to("shared", 1, at=1000.0), saved_to("shared", 2, 1002.0, stored=9))
    tell(placement, saved_to("shared", 3, 1004.0, stored=9))
    tell(placement, saved_to("shared", 3, 1008.0, stored=6))

    found = Checkpoint.objects.order_by("step").values_list("bytes", "stored")
    assert [*found] == [(9, None), (9, 9), (9, 6)]


def test_of_what_is_saved_every_few_seconds_the_last_are_remembered(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "MAX_SHORT_LIVED", 2)
    tiers: list[TierName] = ["peer", "shared"]
    for tier in tiers:
        tell(placement, *(saved_to(tier, step, at=1000.0 + step) for step in (1, 2, 3, 4)))

    steps = {
        tier: sorted(Checkpoint.objects.filter(tier=tier).values_list("step", flat=True))
        for tier in tiers
    }
    assert steps == {"peer": [3, 4], "shared": [1, 2, 3, 4]}


@pytest.mark.parametrize("tier", ["shared", "object"])
def test_of_what_is_kept_for_long_more_are_remembered_and_not_for_ever(
    placement: Placement, monkeypatch: pytest.MonkeyPatch, tier: TierName
) -> None:
    monkeypatch.setattr(reports, "MAX_SHORT_LIVED", 1)
    monkeypatch.setattr(reports, "MAX_LONG_LIVED", 3)
    tell(placement, saved_to("local", 1, at=1000.0))
    tell(placement, *(saved_to(tier, step, at=1000.0 + step) for step in (1, 2, 3, 4, 5)))

    told = Checkpoint.objects.order_by("tier", "step").values_list("tier", "step")
    assert [*told] == [("local", 1), (tier, 3), (tier, 4), (tier, 5)]


def test_of_directives_of_one_verb_the_newest_is_said(placement: Placement) -> None:
    """However often somebody has asked for a checkpoint, one at the next edge is all there is to
    obey."""
    job = placement.replica.job
    *_, newest = [DirectiveFactory(job=job, verb="checkpoint") for _ in range(5)]
    stop = DirectiveFactory(job=job, verb="stop")
    DirectiveFactory(job=job, verb="checkpoint", expires_at=timezone.now() - timedelta(seconds=1))

    said = tell(placement, progress(5)).directives

    assert [(one["id"], one["verb"]) for one in said] == [
        (newest.pk, "checkpoint"),
        (stop.pk, "stop"),
    ]


@pytest.mark.parametrize("message", [saved_to("peer", 5, 1000.0), progress(5)])
def test_who_saves_or_says_when_all_save_is_told_how_often_nodes_fail(
    placement: Placement, message: client.Message
) -> None:
    assert tell(placement, message).failures_per_node_day == pytest.approx(6.5e-3)
    assert tell(placement, ledger(0, 5)).failures_per_node_day is None


@pytest.mark.parametrize("ahead_s", [-3600.0, 240.0])
def test_times_by_a_clock_that_is_wrong_are_moved_to_ours(
    placement: Placement, ahead_s: float
) -> None:
    now = time.time()
    trouble = client.Trouble(kind="checkpoint_failed", text="", subject="local", at=now + ahead_s)
    for _ in range(2):
        tell(placement, saved(7, now + ahead_s, "d"), trouble, sent_at=now + ahead_s + 1)

    (checkpoint,) = Checkpoint.objects.all()
    (signal,) = Signal.objects.filter(kind=SignalKind.JOB_TROUBLE)
    assert abs(checkpoint.at.timestamp() - now + 1) < 5
    assert abs(signal.observed_at.timestamp() - now + 1) < 5


@pytest.mark.parametrize("behind_s", [0.0, 10.0])
def test_what_was_on_its_way_for_a_while_keeps_its_times(
    placement: Placement, behind_s: float
) -> None:
    at = time.time() - 60.0
    tell(placement, saved(7, at, "d"), sent_at=time.time() - behind_s)

    assert Checkpoint.objects.get().at.timestamp() == pytest.approx(at, abs=1e-3)


def test_a_step_that_was_told_of_the_future_holds_up_none_that_is_told_now(
    placement: Placement,
) -> None:
    job = placement.replica.job
    Job.objects.filter(pk=job.pk).update(
        step=5, epoch=1, step_at=timezone.now() + timedelta(hours=1)
    )
    tell(placement, progress(9, at=time.time()))

    job.refresh_from_db()
    assert job.step == 9
