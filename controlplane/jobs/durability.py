"""What of a job's training is saved in each tier, what is late, and what ranks tell of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median

from django.db.models import (
    Case,
    CharField,
    DateTimeField,
    DurationField,
    ExpressionWrapper,
    F,
    QuerySet,
    Value,
    When,
    Window,
)
from django.db.models.functions import RowNumber
from django.utils import timezone

from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.jobs.choices import OF_ALL_NODES, JobState, PlacementState, Tier
from controlplane.jobs.models import Checkpoint, Job, Placement
from controlplane.jobs.selectors import CLOCKS_DIFFER, LATE_TIMES, SAME_MOMENT

#: So many checkpoints of each tier are looked at.
LAST = 8
#: What ranks tell of a tier in which nothing has come whole for long, or ever.
NEVER_WHOLE = ("checkpoint_not_whole", "checkpoint_late")
#: With the first of these a rank tells that the second is over.
OVER = {
    "checkpoint_apart": "checkpoint_not_apart",
    "checkpoint_recovered": "checkpoint_failed",
    "loss_finite_again": "loss_not_finite",
    "stall_over": "stalled",
    "straggler_recovered": "straggler",
}
#: What is over once a checkpoint comes whole: of the tier that it is told of, or of any.
UNTIL_SAVED = ("checkpoint_late", "no_room_for_checkpoints")
#: So many of the newest reports of a job's ranks are looked at.
TROUBLES = 200


def saved_since(checkpoints: QuerySet[Checkpoint], since: datetime) -> QuerySet[Checkpoint]:
    """Those whose state was taken since then, and not only finished: what was trained before it is
    in them. As exactly as the clocks of ranks are believed."""
    second = Value(timedelta(seconds=1), output_field=DurationField())
    took = ExpressionWrapper(F("seconds") * second, output_field=DurationField())
    began = ExpressionWrapper(F("at") - took, output_field=DateTimeField())
    return checkpoints.alias(began=began).filter(at__gte=since, began__gte=since - CLOCKS_DIFFER)


def last_checkpoints(job: Job) -> list[Checkpoint]:
    """The newest few of each tier, newest first."""
    place = Window(RowNumber(), partition_by=[F("tier")], order_by=F("at").desc())
    return list(
        job.checkpoints.annotate(place=place).filter(place__lte=LAST).order_by("-at", "-step")
    )


@dataclass(frozen=True)
class TierHealth:
    """What is in one tier, and whether more of it was to be expected by now."""

    tier: Tier
    newest: Checkpoint | None
    usual_s: float | None  # between two saves, as told or as seen; None if that is not known
    late_after_s: float | None  # its newest is late once it is so old; None if nobody waits for one
    late: bool  # by now
    failing: tuple[int, ...] = ()  # the replicas whose saves to it fail
    why: str = ""  # one of them said
    not_taken: str = ""  # why, if the job went back since and could not use the newest
    near: str = ""  # why, if what peers keep may be lost with the node that saved it


def troubles_of(job: Job) -> list[Signal]:
    """What the job's ranks told an engineer lately, newest first."""
    told = Signal.objects.filter(job_id=job.pk, kind=SignalKind.JOB_TROUBLE)
    return list(told.order_by("-observed_at", "-recorded_at")[:TROUBLES])


@dataclass(frozen=True)
class RankReport:
    """What one or several replicas reported alike, however often."""

    newest: Signal
    replicas: list[int]


def group_reports(
    job: Job, troubles: list[Signal], checkpoints: list[Checkpoint]
) -> list[RankReport]:
    """Group equal reports of several replicas, or repeats of one, into an entry each, newest first.

    So a report that many make of one shared folder hides none that was made once and still holds.
    Left out is what the replica reported as over, and what a later checkpoint shows to be over.
    """
    alike: dict[tuple[str, str, str], list[Signal]] = {}
    over: set[tuple[str, str, int]] = set()
    for one in troubles:
        kind, subject, replica = one.data["kind"], one.data.get("subject", ""), one.replica or 0
        if (kind, subject, replica) in over or _saved_after_all(job, one, checkpoints):
            continue
        if kind in OVER:
            over.add((OVER[kind], subject, replica))
        # Exceptions are told with no subject, and are not all one.
        alike.setdefault((kind, subject, "" if subject else one.data["text"]), []).append(one)
    return [
        RankReport(group[0], sorted({s.replica or 0 for s in group})) for group in alike.values()
    ]


