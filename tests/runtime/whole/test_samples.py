"""What a job that restarts as a whole trains on, and what its ledger proves of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import runtime
from runtime.ledger.__main__ import read
from runtime.ledger.check import Report, check
from runtime.whole.samples import NoSamples, Samples
from tests.runtime.replicas import until
from tests.runtime.test_final_save import GRACE_S, quick
from tests.runtime.whole.runs import NEVER, Alone

SAMPLES, SHARDS = 50, 4


def batches(**others: Any) -> runtime.Batches:
    return runtime.Batches(**{"samples": SAMPLES, "shards": SHARDS, "shard_size": 2, **others})


def ledger(alone: Alone) -> Report:
    return check(*read([alone.folder / "state"]))


def taken(whole: runtime.WholeJob, steps: int) -> list[int]:
    """The samples of so many steps more."""
    count = whole.committed + 1 + steps
    return [sample for _ in whole.steps(count) for one in whole.shards() for sample in one.ids]


class Together:
    """Several ranks that say what they have to say at once, as `Ranks` of one of them."""

    def __init__(self, said: dict[str, list[Any]]) -> None:
        self.said = said

    def highest(self, numbers: list[int]) -> list[int]:
        theirs = self.said["highest"].pop(0)
        return [max(pair) for pair in zip(numbers, theirs, strict=True)]

    def from_each(self, value: Any) -> list[Any]:
        return [value, *self.said["from_each"]]


def test_every_sample_is_trained_once_however_often_it_is_started_anew(alone: Alone) -> None:
    with alone.start(batches=batches()) as whole:
        ids = taken(whole, 5)
    with alone.start(batches=batches()) as whole:
        lost = whole.steps(NEVER)
        next(lost)
        list(whole.shards())  # of a step that nobody ends
    with alone.start(batches=batches()) as whole:
        ids += taken(whole, 8)

    report = ledger(alone)
    assert whole.epoch == 3
    assert sorted(ids[:SAMPLES]) == sorted(ids[SAMPLES : 2 * SAMPLES]) == [*range(SAMPLES)]
    assert report.whole, report.problems
    assert [(one.trained_once, one.to_come) for one in report.epochs] == [(50, 0), (50, 0), (4, 46)]
    assert report.epochs[0].computed == {0: 50}
    assert alone.troubles() == ["left_in_a_step"]


def test_the_control_plane_is_told_of_it_and_counts_by_it(alone: Alone) -> None:
    with alone.start(batches=batches(tokens_per_sample=7)) as whole:
        taken(whole, 3)

    told = alone.door.messages("ledger")[-1]
    progress = alone.door.messages("progress")
    assert (told["step_to"], told["samples"]) == (2, 24)
    assert told["computed"] == [[0, 0, SHARDS]]
    assert sum(one["samples"] for one in progress) == 24
    assert sum(one["tokens"] for one in progress) == 7 * 24


def test_shards_have_their_data_and_draw_nothing_from_the_model_s_random_numbers(
    alone: Alone,
) -> None:
    rows = Drawing()
    with alone.start(batches=batches(data=rows, samples=None)) as whole:
        steps = whole.steps(2)
        next(steps)
        before = torch.get_rng_state()
        given = [(shard.ids, shard.data.tolist()) for shard in whole.shards()]
        assert torch.equal(torch.get_rng_state(), before)
        list(steps)

    assert all([10 * sample for sample in ids] == data for ids, data in given)
    assert len(rows.drawn) == len({*rows.drawn}) == 8


class Drawing(torch.utils.data.Dataset[Any]):
    """Augments what it gives."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> int:
        self.drawn.append(float(torch.rand(())))
        return 10 * sample


def test_what_no_rank_took_is_told_and_listed(alone: Alone) -> None:
    with alone.start(batches=batches()) as whole:
        for _step in whole.steps(3):
            next(whole.shards())

    (told,) = alone.door.messages("trouble")
    assert told["kind"] == "samples_left_out"
    assert "no rank took the shards [1, 2, 3] of step 0" in told["text"]
    (only,) = whole.samples.ledger.ranges  # however many such steps there are
    assert (only.step_to, only.dropped) == (2, (1, 2, 3))
    assert ledger(alone).epochs[0].dropped == 3 * 3 * 2


