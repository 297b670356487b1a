"""What is copied at an edge can be put back, by this version and from the one before."""

from __future__ import annotations

import json
import math
import random
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime import snapshot
from runtime.data import Batches
from runtime.image import CHUNK_BYTES, Damaged, Staged
from runtime.ledger import Summed
from runtime.replica.optimizers import torchs_own
from runtime.replica.state import TrainingState, put_back_model
from runtime.snapshot import TooSmall, digest_of, room_for, size_of, stage, state_of, touched
from tests.runtime import fake_card

SUMMED = Summed(coverage=[1] * 12, checksums=[5] * 12, who=[1] * 12)


class OtherFloat(float):
    """As NumPy's shows itself."""

    def __repr__(self) -> str:
        return f"np.float64({float(self)})"


class Kept:
    """What a script gives to be kept beside its model."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Odd(torch.Tensor):
    """More than its elements."""


def training(width: int = 3, **parts: Any) -> TrainingState:
    model = torch.nn.Linear(width, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TrainingState(model, [optimizer], Batches(samples=48), **parts)


def train(state: TrainingState, steps: int) -> None:
    for _ in range(steps):
        state.model(torch.randn(4, 3)).square().mean().backward()
        state.advance(1, SUMMED)


def test_a_schedule_is_stepped_by_the_group_alone() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    state = TrainingState(model, [optimizer], Batches(samples=48), schedules=[schedule])
    at_first = state.copy()

    train(state, 2)
    trained = state.flaw()
    state.load(at_first)
    loaded = state.flaw()
    schedule.step()

    assert trained == loaded == ""
    assert "has stepped a schedule: leave that to ReplicaGroup" in state.flaw()


def warmed_up() -> TrainingState:
    """It warms up for five steps, then has milestones, which torch keeps in a Counter."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer), with_milestones]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])
    return TrainingState(model, [optimizer], Batches(samples=48), schedules=[schedule])


def test_a_schedule_put_back_while_it_warms_up_goes_on_to_the_next_one() -> None:
    undisturbed, again = warmed_up(), warmed_up()
    train(undisturbed, 3)
    again.load(undisturbed.copy())

    train(undisturbed, 6)
    train(again, 6)

    assert again.schedules[0].state_dict()["_last_lr"] == [pytest.approx(0.001)]
    assert again.schedules[0].state_dict() == undisturbed.schedules[0].state_dict()


class Pair(NamedTuple):
    left: float
    right: list[int]