def _saved_after_all(job: Job, trouble: Signal, checkpoints: list[Checkpoint]) -> bool:
    """Whether it held up checkpoints, and one came whole since that shows that it does no more:
    what other replicas save for themselves shows nothing."""
    tier = trouble.data.get("subject", "")
    if trouble.data["kind"] not in UNTIL_SAVED:
        return False
    if job.world_replicas > 1 and tier not in OF_ALL_NODES:
        return False
    since = [one for one in checkpoints if one.at > trouble.observed_at]
    return any(tier in ("", one.tier) for one in since)


def failing_tiers(job: Job, checkpoints: list[Checkpoint]) -> dict[str, dict[int, str]]:
    """By tier and replica, why its saves fail: of the processes that run now, each rank by itself.
    It tells that once, however long it lasts and whatever else is told meanwhile. `checkpoints`:
    newest first."""
    newest = {one.tier: one for one in reversed(checkpoints)}
    found: dict[str, dict[int, str]] = {}
    for signal in _last_told_of_tiers([job]):
        tier = signal.data["subject"]
        one = newest.get(tier)
        if _still_fails(signal, one) or _hangs(signal, job, one):
            found.setdefault(tier, {})[signal.replica or 0] = signal.data["text"]
    return found


def failing_tiers_of(jobs: Collection[Job]) -> dict[str, list[Tier]]:
    """By job, the tiers that take not all checkpoints, as processes say that run now: saves to them
    fail, or were late and hang for long. In two queries at most, however many jobs."""
    by_id = {job.pk: job for job in jobs}
    told = _last_told_of_tiers(jobs)
    saved = Checkpoint.objects.filter(
        job__in={one.job_id for one in told}, tier__in={one.data["subject"] for one in told}
    )
    whose = ("job_id", "tier")
    last = saved.order_by(*whose, "-at").distinct(*whose)
    newest = {(one.job_id, one.tier): one for one in last}
    found: dict[str, set[str]] = {}
    for signal in told:
        tier = signal.data["subject"]
        one = newest.get((signal.job_id, tier))
        if _still_fails(signal, one) or _hangs(signal, by_id[signal.job_id], one):
            found.setdefault(signal.job_id, set()).add(tier)
    return {job_id: [tier for tier in Tier if tier in tiers] for job_id, tiers in found.items()}


def _last_told_of_tiers(jobs: Collection[Job]) -> list[Signal]:
    """What ranks last told of each tier that gave them trouble and is not known to be well again,
    oldest first."""
    told = _told_by_present(jobs).filter(
        data__kind__in=("checkpoint_failed", "checkpoint_recovered", *NEVER_WHOLE),
        data__subject__in=Tier.values,
    )
    # What is told of one of these says nothing of the others.
    kinds = [When(data__kind=kind, then=Value(kind)) for kind in NEVER_WHOLE]
    told = told.annotate(about=Case(*kinds, default=Value(""), output_field=CharField()))
    whom = ("placement_id", "data__rank", "data__subject", "about")
    # By when we heard of it: in the order in which it was told, also where a clock was put back.
    last = told.order_by(*whom, "-recorded_at", "-observed_at").distinct(*whom)
    failed = [one for one in last if one.data["kind"] != "checkpoint_recovered"]
    return sorted(failed, key=lambda one: one.observed_at)


def _told_by_present(jobs: Collection[Job]) -> QuerySet[Signal]:
    """What processes that run now told an engineer."""
    job_ids = [job.pk for job in jobs]
    there = Placement.objects.filter(replica__job__in=job_ids).exclude(state=PlacementState.ENDED)
    return Signal.objects.filter(
        job_id__in=job_ids, kind=SignalKind.JOB_TROUBLE, placement_id__in=there.values("pk")
    )


