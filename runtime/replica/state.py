"""Everything that must be equal on all members at a step's edge: gathered, copied, put back.

The order of calls is the training loop's; nothing here talks to anyone.
"""

from __future__ import annotations

import copy
import math
import random
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from runtime.checkpoint.resharding import replaced
from runtime.data import Batches
from runtime.image import Staged, Table
from runtime.ledger import SampleLedger, Summed
from runtime.replica.fsdp import ShardGroup, shard_of
from runtime.replica.optimizers import groups_of, in_words, other_kind
from runtime.replica.statistics import RunningStatistics
from runtime.snapshot import (
    Changed,
    Copying,
    Due,
    Mark,
    When,
    as_laid_out,
    digest_of,
    mark_of,
    queued_on,
    room_for,
    sample_of,
    size_of,
    state_of,
)

#: So many weights are looked at, to tell whether they were changed.
SAMPLED = 64
MAX_FLAW = 300  # characters of what torch says of a model that does not fit
GO_ON = (
    "resume with the script that saved it, whose tensors `python -m runtime.checkpoint inspect "
    "STATE_DIR` shows, or start a new job"
)


class Stateful(Protocol):
    """What can be saved and put back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Steps(Stateful, Protocol):
    """What an optimizer or a schedule must offer."""

    def step(self) -> Any: ...


class Averages(Stateful, Protocol):
    """A moving average of the weights, as torch.optim.swa_utils.AveragedModel."""

    def update_parameters(self, model: torch.nn.Module) -> Any: ...


class TrainingState:
    """Model, optimizers, schedules, loss scaler, averages, data order, ledger, the step itself, and
    what else the script wants kept. Random numbers need no keeping: they follow from the step."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[Steps],
        batches: Batches,
        shard_group: ShardGroup | None = None,
        *,
        schedules: Sequence[Steps] = (),
        scaler: torch.amp.GradScaler | None = None,
        ema: Averages | None = None,
        extra: Mapping[str, Stateful] | None = None,
        after_step: Callable[[], object] | None = None,
    ) -> None:
        """`after_step`: see `ReplicaGroup`."""
        self.model = model
        #: whose gradients are summed: by what they are now, whatever a loop freezes later
        self._trained_weights = [one for one in model.parameters() if one.requires_grad]
        self._frozen_weights = [one for one in model.parameters() if not one.requires_grad]
        self.shard_group = shard_group or ShardGroup(model, 0)
        self.statistics = RunningStatistics(model)
        self.optimizers = list(optimizers)
        self.batches = batches
        self.schedules = list(schedules)
        self.scaler = scaler
        self.ema = ema
        self.extra = dict(extra or {})
        self.after_step = after_step
        self.ledger = SampleLedger(batches.state_dict())
        self.committed = -1
        #: since what was restored was saved, in words
        self.data_changed = ""
        #: what the state says of the samples: as it was restored (None: by an older version, that
        #: said nothing), until a step was trained on ours
        self._data: dict[str, str] | None = batches.told
        #: of a divided model, as the last edges had it: in the middle of forward its own
        #: state_dict would take apart what forward has put together
        self._parts_at_edge: tuple[dict[str, Any], Due] | None = None
        self._steadiness = Steadiness(model, self.committed)
        self._left_at, self._left_set = self._paces(), self._settings()
        #: a trained weight is no number any more
        self.spoilt = False
        _none, self._infinite = self._odd_weights()  # a script may have made it so
        devices = {shard_of(one).device for one in model.parameters()}
        self._card = next((one for one in devices if one.type == "cuda"), None)
        #: of that card: each thread has a current one, and a script may train on another
        self._stream: torch.cuda.Stream | None = None
        weights = [*self._trained_weights, *self._frozen_weights]
        # Not each so many: layers repeat, and it might be the same weight of each.
        drawn = random.Random(0)  # noqa: S311 - nobody is to be kept from guessing them
        self._looked_at = drawn.sample(weights, min(SAMPLED, len(weights)))
        self.note_weights()

    def flaw(self) -> str:
        """What the script has done since the last edge that is left to the step, with the remedy;
        "" if nothing. For schedules as torch's: they count. Optimizers may be set before the first
        step."""
        if self._paces() != self._left_at:
            return (
                "the script has stepped a schedule: leave that to ReplicaGroup, which steps each "
                "once after the optimizer, or do not give it that schedule"
            )
        if self.committed >= 0 and (now := self._settings()) != self._left_set:
            pairs = zip(now, self._left_set, strict=False)
            name = next((one[:2] for one, before in pairs if one != before), (0, "groups"))
            return (
                f"the script has changed {name[1]} of optimizer {name[0]}: replicas that make up "
                "for steps of others do not run its loop, and would step with another. Give "
                "ReplicaGroup a schedule, such as torch.optim.lr_scheduler.LambdaLR, or set it in "
                "after_step"
            )
        return ""

    def _settings(self) -> list[tuple[int, str, Any]]:
        """Of each optimizer's groups; of numbers in tensors, which may be on a card, whether they
        were written."""
        return [
            (place, key, (id(one), one._version) if isinstance(one, torch.Tensor) else one)
            for place, optimizer in enumerate(self.optimizers)
            for group in getattr(optimizer, "param_groups", ())
            for key, one in group.items()
            if key != "params"
        ]

    def _paces(self) -> list[Any]:
        return [getattr(one, "last_epoch", None) for one in self.schedules]

    def look_for_spoilt(self) -> None:
        """After gradients that were no numbers: a scaler, or an optimizer of its own kind, may have
        kept them from the weights. If not these stay spoilt, whatever the losses are."""
        none, infinite = self._odd_weights()
        self.spoilt |= none > 0 or infinite > self._infinite

    def _odd_weights(self) -> tuple[int, int]:
        """How many elements of trained weights are no numbers, and how many are infinite."""
        weights = [shard_of(one).detach() for one in self._trained_weights]
        none = sum(int(torch.isnan(one).sum()) for one in weights)
        return none, sum(int(torch.isinf(one).sum()) for one in weights)

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        """What backward begins with, as many times as large as the scaler wants it."""
        return gradient if self.scaler is None else self.scaler.scale(gradient)

    @property
    def loss_scale(self) -> float:
        """So many times as large are the gradients of backward."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def unscale(self) -> None:
        """Take the loss scale out of the reduced gradients, which also decides whether the scaler
        lets the optimizers step: the same everywhere, for all members hold the same gradients."""
        if self.scaler is not None:
            # It makes its scale when it first scales; a newcomer applies steps before that.
            device = shard_of(next(self.model.parameters())).device
            self.scaler.scale(torch.zeros((), device=device))
            for optimizer in self._with_gradients():
                self.scaler.unscale_(optimizer)  # type: ignore[arg-type]  # typed as torch's own

    def advance(self, epoch: int, summed: Summed, *, drops: bool = False) -> None:
        """Apply the gradients that the parameters hold, and enter the step in the ledger.

        `drops`: shards that nobody summed were given up by policy.
        """
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
        elif scaled := self._with_gradients():
            for optimizer in scaled:
                self.scaler.step(optimizer)  # type: ignore[arg-type]
            self.scaler.update()
        for schedule in self.schedules:
            schedule.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self.committed += 1
        self._data = self.batches.told
        if self.after_step is not None:
            self.seed(-1)
            with torch.no_grad():
                self.after_step()
            self.statistics.changed_at_edge()
        self._left_at, self._left_set = self._paces(), self._settings()
        self._note_parts()
        self._note_stream()
        self.note_weights()
        self.ledger.record(self.committed, epoch, summed, self.batches.shard_size, drops=drops)
        self.seed(-1)

    def _with_gradients(self) -> list[Steps]:
        """The optimizers that have something to do: a scaler refuses the others."""
        return [
            one
            for one in self.optimizers
            if any(weight.grad is not None for group in groups_of(one) for weight in group)
        ]

    def seed(self, shard: int) -> None:
        """Make random numbers depend on the step and the shard, never on who draws them, nor on
        what was drawn before: so a resume, a newcomer and a survivor draw the same.

        `shard` -1 is the edge after the committed step.
        """
        given = (self.batches.seed, self.committed + 1, shard + 1)
        rank = self.shard_group.rank  # of several, each has samples of its own
        mixed = hash((*given, rank) if rank else given) & 0x7FFF_FFFF_FFFF_FFFF
        torch.default_generator.manual_seed(mixed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Of all cards: the current one is the model's only if the script has said so.
            torch.cuda.manual_seed_all(mixed)
        random.seed(mixed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(mixed & 0xFFFF_FFFF)

    def copy(self, into: memoryview | None = None) -> Staged:
        """A copy of the state at the last edge. `into`: see `snapshot.Copying`."""
        return self.begin_copy(into).finish()

    def begin_copy(self, into: memoryview | None) -> Copying:
        """The same, but what only the next commit changes is copied by `Copying.finish`: before it
        `Copying.wait` must have returned."""
        steady = self._steadiness.look(self.committed)
        return Copying(self._whole(), self.committed, into, self._due(), steady)

    def begin_comparison(self, into: memoryview | None) -> Copying:
        """The same without `extra`, of which a newcomer lacks what the loop changed there while it
        made up for steps."""
        steady = self._steadiness.look(self.committed)
        whole = self._whole()
        del whole["extra"]
        return Copying(whole, self.committed, into, self._due(), steady)

    def begin_proof(self, into: memoryview | None) -> Copying:
        """The same of what is alike on all who made the same of the same steps, whether they ran
        the script's loop or not: without `extra`, and of weights that are not trained a sample,
        which tells whether the loop changes them."""
        return Copying(self._proof(), self.committed, into, self._due())

    def proof(self) -> str:
        """The digest that such a copy would have, of what lies where it is: nothing may change it
        meanwhile, so it is for who is no member."""
        return digest_of(self._proof(), self._due())

    def begin_copy_aside(self, into: memoryview | None) -> Copying:
        """The same copy, while another thread computes the next step or anything else but a commit:
        changes nothing. Raises Changed if the weights are not the edge's, as while an evaluation
        has an average of them in their place."""
        self._demand_weights()
        parts, due = self._parts_at_edge or (self.model.state_dict(), self._due())
        state = {**self._gathered(parts), "ledger": self.ledger.state_dict()}
        state["model"] = {**state["model"], **self.statistics.at_edge()}
        copying = Copying(state, self.committed, into, due, computed_on=self._stream)
        copying.finish(hurry=True)  # whoever finishes it later finds nothing left to copy
        self._demand_weights()
        return copying

    def note_weights(self) -> None:
        """As they are now they are the last edge's."""
        self._weights_at_edge = self._some_weights()

    def _demand_weights(self) -> None:
        with queued_on(self._stream):
            now = self._some_weights()
            alike = all(map(torch.equal, now, self._weights_at_edge))
        if not alike:
            raise Changed("the script has other weights in the model than the last edge left")

    def _some_weights(self) -> list[torch.Tensor]:
        """A few elements of some weights, all over the model, as numbers that are none are alike
        too: what is put in the place of all shows in these, however it is written."""
        parts = (shard_of(one).detach() for one in self._looked_at)
        return [sample_of(one).view(torch.uint8) for one in parts if one.is_contiguous()]

    def size(self) -> int:
        """Bytes of memory for a copy. May be asked in the middle of a step."""
        gathered = {**self._gathered(), "ledger": self.ledger.state_dict()}
        return room_for(gathered, self._due())

    def proof_size(self) -> int:
        """Bytes that `begin_proof` takes."""
        return size_of(self._proof(), self._due())

    def digest(self, *, ledger: bool = False, laid_out: Table | None = None) -> str:
        """Equal for every run that trained the same; with the `ledger`, whose epochs tell of
        deaths, the digest of a copy: of one that is `laid_out` so, or as we would lay it out."""
        due = self._due() if laid_out is None else as_laid_out(laid_out)
        return digest_of(self._whole() if ledger else self._trained(), due)

    def load(self, staged: Staged) -> None:
        """Put a copy back. Raises ValueError if it belongs to other data, or to another model or
        optimizer."""
        self.restore(state_of(staged))

    def restore(self, given: Any) -> None:
        """Put back what was copied, as a nested state. What is whole there and divided here is cut.
        Raises ValueError if it belongs to other data, or to another model or optimizer."""
        state = self.shard_group.put_together(given)
        alone = "batches" not in state  # weights, that another tool made: the job begins
        if alone:
            state = {**state, "model": with_tied(state["model"], self.model)}
        state = self._cut(state)
        if alone:
            put_back_model(self.model, state["model"], cast=True)
            self.statistics.reload()
            self._steadiness = Steadiness(self.model, self.committed)
            return
        self.batches.load_state_dict(state["batches"])
        self.data_changed = self.batches.demand_told(state.get("data", {}))
        self._data = own_copy(state.get("data"))
        # What a module's set_extra_state is given it may keep.
        model = {
            name: own_copy(one) if name.endswith("_extra_state") else one
            for name, one in state["model"].items()
        }
        put_back_model(self.model, model)
        self.statistics.reload()
        for name, parts in self._parts().items():
            given = state[name]
            if set(given) != set(parts):
                raise ValueError(
                    f"the state has the {name} {sorted(given)}, this script {sorted(parts)}; "
                    f"{GO_ON}"
                )
            for key, part in parts.items():
                if name == "optimizers":
                    put_back_optimizer(key, part, given[key])
                else:
                    part.load_state_dict(in_kinds_of(part, own_copy(given[key])))
        self._left_at, self._left_set = self._paces(), self._settings()
        self.ledger.load_state_dict(state["ledger"])
        self.committed = int(state["step"])
        none, self._infinite = self._odd_weights()
        self.spoilt = none > 0  # who gave it to us holds it back
        self._parts_at_edge = None
        self._note_parts()
        self._note_stream()
        self.note_weights()
        self._steadiness = Steadiness(self.model, self.committed)
        self.seed(-1)

    def _cut(self, state: dict[str, Any]) -> dict[str, Any]:
        """As this model is divided, where a state is of one that was not."""
        if not self.shard_group.divided:
            return state
        cut = self.shard_group.cut_as
        optimizers = dict(state.get("optimizers", {}))
        for key in optimizers.keys() & self._parts()["optimizers"].keys():
            optimizer = self.optimizers[int(key)]
            given = cut(optimizers[key], optimizer.state_dict())
            # torch's own make their state with their first step, and each kind is as the weights.
            groups = getattr(optimizer, "param_groups", [])
            weights = enumerate(weight for group in groups for weight in group["params"])
            kinds = given.get("state", {}) if isinstance(given, dict) else {}
            like = {i: dict.fromkeys(kinds[i], weight) for i, weight in weights if i in kinds}
            optimizers[key] = cut(given, {"state": like})
        model = cut(state["model"], self.model.state_dict())
        return {**state, "model": model, "optimizers": optimizers}

    def _note_parts(self) -> None:
        """Which are changed in place from now on."""
        if self.shard_group.divided and self._parts_at_edge is None:
            self._parts_at_edge = (self.model.state_dict(), self._due())

    def _note_stream(self) -> None:
        """Where a card computes what the edge leaves, for whoever copies it on another thread."""
        if self._card is not None:
            self._stream = torch.cuda.current_stream(self._card)

    def _due(self) -> Due:
        """Until when each tensor stays as it is."""
        trained, frozen = places_of(self._trained_weights), self._frozen()

        def due(name: str, tensor: torch.Tensor) -> When:
            if name.startswith(".model.") and tensor.data_ptr() in frozen:
                return "whenever"
            parts = name.startswith((".optimizers.", ".helpers."))
            return "soon" if parts or tensor.data_ptr() in trained else "now"

        return due

    def _frozen(self) -> set[int]:
        """Where in memory the weights are that are not trained."""
        return places_of(self._frozen_weights) - places_of(self._trained_weights)

    def _whole(self) -> dict[str, Any]:
        return {**self._trained(), "ledger": self.ledger.state_dict()}

    def _proof(self) -> dict[str, Any]:
        whole, frozen = self._whole(), self._frozen()
        del whole["extra"]

        def shortened(one: Any) -> Any:
            is_frozen = isinstance(one, torch.Tensor) and one.data_ptr() in frozen
            return sample_of(one) if is_frozen else one

        return {**whole, "model": replaced(whole["model"], shortened)}

    def _trained(self) -> dict[str, Any]:
        """What is alike on all members at an edge; forgets what was computed since the last."""
        self.seed(-1)
        self.statistics.restore()
        return self._gathered()

    def _gathered(self, model: dict[str, Any] | None = None) -> dict[str, Any]:
        trained = {
            "model": self.model.state_dict() if model is None else model,
            **{
                name: {key: part.state_dict() for key, part in parts.items()}
                for name, parts in self._parts().items()
            },
        }
        return {
            "step": self.committed,
            **self.shard_group.taken_apart(trained),
            "batches": self.batches.state_dict(),
            **({} if self._data is None else {"data": self._data}),
        }

    def _parts(self) -> dict[str, dict[str, Stateful]]:
        """What is saved and loaded alike, by kind and name."""
        single: dict[str, Stateful | None] = {"scaler": self.scaler, "ema": self.ema}
        return {
            "optimizers": {str(i): one for i, one in enumerate(self.optimizers)},
            "schedules": {str(i): one for i, one in enumerate(self.schedules)},
            "helpers": {name: one for name, one in single.items() if one is not None},
            "extra": self.extra,
        }


