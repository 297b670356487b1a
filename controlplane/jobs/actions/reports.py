"""What a job tells of itself, and what its scheduler tells of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from django.db.models import Q
from django.utils import timezone

from controlplane import doorbell
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict, Refused
from controlplane.fleet.changes import change, touch
from controlplane.health.actions import LAST_MOMENT, record_signal
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.jobs.actions.jobs import end_itself, end_placement, set_job, set_replicas
from controlplane.jobs.actions.moves import take_place
from controlplane.jobs.actions.warm_spares import enter
from controlplane.jobs.choices import JOB_ACTIVE, JobState, PlacementState, ReplicaState, Tier
from controlplane.jobs.models import (
    LEFT,
    Checkpoint,
    Directive,
    Interruption,
    Job,
    LedgerRange,
    Placement,
    ProgressSample,
)
from controlplane.jobs.reliability import recent_rate
from controlplane.jobs.selectors import CLOCKS_DIFFER, ordered_to_end
from runtime import client

#: What a process says that another has replaced, before the other's placement.
REPLACED = "replaced by "
#: Of tiers that are saved to every few seconds, and keep a few states themselves, so many are
#: remembered.
SHORT_LIVED_TIERS = (Tier.PEER, Tier.LOCAL)
MAX_SHORT_LIVED = 500
#: And of the others, which may keep what is young: at five minutes' interval a week of it.
MAX_LONG_LIVED = 2000
#: What is known of a job by its processes' word. Its state is not among it: the last one's farewell
#: ends a job that is stopping.
REPORTED_FIELDS = (
    *("step", "step_at", "epoch", "loss", "samples_per_s", "whole"),
    *("ledger_step", "recomputed_steps"),
)
#: Clocks may differ by so much.
MAX_AHEAD = timedelta(minutes=5)
#: So far apart the moments of one message are at most that comes twice by a clock that is wrong.
TOLD_AGAIN = timedelta(seconds=30)
#: What a rank has just sent cannot be of the future, nor older than its POST and our queue take:
#: if it says so by more than this, in seconds, its clock is wrong, and its times are moved to ours.
AHEAD_S, BEHIND_S = 1.0, CLOCKS_DIFFER.total_seconds()
Said = TypeVar("Said", bound=client.Message)
#: What messages say of when something was, in Unix time.
TIMES = ("at", "started_at", "committed_at")


@change()
def record_runtime_batch(
    job_id: str, batch: client.Batch, messages: list[client.Message]
) -> client.Reply:
    """Keep what one rank told. Each message has a natural key: telling it again changes nothing.

    Raises Refused where its clock is so wrong that no time can be made of what it says, or where
    it tells of a process of another job.
    """
    if not messages:  # it asks only for orders, as each replica does: that takes no lock
        return _reply(Job.objects.get(pk=job_id))
    # One job's batches take turns, so that the ledger's end is read and moved by one at a time.
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    _refuse_those_of_others(job, batch, messages)
    for told in messages:
        message = _by_our_clock(batch, told)
        if isinstance(message, client.Hello):
            _record_hello(job, batch, message)
        elif isinstance(message, client.Progress):
            _record_progress(job, batch, message)
        elif isinstance(message, client.Ledger):
            _record_ledger(job, message)
        elif isinstance(message, client.PeerLost):
            _record_peer_lost(job, batch, message)
        elif isinstance(message, client.Regrouped):
            _record_regrouped(job, message)
        elif isinstance(message, client.CheckpointSaved):
            _record_checkpoint(job, message)
        elif isinstance(told, client.Trouble):
            _record_trouble(job, batch, told)
        elif isinstance(message, client.Stopped):
            _record_stopped(job, batch, message)
    job.save(update_fields=REPORTED_FIELDS)
    touch(job.cluster_id, ("job", job.pk))
    # Who tells of progress says when all save, and may hear of no save itself.
    asks = any(isinstance(one, client.CheckpointSaved | client.Progress) for one in messages)
    return _reply(job, recent_rate(job.cluster_id) if asks else None)


def _refuse_those_of_others(job: Job, batch: client.Batch, messages: list[client.Message]) -> None:
    """A job's token speaks for its own processes: a rank or a node ends by what is told of it."""
    named = {one.placement for one in messages if isinstance(one, client.PeerLost)}
    if any(isinstance(one, client.Trouble) for one in messages):
        named.add(batch.placement)
    named.discard("")
    if named and Placement.objects.filter(pk__in=named).exclude(replica__job=job).exists():
        raise Refused(422, "invalid_field", "placement", "name a process of this job, or none")


