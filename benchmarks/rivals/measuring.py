"""The measurements: a step in health, a fault of a peer, a newcomer.

Contenders take turns in short blocks, so that all meet the same machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks.rivals.contenders import DDP_AGAIN, OURS, Contender
from benchmarks.rivals.figures import Event, Samples, account, against, gap, median_step
from benchmarks.rivals.fleet import Job, Member, Nursery
from benchmarks.rivals.task import (
    FOR_EVER,
    GLOBAL_BATCH,
    KILL,
    SHARD_SIZE,
    TRAFFIC,
    TURN,
    Fault,
    Model,
    State,
)

WARM_UP = 2  # turns in health that are not counted
WARMING = 5  # steps before each turn that are not either
SETTLED = 8  # whole steps in a row by all replicas, before anything is done to them
AFTER = 5  # commits of each survivor after a fault, before its gap is believed to be over
REJOINED = 15  # steps with a share of a newcomer's after which it costs the others nothing more
RUN_IN = 200  # steps, before a newcomer is measured; half as many where all is trained, longer ones
#: After which the machine has done with what the dead one held: a virtual one tells its host of
#: memory that is free two seconds after it became so (PAGE_REPORTING_DELAY, mm/page_reporting.c),
#: and stands still meanwhile, which would be seen in whatever a newcomer does just then.
QUIET_S = 4.0
PATIENCE_S = 30.0
HEARD_S = 0.05  # in which the end of a process is heard of
FALSE_STARTS = 2


@dataclass(frozen=True)
class Turns:
    """A contender's turns in health, each with what plain DDP took just before and after it."""

    seconds: list[float]  # a step
    over_ddp: list[float]


@dataclass(frozen=True)
class Loss:
    """What one replica's fault did to the others."""

    step_s: float  # before it
    gap_s: float | None  # the survivors' longest time between commits; None: nobody went on
    died: int  # survivors, also while its place was filled
    hung: int  # survivors that lived and committed nothing more
    samples: Samples  # from the fault until the replica was back
    words: str  # of a survivor that died
    back: bool  # all trained together again


@dataclass(frozen=True)
class Rejoin:
    """What one newcomer did to the others."""

    step_s: float  # with all replicas
    gap_s: float
    calm_s: float  # the same with all replicas and nothing done to them, in about as long a time
    service_s: float  # its start -> its first share of a committed step; torch was imported before


class Bench:
    """Where jobs of all contenders are started, with a nursery for each kind."""

    def __init__(self, folder: Path, replicas: int, seed: int) -> None:
        self.folder = folder
        self.replicas = replicas
        self.chance = random.Random(seed)  # noqa: S311 - moments, not secrets
        self._nurseries: dict[tuple[str, str], Nursery] = {}
        self._numbers = count()

    def end(self) -> None:
        for nursery in self._nurseries.values():
            nursery.end()

    @contextmanager
    def job(self, contender: Contender, model: Model, until: int = FOR_EVER) -> Iterator[Job]:
        kind = (contender.python, contender.worker)
        if kind not in self._nurseries:
            name = contender.requirement or contender.worker
            self._nurseries[kind] = Nursery(contender, self.folder / f"{name}.log")
        folder = self.folder / f"job{next(self._numbers)}"
        with Job(contender, self._nurseries[kind], model, self.replicas, folder, until) as job:
            yield job


# --- health ---------------------------------------------------------------------------------------


def healthy(
    bench: Bench, reference: Contender, others: Sequence[Contender], rounds: int, model: Model
) -> tuple[list[float], dict[str, Turns]]:
    """Seconds of each step of the reference, and the turns of the others between its own."""
    with ExitStack() as stack:
        first = stack.enter_context(bench.job(reference, model, until=0))
        jobs = [stack.enter_context(bench.job(other, model, until=0)) for other in others]
        for job in [first, *jobs]:
            for _ in range(WARM_UP):
                _turn(job)
        before = _turn(first)
        references = [before]
        found: dict[str, Turns] = {other.name: Turns([], []) for other in others}
        for _ in range(rounds):
            for job in jobs:
                seconds = _turn(job)
                after = _turn(first)
                references.append(after)
                turns = found[job.contender.name]
                turns.seconds.append(seconds)
                turns.over_ddp.append(seconds / ((before + after) / 2))
                before = after
    return references, found


