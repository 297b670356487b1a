"""Each shard's stream gives the same samples to whoever reads it, wherever one comes from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from runtime.data import Batches, of_order
from runtime.ledger.check import check, shards_of
from runtime.ledger.record import SampleLedger, Summed
from runtime.replica.fsdp import ShardGroup
from runtime.replica.gloo import Gloo
from runtime.replica.observing import Observer
from runtime.replica.shape import difference
from runtime.replica.state import TrainingState
from runtime.replica.step import StepEngine
from tests.runtime.datasets import as_list

SHARDS, SIZE = 3, 4

Sample = tuple[int, int, int]  # shard, pass, number within


def length(shard: int, epoch: int) -> int:
    """Shorter than a step, as long as one, or longer."""
    return 1 + (5 * shard + 3 * epoch) % 11


class Plain:
    """A factory that counts what is read of its streams."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, shard: int, epoch: int) -> Any:
        return self.samples(shard, epoch, 0)

    def samples(self, shard: int, epoch: int, start: int) -> Iterator[Sample]:
        for number in range(start, length(shard, epoch)):
            self.read += 1
            yield shard, epoch, number


class Startable(Plain):
    """Can begin anywhere in a pass; does not tell where that ends."""

    def __call__(self, shard: int, epoch: int, start: int = 0) -> Any:
        return self.samples(shard, epoch, start)


class Stream:
    def __init__(self, factory: Plain, shard: int, epoch: int, start: int) -> None:
        self.given = factory, shard, epoch, start

    def __len__(self) -> int:
        return length(*self.given[1:3])

    def __iter__(self) -> Iterator[Sample]:
        factory, *place = self.given
        return factory.samples(*place)


class Sized(Plain):
    """Tells how long its streams are."""

    def __call__(self, shard: int, epoch: int) -> Any:
        return Stream(self, shard, epoch, 0)


class SizedStartable(Plain):
    def __call__(self, shard: int, epoch: int, start: int = 0) -> Any:
        return Stream(self, shard, epoch, start)


KINDS: list[type[Plain]] = [Plain, Startable, Sized, SizedStartable]


def opened(factory: Callable[..., Any], rank: int = 0, ranks: int = 1, **options: Any) -> Batches:
    options = {"shards": SHARDS, "shard_size": SIZE, "collate": as_list, **options}
    batches = Batches(factory=factory, **options)
    batches.open(lambda _kind, text: pytest.fail(text), rank, ranks)
    return batches


def expected(shard: int, step: int) -> list[Sample]:
    whole = ((shard, e, n) for e in range(10**6) for n in range(length(shard, e)))
    return list(islice(whole, step * SIZE, (step + 1) * SIZE))


@pytest.mark.parametrize("kind", KINDS)
@given(places=st.lists(st.tuples(st.integers(0, 40), st.integers(0, SHARDS - 1)), max_size=12))
def test_every_step_has_its_samples_wherever_one_comes_from(
    kind: type[Plain], places: list[tuple[int, int]]
) -> None:
    batches = opened(kind())

    found = [batches.shard(step, shard).data for step, shard in places]

    assert found == [expected(shard, step) for step, shard in places]


class Iterated(IterableDataset[Sample]):
    def __init__(self, shard: int, epoch: int) -> None:
        self.place = shard, epoch

    def __iter__(self) -> Iterator[Sample]:
        return Plain().samples(*self.place, 0)


def test_a_loader_over_what_only_iterates_tells_no_length() -> None:
    """It has a `__len__` all the same, which raises."""

    def loaded(shard: int, epoch: int) -> DataLoader[Sample]:
        return DataLoader(Iterated(shard, epoch), batch_size=None, collate_fn=tuple)

    all_along = opened(loaded)

    assert [all_along.shard(step, 1).data for step in (0, 1)] == [expected(1, 0), expected(1, 1)]
    assert opened(loaded).shard(30, 1).data == expected(1, 30)


def test_a_replica_that_stays_reads_each_sample_once() -> None:
    factory = Plain()
    batches = opened(factory)

    found = [batches.shard(step, 1).data for step in range(20)]

    assert found == [expected(1, step) for step in range(20)]
    assert factory.read == 20 * SIZE


@pytest.mark.parametrize(
    ("kind", "read"), [(Plain, 1003), (Startable, 1003), (Sized, 8), (SizedStartable, 4)]
)
def test_what_a_shard_taken_over_costs(kind: type[Plain], read: int) -> None:
    """Step 250 of shard 1 begins in a late pass, with its fourth sample or so."""
    factory = kind()

    data = opened(factory).shard(250, 1).data

    assert data == expected(1, 250)
    assert factory.read <= read + 10


def test_in_an_endless_stream_one_that_can_start_anywhere_costs_no_reading() -> None:
    def endless(shard: int, _epoch: int, start: int = 0) -> Iterator[int]:
        return iter(range(1000 * shard + start, 10**9))

    assert opened(endless).shard(10**5, 2).data == [2000 + 4 * 10**5 + j for j in range(4)]


