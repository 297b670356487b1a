"""Samples come in an order that a seed decides, each once in an epoch, with or without an end."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data import ORDER, Batches, of_order, permuted
from runtime.replica.shape import difference

SEEDS = st.integers(0, 2**63 - 1)


def order(samples: int, seed: int, epoch: int) -> list[int]:
    return permuted(torch.arange(samples), samples, seed, epoch).tolist()


@pytest.mark.parametrize("first", range(1, 2000, 250))
def test_every_epoch_is_a_bijection_whatever_its_length(first: int) -> None:
    for samples in range(first, first + 250):
        assert sorted(order(samples, 7, samples)) == list(range(samples))


@given(st.integers(1, 2**62), SEEDS, st.integers(0, 10**6), st.data())
def test_distant_places_of_huge_epochs_hold_different_samples(
    samples: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    places = data.draw(st.sets(st.integers(0, samples - 1), min_size=1, max_size=50))

    found = permuted(torch.tensor(sorted(places)), samples, seed, epoch).tolist()

    assert len(set(found)) == len(places)
    assert all(0 <= sample < samples for sample in found)


@given(SEEDS, st.integers(0, 1000))
def test_another_seed_or_epoch_gives_another_order(seed: int, epoch: int) -> None:
    here = order(100, seed, epoch)

    assert order(100, seed, epoch + 1) != here
    assert order(100, (seed + 1) % 2**63, epoch) != here


def test_the_order_is_the_one_that_checkpoints_rely_on() -> None:
    """Whoever changes these values changes ORDER too."""
    assert ORDER == 2
    assert order(12, 5, 0) == [11, 8, 3, 7, 10, 2, 6, 4, 0, 5, 1, 9]
    assert order(12, 5, 1) == [1, 8, 11, 4, 2, 6, 3, 7, 5, 9, 0, 10]
    huge = permuted(torch.arange(4), 10**9, 2**62, 3)
    assert huge.tolist() == [235758666, 94201765, 637671297, 742931889]
    checksums = Batches(samples=960, shard_size=2, seed=5).checksums(3)
    assert checksums[:4] == [692180, 831889, 751103, 234331]


def test_ids_are_made_by_the_processor_wherever_a_script_has_tensors_made() -> None:
    def made() -> list[tuple[tuple[int, ...], list[int]]]:
        indexed, streams = Batches(samples=96), Batches(factory=lambda shard, epoch: iter(()))
        return [(one.shard(9, 2).ids, one.checksums(9)) for one in (indexed, streams)]

    usual = made()

    with torch.device("meta"):
        assert made() == usual


def test_no_place_favours_a_sample() -> None:
    first = Counter(permuted(torch.tensor([0]), 10, 1, epoch).item() for epoch in range(5000))

    assert all(380 < first[sample] < 620 for sample in range(10))


@settings(max_examples=50)
@given(st.integers(24, 200), st.integers(0, 5), SEEDS)
def test_a_seamless_stream_trains_each_sample_once_an_epoch(
    samples: int, epoch: int, seed: int
) -> None:
    batches = Batches(samples=samples, shard_size=2, seed=seed)
    start = epoch * samples
    first, end = start // 24, -(-(start + samples) // 24)

    stream = batches.ids(first, end).flatten()[start - first * 24 :][:samples]

    assert sorted(stream.tolist()) == list(range(samples))


@settings(max_examples=50)
@given(st.integers(24, 200), st.integers(0, 5), SEEDS)
def test_with_drop_last_no_step_has_samples_of_two_epochs(
    samples: int, epoch: int, seed: int
) -> None:
    batches = Batches(samples=samples, shard_size=2, seed=seed, drop_last=True)
    steps = samples // 24

    ids = batches.ids(epoch * steps, (epoch + 1) * steps).flatten().tolist()

    assert len(set(ids)) == len(ids) == steps * 24
    assert ids == order(samples, seed, epoch)[: len(ids)]


@given(st.integers(0, 10**4), st.integers(0, 11))
def test_a_shard_is_the_same_asked_alone_or_with_others(step: int, index: int) -> None:
    batches = Batches(samples=1001, shard_size=3, seed=4)

    ids = batches.ids(step, step + 1)

    assert batches.shard(step, index).ids == tuple(ids[0, index].tolist())
    assert batches.checksums(step) == batches.checksums_of(ids)[0].tolist()


@settings(derandomize=True)  # one order in a million of another has its checksum
@given(
    st.lists(st.integers(0, 2**62), min_size=4, max_size=4, unique=True), st.permutations(range(4))
)
def test_checksums_tell_ids_and_their_order_and_are_exact_in_float32(
    ids: list[int], turned: list[int]
) -> None:
    batches = Batches(samples=100, shard_size=4)
    given_order = batches.checksums_of(torch.tensor(ids)).item()

    other = batches.checksums_of(torch.tensor([ids[i] for i in turned])).item()

    assert 0 <= given_order < 1 << 20
    assert torch.tensor(float(given_order), dtype=torch.float32).item() == given_order
    assert (other == given_order) == (turned == [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"seed": 6}, "this run's is"),
        ({"drop_last": 1}, "this run's is"),
        ({"order": 4}, "put in order by rule 4, this version knows rules 2 and, for streams, 3"),
    ],
)
def test_a_checkpoint_of_another_order_is_refused(changed: dict[str, int], told: str) -> None:
    batches = Batches(samples=96, seed=5)

    with pytest.raises(ValueError, match=told):
        batches.load_state_dict({**batches.state_dict(), **changed})


def test_a_checkpoint_from_before_the_orders_had_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"by rule 1, .* start a new job"):
        Batches(samples=96).load_state_dict(
            {"samples": 96, "shards": 12, "shard_size": 1, "seed": 0}
        )


def test_an_order_can_be_made_from_what_a_checkpoint_says_of_it() -> None:
    batches = Batches(samples=500, shards=6, shard_size=5, seed=9, drop_last=True)

    again = of_order(batches.state_dict())

    assert again.state_dict() == batches.state_dict()
    assert again.shard(17, 4) == batches.shard(17, 4)


def test_replicas_with_other_ends_of_their_epochs_are_told_apart() -> None:
    ours = {key: str(value) for key, value in Batches(samples=96).state_dict().items()}

    assert "this replica's drop_last is 1, the job's is 0" in difference(
        {**ours, "drop_last": "1"}, ours
    )


def test_too_few_samples_and_a_seed_out_of_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="11 samples do not fill one global batch of 12"):
        Batches(samples=11)
    with pytest.raises(ValueError, match="the seed -1 is none"):
        Batches(samples=12, seed=-1)
    with pytest.raises(ValueError, match="say what to train on"):
        Batches()


@pytest.mark.parametrize("number", [0, -2])
def test_a_batch_of_nothing_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"shards={number}: give a number of at least 1"):
        Batches(samples=24, shards=number)
    with pytest.raises(ValueError, match=f"shard_size={number}: give a number of at least 1"):
        Batches(samples=24, shard_size=number)


def test_the_ranks_of_a_replica_divide_each_shard() -> None:
    whole, *parts = (Batches(samples=96, shards=4, shard_size=6) for _ in range(4))
    for rank, one in enumerate(parts):
        one.open(print, rank, 3)

    given = [one.shard(5, 2).ids for one in parts]

    assert sum(given, ()) == whole.shard(5, 2).ids
    assert [len(ids) for ids in given] == [2, 2, 2]
    assert parts[0].checksums(5) == whole.checksums(5)


def test_a_shard_that_ranks_cannot_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a shard of 5 samples .* 2 ranks .* give Batches"):
        Batches(samples=96, shard_size=5).open(print, 0, 2)