def _still_fails(told: Signal, newest: Checkpoint | None) -> bool:
    """`newest`: what came whole last in the tier that it was told of.

    To the object store one replica writes for all: what came whole later, whoever wrote it, shows
    that it is well. So it does where a rank's own part is well and others' never came
    (`checkpoint_not_whole`); and where a store hangs, which is late, there is none yet.
    """
    kind = told.data["kind"]
    by_all = told.data["subject"] == Tier.OBJECT or kind in NEVER_WHOLE
    if newest is None:
        return True
    return kind != "checkpoint_late" and not (by_all and newest.at >= told.observed_at)


def _hangs(told: Signal, job: Job, newest: Checkpoint | None) -> bool:
    """Whether that tier, which was well before, was late by this word and is now by its age."""
    if newest is None or told.data["kind"] != "checkpoint_late":
        return False
    late_s = _late_after_s(job, newest.every_s)
    return late_s is not None and timezone.now() - newest.at > timedelta(seconds=late_s)


def kept_near(job: Job) -> str:
    """Why what is saved to peers' memory may be lost with the node that saved it, as a process that
    runs now has told and not taken back; "" if none has."""
    told = _told_by_present([job]).filter(
        data__kind__in=("checkpoint_not_apart", "checkpoint_apart")
    )
    whom = ("placement_id", "data__rank")
    last = told.order_by(*whom, "-recorded_at", "-observed_at").distinct(*whom)
    near = [one for one in last if one.data["kind"] == "checkpoint_not_apart"]
    return str(near[-1].data["text"]) if near else ""


def tiers_not_taken(job: Job, checkpoints: list[Checkpoint]) -> dict[str, str]:
    """By tier, why what it holds was damaged or gone when the job went back to its checkpoints, if
    nothing was saved there since. `checkpoints`: newest first."""
    newest = {one.tier: one.at for one in reversed(checkpoints)}
    if not newest:
        return {}
    told = Signal.objects.filter(
        job_id=job.pk,
        kind=SignalKind.JOB_TROUBLE,
        observed_at__gte=min(newest.values()),
        data__kind__in=("checkpoint_refused", "checkpoints_out_of_reach"),
    )
    by_tier = ("data__subject", "-observed_at", "-recorded_at")
    newest_told = told.order_by(*by_tier).distinct("data__subject")
    last = {one.data.get("subject"): one for one in newest_told}
    return {
        tier: last[tier].data["text"]
        for tier, at in newest.items()
        if tier in last and last[tier].observed_at >= at
    }


def tiers_of(job: Job, checkpoints: list[Checkpoint]) -> list[TierHealth]:
    """One entry for each tier that holds any of a job's last checkpoints, or should, in the order
    in which they are loaded from."""
    found = []
    failing, not_taken = failing_tiers(job, checkpoints), tiers_not_taken(job, checkpoints)
    for tier in Tier.values:
        last = [one for one in checkpoints if one.tier == tier]
        why = failing.get(tier, {})
        if not last and not why:
            continue
        gaps = [(a.at - b.at).total_seconds() for a, b in pairwise(last)]
        newest = next(iter(last), None)
        usual_s = (newest and newest.every_s) or (median(gaps) if gaps else None)
        age_s = (timezone.now() - newest.at).total_seconds() if newest else 0.0
        late_s = _late_after_s(job, usual_s)
        late = late_s is not None and age_s > late_s
        text = next(iter(why.values()), "")
        replicas, gone = tuple(sorted(why)), not_taken.get(tier, "")
        near = kept_near(job) if tier == Tier.PEER else ""
        found.append(
            TierHealth(Tier(tier), newest, usual_s, late_s, late, replicas, text, gone, near)
        )
    return found


def _late_after_s(job: Job, usual_s: float | None) -> float | None:
    """See `TierHealth`."""
    if job.state != JobState.RUNNING or usual_s is None:
        return None
    return LATE_TIMES * usual_s + SAME_MOMENT.seconds
