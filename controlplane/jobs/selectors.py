"""What a caller may see of jobs: where they run, how far they got, what interrupted them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import connection
from django.db.models import (
    BigIntegerField,
    Case,
    CharField,
    Count,
    DateTimeField,
    DurationField,
    Exists,
    ExpressionWrapper,
    F,
    Func,
    Max,
    Min,
    OuterRef,
    Prefetch,
    Q,
    QuerySet,
    Subquery,
    Sum,
    Value,
    When,
    Window,
)
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast, Coalesce, RowNumber
from django.http import Http404
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.errors import Conflict
from controlplane.fleet.choices import CommandState, NodeState
from controlplane.fleet.models import Command, Gpu, MaintenanceWindow, Node
from controlplane.fleet.selectors import clusters_for
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.jobs.choices import JOB_UNFINISHED, JobState, PlacementState, ReplicaState, Tier
from controlplane.jobs.models import (
    IN_ITS_PLACE,
    SENT_AWAY,
    Checkpoint,
    Interruption,
    Job,
    LedgerRange,
    NodeExclusion,
    Placement,
    ProgressSample,
    Replica,
    SpareReservation,
)

#: At most this many points of a curve are sent to a browser.
MAX_POINTS = 1000
#: How far an incident's fault may lie from the interruption it explains.
NEAR = timedelta(seconds=120)
#: So far a rank's clock may be behind ours, or its word on its way, before it is not believed.
CLOCKS_DIFFER = timedelta(seconds=15)
#: How far apart two processes may tell of one and the same moment.
AT_ONCE = timedelta(seconds=10)


def jobs_for(user: User | AnonymousUser) -> QuerySet[Job]:
    """Jobs the caller may see, each with `active_replicas`."""
    return (
        Job.objects.filter(cluster__in=clusters_for(user))
        .select_related("cluster")
        .annotate(active_replicas=Count("replicas", filter=Q(replicas__state=ReplicaState.ACTIVE)))
    )


def unfinished_jobs_for(user: User | AnonymousUser) -> QuerySet[Job]:
    return jobs_for(user).filter(state__in=JOB_UNFINISHED).order_by("name")


def job_for(user: User | AnonymousUser, job_id: str) -> Job:
    """With `newest_step_s`, how long its newest steps took. Raises Http404 if there is none, or
    none the caller may see."""
    newest = ProgressSample.objects.filter(job=OuterRef("pk")).order_by("-at")
    found = jobs_for(user).annotate(newest_step_s=Subquery(newest.values("step_s")[:1]))
    job = found.filter(pk=job_id).first()
    if job is None:
        raise Http404("no such job")
    return job


# --- Which nodes may take work --------------------------------------------------------------------


def placeable_nodes(cluster_id: str, job_id: str | None = None) -> QuerySet[Node]:
    """The nodes of a cluster that may take work at this moment, spares among them; see `placeable`.

    With `job_id` none of those that the job is kept from.
    """
    nodes = Node.objects.filter(placeable(job_id), cluster_id=cluster_id)
    return nodes.exclude(exclusions__job_id=job_id) if job_id is not None else nodes


def placeable(job_id: str | None = None) -> Q:
    """Of a node: that it may take work at this moment.

    Available, heard within a lease, trusted, not on hold, not drained by anybody, in no maintenance
    window; not reserved, unless for this job.
    """
    heard_since = timezone.now() - timedelta(seconds=settings.LEASE_S)
    reserved = present_reservations()
    if job_id is not None:
        reserved = reserved.exclude(job_id=job_id)
    heard = Q(lease__reachable=True, lease__last_beat_at__gte=heard_since)
    return (
        Q(heard, state=NodeState.AVAILABLE) & _kept_by_nobody() & ~Q(pk__in=reserved.values("node"))
    )


def may_return(node: Node, job: Job) -> bool:
    """Whether nobody keeps this job, or all work, from a node that it is on: what it has there may
    be started anew there."""
    kept = node.exclusions.filter(job=job).exists()
    return not kept and Node.objects.filter(_kept_by_nobody(), pk=node.pk).exists()


def _kept_by_nobody() -> Q:
    """Of a node: trusted, not on hold, not drained by anybody, in no maintenance window."""
    now = timezone.now()
    windows = MaintenanceWindow.objects.filter(starts_at__lte=now, ends_at__gt=now, closed_at=None)
    return (
        Q(key_revoked_at=None, hold_reason="", drained_by="")
        & ~Q(cluster__in=windows.filter(rack=None, node=None).values("cluster"))
        & ~Q(rack__in=windows.filter(rack__isnull=False).values("rack"))
        & ~Q(pk__in=windows.filter(node__isnull=False).values("node"))
    )


def may_be_spare(node: Node) -> bool:
    """Whether the node is free and in service: what no job has yet, and what will be heard."""
    return node.state == NodeState.AVAILABLE and node.key_revoked_at is None


def present_reservations() -> QuerySet[SpareReservation]:
    """Reservations that hold a spare at this moment."""
    return SpareReservation.objects.filter(released_at=None, expires_at__gt=timezone.now())


def nodes_with(gpu_model: str) -> QuerySet[Gpu, Any]:
    """The ids of the nodes that have cards of this model."""
    return Gpu.objects.filter(model=gpu_model, node__isnull=False).values("node_id")


# --- The job's page -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seat:
    """A replica, or one of the places of a replica on several nodes: where it sits now, where it
    moves to, and where it sat before (newest first)."""

    replica: Replica
    node_rank: int
    now: Placement | None
    moving: Placement | None
    before: list[Placement]


class IncidentLike(Protocol):
    """What is needed of an incident here: the incidents' app comes after this one."""

    id: str
    replica: int | None
    occurred_at: datetime
    restored_at: datetime | None


