"""A step's gradients, summed in one flat float32 buffer, behind them the proof and the agreement.

What rides behind the gradients is summed with them, so all members see the same after each step:
which shards were summed how often and by whom, which samples those were, their losses, which
parameters have a gradient, and who wants to regroup, save or stop. That is why the healthy path
needs no vote.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch.nn.utils import get_total_norm

from runtime.ledger import Summed
from runtime.replica.buffers import BufferPool
from runtime.replica.fsdp import as_shard, shard_of
from runtime.replica.tree import Branch, branches_of, collapse


class Collectives(Protocol):
    """What the members do together. Each raises Severed if it did not happen everywhere."""

    def all_reduce(self, buffer: torch.Tensor, /) -> None: ...

    def exchange(self, given: list[torch.Tensor], sizes: list[int], /) -> list[torch.Tensor]: ...

    def gather(self, mine: torch.Tensor, members: int, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Wishes:
    """What one member would like to happen at the next edge."""

    regroup: bool = False
    checkpoint: bool = False
    stop: bool = False
    told: int = 0  # how many were told to end, each by itself
    leaves: bool = False  # one of these goes at that edge, and the others go on without it
    stage: int = 0  # how many are ready to copy the state for newcomers
    compare: int = 0  # and how many to copy it so that the members' states are compared
    prove: int = 0  # how many hash theirs, as all who follow do, so that these may enter
    #: a checkpoint is due, in these tiers
    peer: bool = False
    local: bool = False
    shared: bool = False
    object: bool = False
    share: int = 0  # how many can write their share to the shared tier at that edge
    alone: bool = False  # the one whose turn it is would rather write there alone
    #: what became of a save to the shared tier: it is whole, a share failed, that of one alone did
    whole: bool = False
    share_failed: bool = False
    alone_failed: bool = False


WISHES = fields(Wishes)
NOTHING = Wishes()


@dataclass(frozen=True, kw_only=True)
class Tail(Summed):
    """What all members learn from one step."""

    loss: float  # mean over the samples
    samples: int
    wishes: Wishes  # those of all members together
    touched: list[bool]  # by which parameters backward came, of any shard, on any member
    seconds: list[float]  # how long each shard took whoever computed it; 0 if that is not known


class Gradients:
    """The parameters' gradients of one step, and their sum over all members.

    Each member adds up its own shards first; then the members' sums are added. So the bits of the
    result depend on the order of summation.

    What backward gives is taken away from the parameters at once, so that nothing the script does
    to their gradients changes the sum. It is not copied into zeros, which would have to be written,
    read, and added to.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], shards: int, statistics: int = 0
    ) -> None:
        """`statistics`: so many numbers behind the gradients are summed with them."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self.shards = shards
        self._sizes = [shard_of(p).numel() for p in self.parameters]
        self.gradient_size = sum(self._sizes)
        self.size = self.gradient_size + statistics
        for parameter in self.parameters:
            if parameter.dtype != torch.float32:
                raise TypeError(
                    f"a parameter is {parameter.dtype}; keep float32 parameters and use autocast"
                )
        #: where the parameters are, and what is summed
        self.device = next((shard_of(p).device for p in self.parameters), torch.device("cpu"))
        self.statistics = torch.zeros(statistics, device=self.device)
        self.pool = BufferPool(self.device)
        self.held: set[int] = set()  # shards whose gradient is summed here
        # Of each shard, as plain numbers: a tensor's take ten times as long to change one by one.
        self.coverage = [0.0] * shards
        self.checksums = [0.0] * shards
        self.who = [0.0] * shards  # 1 + the number of the replica that summed it
        self.seconds = [0.0] * shards  # how long we took for each
        self._began: float | None = None  # monotonic; None: what we hold was not computed in one go
        self.losses = [0.0] * shards  # sums over the samples, but for those in `_noted`
        #: shard, mean loss, samples, parts: off a card read at the step's end, for it is waited for
        self._noted: list[tuple[int, torch.Tensor | float, int, int]] = []
        self.samples = 0
        #: of each parameter what was taken; None where backward did not come by
        self._taken: list[torch.Tensor | None] = []
        self.touched = [0.0] * len(self.parameters)  # 1 where it did, of any shard
        self._drop()

    def lend(self) -> None:
        """Give each parameter back what was taken of its gradient, right before backward.

        Backward then adds to it while what it adds is still in the processor's cache. A parameter
        with a hook gets nothing back, for the hook would change the earlier shards' sum again with
        each shard.
        """
        for parameter, taken in zip(self.parameters, self._taken, strict=True):
            parameter.grad = None if _is_watched(parameter) else taken

    def take(self) -> None:
        """Take each parameter's gradient away again, right after backward."""
        seen: set[int] = set()
        for place, parameter in enumerate(self.parameters):
            given = parameter.grad
            parameter.grad = None
            before = self._taken[place]
            if given is None or given is before:
                continue
            self.touched[place] = 1.0
            if before is not None and _is_watched(parameter):
                shard_of(before).add_(shard_of(given))
            elif given.is_sparse:
                self._taken[place] = given.to_dense()
            else:
                # autograd may hand the same memory to two parameters of which a sum was made
                address = shard_of(given).data_ptr()
                self._taken[place] = given.clone() if address in seen else given
                seen.add(address)

    def add(self, index: int, checksum: int, samples: int, replica: int) -> None:
        """Note that this shard was summed on this replica."""
        self.held.add(index)
        self.coverage[index] += 1
        self.checksums[index] += checksum
        self.who[index] += replica + 1
        self.samples += samples

    def begin(self) -> None:
        """A shard is about to be computed: the first one of a step begins its time."""
        if self._began is None and not self.held:
            self._began = time.monotonic()

    def interrupt(self) -> None:
        """What is held was not computed in one go: how long it took says nothing."""
        self._began = None

    def note(self, index: int, loss: torch.Tensor, samples: int, parts: int) -> None:
        """Note the mean loss of one of a shard's `parts` equal parts, all of so many samples."""
        mean = loss.item() if loss.is_cpu else loss.detach().clone()
        self._noted.append((index, mean, samples, parts))

    def clear(self) -> None:
        """Forget all that was summed in this step: gradients, shards, losses and times."""
        self._drop()
        self.held.clear()
        for numbers in (self.coverage, self.checksums, self.who, self.seconds, self.losses):
            numbers[:] = [0.0] * self.shards
        self.touched = [0.0] * len(self.parameters)
        self._began = None
        self._noted.clear()
        self.samples = 0

    def reduce(
        self,
        collectives: Collectives,
        _shares: Mapping[int, Collection[int]],
        _me: int,
        wishes: Wishes,
    ) -> torch.Tensor:
        """The sum over all members, in a buffer of `pool`; one of an abandoned operation, which
        may still scribble on it, never comes back there. `shares`: which shards each member has
        summed. Raises Severed."""
        buffer = self._joined([*self._parts(), self.statistics, self.tail(wishes)])
        collectives.all_reduce(buffer)
        return buffer

    def norm(self, reduced: torch.Tensor) -> float:
        """The length of the gradients in this sum."""
        # One pass over millions of float32 loses digits.
        pieces = torch.split(reduced[: self.gradient_size], 1 << 20)
        found = float(get_total_norm(pieces))
        if not math.isfinite(found):  # with a large loss scale the squares are too large
            found = float(get_total_norm([piece.double() for piece in pieces]))
        return found

    def put(
        self, reduced: torch.Tensor, touched: Sequence[bool], times: float, clipped: float
    ) -> None:
        """Set each parameter's gradient to its part of the sum, times `times` and `clipped`.

        `clipped` does not apply to the statistics, which are multiplied by `times` alone. The parts
        are copied, for peers may ask for the sum.

        A parameter with `touched` false gets no gradient, as in a plain loop: an optimizer would
        move it by decay and momentum even with a gradient of zeros.
        """
        parts = torch.split(reduced[: self.gradient_size], self._sizes)
        for place, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            if not touched[place]:
                parameter.grad = None
                continue
            given = self._taken[place]
            if given is None:
                given = as_shard(torch.empty_like(shard_of(parameter)), parameter)
            into = shard_of(given)
            torch.mul(part.view_as(into), times * clipped, out=into)
            parameter.grad = given
        torch.mul(reduced[self.gradient_size : self.size], times, out=self.statistics)

    def _parts(self) -> list[torch.Tensor]:
        """What was taken of each parameter's gradient, flat; zeros where backward did not come."""
        nothing = torch.zeros(1, device=self.device)
        return [
            nothing.expand(size) if given is None else shard_of(given).reshape(-1)
            for given, size in zip(self._taken, self._sizes, strict=True)
        ]

    def _drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self._taken = [None] * len(self.parameters)
        self.statistics.zero_()

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        buffer = self.pool.take(sum(part.numel() for part in parts))
        return torch.cat(parts, out=buffer)

    def tail(self, wishes: Wishes) -> torch.Tensor:
        """Return what rides behind the gradients: this member's numbers of the step.

        It is a float32 tensor of shape (5 * shards + parameters + 1 + wishes,) on `device`. Its
        numbers are in this order: coverage, checksums, who, losses and seconds of each shard;
        touched of each parameter; samples; wishes.

        A loss that is on a card is read here, so the call waits until the card has computed all.
        The time since `begin` is divided equally among the shards that are held.
        """
        for index, loss, samples, parts in self._noted:
            self.losses[index] += float(loss) * samples / parts
        self._noted.clear()
        if self._began is not None and self.held:  # the losses were read: a card has computed all
            took = (time.monotonic() - self._began) / len(self.held)
            for index in self.held:
                self.seconds[index] = took
        agreed = [self.samples, *(getattr(wishes, one.name) for one in WISHES)]
        tail = [
            *self.coverage, *self.checksums, *self.who, *self.losses, *self.seconds,
            *self.touched, *agreed,
        ]  # fmt: skip
        return torch.tensor(tail, dtype=torch.float32).to(self.device)

    def read(self, reduced: torch.Tensor) -> Tail:
        """Return what all members learn from a step, out of the sum that `reduce` gave.

        The loss is the mean over all samples, NaN if there was none. The call waits for the card.
        """
        tail: list[float] = reduced[self.size :].tolist()
        n, end = self.shards, 5 * self.shards + len(self.parameters)
        samples, *summed = tail[end:]
        return Tail(
            coverage=[round(v) for v in tail[:n]],
            checksums=[round(v) for v in tail[n : 2 * n]],
            who=[round(v) for v in tail[2 * n : 3 * n]],
            loss=sum(tail[3 * n : 4 * n]) / samples if samples else float("nan"),
            samples=round(samples),
            wishes=_wished(summed) if any(summed) else NOTHING,
            seconds=tail[4 * n : 5 * n],
            touched=[value > 0 for value in tail[5 * n : end]],
        )