def _reply(job: Job, failures_per_node_day: float | None = None) -> client.Reply:
    # Who obeys the newest of a verb has done what the others ask for: a reply stays short however
    # often somebody asks.
    alive = Directive.objects.filter(job=job, expires_at__gt=timezone.now())
    directives = alive.order_by("verb", "-created_at", "-pk").distinct("verb")
    return client.Reply(
        ledger_step=job.ledger_step,
        ledger_epoch=_ledger_epoch(job),
        directives=[{"id": d.pk, "verb": d.verb, "args": d.args} for d in directives],
        failures_per_node_day=failures_per_node_day,
    )


def _record_hello(job: Job, batch: client.Batch, message: client.Hello) -> None:
    # One that was told to train already may not have been heard itself yet.
    unheard = Placement.objects.filter(
        Q(state=PlacementState.STARTING) | Q(state=PlacementState.RUNNING, pid=None),
        pk=batch.placement,
        replica__job=job,
    )
    if message.stage == "follows":
        standing = Placement.objects.filter(pk=batch.placement, replica__job=job)
        standing.update(follows_since=_moment(message.at))
        doorbell.ring_after_commit(f"job/{job.pk}")
    if message.stage == "entered":
        _moved(job, batch.placement, batch.replica, _moment(message.at))
    placement = unheard.first()
    if placement is None:
        return
    unheard.update(state=PlacementState.RUNNING, pid=message.pid, started_at=_moment(message.at))
    # One that stands by takes nothing from its replica, and one that trains already is past this.
    if not placement.standby and placement.joined_at is None:
        set_replicas(job, [batch.replica], ReplicaState.JOINING)
    doorbell.ring_after_commit(f"job/{job.pk}")


def _record_progress(job: Job, batch: client.Batch, message: client.Progress) -> None:
    at = _moment(message.at)
    first = message.step - message.steps + 1
    goes_back = message.whole and (message.epoch, first) <= (job.epoch, job.step)
    if goes_back and _is_known(job, message, at):
        return  # told again
    _moved(job, batch.placement, batch.replica, at)  # only one that trains tells of commits
    ProgressSample.objects.update_or_create(
        job=job,
        step=message.step,
        defaults={
            "steps": message.steps,
            "epoch": message.epoch,
            "at": at,
            "loss": message.loss,
            "grad_norm": message.grad_norm,
            "step_s": message.step_s,
            "max_gap_s": message.max_gap_s,
            "samples": message.samples,
            "replicas": message.replicas,
        },
    )
    if not _is_news(job, batch, message):
        return  # told late, or again
    if goes_back and first <= job.ledger_step:
        # Its ledger goes on only from a later epoch by itself; this start could not count them all.
        job.recomputed_steps += job.ledger_step - first + 1
        _take_back_ledger(job, first)
    job.step = message.step
    job.step_at = at
    job.epoch = message.epoch
    job.loss = message.loss
    job.whole = message.whole or job.nodes_per_replica > 1
    job.samples_per_s = (
        message.samples / (message.steps * message.step_s) if message.step_s else None
    )
    # One that its own scheduler starts is not known to be starting.
    if job.state in (JobState.PENDING, JobState.STARTING):
        job.state = JobState.RUNNING
        job.started_at = job.started_at or at
        job.save(update_fields=["state", "started_at"])
        doorbell.ring_after_commit(f"job/{job.pk}")
    _activate(job, message.replicas, at)