def _turn(job: Job) -> float:
    """Seconds a step, over TURN steps.

    Not counted are the first few: a job that stood still for a while finds its caches cold, and
    the reference stands still for shorter times than the others.
    """
    if job.until == 0 and not job.wait(lambda: _connected(job), PATIENCE_S):
        raise RuntimeError(f"{job.contender.name} does not start; see {job.nursery.log}")
    warm = job.until + WARMING
    job.let(warm + TURN)
    if not job.wait(lambda: _reached(job, warm + TURN), PATIENCE_S):
        raise RuntimeError(f"{job.contender.name} stands still; see {job.nursery.log}")
    return (_reached_at(job, warm + TURN) - _reached_at(job, warm)) / TURN


def _reached_at(job: Job, steps: int) -> float:
    """When the last replica had made so many."""
    return max(
        next(e.at for e in member.commits() if e.data["step"] >= steps - 1)
        for member in _present(job)
    )


def _reached(job: Job, steps: int) -> bool:
    return all(m.events and m.events[-1].data.get("step", 0) >= steps - 1 for m in _present(job))


def _connected(job: Job) -> bool:
    return all(member.connection is not None for member in _present(job))


def healthy_together(
    bench: Bench, both: Contender, rounds: int, model: Model
) -> tuple[list[float], dict[str, Turns]]:
    """As `healthy`, of ours and plain DDP in the same processes."""
    with bench.job(both, model, until=(WARM_UP + rounds) * TURN) as job:
        for turn in range(1, WARM_UP + rounds + 2):  # the last one of DDP ends it
            if not job.wait(partial(_took, job, turn), PATIENCE_S):
                raise RuntimeError(f"{both.name} do not go on; see {job.nursery.log}")
        told = _told_turns(job)[WARM_UP:]
    ddp = [turn.data["ddp"] for turn in told]
    ours = [turn.data["ours"] for turn in told[1:]]
    again = Turns(ddp[1:-1], against(ddp[1:-1], ddp[:-2], ddp[2:]))
    return ddp, {DDP_AGAIN.name: again, OURS.name: Turns(ours, against(ours, ddp[:-1], ddp[1:]))}


def _took(job: Job, turns: int) -> bool:
    return len(_told_turns(job)) >= turns


def _told_turns(job: Job) -> list[Event]:
    return [event for event in job.members[0].events if event.what == "turns"]


# --- loss -----------------------------------------------------------------------------------------


def losses(
    bench: Bench, contender: Contender, model: Model, fault: Fault, wanted: int
) -> list[Loss]:
    """So many faults, each of one replica at a random moment; each is replaced after its own.

    A job that does not come back whole is started anew. Fewer than wanted, if too many jobs do not
    even come to train together when they start.
    """
    found: list[Loss] = []
    false_starts = 0
    while len(found) < wanted and false_starts < FALSE_STARTS:
        with bench.job(contender, model) as job:
            whole = job.wait(lambda: _settled(job, 0.0), PATIENCE_S)
            false_starts += not whole
            while whole and len(found) < wanted:
                loss, whole = _lose(bench, job, fault)
                found.append(loss)
    return found


def _lose(bench: Bench, job: Job, fault: Fault) -> tuple[Loss, bool]:
    """One fault, and whether the job was whole again afterwards."""
    step_s = _step(job)
    job.wait(lambda: False, bench.chance.uniform(0, 1.5 * step_s))
    victim = bench.chance.choice(_present(job))
    survivors = [member for member in _present(job) if member is not victim]
    at = time.monotonic()
    job.strike(victim, fault)
    job.wait(lambda: all(_went_on(s, at) for s in survivors), PATIENCE_S)
    job.strike(victim, KILL)
    alive = [s for s in survivors if not s.ended]
    lived = [s for s in alive if _went_on(s, at)]
    gaps = [g for s in lived if (g := gap([e.at for e in s.commits()], at, _over(s, at)))]
    whole = bool(lived) and len(lived) == len(alive) and _make_whole(job)
    died = sum(s.ended for s in survivors)
    told = [[e for e in s.events if e.at > at] for s in lived]
    loss = Loss(
        step_s=step_s,
        gap_s=max(gaps, default=None) if len(lived) == len(survivors) and not died else None,
        died=died,
        hung=len(alive) - len(lived),
        samples=account(told, GLOBAL_BATCH, SHARD_SIZE),
        words=next((s.last_words for s in survivors if s.ended), ""),
        back=whole,
    )
    return loss, whole


