"""What a job that restarts as a whole is after it was put back, and what it refuses to be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

import runtime
from runtime.checkpoint import facts, store
from runtime.checkpoint.draft import write
from runtime.checkpoint.suspects import TOO_MANY, TRIAL_STEPS, DoesNotTrain
from runtime.replica.fsdp import ShardGroup
from runtime.replica.gloo import Gloo
from runtime.replica.observing import Observer
from runtime.replica.rank import Rank
from runtime.replica.state import TrainingState
from runtime.replica.step import StepEngine
from runtime.whole.job import due_in
from tests.runtime.checkpoint.states import hanging
from tests.runtime.replicas import PATIENCE_S, until
from tests.runtime.whole.runs import (
    NEVER,
    Alone,
    trainee,
)


class Odd(torch.Tensor):
    """More than its elements."""


def loader() -> Any:
    return StatefulDataLoader(range(8), shuffle=True)


def test_what_is_saved_again_and_does_not_train_is_told(alone: Alone) -> None:
    alone.door.refuses = "none of these"
    with alone.start(local=0.0) as whole:
        steps = whole.steps(NEVER)
        until(
            lambda: next(steps) >= 0 and len({*alone.saved(whole, "local")}) >= 2,
            "two are there",
        )

    told = next(one for one in alone.door.messages("trouble") if one["kind"] == "checkpoint_stale")
    assert "tensors model.weight, model.bias" in told["text"]
    assert "either nothing is learnt, or what is saved is not what is trained" in told["text"]


def test_what_is_not_trained_is_written_once_and_taken_up_by_a_script_that_trains_it(
    alone: Alone, tmp_path: Path
) -> None:
    def trainee() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        base, head = torch.nn.Linear(600, 600), torch.nn.Linear(600, 2)
        model = torch.nn.Sequential(base.requires_grad_(requires_grad=False), head)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    alone.trainee = trainee
    with alone.start(shared=0.0) as whole:
        model: Any = whole.model
        optimizer: Any = whole.optimizers[0]
        steps = whole.steps(NEVER)

        def two_are_there() -> bool:
            model(torch.ones(600)).sum().backward()
            optimizer.step()
            return next(steps) >= 0 and len({*alone.saved(whole, "shared")}) >= 2

        next(steps)
        until(two_are_there, "two are there")
    files = [
        [one.stat().st_ino for one in sorted(path.glob("*.bin"))]
        for path in store.candidates(tmp_path / "state" / "checkpoints")[:2]
    ]
    again: Any = alone.start()
    again.model.requires_grad_()
    with again:
        list(again.steps(1))

    assert [one == other for one, other in zip(*files, strict=True)] == [True, False]
    assert "checkpoint_not_restored" not in alone.troubles()


@pytest.mark.parametrize("every", [1, 10])
def test_a_state_that_leads_to_nan_is_not_saved_nor_loaded_again(alone: Alone, every: int) -> None:
    def diverge(whole: runtime.WholeJob) -> None:
        with whole:
            for step in whole.steps(NEVER):
                for _ in range(step % every == 0):
                    whole.tell(math.nan)

    first, _ = alone.trained(3)
    alone.trained(2)
    bad = alone.start(local=0.0)
    with pytest.raises(DoesNotTrain, match="after the state of step 4 "):
        diverge(bad)
    saved = alone.saved(bad, "local")
    with alone.start() as whole:
        begins = whole.committed + 1
        list(whole.steps(begins + 1))

    assert bad.committed == -(-5 // every) * every + (TOO_MANY - 1) * every
    assert (max(saved), begins) == (4, 3)
    assert whole.saver.dispatcher.began["epoch"] == first


def test_of_a_loop_that_tells_no_losses_some_steps_are_waited_for(alone: Alone) -> None:
    alone.trained(1)
    with alone.start(local=0.0) as whole:
        steps = whole.steps(NEVER)
        until(lambda: next(steps) >= 0 and max(alone.saved(whole, "local")) > 0, "one is there")

    assert max(alone.saved(whole, "local")) >= TRIAL_STEPS


def test_a_state_that_trains_is_saved_again_once_that_shows(alone: Alone) -> None:
    alone.trained(1)
    saved = []
    with alone.start(local=0.0) as whole:
        for step in whole.steps(TRIAL_STEPS + 1):
            whole.tell(1.0)
            saved += [step] if whole.saver.dispatcher.busy(["local"]) else []
        until(lambda: not whole.saver.dispatcher.busy(["local"]), "it is durable")

    assert saved == []
    assert whole._trial is None


def test_a_state_that_turns_bad_much_later_takes_the_place_of_no_good_one(alone: Alone) -> None:
    with alone.start(local=0.0) as whole:
        steps = whole.steps(NEVER)

        def go_on(loss: float) -> int:
            made = next(steps)
            whole.tell(loss)
            return made

        until(lambda: go_on(1.0) and alone.saved(whole, "local"), "one is there")
        last_good = go_on(1.0)
        for _ in range(TOO_MANY + 3):
            go_on(math.nan)
            until(lambda: not whole.saver.dispatcher.busy(["local"]), "nothing is being saved")
        kept = alone.saved(whole, "local")
        until(lambda: go_on(1.0) and max(alone.saved(whole, "local")) > last_good, "it goes on")

    assert max(kept) <= last_good
    told = [kind for kind in alone.troubles() if kind.startswith("loss")]
    assert told == ["loss_not_finite", "loss_finite_again"]


@pytest.mark.parametrize(("bad", "saved"), [(TOO_MANY - 1, [3]), (TOO_MANY, [])])
def test_what_leads_nowhere_is_not_saved_at_its_end_either(
    alone: Alone, bad: int, saved: list[int]
) -> None:
    losses = [1.0] * (4 - bad) + [math.nan] * bad
    with alone.start() as whole:
        for step in whole.steps(4):
            whole.tell(losses[step])

    assert alone.saved(whole, "shared") == saved


def test_what_all_ranks_have_on_their_disks_is_known_from_the_start(alone: Alone) -> None:
    """And stays, if a disk fails before they have another one."""
    alone.trained(1)
    alone.trained(2)
    (newest, older) = store.candidates(next((alone.folder / "disk").glob("*/*/*")))
    store.remove(newest)

    with alone.start() as whole:
        common = dict(whole.saver.dispatcher.common)

    assert whole.committed == 2
    assert common == {"local": store.number_of(older)[0]} == {"local": 0}


def test_a_weight_without_elements_lies_where_it_lay() -> None:
    model = torch.nn.Linear(3, 0).requires_grad_(requires_grad=False)
    due = due_in(model)

    assert due(".model.weight", model.weight) == "now"


def test_what_a_start_made_that_was_lost_is_no_later_than_what_was_made_since(
    alone: Alone,
) -> None:
    """Its node was down meanwhile, and nobody else has seen of its later starts."""
    first, *others = (alone.trained(2, disk="a"), alone.lost(disk="a"), alone.lost(disk="a"))
    elsewhere, begins = alone.trained(3, disk="b")
    again = alone.trained(1, disk="a")

    assert [epoch for epoch, _ in (first, *others)] == [1, 2, 3]
    assert (elsewhere, begins) == (4, 2)
    assert again == (5, 5)


def test_the_log_says_that_another_torch_made_what_it_goes_on_from(
    alone: Alone, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as then:
        then.setattr(facts, "version_of", lambda module: "1.0")
        alone.trained(1)
    alone.trained(1)
    alone.trained(1)

    assert caplog.text.count("torch was '1.0', is '2.") == 1


def test_a_start_is_later_than_all_that_is_there_though_it_cannot_be_loaded(alone: Alone) -> None:
    alone.trained(1)
    alone.lost()
    for data in (alone.folder / "disk").glob("**/step-*/rank-0-*.bin"):
        data.write_bytes(b"?")
    for number in (alone.folder / "state" / "checkpoints").glob("epoch-*"):
        number.unlink()

    assert alone.trained(1) == (3, 1)


def test_while_the_shared_folder_hangs_it_goes_on_from_its_own_disk(alone: Alone) -> None:
    alone.trained(1)
    _, lost_from = alone.lost()

    with hanging(alone.folder / "state" / "checkpoints" / "run"), alone.start() as whole:
        step = next(whole.steps(NEVER))

    assert (whole.epoch, step > lost_from) == (3, True)
    assert alone.troubles().count("checkpoints_out_of_reach") == 1


def test_where_starts_cannot_be_counted_the_checkpoints_tell_which_it_is(alone: Alone) -> None:
    alone.trained(1)
    alone.lost()
    shared = alone.folder / "state" / "checkpoints"
    shared.rename(shared.with_name("away"))
    shared.write_text("in the way")

    with alone.start() as whole:
        epoch = whole.epoch

    assert epoch == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda whole: setattr(whole, "model", torch.nn.Linear(2, 3)), "of another model than"),
        (
            lambda whole: whole.model.half(),
            "another model than this script's Linear (type mismatch",
        ),
        (lambda whole: whole.optimizers.clear(), "the state has 1 optimizers and the extras"),
        (lambda whole: whole.extra.clear(), "extras ['kept'], this script 1 and []"),
        (
            lambda whole: whole.optimizers.__setitem__(
                0, torch.optim.AdamW(whole.model.parameters())
            ),
            "the state's optimizer 0 is SGD with groups of [2] tensors, this script's is AdamW",
        ),
    ],
)
def test_what_is_no_state_of_this_script_is_refused_in_a_sentence(
    alone: Alone, change: Callable[[runtime.WholeJob], None], words: str
) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
    other = alone.start()
    change(other)

    with pytest.raises(ValueError, match=f"{re.escape(words)}.*or start a new job"):
        other.__enter__()


def test_elements_of_a_type_that_has_them_all_are_put_back(alone: Alone) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
    other: Any = alone.start()
    other.model.double()
    with other:
        list(other.steps(2))

    assert torch.equal(other.model.weight, whole.model.state_dict()["weight"].double())


@contextmanager
def rank_of_a_group(alone: Alone, state: TrainingState) -> Iterator[Rank]:
    """The only one, with what the job has in its folders."""
    job, shard_group = alone.join(), ShardGroup(state.model, 0)
    gloo, saver = Gloo("127.0.0.1"), runtime.Checkpointer(job)
    engine = StepEngine(state, gloo, Observer(), shard_group, mode="cover", max_grad_norm=None)
    rank = Rank(job, state, engine, gloo, saver, Observer(), host="127.0.0.1", on_step=None)
    yield rank
    rank.close()
    job.sender.close(PATIENCE_S)


def test_a_replica_group_does_not_take_its_checkpoint_for_weights_alone(alone: Alone) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
    model, optimizer = trainee()
    state = TrainingState(model, [optimizer], runtime.Batches(samples=24, shards=2))

    with rank_of_a_group(alone, state) as rank:
        (_, name, tier), *_ = rank.checkpoints([])
        given = rank.obey("read", {"name": name, "tier": tier, "number": 1})

    assert given["failed"] == "unloadable"
    assert alone.troubles() == ["checkpoint_refused"]
    (told,) = alone.door.messages("trouble")
    assert "a runtime.WholeJob" in told["text"]
    assert told["subject"] == tier


def test_a_state_that_was_divided_among_one_rank_is_put_back_whole(alone: Alone) -> None:
    def trained(model: torch.nn.Module) -> TrainingState:
        batches, optimizer = (
            runtime.Batches(samples=24, shards=2),
            torch.optim.AdamW(model.parameters()),
        )
        return TrainingState(model, [optimizer], batches, ShardGroup(model, 0))

    (divided, _), (whole, _) = trainee(), trainee()
    fully_shard(divided, mesh=init_device_mesh("cpu", (1,)))
    theirs, ours = trained(divided), trained(whole)
    theirs.committed = 0
    write(alone.folder / "state" / "checkpoints", theirs.copy(), facts={"epoch": 1, "ranks": 1})

    with rank_of_a_group(alone, ours) as rank:
        (_, name, tier), *_ = rank.checkpoints([])
        rank.obey("read", {"name": name, "tier": tier, "number": 1})
        ours.restore(rank._read)

    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, divided.state_dict()[name].full_tensor())


def test_it_takes_a_replica_group_s_checkpoint_for_none_of_its_own(alone: Alone) -> None:
    model, optimizer = trainee()
    state = TrainingState(model, [optimizer], runtime.Batches(samples=24, shards=2))
    state.committed = 3
    write(alone.folder / "state" / "checkpoints", state.copy(), facts={"epoch": 1, "ranks": 1})

    with pytest.raises(ValueError, match=r"is of a runtime\.ReplicaGroup, .*: start the job with"):
        alone.start().__enter__()


def test_a_state_of_which_no_copy_can_be_made_is_refused_before_it_trains(alone: Alone) -> None:
    alone.kept.held = Odd(torch.zeros(1))

    with pytest.raises(TypeError, match=r"state\.extra\.kept\.held is a Odd"), alone.start():
        pass

    assert alone.troubles() == ["exception"]


class Mean:
    """Has no state before its first step."""

    count = total = 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.total / self.count, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.total = state["count"], state["mean"] * state["count"]


def test_what_has_no_state_before_its_first_step_is_saved_after_it_and_put_back(
    alone: Alone,
) -> None:
    alone.kept = first = Mean()
    with alone.start() as whole:
        for _step in whole.steps(1):
            first.count, first.total = 2, 6
    alone.kept = again = Mean()
    with alone.start():
        pass

    assert vars(again) == {"count": 2, "total": 6}
    assert alone.troubles() == []


def test_a_loader_that_is_put_back_draws_no_random_numbers(alone: Alone) -> None:
    """It makes its order once it is asked for its state."""
    alone.kept = loader()
    with alone.start() as whole:
        list(whole.steps(1))
    drawn = torch.rand(1)
    alone.kept = begins = loader()
    with alone.start():
        iter(begins)
        again = torch.rand(1)

    assert torch.equal(again, drawn)
    assert alone.troubles() == []


def test_a_save_says_which_state_its_start_began_from(alone: Alone, tmp_path: Path) -> None:
    """What that start passed over is told by it from what it keeps."""
    (first, _), (second, _) = alone.trained(3), alone.trained(2)

    newest = store.manifest_of(store.candidates(tmp_path / "state" / "checkpoints")[0])
    assert newest.facts["began"] == {"epoch": first, "step": 2, "first": second}
