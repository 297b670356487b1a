"""One step after another: which shards are ours, their sum over all members, the commit.

A step whose coverage is not exactly what its members agreed on is never applied, and nothing here
rolls back. It knows nothing of how members come and go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from runtime.data import Batches, Shard
from runtime.replica.fsdp import ShardGroup
from runtime.replica.gradients import Gradients, Tail, TreeGradients, Wishes
from runtime.replica.membership import Severed
from runtime.replica.nccl import EpochGroup
from runtime.replica.observing import Observer
from runtime.replica.peers import Reduced
from runtime.replica.plan import divide, fixed_shares
from runtime.replica.state import TrainingState
from runtime.replica.trained import Trained

#: cover: survivors take over the shards of the dead; equal up to the order of summation.
#: drop: the shards of the dead are given up, and listed; the step takes no longer.
#: reproducible: cover, and added up along one tree: the same bits, whoever computes.
Mode = Literal["cover", "drop", "reproducible"]
MODES: tuple[Mode, ...] = get_args(Mode)
MAX_REFUSED_STEPS = 3


class NotWhole(RuntimeError):
    """The members' sums do not make up the step; all see the same, and compute it anew."""


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What was trained, in all ranks of a replica together."""

    loss: float  # mean over the samples
    grad_norm: float  # before it was clipped
    samples: int


class StepEngine:
    """The step under way, and its commit."""

    def __init__(
        self,
        state: TrainingState,
        gloo: EpochGroup,
        observer: Observer,
        shard_group: ShardGroup,
        *,
        mode: Mode,
        max_grad_norm: float | None,
    ) -> None:
        self.state = state
        self.batches: Batches = state.batches
        self.gloo = gloo
        self.observer = observer
        # A hook for nobody would cost its time.
        self._watched = getattr(observer.at, "__func__", None) is not Observer.at
        self.shard_group = shard_group
        self.mode = mode
        self.max_grad_norm = max_grad_norm
        kind = TreeGradients if mode == "reproducible" else Gradients
        self.statistics = state.statistics
        state.model.zero_grad()  # frozen ones would keep theirs, to be applied with each step
        self.gradients = kind(state.model.parameters(), self.batches.shards, self.statistics.size)
        self.trained = Trained(state.model, state.optimizers)
        self.epoch = 0
        self.me = 0
        #: which member sums which shards: of the step under way, and of one nothing happens to
        self.shares: dict[int, list[int]] = {}
        self._usual: dict[int, list[int]] = {}
        self._current: Shard | None = None
        self._parts, self._of = 0, 1  # of the present shard that backward has seen, of how many
        self._failed = False  # a backward did, and some of the gradients may have it in part
        self._refused = 0
        #: called with what the script does that not all replicas do
        self.warn: Callable[[str], None] = lambda _text: None
        #: called with each shard before it is computed
        self.announce: Callable[[int], None] = lambda _shard: None
        gloo.begun = lambda: observer.at("reduce", self.pending)

    @property
    def pending(self) -> int:
        """The step under way."""
        return self.state.committed + 1

    @property
    def held(self) -> set[int]:
        """Shards of the pending step whose gradient we hold."""
        return self.gradients.held

    def enter(self, epoch: int, me: int, members: list[int], grant: Mapping[str, Any]) -> None:
        """Take up an epoch: keep what the others count on, and know who computes what."""
        self.epoch, self.me = epoch, me
        shards = range(self.batches.shards)
        if self.mode == "drop":
            fixed = fixed_shares(len(shards), int(grant["world"]))
            self._usual = {member: fixed[member] for member in members}
        else:
            self._usual = divide(shards, members)
        kept = {member: grant["held"][str(member)] for member in members}
        if self.held != set(kept[me]):
            self.forget()
        self.gradients.interrupt()
        self.shares = {m: sorted([*kept[m], *grant["assign"][str(m)]]) for m in members}
        # Whoever computes nothing of this step has its time to load for the next.
        first = self.pending + (not self.shares[me])
        self.batches.expect(first, self._usual[me], self.shares[me])

    def shards(self) -> Iterator[Shard]:
        """What is left for us to compute of the pending step. Raises Severed."""
        for index in self.shares[self.me]:
            if self.gloo.broken(self.epoch):
                raise Severed("a member is gone")
            if index in self.held:
                continue
            self.announce(index)
            yield from self.compute(index)

    def compute(self, index: int) -> Iterator[Shard]:
        """One shard of the pending step, which comes back as gradients through `backward`."""
        self.gradients.begin()
        if written := self.trained.begin():
            self.warn(written)
        self.state.seed(index)
        self.statistics.begin()
        self._current, self._parts = self.batches.shard(self.pending, index), 0
        self.observer.at("forward", self.pending)
        yield self._current
        if self._current is not None:
            given = f" but for {self._parts} of its {self._of} parts" if self._parts else ""
            raise RuntimeError(
                f"shard {index} was not given to backward{given}: a step is the sum of all its "
                "shards. Where the loop gave it up for an error, let that end this process: the "
                "other replicas take over its shards"
            )

    def backward(self, loss: torch.Tensor, parts: int) -> None:
        """Add the gradient of the present shard, or of one of its `parts` equal parts. Raises what
        says how it is to be called."""
        shard = self._current
        if shard is None:
            raise RuntimeError(
                "call backward once for each shard that the loop gave you, or say in how many "
                "parts: backward(loss, parts=2)"
            )
        self._demand(shard.index, loss, parts)
        if self._watched:
            loss.register_hook(self._in_backward)  # type: ignore[no-untyped-call]
        # Backward begins with the loss's share of the step: to divide the loss would take longer.
        share = self.state.scale(torch.full_like(loss, 1 / (self.batches.shards * parts)))
        self.gradients.lend()
        try:
            loss.backward(share)  # type: ignore[no-untyped-call]
        except BaseException:
            self._failed = True
            raise
        self.gradients.take()
        self._parts += 1
        self.gradients.note(shard.index, loss, len(shard.ids), parts)
        if self._parts == parts:
            if self.statistics.size:
                self.gradients.statistics.add_(self.statistics.change() / self.batches.shards)
            checksum = self.batches.checksums(shard.step)[shard.index]
            self.gradients.add(shard.index, checksum, len(shard.ids), self.me)
            self._current = None

    def _demand(self, index: int, loss: torch.Tensor, parts: int) -> None:
        """See `backward`."""
        if self._failed:
            raise RuntimeError(
                f"backward of shard {index} failed, and what it had added by then cannot be taken "
                "out of the sum: let that error end this process; the other replicas take over its "
                "shards. Smaller parts from the first on: backward(loss, parts=2)"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
            what = type(loss).__name__
            if isinstance(loss, torch.Tensor):
                what = f"{'complex ' if loss.is_complex() else ''}{tuple(loss.shape)}"
            raise TypeError(
                f"backward was given {what}: give it the mean loss over the shard's samples, a "
                "tensor of one real number"
            )
        if not loss.requires_grad:
            raise RuntimeError(
                f"the loss of shard {index} depends on nothing that is trained: it was detached, "
                "or computed without gradients (torch.no_grad), or from frozen weights alone"
            )
        if parts < 1 or (self._parts and parts != self._of):
            begun = f", and the shard was begun with {self._of}" if self._parts else ""
            raise ValueError(f"parts={parts}{begun}: give all parts of a shard one number above 0")
        self._of = parts
        if stray := self.trained.not_given():
            raise RuntimeError(self.trained.flaw() or stray)

    def _in_backward(self, _gradient: torch.Tensor) -> None:
        self.observer.at("backward", self.pending)

    def reduce(self, wishes: Wishes) -> tuple[Reduced, Tail]:
        """The step's sum over all members. Raises Severed, and RuntimeError if it would lack what
        the script trains or gave a gradient, or the script has done what is left to the step."""
        self.shard_group.take_apart()
        if flaw := self.trained.flaw() or self.state.flaw() or self.trained.not_given():
            raise RuntimeError(flaw)
        if self.gloo.broken(self.epoch):
            raise Severed("a member is gone")
        buffer = self.gradients.reduce(self.gloo, self.shares, self.me, wishes)
        reduced = Reduced(self.pending, self.epoch, buffer)
        self.gradients.pool.lend(buffer, reduced)
        return reduced, self.gradients.read(buffer)

    def apply(self, reduced: Reduced, tail: Tail) -> Applied:
        """Commit one reduced gradient: our own, or one handed over by a peer."""
        self.observer.at("apply", reduced.step)
        self.shard_group.take_apart()
        summed = sum(count > 0 for count in tail.coverage)
        times = len(tail.coverage) / summed  # if shards were dropped, the mean of what is there
        length = self.gradients.norm(reduced.buffer) * times / self.state.loss_scale
        losses = tail.loss * tail.samples if tail.samples else 0.0
        ranks = self.shard_group.gather([length, losses, tail.samples])
        norms, losses_of, samples_of = zip(*ranks, strict=True)
        norm = math.hypot(*norms)
        clipped = 1.0
        if self.max_grad_norm is not None and norm > self.max_grad_norm:
            clipped = self.max_grad_norm / (norm + 1e-6)
        self.gradients.put(reduced.buffer, tail.touched, times, clipped)
        self.state.unscale()
        self.statistics.apply(self.gradients.statistics)
        self.observer.at("optimizer", reduced.step)
        self.state.advance(reduced.epoch, tail, drops=self.mode == "drop")
        self.forget()
        self.trained.at_edge()
        self._refused = 0
        self.shares = self._usual
        samples = round(sum(samples_of))
        several = len(ranks) > 1 and samples
        loss = sum(losses_of) / samples if several else tail.loss
        return Applied(loss=loss, grad_norm=norm, samples=samples)

    def forget(self) -> None:
        """Drop what we hold of the pending step."""
        self.gradients.clear()
        self.statistics.forget()
        self.trained.end()
        self._current = None

    def flaw(self, tail: Tail) -> str:
        """In which way the members' sums do not make up the step; "" if they do."""
        who = [0] * self.batches.shards
        for member, share in self.shares.items():
            for shard in share:
                who[shard] = member + 1
        samples = self.batches.checksums(self.pending)
        agreed = [(int(one > 0), one, c if one else 0) for one, c in zip(who, samples, strict=True)]
        summed = [*zip(tail.coverage, tail.who, tail.checksums, strict=True)]
        if summed == agreed:
            return ""
        shard, due, found = next(
            (shard, *pair)
            for shard, pair in enumerate(zip(agreed, summed, strict=True))
            if pair[0] != pair[1]
        )
        if due[:2] == found[:2]:
            flaw = f"replica {due[1] - 1} computed it of other samples than replica {self.me} has"
        else:
            by = f" by replica {found[1] - 1}" if found[0] == 1 else ""
            whose = f"replica {due[1] - 1}" if due[0] else "nobody"
            flaw = f"it was summed {found[0]} times{by}, and {whose} was to do that"
        return f"step {self.pending}, shard {shard}: {flaw}"

    def refuse(self, flaw: str) -> None:
        """Compute the step anew. Raises RuntimeError if that does not help."""
        self._refused += 1
        if self._refused >= MAX_REFUSED_STEPS:
            raise RuntimeError(
                f"{flaw}, {self._refused} times in a row: see that all replicas read the same data "
                "in the same order, else look at the memory of that replica's node"
            )
        self.forget()
        self.shares = self._usual
