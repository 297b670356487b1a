"""What interruptions cost a job, in GPU-seconds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median

from django.db.models import Min

from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.jobs.models import Interruption, Job, Placement, ProgressSample

#: So far the clocks may differ of those who tell of one loss.
CLOCKS = timedelta(seconds=1)


@dataclass(frozen=True)
class Absence:
    """A time in which a replica did not train."""

    replica: int
    left_at: datetime
    back_at: datetime
    #: The nodes that it had had until then.
    nodes: frozenset[str]

    def meets(self, pause: Interruption, slack: timedelta = timedelta(0)) -> bool:
        begun = pause.started_at < self.back_at + slack
        return begun and self.left_at - slack < pause.committed_at


@dataclass(frozen=True)
class Loss:
    """GPU-seconds that the loss of replicas cost their job, in two parts that do not overlap."""

    #: The lost replicas' own GPUs, for as long as each was away.
    away: float
    #: The survivors' GPUs, for as long as they stood still.
    stood_still: float

    @property
    def total(self) -> float:
        return round(self.away + self.stood_still, 1)


@dataclass(frozen=True)
class _Stay:
    """A process in a replica's place, until another trained there, within the time that is looked
    at."""

    placement: Placement
    begin: datetime
    end: datetime


def pauses_of(job: Job, since: datetime, until: datetime) -> list[Interruption]:
    """When its survivors stood still within this time."""
    return list(job.interruptions.filter(committed_at__gte=since, started_at__lt=until))


def absences_of(
    job: Job, replica: int, since: datetime, until: datetime, pauses: Sequence[Interruption]
) -> list[Absence]:
    """When a replica that was lost was away within this time, in order: what is back may be lost
    again. Once its job has ended nobody misses it. `pauses`: see `pauses_of`.

    It is away from when its peers lost it or its process ended: on a node whose fault is known it
    may train on. It is back with its first commit, wherever that is.
    """
    until = min(until, job.ended_at or until)
    stays = _training_intervals(job, replica, since, until)
    lost = [max(since, pause.started_at) for pause in pauses if replica in pause.lost]
    left = [at for stay in stays for at in _left(job, replica, stay, lost)]
    back = [stay.begin for stay in stays]
    back += [pause.committed_at for pause in pauses if replica in pause.joined]
    found: list[Absence] = []
    trains = any(stay.begin == since for stay in stays)
    away_at = min(left, default=None) if trains else since
    while away_at is not None and away_at < until:
        back_at = min((at for at in back if away_at < at <= until), default=until)
        nodes = {stay.placement.node_id for stay in stays if stay.begin <= away_at < stay.end}
        found.append(Absence(replica, away_at, back_at, frozenset(nodes)))
        away_at = min((at for at in left if at >= back_at), default=None)
    return found


def loss_of(job: Job, absences: Sequence[Absence]) -> Loss:
    """What these absences of replicas cost their job.

    Survivors stand still once when one is lost and once when it is let in again: each gap between
    commits less one healthy step. A gap for several replicas at once is shared among them, as they
    may be of several incidents. Survivors are slower meanwhile because they cover the shards of
    what is away; that work is useful, so it is not counted as lost.
    """
    if not absences:
        return Loss(0.0, 0.0)
    away = sum((one.back_at - one.left_at).total_seconds() for one in absences)
    begin = min(one.left_at for one in absences)
    end = max(one.back_at for one in absences)
    step_s = median_step_s(job, begin)
    pauses = job.interruptions.filter(
        committed_at__gte=begin - CLOCKS, started_at__lte=end + CLOCKS
    )
    stood_still = sum(
        max(0.0, pause.gap_s - step_s)
        * job.gpus_per_replica
        * _share_of(absences, pause)
        * _who_stood_still(absences, pause)
        for pause in pauses
    )
    return Loss(round(away * job.gpus_per_replica, 1), round(stood_still, 1))


def _training_intervals(job: Job, replica: int, since: datetime, until: datetime) -> list[_Stay]:
    """The processes that trained in a replica's place within this time, on each of its nodes."""
    placements = Placement.objects.filter(
        replica__job=job, replica__index=replica, standby=False, joined_at__lt=until
    )
    stays: list[_Stay] = []
    ends: dict[int, datetime] = {}
    for placement in placements.order_by("-joined_at"):
        joined_at = placement.joined_at or until
        end = ends.get(placement.node_rank, until)
        if end > since:
            stays.append(_Stay(placement, max(since, joined_at), end))
        ends[placement.node_rank] = joined_at
    return stays


def _left(job: Job, replica: int, stay: _Stay, lost: Collection[datetime]) -> list[datetime]:
    """When a process ceased to train: as its peers (`lost`) and its agent saw it.

    What nobody saw, as the only replica on a node that fell silent, is away since its last commit.
    """
    placement = stay.placement
    seen = [at for at in lost if stay.begin <= at < stay.end]
    exits = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=placement.pk)
    exited_at = exits.aggregate(at=Min("observed_at"))["at"]
    if exited_at is not None and exited_at < stay.end:
        seen.append(max(stay.begin, exited_at))
    if seen:
        return seen
    ended_at = placement.ended_at
    commits = ProgressSample.objects.filter(
        job=job,
        replicas__contains=replica,
        at__gt=stay.begin,
        at__lte=min(ended_at or stay.end, stay.end),
    )
    last = commits.order_by("-at").values_list("at", flat=True).first()
    if ended_at is not None:  # else it made way for another
        return [last or stay.begin] if ended_at < stay.end else []
    was_there = placement.joined_at is not None and placement.joined_at < stay.begin
    return [stay.begin] if was_there and last is None else []


def _share_of(absences: Sequence[Absence], pause: Interruption) -> float:
    """How much of a pause is for these: which of the replicas that it lost or let in are theirs."""
    named = {*pause.lost, *pause.joined}
    ours = {one.replica for one in absences if one.meets(pause, CLOCKS)}
    return len(named & ours) / len(named) if named else 0.0


def _who_stood_still(absences: Sequence[Absence], pause: Interruption) -> int:
    """How many of those that went on after a pause had not been away in it."""
    away = {one.replica for one in absences if one.meets(pause)}
    return len(set(pause.replicas) - away)


def median_step_s(job: Job, before: datetime, samples: int = 60) -> float:
    """Median time between commits, in seconds, over the newest samples told before a moment."""
    times = list(
        ProgressSample.objects.filter(job=job, at__lt=before)
        .order_by("-at")
        .values_list("step_s", flat=True)[:samples]
    )
    return median(times) if times else 0.0