class Kinds:
    """Keeps its state as it is given it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_what_a_script_keeps_comes_back_in_its_kinds() -> None:
    def kept(seen: int) -> Kinds:
        by_kind: defaultdict[str, list[int]] = defaultdict(list, rows=[seen])
        return Kinds({
            "seen": Counter({"a": seen}), "by_kind": by_kind, "pairs": [Pair(0.5, [seen])],
            "order": OrderedDict(last=seen), "new" if seen else "old": {"plain": 1},
        })  # fmt: skip

    saved, fresh = kept(7), kept(0)
    state = training(extra={"kept": fresh})

    state.load(training(extra={"kept": saved}).copy())

    assert fresh.state == saved.state
    assert [*map(type, fresh.state.values())] == [*map(type, saved.state.values())]
    assert fresh.state["by_kind"]["none yet"] == []
    assert fresh.state["pairs"][0].right == [7]


def test_a_copy_put_back_is_the_same_to_the_bit() -> None:
    first, second = training(), training()
    train(first, 3)

    second.load(first.copy())

    assert second.copy().digest == first.copy().digest
    assert (second.digest(), second.committed) == (first.digest(), 2)


def test_the_digest_of_the_training_knows_nothing_of_epochs() -> None:
    first, second = training(), training()
    train(first, 2)
    second.load(first.copy())
    second.ledger.load_state_dict([])
    second.ledger.record(0, 7, SUMMED, 1)

    assert second.digest() == first.digest()
    assert second.copy().digest != first.copy().digest


def test_a_state_with_other_parts_is_refused_by_their_names() -> None:
    with_scaler = training(scaler=torch.amp.GradScaler("cpu"))

    with pytest.raises(
        ValueError, match=r"the state has the helpers \[\], this script \['scaler'\]"
    ):
        with_scaler.load(training().copy())


def test_a_state_of_another_model_is_refused_in_one_line_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="another model") as error:
        training(width=5).load(training().copy())

    said = str(error.value)
    assert "\n" not in said
    assert "this script's Linear (size mismatch for weight: copying a param with shape" in said
    assert "python -m runtime.checkpoint inspect STATE_DIR" in said


def test_both_what_was_expected_and_what_was_found_of_another_model_are_said() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(200)])
    given = {f"module.{name}": one for name, one in model.state_dict().items()}

    with pytest.raises(ValueError, match="another model") as error:
        put_back_model(model, given)

    said = str(error.value)
    assert 'Missing key(s) in state_dict: "0.weight", "0.bias", ' in said
    assert ', … Unexpected key(s) in state_dict: "module.0.weight", ' in said
    assert len(said) < 1000


Optimizer = Callable[[list[torch.Tensor]], Any]
OF_DENSE = {*torchs_own()} - {torch.optim.SparseAdam}


def stepped(optimizer: Optimizer) -> TrainingState:
    """After a step, with a schedule, which leaves settings of its own in the groups."""
    model = torch.nn.Linear(3, 2, bias=False)
    made = optimizer([*model.parameters()])
    schedule = torch.optim.lr_scheduler.StepLR(made, 20)
    state = TrainingState(model, [made], Batches(samples=48), schedules=[schedule])
    model(torch.randn(4, 3)).square().mean().backward()
    made.step(lambda: torch.ones(()))
    return state


@pytest.mark.parametrize(
    ("saved", "script"),
    [
        (torch.optim.AdamW, torch.optim.SGD),
        (torch.optim.SGD, torch.optim.AdamW),
        (torch.optim.Adamax, torch.optim.Adam),  # which has all settings of the other
        (torch.optim.Adam, torch.optim.NAdam),
        (torch.optim.Adam, torch.optim.AdamW),  # of which only one setting's value differs
        (torch.optim.AdamW, torch.optim.Adam),
    ],
)
def test_an_optimizer_does_not_go_on_from_another_kind_s_state(
    saved: type[torch.optim.Optimizer], script: type[torch.optim.Optimizer]
) -> None:
    with pytest.raises(ValueError, match="the state's optimizer 0 is") as error:
        stepped(script).load(stepped(saved).copy())

    said = str(error.value)
    assert f"0 is {saved.__name__} with groups of [1] tensors, " in said
    assert f"this script's is {script.__name__} with groups of [1] tensors; resume with" in said
    assert "python -m runtime.checkpoint inspect STATE_DIR" in said


@pytest.mark.parametrize(
    ("saved", "script"),
    [
        *((kind, kind) for kind in sorted(OF_DENSE, key=str)),
        (partial(torch.optim.Adam, decoupled_weight_decay=True), torch.optim.AdamW),
        (partial(torch.optim.SGD, momentum=0.9), torch.optim.SGD),
        (partial(torch.optim.RAdam, decoupled_weight_decay=True), torch.optim.RAdam),
    ],
)
def test_an_optimizer_goes_on_from_its_own_kind_s_state(
    saved: Optimizer, script: Optimizer
) -> None:
    first, second = stepped(saved), stepped(script)

    second.load(first.copy())

    assert second.digest() == first.digest()


def test_what_a_torch_of_before_did_not_have_is_no_other_kind() -> None:
    saved = state_of(stepped(torch.optim.AdamW).copy())
    (group,) = saved["optimizers"]["0"]["param_groups"]
    del group["decoupled_weight_decay"], group["fused"], group["initial_lr"]
    script = stepped(torch.optim.AdamW)

    script.restore(saved)

    assert script.optimizers[0].state_dict()["param_groups"][0]["fused"] is None


class Signs:
    """The script's own, which knows no groups."""

    def step(self, _closure: object = None) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"signs": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["signs"] is not None


