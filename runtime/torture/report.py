"""The judgement of a run: a pure function from what was seen to what held, and how it is shown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from runtime.torture.kinds import AWAY, KINDS
from runtime.torture.ledger import Audit, audit
from runtime.torture.measure import Figures
from runtime.torture.run_record import Death, Restart
from runtime.torture.storage import broken_claims, broken_promises
from runtime.torture.watch import Event

#: Between two commits, beyond a step: then they wait for something that fails for longer.
STALL_S = 2.0
#: How far the loss of a step may be from that of the undisturbed run, of that, where the order of
#: summation is another: float32 rounds at 6e-8, and training makes more of each difference.
CLOSE = 0.01


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one run left behind."""

    events: Mapping[str, Sequence[Event]]  # by placement; see `ledger.counted`
    present: Sequence[str]  # the placements that were there at the end
    steps: int | None  # None: it did not get so far as to know
    deaths: Sequence[Death] = ()
    problems: Sequence[str] = ()  # what the runner itself found wrong
    step_s: float | None = None
    restarts: Sequence[Restart] = ()  # of the whole job


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `--json` prints."""

    ok: bool
    mode: str
    seed: int
    replicas: int
    steps: int | None
    digest_equal: bool | None  # None: not a claim of this mode
    digest: str | None  # of the disturbed run; None if its replicas do not agree
    ledger: dict[str, int]
    survivor_deaths: int
    failures: list[dict[str, Any]]
    step_s: float | None  # median, of the disturbed run
    undisturbed_step_s: float | None
    final_loss: list[float | None]  # disturbed, undisturbed
    problems: list[str]
    folder: str | None = None  # where the logs are, if they were kept


def _differed(seen: Seen) -> list[str]:
    """Whether replicas held different states at any time, in words: whichever errs may be replaced
    before the end."""
    told = [
        event
        for event in chain.from_iterable(seen.events.values())
        if event.what == "trouble" and event.data["kind"] == "diverged"
    ]
    text = f"replicas that hold different states were told of {len(told)} times; their logs say "
    return [text + "which"] if told else []


def _not_put_back(seen: Seen) -> list[str]:
    """Who went on with another state than the one that had been saved, in words."""
    told = [
        event.placement
        for event in chain.from_iterable(seen.events.values())
        if event.what == "trouble" and event.data["kind"] == "checkpoint_not_restored"
    ]
    return [f"{sorted({*told})} loaded a state that is not the one that was saved"] if told else []


def _claims_of_any_run(seen: Seen, drops_of: int | None) -> tuple[Audit, set[str], list[str]]:
    """What became of the samples, the digests at the end, and what should not have been."""
    ledger = audit(seen.events, seen.steps or 0, drops_of=drops_of)
    digests, apart = _digests(seen)
    deaths = [_obituary(death) for death in seen.deaths]
    return ledger, digests, [
        *seen.problems, *_shortened(ledger.problems), *deaths, *_differed(seen),
        *_not_put_back(seen), *apart,
    ]  # fmt: skip


def _claims_of_faults(seen: Seen, figures: Sequence[Figures]) -> list[str]:
    """What should not have become of a run after what it was struck with."""
    found: list[str] = []
    for f in figures:
        where = f"fault {f.fault} ({f.kind} in {f.phase})"
        if not f.recovered:
            found.append(f"{where}: the replicas did not come back")
        if f.given_up:
            found.append(
                f"{where}: replicas {f.given_up} were given up, and nothing had ended them"
            )
        found += [f"{where}: {broken}" for broken in _beside(f, seen.step_s or 0.0)]
    return found + [broken for one in seen.restarts for broken in broken_claims(one)]


def _lost(undisturbed: Seen) -> list[str]:
    events = chain.from_iterable(undisturbed.events.values())
    lost = sorted({event.placement for event in events if event.what == "lost"})
    return [f"{lost} gave replicas up, and nothing had ended them"] if lost else []


def judge(
    disturbed: Seen,
    undisturbed: Seen | None,
    figures: Sequence[Figures],
    *,
    mode: str,
    seed: int,
    replicas: int,
) -> Report:
    """Hold what was seen against every claim. `undisturbed` is None if it was not run."""
    drops_of = replicas if mode == "drop" else None
    ledger, digests, problems = _claims_of_any_run(disturbed, drops_of)
    problems += _claims_of_faults(disturbed, figures)
    if disturbed.steps is None:
        problems.append("the run did not reach its end")
    equal: bool | None = None
    if undisturbed is None:
        problems.append("there is no undisturbed run to compare with")
    else:
        _, expected, alone = _claims_of_any_run(undisturbed, drops_of)
        problems += [f"the undisturbed run: {problem}" for problem in alone + _lost(undisturbed)]
        if mode == "reproducible":
            equal = len(digests) == 1 and digests == expected
            if not equal and expected:
                problems.append(_difference(disturbed, undisturbed))
        elif mode == "cover":
            problems += _shortened(_far_apart(disturbed, undisturbed))
    survivor_deaths = sum(not death.targeted for death in disturbed.deaths)
    whole = not ledger.lost and not ledger.duplicated
    return Report(
        ok=not problems and whole and not survivor_deaths and equal is not False,
        mode=mode,
        seed=seed,
        replicas=replicas,
        steps=disturbed.steps,
        digest_equal=equal,
        digest=next(iter(digests)) if len(digests) == 1 else None,
        ledger={
            "lost": ledger.lost,
            "duplicated": ledger.duplicated,
            "dropped": ledger.dropped,
        },
        survivor_deaths=survivor_deaths,
        failures=[_rounded(asdict(one)) for one in figures],
        step_s=_round(disturbed.step_s),
        undisturbed_step_s=_round(undisturbed.step_s if undisturbed else None),
        final_loss=[_final_loss(disturbed), _final_loss(undisturbed) if undisturbed else None],
        problems=problems,
    )


def _beside(figures: Figures, step_s: float) -> list[str]:
    """What a disk or a holder that fails should not have done to a job with such steps, in
    words."""
    target = KINDS[figures.kind].target
    if target not in ("disk", "holder"):
        return []
    found: list[str] = []
    if target == "disk":
        found += broken_promises(figures.kind, figures.phase, figures.alarms)
    if figures.gap_s is not None and figures.gap_s > STALL_S + step_s:
        found.append(f"the training waited for the {target}, {_milliseconds(figures.gap_s)} ms")
    return found


def line(figures: Figures) -> str:
    """One fault in one line."""
    who = " ".join(map(str, figures.replicas)) or "-"
    cells = [
        f"{figures.fault:>4}{'+' if figures.hasty else ' '} {figures.kind:<11}",
        f"{figures.phase:<9} {figures.ending:<8} {who:<6}",
        f"{figures.step:>6}",
        *(
            f"{_milliseconds(value):>8}"
            for value in (
                figures.detect_s,
                figures.regroup_s,
                figures.gap_s,
                figures.rejoin_s,
                figures.rejoin_gap_s,
                figures.load_s,
                figures.back_s,
            )
        ),
        f"{'-' if figures.again is None else figures.again:>6}",
    ]
    return " ".join(cells) + ("" if figures.recovered else "  NOT RECOVERED")


HEADING = (
    "   #  kind        phase     ending   who      step   detect  regroup      gap   rejoin"
    "    entry     load     back  again   (ms)"
)


def text(report: Report) -> str:
    """The end of the report, for people."""
    ledger = report.ledger
    hasty = any(failure["hasty"] for failure in report.failures)
    equal = {True: "equal", False: "DIFFERENT", None: "not compared in this mode"}
    told = [
        "",
        f"steps           {report.steps}, {_milliseconds(report.step_s)} ms each at the median"
        f" ({_milliseconds(report.undisturbed_step_s)} ms undisturbed)",
        f"digest          {equal[report.digest_equal]}",
        f"samples         {ledger['lost']} lost, {ledger['duplicated']} duplicated,"
        f" {ledger['dropped']} dropped",
        f"survivors died  {report.survivor_deaths}",
        *_gaps(report.failures),
        *(["+               made while the victims of the fault before were still away"] * hasty),
        *(f"problem         {problem}" for problem in report.problems),
        f"seed            {report.seed}",
        *([f"logs            {report.folder}"] if report.folder else []),
        f"every claim held: {'yes' if report.ok else 'NO'}",
    ]
    return "\n".join(told)


def _gaps(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """The gap of each kind, median and worst; without a coordinator it is another matter."""
    gaps: dict[str, list[float]] = {}
    for failure in failures:
        where = " while the coordinator is dead" if failure["phase"] == AWAY else ""
        if failure["gap_s"] is not None:
            gaps.setdefault(failure["kind"] + where, []).append(failure["gap_s"])
    return [
        f"gap             {kind}: {_milliseconds(statistics.median(found))} ms at the median, "
        f"{_milliseconds(max(found))} ms at worst, of {len(found)}"
        for kind, found in gaps.items()
    ]


def _digests(seen: Seen) -> tuple[set[str], list[str]]:
    """Of the replicas' final states; and which replica has none, or which differ, in words."""
    found: dict[str, str] = {}
    problems: list[str] = []
    for placement in seen.present:
        ends = [event for event in seen.events.get(placement, ()) if event.what == "ended"]
        if not ends:
            problems.append(f"{placement} did not come to the end")
        elif ends[-1].data["step"] + 1 != seen.steps:
            problems.append(
                f"{placement} ended after {ends[-1].data['step'] + 1} steps, not {seen.steps}"
            )
        if ends:
            parts = [one.data for one in seen.events[placement] if one.what == "part"]
            parts.sort(key=lambda part: int(part["rank"]))
            found[placement] = "-".join([ends[-1].data["digest"], *(p["digest"] for p in parts)])
    if len(set(found.values())) > 1:
        problems.append(f"the replicas end with different states: {found}")
    return set(found.values()), problems


