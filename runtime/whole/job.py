"""A job of which no replica can be dropped: saved and put back as a whole, without a ReplicaGroup.

Its ranks divide one model among them in any way (tensor or pipeline parallel), so when one dies the
launcher ends the others and starts all anew; they go on from the newest checkpoint that all of them
can read. The script makes its steps itself: this only counts, saves, tells and puts back.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,
)

from runtime.checkpoint import Checkpointer
from runtime.checkpoint.manifest import digest_of_all
from runtime.checkpoint.resharding import AS_SAVED, replaced
from runtime.checkpoint.saver import FINISH_S
from runtime.checkpoint.sources import OF_ALL_NODES
from runtime.checkpoint.suspects import HELD_BACK_S, TRIAL_STEPS, DoesNotTrain, Losses, Trial
from runtime.checkpoint.tiers import TIERS, TierName
from runtime.client import (
    ENV_LOCAL_DIR,
    ENV_NETWORK,
    ENV_OBJECT_STORE,
    ENV_STANDBY,
    ENV_WORLD_REPLICAS,
    TOLD_TO_END,
    Because,
    CheckpointSaved,
    Directive,
    Stopped,
)
from runtime.data import Batches, Shard
from runtime.final_save import AtRest, FinalSave
from runtime.generators import cards_of, generators, set_generators
from runtime.image import Staged
from runtime.job import Job
from runtime.ledger import Range
from runtime.replica.network import own_address
from runtime.replica.reporting import Reporter
from runtime.replica.shape import of_deepspeed
from runtime.replica.state import (
    GO_ON,
    Stateful,
    in_kinds_of,
    own_copy,
    places_of,
    put_back_model,
    put_back_optimizer,
)
from runtime.sharded_state import as_told, put_together, taken_apart
from runtime.snapshot import (
    Copying,
    Due,
    When,
    as_laid_out,
    digest_of,
    queued_on,
    room_for,
    state_of,
)
from runtime.stalls import Stalls
from runtime.whole.newest import Found, Loaded, Newest
from runtime.whole.ranks import Part, Ranks
from runtime.whole.samples import LEDGER, TAKEN, NoSamples, Samples, left_out

log = logging.getLogger("drydock.whole")

#: Of these each rank keeps a part of its own, and no writer sees the others'.
IN_PARTS = tuple(name for name in TIERS if name not in OF_ALL_NODES)
#: Which setting makes a tier that a rank may lack; of memory the nodes tell each other.
SETTINGS: dict[TierName, str] = {"local": ENV_LOCAL_DIR, "object": ENV_OBJECT_STORE}


class WholeJob:
    """All ranks of a job of which no part can be dropped: they train, save and restart together.

    Use it as a context manager and loop over `steps`; each turn of the loop is one step. The script
    computes the step itself, including the optimizer's. The state of the random generators of
    torch, Python and NumPy is saved too.

    Args:
        job: what `runtime.join` returned.
        model: a module, or what else keeps the weights, as
            `runtime.adapters.deepspeed.EngineState`.
        optimizer: one or several, with `state_dict` and `load_state_dict`.
        saver: where and how often checkpoints are saved.
        batches: the samples of each step. The loop takes them from `shards`, and the ledger proves
            which were trained.
        data_part: which part of each step's shards this rank computes: its index, from 0, and the
            number of parts. For ranks that divide the batch it is
            `(mesh["dp"].get_local_rank(), mesh["dp"].size())`, and `(0, 1)` if all take the same
            samples. Needed with `batches` and several ranks.
        extra: what else is saved, by name (a schedule, a scaler, a sampler); each has `state_dict`
            and `load_state_dict`.
        stalled_after_s: seconds. A step that takes so long, and 20 times as long as usual, is
            reported as `stalled` by each rank, with the place in its script; 0: never.

    Raises:
        RuntimeError: unless the default process group is that of all ranks of the job.
        ValueError: for a job of several replicas, a process that stands by for another, state that
            DeepSpeed has divided without its `EngineState`, or a `data_part` that is missing or
            does not exist.
    """

    def __init__(
        self,
        job: Job,
        model: torch.nn.Module | Stateful,
        optimizer: Stateful | Sequence[Stateful],
        saver: Checkpointer,
        *,
        batches: Batches | None = None,
        data_part: tuple[int, int] | None = None,
        extra: Mapping[str, Stateful] | None = None,
        stalled_after_s: float = 120.0,
    ) -> None:
        _demand_one_whole(job)
        self.samples = _samples_of(job, batches, data_part)
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        parts: list[tuple[str, Any]] = [("the optimizer", one) for one in optimizers]
        if isinstance(model, torch.nn.Module):
            parts += [("the model", module) for module in model.modules()]
            parts += [(f"the parameter {name}", one) for name, one in model.named_parameters()]
        for where, part in parts:
            if error := of_deepspeed(where, part):
                raise ValueError(error)
        if not dist.is_initialized() or (dist.get_rank(), dist.get_world_size()) != (
            job.rank,
            job.ranks,
        ):
            raise RuntimeError(
                f"this is rank {job.rank} of {job.ranks}, and the default process group is another "
                "or none: call init_process_group(rank=job.rank, world_size=job.ranks) first"
            )
        self.job = job
        self.model = model
        self.optimizers = optimizers
        self.extra = dict(extra or {})
        self.saver = saver
        self.committed = -1
        self.epoch = 0  # which start this is
        #: of each tier the step that was saved to it last, also if it is still being written
        self._saved: dict[TierName, int] = {}
        #: of each tier our part that was verified last; written by a thread of its own
        self._verified: dict[str, CheckpointSaved] = {}
        saver.dispatcher.on_saved = self._on_saved
        self._in_step = False  # the loop makes one
        self._left = False  # in the middle of a step
        self._over = False  # all ranks are to leave
        self._wish: Because = ""  # why they are
        self._because: Because = ""  # why we leave the loop
        self._said = (0.0, 0)  # loss and samples of the step under way
        self._loss: float | None = None  # of the same, if it was told
        self._trial: Trial | None = None  # of the state that the job began from
        self._held_back_until = 0.0  # while it shows that it trains
        self._losses = Losses()
        self._tells_losses = False
        #: told to end, all ranks have; what one alone saved later may be of another state
        self._saved_at_edge = False
        #: so often our only rank has saved the last step to a tier of all, and failed
        self._tried = 0
        self._asked = False  # the control plane wants a checkpoint
        self._owed: set[TierName] = set()  # and had none yet in these tiers
        tokens = batches.tokens_per_sample if batches is not None else 0
        self._reporter = Reporter(job, self.samples.ledger, tokens, whole=True)
        self._told_left_out = False  # that some shards were
        self._stalls = Stalls(job.trouble, stalled_after_s)
        self._ending = FinalSave(job, saver, self._save_aside)
        self._start = ""  # a word of this start, the same on all ranks

    def __enter__(self) -> Self:
        """Go on from the newest checkpoint. Raises ValueError if there are some and none can be
        loaded, and TypeError for a state of which no copy can be made."""
        try:
            self._begin()
        except BaseException as error:
            self._ending.close()
            self._tell_end(error)
            self.job.sender.close(3.0)
            self.samples.close()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._stalls.close()
        self._ending.close()
        if error is None and not (self._saved_at_edge and self.job.ranks > 1):
            self._save_last()
        self._tell_end(error)
        if error is None:  # said before: who sees a rank on another node end knows why
            self.saver.finish()
            self._tell_last()
        self.job.sender.close(3.0)
        self.samples.close()

    def steps(self, count: int) -> Iterator[int]:
        """The numbers of the steps that are left of `count`, from 0.

        A step counts as made when the loop asks for the next one. To leave early, call
        `job.stop.set()` on any rank and finish the step: one that `break` leaves halfway is not
        saved, and a loop begun after it raises RuntimeError.
        """
        if self._in_step:
            raise RuntimeError(self._left_in_a_step())
        self._because = ""  # several loops may follow each other
        while not self._over and self.committed + 1 < count:
            self._in_step = True
            self.samples.begin(self.committed + 1)
            try:
                with self._stalls.computing():
                    yield self.committed + 1
            except GeneratorExit:
                self._left = True
                raise
            self._in_step = False
            self.committed += 1
            with self._stalls.computing(counts=False):  # where all wait for one that stands still
                self._over = self._at_edge()
        self._because = "over" if self.committed + 1 >= count else self._wish

    def shards(self) -> Iterator[Shard]:
        """This rank's part of the present step, shard by shard; the same if asked for again.

        The ledger counts the shards that were taken from it. Raises RuntimeError between two steps,
        and without `batches`.
        """
        if not self._in_step:
            raise RuntimeError("no step is under way: ask for its shards in the loop over steps")
        return self.samples.of_step()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for what takes long and changes nothing that is saved, such as an evaluation.

        Enter it after the step's update, or between two loops. If the process is told to end in it,
        and killed before the next edge, that step is saved nevertheless, provided that all ranks
        are in such a block at that step or wait at its edge. Afterwards the random generators of
        torch, Python and NumPy go on from where they were.
        """
        with contextlib.ExitStack() as stack:
            if not self._left:  # else nobody knows what the state is
                try:
                    step = self.committed + self._in_step
                    made = self._state(step), due_in(self.model)
                except Exception as error:  # no checkpoint is worth the training
                    self.job.trouble("not_saved_aside", f"there is no state to save: {error!r}")
                else:
                    rest = AtRest(step, lambda: made, self._stream())
                    stack.enter_context(self._ending.at_rest(rest))
                    stack.callback(set_generators, made[0]["random"], self.model)
            yield

    def tell(self, loss: float | torch.Tensor, samples: int = 0) -> None:
        """Report the present step's loss to the job's page, and with how many samples it was made;
        where there are `batches` these say it."""
        value = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._loss = float(value)
        self._said = (self._loss, samples)

    def digest(self) -> str:
        """Equal for every run whose rank trained the same, however often it was started anew."""
        kept = {name: one for name, one in self._state().items() if name not in (LEDGER, TAKEN)}
        return digest_of({**kept, "epoch": 0})

    # --- begin and end ------------------------------------------------------------------------

    def _begin(self) -> None:
        self._ranks = Ranks(self.job.rank, self.job.ranks)
        self._start = self._ranks.from_first(uuid.uuid4().hex[:8])
        self.samples.open(self.job.trouble, self._ranks)
        self._resume(self._meet_nodes())
        self._tell_left_out_tiers()
        self._refuse_odd()
        if not self.job.rank:
            self._reporter.members = list(range(self.job.world_replicas))
            self.job.sender.speaks = True
        self.job.sender.on_directive = self._on_directive
        self._ending.begin()

    def _refuse_odd(self) -> None:
        """Raises TypeError for what no copy could be made of, while nothing is trained yet. Passed
        over are what has no state before its first step, and what `in_kinds_of` does not ask."""
        parts = {
            "model": self.model,
            **{f"optimizers.{n}": one for n, one in enumerate(self.optimizers)},
            **{f"extra.{n}": one for n, one in self.extra.items() if not isinstance(one, Iterable)},
        }
        there = {}
        for name, part in parts.items():
            with contextlib.suppress(Exception):
                there[name] = part.state_dict()
        room_for(replaced(there, taken_apart), due_in(self.model))

    def _meet_nodes(self) -> list[str]:
        """Start this node's holder, if it and others are to have one; the addresses of the others'.
        Raises RuntimeError for a network that this machine is not in."""
        holder: dict[str, str] = {}
        if self.job.holder_dir is not None and self.job.nodes > 1:
            try:
                towards = f"{os.environ.get('MASTER_ADDR', 'localhost')}:0"
                host = own_address(towards, self.job.network)
                holder = self.saver.open_holder(host)
            except OSError as error:
                text = (
                    f"peers cannot save to this node's memory: it finds no way to {towards}, by "
                    f"MASTER_ADDR ({error}); say in {ENV_NETWORK} at which network they reach it"
                )
                self.job.trouble("no_holder", text)
        holders = self._ranks.from_each(holder)
        if any(holders) and not all(holders) and not self.job.rank:
            lacks = holders.index({})
            text = f"no memory keeps anything of this job: the node of rank {lacks} has no holder"
            self.job.trouble("no_holder", text)
        return self.saver.meet_nodes(holders)

    def _tell_left_out_tiers(self) -> None:
        """A tier that some rank lacks has no part of it, and so no checkpoint of any."""
        of_each = self._ranks.from_each(sorted(self.saver.tiers))
        for name, setting in SETTINGS.items():
            lacking = [rank for rank, tiers in enumerate(of_each) if name not in tiers]
            if 0 < len(lacking) < len(of_each) and not self.job.rank:
                text = (
                    f"no checkpoint comes whole in the tier {name}: {len(lacking)} of "
                    f"{len(of_each)} ranks, the first of them rank {lacking[0]}, have no "
                    f"{setting}: give it to all or to none, and start the job anew"
                )
                self.job.trouble("tier_left_out", text, name)

    def _save_last(self) -> None:
        """To each tier that has not the last step yet, also where saving it has failed; to none if
        nobody knows which step that is, or it leads nowhere."""
        if self._in_step:
            self.job.trouble("left_in_a_step", self._left_in_a_step())
            return
        if self._losses.lost:
            return
        tiers, dispatcher = self.saver.tiers, self.saver.dispatcher
        for name in (dispatcher.unwell() & tiers.keys()) - dispatcher.busy(tiers):
            if tiers[name].own or self.job.ranks == 1:  # else one alone cannot make it whole
                last = self._saved.pop(name, -1) == self.committed
                self._tried += last and name in OF_ALL_NODES
        here = [name for name in TIERS if name in tiers and name not in self._ending.too_late]
        self._save([n for n in here if self._saved.get(n, -1) < self.committed], last=True)

    def _left_in_a_step(self) -> str:
        return (
            f"the loop of step {self.committed + 1} was left in the middle, and whether it had "
            "changed the model nobody knows: no more is saved, and the job goes on from its newest "
            "checkpoint when it is started anew. To leave set job.stop and let the step end"
        )

    def _tell_end(self, error: BaseException | None) -> None:
        if error is not None:
            self.job.trouble("exception", f"{type(error).__name__}: {error}")
        if not self.job.rank:
            words = {"over": "all steps done, or stop wanted", "told": TOLD_TO_END}
            reason = words.get(self._because, "left the loop") if error is None else "exception"
            told = Stopped(
                step=self.committed,
                reason=reason,
                at=time.time(),
                clean=error is None,
                because=self._because if error is None else "",
            )
            self.job.sender.tell(told)

    # --- saving -------------------------------------------------------------------------------

    def _at_edge(self) -> bool:
        """Between two steps: save what is due, if all ranks can. Whether all are to leave: then the
        step is saved to all tiers, for until its end the script may have much to do."""
        here = [name for name in TIERS if name in self.saver.tiers]
        # Where one rank's state outgrew its room none has a checkpoint.
        wanted = self.saver.again() if self.job.rank else self._due()
        flags: list[int] = [self.job.stop.is_set(), self.job.told.is_set()]
        flags += [name in wanted for name in TIERS]
        flags += [not (name in here and self.saver.is_free(name)) for name in TIERS]
        loss, self._loss = self._loss, None
        flags += [loss is not None, loss is not None and not math.isfinite(loss)]
        # Looked up after that: of a tier that is busy on no rank nothing new is verified any more.
        parts = dict(self._verified)
        young = int(time.monotonic() < self._held_back_until)
        times, taken = self._ending.times(here), self.samples.taken()
        said = flags, [young], times, taken, _steps_of(parts)
        with self._ending.at_rest(self._at_rest()):
            flags, (young,), times, taken, steps = _highest(self._ranks, said)
        stop, sent_away, *told, was_told, is_nan = map(bool, flags)
        self._ending.hear(here, times)
        self._note_whole(parts, steps)
        self._note_committed(taken)
        if was_told:
            self._judge(math.nan if is_nan else 0.0)
        due = [name for name, said in zip(TIERS, told, strict=False) if said]
        if self._holds_back(young):
            due = []
        busy = dict(zip(TIERS, told[len(TIERS) :], strict=True))
        # Each rank tells of its own stores that are late: no other sees them.
        ready = self.saver.ready([name for name in due if name in here])
        self.saver.prepare(lambda: room_for(self._state(), due_in(self.model)), ready)
        # What we have begun aside while we waited, the others begin now.
        begun = {name for name, step in self._saved.items() if step == self.committed}
        free = [name for name in due if not busy[name] and name not in begun]
        over = stop or sent_away
        if over:
            self._wish = "over" if stop else "told"
            self._save_last()
            self._saved_at_edge = True
        elif free:
            self._save(free)
        return over

    def _note_committed(self, taken: Sequence[int]) -> None:
        """Tell of the step that is over. `taken`: see `Samples.taken`, of all ranks the highest."""
        loss, said = self._said
        self._said = (loss, 0)  # who tells of each tenth step counts its samples once
        entered = self.samples.enter(self.committed, self.epoch, taken)
        samples = said if entered is None else entered.per_step
        self._reporter.committed(self.committed, self.epoch, loss, 0.0, samples)
        self._tell_left_out(entered)

    def _tell_left_out(self, entered: Range | None) -> None:
        if entered and (text := left_out(entered)) and not (self._told_left_out or self.job.rank):
            self._told_left_out = True
            self.job.trouble("samples_left_out", text)

    def _judge(self, loss: float) -> None:
        """A step's loss, as far as it is a number on all ranks that told it. Raises DoesNotTrain on
        all ranks alike."""
        told = self._losses.note(loss)
        if self._trial is None:
            if told is not None and not self.job.rank:
                self.job.trouble(*told)
            return
        try:
            self._trial.note(loss)
        except DoesNotTrain:
            if not self.job.rank:
                self.saver.suspect(self._trial.state)
            self._ranks.from_first(None)  # with the first of us to end torchrun ends the others
            raise
        self._tells_losses = True
        if self._trial.over:
            self._trial = None

    def _holds_back(self, still_young: int) -> bool:
        """Whether nothing is to be saved: the last loss that was told is no number, or the state
        that the job began from has not shown yet that it trains. Of a loop that tells no losses
        none shows that. `still_young`: whether any rank says so."""
        if self._trial is None or self._losses.odd:
            return self._losses.odd > 0
        shown = self._tells_losses or self.committed < self._trial.state[1] + TRIAL_STEPS
        return shown and bool(still_young)

    def _due(self) -> set[TierName]:
        """The tiers to which it is time to save."""
        if self._asked:
            self._asked, self._owed = False, {*self.saver.tiers}
        return (self._owed | self.saver.due()).intersection(TIERS)

    def _save(self, tiers: Collection[TierName], *, last: bool = False) -> None:
        copying = self._begin_save(self._at_rest(), tiers, last=last)
        if copying is not None:
            copying.wait()  # the script may do what it likes with its weights from here on

    def _save_aside(self, there: AtRest, tiers: Collection[TierName]) -> Copying | None:
        """Under the name that the same step has if it is saved at its edge, as on other ranks."""
        if self._losses.lost:
            return None
        lacking = [name for name in TIERS if name in tiers]
        lacking = [name for name in lacking if self._saved.get(name, -1) < there.step]
        return self._begin_save(there, lacking, last=True)

    def _begin_save(
        self, what: AtRest, tiers: Collection[TierName], *, last: bool
    ) -> Copying | None:
        def begin(buffer: memoryview | None) -> Copying:
            with queued_on(what.computed_on):  # also the card whose generators are asked
                state, due = what.state()
            return Copying(state, what.step, buffer, due, computed_on=what.computed_on)

        # Of what failed some may be there after all: what is written anew takes no place of it.
        name = f"{self._start}x{what.step}" + "again" * self._tried
        copying = self.saver.save(begin, name, tiers, epoch=self.epoch, last=last)
        if copying is not None:
            self._saved |= dict.fromkeys(tiers, what.step)
            self._owed -= {*tiers}
        return copying

    def _at_rest(self) -> AtRest:
        """Between two steps."""
        stream = self._stream()
        return AtRest(self.committed, lambda: (self._state(), due_in(self.model)), stream)

    def _stream(self) -> torch.cuda.Stream | None:
        """On which the model's card computes; None if no card does."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        return torch.cuda.current_stream(cards_of(self.model)[0])

    def _on_saved(self, part: CheckpointSaved) -> None:
        """What we wrote was verified: in a folder of all the whole, else our part of it. On a
        thread of its own."""
        if part.tier in OF_ALL_NODES:
            self.job.sender.tell(part)
        else:
            self._verified[part.tier] = part

    def _note_whole(self, parts: Mapping[str, CheckpointSaved], told: Sequence[int]) -> None:
        """Report a step once all ranks have verified their parts of it; see `Dispatcher.common`.

        `parts` are ours, by tier; `told` is the highest of all ranks, see `_steps_of`.
        """
        common = self.saver.dispatcher.common
        for name, last, first in zip(IN_PARTS, told, told[len(IN_PARTS) :], strict=False):
            if last == -first >= 0 and common.get(name) != last:
                self._note_common([name], last)
                part = parts[name]
                self._tell_whole(part, self._ranks.parts(part.bytes, part.digest))

    def _note_common(self, tiers: Collection[TierName], step: int) -> None:
        """Of these every rank has its part of this step, of the epoch that we are in."""
        dispatcher = self.saver.dispatcher
        dispatcher.common |= {name: step for name in tiers if name in IN_PARTS}
        if "peer" in tiers:
            dispatcher.held_by_all = (self.epoch, step)

    def _tell_whole(self, part: CheckpointSaved, parts: Sequence[Part]) -> None:
        """By the first rank, for all. `part`: ours, `parts`: of all."""
        if not self.job.rank:
            sizes, digests = zip(*parts, strict=True)
            size, digest = sum(sizes), digest_of_all(digests)
            self.job.sender.tell(replace(part, bytes=size, stored=size, digest=digest))

    def _tell_last(self) -> None:
        """The same of what was verified after the last edge, if all ranks left the loop there. By
        the store at which they met: of a process that ends just after a collective a thread of
        gloo may still need its interpreter, which aborts it. The first rank waits for the others no
        longer than for a save: one may be busy elsewhere in the script."""
        if not self._because and self.job.ranks > 1:
            return
        parts = {tier: (one.step, one.bytes, one.digest) for tier, one in self._verified.items()}
        ranks = [f"drydock/{self._start}/{rank}" for rank in range(self.job.ranks)]
        try:
            store = _get_default_store()
            store.set(ranks[self.job.rank], json.dumps(parts))
            if self.job.rank:
                return
            store.wait(ranks, timedelta(seconds=FINISH_S))
            there = [json.loads(store.get(rank)) for rank in ranks]
        except (RuntimeError, ValueError) as error:  # one has died, or the script ended the groups
            log.warning("last_save_not_told error=%s", error)
            return
        for name, part in self._verified.items():
            of_all = [one[name] for one in there if name in one and one[name][0] == part.step]
            if (
                len(of_all) == len(ranks)
                and self.saver.dispatcher.common.get(part.tier) != part.step
            ):
                self._tell_whole(part, [(size, digest) for _, size, digest in of_all])

    def _on_directive(self, directive: Directive) -> None:
        """On the sender's thread."""
        if directive.verb == "stop":
            self.job.stop.set()
        else:
            self._asked = True

    def _state(self, step: int | None = None) -> dict[str, Any]:
        """What this rank holds: of the last step, unless another is under way and has changed it
        already."""
        parts = {
            "model": self.model.state_dict(),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "extra": {name: one.state_dict() for name, one in self.extra.items()},
        }
        return {
            AS_SAVED: True,
            "step": self.committed if step is None else step,
            "epoch": self.epoch,
            **replaced(parts, taken_apart),
            **self.samples.state_dict(),
            "random": generators(self.model),
        }

    # --- putting back -------------------------------------------------------------------------

    def _resume(self, holders: Collection[str] = ()) -> None:
        """Go on from the newest checkpoint of which every rank's part verifies, in an epoch after
        all that were: what is out of reach now, or cannot be loaded, must never be taken for newer
        than what is made from here on.

        `holders`: addresses of the other nodes'. Raises what `Newest.load` and `Sources.saves`
        raise.
        """
        sources = self.saver.sources
        here = sources.saves(holders)
        found: list[Found] = [(*one,) for one in self._ranks.from_first(here)]
        if loaded := Newest(self.job, self.saver, self._ranks, self._start).load(found, here):
            self._go_on_from(loaded, found)
        (latest,) = self._ranks.highest([sources.latest_epoch])
        began, self.epoch = (
            self.epoch,
            self._ranks.from_first(None if self.job.rank else sources.next_epoch(latest)),
        )
        if self.committed >= 0:
            self._trial = Trial((began, self.committed))
            self._held_back_until = time.monotonic() + HELD_BACK_S
        self.saver.dispatcher.began = {"epoch": began, "step": self.committed, "first": self.epoch}

    def _go_on_from(self, loaded: Loaded, found: Sequence[Found]) -> None:
        self._put_back(loaded.part)
        self._tell_left_out(self.samples.complete(self._ranks, self.committed, self.epoch))
        if not self.job.rank:
            self.saver.sources.loaded(loaded.name)
        self._saved = {tier: loaded.step for _, name, tier in found if name == loaded.name}
        older = {tier: step for step, _, tier in reversed(loaded.untried) if tier in IN_PARTS}
        self.saver.dispatcher.common |= older
        also = [tier for _, name, tier in loaded.untried if name == loaded.name]
        self._note_common([loaded.tier, *also], loaded.step)

    def _put_back(self, part: Staged) -> None:
        state = own_copy(state_of(part))
        if AS_SAVED not in state:
            raise ValueError(
                "the checkpoint is of a runtime.ReplicaGroup, and no WholeJob can go on from it: "
                "start the job with the script that saved it, or give it another state folder and "
                "load in the script what python -m runtime.checkpoint export makes of this one"
            )
        if changed := self.samples.load_state_dict(state):
            self.job.trouble("data_changed", changed)
        theirs = put_together(state["model"], self.model, "model")
        put_back_model(self.model, theirs)
        has = (len(state["optimizers"]), sorted(state["extra"]))
        if has != (len(self.optimizers), sorted(self.extra)):
            raise ValueError(
                f"the state has {has[0]} optimizers and the extras {has[1]}, this script "
                f"{len(self.optimizers)} and {sorted(self.extra)}; {GO_ON}"
            )
        for index, optimizer in enumerate(self.optimizers):
            joined = partial(
                put_together, one=optimizer, where=f"optimizers.{index}", model=self.model
            )
            put_back_optimizer(str(index), optimizer, state["optimizers"][index], joined)
        for name, one in self.extra.items():
            given = put_together(state["extra"][name], one, f"extra.{name}")
            one.load_state_dict(in_kinds_of(one, given))
        self.committed, self.epoch = int(state["step"]), int(state["epoch"])
        self._state()  # a loader that is asked for its state the first time draws from them
        set_generators(state["random"], self.model)
        restored = as_told(self._state(), state)
        if digest_of(restored, as_laid_out(part.table)) != part.digest:
            text = "what was put back is not what was saved: some load_state_dict gives back less"
            self.job.trouble("checkpoint_not_restored", text)