@pytest.mark.parametrize(
    ("saved", "script", "words"),
    [
        (
            lambda model: torch.optim.SGD(model.parameters()),
            lambda model: torch.optim.SGD([{"params": [one]} for one in model.parameters()]),
            r"is SGD with groups of \[2\] tensors, this script's is SGD with groups of \[1, 1\] "
            r"tensors \(loaded state dict has a different number of parameter groups\)",
        ),
        (
            lambda model: torch.optim.AdamW([model.weight]),
            lambda model: torch.optim.AdamW(model.parameters()),
            r"AdamW with groups of \[1\] tensors, this script's is AdamW with groups of \[2\] ",
        ),
        (
            lambda model: torch.optim.SGD(model.parameters()),
            lambda _model: Signs(),
            r"is SGD with groups of \[2\] tensors, this script's is Signs \('signs'\)",
        ),
        (
            lambda _model: Signs(),
            lambda model: torch.optim.SGD(model.parameters()),
            r"is none that this torch has, this script's is SGD with groups of \[2\] tensors \(",
        ),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_with_both_sides_and_what_to_do(
    saved: Callable[[Any], Any], script: Callable[[Any], Any], words: str
) -> None:
    models = [torch.nn.Linear(3, 2) for _ in range(2)]
    first, second = (
        TrainingState(model, [make(model)], Batches(samples=48))
        for model, make in zip(models, (saved, script), strict=True)
    )

    with pytest.raises(ValueError, match=words) as error:
        second.load(first.copy())

    assert "python -m runtime.checkpoint inspect STATE_DIR" in str(error.value)


def test_a_copy_into_memory_that_is_there_is_the_same_copy() -> None:
    state = {
        "odd": torch.ones(3),
        "flag": torch.ones((), dtype=torch.bool),
        "weight": torch.ones(9),
    }

    fresh = stage(state, 4)
    reused = stage(state, 4, touched(size_of(state)))

    assert fresh.digest == reused.digest
    with pytest.raises(TooSmall, match=f"takes {room_for(state)} bytes"):  # described, too
        stage(state, 4, touched(1))


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    large=st.integers(-2, 2),
    transposed=st.booleans(),
)
def test_a_digest_needs_no_copy(sizes: list[int], large: int, transposed: bool) -> None:
    wide = torch.arange(2 * (CHUNK_BYTES + large), dtype=torch.uint8).reshape(2, -1)
    state = {
        "small": [torch.full((size,), size, dtype=torch.float64) for size in sizes],
        "large": [wide.t(), wide][transposed],
        "none": torch.empty(0),
        "step": 3,
    }

    assert digest_of(state) == stage(state, 4).digest


def test_what_a_step_may_change_is_copied_before_it_and_the_rest_at_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    state = TrainingState(model, [optimizer], Batches(samples=96))
    at_the_edge = state.copy().digest

    copying = state.begin_copy(None)
    waits = [part.piece.name for part in copying._rest]
    copied = copying.finish()

    assert waits == [".model.0.weight", ".model.0.bias", ".model.1.weight", ".model.1.bias"]
    assert copied.digest == at_the_edge
    assert copied.table.frozen == CHUNK_BYTES  # what is not trained has chunks of its own


def test_for_what_steps_have_left_alone_the_next_one_need_not_wait() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 1) for name in ("base", "teacher", "w")})
    model["base"].requires_grad_(False)
    model["teacher"].requires_grad_(False)
    optimizer = torch.optim.SGD(model["w"].parameters(), lr=0.1)
    state = TrainingState(model, [optimizer], Batches(samples=96))

    def waited_for() -> set[str]:
        return {part.piece.name.split(".")[2] for part in state.begin_copy(None)._rest}

    at_first = waited_for()  # nothing has shown yet what steps change
    for parameter in model["teacher"].parameters():
        parameter.data.mul_(0.9)
    state.committed += 1
    after_a_step = waited_for()
    state.committed += 1
    for parameter in model["base"].parameters():
        parameter.requires_grad_(True)
    once_trained = waited_for()
    model["base"].requires_grad_(False)
    state.restore(state_of(state.copy()))
    restored = waited_for()
    state.committed += 1
    a_step_later = waited_for()

    assert at_first == once_trained == restored == {"base", "teacher", "w"}
    assert after_a_step == {"teacher", "w"}
    assert a_step_later == {"w"}  # the teacher too was left alone since


