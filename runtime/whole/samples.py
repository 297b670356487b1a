"""What each step of a WholeJob trains on, and the ledger of the shards that its ranks took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from runtime.data import Batches, Shard
from runtime.ledger import Range, SampleLedger, Summed
from runtime.replica.state import GO_ON, own_copy
from runtime.whole.ranks import Ranks

#: The names in a state.
LEDGER, TAKEN = "ledger", "taken"
GIVE_ALL = (
    "some ranks were given batches and others not: give all the same, with the data_part of each; "
    "a stage of a pipeline that needs no data may leave its shards"
)


class Samples:
    """The `batches` of a job of which this rank computes a part, and what became of each step's.

    Several ranks may compute the same part, as those that divide the model among them do, and some
    of these may never ask for data, as the middle stages of a pipeline: a shard was trained if any
    of them took it. What the loop then does with it nobody sees.
    """

    def __init__(self, batches: Batches, part: int, parts: int) -> None:
        """Of each step's shards this rank computes one of `parts` equal parts, the one with the
        number `part`, from 0. Raises ValueError if there is no such part."""
        if not 0 <= part < parts:
            raise ValueError(
                f"data_part=({part}, {parts}): the first is to be from 0 to {parts - 1}, as "
                'mesh["dp"].get_local_rank() and mesh["dp"].size() are'
            )
        if batches.shards % parts:
            raise ValueError(
                f"{batches.shards} shards cannot be divided among {parts} parts of the ranks: give "
                "Batches a multiple of that"
            )
        each = batches.shards // parts
        self.batches = batches
        self.ledger = SampleLedger(batches.state_dict())
        self._part, self._parts = part, parts
        self._ours = range(part * each, (part + 1) * each)
        self._expected = False  # by the loader
        self._step = -1  # the one under way; -1 between two
        self._taken: set[int] = set()  # of the one that is entered next
        #: what the state says of the data: as it was put back, until a step was trained on ours
        self._data: dict[str, str] | None = batches.told

    def open(self, trouble: Callable[[str, str], None], ranks: Ranks) -> None:
        """Make ready to fetch; see `Batches.open`. Raises ValueError, on all ranks alike, unless
        all divide the same samples, and all of them."""
        self.batches.open(trouble)  # first of all: what its workers import takes a while
        said = [self.batches.state_dict(), self.batches.told, self._parts]
        told = ranks.from_each([said, self._part])
        if None in told:
            raise ValueError(GIVE_ALL)
        for rank, (theirs, _) in enumerate(told):
            if theirs != told[0][0]:
                raise ValueError(
                    f"rank {rank} would train on {theirs}, and rank 0 on {told[0][0]} (the order, "
                    "the data, how many parts): give all ranks the same batches and as many parts"
                )
        parts = {part for _, part in told}
        if lacking := {*range(self._parts)} - parts:
            raise ValueError(
                f"no rank computes part {min(lacking)} of {self._parts}: let data_part be a "
                "rank's place among those that divide the batch, and how many these are"
            )

    def begin(self, step: int) -> None:
        """The loop makes this step now."""
        self._step = step
        self._taken.clear()

    def of_step(self) -> Iterator[Shard]:
        """Ours of the step under way, each entered as it is handed out."""
        if not self._expected:
            self.batches.expect(self._step, self._ours)
            self._expected = True
        return self._handed_out(self._step)

    def _handed_out(self, step: int) -> Iterator[Shard]:
        for index in self._ours:
            if step != self._step:
                raise RuntimeError(
                    f"the shards of step {step} were left for after it: ask for them in each step"
                )
            self._taken.add(index)
            yield self.batches.shard(step, index)

    def taken(self) -> list[int]:
        """For `Ranks.highest`: of each shard 1 if we took it, else 0."""
        return [int(shard in self._taken) for shard in range(self.batches.shards)]

    def enter(self, step: int, epoch: int, told: Sequence[int]) -> Range:
        """Enter a step that is over. `told`: what `taken` gives, of all ranks the highest. What no
        rank took was given up by the loop."""
        pairs = zip(told, self.batches.checksums(step), strict=True)
        checksums = [times * one for times, one in pairs]
        # `who`: the one replica that this job is, number 0.
        summed = Summed(coverage=[*told], checksums=checksums, who=[*told])
        entry = self.ledger.record(step, epoch, summed, self.batches.shard_size, drops=True)
        self._step = -1
        self._taken.clear()
        self._data = self.batches.told
        return entry

    def complete(self, ranks: Ranks, step: int, epoch: int) -> Range | None:
        """Of a state that was put back: enter the step that it was saved after, which some ranks
        could not know yet that saved it aside, while the others had not come to its edge. None
        where some knew it."""
        lacks, entry = self.ledger.step < step, None
        some_lack, some_have = ranks.highest([lacks, not lacks])
        if some_lack and some_have:
            given = ranks.from_each(None if lacks else self.ledger.state_dict())
            self.ledger.load_state_dict(next(one for one in given if one is not None))
        elif some_lack:
            entry = self.enter(step, epoch, ranks.highest(self.taken()))
        self._taken.clear()
        return entry

    def close(self) -> None:
        """Stop the loader's workers."""
        self.batches.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches.state_dict(),
            "data": self._data,
            LEDGER: self.ledger.state_dict(),
            TAKEN: sorted(self._taken),  # of a step that the ledger does not have yet
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """What is known to have changed in the data, in words; "" if nothing. Raises ValueError for
        another order or other data, and for a state without a ledger."""
        if LEDGER not in state:
            raise ValueError(
                f"the state of step {state['step']} was saved without batches, so no ledger could "
                f"say what was trained up to it; {GO_ON}"
            )
        self.batches.load_state_dict(state["batches"])
        changed = self.batches.demand_told(state["data"])
        self._data = own_copy(state["data"])
        self.ledger.load_state_dict(state[LEDGER])
        self._taken = {*state[TAKEN]}
        return changed


class NoSamples:
    """The same of a job that chooses its samples itself: nobody knows which it trained on."""

    def __init__(self) -> None:
        self.ledger = SampleLedger({})

    def open(self, _trouble: Callable[[str, str], None], ranks: Ranks) -> None:
        """Raises ValueError, on all ranks alike, if others have some."""
        if any(one is not None for one in ranks.from_each(None)):
            raise ValueError(GIVE_ALL)

    def begin(self, _step: int) -> None:
        pass

    def of_step(self) -> Iterator[Shard]:
        """Raises RuntimeError."""
        raise RuntimeError(
            "this WholeJob was given no batches: give it runtime.Batches(dataset, …)"
        )

    def taken(self) -> list[int]:
        return []

    def enter(self, _step: int, _epoch: int, _told: Sequence[int]) -> Range | None:
        return None

    def complete(self, _ranks: Ranks, _step: int, _epoch: int) -> Range | None:
        return None

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Raises ValueError for a state with a ledger, which would have a gap from here on."""
        if LEDGER in state:
            raise ValueError(
                "the state has a sample ledger, and this script gives its WholeJob no batches; "
                f"{GO_ON}"
            )
        return ""


def left_out(step: Range) -> str:
    """That no rank took some of a step's shards, in words; "" if all were taken."""
    if not step.dropped:
        return ""
    return (
        f"no rank took the shards {[*step.dropped]} of step {step.step_to}, and the sample ledger "
        "lists them as dropped: let the loop take all that shards() gives in each step"
    )
