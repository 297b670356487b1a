"""Who computes what: pure functions from survivors' reports to the next epoch's work.

Used by the coordinator and by every member, so it must never import torch or do I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Report:
    """How far one member got when its epoch ended."""

    replica: int
    step: int  # last committed step; -1 before the first
    held: tuple[int, ...] = ()  # shards of step + 1 whose gradient it has summed


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """What the members of a new epoch do first, to finish the step that was under way."""

    step: int  # the step that all hold, or will hold once the late ones were handed it
    behind: tuple[int, ...]  # replicas that must be handed the reduced gradient of `step`
    held: Mapping[int, list[int]]  # shards of step + 1 that each replica keeps
    assign: Mapping[int, list[int]]  # shards of step + 1 that each replica still computes
    taken_over: tuple[int, ...]  # shards that nobody held, when somebody held others


def divide(
    shards: Collection[int], members: Sequence[int], load: Mapping[int, int] | None = None
) -> dict[int, list[int]]:
    """Give each shard to exactly one member: the least loaded, the lowest number on a tie."""
    if not members:
        raise ValueError("no members to divide shards among; wait for a replica to join")
    count = {member: (load or {}).get(member, 0) for member in members}
    given: dict[int, list[int]] = {member: [] for member in members}
    for shard in sorted(shards):
        member = min(count, key=lambda m: (count[m], m))
        given[member].append(shard)
        count[member] += 1
    return given


def take_over(reports: Sequence[Report], shards: int) -> Takeover:
    """Plan the rest of the interrupted step so that every shard is summed exactly once.

    A member one commit behind keeps nothing of the next step; it is handed the reduced gradient.
    If two members claim the same shard, the later one must discard all it holds, because a
    gradient cannot be taken out of a sum.
    """
    step = max(report.step for report in reports)
    held: dict[int, list[int]] = {report.replica: [] for report in reports}
    claimed: set[int] = set()
    for report in sorted(reports, key=lambda r: r.replica):
        if report.step == step and claimed.isdisjoint(report.held):
            held[report.replica] = sorted(report.held)
            claimed.update(report.held)
    missing = sorted(set(range(shards)) - claimed)
    load = {replica: len(kept) for replica, kept in held.items()}
    return Takeover(
        step=step,
        behind=tuple(sorted(r.replica for r in reports if r.step < step)),
        held=held,
        assign=divide(missing, sorted(held), load),
        taken_over=tuple(missing) if claimed else (),
    )