def test_a_proof_has_a_sample_of_what_is_not_trained_and_all_of_what_steps_change() -> None:
    base, trained = torch.nn.Linear(2000, 10).requires_grad_(False), torch.nn.Linear(40, 9)
    model = torch.nn.ModuleDict({"base": base, "trained": trained})
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    state = TrainingState(model, [optimizer], Batches(samples=96), extra={"kept": torch.nn.ReLU()})

    proof = state.begin_proof(touched(state.proof_size())).finish()
    proven = state_of(proof)

    assert torch.equal(proven["model"]["trained.weight"], trained.weight)
    assert proven["model"]["base.weight"].tolist() == base.weight.view(-1)[::312].tolist()
    assert "extra" not in proven
    assert sum(piece.bytes for piece in proof.table.pieces) < 8000
    assert state.proof() == proof.digest


@pytest.mark.parametrize("where", [0, 1])
def test_a_proof_tells_weights_that_the_loop_changed_from_those_that_it_did_not(where: int) -> None:
    frozen, trained = torch.nn.Linear(2000, 10).requires_grad_(False), torch.nn.Linear(10, 9)
    model = torch.nn.Sequential(frozen, trained)
    state = TrainingState(model, [torch.optim.SGD(trained.parameters())], Batches(samples=96))
    before = state.begin_proof(None).finish().digest

    again = state.begin_proof(None).finish().digest
    (frozen, trained)[where].weight.data.mul_(0.9)

    assert again == before
    assert state.begin_proof(None).finish().digest != before


def test_what_the_loop_freezes_later_is_laid_out_as_before() -> None:
    """A newcomer's script has not come to that, and must have the same digests."""
    members, newcomers = (
        torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)) for _ in range(2)
    )
    member, newcomer = (
        TrainingState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], Batches(samples=48))
        for model in (members, newcomers)
    )
    members[0].requires_grad_(False)

    copied = member.copy()
    newcomer.load(copied)

    assert newcomer.digest(ledger=True) == copied.digest
    assert newcomer.begin_proof(None).finish().digest == member.begin_proof(None).finish().digest