def _demand_one_whole(job: Job) -> None:
    """Raises ValueError for a job of several replicas, and for a process that stands by."""
    if job.world_replicas > 1:
        raise ValueError(
            f"this job has {job.world_replicas} replicas ({ENV_WORLD_REPLICAS}), which would "
            "all save to one folder: a WholeJob is one replica of all its ranks. Start it as "
            "one, each with a name and a state folder of its own if you want several"
        )
    if job.standby:
        raise ValueError(
            f"{ENV_STANDBY} is {job.standby!r}, and nobody can follow a WholeJob from step to "
            "step: it would train beside it, into the same folder. To move it end it, then "
            "start it elsewhere: it goes on from its newest checkpoint"
        )


def _samples_of(
    job: Job, batches: Batches | None, data_part: tuple[int, int] | None
) -> Samples | NoSamples:
    """See `WholeJob`."""
    if batches is None:
        return NoSamples()
    if data_part is None and job.ranks > 1:
        raise ValueError(
            f"which part of the batches does rank {job.rank} compute? Say data_part=(0, 1) if all "
            "ranks take the same samples, else its place among those that divide the batch, and "
            "how many these are"
        )
    return Samples(batches, *(data_part or (0, 1)))


def _highest(ranks: Ranks, groups: Iterable[Sequence[int]]) -> list[list[int]]:
    """Of each number in each group what is the highest that a rank gives."""
    groups = list(groups)
    left = iter(ranks.highest([one for group in groups for one in group]))
    return [list(itertools.islice(left, len(group))) for group in groups]


def due_in(model: torch.nn.Module | Stateful) -> Due:
    """What each step changes, and what none does: weights that are not trained lie apart from the
    others in a checkpoint and are written once, and those that are have to change. Of weights that
    something else keeps, as an engine, nobody knows which are trained."""
    weights = [*model.parameters()] if isinstance(model, torch.nn.Module) else []
    trained = places_of(one for one in weights if one.requires_grad)
    frozen = places_of(weights) - trained

    def due(name: str, tensor: torch.Tensor) -> When:
        in_model = name.startswith(".model.")
        if not tensor.numel():  # it lies nowhere
            return "now"
        if name.startswith(".optimizers.") or (in_model and tensor.data_ptr() in trained):
            return "soon"
        return "whenever" if in_model and tensor.data_ptr() in frozen else "now"

    return due


def _steps_of(parts: Mapping[str, CheckpointSaved]) -> list[int]:
    """For `Ranks.highest`: of each tier IN_PARTS the step of this part, -1 if there is none; then
    the same below zero, of which the highest is the lowest."""
    steps = [parts[name].step if name in parts else -1 for name in IN_PARTS]
    return [*steps, *(-step for step in steps)]