@dataclass(frozen=True)
class Mark:
    """An interruption, the incident that tells its story where one is near enough, and the
    replicas that it let train on another node, as the placements that they have there."""

    interruption: Interruption
    incident: IncidentLike | None
    moved: list[Placement]

    @property
    def joined(self) -> list[int]:
        """The replicas that came without having trained elsewhere until then."""
        moved = [placement.replica.index for placement in self.moved]
        return [index for index in self.interruption.joined if index not in moved]


@dataclass(frozen=True)
class SampleLedger:
    """What the sample ledger says so far."""

    step_from: int | None
    step_to: int | None
    samples: int
    lost: int
    duplicated: int
    dropped: int

    @property
    def whole(self) -> bool:
        return self.lost == self.duplicated == self.dropped == 0


def seats(job: Job) -> list[Seat]:
    """The job's shape: every replica with its stays on nodes."""
    stays: dict[tuple[str, int], list[Placement]] = {}
    placements = Placement.objects.filter(replica__job=job).select_related("node")
    for placement in placements.filter(IN_ITS_PLACE).order_by("-created_at"):
        stays.setdefault((placement.replica_id, placement.node_rank), []).append(placement)
    return [
        _seat(replica, node_rank, stays.get((replica.id, node_rank), []))
        for replica in job.replicas.all()
        for node_rank in range(job.nodes_per_replica)
    ]


def _seat(replica: Replica, node_rank: int, stays: list[Placement]) -> Seat:
    alive = [stay for stay in stays if stay.state != PlacementState.ENDED]
    ended = [stay for stay in stays if stay.state == PlacementState.ENDED]
    now = next((stay for stay in alive if not stay.standby), None)
    moving = next((stay for stay in alive if stay.standby), None)
    return Seat(replica, node_rank, now, moving, ended[:20])


def ordered_to_end(processes: Collection[Placement]) -> bool:
    """Whether we told one of these to end before it left, and it may have heard."""
    of_any = Q()
    for one in processes:
        until = one.ended_at or timezone.now()
        # By its node: an index leads to that.
        whom = Q(node=one.node_id, payload__contains=f'"{one.pk}"')
        of_any |= whom & Q(created_at__lt=until)
    unheard = Q(state=CommandState.REFUSED) | Q(state=CommandState.EXPIRED, delivered_at=None)
    orders = Command.objects.filter(of_any, verb="stop_process").exclude(unheard)
    return bool(processes) and orders.exists()


def left_together(placement: Placement) -> list[Placement]:
    """Those of a replica on several nodes leave together, whichever of them was told."""
    if placement.ended_at is None:
        return [placement]
    at_once = (placement.ended_at - AT_ONCE, placement.ended_at + AT_ONCE)
    same = placement.replica.placements.filter(
        end_reason=placement.end_reason, ended_at__range=at_once
    )
    return list(same.select_related("node__lease"))


