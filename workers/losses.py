"""What is known of a replica that was lost: the rows' side of the pure rule in `triage.loss`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from controlplane.fleet.models import Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal, heard_since
from controlplane.jobs.choices import OF_ALL_NODES, PlacementState, Tier
from controlplane.jobs.durability import last_checkpoints
from controlplane.jobs.models import LEFT, Checkpoint, Interruption, Job, Placement, ProgressSample
from controlplane.jobs.selectors import was_sent_away
from workers import recovery, triage
from workers.signal_triage import HARDWARE_SPEAKS, verdict_of

#: Hardware evidence this long before the loss still explains it.
LOOK_BACK = timedelta(seconds=60)
#: An agent tells of a card that does not answer so often: it does so still if told since.
SILENT_STILL = timedelta(seconds=20)
#: A job that told of none for so many steps stands still.
STEPS_MISSED = 3


def evidence_of(
    placement: Placement, occurred_at: datetime, looked_since: datetime
) -> triage.LossEvidence:
    """What is known by now of a placement that was lost at `occurred_at`, its cause being looked
    for since `looked_since`."""
    now = timezone.now()
    end = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=placement.pk).first()
    data = end.data if end else {}
    # What the node said before this process was placed on it explains nothing of its end.
    since = max(occurred_at - LOOK_BACK, placement.created_at)
    told = Signal.objects.filter(heard_since(since), node=placement.node)
    verdicts = [
        verdict_of(one) for one in told.filter(kind__in=HARDWARE_SPEAKS).select_related("gpu")
    ]
    # That a card does not answer lasts if it was told again: it may have begun before.
    silences = Signal.objects.filter(
        Q(observed_at__gte=since) | Q(repeated_at__gte=since - SILENT_STILL),
        node=placement.node,
        kind=SignalKind.GPU_UNREADABLE,
    )
    silent = silences.filter(boot_id=placement.node.boot_id).first()
    lease = placement.node.lease
    own = placement.replica.alive.filter(node_rank=placement.node_rank)
    return triage.LossEvidence(
        process_exited=end is not None,
        peers_lost_it=_peers_miss_it(placement),
        still_commits=_still_commits(placement, lease.last_beat_at),
        exit_code=data.get("exit_code"),
        exit_signal=data.get("signal"),
        exit_reason=str(data.get("reason", "")),
        node_reachable=lease.reachable,
        silent_s=round((now - lease.last_beat_at).total_seconds(), 2),
        lease_s=settings.LEASE_S,
        stopped_by_order=bool(data.get("requested")),
        sent_away=was_sent_away(placement),
        ended=not own.exists(),
        verdicts=triage.gravest(v for v in verdicts if v is not None and triage.may_end_rank(v)),
        card_silent=str(silent.data.get("reason") or "no reason given") if silent else "",
        waited_s=round((now - looked_since).total_seconds(), 2),
        patience_s=settings.LEASE_S + settings.CAUSE_WAIT_S,
    )


def first_of(
    placements: Sequence[Placement], occurred_at: datetime, looked_since: datetime
) -> tuple[Placement, triage.LossEvidence] | triage.NotYet:
    """Of a replica's processes on its nodes the one that took the others along, and what is known
    of it."""
    known = [evidence_of(one, occurred_at, looked_since) for one in placements]
    if any(one.process_exited or one.ended for one in known):
        # Without that one it commits nothing more, whatever it told before, and all is lost.
        known = [replace(one, still_commits=False) for one in known]
        known = [one if one.process_exited else replace(one, peers_lost_it=True) for one in known]
    words = map(_words_of, placements)
    places = [triage.PlaceEvidence(one, *said) for one, said in zip(known, words, strict=True)]
    first = triage.first_to_go(places)
    return first if isinstance(first, triage.NotYet) else (placements[first], known[first])


def _words_of(placement: Placement) -> tuple[int, float]:
    """How many of its ranks said why they ended, and when the first word of its end came."""
    told = Signal.objects.filter(placement_id=placement.pk)
    own = told.filter(job_id=placement.replica.job_id)  # no other job speaks for it
    why = own.filter(kind=SignalKind.JOB_TROUBLE, data__kind="exception")
    ends = told.filter(kind=SignalKind.PROCESS_EXITED)
    first = (why | ends).order_by("observed_at").first()
    said = why.values("data__rank").distinct().count()
    return said, first.observed_at.timestamp() if first else math.inf


def told_gone(placement: Placement) -> bool:
    """Whether its agent or its peers said that this process is gone."""
    return seen_to_end(placement) or _peers_miss_it(placement)


def seen_to_end(placement: Placement) -> bool:
    """Whether its agent said that this process ended."""
    ends = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=placement.pk)
    return ends.exists()


def was_silent(node_id: str, since: datetime) -> bool:
    """Whether the node fell silent since then: what it left unanswered says nothing of it."""
    lost = Signal.objects.filter(kind=SignalKind.LEASE_LOST, node_id=node_id)
    return lost.filter(observed_at__gte=since).exists()


def may_run_on(node: Node) -> list[Placement]:
    """Whose processes may be there: also those that another replaced, or that were known to leave
    last, and nobody saw end."""
    there = Placement.objects.filter(node=node)
    ends = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=OuterRef("pk"))
    later = there.filter(created_at__gt=OuterRef("created_at"))
    replaced = Q(successors__isnull=False, successors__standby=False)
    left = Q(~Exists(later), end_reason__startswith=LEFT)
    unseen = there.filter(replaced | left, ~Exists(ends), state=PlacementState.ENDED).distinct()
    return [*there.exclude(state=PlacementState.ENDED), *unseen]


def lives(placement: Placement) -> bool:
    """Whether the process runs, or is being started, on a node that is heard, and nobody says that
    it is gone."""
    alive = placement.state != PlacementState.ENDED
    return alive and placement.node.lease.reachable and not told_gone(placement)


def saved_for(placement: Placement) -> tuple[recovery.Saved, ...]:
    """The newest checkpoint of each tier that a replica finds on the node that it was lost on. What
    that holds in memory and on its disk the nodes of the job's other replicas hold too."""
    job = placement.replica.job
    alike = job.world_replicas > 1
    newest: dict[str, Checkpoint] = {}
    for one in last_checkpoints(job):
        if one.tier in OF_ALL_NODES or alike or _stayed_at(placement, one.at):
            newest.setdefault(one.tier, one)
    return tuple(
        recovery.Saved(
            tier=Tier(tier).label.lower(),
            step=one.step,
            behind_s=_trained_since(job, one.at - timedelta(seconds=one.seconds)),
            everywhere=alike or tier in OF_ALL_NODES,
        )
        for tier, one in newest.items()
    )