def _is_news(job: Job, batch: client.Batch, message: client.Progress) -> bool:
    """Whether these steps come after those that are known: in a later epoch whatever its node's
    clock says."""
    if job.step_at is None or job.step_at > timezone.now() + MAX_AHEAD:
        return message.epoch >= job.epoch  # by a wrong clock, taken when such were believed
    if message.epoch >= job.epoch:
        return (message.epoch, _moment(message.at)) > (job.epoch, job.step_at)
    # One that restarts as a whole and finds no checkpoint counts its epochs from the first again.
    if not message.whole:
        return False
    own = Placement.objects.filter(pk=batch.placement, replica__job=job)
    if not own.exists():  # its own scheduler started it, nobody knows when
        return message.step < message.steps and _moment(message.at) > job.step_at
    return own.filter(created_at__gt=job.step_at).exclude(state=PlacementState.ENDED).exists()


def _is_known(job: Job, message: client.Progress, at: datetime) -> bool:
    """Whether it was told before: by a clock that is wrong at another moment, but not much later.
    One that begins anew makes the same steps, and needs longer to come to them."""
    told = ProgressSample.objects.filter(
        job=job, step=message.step, epoch=message.epoch, steps=message.steps
    )
    return told.filter(at__range=(at - TOLD_AGAIN, at + TOLD_AGAIN)).exists()


def _record_ledger(job: Job, message: client.Ledger) -> None:
    """Append to the ledger, which has no gaps; a resumed job takes back what it recomputes."""
    if message.step_from > job.ledger_step + 1:
        return  # our reply says where to go on from
    if message.step_from <= job.ledger_step:
        # Of steps added up the first may long be known: it is the last that counts.
        counts = message.step_to if message.merged else message.step_from
        newest = LedgerRange.objects.filter(job=job, step_to__gte=counts)
        if newest.filter(epoch__gte=message.epoch).exists():
            return  # told again
        if not message.merged:
            job.recomputed_steps += job.ledger_step - message.step_from + 1
        _take_back_ledger(job, message.step_from)
    job.ledger_step = message.step_to
    last = LedgerRange.objects.filter(job=job).order_by("-step_from").first()
    if last is not None and _goes_on(last, message):
        last.step_to, last.proof = message.step_to, message.proof
        last.samples += message.samples
        last.recorded_at = timezone.now()
        last.save(update_fields=["step_to", "proof", "samples", "recorded_at"])
        return
    LedgerRange.objects.create(
        job=job,
        step_from=message.step_from,
        step_to=message.step_to,
        epoch=message.epoch,
        samples=message.samples,
        lost=message.lost,
        duplicated=message.duplicated,
        dropped=message.dropped,
        computed=message.computed,
        merged=message.merged,
        proof=message.proof,
        order=message.order,
    )


def _goes_on(last: LedgerRange, message: client.Ledger) -> bool:
    """Whether these steps follow on a range to which they are alike, so that both are one: a job
    tells of its steps each second, for months."""
    told = (message.lost, message.duplicated, message.merged)
    here = (last.lost, last.duplicated, last.merged)
    steps, before = message.step_to - message.step_from + 1, last.step_to - last.step_from + 1
    return (
        last.step_to + 1 == message.step_from
        and last.proof != ""
        and not any(told)
        and not any(here)
        and (last.epoch, last.computed, last.dropped, last.order)
        == (message.epoch, message.computed, message.dropped, message.order)
        and last.samples * steps == message.samples * before
    )


def _ledger_epoch(job: Job) -> int:
    last = LedgerRange.objects.filter(job=job).order_by("-step_from").first()
    return -1 if last is None else last.epoch


def _take_back_ledger(job: Job, step: int) -> None:
    """Take back the ledger from `step` on: those steps are not in the present weights, or are told
    anew. A range that is cut has no proof of its own: that of the next one covers it."""
    LedgerRange.objects.filter(job=job, step_from__gte=step).delete()
    for row in LedgerRange.objects.filter(job=job, step_to__gte=step):
        kept = step - row.step_from
        row.samples = row.samples * kept // (row.step_to - row.step_from + 1)
        row.step_to = step - 1
        row.lost = [entry for entry in row.lost if entry[0] < step]
        row.duplicated = [entry for entry in row.duplicated if entry[0] < step]
        row.proof = ""
        row.save()
    job.ledger_step = step - 1


def _record_peer_lost(job: Job, batch: client.Batch, message: client.PeerLost) -> None:
    record_signal(
        f"peer-lost:{job.pk}:{message.epoch}:{message.replica}",
        SignalKind.PEER_LOST,
        source=f"replica {batch.replica}",
        observed_at=_moment(message.at),
        job_id=job.pk,
        replica=message.replica,
        placement_id=message.placement,
        data={"how": message.how, "step": message.step, "epoch": message.epoch},
    )
    # Only one that trained can be lost.
    _moved(job, message.placement, message.replica, _moment(message.at))