def was_sent_away(placement: Placement) -> bool:
    """Whether it left between two steps, for a SIGTERM that we had not sent told it to end."""
    return placement.end_reason == SENT_AWAY and not ordered_to_end(left_together(placement))


def marks(job: Job, *, limit: int = 100) -> list[Mark]:
    """The newest interruptions of a job, newest first."""
    interruptions = list(job.interruptions.order_by("-epoch")[:limit])
    if not interruptions:
        return []
    since = interruptions[-1].started_at - NEAR
    incidents = list(
        job.incidents.filter(Q(occurred_at__gte=since) | Q(restored_at__gte=since)).order_by("id")
    )
    moves = list(
        Placement.objects.filter(
            replica__job=job, standby=False, moved_from__isnull=False, joined_at__gte=since
        ).select_related("replica", "node", "moved_from__node")
    )
    moved = [_moved(one, moves) for one in interruptions]
    return [
        Mark(one, _explaining(one, incidents, moving), moving)
        for one, moving in zip(interruptions, moved, strict=True)
    ]


def _moved(one: Interruption, moves: list[Placement]) -> list[Placement]:
    """Whose process began to train in another's place there. A joining may be told by the process
    itself a moment before or after those who saw it."""
    joined = [m for m in moves if m.replica.index in set(one.joined) - set(one.lost)]
    return [m for m in joined if m.joined_at and abs(m.joined_at - one.committed_at) <= AT_ONCE]


def _explaining(
    one: Interruption, incidents: list[Any], moved: list[Placement]
) -> IncidentLike | None:
    """The incident nearest in time among those about a replica that left or came back here.

    A replica that moved came back from nothing, unless its incident ended with that very moment.
    """
    elsewhere = [placement.replica.index for placement in moved]
    distances: list[tuple[timedelta, int, IncidentLike]] = []
    for number, incident in enumerate(incidents):
        of_job = incident.subject == f"job/{incident.job_id}"  # about all that went together
        ours = [*one.lost, *one.joined] if of_job else [incident.replica]
        if set(ours) & set(one.lost):
            distances.append((abs(incident.occurred_at - one.started_at), number, incident))
        if set(ours) & set(one.joined) and incident.restored_at:
            distance = abs(incident.restored_at - one.committed_at)
            if not set(ours) & set(elsewhere) or distance <= AT_ONCE:
                distances.append((distance, number, incident))
    near = [distance for distance in distances if distance[0] <= NEAR]
    return min(near)[2] if near else None


def demand_ranks(job: Job) -> None:
    """Raises Conflict unless ranks of the job train and hear what it is told: of one that only its
    scheduler tells of, nobody does."""
    if job.state != JobState.RUNNING:
        raise Conflict(f"{job.name} is {job.get_state_display().lower()}: nobody is there to obey")
    placed = Placement.objects.filter(replica__job=job).exclude(state=PlacementState.ENDED)
    if not placed.exists() and not job.progress.exists():
        raise Conflict(
            f"no rank of {job.name} has told of a step: nobody is there to obey. Give its ranks "
            "DRYDOCK_URL and DRYDOCK_TOKEN (manage.py jobtoken), with which they tell and hear"
        )


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


#: A running job whose next checkpoint or commit takes so many times as long as usual is late with
#: it.
LATE_TIMES = 3.0
#: However short its steps are, a commit is not late before so many seconds.
COMMIT_MAY_TAKE_S = 30.0
#: So many checkpoints of each tier are looked at.
LAST = 8
#: What ranks tell of a tier in which nothing has come whole for long, or ever.
NEVER_WHOLE = ("checkpoint_not_whole", "checkpoint_late")
#: With the first of these a rank tells that the second is over.
OVER = {
    "checkpoint_recovered": "checkpoint_failed",
    "loss_finite_again": "loss_not_finite",
    "stall_over": "stalled",
    "straggler_recovered": "straggler",
}
#: What is over once a checkpoint comes whole: of the tier that it is told of, or of any.
UNTIL_SAVED = ("checkpoint_late", "no_room_for_checkpoints")
#: To these all replicas save together; to the others each for itself.
OF_ALL_REPLICAS = (Tier.SHARED, Tier.OBJECT)
#: And so much of what ranks told.
TROUBLES = 200