def test_what_begins_where_a_frozen_weight_does_is_not_taken_for_it() -> None:
    frozen = torch.nn.Linear(4, 3).requires_grad_(False)
    frozen.register_buffer("turned", frozen.weight.t())
    frozen.register_buffer("first_rows", frozen.weight[:2])
    model = torch.nn.Sequential(frozen, torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    state = TrainingState(model, [optimizer], Batches(samples=96))
    state.committed += 1

    copied = state_of(state.copy())["model"]

    assert torch.equal(copied["0.turned"], frozen.weight.t())
    assert torch.equal(copied["0.first_rows"], frozen.weight[:2])


def test_weights_that_another_tool_made_are_waited_for_until_a_step_left_them_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    state = TrainingState(model, [optimizer], Batches(samples=96))

    state.restore({"model": {name: one + 1 for name, one in model.state_dict().items()}})
    at_first = len(state.begin_copy(None)._rest)
    state.committed += 1

    assert (at_first, len(state.begin_copy(None)._rest)) == (4, 2)


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        ({"w": torch.empty(3, device="meta")}, "state.w is a tensor without memory"),
        ({"w": torch.eye(3).to_sparse()}, "state.w is a torch.sparse_coo tensor"),
        (
            {"w": [torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)]},
            "state.w.0 is a quantized tensor",
        ),
        ({"w": torch.ones(3).as_subclass(Odd)}, "state.w is a Odd"),
        ({"a": {(1, 2): 3}}, r"state.a has the key \(1, 2\); use strings or finite"),
        ({"a": {math.inf: 3}}, r"state.a has the key inf; use strings or finite numbers"),
        ({"a": object()}, "state.a is a object; .* state_dict"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_its_name(thing: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        stage(thing, 0)


def test_tied_weights_are_kept_once_and_stay_tied() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    )
    model[1].weight = model[0].weight
    copied = stage({"model": model.state_dict(), "other": model.state_dict()}, 0)

    state = state_of(copied)
    assert [p.name for p in copied.table.pieces] == [
        ".model.0.weight", ".other.0.weight", ".other.1.weight",
    ]  # fmt: skip
    assert state["model"]["0.weight"] is state["model"]["1.weight"]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.complex64).conj().imag,
        torch.arange(12).reshape(3, 4).t(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(1).expand(5),
        torch.tensor(True),
        torch.ones(3).to(torch.float8_e4m3fn),
        math.inf,
        [-math.inf, 1e-08, 1 << 70, None, "ü"],
    ],
    ids=str,
)
def test_odd_values_come_back_as_they_were(value: Any) -> None:
    copied = stage({"v": value}, 0)

    described = json.loads(json.dumps(copied.describe(), allow_nan=False))
    back = state_of(Staged.restore(described, copied.buffer))["v"]

    assert digest_of({"v": value}) == copied.digest == digest_of({"v": back})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_of_another_library_comes_back_as_a_plain_one(value: float) -> None:
    back = state_of(stage({"v": OtherFloat(value)}, 0))["v"]

    assert repr(back) == repr(value)


def test_of_many_small_tensors_the_description_has_room_too() -> None:
    state = {f"expert {n}": torch.ones(1) for n in range(30_000)}
    staged = stage(state, 0)

    described = len(json.dumps(staged.table.describe()).encode())
    assert room_for(state) >= staged.table.bytes + described


def test_a_kind_of_number_that_this_torch_has_not_is_damage() -> None:
    staged = stage({"v": torch.ones(3)}, 0)
    (piece,) = staged.table.pieces
    newer = replace(staged.table, pieces=(replace(piece, dtype="float7_e3m3"),))

    with pytest.raises(Damaged, match=r"does not make a state: .*float7_e3m3"):
        state_of(Staged(0, newer, staged.buffer, staged.hashes))


@pytest.mark.parametrize(
    "skeleton",
    [{"$float": "many"}, {"$tensor": -1}, {"$tensor": True}, {"$tensor": 9}, {"$tensor": 0.0}],
)
def test_what_describes_no_state_is_damage(skeleton: Any) -> None:
    staged = stage({"v": torch.ones(3), "w": torch.zeros(3)}, 0)
    table = replace(staged.table, skeleton=skeleton)

    with pytest.raises(Damaged, match="does not make a state"):
        state_of(replace(staged, table=table))


@pytest.mark.parametrize("kept", [{"part_of": 3}, {"part_of": {"dim": 1}, "part": "first"}])
def test_what_a_script_keeps_is_not_taken_for_a_part_of_the_model(kept: dict[str, Any]) -> None:
    copied = training(extra={"data": Kept(kept)}).copy()
    other = Kept({})

    training(extra={"data": other}).load(copied)

    assert other.state == kept


