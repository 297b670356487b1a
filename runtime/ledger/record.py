"""What was trained, entered step by step from the vectors that travelled with each gradient.

Nothing is entered from the plan. The ledger has no gaps, and forgets nothing silently: when there
are too many ranges, the oldest are added up.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from runtime.client import Ledger

#: Ranges kept in memory, in snapshots and in checkpoints; older ones are added up.
MAX_RANGES = 1024


@dataclass(frozen=True, kw_only=True)
class Summed:
    """What travelled with a step's gradient: one number for each shard, added over all members."""

    coverage: list[int]  # how many members summed it
    checksums: list[int]  # of its sample ids
    who: list[int]  # the replica's number + 1

    @property
    def computed(self) -> list[int]:
        """Which replica computed each shard; -1 where it was not exactly one."""
        pairs = zip(self.coverage, self.who, strict=True)
        return [who - 1 if count == 1 else -1 for count, who in pairs]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Consecutive committed steps of one epoch of the membership that are alike."""

    step_from: int
    step_to: int
    epoch: int
    per_step: int  # samples applied in each of these steps
    computed: tuple[tuple[int, int, int], ...] = ()  # replica, its first shard, and before which
    lost: tuple[tuple[int, int], ...] = ()
    duplicated: tuple[tuple[int, int], ...] = ()
    dropped: tuple[int, ...] = ()  # shards that policy gave up, in each of these steps
    proof: str = ""  # running hash up to the last of these steps; "" in states of older versions

    @property
    def clean(self) -> bool:
        return not self.lost and not self.duplicated


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is left of the oldest ranges."""

    step_from: int
    step_to: int
    epoch: int  # of the last step
    samples: int
    lost: int  # shards, over all these steps
    duplicated: int
    dropped: int
    proof: str


class SampleLedger:
    """Which samples the committed steps trained on; equal on all members, part of the state."""

    def __init__(self, order: Mapping[str, int]) -> None:
        """`order`: what `Batches.state_dict` says, so that a reader can make the ids anew."""
        self.order = dict(order)
        self.summary: Summary | None = None
        self.ranges: list[Range] = []

    @property
    def step(self) -> int:
        """The last step recorded; -1 for none."""
        last = self._last
        return -1 if last is None else last.step_to

    @property
    def epoch(self) -> int:
        """In which the last step was made; 0 for none."""
        last = self._last
        return 0 if last is None else last.epoch

    def record(
        self, step: int, epoch: int, summed: Summed, shard_size: int, *, drops: bool = False
    ) -> Range:
        """Enter one committed step.

        `drops`: a shard that nobody summed was given up by policy, not lost.
        """
        last = self._last
        if last is not None and step != last.step_to + 1:
            raise ValueError(f"step {step} does not follow {last.step_to}; the ledger has no gaps")
        absent = tuple(k for k, count in enumerate(summed.coverage) if count == 0)
        entry = Range(
            step_from=step,
            step_to=step,
            epoch=epoch,
            per_step=sum(summed.coverage) * shard_size,
            computed=runs(summed.computed),
            lost=() if drops else tuple((step, k) for k in absent),
            duplicated=tuple((step, k) for k, count in enumerate(summed.coverage) if count > 1),
            dropped=absent if drops else (),
            proof=proof_of("" if last is None else last.proof, step, summed),
        )
        if isinstance(last, Range) and _alike(last, entry):
            self.ranges[-1] = replace(last, step_to=step, proof=entry.proof)
        else:
            self.ranges.append(entry)
        while len(self.ranges) > MAX_RANGES:
            self.summary = added_up(self.summary, self.ranges.pop(0))
        return entry

    def since(self, step: int = -1, epoch: int = -1) -> list[Ledger]:
        """What to tell a control plane that holds everything up to `step`, made in `epoch`.

        Of a later epoch that is all, for a job that resumed makes steps anew that are held there.
        """
        told = []
        # On the sender's thread. In this order, what is added up meanwhile is told twice.
        ranges, summary = list(self.ranges), self.summary
        if summary is not None and (summary.step_to > step or summary.epoch > epoch):
            told.append(
                Ledger(
                    step_from=summary.step_from,
                    step_to=summary.step_to,
                    epoch=summary.epoch,
                    samples=summary.samples,
                    merged=[summary.lost, summary.duplicated, summary.dropped],
                    proof=summary.proof,
                    order=self.order,
                )
            )
        for found in ranges:
            start = found.step_from if found.epoch > epoch else max(found.step_from, step + 1)
            if found.step_to < start:
                continue
            told.append(
                Ledger(
                    step_from=start,
                    step_to=found.step_to,
                    epoch=found.epoch,
                    samples=found.per_step * (found.step_to - start + 1),
                    computed=[list(run) for run in found.computed],
                    lost=[list(pair) for pair in found.lost],
                    duplicated=[list(pair) for pair in found.duplicated],
                    dropped=list(found.dropped),
                    proof=found.proof,
                    order=self.order,
                )
            )
        return told

    def state_dict(self) -> dict[str, Any]:
        return {
            "summary": None if self.summary is None else list(vars(self.summary).values()),
            "ranges": [_as_lists(vars(found).values()) for found in self.ranges],
        }

    def load_state_dict(self, state: dict[str, Any] | Sequence[Any]) -> None:
        """Also reads the layout before this one: a list of ranges without proof."""
        if not isinstance(state, dict):
            self.summary = None
            self.ranges = [_range(*[*entry[:4], (), *entry[4:]]) for entry in state]
            return
        names = Summary.__dataclass_fields__
        given = state["summary"]
        self.summary = None if given is None else Summary(**dict(zip(names, given, strict=True)))
        self.ranges = [_range(*entry) for entry in state["ranges"]]

    @property
    def _last(self) -> Range | Summary | None:
        return self.ranges[-1] if self.ranges else self.summary