def troubles_of(job: Job) -> list[Signal]:
    """What the job's ranks told an engineer lately, newest first."""
    told = Signal.objects.filter(job_id=job.pk, kind=SignalKind.JOB_TROUBLE)
    return list(told.order_by("-observed_at", "-recorded_at")[:TROUBLES])


@dataclass(frozen=True)
class Told:
    """What one or several replicas told alike, how often ever."""

    newest: Signal
    replicas: list[int]


def told_alike(job: Job, troubles: list[Signal], checkpoints: list[Checkpoint]) -> list[Told]:
    """The same, newest first, with one entry for what many say, as of a shared folder, or one says
    again and again: it hides nothing that was told once and still holds. What a replica has said to
    be over is left out, and so is what a later one of the job's last checkpoints shows to be."""
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
    return [Told(group[0], sorted({s.replica or 0 for s in group})) for group in alike.values()]


def _saved_after_all(job: Job, trouble: Signal, checkpoints: list[Checkpoint]) -> bool:
    """Whether it held up checkpoints, and one came whole since that shows that it does no more:
    what other replicas save for themselves shows nothing."""
    tier = trouble.data.get("subject", "")
    if trouble.data["kind"] not in UNTIL_SAVED:
        return False
    if job.world_replicas > 1 and tier not in OF_ALL_REPLICAS:
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
    runs now has told; "" if none has. Who joins later may keep it elsewhere, which nobody tells."""
    joined = job.interruptions.exclude(joined=[]).filter(started_at__gt=OuterRef("observed_at"))
    told = _told_by_present([job]).filter(~Exists(joined), data__kind="checkpoint_not_apart")
    last = told.order_by("-observed_at").first()
    return str(last.data["text"]) if last else ""


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
    return LATE_TIMES * usual_s + AT_ONCE.seconds


def commit_late_after_s(job: Job) -> float:
    """How old the last commit of a running job is once the next is late. See `job_for`."""
    step_s: float = job.newest_step_s or 0.0  # type: ignore[attr-defined]
    return max(COMMIT_MAY_TAKE_S, LATE_TIMES * step_s + AT_ONCE.seconds)


def sample_ledger(job: Job) -> SampleLedger:
    sums = LedgerRange.objects.filter(job=job).aggregate(
        first=Min("step_from"),
        last=Max("step_to"),
        samples=Sum("samples"),
        lost=Sum(_length("lost") + _added_up(0)),
        duplicated=Sum(_length("duplicated") + _added_up(1)),
        # These shards were dropped in each step of the range.
        dropped=Sum(
            _length("dropped") * (F("step_to") - F("step_from") + 1) + _added_up(2),
            output_field=BigIntegerField(),
        ),
    )
    return SampleLedger(
        sums["first"],
        sums["last"],
        sums["samples"] or 0,
        sums["lost"] or 0,
        sums["duplicated"] or 0,
        sums["dropped"] or 0,
    )


def _length(field: str) -> Func:
    return Func(F(field), function="jsonb_array_length", output_field=BigIntegerField())


def _added_up(place: int) -> Coalesce:
    """What a range says of many steps together; 0 for one that tells them singly."""
    told = Cast(KeyTextTransform(place, "merged"), BigIntegerField())
    return Coalesce(told, 0, output_field=BigIntegerField())


def ledger_of(job: Job) -> QuerySet[LedgerRange]:
    return LedgerRange.objects.filter(job=job)


# --- The curves -----------------------------------------------------------------------------------


def series(job: Job, *, after: float | None, window_s: float | None) -> dict[str, Any] | None:
    """Loss and throughput over time as columns, at most `MAX_POINTS` long; None: nothing new.

    Whole, `window_s` seconds back from the newest point, or only what came `after` a point's time:
    steps come again where a job went back to a checkpoint.
    """
    points = _points(job, after, window_s)
    if not points and after is not None:
        return None
    return {
        "step": [point[0] for point in points],
        "at": [_rounded(point[1], 3) for point in points],
        "loss": [_rounded(point[2], 6) for point in points],
        "throughput": [_rounded(point[3], 2) for point in points],
        "gap_s": [_rounded(point[4], 4) for point in points],
        "marks": _chart_marks(job, 5 if after is not None else 100),
        "checkpoints": _chart_checkpoints(job, 5 if after is not None else 200),
        "now": timezone.now().timestamp(),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


# Progress grouped into equal stretches of time: `annotate(bucket=...).values("bucket").annotate()`,
# with the width of a stretch taken from the very rows that are grouped.
_POINTS_SQL = """
WITH rows AS (
    SELECT *, extract(epoch FROM at)::float8 AS t FROM jobs_progresssample
    WHERE job_id = %(job)s AND at > to_timestamp(%(after)s)
      AND at >= (SELECT max(at) FROM jobs_progresssample WHERE job_id = %(job)s)
                - make_interval(secs => %(window)s)
), span AS (
    SELECT min(t) AS start, greatest((max(t) - min(t)) / %(buckets)s, 0.001) AS width FROM rows
)
SELECT max(step), max(t),
       sum(loss * steps) / nullif(sum(steps) FILTER (WHERE loss IS NOT NULL), 0),
       sum(samples) / nullif(sum(step_s * steps), 0),
       max(max_gap_s)
