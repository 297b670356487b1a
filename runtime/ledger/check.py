"""Whether a ledger is whole, found out by making each step's samples and proof anew.

Pure functions of the ledger's entries. They believe none of its sums: samples are counted one by
one, each pass over the data for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.data import Batches, of_order
from runtime.ledger.record import Summed, proof_of

#: Ids that are made at once.
CHUNK_IDS = 1 << 16

#: An entry of a ledger: the fields of `runtime.client.Ledger`.
Entry = Mapping[str, Any]

#: What became of a shard that no replica is known to have computed.
LOST, DUPLICATED, DROPPED, UNKNOWN, BY_SOMEBODY = -1, -2, -3, -4, -5
WORDS = {
    LOST: "lost",
    DUPLICATED: "duplicated",
    DROPPED: "dropped",
    UNKNOWN: "not known",
    BY_SOMEBODY: "computed, by whom is not known",
}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of the checkpoint that a ledger lies in."""

    step: int  # the last one that made them
    #: They may have one step more than the ledger, which whoever goes on from them enters.
    ahead: bool


@dataclass(kw_only=True)
class DataEpoch:
    """What became of the samples of one pass over the data."""

    epoch: int
    samples: int
    trained_once: int = 0
    duplicated: int = 0
    lost: int = 0
    dropped: int = 0
    left_out: int = 0  # filled no whole step, with drop_last
    unknown: int = 0  # in steps that the ledger does not have, or of which only sums are left
    to_come: int = 0
    computed: dict[int, int] = field(default_factory=dict)  # samples by replica, where known


@dataclass(kw_only=True)
class Report:
    """What a ledger proves."""

    step_from: int
    step_to: int
    epochs: list[DataEpoch] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # each names its step
    notes: list[str] = field(default_factory=list)  # what cannot be proven any more

    @property
    def whole(self) -> bool:
        """Every sample trained once, or listed as given up; no gap, every proof right."""
        return not self.problems


def check(entries: Sequence[Entry], weights: Weights | None = None) -> Report:
    """Check a whole ledger. `weights`: None where it is in no checkpoint.

    Raises ValueError if the samples' order is not told, or not known to this version.
    """
    ordered = sorted(entries, key=lambda entry: int(entry["step_from"]))
    batches = of_order(order_of(ordered))
    report = Report(step_from=ordered[0]["step_from"], step_to=ordered[-1]["step_to"])
    census = Census(batches)
    proof, reached = "", 0
    for entry in ordered:
        report.problems += follows(entry, reached, ordered[0]["order"])
        fates, problems = fates_of(entry, batches.shards)
        report.problems += problems
        proof = _recount(entry, fates, proof, census, report)
        reached = entry["step_to"] + 1
    if not ordered[-1]["proof"]:
        report.problems.append(f"step {ordered[-1]['step_from']}: no proof up to the end")
    if weights is not None:
        _compare(weights, reached, census, report)
    report.epochs = census.close()
    report.problems += [
        f"step {census.first_step(one.epoch)} and after: {one.duplicated} samples of data epoch "
        f"{one.epoch} were trained twice"
        for one in report.epochs
        if one.duplicated
    ]
    return report


def shards_of(entries: Sequence[Entry], step: int) -> list[dict[str, Any]]:
    """The shards of one step: index, replica (None if not known), fate, ids.

    Raises ValueError if the ledger does not have the step.
    """
    entry = next((one for one in entries if one["step_from"] <= step <= one["step_to"]), None)
    if entry is None:
        raise ValueError(f"the ledger does not have step {step}")
    batches = of_order(order_of(entries))
    fates, _ = fates_of(entry, batches.shards)
    return [
        {
            "shard": index,
            "replica": fate if fate >= 0 else None,
            "fate": WORDS.get(fate, "computed"),
            "ids": list(batches.shard(step, index).ids),
        }
        for index, fate in enumerate(fates)
    ]


