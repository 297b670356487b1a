"""What interruptions cost a job, in GPU-seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median

from controlplane.jobs.models import Interruption, Job, ProgressSample


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


def lost_at(job: Job, replica: int, since: datetime) -> datetime:
    """When the replica left, at or after a moment: one that is moved trains on until then."""
    left = Interruption.objects.filter(
        job=job, lost__contains=replica, committed_at__gte=since
    ).order_by("epoch")
    first = left.values_list("started_at", flat=True).first()
    return max(since, first) if first is not None else since


def loss_of(job: Job, absences: Mapping[int, tuple[datetime, datetime]]) -> Loss:
    """What the loss of replicas cost the job: `absences` says from when until when each was away.

    Survivors stand still once when one is lost and once when it is let in again: each gap between
    commits less one healthy step. They are slower meanwhile because they cover its shards; that
    work is useful, so it is not counted as lost.
    """
    if not absences:
        return Loss(0.0, 0.0)
    away = sum((back - lost).total_seconds() for lost, back in absences.values())
    begin = min(lost for lost, _back in absences.values())
    end = max(back for _lost, back in absences.values())
    step_s = median_step_s(job, begin)
    second = timedelta(seconds=1)
    pauses = Interruption.objects.filter(
        job=job, started_at__gte=begin - second, committed_at__lte=end + second
    )
    stood_still = sum(
        max(0.0, pause.gap_s - step_s)
        * job.gpus_per_replica
        * len([index for index in pause.replicas if index not in absences])
        for pause in pauses
    )
    return Loss(round(away * job.gpus_per_replica, 1), round(stood_still, 1))


def median_step_s(job: Job, before: datetime, samples: int = 60) -> float:
    """Median time between commits, in seconds, over the newest samples told before a moment."""
    times = list(
        ProgressSample.objects.filter(job=job, at__lt=before)
        .order_by("-at")
        .values_list("step_s", flat=True)[:samples]
    )
    return median(times) if times else 0.0
