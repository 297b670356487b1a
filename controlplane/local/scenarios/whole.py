"""Scenarios that kill every process of the training job at once: where does it go on from?"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from controlplane import crypto
from controlplane.accounts.models import SYSTEM
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.incidents.actions import resolve_by_hand
from controlplane.incidents.choices import INCIDENT_UNRESOLVED
from controlplane.incidents.models import Incident
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState
from controlplane.jobs.models import Job, LedgerRange, Placement
from controlplane.local import runfile
from controlplane.local.processes import marked
from controlplane.local.scenarios.base import (
    MENDED_S,
    TOLD_S,
    Result,
    Say,
    ScenarioError,
    await_rows,
    seconds_since,
    url,
)
from controlplane.local.scenarios.replicas import ready_job
from runtime.checkpoint import peer, store
from runtime.checkpoint.holder import ADDRESS, MEMORY
from runtime.client import ENV_PLACEMENT
from runtime.replica.record import Record, RecordFile

CORRUPT = "corrupt-checkpoint"
#: The codes of an incident of a node whose own disk does so, or its memory.
DAMAGED = ("checkpoint_damaged", "memory_damaged")


@dataclass(frozen=True)
class There:
    """One complete checkpoint, or a state that a holder keeps."""

    step: int
    path: Path | None  # of a checkpoint
    pid: int | None  # of a holder


@dataclass(frozen=True)
class Beginning:
    """From which state a job that was killed whole went on."""

    epoch: int  # in which its last step was made
    step: int
    replicas: list[int]  # that train by now


def play(name: str, say: Say) -> Result:
    """Kill every rank; with CORRUPT flip a bit in each newest checkpoint besides. Raises
    ScenarioError."""
    job = ready_job(needs_spare=False)
    await_rows(
        lambda: all(_tiers(job).values()), MENDED_S, "the job has no checkpoint on each tier"
    )
    await_rows(lambda: not _unheard(job), MENDED_S, "a rank has not told its process id")
    if name == CORRUPT:
        last = max(_ends(_tiers(job)).values())
        await_rows(lambda: _ahead(job, last), MENDED_S, "no tier is ahead of the others")
    at = datetime.now(UTC)
    killed = _kill(job)
    ended = _record(job.pk).epoch
    await_rows(lambda: not _living(killed), 30, "the writers did not finish")
    tiers = _tiers(job)
    there = _ends(tiers)
    say(f"SIGKILL of {len(killed)} ranks; newest checkpoints: {there}")
    freshest, following = in_order(there)
    expected = freshest[0]
    facts: dict[str, object] = {"ranks": len(killed), "newest": there}
    damaged: list[str] = []
    if name == CORRUPT:
        if following is None:
            raise ScenarioError(
                f"all tiers end at one step: where it goes on tells nothing: {facts}"
            )
        damaged, expected = freshest, following
        newer = [one for tier in damaged for one in tiers[tier] if one.step >= there[following]]
        _damage(newer)
        words = " and ".join(damaged)
        say(f"a bit flipped in {len(newer)} states on the {words} tier")
        facts |= {"damaged": len(newer), "damaged_tier": words}
    began = await_rows(lambda: begun_again(job.pk, killed), MENDED_S, "the job did not begin again")
    first = await_rows(lambda: first_steps(job, ended), MENDED_S, "the job did not go on")
    await_rows(lambda: _whole(job), MENDED_S, "the job is not whole again")
    incidents = await_rows(lambda: _mended(job, at), MENDED_S, "an incident is not resolved")
    facts |= {"went_on_at": began.step + 1, "tier": expected, "incidents": len(incidents)}
    await_rows(
        lambda: refused(job, at) >= {*damaged}, TOLD_S, f"nobody refused what {damaged} had to give"
    )
    samples = _samples(job)
    problems = [f"{count} samples {kind}" for kind, count in samples.items() if count]
    if began.step != there[expected]:
        problems.append(
            f"replicas {began.replicas} went on from step {began.step}, made in epoch "
            f"{began.epoch}, and the {expected} tier ends at {there[expected]}: {facts}"
        )
    return Result(
        scenario=name,
        ok=not problems,
        seconds={
            "trains_again": seconds_since(at, first.recorded_at),
            "resolved": seconds_since(at, max(one.resolved_at or at for one in incidents)),
        },
        samples=samples,
        incident=url(incidents[0]),
        facts=facts,
        problems=problems,
    )


def _kill(job: Job) -> set[str]:
    """Every rank at once, so that no survivor takes over. Their placements."""
    running = Placement.objects.filter(replica__job=job, state=PlacementState.RUNNING)
    pids = {placement.pk: placement.pid for placement in running if placement.pid is not None}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return {*pids}


def _unheard(job: Job) -> bool:
    """Whether a rank trains that `_kill` would spare."""
    unheard = Placement.objects.filter(replica__job=job, state=PlacementState.RUNNING, pid=None)
    return unheard.exists()


def _living(placements: set[str]) -> bool:
    """Whether any process of these is left: the writers outlive the ranks, and finish."""
    for process in marked(runfile.home()):
        with contextlib.suppress(psutil.Error):
            if process.environ().get(ENV_PLACEMENT) in placements:
                return True
    return False


def _tiers(job: Job) -> dict[str, list[There]]:
    """What there is on each tier, the quickest first."""
    home = runfile.home()
    local = home.glob(f"nodes/*/checkpoints/{job.pk}/*/replica-*")
    return {
        "peer": [one for path in home.glob(f"nodes/*/memory/{job.pk}") for one in _held(path, job)],
        "local": [one for folder in local for one in _written(folder)],
        "shared": _written(home / "shared" / job.pk / "checkpoints"),
    }


def _ends(tiers: Mapping[str, list[There]]) -> dict[str, int]:
    """The newest step on each."""
    return {tier: max((one.step for one in found), default=-1) for tier, found in tiers.items()}


def _ahead(job: Job, last: int) -> bool:
    """Whether the quickest tier alone has just got a newer step than this one: it is saved to most
    often, and until its next save no other can have the same step for its newest."""
    quickest, *others = _ends(_tiers(job)).values()
    return quickest > max(last, *others)


def in_order(there: Mapping[str, int]) -> tuple[list[str], str | None]:
    """The tiers whose newest step, as given by tier, is the newest of all, and which comes then; of
    one step the quicker one, as they are given. None if all end at the same."""
    newest = max(there.values())
    freshest = [tier for tier, step in there.items() if step == newest]
    older = [tier for tier in there if tier not in freshest]
    return freshest, max(older, key=lambda tier: there[tier], default=None)


def refused(job: Job, since: datetime) -> set[str]:
    """The tiers of which a checkpoint was refused, as the job told."""
    told = Signal.objects.filter(
        job_id=job.pk,
        kind=SignalKind.JOB_TROUBLE,
        observed_at__gte=since,
        data__kind="checkpoint_refused",
    )
    return {*told.values_list("data__subject", flat=True)}


def _written(folder: Path) -> list[There]:
    return [There(store.number_of(path)[0], path, None) for path in store.candidates(folder)]


def _held(folder: Path, job: Job) -> list[There]:
    """What a node's holder keeps; nothing if it does not run."""
    address = peer.running(folder)
    if not address:
        return []
    pid = int(json.loads((folder / ADDRESS).read_bytes())["pid"])
    found = peer.held(address, crypto.job_token(job.pk))
    return [There(int(one["step"]), None, pid) for one in found]