def proof_of(before: str, step: int, summed: Summed) -> str:
    """The running hash after a step: xxh3-64 of the one before it and of what travelled."""
    numbers = [*summed.coverage, *summed.checksums, *summed.who]
    packed = struct.pack(f"<q{len(numbers)}I", step, *numbers)
    return xxhash.xxh3_64_hexdigest(before.encode() + packed)


def runs(computed: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Neighbouring shards of one replica as [replica, first, end]; -1 belongs to nobody."""
    found: list[tuple[int, int, int]] = []
    for shard, replica in enumerate(computed):
        if found and found[-1][0] == replica and found[-1][2] == shard:
            found[-1] = (replica, found[-1][1], shard + 1)
        elif replica >= 0:
            found.append((replica, shard, shard + 1))
    return tuple(found)


def added_up(summary: Summary | None, oldest: Range) -> Summary:
    """Return the summary of all steps up to the end of `oldest`.

    `summary` is that of the steps before, None if there are none. The numbers of lost, duplicated
    and dropped shards are totals over these steps; `samples` is a total too.
    """
    steps = oldest.step_to - oldest.step_from + 1
    return Summary(
        step_from=oldest.step_from if summary is None else summary.step_from,
        step_to=oldest.step_to,
        epoch=oldest.epoch,
        samples=oldest.per_step * steps + (summary.samples if summary else 0),
        lost=len(oldest.lost) + (summary.lost if summary else 0),
        duplicated=len(oldest.duplicated) + (summary.duplicated if summary else 0),
        dropped=len(oldest.dropped) * steps + (summary.dropped if summary else 0),
        proof=oldest.proof,
    )


def _alike(last: Range, entry: Range) -> bool:
    return (
        last.clean
        and entry.clean
        and (last.epoch, last.per_step, last.computed, last.dropped)
        == (entry.epoch, entry.per_step, entry.computed, entry.dropped)
    )


def _range(
    step_from: int,
    step_to: int,
    epoch: int,
    per_step: int,
    computed: Sequence[Sequence[int]],
    lost: Sequence[Sequence[int]],
    duplicated: Sequence[Sequence[int]],
    dropped: Sequence[int],
    proof: str = "",
) -> Range:
    return Range(
        step_from=step_from,
        step_to=step_to,
        epoch=epoch,
        per_step=per_step,
        computed=tuple((replica, first, end) for replica, first, end in computed),
        lost=tuple((step, shard) for step, shard in lost),
        duplicated=tuple((step, shard) for step, shard in duplicated),
        dropped=tuple(dropped),
        proof=proof,
    )


def _as_lists(value: Any) -> Any:
    if isinstance(value, int | str):
        return value
    return [_as_lists(item) for item in value]