def test_a_step_asked_for_again_is_not_read_again() -> None:
    factory = Plain()
    batches = opened(factory)

    assert batches.shard(3, 0).data == batches.shard(3, 0).data
    assert factory.read == 16


def shuffled_with_noise(shard: int, epoch: int) -> Iterator[tuple[int, float, float]]:
    """As augmentation and a shuffle buffer draw: from the process's random numbers."""
    order = list(range(length(shard, epoch)))
    random.shuffle(order)
    for number in order:
        yield number, random.gauss(), float(torch.rand(()))


def shuffled_at_once(shard: int, epoch: int) -> list[tuple[int, float, float]]:
    """The same, and as the stream is made."""
    return [*shuffled_with_noise(shard, epoch)]


@pytest.mark.parametrize("factory", [shuffled_with_noise, shuffled_at_once])
def test_random_numbers_are_the_same_whoever_reads_and_leave_ours_alone(
    factory: Callable[[int, int], Any],
) -> None:
    first, later = (opened(factory) for _ in range(2))
    before = torch.get_rng_state(), random.getstate()

    all_along = [first.shard(step, 1).data for step in range(31)]
    taken_over = later.shard(30, 1).data
    back = later.shard(17, 1).data

    assert taken_over == all_along[30]
    assert back == all_along[17]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_stream_that_is_ours_no_more_is_let_go() -> None:
    closed = []

    def told(shard: int, _epoch: int) -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(shard)

    batches = opened(told)
    for shard in range(SHARDS):
        _ = batches.shard(0, shard).data

    batches.expect(1, [1])

    assert closed == [0, 2]
    batches.close()
    assert closed == [0, 2, 1]


#: A newcomer, 1, lacks steps: the member makes step 1 alone, and gives it a shard with the next.
GRANT = {"held": {"0": [], "1": []}, "assign": {"0": [0, 1, 2], "1": []}}