def _record_regrouped(job: Job, message: client.Regrouped) -> None:
    committed_at = _moment(message.committed_at)
    # Few of them stood by before: one look tells which, however many there are.
    places = dict(zip(message.entered, message.joined, strict=False))
    stood_by = Placement.objects.filter(pk__in=places, replica__job=job, standby=True)
    for placement in stood_by.order_by("pk").values_list("pk", flat=True):
        _moved(job, placement, places[placement], committed_at)
    Interruption.objects.get_or_create(
        job=job,
        epoch=message.epoch,
        defaults={
            "lost": message.lost,
            "joined": message.joined,
            "entered": message.entered,
            "replicas": message.replicas,
            "taken_over": message.taken_over,
            "started_at": _moment(message.started_at),
            "committed_at": committed_at,
            "step": message.step,
            "gap_s": message.gap_s,
        },
    )
    if message.epoch > job.epoch:
        job.epoch = message.epoch
        if job.step_at is not None:
            # By the clock of whoever tells of this epoch, so that its steps come after.
            job.step_at = min(job.step_at, _moment(message.started_at))
    _activate(job, message.joined, committed_at)
    doorbell.ring_after_commit(f"job/{job.pk}")


def _record_checkpoint(job: Job, message: client.CheckpointSaved) -> None:
    at = _moment(message.at)
    said = {
        "path": message.path,
        "bytes": message.bytes,
        "stored": message.stored,
        "digest": message.digest,
        "stall_s": message.stall_s,
        "seconds": message.seconds,
        "at": at,
        "every_s": message.every_s,
        "ettr": message.ettr,
    }
    found, created = Checkpoint.objects.get_or_create(
        job=job, step=message.step, tier=message.tier, defaults=said
    )
    if not created and found.at < at:  # the job went back, and made that step again
        Checkpoint.objects.filter(pk=found.pk).update(**said)
    elif created:
        kept = MAX_SHORT_LIVED if message.tier in SHORT_LIVED_TIERS else MAX_LONG_LIVED
        told = job.checkpoints.filter(tier=message.tier).order_by("-at")
        for oldest in told.values_list("at", flat=True)[kept : kept + 1]:
            told.filter(at__lte=oldest).delete()


def _record_trouble(job: Job, batch: client.Batch, message: client.Trouble) -> None:
    # By its rank's clock: the same however often it is sent.
    key = f"{batch.placement or job.pk}:{message.kind}:{message.subject}:{message.at}"
    record_signal(
        f"trouble:{hashlib.sha256(key.encode()).hexdigest()[:40]}",
        SignalKind.JOB_TROUBLE,
        source=f"replica {batch.replica}",
        observed_at=_moment(_by_our_clock(batch, message).at),
        job_id=job.pk,
        replica=batch.replica,
        placement_id=batch.placement,
        data={
            "kind": message.kind,
            "text": message.text,
            "subject": message.subject,
            "rank": batch.rank,
        },
    )


def _record_stopped(job: Job, batch: client.Batch, message: client.Stopped) -> None:
    if not message.clean:
        return  # its process is about to exit, and that is what an incident begins with
    successor = message.reason.removeprefix(REPLACED)
    if successor != message.reason:
        _moved(job, successor, batch.replica, _moment(message.at))
    told = Placement.objects.filter(pk=batch.placement, replica__job=job).first()
    if told is None:
        return
    # The first rank speaks for all nodes, which left together.
    others = list(told.replica.alive.exclude(pk=told.pk)) if job.nodes_per_replica > 1 else []
    if not _left(told, message.reason):
        return  # told again, or late: what is there by now is of another start
    for other in others:
        _left(other, message.reason)
    alive = Placement.objects.filter(replica__job=job).exclude(state=PlacementState.ENDED)
    last = not message.because and not alive.exists() and not ordered_to_end([told, *others])
    if message.because == "over" or last:
        end_itself(job.pk, f"its script ended it: {message.reason}")
        job.refresh_from_db(fields=["state", "started_at", "ended_at"])