def _difference(disturbed: Seen, undisturbed: Seen) -> str:
    """Where the two runs parted, as far as their losses tell."""
    ours, theirs = _trajectory(disturbed), _trajectory(undisturbed)
    parted = [step for step in sorted(ours) if step in theirs and ours[step] != theirs[step]]
    where = (
        f"they part at step {parted[0]}: loss and norm {ours[parted[0]]}, "
        f"undisturbed {theirs[parted[0]]}"
        if parted
        else "all their losses are the same"
    )
    return f"the digest is not that of the undisturbed run; {where}"


def _far_apart(disturbed: Seen, undisturbed: Seen) -> list[str]:
    """The steps whose loss is not close to that of the undisturbed run."""
    ours, theirs = _trajectory(disturbed), _trajectory(undisturbed)
    return [
        f"step {step}: loss {ours[step][0]}, undisturbed {theirs[step][0]}"
        for step in sorted(ours.keys() & theirs.keys())
        if not math.isclose(ours[step][0], theirs[step][0], rel_tol=CLOSE)
    ]


def _trajectory(seen: Seen) -> dict[int, tuple[float, float]]:
    return {
        int(event.data["step"]): (event.data["loss"], event.data["grad_norm"])
        for own in seen.events.values()
        for event in own
        if event.what == "commit"
    }


def _final_loss(seen: Seen) -> float | None:
    trajectory = _trajectory(seen)
    return trajectory[max(trajectory)][0] if trajectory else None


def _obituary(death: Death) -> str:
    whose = "struck by a fault that ends no process" if death.targeted else "untouched"
    return f"replica {death.replica} ({death.placement}), {whose}, died with {death.code}"


def _shortened(problems: Sequence[str], most: int = 12) -> list[str]:
    left = len(problems) - most
    return [*problems[:most], *([f"and {left} more of this sort"] if left > 0 else [])]


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"