def places_of(weights: Iterable[torch.Tensor]) -> set[int]:
    """Where in memory they begin."""
    return {shard_of(one).data_ptr() for one in weights}


def with_tied(weights: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """These weights by all their names in this model: other tools write tied ones once."""
    saved = model.state_dict().keys()
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    there: dict[int, Any] = {}
    for name, one in every:
        if name in weights and not _alike(there.setdefault(id(one), weights[name]), weights[name]):
            first = next(n for n, other in every if other is one and n in weights)
            raise ValueError(
                f"the state has {first} and {name} with other elements, and in this script's model "
                f"they are one weight: untie them there, or leave {name} out of what is imported"
            )
    tied = {
        name: there[id(one)]
        for name, one in every
        if name in saved and name not in weights and id(one) in there
    }
    return {**weights, **tied}


def _alike(one: Any, other: Any) -> bool:
    if one is other or not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return True
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def put_back_model(model: torch.nn.Module | Stateful, weights: Any, *, cast: bool = False) -> None:
    """Raises ValueError if they are another model's; also for elements of another type, which torch
    would round, unless floating numbers are to be `cast` to floating ones."""
    try:
        _refuse_other_types(model.state_dict(), weights, cast=cast)
        model.load_state_dict(weights)
    except RuntimeError as error:  # many lines, of which the first names the model
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        # What is missing comes first, then what was there instead.
        flaws = [
            textwrap.shorten(line, MAX_FLAW, placeholder=" …")
            for line in str(error).splitlines()[1:3]
        ]
        raise ValueError(
            f"the state is of another model than this script's {type(model).__name__} "
            f"({' '.join(flaws)}); {GO_ON}"
        ) from error


def _refuse_other_types(ours: Any, theirs: Any, *, cast: bool) -> None:
    """Raises RuntimeError, as torch does for another shape."""
    if not (isinstance(ours, Mapping) and isinstance(theirs, Mapping)):
        return
    for name in ours.keys() & theirs.keys():
        here, given = ours[name], theirs[name]
        if not (isinstance(here, torch.Tensor) and isinstance(given, torch.Tensor)):
            continue
        if name.endswith("_extra_state") or not _is_rounded(given.dtype, here.dtype):
            continue
        floating = given.is_floating_point() and here.is_floating_point()
        if not (cast and (floating or _is_exact(given, here.dtype))):
            raise RuntimeError(
                f"Error(s) in loading state_dict:\ntype mismatch for {name}: {given.dtype} in the "
                f"state, {here.dtype} in the model"
            )


def _is_exact(given: torch.Tensor, here: torch.dtype) -> bool:
    """Whether these numbers are all numbers of that kind."""
    if given.is_complex() and not here.is_complex:
        return False
    return torch.equal(given.to(here).to(given.dtype), given)


def _is_rounded(given: torch.dtype, here: torch.dtype) -> bool:
    """Whether not every number of the one kind is one of the other."""
    if given == here:
        return False
    whole = not (given.is_floating_point or given.is_complex or given == torch.bool)
    if whole and here.is_floating_point:  # torch promotes these, and rounds large ones
        return torch.iinfo(given).max > 2 / torch.finfo(here).eps
    try:
        return torch.promote_types(given, here) != here
    except RuntimeError:  # kinds that torch never brings together
        return True


def put_back_optimizer(
    key: str, optimizer: Stateful, given: Any, prepared: Callable[[Any], Any] | None = None
) -> None:
    """`prepared`: makes of the state what the optimizer is given; else it is a copy. Raises
    ValueError if it is another optimizer's."""
    theirs = given.get("param_groups") if isinstance(given, dict) else None
    ours = getattr(optimizer, "param_groups", None)
    differ = (
        f"the state's optimizer {key} is {in_words(theirs)}, "
        f"this script's is {in_words(ours, type(optimizer).__name__)}"
    )
    if other_kind(theirs, ours):
        raise ValueError(f"{differ}; {GO_ON}")
    try:
        optimizer.load_state_dict((prepared or own_copy)(given))
    except (LookupError, ValueError) as error:
        raise ValueError(f"{differ} ({str(error)[:MAX_FLAW]}); {GO_ON}") from error


class Steadiness:
    """Which of the weights that are not trained stay as they are. Some scripts change such ones
    themselves with each step, as a teacher's that follow its pupil's. Never divided ones, of which
    torch does not count how often they were written."""

    def __init__(self, model: torch.nn.Module, step: int) -> None:
        """`step`: the last one."""
        self._model = model
        #: by their places in memory: how they were first seen, and after which step
        self._seen: dict[int, tuple[Mark, float]] = {}
        self.look(step)

    def look(self, step: int) -> set[int]:
        """The places of those that at least one step has left alone, and none has changed."""
        steady: set[int] = set()
        for weight in self._model.parameters():
            place = shard_of(weight).data_ptr()
            mark = None if weight.requires_grad else mark_of(weight)
            if mark is None:
                self._seen.pop(place, None)
                continue
            before, since = self._seen.setdefault(place, (mark, step))
            if mark != before:
                self._seen[place] = (mark, math.inf)  # it never counts as steady again
            elif since < step:
                steady.add(place)
        return steady


def in_kinds_of(part: Stateful, given: Any) -> Any:
    """What was saved of it, each dict and tuple of the class that is in its place in the state that
    it has now: a checkpoint has plain ones, and some ask more of theirs (of its `Counter` a
    `MultiStepLR`, once a `SequentialLR` comes to it). Not of what has none yet, nor of what is
    iterated over: a data loader starts its workers to tell its state."""
    if isinstance(part, Iterable):
        return given
    try:
        present = part.state_dict()
    except Exception:
        return given
    return _in_kinds_of(present, given)


def _in_kinds_of(present: Any, given: Any) -> Any:
    if isinstance(given, dict):
        there: Any = present if isinstance(present, dict) else {}
        items = {key: _in_kinds_of(there.get(key), item) for key, item in given.items()}
        if type(there) is dict:
            return items
        same = copy.copy(there)
        same.clear()
        same.update(items)
        return same
    if isinstance(given, list | tuple):
        alike = isinstance(present, list | tuple) and len(present) == len(given)
        there = present if alike else [None] * len(given)
        each = [_in_kinds_of(like, one) for like, one in zip(there, given, strict=True)]
        if isinstance(given, list):
            return each
        return there._make(each) if hasattr(there, "_make") else tuple(each)
    return given


def own_copy(value: Any) -> Any:
    """The same, in tensors of its own: optimizers keep those that they are given, and these would
    keep the whole buffer that they lie in."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(own_copy(item) for item in value)
    return value
