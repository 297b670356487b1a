"""Which samples a step trains on, and the proof that it did: logical shards and the ledger.

A step is a fixed list of shards, whoever computes them. Pure Python, deterministic from a seed; it
must never depend on which replicas are alive.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from runtime.client import Ledger

#: Checksums stay below this, so that a float32 carries them exactly.
CHECKSUM_MODULUS = 1 << 20
#: Ranges kept in memory, in snapshots and in checkpoints; the oldest go first.
MAX_RANGES = 1024


@dataclass(frozen=True)
class Shard:
    """One slice of one step's global batch."""

    step: int
    index: int
    ids: tuple[int, ...]


class Batches:
    """The data of every step, as ids: `shards` times `shard_size` samples of a seeded order.

    One epoch visits each id at most once; the remainder that fills no whole step is left out and
    the next epoch is permuted anew.
    """

    def __init__(
        self,
        samples: int,
        *,
        shards: int = 12,
        shard_size: int = 1,
        seed: int = 0,
        tokens_per_sample: int = 1,
    ) -> None:
        self.samples = samples
        self.shards = shards
        self.shard_size = shard_size
        self.seed = seed
        self.tokens_per_sample = tokens_per_sample
        self.global_batch = shards * shard_size
        self.steps_per_epoch = samples // self.global_batch
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"{samples} samples do not fill one global batch of {self.global_batch}; "
                "give more samples or a smaller batch"
            )

    def shard(self, step: int, index: int) -> Shard:
        """The samples of one shard; the same on every replica and after every restart."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch + index * self.shard_size
        order = permutation(self.seed, epoch, self.samples)
        return Shard(step, index, tuple(order[start : start + self.shard_size]))

    def state_dict(self) -> dict[str, int]:
        """What must agree for a resume to mean the same data."""
        return {
            "samples": self.samples,
            "shards": self.shards,
            "shard_size": self.shard_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state != self.state_dict():
            raise ValueError(
                f"the checkpoint's data order is {state}, this run's is {self.state_dict()}; "
                "resume with the same data, seed and batch, or start a new job"
            )


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, samples: int) -> list[int]:
    order = list(range(samples))
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311 - order, not secrecy
    return order


def checksum(ids: Iterable[int]) -> int:
    """A small exact number that changes when the ids or their order change."""
    total = 1
    for sample in ids:
        total = (total * 31 + sample + 1) % CHECKSUM_MODULUS
    return total


@dataclass(frozen=True, kw_only=True)
class Range:
    """Consecutive committed steps of one epoch that are alike."""

    step_from: int
    step_to: int
    epoch: int
    per_step: int  # samples applied in each of these steps
    lost: tuple[tuple[int, int], ...] = ()
    duplicated: tuple[tuple[int, int], ...] = ()
    dropped: tuple[int, ...] = ()  # shards that policy gave up, in each of these steps

    @property
    def clean(self) -> bool:
        return not self.lost and not self.duplicated


class SampleLedger:
    """Which samples the committed steps trained on; equal on all members, part of the state."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []

    @property
    def step(self) -> int:
        """The last step recorded; -1 for none."""
        return self.ranges[-1].step_to if self.ranges else -1

    def record(
        self, step: int, epoch: int, coverage: list[int], shard_size: int, *, drops: bool = False
    ) -> Range:
        """Enter one committed step, from the vector that travelled with its gradient.

        `drops`: a shard that nobody summed was given up by policy, not lost.
        """
        if self.ranges and step != self.step + 1:
            raise ValueError(f"step {step} does not follow {self.step}; the ledger has no gaps")
        absent = tuple(k for k, count in enumerate(coverage) if count == 0)
        entry = Range(
            step_from=step,
            step_to=step,
            epoch=epoch,
            per_step=sum(coverage) * shard_size,
            lost=() if drops else tuple((step, k) for k in absent),
            dropped=absent if drops else (),
            duplicated=tuple((step, k) for k, count in enumerate(coverage) if count > 1),
        )
        last = self.ranges[-1] if self.ranges else None
        if (
            last is not None
            and last.clean
            and entry.clean
            and (last.epoch, last.per_step, last.dropped) == (epoch, entry.per_step, entry.dropped)
        ):
            self.ranges[-1] = replace(last, step_to=step)
        else:
            self.ranges.append(entry)
        del self.ranges[:-MAX_RANGES]
        return entry

    def since(self, step: int) -> list[Ledger]:
        """What to tell a control plane that holds everything up to `step`."""
        told = []
        for found in list(self.ranges):
            if found.step_to <= step:
                continue
            start = max(found.step_from, step + 1)
            told.append(
                Ledger(
                    step_from=start,
                    step_to=found.step_to,
                    epoch=found.epoch,
                    samples=found.per_step * (found.step_to - start + 1),
                    lost=[list(pair) for pair in found.lost],
                    duplicated=[list(pair) for pair in found.duplicated],
                    dropped=list(found.dropped),
                )
            )
        return told

    def state_dict(self) -> list[Any]:
        return [
            [r.step_from, r.step_to, r.epoch, r.per_step, r.lost, r.duplicated, r.dropped]
            for r in self.ranges
        ]

    def load_state_dict(self, state: list[Any]) -> None:
        self.ranges = [
            Range(
                step_from=start,
                step_to=end,
                epoch=epoch,
                per_step=per_step,
                lost=tuple((s, k) for s, k in lost),
                duplicated=tuple((s, k) for s, k in duplicated),
                dropped=tuple(dropped),
            )
            for start, end, epoch, per_step, lost, duplicated, dropped in state
        ]
