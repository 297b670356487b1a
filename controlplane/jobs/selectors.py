"""What a caller may see of jobs: where they run, how far they got, what interrupted them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import connection
from django.db.models import (
    BigIntegerField,
    Count,
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
from controlplane.jobs.choices import JOB_UNFINISHED, JobState, PlacementState, ReplicaState
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
#: So many of the stays that have ended are told of each slot, of the interruptions, and of the
#: checkpoints on a chart: the newest.
STAYS_SHOWN = 20
MARKS_SHOWN = 100
CHECKPOINTS_SHOWN = 200
#: How far an incident's fault may lie from the interruption it explains.
INCIDENT_MATCH_WINDOW = timedelta(seconds=120)
#: So far a rank's clock may be behind ours, or its word on its way, before it is not believed.
CLOCKS_DIFFER = timedelta(seconds=15)
#: How far apart two processes may tell of one and the same moment.
SAME_MOMENT = timedelta(seconds=10)
#: A running job whose next checkpoint or commit takes so many times as long as usual is late with
#: it.
LATE_TIMES = 3.0
#: However short its steps are, a commit is not late before so many seconds.
COMMIT_MAY_TAKE_S = 30.0


def jobs_for(user: User | AnonymousUser) -> QuerySet[Job]:
    """Jobs the caller may see, each with `active_replicas`."""
    return (
        Job.objects.filter(cluster__in=clusters_for(user))
        .select_related("cluster")
        .annotate(active_replicas=Count("replicas", filter=Q(replicas__state=ReplicaState.ACTIVE)))
    )


def unfinished_jobs_for(user: User | AnonymousUser) -> QuerySet[Job]:
    """The jobs of the user's clusters that have not ended."""
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
class Slot:
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


def slots(job: Job) -> list[Slot]:
    """The job's shape: every replica with its stays on nodes."""
    stays: dict[tuple[str, int], list[Placement]] = {}
    # Of those that have not ended a place has two at most.
    newest = Window(
        RowNumber(), partition_by=["replica", "node_rank", "state"], order_by="-created_at"
    )
    placements = (
        Placement.objects.filter(IN_ITS_PLACE, replica__job=job)
        .annotate(newest=newest)
        .filter(newest__lte=STAYS_SHOWN)
        .select_related("node")
        .defer("node__report")
    )
    for placement in placements.order_by("-created_at"):
        stays.setdefault((placement.replica_id, placement.node_rank), []).append(placement)
    return [
        _slot(replica, node_rank, stays.get((replica.id, node_rank), []))
        for replica in job.replicas.all()
        for node_rank in range(job.nodes_per_replica)
    ]


def _slot(replica: Replica, node_rank: int, stays: list[Placement]) -> Slot:
    alive = [stay for stay in stays if stay.state != PlacementState.ENDED]
    ended = [stay for stay in stays if stay.state == PlacementState.ENDED]
    now = next((stay for stay in alive if not stay.standby), None)
    moving = next((stay for stay in alive if stay.standby), None)
    return Slot(replica, node_rank, now, moving, ended)


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
    at_once = (placement.ended_at - SAME_MOMENT, placement.ended_at + SAME_MOMENT)
    same = placement.replica.placements.filter(
        end_reason=placement.end_reason, ended_at__range=at_once
    )
    return list(same.select_related("node__lease"))


def was_sent_away(placement: Placement) -> bool:
    """Whether it left between two steps, for a SIGTERM that we had not sent told it to end."""
    return placement.end_reason == SENT_AWAY and not ordered_to_end(left_together(placement))


def marks(job: Job, *, since: datetime | None = None) -> list[Mark]:
    """The newest interruptions of a job, newest first; only those that ended `since` then."""
    found = job.interruptions.order_by("-epoch")
    if since is not None:
        found = found.filter(committed_at__gte=since)
    interruptions = list(found[:MARKS_SHOWN])
    if not interruptions:
        return []
    near = interruptions[-1].started_at - INCIDENT_MATCH_WINDOW
    incidents = list(
        job.incidents.filter(Q(occurred_at__gte=near) | Q(restored_at__gte=near)).order_by("id")
    )
    moves = list(
        Placement.objects.filter(
            replica__job=job, standby=False, moved_from__isnull=False, joined_at__gte=near
        )
        .select_related("replica", "node", "moved_from__node")
        .defer("node__report", "moved_from__node__report")
    )
    moved = _moved(interruptions, moves)
    return [Mark(one, _explaining(one, incidents, moved[one]), moved[one]) for one in interruptions]


