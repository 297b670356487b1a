"""What a training script sees of its replica: five lines around a loop that stays its own."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from runtime.checkpoint import Checkpointer
from runtime.client import ENV_COORDINATOR, Directive, Stopped
from runtime.data import NOT_IN_MEMORY, Batches, Shard
from runtime.forking import take_signal
from runtime.job import Job
from runtime.replica import observing
from runtime.replica.follower import Follower
from runtime.replica.fsdp import ShardGroup
from runtime.replica.heap import keep_freed_memory
from runtime.replica.leader import BECAUSE, Leader
from runtime.replica.nccl import group_for
from runtime.replica.network import address_of, own_address
from runtime.replica.rank import Rank
from runtime.replica.reporting import Committed, Reporter
from runtime.replica.shape import cannot_drop, describe, of_loop, of_ranks
from runtime.replica.state import Averages, Stateful, Steps, TrainingState
from runtime.replica.step import MODES, Mode, StepEngine
from runtime.replica.trained import stranger

log = logging.getLogger("drydock.replica")

#: Overrides the script's mode, for a comparison or a proof.
ENV_MODE = "DRYDOCK_MODE"
ABANDONED = 75  # exit status: this process is well, its replica is not; start the replica anew
LAST_WORDS_S = 2.0  # how long such a process may take to tell the control plane


class Loop(Protocol):
    """What the first rank of a replica and the others do each in their way."""

    def start(self) -> None: ...

    def shards(self) -> Iterator[Shard]: ...

    def leave(self, reason: str, *, goodbye: bool) -> None: ...

    def close(self, *, goodbye: bool) -> None: ...

    def wish_stop(self) -> None: ...

    def wish_leave(self) -> None: ...


class ReplicaGroup:
    """One replica of a data-parallel job: it trains on when others die, and takes back who returns.

    Use it as a context manager, loop over it for the shards that this rank computes, and call
    `backward` once for each. It does what else a step needs: summing over the replicas, clipping,
    the optimizers' and schedules' steps, checkpoints.

    A replica may have several ranks, among which `fully_shard` divided the model beforehand. They
    all run the same script, and each computes its part of each shard.

    Args:
        job: what `runtime.join` returned.
        model: its trained parameters are float32.
        optimizer: one or several, with `step`, `state_dict` and `load_state_dict`. All that they
            train belongs to the model.
        batches: the samples of each step.
        saver: where and how often checkpoints are saved.
        mode: what becomes of a dead replica's shards: "cover", "drop" or "reproducible", see
            `runtime.replica.step.Mode`. DRYDOCK_MODE overrides it.
        schedule: one learning-rate schedule or several, stepped after the optimizers.
        scaler: for mixed precision.
        ema: a moving average of the weights, updated after each step.
        extra: what else is saved and given to newcomers, by name; each has `state_dict` and
            `load_state_dict`.
        max_grad_norm: gradients are clipped to this global norm; None: not at all.
        steps: the job ends after so many steps; None: never.
        compare_every: the states of all replicas are compared after so many steps, and a difference
            is reported as `diverged`; 0: never.
        straggler_after_s: seconds. A replica that takes 30% longer for a shard than its peers for
            so long is reported as `straggler`; 0: never.
        stalled_after_s: seconds. A rank that computes one step for so long, and for 20 times as
            long as usual, is reported as `stalled` with the place in its script; 0: never.
        on_step: called after each commit, on every rank of every replica.
        after_step: called after each step, beside the optimizers; it may change weights. It is
            called for every step on every replica, also where a replica catches up on steps that
            the others made, so its result may depend on the state alone.

    Raises:
        ValueError: for an unknown mode, a number that is out of range, a model whose replicas
            cannot be dropped (tensor or pipeline parallel), an optimizer that trains what is not
            the model's, or shards that the ranks cannot divide.
        TypeError: for a trained parameter that is not float32, or a state that cannot be copied.
        RuntimeError: if DRYDOCK_COORDINATOR is no host:port or its host is not found, or
            DRYDOCK_NETWORK names none of this machine's addresses. On entry and in the loop: if the
            job does not let this replica in, or one of its ranks does not come.

        Each message says what to do instead.
    """

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module,
        optimizer: Steps | Sequence[Steps],
        batches: Batches,
        saver: Checkpointer,
        *,
        mode: Mode = "cover",
        schedule: Steps | Sequence[Steps] = (),
        scaler: torch.amp.GradScaler | None = None,
        ema: Averages | None = None,
        extra: Mapping[str, Stateful] | None = None,
        max_grad_norm: float | None = 1.0,
        steps: int | None = None,
        compare_every: int = 1000,
        straggler_after_s: float = 600.0,
        stalled_after_s: float = 120.0,
        on_step: Callable[[Committed], None] | None = None,
        after_step: Callable[[], object] | None = None,
    ) -> None:
        optimizers, schedules = several(optimizer), several(schedule)
        error = (
            cannot_drop(model, job.rank, job.ranks, optimizers)
            or stranger(model, optimizers)
            or wrong_number(max_grad_norm, steps, compare_every, straggler_after_s)
        )
        if error:
            raise ValueError(error)
        _demand_coordinator(job)
        mode = known_mode(os.environ.get(ENV_MODE) or mode)
        self.job = job
        self._batches = batches
        self._observer = observing.from_environment()
        self._observer.joined(job)
        self._begun = self._iterated = self._left = False
        if not any(parameter.is_cuda for parameter in model.parameters()):
            keep_freed_memory()
        batches.open(job.trouble, job.rank, job.ranks)
        shard_group = ShardGroup(model, job.rank)
        self.state = TrainingState(
            model,
            optimizers,
            batches,
            shard_group,
            schedules=schedules,
            scaler=scaler,
            ema=ema,
            extra=extra,
            after_step=after_step,
        )
        self.state.size()  # refuses now what no copy could be made of
        host = _own_host(job)
        gloo = group_for(model, host, job.rank)
        self._engine = StepEngine(
            self.state, gloo, self._observer, shard_group, mode=mode, max_grad_norm=max_grad_norm
        )
        helpers = helpers_of(schedules, scaler, ema, extra)
        numerics = numerics_of(mode, model)
        shape = describe(
            model, optimizers, batches, mode, max_grad_norm, numerics, job.ranks, helpers
        ) | of_loop(steps, compare_every, after_step)
        shape_of_ranks = of_ranks(shape, helpers_of(schedules, scaler, ema, extra=None))
        if shape["content"] == NOT_IN_MEMORY and not job.rank:
            log.warning(
                "data_not_compared dataset=%s: it holds no array in memory, so nothing shows "
                "whether all replicas have the same samples; give it a text `fingerprint`, as a "
                "hash of its files",
                shape["data"],
            )
        self._rank = Rank(
            job, self.state, self._engine, gloo, saver, self._observer, host=host, on_step=on_step,
            stalled_after_s=stalled_after_s,
        )  # fmt: skip
        self._loop: Loop
        if job.rank:
            first = shard_group.agree("")
            self._loop = Follower(
                self._rank, first, shape_of_ranks, leave=self._leave, abandon=self._abandon
            )
        else:
            reporter = Reporter(job, self.state.ledger, batches.tokens_per_sample)
            self._loop = Leader(
                self._rank,
                shape,
                shape_of_ranks,
                reporter,
                steps=steps,
                compare_every=compare_every,
                straggler_after_s=straggler_after_s,
                leave=self._leave,
                abandon=self._abandon,
            )
            shard_group.agree(self._loop.address)

    def __enter__(self) -> Self:
        self._begun = True
        if threading.current_thread() is threading.main_thread():
            take_signal(signal.SIGTERM, lambda _number, _frame: self._on_term())
            self._rank.preemption.listen(signal.SIGTERM, self._on_term)
        self.job.sender.on_directive = self._on_directive
        try:
            self._loop.start()
        except BaseException as error:  # nobody calls __exit__ for what is raised here
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._left:
            return
        if error is None:
            self._loop.leave("left the loop", goodbye=True)
        else:
            self._left = True  # the ranks that we hang up on do not end us before we told why
            self.job.trouble("exception", f"{type(error).__name__}: {error}")
            self._loop.leave("exception", goodbye=False)

    def __iter__(self) -> Iterator[Shard]:
        """Shards to compute, for as long as the job lives; once. Raises RuntimeError if that was
        begun before, or outside of the `with` block."""
        if not self._begun:
            raise RuntimeError(
                "this replica has not joined its job: loop over its shards within "
                "`with ReplicaGroup(...) as replica:`"
            )
        if self._iterated:
            happened = (
                "this replica has left its job: end"
                if self._left
                else "the loop over this replica's shards was left before, in the middle of a "
                "step: leave the `with` block, and end"
            )
            raise RuntimeError(
                f"{happened} this process. One loop goes through all steps and epochs"
            )
        self._iterated = True
        return self._loop.shards()

    def backward(self, loss: torch.Tensor, *, parts: int = 1) -> None:
        """Add the gradient of the present shard; `loss` is the mean over the shard's samples.

        A shard too large for memory is given in `parts` equal parts, each with the mean over its
        own samples; call this once for each. Scaling the loss is done here where there is a scaler.
        """
        self._engine.backward(loss, parts)

    @property
    def pending(self) -> int:
        """The step under way."""
        return self._engine.pending

    def _on_term(self) -> None:
        """In the signal's handler, and on another thread: whichever comes first."""
        self._rank.preemption.notice(self.job.kill_in_s())
        self._loop.wish_leave()

    def _on_directive(self, directive: Directive) -> None:
        """On the sender's thread."""
        if directive.verb == "stop":
            self._loop.wish_stop()
        elif isinstance(self._loop, Leader):  # others do not speak, and are told of no such order
            self._loop.wish_checkpoint()

    # --- the end --------------------------------------------------------------------------------

    def _leave(self, reason: str, *, goodbye: bool) -> None:
        self._left = True
        if goodbye:
            self._observer.ended(self.state)
        if not self.job.rank:  # which speaks for its replica
            now = time.time()
            step = self.state.committed
            because = BECAUSE.get(reason, "")
            told = Stopped(step=step, reason=reason, at=now, clean=goodbye, because=because)
            self.job.sender.tell(told)  # before what may take longer than we have to live
        self._loop.close(goodbye=goodbye)
        self._rank.close()
        self._batches.close()
        self.job.sender.close(3.0)

    def _abandon(self, why: str) -> None:
        """End this process, and at once: a rank of the replica is gone, and the training thread may
        wait for it in a collective for ever. On a thread of another name."""
        if self._left:
            return  # it was to end, and does
        log.error("abandoned step=%s why=%s", self.pending, why)
        self.job.trouble("replica_incomplete", f"{why}: this one ends, start the replica anew")
        if not self.job.rank:
            self._rank.link.close(goodbye=False)  # the others go on at once
        self.job.sender.close(LAST_WORDS_S)
        os._exit(ABANDONED)