def _went_on(survivor: Member, at: float) -> bool:
    return survivor.ended or len(survivor.commits(at)) >= AFTER


def _over(survivor: Member, at: float) -> float:
    """When the survivor was steady again."""
    return survivor.commits(at)[AFTER - 1].at


def _make_whole(job: Job) -> bool:
    """Replace all that are gone; whether all train together again."""
    job.wait(lambda: False, HEARD_S)
    since = time.monotonic()
    for member in _present(job):
        if member.killed or member.ended:
            job.start(member.replica)
    return job.wait(lambda: _settled(job, since), PATIENCE_S)


def _rejoined(job: Job, newcomer: Member) -> bool:
    return _settled(job, newcomer.started) and len(_shared(newcomer)) >= REJOINED


def _shared(newcomer: Member) -> list[Event]:
    """The committed steps of which it computed a share."""
    return [event for event in newcomer.commits() if event.data["shards"]]


def _settled(job: Job, since: float) -> bool:
    return all(
        sum(e.data["samples"] == GLOBAL_BATCH for e in m.commits(since)) >= SETTLED
        for m in _present(job)
    )


def _present(job: Job) -> list[Member]:
    return list(job.members.values())


def _run_in(member: Member) -> float:
    """When it had made its first steps, in which a job may still be coming together."""
    made = member.commits()
    return made[min(RUN_IN // 4, len(made) - 1)].at


def _step(job: Job) -> float:
    """The median of the last steps that were made by all."""
    last = [e.at for e in _present(job)[0].commits()][-SETTLED:]
    step = median_step(last)
    assert step is not None, "only a job that has settled is asked"  # noqa: S101
    return step


# --- a newcomer -----------------------------------------------------------------------------------


def rejoin(bench: Bench, contender: Contender, state: State) -> Rejoin | None:
    """One newcomer to a job that lost a replica; None if it never got in.

    The loss is at an edge, while nobody is in a collective, so that it says nothing of the gap. It
    comes to a job that has been training for a while: what a contender does once, when a job
    begins, is no part of it.
    """
    trained = state.mb if state.trained else 0.0
    model = replace(TRAFFIC["light"], trained_mb=trained, frozen_mb=state.mb - trained)
    run_in_steps = RUN_IN // 2 if state.trained else RUN_IN
    with bench.job(contender, model, until=run_in_steps) as job:
        if not job.wait(lambda: _connected(job) and _reached(job, run_in_steps), 2 * PATIENCE_S):
            return None
        step_s = _step(job)
        victim = bench.chance.choice(_present(job))
        survivors = [member for member in _present(job) if member is not victim]
        run_in = max(_run_in(member) for member in _present(job))
        # The first one's: what follows somebody's last commit is the loss.
        calm = min(member.commits()[-1].at for member in survivors)
        at = time.monotonic()
        job.strike(victim, KILL)
        job.let(FOR_EVER)
        quiet = at + QUIET_S
        if not job.wait(lambda: all(s.commits(quiet) for s in survivors), PATIENCE_S):
            return None
        newcomer = job.start(victim.replica)
        if not job.wait(lambda: _rejoined(job, newcomer), PATIENCE_S):
            return None
        entered, steady = (_shared(newcomer)[place].at for place in (0, REJOINED - 1))

        def longest(since: float, until: float) -> float:
            gaps = [gap([e.at for e in s.commits()], since, until) for s in survivors]
            return max(found for found in gaps if found is not None)

        return Rejoin(
            step_s=step_s,
            gap_s=longest(newcomer.started, steady),
            calm_s=longest(max(run_in, calm - (steady - newcomer.started)), calm),
            service_s=entered - newcomer.started,
        )