def test_what_is_done_after_each_step_is_done_by_those_who_make_up_for_it() -> None:
    """With the same random numbers, whatever was drawn while shards were computed."""
    states = []
    for drawn in (0, 5):
        torch.manual_seed(3)
        state = training()
        weight = state.model.get_parameter("weight")
        state.after_step = lambda one=weight: one.add_(torch.rand(one.shape)).clamp_(0, 1)
        for _ in range(3):
            state.model(torch.ones(4, 3)).square().mean().backward()
            torch.rand(drawn)
            state.advance(1, SUMMED)
        states.append(state)

    assert states[0].digest() == states[1].digest()
    assert float(states[0].model.get_parameter("weight").detach().min()) >= 0


def test_a_learning_rate_that_the_loop_sets_is_refused() -> None:
    state = training()
    groups: Any = state.optimizers[0].param_groups  # type: ignore[attr-defined]
    groups[0]["lr"] = 0.2  # before the first step it may be
    before = state.flaw()
    train(state, 1)
    after = state.flaw()
    groups[0]["lr"] = 0.3

    assert (before, after) == ("", "")
    assert "changed lr of optimizer 0" in state.flaw()


def test_a_learning_rate_may_be_set_after_each_step() -> None:
    state = training()
    groups: Any = state.optimizers[0].param_groups  # type: ignore[attr-defined]
    state.after_step = lambda: groups[0].update(lr=0.5 / (2 + state.committed))

    train(state, 2)

    assert state.flaw() == ""
    assert groups[0]["lr"] == 0.5 / 3


def test_a_copy_that_is_finished_later_is_of_the_edge_at_which_it_began() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, [optimizer], Batches(samples=96))
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    state.statistics.apply(state.statistics.change())
    at_the_edge = state.copy().digest

    copying = state.begin_copy(None)
    state.statistics.begin()
    model(torch.randn(8, 4)).sum().backward()  # changes running statistics and gradients

    assert copying.finish().digest == at_the_edge


def test_random_numbers_follow_from_the_step_on_every_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The current one is the model's only if the script has said so."""
    cards = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.random, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.random, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "default_generators", cards)

    training().seed(3)

    assert [card.initial_seed() for card in cards] == [torch.initial_seed()] * 2