def wrong_number(
    max_grad_norm: float | None, steps: int | None, compare_every: int, straggler_after_s: float
) -> str:
    """Which setting of a ReplicaGroup is no number that it can use, and what to give; "" if all
    are."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        return f"max_grad_norm={max_grad_norm}: give one above 0, None not to clip"
    if steps is not None and steps < 0:
        return f"steps={steps}: give a number of steps, None for no end"
    if compare_every < 0:
        return f"compare_every={compare_every}: give a number of steps, 0 for never"
    if straggler_after_s < 0:
        return f"straggler_after_s={straggler_after_s}: give a number of seconds, 0 for never"
    return ""


def several(given: Steps | Sequence[Steps]) -> list[Steps]:
    """Return one schedule, or a sequence of them, as a list."""
    return list(given) if isinstance(given, Sequence) else [given]


def helpers_of(
    schedules: Sequence[Steps],
    scaler: torch.amp.GradScaler | None,
    ema: Averages | None,
    extra: Mapping[str, Stateful] | None,
) -> dict[str, Sequence[Any]]:
    """What a step changes beside model and optimizers, by what it is."""
    return {
        "schedule": schedules,
        "scaler": [] if scaler is None else [scaler],
        "average": [] if ema is None else [ema],
        **{f"extra {name}": [one] for name, one in (extra or {}).items()},
    }


def numerics_of(mode: Mode, model: torch.nn.Module) -> str:
    """What decides on the last bit of a sum, beside the order of its terms."""
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}, NCCL {version}"
    known = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    threads = torch.get_num_threads()
    return f"{known}, {threads} threads" if mode == "reproducible" else known


def known_mode(name: str) -> Mode:
    """Return the mode of that name.

    Raises ValueError, which lists all modes, if there is none.
    """
    for mode in MODES:
        if mode == name:
            return mode
    raise ValueError(f"there is no mode {name!r}; use one of: {', '.join(MODES)}")


def _demand_coordinator(job: Job) -> None:
    """Raises RuntimeError if where it is said to be is no address."""
    try:
        address_of(job.coordinator)
    except ValueError as unusable:
        raise RuntimeError(
            f"{ENV_COORDINATOR} is {job.coordinator!r}; give host:port of the job's coordinator"
        ) from unusable


def _own_host(job: Job) -> str:
    """Where peers reach us. Raises RuntimeError if nothing leads to the coordinator's host."""
    try:
        return own_address(job.coordinator, job.network)
    except (OSError, UnicodeError) as error:  # the second for what can be no name at all
        host = address_of(job.coordinator)[0]
        raise RuntimeError(
            f"{ENV_COORDINATOR} is {job.coordinator!r}, and this machine finds no way to that host "
            f"({error}): see that `getent hosts {host}` and `ip route` know it here, or give "
            "another address of the job's coordinator"
        ) from error