def _damage(found: list[There]) -> None:
    """Flip one bit in each: as a bad disk would, or bad memory."""
    written = [[*one.path.glob("rank-*.bin")] for one in found if one.path is not None]
    held = [_held_by(pid) for pid in {one.pid for one in found if one.pid is not None}]
    if not all([*written, *held]):
        raise ScenarioError("a checkpoint has no bytes that could be damaged")
    for file in [random.choice(files) for files in written]:  # noqa: S311 - any will do
        _flip(file)
    for memory in [one for memories in held for one in memories]:
        _flip(memory)


def _held_by(pid: int) -> list[Path]:
    """A holder's memory, as the kernel shows it."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return [link for link in links if MEMORY in str(link.readlink())]


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        where = os.fstat(file.fileno()).st_size // 2
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 1]))


def begun_again(job_id: str, killed: set[str]) -> Beginning | None:
    """From what those began who were started after these, once they have. By the coordinator's
    record: what the control plane was told of the killed may end a while before they did."""
    record = _record(job_id)
    if not record.members or killed & {*record.members.values()}:
        return None
    began = record.grant["began"]
    return Beginning(int(began["epoch"]), int(began["step"]), sorted(record.members))


def first_steps(job: Job, ended: int) -> LedgerRange | None:
    """The first steps that were made after this epoch, in which all were killed, as they were told:
    its own last ones may be told later than that."""
    return LedgerRange.objects.filter(job=job, epoch__gt=ended).order_by("step_from").first()


def _record(job_id: str) -> Record:
    """What the job's coordinator knows of its epochs."""
    return RecordFile(runfile.home() / "shared" / job_id / "coordinator", job_id).read()


def _whole(job: Job) -> bool:
    job.refresh_from_db()
    missing = job.replicas.exclude(state=ReplicaState.ACTIVE).exists()
    return job.state == JobState.RUNNING and not missing


def _mended(job: Job, since: datetime) -> list[Incident] | None:
    """Once all are over. Of a disk or a memory that gives back other bytes than it was given a
    person has to look: that is us, who know why."""
    opened = Incident.objects.filter(cluster=job.cluster, opened_at__gte=since)
    for judged in opened.filter(code__in=DAMAGED, state__in=INCIDENT_UNRESOLVED):
        resolve_by_hand(SYSTEM, judged.pk, "this scenario flipped that bit; the node is well")
    incidents = [*opened]
    unresolved = [one for one in incidents if one.state in INCIDENT_UNRESOLVED]
    return incidents if incidents and not unresolved else None


def _samples(job: Job) -> dict[str, int]:
    rows = LedgerRange.objects.filter(job=job).values_list("lost", "duplicated")
    return {
        "lost": sum(len(lost) for lost, _ in rows),
        "duplicated": sum(len(duplicated) for _, duplicated in rows),
    }
