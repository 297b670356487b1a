"""A replica's membership: epochs granted, lost and entered, while the training loop goes on.

A step is its global batch, not who computes it. When a member dies, the others keep the gradients
they have, compute only the shards that are missing, and commit the same step. Nothing here rolls
back.
"""

from __future__ import annotations

import logging
import os
import queue
import random
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
from runtime.replica.gloo import Gloo, Severed
from runtime.replica.gradients import Tail, Wishes
from runtime.replica.link import Link, Refused, own_address
from runtime.replica.peers import (
    NotKept,
    PeerFailed,
    PeerServer,
    Reduced,
    ReducedLog,
    fetch_reduced,
    fetch_reduced_from,
    fetch_snapshot,
)
from runtime.replica.shape import describe
from runtime.replica.state import Averages, Stateful, Steps, TrainingState
from runtime.replica.step import MODES, Mode, NotWhole, StepEngine
from runtime.replica.telling import Committed, Teller
from runtime.snapshot import Damaged

log = logging.getLogger("drydock.replica")

#: Overrides the script's mode, for a comparison or a proof.
ENV_MODE = "DRYDOCK_MODE"
MAX_REFUSALS = 3  # as a newcomer, before a person is told
LEAVE_S = 5.0  # how long a stopping member waits for the coordinator's leave to go