def test_a_step_that_is_saved_aside_before_its_edge_is_in_the_ledger_of_who_goes_on_from_it(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone.start(batches=batches(), grace_s=GRACE_S) as whole:
        quick(whole)
        monkeypatch.setattr("runtime.replica.preemption.BEGIN_S", 60.0)
        steps = whole.steps(NEVER)
        next(steps)
        list(whole.shards())
        with whole.evaluating():
            whole.job.told.set()
            until(lambda: 0 in alone.saved(whole, "shared"), "it is saved aside")
        monkeypatch.setattr(whole, "_save_last", lambda: None)
        list(steps)
    with alone.start(batches=batches()) as whole:
        taken(whole, 2)

    report = ledger(alone)
    assert report.whole, report.problems
    assert (report.step_from, report.step_to) == (0, 2)


def test_of_a_step_that_a_part_of_the_ranks_saved_aside_all_have_the_ledger_of_the_others() -> None:
    early, late = Samples(batches(), 0, 2), Samples(batches(), 1, 2)
    for one in (early, late):
        one.begin(0)
        assert len([*one.of_step()]) == SHARDS // 2
    together = [max(pair) for pair in zip(early.taken(), late.taken(), strict=True)]
    saved_aside = early.state_dict()
    late.enter(0, 1, together)
    at_edge = late.state_dict()

    for state, part, others in ((saved_aside, 0, late), (at_edge, 1, early)):
        again = Samples(batches(), part, 2)
        again.load_state_dict(state)
        has = others.ledger.step == 0
        given = others.ledger.state_dict() if has else None
        ranks: Any = Together({"highest": [[not has, has]], "from_each": [given]})
        again.complete(ranks, 0, 1)
        assert again.ledger.state_dict() == late.ledger.state_dict()
        assert again.state_dict()["taken"] == []


@given(st.lists(st.sets(st.integers(0, 3)), min_size=SHARDS, max_size=SHARDS))
def test_a_shard_is_trained_once_if_any_rank_took_it(takers: list[set[int]]) -> None:
    """`takers`: of each shard the ranks that took it, of the four that there are."""
    ranks = [Samples(batches(), part, 2) for part in (0, 1, 0, 1)]
    for rank, one in enumerate(ranks):
        one._taken = {shard for shard, who in enumerate(takers) if rank in who}
    told = [max(numbers) for numbers in zip(*(one.taken() for one in ranks), strict=True)]
    entry = ranks[0].enter(0, 1, told)

    assert entry.dropped == tuple(shard for shard, who in enumerate(takers) if not who)
    assert entry.clean
    assert entry.per_step == 2 * sum(map(bool, takers))


def test_ranks_that_would_not_train_on_the_same_are_refused_by_all() -> None:
    other = Samples(batches(seed=8), 1, 2)
    said = [other.batches.state_dict(), other.batches.told, 2]
    ranks: Any = Together({"from_each": [[said, 1]]})

    with pytest.raises(ValueError, match=r"rank 1 would train on .*give all ranks the same"):
        Samples(batches(), 0, 2).open(lambda *_: None, ranks)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Samples(batches(), 0, 1), None), (NoSamples(), [[{}, {}, 1], 0])]
)
def test_batches_that_a_part_of_the_ranks_has_are_refused_by_all(
    ours: Samples | NoSamples, theirs: Any
) -> None:
    ranks: Any = Together({"from_each": [theirs]})

    with pytest.raises(ValueError, match="some ranks were given batches and others not: give all"):
        ours.open(lambda *_: None, ranks)


def test_of_several_ranks_each_is_to_say_its_part(alone: Alone) -> None:
    job = alone.join(DRYDOCK_RANKS="2")
    model, optimizer = alone.trainee()

    with pytest.raises(ValueError, match=r"rank 0 compute\? Say data_part=\(0, 1\) if all ranks"):
        runtime.WholeJob(job, model, optimizer, runtime.Checkpointer(job), batches=batches())


def test_a_part_that_no_rank_computes_is_named(alone: Alone) -> None:
    job = alone.join()
    saver = runtime.Checkpointer(job)
    model, optimizer = alone.trainee()
    whole = runtime.WholeJob(job, model, optimizer, saver, batches=batches(), data_part=(0, 2))

    with pytest.raises(ValueError, match="no rank computes part 1 of 2: let data_part be"):
        whole.__enter__()


@pytest.mark.parametrize(
    ("part", "parts", "words"),
    [
        (2, 2, r"data_part=\(2, 2\): the first is to be from 0 to 1"),
        (0, 0, r"data_part=\(0, 0\)"),
        (0, 3, "4 shards cannot be divided among 3 parts"),
    ],
)
def test_a_part_that_there_is_not_is_refused(part: int, parts: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Samples(batches(), part, parts)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (None, batches(), "the state of step 0 was saved without batches"),
        (batches(), None, "this script gives its WholeJob no batches"),
        (batches(), batches(seed=8), "the checkpoint's data order is"),
    ],
)
def test_a_state_of_other_samples_is_refused_in_a_sentence(
    alone: Alone, first: runtime.Batches | None, second: runtime.Batches | None, words: str
) -> None:
    with alone.start(batches=first) as whole:
        list(whole.steps(1))

    with pytest.raises(ValueError, match=f"{re.escape(words)}.*or start a new job"):
        alone.start(batches=second).__enter__()


def between_two(whole: runtime.WholeJob) -> Iterator[Any]:
    list(whole.steps(1))
    return whole.shards()


def in_a_step(whole: runtime.WholeJob) -> Iterator[Any]:
    steps = whole.steps(1)
    next(steps)
    return whole.shards()


def left_over(whole: runtime.WholeJob) -> Iterator[Any]:
    steps = whole.steps(2)
    next(steps)
    shards = whole.shards()
    next(shards)
    next(steps)
    return shards


@pytest.mark.parametrize(
    ("own", "ask", "words"),
    [
        (batches(), between_two, "no step is under way"),
        (batches(), left_over, "the shards of step 0 were left for after it"),
        (None, in_a_step, "given no batches"),
    ],
)
def test_shards_are_those_of_the_step_under_way(
    alone: Alone,
    own: runtime.Batches | None,
    ask: Callable[[runtime.WholeJob], Iterator[Any]],
    words: str,
) -> None:
    with alone.start(batches=own) as whole, pytest.raises(RuntimeError, match=words):
        next(ask(whole))