def _left(placement: Placement, reason: str) -> bool:
    """Note that a process leaves; it holds its node's cards until it is seen to have ended. False
    if it had ended before."""
    gone = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=placement.pk)
    return end_placement(SYSTEM, placement.pk, f"{LEFT}{reason}", free_node=gone.exists())


# --- what its scheduler tells ---------------------------------------------------------------------


@change()
def record_progress(
    actor: Actor,
    job_id: str,
    *,
    step: int,
    at: datetime | None = None,
    loss: float | None = None,
    samples_per_s: float | None = None,
) -> Job:
    """Keep how far a job is that does not tell by itself; what is told late changes nothing.

    Raises Conflict if the job has ended, or if its own ranks report: their word is more exact.
    """
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    if job.state not in JOB_ACTIVE:
        raise Conflict(f"{job.name} is {job.get_state_display().lower()}; it makes no progress")
    if job.progress.exists():
        raise Conflict(f"the ranks of {job.name} report their own progress; nothing else is taken")
    moment = at or timezone.now()
    if moment > timezone.now() + MAX_AHEAD:
        raise Conflict("progress cannot lie in the future; set the sender's clock")
    if job.step_at is not None and moment <= job.step_at:
        return job
    job.step = step
    job.step_at = moment
    job.loss = loss
    job.samples_per_s = samples_per_s
    job.started_at = job.started_at or moment
    job.save(update_fields=["step", "step_at", "loss", "samples_per_s", "started_at"])
    touch(job.cluster_id, ("job", job.pk))
    if job.state != JobState.RUNNING:
        set_job(actor, job, JobState.RUNNING, "its scheduler tells of progress", "job.progress")
    return job


# --- helpers --------------------------------------------------------------------------------------


def _activate(job: Job, replicas: list[int], at: datetime) -> None:
    """These replicas commit steps. Their placements joined now, unless they had before."""
    joined = Placement.objects.filter(
        replica__job=job,
        replica__index__in=replicas,
        state=PlacementState.RUNNING,
        standby=False,
        joined_at=None,
        started_at__lte=at,
    )
    indices = list(joined.values_list("replica__index", flat=True))
    if indices:
        Placement.objects.filter(replica__job=job, replica__index__in=indices).filter(
            state=PlacementState.RUNNING, standby=False, joined_at=None
        ).update(joined_at=at)
        set_replicas(job, indices, ReplicaState.ACTIVE)
        doorbell.ring_after_commit(f"job/{job.pk}")


def _moved(job: Job, placement_id: str, replica: int, at: datetime) -> None:
    """If this process stood by, it trains in the place of this replica now."""
    standby = (
        Placement.objects.select_related("node", "replica__job")
        .filter(pk=placement_id, replica__job=job, standby=True)
        .first()
    )
    if standby is None:
        return
    if standby.warm:
        enter(standby, replica, at)
    else:
        take_place(standby, at)
    doorbell.ring_after_commit(f"job/{job.pk}")
    if standby.state == PlacementState.ENDED:
        # It was given up and ended in that very moment; perhaps nobody is left to miss it.
        record_signal(
            f"moved-and-lost:{standby.pk}",
            SignalKind.PEER_LOST,
            source="the process that it replaced",
            observed_at=at,
            job_id=job.pk,
            replica=standby.replica.index,
            placement_id=standby.pk,
            data={"how": "agent", "step": job.step},
        )


def _by_our_clock(batch: client.Batch, message: Said) -> Said:
    """The same, if its rank's clock is wrong, with its times by ours."""
    ahead_s = batch.sent_at - timezone.now().timestamp()
    if -BEHIND_S <= ahead_s <= AHEAD_S:
        return message
    times = {name: getattr(message, name) - ahead_s for name in TIMES if hasattr(message, name)}
    if any(not 0 <= at <= LAST_MOMENT for at in times.values()):
        raise Refused(
            422,
            "invalid_field",
            "sent_at",
            "set this clock: by it, what the batch tells of was before 1970 or is in millennia",
        )
    return replace(message, **times)


def _moment(unix_time: float) -> datetime:
    return datetime.fromtimestamp(unix_time, UTC)