FROM rows, span
GROUP BY floor((t - start) / width)
ORDER BY max(t) -- a job that went back to a checkpoint makes its steps again
"""
_EVER_S = 10 * 365 * 86400.0
AS_TOLD_S = 0.0005  # by so much the time of a point may be rounded


def _points(job: Job, after: float | None, window_s: float | None) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(
            _POINTS_SQL,
            {
                "job": job.id,
                "after": 0.0 if after is None else after + AS_TOLD_S,
                "window": window_s or _EVER_S,
                "buckets": MAX_POINTS - 1,
            },
        )
        return list(cursor.fetchall())


def _chart_marks(job: Job, limit: int) -> list[dict[str, Any]]:
    return [
        {
            "epoch": mark.interruption.epoch,
            "at": mark.interruption.committed_at.timestamp(),
            "lost": mark.interruption.lost,
            "joined": mark.interruption.joined,
            "moved": [placement.replica.index for placement in mark.moved],
            "gap_s": mark.interruption.gap_s,
            "incident": mark.incident.id if mark.incident else None,
        }
        for mark in reversed(marks(job, limit=limit))
    ]


def _chart_checkpoints(job: Job, limit: int) -> list[dict[str, Any]]:
    newest = job.checkpoints.order_by("-at")[:limit]
    return [{"step": one.step, "at": one.at.timestamp(), "tier": one.tier} for one in newest][::-1]


# --- Lists of the API -----------------------------------------------------------------------------


def replicas_for(user: User | AnonymousUser) -> QuerySet[Replica]:
    """Replicas the caller may see, each with its present stay on a node as `present`."""
    return (
        Replica.objects.filter(job__cluster__in=clusters_for(user))
        .select_related("job")
        .prefetch_related(_present_stays())
    )


def checkpoints_for(user: User | AnonymousUser) -> QuerySet[Checkpoint]:
    return Checkpoint.objects.filter(job__cluster__in=clusters_for(user)).select_related("job")


def exclusions_for(user: User | AnonymousUser) -> QuerySet[NodeExclusion]:
    found = NodeExclusion.objects.filter(job__cluster__in=clusters_for(user))
    return found.select_related("job", "node")


def reservations_for(user: User | AnonymousUser) -> QuerySet[SpareReservation]:
    found = SpareReservation.objects.filter(cluster__in=clusters_for(user))
    return found.select_related("node")


def seated(jobs: QuerySet[Job]) -> QuerySet[Job]:
    """The same jobs with `seated_replicas`, each with its present stay as `present`."""
    replicas = Replica.objects.select_related("job").prefetch_related(_present_stays())
    return jobs.prefetch_related(Prefetch("replicas", replicas, to_attr="seated_replicas"))


def _present_stays() -> Prefetch[Any, Any, Any]:
    alive = Placement.objects.filter(standby=False).exclude(state=PlacementState.ENDED)
    by_rank = alive.select_related("node").order_by("node_rank")
    return Prefetch("placements", by_rank, to_attr="present")