def order_of(entries: Sequence[Entry]) -> Mapping[str, int]:
    """Return the samples' order that the first entry tells; see `Batches.state_dict`.

    Raises ValueError if there is no entry, or if a version without proofs wrote it.
    """
    order: Mapping[str, int] = (entries[0].get("order") or {}) if entries else {}
    if not order:
        raise ValueError(
            "the ledger is empty, or a version that kept no proof wrote it: it does not say in "
            "which order the samples came"
        )
    return order


def follows(entry: Entry, reached: int, order: Mapping[str, int]) -> list[str]:
    """What is wrong with where an entry stands, after one that ends before step `reached`."""
    first, last = entry["step_from"], entry["step_to"]
    problems = []
    if first > reached:
        problems.append(f"step {reached}: the ledger has no steps from here to {first - 1}")
    if first < reached:
        problems.append(f"step {first}: the ledger tells this step twice")
    if last < first:
        problems.append(f"step {first}: its range ends before it begins, at {last}")
    if entry["order"] != order:
        problems.append(f"step {first}: the samples come in another order than before")
    return problems


def fates_of(entry: Entry, shards: int) -> tuple[list[int], list[str]]:
    """For each shard of these steps its replica, or what became of it; and what is wrong."""
    first, merged = entry["step_from"], entry.get("merged") or []
    if merged:
        lost, duplicated, _ = merged
        wrong = [f"step {first} and after: {lost} shards lost, {duplicated} trained twice"]
        return [UNKNOWN if any(merged) else BY_SOMEBODY] * shards, wrong * bool(lost or duplicated)
    told = [(replica, k) for replica, start, end in entry["computed"] for k in range(start, end)]
    told += [(LOST, k) for _, k in entry["lost"]] + [(DROPPED, k) for k in entry["dropped"]]
    told += [(DUPLICATED, k) for _, k in entry["duplicated"]]
    fates = [UNKNOWN if entry["computed"] else BY_SOMEBODY] * shards
    problems = []
    for fate, shard in told:
        if not 0 <= shard < shards or fates[shard] not in (UNKNOWN, BY_SOMEBODY):
            problems.append(f"step {first}: shard {shard} is told of twice, or there is none")
            continue
        fates[shard] = fate
        if fate in (LOST, DUPLICATED):
            problems.append(f"step {first}: shard {shard} was {WORDS[fate]}")
    if UNKNOWN in fates:
        problems.append(f"step {first}: nothing is told of shard {fates.index(UNKNOWN)}")
    return fates, problems


