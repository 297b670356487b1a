"""A replica's membership: epochs granted, lost and entered, while the training loop goes on.

A step is its global batch, not who computes it. When a member dies, the others keep the gradients
they have, compute only the shards that are missing, and commit the same step. Nothing here rolls
back.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from runtime.checkpoint import Checkpointer
from runtime.client import Directive, Stopped
from runtime.data import Batches, Shard
from runtime.job import Job
from runtime.replica import observing
from runtime.replica.gloo import Gloo
from runtime.replica.gradients import Tail, Wishes
from runtime.replica.link import Link, Refused, own_address
from runtime.replica.membership import REJOINS, Member, Severed
from runtime.replica.peers import Reduced
from runtime.replica.shape import cannot_drop, describe
from runtime.replica.state import Averages, Stateful, Steps, TrainingState
from runtime.replica.step import MODES, Mode, NotWhole, StepEngine
from runtime.replica.takeover import Takeover
from runtime.replica.telling import Committed, Teller

log = logging.getLogger("drydock.replica")

#: Overrides the script's mode, for a comparison or a proof.
ENV_MODE = "DRYDOCK_MODE"
LEAVE_S = 5.0  # how long a stopping member waits for the coordinator's leave to go


class ReplicaGroup:
    """One replica's membership. Iterate it for shards; call `backward` once for each.

    `optimizer` and `schedule` are one or several with `step`, `state_dict` and `load_state_dict`;
    `scaler` a torch.amp.GradScaler; `ema` a moving average of the weights, updated after each step;
    `extra` what else is to be saved and handed to newcomers, by name. `mode` says what becomes of a
    dead replica's shards: see `step.Mode`. `max_grad_norm` clips by the global norm, None not at
    all. `steps` ends the job after so many; `on_step` is called after each commit.

    Raises ValueError for an unknown mode, and for a model of a shape whose replicas cannot be
    dropped (sharded, tensor or pipeline parallel), with what to do instead.
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
        on_step: Callable[[Committed], None] | None = None,
    ) -> None:
        if error := cannot_drop(model, job.rank):
            raise ValueError(error)
        self.job = job
        self.batches = batches
        batches.open(job.trouble)
        self.saver = saver
        self.steps = steps
        self.on_step = on_step
        self.observer = observing.from_environment()
        optimizers = several(optimizer)
        self.state = TrainingState(
            model,
            optimizers,
            batches,
            schedules=several(schedule),
            scaler=scaler,
            ema=ema,
            extra=extra,
        )
        host = own_address(job.coordinator)
        self.gloo = Gloo(host)
        self.mode = known_mode(os.environ.get(ENV_MODE) or mode)
        self.engine = StepEngine(
            self.state, self.gloo, self.observer, mode=self.mode, max_grad_norm=max_grad_norm
        )
        self.shape = describe(
            model, optimizers, batches, self.mode, max_grad_norm, numerics_of(self.mode)
        )
        self.teller = Teller(job, self.state.ledger, batches.tokens_per_sample)
        self._postponed: deque[dict[str, Any]] = deque()
        self._want_checkpoint = threading.Event()
        self._why = ""  # why we stop, once all have agreed to
        self._left = False
        self.link = Link(job.coordinator, self._introduce, self._on_break)
        self.takeover = Takeover(self, host)
        self.member = Member(
            job.replica,
            self.link.say,
            self.takeover,
            placement=job.placement,
            standby=job.standby,
        )

    # --- the user's side ------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self.job.sender.on_directive = self._on_directive
        self.link.start()
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
            self._leave("left the loop", goodbye=True)
        else:
            self.job.trouble("exception", f"{type(error).__name__}: {error}")
            self._leave("exception", goodbye=False)

    def __iter__(self) -> Iterator[Shard]:
        """Shards to compute, for as long as the job lives."""
        self._await_epoch()
        while not self._left:
            if self.steps is not None and self.pending >= self.steps:
                self._stop("all steps done")
                continue
            try:
                yield from self.engine.shards()
                self._edge(self._finish_step())
            except NotWhole as error:
                self.job.trouble("coverage", str(error))
            except Severed as error:
                log.info(
                    "severed epoch=%s step=%s error=%s", self.member.epoch, self.pending, error
                )
                self.observer.at("regroup", self.pending)
                self._regroup(planned=False)

    def backward(self, loss: torch.Tensor, *, parts: int = 1) -> None:
        """Add the gradient of the present shard; `loss` is the mean over the shard's samples.

        A shard too large for memory is given in `parts` equal parts, each with the mean over its
        own samples; call this once for each. Scaling the loss is done here where there is a scaler.
        """
        self.engine.backward(loss, parts)

    @property
    def pending(self) -> int:
        """The step under way."""
        return self.engine.pending

    # --- one step -------------------------------------------------------------------------------

    def _finish_step(self) -> Tail:
        """Sum, and commit. Raises Severed, NotWhole."""
        self._pump()
        wishes = Wishes(
            regroup=self.member.wants_regroup,
            checkpoint=self._want_checkpoint.is_set(),
            stop=self.job.stop.is_set(),
            stage=self.member.wants_stage and self.takeover.ready_to_stage(),
        )
        reduced, tail = self.engine.reduce(wishes)
        self._await_lease()
        self.commit(reduced, tail)
        return tail

    def commit(self, reduced: Reduced, tail: Tail) -> None:
        """Apply a step: our own, or one that peers made while we were not with them."""
        self.takeover.await_copy()
        grad_norm = self.engine.apply(reduced, tail)
        self.takeover.made(reduced)
        self.link.step = self.state.committed
        if self.member.newcomer:
            return  # others made it: not ours to tell
        self.teller.committed(reduced.step, reduced.epoch, tail.loss, grad_norm, tail.samples)
        step = Committed(
            step=reduced.step,
            epoch=reduced.epoch,
            loss=tail.loss,
            grad_norm=grad_norm,
            samples=tail.samples,
            at=time.time(),
            coverage=tail.coverage,
            computed=tail.computed,
            members=sorted(self.member.members),
        )
        self.observer.committed(step)
        if self.on_step is not None:
            self.on_step(step)

    def _edge(self, tail: Tail) -> None:
        """Between two steps: what all members agreed on in the last all-reduce."""
        self._pump()
        if tail.wishes.stop:
            self._stop("stop wanted")
            return
        if self.teller.speaks() and (tail.wishes.checkpoint or self.saver.due()):
            asked = time.monotonic()
            self.saver.save(self.state.copy(), asked)
        if tail.wishes.checkpoint:
            self._want_checkpoint.clear()
        if tail.wishes.stage >= len(self.member.members):
            self.member.wants_stage = False
            self.takeover.stage()
        if tail.wishes.regroup:
            self._regroup(planned=True)

    # --- epochs ---------------------------------------------------------------------------------

    def _regroup(self, *, planned: bool) -> None:
        """Tell the coordinator how far we are and wait for the next epoch."""
        self.member.report(planned=planned)
        self._await_epoch()

    def _await_epoch(self) -> None:
        """Do what the coordinator asks until an epoch is granted and its group stands."""
        while not self._left:
            message = self._next()
            if message["op"] == "dismissed":
                if not self._why and self.teller.speaks():
                    self.saver.save(self.state.copy(), time.monotonic(), last=True)
                self._leave(self._why or "stopped while waiting for an epoch", goodbye=True)
            elif message["op"] == "replaced":
                self._leave(f"replaced by {message['by']}", goodbye=True)
            elif message["op"] == "refused":
                raise Refused(f"coordinator {self.job.coordinator}: {message['error']}")
            elif message["op"] == "stop":
                self.job.stop.set()
            elif self.member.hear(message):
                self._why = ""
                return

    def _await_lease(self) -> None:
        """Whom the coordinator has not heard of for long may have been replaced: it goes no further
        before it knows. Raises Severed if it was."""
        while self.link.silent_s() > self.member.lease_s:
            log.warning("holding step=%s silent_s=%.1f", self.pending, self.link.silent_s())
            self.link.await_word(self.member.lease_s)
            self._pump()
            if self.job.stop.is_set():
                raise Severed("told to stop, and out of the coordinator's reach")

    def _next(self) -> dict[str, Any]:
        """The next message; who is to stop dismisses itself when none comes."""
        if self._postponed:
            return self._postponed.popleft()
        stopping = self.job.stop.is_set()
        if stopping and not self.member.epoch:
            return {"op": "dismissed"}
        try:
            return self.link.inbox.get(timeout=LEAVE_S if stopping or self._why else None)
        except queue.Empty:
            return {"op": "dismissed"}

    # --- what may be heard at any time ----------------------------------------------------------

    def _pump(self) -> None:
        """Handle what arrived while we computed."""
        while not self.link.inbox.empty():
            message = self.link.inbox.get()
            if message["op"] in REJOINS:
                self._postponed.append(message)
                raise Severed("the coordinator told us to rejoin")
            if message["op"] == "stop":
                self.job.stop.set()
            else:
                self.member.overhear(message)

    def _on_break(self, epoch: int, _message: dict[str, Any]) -> None:
        """On the link's thread: make a collective under way fail now."""
        self.gloo.sever(epoch)

    def _on_directive(self, directive: Directive) -> None:
        """On the sender's thread."""
        if directive.verb == "stop":
            self._wish_stop()
        else:
            self._want_checkpoint.set()

    def _on_sigterm(self, _number: int, _frame: Any) -> None:
        self._wish_stop()

    def _wish_stop(self) -> None:
        self.job.stop.set()
        self.link.inbox.put({"op": "stop"})

    def _introduce(self) -> list[dict[str, Any]]:
        """What we say first, and again after each reconnect."""
        join = {
            "op": "join",
            "token": self.job.token,
            "job": self.job.name,
            **self.member.standing(),
            "placement": self.job.placement,
            "address": self.takeover.address,
            "gloo_port": self.gloo.port,
            "shards": self.batches.shards,
            "shape": self.shape,
            "world": self.job.world_replicas,
        }
        report = self.member.last_report
        return [join] if report is None else [join, {"op": "report", **report}]

    # --- the end --------------------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        """All members stop at this edge: save, and go when all are known to have reached it.

        Whoever went earlier could break the last all-reduce of a slower one.
        """
        if self.teller.speaks():
            asked = time.monotonic()
            self.saver.save(self.state.copy(), asked, last=True)
        self._why = reason
        self.member.report(planned=True, leaving=True)
        self._await_epoch()

    def _leave(self, reason: str, *, goodbye: bool) -> None:
        self._left = True
        if goodbye:
            self.observer.ended(self.state)
        self.link.close(goodbye=goodbye)  # the others need not wait for what we still write
        self.saver.finish()
        now = time.time()
        self.job.sender.tell(
            Stopped(step=self.state.committed, reason=reason, at=now, clean=goodbye)
        )
        self.takeover.close()
        self.batches.close()
        self.job.sender.close(3.0)


def several(given: Steps | Sequence[Steps]) -> list[Steps]:
    return list(given) if isinstance(given, Sequence) else [given]


def numerics_of(mode: Mode) -> str:
    """What decides on the last bit of a sum, beside the order of its terms."""
    known = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    threads = torch.get_num_threads()
    return f"{known}, {threads} threads" if mode == "reproducible" else known


def known_mode(name: str) -> Mode:
    for mode in MODES:
        if mode == name:
            return mode
    raise ValueError(f"there is no mode {name!r}; use one of: {', '.join(MODES)}")