def _moved(
    interruptions: list[Interruption], moves: list[Placement]
) -> dict[Interruption, list[Placement]]:
    """Whose process began to train in another's place there: each in the one nearest to it, for it
    may come back a moment later from a loss. A joining may be told by the process itself a moment
    before or after those who saw it."""
    found: dict[Interruption, list[Placement]] = {one: [] for one in interruptions}
    for move in moves:
        away = {
            abs(move.joined_at - one.committed_at): one
            for one in interruptions
            if move.joined_at and move.replica.index in set(one.joined) - set(one.lost)
        }
        if away and min(away) <= SAME_MOMENT:
            found[away[min(away)]].append(move)
    return found


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
            if not set(ours) & set(elsewhere) or distance <= SAME_MOMENT:
                distances.append((distance, number, incident))
    near = [distance for distance in distances if distance[0] <= INCIDENT_MATCH_WINDOW]
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


def commit_late_after_s(job: Job) -> float:
    """How old the last commit of a running job is once the next is late. See `job_for`."""
    step_s: float = job.newest_step_s or 0.0  # type: ignore[attr-defined]
    return max(COMMIT_MAY_TAKE_S, LATE_TIMES * step_s + SAME_MOMENT.seconds)


def sample_ledger(job: Job) -> SampleLedger:
    """What the job's ranks proved of its samples, summed over all steps that they reported."""
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
    """The ranges of steps that the job's ledger is kept in."""
    return LedgerRange.objects.filter(job=job)


# --- The curves -----------------------------------------------------------------------------------


def series(job: Job, *, after: float | None, window_s: float | None) -> dict[str, Any] | None:
    """Loss and throughput over time as columns, at most `MAX_POINTS` long; None: nothing new.

    Whole, `window_s` seconds back from the newest point, or only what came `after` a point's time:
    steps come again where a job went back to a checkpoint. Of the marks and checkpoints those
    shortly before that point come again: they may be told, and explained, after it.
    """
    points = _points(job, after, window_s)
    if not points and after is not None:
        return None
    since = None if after is None else datetime.fromtimestamp(after, UTC) - INCIDENT_MATCH_WINDOW
    return {
        "step": [point[0] for point in points],
        "at": [_rounded(point[1], 3) for point in points],
        "loss": [_rounded(point[2], 6) for point in points],
        "throughput": [_rounded(point[3], 2) for point in points],
        "gap_s": [_rounded(point[4], 4) for point in points],
        "marks": _chart_marks(job, since),
        "checkpoints": _chart_checkpoints(job, since),
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


def _chart_marks(job: Job, since: datetime | None) -> list[dict[str, Any]]:
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
        for mark in reversed(marks(job, since=since))
    ]


def _chart_checkpoints(job: Job, since: datetime | None) -> list[dict[str, Any]]:
    found = job.checkpoints.order_by("-at")
    if since is not None:
        found = found.filter(at__gte=since)
    newest = found[:CHECKPOINTS_SHOWN]
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
    """The checkpoints of all jobs in the user's clusters."""
    return Checkpoint.objects.filter(job__cluster__in=clusters_for(user)).select_related("job")


def exclusions_for(user: User | AnonymousUser) -> QuerySet[NodeExclusion]:
    """The nodes that jobs in the user's clusters must not use."""
    found = NodeExclusion.objects.filter(job__cluster__in=clusters_for(user))
    return found.select_related("job", "node")


def reservations_for(user: User | AnonymousUser) -> QuerySet[SpareReservation]:
    """The spare nodes that are reserved in the user's clusters."""
    found = SpareReservation.objects.filter(cluster__in=clusters_for(user))
    return found.select_related("node")


def with_placements(jobs: QuerySet[Job]) -> QuerySet[Job]:
    """The same jobs with `placed_replicas`, each with its present stay as `present`."""
    replicas = Replica.objects.select_related("job").prefetch_related(_present_stays())
    return jobs.prefetch_related(Prefetch("replicas", replicas, to_attr="placed_replicas"))


def _present_stays() -> Prefetch[Any, Any, Any]:
    alive = Placement.objects.filter(standby=False).exclude(state=PlacementState.ENDED)
    by_rank = alive.select_related("node").defer("node__report").order_by("node_rank")
    return Prefetch("placements", by_rank, to_attr="present")
