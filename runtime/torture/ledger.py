"""Whether each sample of each step was trained on once, from what the ranks committed.

Pure functions of the events. Trusts no rank's own summary: it counts the coverage that travelled
with each reduced gradient, and compares what the ranks hold at the end with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.ledger.check import check
from runtime.replica.plan import fixed_shares
from runtime.torture.run_record import Restart
from runtime.torture.watch import Event


@dataclass
class Audit:
    """Samples, counted over all committed steps."""

    lost: int = 0
    duplicated: int = 0
    dropped: int = 0
    problems: list[str] = field(default_factory=list)


def counted(
    events: Mapping[str, Sequence[Event]], restarts: Sequence[Restart]
) -> dict[str, list[Event]]:
    """Without the steps that a restart went back behind: nothing of them is left, and they were
    made again."""
    left = {placement: [*own] for placement, own in events.items()}
    for restart in restarts:
        for placement in restart.ended:
            left[placement] = [
                event
                for event in left[placement]
                if event.what != "commit" or int(event.data["step"]) <= restart.began
            ]
    return left


def audit(
    events: Mapping[str, Sequence[Event]], steps: int, *, drops_of: int | None = None
) -> Audit:
    """Compare what all placements wrote down with a run of so many steps.

    `drops_of`: of how many replicas the absent ones' shards are given up by policy; None if others
    take them over.
    """
    found = Audit()
    agreed = _agreed(events, found)
    shard_size = _shard_size(agreed)
    shards = max((len(record["coverage"]) for record in agreed.values()), default=0)
    if missing := [step for step in range(steps) if step not in agreed]:
        found.lost += len(missing) * shards * shard_size
        found.problems.append(
            f"{len(missing)} steps, from {missing[0]} to {missing[-1]}, were never committed"
        )
    for step in sorted(agreed):
        coverage = agreed[step]["coverage"]
        given_up = _given_up(agreed[step], drops_of)
        absent = {shard for shard, count in enumerate(coverage) if count == 0}
        found.dropped += len(absent & given_up) * shard_size
        found.lost += len(absent - given_up) * shard_size
        found.duplicated += sum(count - 1 for count in coverage if count > 1) * shard_size
        if absent - given_up or any(count > 1 for count in coverage):
            found.problems.append(f"step {step} summed its shards {coverage} times")
        if agreed[step]["samples"] != sum(coverage) * shard_size:
            found.problems.append(f"step {step} trained on {agreed[step]['samples']} samples")
    if beyond := [step for step in agreed if step >= steps > 0]:
        found.problems.append(f"steps {beyond} were committed, beyond the end at {steps}")
    for placement, own in events.items():
        _follow(placement, own, shards * shard_size, found)
    _compare_held(events, steps, found)
    return found


def _given_up(record: Mapping[str, Any], drops_of: int | None) -> set[int]:
    """The shards of this step that are those of replicas which were no members of it."""
    if drops_of is None:
        return set()
    shares = fixed_shares(len(record["coverage"]), drops_of)
    return {shard for one in shares.keys() - record["members"] for shard in shares[one]}


def _agreed(events: Mapping[str, Sequence[Event]], found: Audit) -> dict[int, dict[str, Any]]:
    """By step, what was committed; all who committed it must have seen the same.

    Who alone had a step's sum, and died before anybody asked for it, leaves the others to make that
    step anew in the next epoch: then theirs is the one that counts.
    """
    agreed: dict[int, dict[str, Any]] = {}
    for own in events.values():
        for event in own:
            if event.what == "commit":
                known = agreed.setdefault(int(event.data["step"]), event.data)
                if event.data["epoch"] > known["epoch"]:
                    agreed[int(event.data["step"])] = event.data
    for own in events.values():
        for place, event in enumerate(own):
            if event.what != "commit":
                continue
            step = int(event.data["step"])
            known = agreed[step]
            anew = event.data["epoch"] < known["epoch"] and _was_left(own[place + 1 :])
            for key in ("coverage", "computed", "samples", "loss", "grad_norm"):
                theirs, ours = known.get(key), event.data.get(key)
                if theirs != ours and not anew:
                    found.problems.append(
                        f"step {step}: {event.placement} has {key} {ours}, another replica {theirs}"
                    )
    return agreed


def _was_left(later: Sequence[Event]) -> bool:
    """Whether what came before these events led to nothing: whoever was there died, or took the
    others' state anew."""
    for event in later:
        if event.what in ("commit", "ended"):
            return False
        if event.what == "phase" and event.data["phase"] == "sync":
            return True
    return True


def _shard_size(agreed: Mapping[int, dict[str, Any]]) -> int:
    """How many samples a shard has: what most steps say."""
    for record in agreed.values():
        summed = sum(record["coverage"])
        if summed and record["samples"] % summed == 0:
            return int(record["samples"] // summed)
    return 0


def _follow(placement: str, own: Sequence[Event], per_step: int, found: Audit) -> None:
    """One process makes one step after another; only who takes the state anew may jump ahead."""
    last: int | None = None
    synced = False
    for event in own:
        if event.what == "phase" and event.data["phase"] == "sync":
            synced = True
        if event.what != "commit":
            continue
        step = int(event.data["step"])
        if last is not None and step <= last:
            found.duplicated += per_step
            found.problems.append(f"{placement} applied step {step} after step {last}")
        elif last is not None and step > last + 1 and not synced:
            found.lost += (step - last - 1) * per_step
            found.problems.append(f"{placement} went from step {last} to step {step}")
        last, synced = step, False


def _compare_held(events: Mapping[str, Sequence[Event]], steps: int, found: Audit) -> None:
    """The ledger that each replica holds at the end is whole, and the same everywhere."""
    ends = {p: e.data for p, own in events.items() for e in own if e.what == "ended"}
    # Who was sent away has one too, of the steps until then.
    held = {p: end["ledger"] for p, end in ends.items() if end["step"] + 1 == steps}
    told: list[dict[str, Any]] = next(iter(held.values()), [])
    if any(entry.get("order") for entry in told):  # else its samples cannot be made anew
        found.problems += [f"the ledger, made anew: {problem}" for problem in check(told).problems]
    for placement, ledger in held.items():
        if ledger != next(iter(held.values())):
            found.problems.append(f"the ledger that {placement} holds differs from the others'")
        reached = 0
        for entry in ledger:
            if entry["lost"] or entry["duplicated"]:
                found.problems.append(f"the ledger that {placement} holds says: {entry}")
            if entry["step_from"] != reached and reached:
                found.problems.append(
                    f"the ledger that {placement} holds jumps from step {reached - 1} "
                    f"to {entry['step_from']}"
                )
            reached = entry["step_to"] + 1
        if reached != steps:
            found.problems.append(
                f"the ledger that {placement} holds ends before step {reached}, not {steps}"
            )