def _wished(summed: Sequence[float]) -> Wishes:
    """What all members together wish, from the sum of what each does."""
    wishes: dict[str, Any] = {
        one.name: round(value) if one.type == "int" else value > 0
        for one, value in zip(WISHES, summed, strict=True)
    }
    return Wishes(**wishes)


def _is_watched(parameter: torch.nn.Parameter) -> bool:
    """Whether something is called with each gradient once that is added to what was there."""
    return bool(parameter._post_accumulate_grad_hooks)


class TreeGradients(Gradients):
    """Gradients that are added up along one fixed tree over the shards.

    The result has the same bits, whoever computed which shard. Each member owns a slice of the
    parameters. Others send it that slice of every branch that they have summed; it adds them up,
    and shares the sum. If shares are whole branches, this moves as many bytes as an all-reduce;
    after a loss it moves a little more.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], shards: int, statistics: int = 0
    ) -> None:
        super().__init__(parameters, shards, statistics)
        self.branches: dict[Branch, torch.Tensor] = {}

    def add(self, index: int, checksum: int, samples: int, replica: int) -> None:
        super().add(index, checksum, samples, replica)
        self.branches[index, index + 1] = self._joined([*self._parts(), self.statistics])
        self._drop()
        collapse(self.branches, self.shards, self._added)

    def clear(self) -> None:
        super().clear()
        for branch in self.branches.values():
            self.pool.give(branch)
        self.branches.clear()

    def _added(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        first.add_(second)
        self.pool.give(second)
        return first

    def reduce(
        self,
        collectives: Collectives,
        shares: Mapping[int, Collection[int]],
        me: int,
        wishes: Wishes,
    ) -> torch.Tensor:
        """Return the sum of all members' gradients, statistics and tails, with equal bits on each.

        `shares` says which shards each member has summed, by the member's number; `me` is our own
        number. The result is flat, in a buffer of `pool`. Members exchange slices of branches and
        then gather the sums. Raises Severed if that did not happen on all members, and KeyError if
        we have not summed a shard of our share.
        """
        members = sorted(shares)
        width = -(-self.size // len(members))
        expected = {m: branches_of(shares[m], self.shards) for m in members}
        mine = [self._sliced(self.branches[branch], width, len(members)) for branch in expected[me]]
        tail = self.tail(wishes)
        given = [
            torch.cat([*(slices[owner] for slices in mine), tail]) for owner in range(len(members))
        ]
        sizes = [len(expected[m]) * width + len(tail) for m in members]
        received = collectives.exchange(given, sizes)
        slices: dict[Branch, torch.Tensor] = {}
        for member, data in zip(members, received, strict=True):
            for position, branch in enumerate(expected[member]):
                slices[branch] = data[position * width : (position + 1) * width]
        tails = [data[-len(tail) :] for data in received]
        (own,) = collapse(slices, self.shards, torch.add).values()
        whole = collectives.gather(own, len(members))
        return self._joined([whole[: self.size], torch.stack(tails).sum(0)])

    def _sliced(self, buffer: torch.Tensor, width: int, members: int) -> list[torch.Tensor]:
        """One slice for each member, all of the same width."""
        padded = torch.nn.functional.pad(buffer, (0, width * members - self.size))
        return list(torch.split(padded, width)) if width else [padded] * members
