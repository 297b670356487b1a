"""The newest checkpoint of which every rank can read its part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import _get_default_store

from runtime.checkpoint import Checkpointer
from runtime.checkpoint.compression import NotInstalled
from runtime.checkpoint.sources import OF_ALL_NODES
from runtime.checkpoint.store import WHICH_ARE_WHOLE, Progress, unseen
from runtime.checkpoint.tiers import TierName
from runtime.image import Damaged, Staged
from runtime.job import Job
from runtime.replica.all_ranks import MAX_TRIES, TOLD, TRIES_OF_ONE
from runtime.whole.ranks import Ranks

#: Step, name and tier of a checkpoint.
Found = tuple[int, str, TierName]
LOOK_S = 0.5  # so often a rank that reads its part looks whether another refuses its own


class _GivenUp(Exception):
    """Another rank refuses its part of what we read."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint of which every rank has its part. `part`: ours, verified."""

    step: int
    name: str
    tier: TierName
    part: Staged
    untried: Sequence[Found]  # the others of which every rank may have its part, newest first


class Newest:
    """Chooses with all ranks which checkpoint the job goes on from, and reads this rank's part."""

    def __init__(self, job: Job, saver: Checkpointer, ranks: Ranks, start: str) -> None:
        """`start`: a word of this start of the job, the same on all ranks."""
        self.job = job
        self.saver = saver
        self.ranks = ranks
        self.start = start
        self._refused: list[str] = []  # why this rank could not load what it tried

    def load(self, found: Sequence[Found], here: Collection[Found]) -> Loaded | None:
        """The first of those `found`, which the first rank sees, of which all ranks can: what some
        rank's own disk and memory have not is passed over, for its node came to the job since. A
        tier of which two fail comes after the others, as for a `ReplicaGroup`. `here`: what this
        rank sees. None if the job begins anew, which is told where some nodes have a part.

        Raises ValueError if one was tried and none can be loaded, or the first rank does not see
        what lies where all should: nobody begins anew unasked."""
        absent = [one[2] not in OF_ALL_NODES and one not in here for one in found]
        there: list[Found] = []
        for one, passed_over in zip(found, self.ranks.on_any(absent), strict=True):
            if passed_over:
                self._refused.append(f"{one[2]}: of step {one[0]} not every rank's part is there")
            else:
                there.append(one)
        failed: Counter[str] = Counter()
        while there and failed.total() < MAX_TRIES:
            step, name, tier = there.pop(0)
            failed[tier] += 1  # unless all have it
            left = sorted(there, key=lambda one: failed[one[2]] >= TRIES_OF_ONE)
            follows = left[0] if left and failed.total() < MAX_TRIES else None
            part = self.read(name, tier, follows)
            if not self.ranks.on_any([part is None])[0]:
                assert part is not None  # noqa: S101 - all ranks have theirs
                return Loaded(step, name, tier, part, there)
            there = left
        folder = self.saver.folders.shared
        if failed:
            raise ValueError(
                f"none of the {len(found)} checkpoints of this job can be loaded "
                f"({self._why()}): mend that, or to begin anew move {folder} away; "
                f"{WHICH_ARE_WHOLE} {folder}"
            )
        of_all = any(tier in OF_ALL_NODES for *_, tier in here)
        elsewhere, anywhere = self.ranks.on_any([of_all, bool(here)])
        if elsewhere:
            raise ValueError(
                f"the first rank sees no checkpoint of this job in {folder}, and others do: mount "
                "it on all nodes, or to begin anew move it away"
            )
        if anywhere and not self.job.rank:
            self.job.trouble(
                "begins_anew",
                "there are checkpoints on the disks or in the memory of some of its nodes alone, "
                f"and the others came to the job since: it begins with step 0. Save to {folder} "
                "more often (every_s)",
            )
        return None

    def read(self, name: str, tier: TierName, follows: Found | None = None) -> Staged | None:
        """Our part of a checkpoint, verified; None if it is not whole, which is told, or another
        rank says that its own is not. `follows`: which one is tried then.

        Raises ValueError if it is an import, or of another number of ranks, and NotInstalled.
        """
        if self.saver.sources.imported(name):
            raise ValueError(
                "the checkpoint was imported from another tool and has weights alone, with which "
                "only a runtime.ReplicaGroup begins: load them in the script, before the WholeJob "
                f"is made, and give the job a state folder other than {self.job.state_dir}"
            )
        refusal = f"drydock/{self.start}/refused/{tier}/{name}"
        try:
            go_on = _unless_there(refusal) if self.job.ranks > 1 else unseen
            ranks = self.saver.sources.ranks(name, tier, progress=go_on)
            if ranks == self.job.ranks:
                return self.saver.sources.read(name, tier, self.job.rank, progress=go_on)
        except NotInstalled:
            raise  # nothing is wrong with it, and what is older must not take its place
        except _GivenUp:
            return None
        except (Damaged, OSError) as error:
            self._refused.append(f"{tier}: {error}")
            then = f"; the next one is {follows[2]}, step {follows[0]}" if follows else ""
            self.job.trouble("checkpoint_refused", self._refused[-1] + then, tier)
            _get_default_store().set(refusal, "")
            return None
        raise ValueError(
            f"the checkpoint is of {ranks} ranks, and this job has {self.job.ranks}: a model that "
            "is divided otherwise than by fully_shard alone goes on with as many"
        )

    def _why(self) -> str:
        """What the ranks refused last, of all of them."""
        told = enumerate(self.ranks.from_each(self._refused[-TOLD:]))
        return "; ".join(f"rank {rank}: {text}" for rank, texts in told for text in texts)


def _unless_there(refusal: str) -> Progress:
    """Raises _GivenUp once another rank has left that at the store at which all met: who reads a
    large part looks there now and then, for in a collective it would wait for the others."""
    looked = time.monotonic()

    def look(_bytes: int) -> None:
        nonlocal looked
        if time.monotonic() - looked >= LOOK_S:
            looked = time.monotonic()
            if _get_default_store().check([refusal]):
                raise _GivenUp

    return look