def trained_s(job: Job) -> float:
    """Seconds from the job's start to its newest step: what is made again if nothing was saved."""
    return _trained_since(job, job.started_at or job.created_at)


def _stayed_at(placement: Placement, at: datetime) -> bool:
    """Whether its replica was on this node then."""
    stays = placement.replica.placements.filter(created_at__lte=at, standby=False)
    last = stays.order_by("-created_at").first()
    return last is not None and last.node_id == placement.node_id


def _trained_since(job: Job, since: datetime) -> float:
    """Up to its newest step, which is what is lost with its memory."""
    return max(0.0, ((job.step_at or since) - since).total_seconds())


def _still_commits(placement: Placement, last_beat_at: datetime) -> bool:
    """Whether the replica stands in what the job told of its newest steps, after its node's last
    beat. Where the job's coordinator went silent with the node, or it has no other replica, only if
    that is not long ago: then nobody makes another step, or says whom they lost."""
    job = placement.replica.job
    newest = ProgressSample.objects.filter(job=job).order_by("-at").first()
    if newest is None or placement.replica.index not in newest.replicas:
        return False
    since = last_beat_at
    if job.coordinator_node_id == placement.node_id or job.world_replicas == 1:
        usual_s = STEPS_MISSED * max(newest.step_s, newest.max_gap_s)
        since = max(since, timezone.now() - timedelta(seconds=settings.LEASE_S + usual_s))
    return newest.at > since


def _peers_miss_it(placement: Placement) -> bool:
    """Whether survivors lost this process and have not let it in again since.

    A rank that was starved for seconds is lost by its heartbeat and comes back by itself.
    """
    if placement.successors.filter(warm=True, standby=False).exists():
        return True  # a warm spare has its place
    lost = Signal.objects.filter(
        kind=SignalKind.PEER_LOST,
        placement_id=placement.pk,
        job_id=placement.replica.job_id,
    )
    newest = lost.order_by("-observed_at").first()
    if newest is None:
        return False
    let_in = Interruption.objects.filter(
        job_id=placement.replica.job_id,
        entered__contains=placement.pk,
        committed_at__gt=newest.observed_at,
    )
    return not (let_in.exists() or _commits_after(placement, newest.data.get("epoch")))


def _commits_after(placement: Placement, epoch: int | None) -> bool:
    """Whether the job told of steps of a later epoch that are this process's too: who was to tell
    that it was let in may have died before they could."""
    standbys = placement.successors.filter(standby=True).exclude(state=PlacementState.ENDED)
    if epoch is None or standbys.exists():  # a process that stood by may commit in its place
        return False
    later = ProgressSample.objects.filter(job_id=placement.replica.job_id, epoch__gt=epoch)
    return later.filter(replicas__contains=placement.replica.index).exists()
