"""Scenarios that kill every process of the training job at once: where does it go on from?"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from controlplane.incidents.choices import INCIDENT_UNRESOLVED
from controlplane.incidents.models import Incident
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState
from controlplane.jobs.models import Job, LedgerRange, Placement
from controlplane.local import runfile
from controlplane.local.processes import marked
from controlplane.local.scenarios.base import (
    MENDED_S,
    Result,
    Say,
    ScenarioError,
    await_rows,
    seconds_since,
    url,
)
from controlplane.local.scenarios.replicas import ready_job
from runtime.checkpoint import store
from runtime.client import ENV_PLACEMENT


@dataclass(frozen=True)
class Tiers:
    """The complete checkpoints of one job."""

    local: list[Path]  # on the nodes' own disks
    shared: list[Path]

    def newest(self) -> dict[str, int]:
        """The newest step of each tier that holds any."""
        tiers = {"local": self.local, "shared": self.shared}
        return {
            name: max(store.number_of(path)[0] for path in paths)
            for name, paths in tiers.items()
            if paths
        }


def play(name: str, say: Say) -> Result:
    """Kill every rank; with `corrupt-checkpoint` flip a bit in each newest checkpoint besides.
    Raises ScenarioError."""
    job = ready_job(needs_spare=False)
    await_rows(
        lambda: len(_tiers(job).newest()) == len(("local", "shared")),
        MENDED_S,
        "the job has no checkpoint on each tier",
    )
    epoch, at = job.epoch, datetime.now(UTC)
    killed = _kill(job)
    await_rows(lambda: not _living(killed), 30, "the writers did not finish")
    tiers = _tiers(job)
    there = tiers.newest()
    say(f"SIGKILL of {len(killed)} ranks; newest checkpoints: {there}")
    freshest = max(there, key=lambda tier: (there[tier], tier == "local"))
    expected = freshest
    facts: dict[str, object] = {"ranks": len(killed), "newest": there}
    if name == "corrupt-checkpoint":
        facts["damaged"] = _damage(tiers, freshest)
        say(f"a bit flipped in {facts['damaged']} files on the {freshest} tier")
        expected = next(tier for tier in there if tier != freshest)
    first = await_rows(lambda: _first_step(job, epoch), MENDED_S, "the job did not go on")
    await_rows(lambda: _whole(job), MENDED_S, "the job is not whole again")
    incidents = await_rows(lambda: _mended(job, at), MENDED_S, "an incident is not resolved")
    facts |= {"went_on_at": first.step_from, "tier": expected, "incidents": len(incidents)}
    samples = _samples(job)
    problems = [f"{count} samples {kind}" for kind, count in samples.items() if count]
    if first.step_from != there[expected] + 1:
        problems.append(
            f"it went on at step {first.step_from}, and the {expected} tier ends at "
            f"{there[expected]}"
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


def _living(placements: set[str]) -> bool:
    """Whether any process of these is left: the writers outlive the ranks, and finish."""
    for process in marked(runfile.home()):
        with contextlib.suppress(psutil.Error):
            if process.environ().get(ENV_PLACEMENT) in placements:
                return True
    return False


def _folders(job: Job) -> dict[str, list[Path]]:
    home = runfile.home()
    return {
        "local": [*home.glob(f"nodes/*/checkpoints/{job.pk}/*/replica-*")],
        "shared": [home / "shared" / job.pk / "checkpoints"],
    }


def _tiers(job: Job) -> Tiers:
    found = {
        tier: [path for folder in folders for path in store.candidates(folder)]
        for tier, folders in _folders(job).items()
    }
    return Tiers(found["local"], found["shared"])


def _damage(tiers: Tiers, tier: str) -> int:
    """Flip one bit in each checkpoint of a tier that is newer than all of the other."""
    paths, others = (tiers.local, tiers.shared) if tier == "local" else (tiers.shared, tiers.local)
    newest_other = max(store.number_of(path)[0] for path in others)
    newer = [path for path in paths if store.number_of(path)[0] >= newest_other]
    for path in newer:
        files = [*path.glob("rank-*.bin")]
        if not files:
            raise ScenarioError(f"{path} has no file of bytes")
        _flip(random.choice(files))  # noqa: S311 - any will do
    return len(newer)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        where = path.stat().st_size // 2
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 1]))


def _first_step(job: Job, epoch: int) -> LedgerRange | None:
    """The first steps that were made by the ranks that were started anew."""
    return LedgerRange.objects.filter(job=job, epoch__gt=epoch).order_by("step_from").first()


def _whole(job: Job) -> bool:
    job.refresh_from_db()
    missing = job.replicas.exclude(state=ReplicaState.ACTIVE).exists()
    return job.state == JobState.RUNNING and not missing


def _mended(job: Job, since: datetime) -> list[Incident] | None:
    incidents = [*Incident.objects.filter(cluster=job.cluster, opened_at__gte=since)]
    unresolved = [one for one in incidents if one.state in INCIDENT_UNRESOLVED]
    return incidents if incidents and not unresolved else None


def _samples(job: Job) -> dict[str, int]:
    rows = LedgerRange.objects.filter(job=job).values_list("lost", "duplicated")
    return {
        "lost": sum(len(lost) for lost, _ in rows),
        "duplicated": sum(len(duplicated) for _, duplicated in rows),
    }