def _recount(entry: Entry, fates: list[int], before: str, census: Census, report: Report) -> str:
    """Count the samples of these steps, and compare sum and proof with what is told.

    Returns the proof to go on from: the one told where it cannot be made anew.
    """
    first, last = entry["step_from"], entry["step_to"]
    provable = all(fate >= 0 or fate in (LOST, DROPPED) for fate in fates)
    proof = before
    steps = max(1, CHUNK_IDS // census.batches.global_batch)
    for start in range(first, last + 1, steps):
        ids = census.batches.ids(start, min(start + steps, last + 1))
        census.count(start, ids, fates)
        if provable:
            proof = _proof_after(proof, start, census.batches.checksums_of(ids), fates)
    size = census.batches.shard_size
    samples = sum(fate >= 0 or fate == BY_SOMEBODY for fate in fates) * size * (last - first + 1)
    if not {UNKNOWN, DUPLICATED} & set(fates) and entry["samples"] != samples:
        report.problems.append(
            f"step {first}: {entry['samples']} samples are told, its shards have {samples}"
        )
    if provable and entry["proof"] in ("", proof):
        return proof
    if provable:
        report.problems.append(
            f"step {first}: the proof up to step {last} is {entry['proof']}, from the samples it "
            f"is {proof}: the ledger was changed, or these were not the samples"
        )
    elif entry.get("merged"):
        report.notes.append(
            f"steps {first} to {last} are added up: who computed them is not known any more, and "
            "their proof is taken as told"
        )
    elif BY_SOMEBODY in fates:
        report.problems.append(f"step {first}: no proof up to step {last}, from an older version")
    return str(entry["proof"])


def _compare(weights: Weights, reached: int, census: Census, report: Report) -> None:
    """Whether a ledger that ends before step `reached` has the steps that made the weights."""
    step, batches = weights.step, census.batches
    if weights.ahead and step == reached:
        census.count(step, batches.ids(step, step + 1), [UNKNOWN] * batches.shards)
        report.notes.append(
            f"step {step} is in the weights and not in the ledger yet: they were saved before the "
            "step's edge, and whoever goes on from them enters it"
        )
    elif step != reached - 1:
        report.problems.append(
            f"step {min(step + 1, reached)} and after: the weights are of step {step}, and the "
            f"ledger ends with step {reached - 1}"
        )


def _proof_after(proof: str, first: int, checksums: torch.Tensor, fates: list[int]) -> str:
    coverage = [int(fate >= 0) for fate in fates]
    who = [fate + 1 if fate >= 0 else 0 for fate in fates]
    for step, row in enumerate((checksums * torch.tensor(coverage)).tolist(), first):
        proof = proof_of(proof, step, Summed(coverage=coverage, checksums=row, who=who))
    return proof


class Census:
    """Counts how often each sample was trained, one pass over the data after another."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self._epochs: dict[int, DataEpoch] = {}
        self._times: dict[int, torch.Tensor] = {}  # of the passes that are not over
        self._reached = 0  # in the stream of all passes

    def first_step(self, epoch: int) -> int:
        return epoch * self.batches.per_epoch // self.batches.global_batch

    def count(self, first: int, ids: torch.Tensor, fates: list[int]) -> None:
        """These are the ids of the steps from `first` on, whose shards fared so."""
        here = first * self.batches.global_batch
        fate = torch.tensor(fates).repeat_interleave(self.batches.shard_size).repeat(len(ids))
        flat = ids.flatten()
        done = 0
        while done < len(flat):
            epoch, place = divmod(here + done, self.batches.per_epoch)
            end = min(len(flat), done + self.batches.per_epoch - place)
            self._count_within(epoch, flat[done:end], fate[done:end])
            done = end
        self._reached = max(self._reached, here + done)
        self._close_before(self._reached // self.batches.per_epoch)

    def close(self) -> list[DataEpoch]:
        """All that was counted, pass by pass."""
        self._close_before(max(self._epochs, default=-1) + 1)
        return [self._epochs[epoch] for epoch in sorted(self._epochs)]

    def _count_within(self, epoch: int, ids: torch.Tensor, fate: torch.Tensor) -> None:
        samples = self.batches.samples
        of = self._epochs.setdefault(epoch, DataEpoch(epoch=epoch, samples=samples))
        if epoch not in self._times:
            self._times[epoch] = torch.zeros(samples, dtype=torch.int8)
        trained = ids[(fate >= 0) | (fate == BY_SOMEBODY)]
        self._times[epoch].index_add_(0, trained, torch.ones(len(trained), dtype=torch.int8))
        twice = ids[fate == DUPLICATED]
        self._times[epoch].index_add_(0, twice, torch.full((len(twice),), 2, dtype=torch.int8))
        of.lost += int((fate == LOST).sum())
        of.dropped += int((fate == DROPPED).sum())
        of.unknown += int((fate == UNKNOWN).sum())
        for replica, count in enumerate(torch.bincount(fate[fate >= 0]).tolist()):
            if count:
                of.computed[replica] = of.computed.get(replica, 0) + count

    def _close_before(self, epoch: int) -> None:
        for number in [one for one in self._times if one < epoch]:
            times, found = self._times.pop(number), self._epochs[number]
            found.trained_once = int((times == 1).sum())
            found.duplicated = int((times > 1).sum())
            never = int((times == 0).sum()) - found.lost - found.dropped - found.unknown
            over = self._reached >= (number + 1) * self.batches.per_epoch
            found.left_out = self.batches.samples - self.batches.per_epoch
            if over:
                found.unknown += never - found.left_out
            else:
                found.to_come = never - found.left_out
