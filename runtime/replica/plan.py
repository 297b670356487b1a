"""Who computes what: pure functions from survivors' reports to the next epoch's work.

Used by the coordinator and by every member, so it must never import torch or do I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
    dropped: tuple[int, ...] = ()  # shards of step + 1 that nobody is to compute

    def describe(self) -> dict[str, Any]:
        """As the members are told."""
        return {
            "step": self.step,
            "behind": list(self.behind),
            "held": dict(self.held),
            "assign": dict(self.assign),
            "taken_over": list(self.taken_over),
            "dropped": list(self.dropped),
        }


def divide(
    shards: Collection[int], members: Sequence[int], load: Mapping[int, int] | None = None
) -> dict[int, list[int]]:
    """Give each shard to exactly one member: one more to the least loaded, until none is left.

    Each member's shards follow each other, so that what it sums are whole branches of the tree by
    which `reproducible` mode adds them up.
    """
    if not members:
        raise ValueError("no members to divide shards among; wait for a replica to join")
    before = {member: (load or {}).get(member, 0) for member in members}
    count = dict(before)
    for _ in shards:
        count[min(count, key=lambda m: (count[m], m))] += 1
    left = iter(sorted(shards))
    return {m: [next(left) for _ in range(count[m] - before[m])] for m in sorted(members)}


def fixed_shares(shards: int, replicas: int) -> dict[int, list[int]]:
    """Which shards are whose in `drop` mode, whoever lives: an absent replica's are given up."""
    return divide(range(shards), range(replicas))


def take_over(
    reports: Sequence[Report],
    shards: int,
    shares: Mapping[int, Collection[int]] | None = None,
    *,
    added: Collection[int] = (),
) -> Takeover:
    """Plan the rest of the interrupted step so that no shard is summed twice.

    Every shard is summed exactly once, or, where fixed `shares` are given, dropped if its owner is
    gone. A member one commit behind keeps nothing of the next step; it is handed the reduced
    gradient. If two members claim the same shard, the later one must discard all it holds, because
    a gradient cannot be taken out of a sum. Of those that were `added`, for whom nobody left, who
    still lacks steps computes nothing of the first: the others make it as they made the last, and
    need not wait until it is level.
    """
    step = max(report.step for report in reports)
    held: dict[int, list[int]] = {report.replica: [] for report in reports}
    claimed: set[int] = set()
    for report in sorted(reports, key=lambda r: r.replica):
        if report.step == step and claimed.isdisjoint(report.held):
            held[report.replica] = sorted(report.held)
            claimed.update(report.held)
    missing = sorted(set(range(shards)) - claimed)
    behind = tuple(sorted(r.replica for r in reports if r.step < step))
    if shares is not None:
        own = {replica: sorted(set(shares[replica]) & set(missing)) for replica in held}
        computed = {shard for mine in own.values() for shard in mine}
        given_up = tuple(shard for shard in missing if shard not in computed)
        return Takeover(
            step=step, behind=behind, held=held, assign=own, taken_over=(), dropped=given_up
        )
    level = sorted(held.keys() - (set(added) & set(behind)))
    assign: dict[int, list[int]] = {replica: [] for replica in held}
    assign |= divide(missing, level, {replica: len(kept) for replica, kept in held.items()})
    return Takeover(
        step=step,
        behind=behind,
        held=held,
        assign=assign,
        taken_over=tuple(missing) if claimed else (),
    )