@pytest.fixture
def engine() -> Iterator[StepEngine]:
    """After step 0."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model, [optimizer], opened(Plain()))
    state.committed = 0
    gloo = Gloo("127.0.0.1")
    yield StepEngine(
        state,
        gloo,
        Observer(),
        ShardGroup(model, 0),
        mode="cover",
        max_grad_norm=None,
    )
    gloo.close()


def test_a_step_that_is_still_made_without_a_newcomer_reads_no_stream_again(
    engine: StepEngine,
) -> None:
    factory = Plain()
    batches = engine.batches = opened(factory)
    for shard in range(SHARDS):
        _ = batches.shard(0, shard).data

    engine.enter(2, 0, [0, 1], GRANT)
    first = [batches.shard(1, shard).data for shard in engine.shares[0]]
    then = [batches.shard(2, shard).data for shard in (0, 1)]

    assert first == [expected(shard, 1) for shard in range(SHARDS)]
    assert then == [expected(shard, 2) for shard in (0, 1)]
    assert factory.read == SIZE * (3 + 3 + 2)


@pytest.mark.parametrize(("replica", "expects"), [(0, (1, [0, 1], [0, 1, 2])), (1, (2, [2], []))])
def test_a_newcomer_that_computes_nothing_of_a_step_loads_for_the_next(
    engine: StepEngine, monkeypatch: pytest.MonkeyPatch, replica: int, expects: tuple[Any, ...]
) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(engine.batches, "expect", lambda *given: told.append(given))

    engine.enter(2, replica, [0, 1], GRANT)

    assert told == [expects]


def test_a_sample_that_cannot_be_read_is_no_end() -> None:
    faults = [OSError("sample 5 cannot be read")]

    def faulty(_shard: int, _epoch: int) -> Iterator[int]:
        yield from range(5)
        if faults:
            raise faults.pop()
        yield from range(5, 12)

    batches = opened(faulty)
    with pytest.raises(OSError, match="sample 5"):
        _ = batches.shard(1, 0).data

    assert batches.shard(1, 0).data == [4, 5, 6, 7]


def test_a_stream_that_is_not_what_it_was_is_refused() -> None:
    lengths = iter([3, 100, 5])

    def unsteady(_shard: int, _epoch: int) -> range:
        return range(next(lengths))

    batches = opened(lambda shard, epoch: iter(unsteady(shard, epoch)))
    for step in (0, 1, 0):
        _ = batches.shard(step, 0).data

    with pytest.raises(ValueError, match=r"shard 0 in epoch 0 ended after 5 .* its length was 3"):
        _ = batches.shard(1, 0).data


def test_a_stream_that_told_another_length_is_refused() -> None:
    class Longer(list[int]):
        def __len__(self) -> int:
            return 9

    batches = opened(lambda _shard, _epoch: Longer(range(7)))

    with pytest.raises(ValueError, match=r"ended after 7 samples, and its length was 9"):
        _ = batches.shard(1, 0).data


@pytest.mark.parametrize("kind", [range, lambda count: iter(range(count))], ids=["sized", "plain"])
def test_a_stream_without_samples_is_refused(kind: Callable[[int], Any]) -> None:
    batches = opened(lambda _shard, epoch: kind(2 * (1 - epoch)))

    with pytest.raises(ValueError, match="shard 2 in epoch 1 has no sample: give each shard"):
        _ = batches.shard(1, 2).data


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"data": [1, 2]}, "streams come without data"),
        ({"samples": 96, "workers": 2}, "without samples, workers: .* a thread of its own"),
        ({"drop_last": True}, "without drop_last: where one ends its next pass begins"),
    ],
)
def test_what_streams_leave_no_room_for_is_refused(said: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Batches(factory=Plain(), **said)


def test_the_ranks_of_a_replica_divide_each_shard() -> None:
    parts = [opened(Plain(), rank, 2).shard(7, 1) for rank in range(2)]

    assert parts[0].data + parts[1].data == expected(1, 7)
    assert sum((part.ids for part in parts), ()) == opened(Plain()).shard(7, 1).ids


def drawn_for(samples: list[Sample]) -> list[float]:
    """A collate function: a mask, as it draws one for each sample."""
    return [float(torch.rand(())) for _sample in samples]


def test_what_ranks_put_together_is_drawn_by_each_for_itself() -> None:
    first, second = (opened(Plain(), rank, 2, collate=drawn_for).shard(7, 1) for rank in (0, 1))

    assert not {*first.data} & {*second.data}


def test_what_the_first_rank_puts_together_is_drawn_as_in_a_job_of_one_rank() -> None:
    alone = opened(Plain(), collate=drawn_for).shard(7, 1)
    first = opened(Plain(), 0, 2, collate=drawn_for).shard(7, 1)

    assert first.ids == alone.ids[: SIZE // 2]
    assert first.data == alone.data[: SIZE // 2]


def test_what_a_stream_draws_is_the_same_on_all_ranks_for_each_reads_it_whole() -> None:
    parts = [opened(shuffled_with_noise, rank, 2).shard(7, 1).data for rank in (0, 1)]

    assert parts[0] + parts[1] == opened(shuffled_with_noise).shard(7, 1).data


def test_an_id_tells_stream_and_position() -> None:
    ids = opened(Plain()).shard(7, 2).ids

    assert [divmod(one, SHARDS) for one in ids] == [(7 * SIZE + j, 2) for j in range(SIZE)]


def test_an_order_of_streams_can_be_made_from_what_a_checkpoint_says_of_it() -> None:
    batches = opened(Plain(), seed=9)
    far = batches.samples // batches.global_batch + 3

    again = of_order(batches.state_dict())

    assert again.state_dict() == batches.state_dict()
    assert again.checksums(far) == batches.checksums(far)
    again.open(print)
    with pytest.raises(AttributeError, match="give Batches the factory"):
        _ = again.shard(0, 0).data


def test_a_checkpoint_or_a_replica_with_streams_is_told_from_one_without() -> None:
    streams, indexed = Batches(factory=Plain()), Batches(samples=960)
    shapes = [{k: str(v) for k, v in one.state_dict().items()} for one in (streams, indexed)]

    with pytest.raises(ValueError, match=r"data order is .*'order': 3.* resume with the same data"):
        indexed.load_state_dict(streams.state_dict())
    told = difference(shapes[0], shapes[1])
    assert "this replica's data order's rule is 3, the job's is 2" in told


def ledger_of(batches: Batches, steps: int) -> SampleLedger:
    ledger = SampleLedger(batches.state_dict())
    for step in range(steps):
        summed = Summed(
            coverage=[1] * SHARDS, checksums=batches.checksums(step), who=[1 + step % 2] * SHARDS
        )
        ledger.record(step, 1, summed, batches.shard_size)
    return ledger


def test_the_ledger_of_streams_is_counted_by_positions() -> None:
    batches = opened(Plain(), shard_size=1 << 15)
    per_count = batches.samples // batches.global_batch
    entries = [vars(one) for one in ledger_of(batches, 2 * per_count + 1).since()]

    report = check(entries)

    assert report.whole
    assert [one.trained_once for one in report.epochs] == [
        batches.samples, batches.samples, batches.global_batch,
    ]  # fmt: skip
    assert shards_of(entries, 1)[2]["ids"] == list(batches.shard(1, 2).ids)


def test_a_ledger_of_other_positions_is_found_out() -> None:
    entries = [vars(one) for one in ledger_of(opened(Plain()), 20).since()]
    entries[7]["proof"] = "0123456789abcdef"

    assert "step 7: the proof up to step 7 is 0123456789abcdef" in check(entries).problems[0]