class Draws:
    """A generator of a script's own, as it is given to be kept."""

    def __init__(self, state: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.state, self.put = state, put

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.put(state["state"])


def test_a_script_s_own_generators_go_on_where_they_were_if_extra_has_them() -> None:
    """No other is known to us: `seed` does not reach it."""

    def made(seed: int) -> tuple[Callable[[], tuple[float, float]], TrainingState]:
        torchs, pythons = torch.Generator().manual_seed(seed), random.Random(seed)  # noqa: S311
        extra = {
            "torch": Draws(torchs.get_state, torchs.set_state),
            "python": Draws(pythons.getstate, pythons.setstate),
        }
        state = TrainingState(torch.nn.Linear(2, 2), [], Batches(samples=24), extra=extra)
        return lambda: (torch.rand(1, generator=torchs).item(), pythons.random()), state

    draw, state = made(1)
    draw()
    copy = state.copy()
    expected = draw()
    other, there = made(2)
    there.load(copy)

    assert other() == expected


@pytest.mark.parametrize(
    "edge",
    [lambda state: train(state, 1), lambda state: state.load(state.copy())],
    ids=["a step", "a state put back"],
)
def test_a_copy_by_another_thread_is_of_what_the_training_s_stream_computes(
    edge: Callable[[TrainingState], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread has a current one: by its own it would copy what is still being written."""
    ours = fake_card.Stream()
    streams = {threading.get_ident(): ours}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[threading.get_ident()])
    state = training()
    state._card = fake_card.DEVICE
    edge(state)
    waits_for: list[Any] = []
    looks_on: list[Any] = []
    monkeypatch.setattr(snapshot, "stream_beside", lambda _, stream: waits_for.append(stream))

    def queued_on(stream: Any) -> nullcontext[None]:
        looks_on.append(stream)
        return nullcontext()

    monkeypatch.setattr("runtime.replica.state.queued_on", queued_on)

    aside = threading.Thread(target=state.begin_copy_aside, args=(None,))
    aside.start()
    aside.join()

    assert waits_for == [ours]
    assert looks_on == [ours, ours]  # before the copy, and after it


def imported(state: TrainingState, **weights: Any) -> None:
    """What another tool made."""
    state.restore({"model": {**state.model.state_dict(), **weights}})


def test_floating_numbers_of_another_tool_are_taken_as_the_model_has_them() -> None:
    state = training()
    imported(state, bias=torch.tensor([0.1, 0.2], dtype=torch.float64))

    assert torch.equal(state.model.state_dict()["bias"], torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("bias", [torch.tensor([1, 1j]), torch.tensor([1, (1 << 40) + 1])])
def test_what_is_no_floating_number_is_not_taken_for_one(bias: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"type mismatch for bias: {bias.dtype} in the state"):
        imported(training(), bias=bias)


def test_weights_that_are_one_here_and_were_two_there_are_not_taken() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model, [optimizer], Batches(samples=48))
    imported(state, **{"1.weight": first.weight.detach().clone()})

    with pytest.raises(ValueError, match=r"has 0\.weight and 1\.weight with other elements"):
        imported(state, **{"1.weight": torch.full((2, 2), 7.0)})


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of numbers, which may say what they are."""

    def __init__(self, first: float, fingerprint: str = "") -> None:
        self.rows = torch.arange(48.0).view(48, 1) + first
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def state_of_data(data: Rows) -> TrainingState:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingState(model, [optimizer], Batches(data, shard_size=1))


def test_samples_that_say_that_they_are_others_are_refused() -> None:
    saved = state_of_data(Rows(0.0, "january")).copy()

    same = state_of_data(Rows(0.0, "january"))
    same.load(saved)
    assert same.data_changed == ""
    with pytest.raises(ValueError, match="the fingerprint of the dataset was 'january', and is"):
        state_of_data(Rows(0.0, "june")).load(saved)


def test_of_samples_that_hold_something_else_in_memory_that_is_told() -> None:
    saved = state_of_data(Rows(0.0)).copy()

    same, other = state_of_data(Rows(0.0)), state_of_data(Rows(1.0))
    same.load(saved)
    other.load(saved)
    assert same.data_changed == ""
    assert "the content of the dataset was '192 bytes" in other.data_changed


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ("january", "", "the dataset has no fingerprint, and had 'january': nothing shows"),
        ("", "june", "the dataset has the fingerprint 'june', and had none: nothing shows"),
    ],
)
def test_of_samples_that_say_what_they_are_on_one_side_alone_that_is_told_once(
    before: str, now: str, words: str
) -> None:
    state, again = state_of_data(Rows(0.0, now)), state_of_data(Rows(0.0, now))

    state.load(state_of_data(Rows(0.0, before)).copy())
    state.advance(1, SUMMED)
    again.load(state.copy())

    assert words in state.data_changed
    assert again.data_changed == ""


@pytest.mark.parametrize("told", [None, {"fingerprint": "", "content": "other rows"}])
def test_what_was_put_back_is_what_was_saved_also_if_it_says_less_of_the_samples(
    told: dict[str, str] | None,
) -> None:
    """Of what an older version saved, nothing."""
    state, again = state_of_data(Rows(0.0)), state_of_data(Rows(1.0))
    state._data = told
    saved = state.copy()

    again.load(saved)
    assert state_of(saved).get("data") == told
    assert again.digest(ledger=True) == saved.digest
    again.advance(1, SUMMED)
    assert state_of(again.copy())["data"] == again.batches.told


def test_whole_numbers_that_another_tool_kept_as_floating_ones_are_taken() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model, [optimizer], Batches(samples=48))
    counts = torch.tensor(7.0, dtype=torch.float16)
    imported(state, **{"0.num_batches_tracked": counts})
    assert state.model.state_dict()["0.num_batches_tracked"] == 7

    with pytest.raises(ValueError, match="type mismatch for 0"):
        imported(state, **{"0.num_batches_tracked": counts + 0.5})
