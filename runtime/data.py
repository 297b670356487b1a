"""Which samples a step trains on: logical shards of a seeded order, whoever computes them.

Deterministic from a seed, without a list of all samples; it must never depend on which replicas
are alive.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import default_collate

from runtime.content import content_of, fingerprint_of
from runtime.loading import Loader, Source, source_of
from runtime.streams import Factory, Streams

#: Names the rule by which samples are put in order; another rule takes another number.
ORDER = 2
#: The same of streams, whose samples are known by their positions.
STREAM_ORDER = 3
#: So many positions of streams at most are told apart; then they are counted anew.
STREAM_POSITIONS = 1 << 20
#: Checksums stay below this, so that a float32 carries them exactly.
CHECKSUM_MODULUS = 1 << 20
MAX_SEED = 1 << 63
#: What a dataset is said to hold that holds no array.
NOT_IN_MEMORY = "not in memory"
ROUNDS = 6
#: So many ids at least are put in order at once: it costs hardly more than for one step of a few.
BLOCK_IDS = 4096
_LOW_32 = 0xFFFF_FFFF
#: Of some steps the ids, a row for each shard of each, and the shards' checksums.
_Block = tuple[torch.Tensor, list[list[int]]]


def _no_data() -> Any:
    raise AttributeError(
        "Batches was given the number of samples alone: index your data with shard.ids, or give "
        "Batches the dataset"
    )


@dataclass(frozen=True)
class Shard:
    """One slice of one step's global batch; in a replica of several ranks, this rank's part."""

    step: int
    index: int
    ids: tuple[int, ...]
    fetch: Callable[[], Any] = field(default=_no_data, repr=False, compare=False)

    @functools.cached_property
    def data(self) -> Any:
        """The samples, collated; fetched at its first use. Needs Batches that have a dataset."""
        return self.fetch()


class Batches:
    """The samples of every step: `shards` times `shard_size` of them, in a seeded order.

    Epochs follow each other without a gap: a step at the end of one is filled up from the next. So
    each sample is trained once in each epoch, and each step has its whole batch.

    Args:
        data: a map-style dataset, or a DataLoader (torch's, or torchdata's StatefulDataLoader). Of
            a loader its dataset, batch size, collate function and workers are used; order and
            position are kept here. Without `data` a shard has `ids` alone.
        factory: for data that can only be iterated: `factory(shard, epoch)` returns the samples of
            a logical shard in a pass over the data. They must be the same on every replica that
            calls it; see `runtime.streams`. A stream that ends goes on with its next pass. A
            sample's id is then `position in the stream * shards + shard`.
        samples: how many there are, if there is no `data`.
        shards: into how many parts each step's batch is divided; the live replicas share them.
        shard_size: samples of one shard; by default the loader's batch size, else 1.
        seed: of the order.
        drop_last: leave out at an epoch's end what fills no whole step.
        tokens_per_sample: to show tokens per second on the job's page.
        workers: processes that load samples ahead; by default the loader's.
        collate: makes one batch of a list of samples.
        start: how workers are started: "forkserver" or "spawn".

    Raises:
        ValueError, TypeError: for data that cannot be put in an order, with the remedy.
    """

    def __init__(
        self,
        data: Any = None,
        *,
        factory: Factory | None = None,
        samples: int | None = None,
        shards: int = 12,
        shard_size: int | None = None,
        seed: int = 0,
        drop_last: bool | None = None,
        tokens_per_sample: int = 1,
        workers: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        start: str | None = None,
    ) -> None:
        for name, number in (("shards", shards), ("shard_size", shard_size)):
            if number is not None and number < 1:
                raise ValueError(f"{name}={number}: give a number of at least 1")
        self.source: Source | None = None
        self._factory, self._collate = factory, collate or default_collate
        if factory is not None:
            _demand_nothing_else(
                data=data,
                samples=samples,
                drop_last=drop_last or None,
                workers=workers or None,
                start=start,
            )
        elif data is not None:
            self.source = source_of(
                data,
                batch_size=shard_size,
                workers=workers,
                collate=collate,
                start=start,
                drop_last=drop_last,
            )
            shard_size, drop_last = self.source.batch_size, self.source.drop_last
        self.shards = shards
        self.shard_size = shard_size or 1
        self.seed = seed
        self.drop_last = bool(drop_last)
        self.tokens_per_sample = tokens_per_sample
        self.global_batch = shards * self.shard_size
        #: how many have an id of their own
        self.samples = (
            _length(samples, self.source) if factory is None else _positions(self.global_batch)
        )
        if self.samples < self.global_batch:
            raise ValueError(
                f"{self.samples} samples do not fill one global batch of {self.global_batch}; "
                "give more samples or a smaller batch"
            )
        if not 0 <= seed < MAX_SEED:
            raise ValueError(f"the seed {seed} is none; give a number from 0 to below 2**63")
        left_out = self.samples % self.global_batch if self.drop_last else 0
        #: samples trained in each epoch
        self.per_epoch = self.samples - left_out
        self._weights = _weights(self.shard_size)
        self._block_steps = -(-BLOCK_IDS // self.global_batch)
        self._block = functools.lru_cache(maxsize=2)(self._made_block)
        self._part = slice(None)  # of each shard: what is ours
        self._loader: Loader | Streams | None = None

    @property
    def data(self) -> str:
        """What the samples come from: its kind, and its `fingerprint`, a text, where it has one.
        Tells datasets of equal length apart."""
        if self.source is None:
            return "ids alone" if self._factory is None else "streams"
        kind, said = type(self.source.dataset).__name__, fingerprint_of(self.source.dataset)
        return f"{kind} {said}" if said else kind

    @property
    def content(self) -> str:
        """What a dataset without a `fingerprint` holds in memory: tells those of one kind apart."""
        if self.source is None or fingerprint_of(self.source.dataset):
            return "not looked at"
        return content_of(self.source.dataset) or NOT_IN_MEMORY

    @functools.cached_property
    def told(self) -> dict[str, str]:
        """What a checkpoint says of the samples: the `fingerprint` of their dataset, or what it
        holds in memory; "" for what nobody knows."""
        if self.source is None:
            return {"fingerprint": "", "content": ""}
        said = fingerprint_of(self.source.dataset)
        return {"fingerprint": said, "content": "" if said else content_of(self.source.dataset)}

    def demand_told(self, told: Mapping[str, str]) -> str:
        """What has changed since a checkpoint told that, in words; "" if nothing is known to have.
        Raises ValueError for another fingerprint."""
        for what, ours in self.told.items():
            theirs = told.get(what, ours)  # older versions told nothing
            if ours == theirs:
                continue
            if ours and theirs:
                said = f"the {what} of the dataset was {theirs!r}, and is {ours!r}"
                if what == "fingerprint":
                    raise ValueError(f"{said}: resume with the same data, or start a new job")
                return f"{said}: the ids of the steps to come are other samples than they were"
            if what == "fingerprint":
                has = f"the fingerprint {ours!r}" if ours else "no fingerprint"
                had = repr(theirs) if theirs else "none"
                return (
                    f"the dataset has {has}, and had {had}: nothing shows whether the ids of the "
                    "steps to come are the samples that they were"
                )
        return ""

    def shard(self, step: int, index: int) -> Shard:
        """One shard, or our part of it; the same on every replica and after every restart."""
        ids = self._ids_at(step, index)
        if self._loader is None:
            return Shard(step, index, ids)
        return Shard(step, index, ids, functools.partial(self._loader.fetch, step, index, ids))

    def checksums(self, step: int) -> list[int]:
        """For each shard a small exact number that changes when its ids or their order change."""
        return self._block_of(step)[1][step % self._block_steps]

    def ids(self, first: int, end: int) -> torch.Tensor:
        """The ids of the steps from `first` to before `end`: steps x shards x samples. In the
        processor's memory, also where the script has torch make its tensors on a card."""
        here, stop = first * self.global_batch, end * self.global_batch
        if self._factory is not None:
            positions = torch.arange(here, stop, device="cpu")
            in_steps = positions.remainder_(self.samples).view(-1, self.shard_size, self.shards)
            return in_steps.transpose(1, 2)
        pieces = []
        while here < stop:
            epoch, start = divmod(here, self.per_epoch)
            length = min(stop - here, self.per_epoch - start)
            positions = torch.arange(start, start + length, device="cpu")
            pieces.append(permuted(positions, self.samples, self.seed, epoch))
            here += length
        return torch.cat(pieces).view(end - first, self.shards, self.shard_size)

    def checksums_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The checksum of each shard of `ids`."""
        mixed = ids * 0x2545_F491_4F6C_DD1D  # wraps around, everywhere alike
        mixed ^= mixed >> 32
        total = mixed.mul_(self._weights).sum(-1)
        return total.bitwise_and_(CHECKSUM_MODULUS - 1)

    # --- loading --------------------------------------------------------------------------------

    def open(self, trouble: Callable[[str, str], None], rank: int = 0, ranks: int = 1) -> None:
        """Make ready to fetch; `trouble` is told, by kind and text, of what an engineer should
        know. Of `ranks` that divide each shard we are `rank`.

        Raises ValueError if shards cannot be divided so.
        """
        if self.shard_size % ranks:
            raise ValueError(
                f"a shard of {self.shard_size} samples cannot be divided among the {ranks} ranks "
                "of a replica: give Batches a shard_size that can"
            )
        part = self.shard_size // ranks
        self._part = slice(rank * part, (rank + 1) * part)
        if self._loader is not None:
            return
        if self.source is not None:
            self._loader = Loader(self.source, self.seed, rank, self._ids_at, trouble)
        elif self._factory is not None:
            self._loader = Streams(
                self._factory, self._collate, self.seed, self.shard_size, rank, self._part
            )

    def expect(self, step: int, shards: Collection[int], now: Collection[int] = ()) -> None:
        """From this step on these shards are ours, until told otherwise: load them beforehand.
        `now`: those that are ours in this step, if they are others."""
        if self._loader is not None:
            self._loader.expect(step, shards, now)

    def close(self) -> None:
        """Stop the workers."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    # --- the order's place in checkpoints -------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """What must agree for a resume to mean the same data."""
        batch = {"shards": self.shards, "shard_size": self.shard_size, "seed": self.seed}
        if self._factory is not None:
            return {"order": STREAM_ORDER, **batch}
        return {
            "order": ORDER,
            "samples": self.samples,
            **batch,
            "drop_last": int(self.drop_last),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Check that a checkpoint's data order is this one; nothing is changed.

        `state` is what `state_dict` gave when the checkpoint was saved. Raises ValueError, with the
        remedy, if samples, batch, seed or the rule of the order differ.
        """
        demand_order(state)
        if dict(state) != self.state_dict():
            raise ValueError(
                f"the checkpoint's data order is {dict(state)}, this run's is "
                f"{self.state_dict()}; resume with the same data, seed and batch, or start a new "
                "job"
            )

    # --- helpers --------------------------------------------------------------------------------

    def _block_of(self, step: int) -> _Block:
        return self._block(step // self._block_steps)

    def _made_block(self, number: int) -> _Block:
        ids = self.ids(number * self._block_steps, (number + 1) * self._block_steps)
        return ids.reshape(-1, self.shard_size), self.checksums_of(ids).tolist()

    def _ids_at(self, step: int, index: int) -> tuple[int, ...]:
        row = step % self._block_steps * self.shards + index
        return tuple(self._block_of(step)[0][row].tolist()[self._part])


def of_order(order: Mapping[str, int]) -> Batches:
    """The ids of a run, from what its checkpoints and its ledger say of their order.

    Raises ValueError if this version cannot make that order.
    """
    demand_order(order)
    try:
        streams = order["order"] == STREAM_ORDER
        return Batches(
            factory=_no_stream if streams else None,
            samples=None if streams else order["samples"],
            shards=order["shards"],
            shard_size=order["shard_size"],
            seed=order["seed"],
            drop_last=None if streams else bool(order["drop_last"]),
        )
    except KeyError as error:
        raise ValueError(f"the data order {dict(order)} does not say its {error}") from error


def demand_order(order: Mapping[str, int]) -> None:
    """Raises ValueError if another version put the samples in order."""
    version = order.get("order", 1)
    if version not in (ORDER, STREAM_ORDER):
        raise ValueError(
            f"the samples were put in order by rule {version}, this version knows rules {ORDER} "
            f"and, for streams, {STREAM_ORDER}: they would come in another order; go on with the "
            "version of Drydock that began, or start a new job"
        )


def permuted(positions: torch.Tensor, samples: int, seed: int, epoch: int) -> torch.Tensor:
    """The samples at these positions of one epoch's order: a bijection of 0..samples-1.

    A Feistel network over the cells of a table that is about square: each round moves a cell along
    its row by what a hash of its column says, or the other way round. The table has hardly more
    cells than there are samples; who lands beyond them walks on.
    """
    width = math.isqrt(samples - 1) + 1 if samples > 1 else 1
    height = -(-samples // width)
    keys = _keys(seed, epoch)
    found = _crossed(positions, width, height, keys)
    while len(beyond := (found >= samples).nonzero().squeeze(1)):
        found[beyond] = _crossed(found[beyond], width, height, keys)
    return found


def _crossed(cells: torch.Tensor, width: int, height: int, keys: tuple[int, ...]) -> torch.Tensor:
    row = cells // width
    column = cells - row * width
    for turn, key in enumerate(keys):
        if turn % 2:
            row = _moved(row, column, key, height)
        else:
            column = _moved(column, row, key, width)
    return row.mul_(width).add_(column)


def _moved(place: torch.Tensor, by: torch.Tensor, key: int, size: int) -> torch.Tensor:
    """`place` moved on by a hash of `by`, within `size`. No product leaves 64 bits."""
    hashed = by ^ key
    hashed.mul_(0x7FEB_352D).bitwise_and_(_LOW_32)
    hashed ^= hashed >> 15
    hashed.mul_(0x2C1B_3C6D).bitwise_and_(_LOW_32)
    hashed ^= hashed >> 16
    hashed.mul_(size).bitwise_right_shift_(32).add_(place)
    return hashed.sub_((hashed >= size).long().mul_(size))


@functools.lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    drawn = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=4 * ROUNDS).digest()
    return tuple(int.from_bytes(drawn[i : i + 4], "little") for i in range(0, len(drawn), 4))


def _weights(size: int) -> torch.Tensor:
    """An odd factor for each place in a shard."""
    weights = torch.arange(1, size + 1, device="cpu") * 0x9E37_79B9_7F4A_7C1
    weights ^= weights >> 15
    return weights | 1


def _length(samples: int | None, source: Source | None) -> int:
    if source is None:
        if samples is None:
            raise ValueError("say what to train on: Batches(dataset), or Batches(samples=…)")
        return samples
    length = len(source.dataset)
    if samples not in (None, length):
        raise ValueError(f"the dataset has {length} samples, not {samples}; leave samples out")
    return length


def _positions(global_batch: int) -> int:
    """So many that whole steps are told apart, at least one."""
    return max(1, STREAM_POSITIONS // global_batch) * global_batch


def _demand_nothing_else(**said: Any) -> None:
    """Raises ValueError for what streams leave no room for. None stands for what was not said."""
    if named := [name for name, value in said.items() if value is not None]:
        raise ValueError(
            f"streams come without {', '.join(named)}: where one ends its next pass begins, and it "
            "is read in the training process; a factory may read ahead on a thread of its own"
        )


def _no_stream(_shard: int, _epoch: int) -> Iterable[Any]:
    raise AttributeError("an order alone has no data: give Batches the factory")
