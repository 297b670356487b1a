"""How long each fault took, from what the ranks wrote down: pure functions of the events.

All times are seconds of the monotonic clock, which is one for all processes of a machine.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from runtime.torture.kinds import KINDS
from runtime.torture.run_record import Restart, RunRecord
from runtime.torture.watch import Event, Watch


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One fault in numbers; None where there is nothing to measure."""

    fault: int
    kind: str
    phase: str
    #: in which its victims' training was when they were struck, and when the blow had fallen; of
    #: those who strike themselves
    landed: list[str]
    ending: str
    hasty: bool  # made while the victims of the fault before it were still away
    replicas: list[int]  # harmed
    step: int  # the newest committed when it was ordered
    detect_s: float | None  # first blow -> a survivor hears that a victim is lost
    regroup_s: float | None  # first blow -> the survivors are in an epoch without the victims
    gap_s: float | None  # longest time between two commits of a survivor, across the fault
    rejoin_s: float | None  # its start, or the blow if it lived -> the last victim's first commit
    rejoin_gap_s: float | None  # longest time between two commits of a survivor meanwhile
    load_s: float | None  # a whole job that was killed: its slowest load
    back_s: float | None  # blow -> its first commit
    again: int | None  # steps that it made a second time
    given_up: list[int]  # replicas lost though no fault ended them or cut them off
    alarms: dict[str, int]  # told to engineers until all was well, by kind and tier: how often
    recovered: bool


def measure(
    made: RunRecord, watch: Watch, started: dict[str, float], overlapping: Iterable[RunRecord] = ()
) -> Figures:
    """The figures of one fault. `started`: when the process of each placement was.

    What a replica passed through that another fault harmed meanwhile says nothing of this one.
    """
    fault = made.fault
    first = min(made.struck, default=float("inf"))  # without a blow there is nothing to measure
    beside = [*overlapping]
    harmed = made.hurt.union(*(other.hurt for other in beside))
    others = [p for p in watch.events if p not in harmed and _was_member(p, watch, first)]
    until = made.back_at or float("inf")
    lost = [
        event.at
        for event in _of(watch, "lost", others, first)
        if event.data["replica"] in fault.victims and event.at < until
    ]
    grants = _first_grants(_of(watch, "granted", others, first), made.gone, until)
    breaks = KINDS[fault.kind].breaks or fault.first is not None
    regrouped = max(grants) if grants and breaks else None
    last_blow = max(made.struck, default=first)
    eased = max(regrouped or 0.0, made.over_at, last_blow + fault.seconds * (not breaks))
    return Figures(
        fault=fault.number,
        kind=fault.kind,
        phase=fault.phase,
        landed=_landed(fault.number, watch),
        ending=fault.ending,
        hasty=fault.hasty,
        replicas=list(fault.victims),
        step=made.step,
        detect_s=_since(first, min(lost, default=None)),
        regroup_s=_since(first, regrouped),
        gap_s=longest_gap(watch, others, first, eased),
        given_up=_given_up(made, beside, _of(watch, "lost", others, first), until),
        alarms=_alarms(watch, first, until),
        recovered=made.back_at > 0,
        **_resumed(made.restart, watch, first, until),
        **_rejoin(made, watch, started, others, until),
    )


def _landed(fault: int, watch: Watch) -> list[str]:
    told = [event.data for event in (*watch.find("struck"), *watch.find("landed"))]
    return sorted({one["phase"] for one in told if one["fault"] == fault and one["phase"]})


def _given_up(
    made: RunRecord, beside: Iterable[RunRecord], lost: Iterable[Event], until: float
) -> list[int]:
    """Whom survivors lost though nothing ended or cut them off."""
    kind = KINDS[made.fault.kind]
    struck = made.hurt if kind.breaks or kind.drops else made.gone
    ended = struck.union(*(other.gone | other.hurt for other in beside))
    found = [e for e in lost if e.at < until and e.data["whose"] not in ended]
    return sorted({int(event.data["replica"]) for event in found})


def longest_gap(
    watch: Watch, placements: Collection[str], since: float, until: float
) -> float | None:
    """The longest time between two commits of one placement that touches the given span."""
    found = []
    for placement in placements:
        times = [event.at for event in watch.events[placement] if event.what == "commit"]
        found += [b - a for a, b in pairwise(times) if b > since and a < until]
    return max(found, default=None)


def median_step(watch: Watch) -> float | None:
    """The median time between two commits, over all placements and the whole run."""
    found: list[float] = []
    for events in watch.events.values():
        found += [b - a for a, b in pairwise([e.at for e in events if e.what == "commit"])]
    return statistics.median(found) if found else None


def _of(watch: Watch, what: str, placements: Sequence[str], since: float) -> list[Event]:
    """What these passed through; nothing if there are none, as after the death of a whole job."""
    return watch.find(what, *placements, since=since) if placements else []


def _was_member(placement: str, watch: Watch, before: float) -> bool:
    return any(e.what == "commit" and e.at < before for e in watch.events[placement])


def _rejoin(
    made: RunRecord, watch: Watch, started: dict[str, float], others: Sequence[str], until: float
) -> dict[str, Any]:
    """For the newcomer that took longest: since its start, and while it took the state over."""
    blow = min(made.struck, default=float("inf"))
    took: list[float] = []
    gaps: list[float] = []
    for placement in made.returning:
        syncs = [
            event.at
            for event in watch.find("phase", placement, since=blow)
            if event.data["phase"] == "sync"
        ]
        entered = [
            event.at
            for event in watch.find("commit", placement, since=max(syncs, default=float("inf")))
            if event.at < until
        ]
        if not entered:
            continue
        took.append(entered[0] - max(started[placement], blow))
        gap = longest_gap(watch, others, max(syncs), entered[0])
        gaps += [gap] if gap is not None else []
    return {"rejoin_s": max(took, default=None), "rejoin_gap_s": max(gaps, default=None)}


def _resumed(restart: Restart | None, watch: Watch, first: float, until: float) -> dict[str, Any]:
    """For a whole job that was killed."""
    if restart is None:
        return {"load_s": None, "back_s": None, "again": None}
    loads = [e.data["seconds"] for e in watch.find("loaded", since=first) if e.at < until]
    commits = [e.at for e in watch.find("commit", since=first) if e.placement not in restart.ended]
    return {
        "load_s": max(loads, default=None),
        "back_s": _since(first, min(commits, default=None)),
        "again": restart.reached - restart.began,
    }


def _alarms(watch: Watch, first: float, until: float) -> dict[str, int]:
    told = [event.data for event in watch.find("trouble", since=first) if event.at < until]
    return dict(Counter(f"{one['kind']} {one['subject']}".strip() for one in told))


def _first_grants(grants: Iterable[Event], gone: Collection[str], until: float) -> list[float]:
    """When each survivor entered the first epoch without those that are gone."""
    found: dict[str, float] = {}
    for event in grants:
        if event.at < until and set(gone).isdisjoint(event.data["members"].values()):
            found.setdefault(event.placement, event.at)
    return list(found.values())


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else end - start