class ReplicaGroup:
    """One replica's membership. Iterate it for shards; call `backward` once for each.

    `optimizer` and `schedule` are one or several with `step`, `state_dict` and `load_state_dict`;
    `scaler` a torch.amp.GradScaler; `ema` a moving average of the weights, updated after each step;
    `extra` what else is to be saved and handed to newcomers, by name. `mode` says what becomes of a
    dead replica's shards: see `step.Mode`. `max_grad_norm` clips by the global norm, None not at
    all. `steps` ends the job after so many; `on_step` is called after each commit.

    Raises ValueError for an unknown mode.
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
        self.job = job
        self.batches = batches
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
        self.epoch = 0
        self.members: dict[int, str] = {}  # replica -> placement, of the current epoch
        self._postponed: deque[dict[str, Any]] = deque()
        self._want_regroup = False
        self._want_checkpoint = threading.Event()
        self._why = ""  # why we stop, once all have agreed to
        self._left = False
        self.link = Link(job.coordinator, job.token, self._standing, self._on_break)
        self.log = ReducedLog()
        self.peers = PeerServer(host, job.token, self.log, self._ask_to_stage)
        self._donor = ""

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
                log.info("severed epoch=%s step=%s error=%s", self.epoch, self.pending, error)
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
            regroup=self._want_regroup,
            checkpoint=self._want_checkpoint.is_set(),
            stop=self.job.stop.is_set(),
        )
        reduced, tail = self.engine.reduce(wishes)
        self._commit(reduced, tail)
        return tail

    def _commit(self, reduced: Reduced, tail: Tail) -> None:
        grad_norm = self.engine.apply(reduced, tail)
        self.log.add(reduced)
        self.link.step = self.state.committed
        if not self.epoch:
            return  # a newcomer replays what others did: not ours to tell
        self.teller.committed(reduced.step, reduced.epoch, tail.loss, grad_norm, tail.samples)
        step = Committed(
            step=reduced.step,
            epoch=reduced.epoch,
            loss=tail.loss,
            grad_norm=grad_norm,
            samples=tail.samples,
            at=time.time(),
            coverage=tail.coverage,
            members=sorted(self.members),
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
        if tail.wishes.regroup:
            self._regroup(planned=True)

    # --- epochs ---------------------------------------------------------------------------------

    def _regroup(self, *, planned: bool) -> None:
        """Tell the coordinator how far we are and wait for the next epoch."""
        self._report(planned=planned)
        self._await_epoch()

    def _report(self, *, planned: bool, leaving: bool = False) -> None:
        self.link.report = {
            "epoch": self.epoch,
            "step": self.state.committed,
            "held": sorted(self.engine.held),
            "planned": planned,
            "leaving": leaving,
        }
        self.link.say("report", **self.link.report)

    def _await_epoch(self) -> None:
        """Do what the coordinator asks until an epoch is granted and its group stands."""
        asked: dict[str, Callable[[dict[str, Any]], None]] = {
            "load": self._on_load,
            "sync": self._on_sync,
            "catch_up": self._on_catch_up,
            "prove": self._on_prove,
            "evicted": self._on_evicted,
            "refused": self._on_refused,
        }
        while not self._left:
            message = self._next()
            if message["op"] == "epoch":
                try:
                    self._adopt(message)
                except Severed as error:
                    log.info("severed epoch=%s error=%s", self.epoch, error)
                    self._report(planned=False)
                else:
                    return
            elif message["op"] == "dismissed":
                if not self._why and self.teller.speaks():
                    self.saver.save(self.state.copy(), time.monotonic(), last=True)
                self._leave(self._why or "stopped while waiting for an epoch", goodbye=True)
            elif message["op"] in asked:
                asked[message["op"]](message)
            else:
                self._on_passing(message)

    def _next(self) -> dict[str, Any]:
        """The next message; who is to stop dismisses itself when none comes."""
        if self._postponed:
            return self._postponed.popleft()
        stopping = self.job.stop.is_set()
        if stopping and not self.epoch:
            return {"op": "dismissed"}
        try:
            return self.link.inbox.get(timeout=LEAVE_S if stopping or self._why else None)
        except queue.Empty:
            return {"op": "dismissed"}

    def _adopt(self, message: dict[str, Any]) -> None:
        """Enter a granted epoch. Raises Severed if it breaks before its group stands."""
        me = self.job.replica
        self.teller.granted(message, self.state.committed)
        members = {int(m["replica"]): str(m["placement"]) for m in message["members"]}
        replicas = sorted(members)
        self.epoch = int(message["epoch"])
        self.link.report = None
        self._want_regroup = False
        self._why = ""
        self.log.wanted = self.log.wanted and bool(message["lost"])
        if me in message["behind"]:
            self._replay_to(int(message["step"]), message["donors"])
        self.members = members
        if self.state.committed != int(message["step"]):
            raise RuntimeError(
                f"granted epoch {self.epoch} at step {message['step']}, but this replica is at "
                f"{self.state.committed}; restart it, it will rejoin from a peer"
            )
        self.engine.enter(self.epoch, me, replicas, message)
        ports = [int(m["gloo_port"]) for m in message["members"]]
        self.gloo.build(self.link, self.epoch, ports, replicas.index(me))
        log.info("adopted epoch=%s members=%s shares=%s", self.epoch, replicas, self.engine.shares)
        self.observer.granted(message)

    def _replay_to(self, step: int, donors: list[str]) -> None:
        """Commit the steps up to `step` from peers' reduced gradients. Raises Severed."""
        while self.state.committed < step:
            try:
                reduced = fetch_reduced_from(donors, self.job.token, self.pending)
            except PeerFailed as error:
                raise Severed(str(error)) from error
            self._commit(reduced, self.engine.gradients.read(reduced.buffer))

    # --- what the coordinator asks --------------------------------------------------------------

    def _on_load(self, _message: dict[str, Any]) -> None:
        """The job begins: take the newest checkpoint, else what the script initialised."""
        staged = self.saver.load()
        if staged is not None and staged.step > self.state.committed:
            self.state.load(staged)
        else:
            self.state.statistics.reload()
        self._say_ready()

    def _on_sync(self, message: dict[str, Any]) -> None:
        """Take the state from a peer's memory and replay what was committed since."""
        self.observer.at("sync", self.pending)
        if message.get("refusals") == MAX_REFUSALS:
            self.job.trouble("cannot_rejoin", f"refused {MAX_REFUSALS} times in a row")
        donors = list(message["donors"])
        random.Random(os.getpid()).shuffle(donors)  # noqa: S311 - spreads the load
        for donor in donors:
            try:
                staged = fetch_snapshot(donor, self.job.token)
                self.state.load(staged)
                self.link.step = self.state.committed
                if self.state.copy().digest != staged.digest:
                    raise Damaged(f"the state of {donor} did not load bit for bit")
                self._replay_from(donor)
            except (PeerFailed, Damaged) as error:
                log.warning("peer_failed peer=%s error=%s", donor, error)
                continue
            self._donor = donor
            self._say_ready()
            return
        self.link.say("again")

    def _replay_from(self, donor: str) -> None:
        while True:
            try:
                reduced = fetch_reduced(donor, self.job.token, self.pending)
            except NotKept:
                return
            self._commit(reduced, self.engine.gradients.read(reduced.buffer))

    def _on_catch_up(self, message: dict[str, Any]) -> None:
        """The members wait at an edge: make their last steps too, and prove it."""
        try:
            self._replay_to(int(message["step"]), [self._donor, *message["donors"]])
        except Severed as error:
            log.warning("cannot_catch_up error=%s", error)
            self.link.say("again")
            return
        digest = self.state.copy().digest
        self.link.say("caught_up", step=self.state.committed, digest=digest)

    def _on_prove(self, _message: dict[str, Any]) -> None:
        self.link.say("proof", step=self.state.committed, digest=self.state.copy().digest)

    def _say_ready(self) -> None:
        digest = self.state.copy().digest
        self.link.say("ready", step=self.state.committed, digest=digest)

    def _on_evicted(self, message: dict[str, Any]) -> None:
        """Others went on without us: we are a newcomer, our gradients are theirs by now."""
        self.job.trouble("evicted", f"epoch {self.epoch} went on without this replica")
        log.warning("evicted epoch=%s now=%s", self.epoch, message["epoch"])
        self.epoch = 0
        self.members = {}
        self.link.report = None
        self.engine.forget()

    def _on_refused(self, message: dict[str, Any]) -> None:
        raise Refused(f"coordinator {self.job.coordinator}: {message['error']}")

    # --- what may be heard at any time ----------------------------------------------------------

    def _pump(self) -> None:
        """Handle what arrived while we computed."""
        while not self.link.inbox.empty():
            message = self.link.inbox.get()
            if message["op"] in ("evicted", "sync", "load", "refused"):
                self._postponed.append(message)
                raise Severed("the coordinator told us to rejoin")
            self._on_passing(message)

    def _on_passing(self, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "stage":
            self.peers.offer(self.state.copy())
        elif op == "lost":
            self.observer.lost(message)
            self.teller.lost(message, self.state.committed)
        elif op == "diverged":
            states = ", ".join(f"{r}: {digest[:12]}" for r, digest in message["states"].items())
            self.job.trouble("diverged", f"at step {message['step']} members differ: {states}")
        elif op == "edge" and int(message["epoch"]) == self.epoch:
            self._want_regroup = True
        elif op == "stop":
            self.job.stop.set()

    def _on_break(self, epoch: int, _message: dict[str, Any]) -> None:
        """On the link's thread: make a collective under way fail now."""
        self.gloo.sever(epoch)

    def _ask_to_stage(self) -> None:
        """On a peer server's thread: the training thread copies at its next edge."""
        self.link.inbox.put({"op": "stage"})

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

    def _standing(self) -> dict[str, Any]:
        """How we introduce ourselves, at first and after each reconnect."""
        return {
            "replica": self.job.replica,
            "placement": self.job.placement,
            "address": self.peers.address,
            "gloo_port": self.gloo.port,
            "shards": self.batches.shards,
            "shape": self.shape,
            "world": self.job.world_replicas,
            "epoch": self.epoch,
            "step": self.state.committed,
            "members": self.members,
        }

    # --- the end --------------------------------------------------------------------------------

    def _stop(self, reason: str) -> None:
        """All members stop at this edge: save, and go when all are known to have reached it.

        Whoever went earlier could break the last all-reduce of a slower one.
        """
        if self.teller.speaks():
            asked = time.monotonic()
            self.saver.save(self.state.copy(), asked, last=True)
        self._why = reason
        self._report(planned=True, leaving=True)
        self._await_epoch()

    def _leave(self, reason: str, *, goodbye: bool) -> None:
        self._left = True
        if goodbye:
            self.observer.ended(self.state)
        self.saver.finish()
        now = time.time()
        self.job.sender.tell(
            Stopped(step=self.state.committed, reason=reason, at=now, clean=goodbye)
        )
        self.link.close(goodbye=goodbye)
        self.peers.close()
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
