"""What a shard's data is does not depend on who loads it, and a worker's death costs only time."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from runtime import loading
from runtime.data import Batches
from runtime.loading import MAX_DEATHS, random_numbers
from tests.runtime.datasets import (
    TORN_BYTES,
    Averages,
    Endless,
    Faulty,
    Fetching,
    Greeted,
    Keeping,
    Labelled,
    Noisy,
    as_list,
    broken_elsewhere,
    die,
    fail,
    label,
    locked_elsewhere,
    say_hello,
    stuck_elsewhere,
    torn_elsewhere,
)
from tests.runtime.replicas import PATIENCE_S, ROOT, until

Open = Callable[..., Batches]
LOADERS = pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])


class Drawing(Noisy):
    """Its samples are drawn, whatever their numbers."""

    def __getitem__(self, _sample: int) -> Any:
        return torch.rand(())


@pytest.fixture
def troubles() -> list[str]:
    return []


@pytest.fixture
def opened(troubles: list[str]) -> Iterator[Open]:
    """Batches of four shards that are closed with the test; shards 0 and 1 are ours."""
    made: list[Batches] = []

    def make(data: Any, rank: int = 0, ranks: int = 1, **options: Any) -> Batches:
        made.append(Batches(data, shards=4, **options))
        made[-1].open(lambda kind, text: troubles.append(f"{kind}: {text}"), rank, ranks)
        made[-1].expect(0, [0, 1])
        return made[-1]

    yield make
    for batches in made:
        batches.close()


def loaders_of(batches: Batches, step: int, shards: tuple[int, ...] = (0, 1)) -> set[int]:
    """The processes that loaded a step."""
    return {pid for k in shards for pid in batches.shard(step, k).data[1].tolist()}


def is_gone(pid: int | str) -> bool:
    return not Path(f"/proc/{pid}").exists()


def first_step_of_workers(
    batches: Batches, first: int = 0, shards: tuple[int, ...] = (0, 1)
) -> int:
    """Fetch one step after another until workers have loaded all of one."""
    step = first - 1

    def loaded_elsewhere() -> bool:
        nonlocal step
        step += 1
        return os.getpid() not in loaders_of(batches, step, shards)

    until(loaded_elsewhere, "workers load a step")
    return step


def test_a_shard_s_data_is_its_samples_collated(opened: Open) -> None:
    shard = opened(Noisy(), shard_size=3).shard(5, 2)

    values, pids = shard.data

    assert values.floor().long().tolist() == list(shard.ids)
    assert set(pids.tolist()) == {os.getpid()}
    assert shard.data is shard.data


def test_each_rank_of_a_replica_draws_random_numbers_of_its_own(opened: Open) -> None:
    first, second = (opened(Drawing(), rank, 2, shard_size=4).shard(5, 2).data for rank in (0, 1))

    assert not {*first.tolist()} & {*second.tolist()}


def test_the_first_rank_draws_what_a_job_of_one_rank_draws(opened: Open) -> None:
    alone = opened(Drawing(), shard_size=4).shard(5, 2)
    first = opened(Drawing(), 0, 2, shard_size=4).shard(5, 2)

    assert first.ids == alone.ids[:2]
    assert first.data.tolist() == alone.data[:2].tolist()


def test_a_dataset_that_fetches_many_at_once_is_asked_so(opened: Open) -> None:
    shard = opened(Fetching(), shard_size=3, collate=as_list).shard(5, 2)

    assert shard.data == [10 * sample for sample in shard.ids]


def test_a_dataset_that_keeps_another_is_no_loader(opened: Open) -> None:
    keeps = Keeping()

    shard = opened(keeps, shard_size=3, collate=keeps.collate_fn).shard(5, 2)

    assert shard.data == [float(one) for one in shard.ids]


def test_without_a_dataset_the_ids_are_all_there_is() -> None:
    with pytest.raises(AttributeError, match=r"index your data with shard\.ids"):
        _ = Batches(samples=100).shard(0, 0).data


@LOADERS
def test_a_loader_gives_all_but_order_and_position(opened: Open, kind: type[Any]) -> None:
    loader = kind(
        Noisy(100), batch_size=3, shuffle=True, num_workers=2, collate_fn=as_list, drop_last=True
    )

    batches = opened(loader, seed=8)

    alike = Batches(samples=100, shards=4, shard_size=3, seed=8, drop_last=True)
    assert batches.state_dict() == alike.state_dict()
    assert [int(value) for value, _ in batches.shard(7, 3).data] == list(alike.shard(7, 3).ids)


def refused() -> dict[str, tuple[type[Exception], str, Callable[[], Any]]]:
    data = Noisy(8)
    weighted = WeightedRandomSampler([1.0] * 8, 8)
    own_batches = BatchSampler(SequentialSampler(data), 2, drop_last=False)
    return {
        "sampler": (
            ValueError,
            "has a WeightedRandomSampler of its own .*: leave sampler and batch_sampler out",
            lambda: Batches(DataLoader(data, sampler=weighted)),
        ),
        "sampler of a part": (
            ValueError,
            r"has a RandomSampler of its own \(4 of 8 samples\)",
            lambda: Batches(DataLoader(data, sampler=RandomSampler(data, num_samples=4))),
        ),
        "batch sampler": (
            ValueError,
            "give it batch_size=",
            lambda: Batches(DataLoader(data, batch_sampler=own_batches)),
        ),
        "iterable": (
            TypeError,
            "Endless has no samples .*: give a map",
            lambda: Batches(Endless()),
        ),
        "loader of an iterable": (
            TypeError,
            "give a map dataset",
            lambda: Batches(DataLoader(Endless())),
        ),
        "said twice": (
            ValueError,
            "already says what shard_size, workers would",
            lambda: Batches(DataLoader(data), shard_size=2, workers=2),
        ),
        "fork": (
            ValueError,
            "cannot be started by 'fork': use one of forkserver, spawn",
            lambda: Batches(data, workers=2, start="fork"),
        ),
        "length": (
            ValueError,
            "the dataset has 8 samples, not 9",
            lambda: Batches(data, samples=9, shards=2),
        ),
    }


@pytest.mark.parametrize("case", refused())
def test_what_cannot_be_put_in_order_is_refused_with_the_remedy(case: str) -> None:
    kind, told, make = refused()[case]

    with pytest.raises(kind, match=told):
        make()


@pytest.mark.parametrize(("start", "rank"), [("forkserver", 0), ("spawn", 1)])
def test_workers_load_the_same_and_leave_random_numbers_alone(
    opened: Open, start: str, rank: int
) -> None:
    theirs = opened(Noisy(), rank, 2, shard_size=2, workers=2, start=start)
    ours = opened(Noisy(), rank, 2, shard_size=2)
    step = first_step_of_workers(theirs)
    before = (torch.get_rng_state(), random.getstate())

    pairs = [
        (theirs.shard(step, k).data[0], ours.shard(step, k).data[0])
        for step in range(step + 1, step + 20)
        for k in (0, 1)
    ]

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_four_threads")
def test_what_the_rank_computes_as_it_loads_has_the_last_bits_that_workers_come_to(
    opened: Open,
) -> None:
    batches = opened(Averages(), workers=1)
    step = first_step_of_workers(batches) + 1

    (theirs, worker), (ours, rank) = (batches.shard(step, k).data for k in (0, 3))

    assert worker.item() != rank.item() == os.getpid()
    assert torch.equal(theirs, ours)
    assert torch.get_num_threads() == 4


def test_what_is_drawn_on_the_current_card_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    other, current = (torch.Generator().manual_seed(7) for _ in range(2))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", (other, current))

    drawn = []
    for _ in range(2):
        with random_numbers(11):
            drawn.append(torch.rand(3, generator=current).tolist())

    assert drawn[0] == drawn[1]
    assert torch.equal(torch.rand(3, generator=current), torch.rand(3, generator=other))


def test_shards_that_come_to_us_are_loaded_at_once_and_then_beforehand(opened: Open) -> None:
    batches = opened(Noisy(), workers=2)
    step = first_step_of_workers(batches)

    taken_over = batches.shard(step, 3)
    batches.expect(step + 1, [0, 1, 3])

    assert taken_over.data[0].floor().long().tolist() == list(taken_over.ids)
    assert taken_over.data[1].tolist() == [os.getpid()]
    assert first_step_of_workers(batches, step + 1, (0, 1, 3)) > step


def test_a_replica_that_comes_back_later_finds_the_step_it_is_at(opened: Open) -> None:
    batches = opened(Noisy(), workers=2)
    step = first_step_of_workers(batches) + 1000
    batches.expect(step, [2, 3])

    found = [batches.shard(one, k) for one in range(step, step + 12) for k in (2, 3)]

    assert all(one.data[0].floor().long().tolist() == list(one.ids) for one in found)
    assert first_step_of_workers(batches, step + 12, (2, 3)) >= step


def test_a_dead_worker_is_survived_told_and_replaced(opened: Open, troubles: list[str]) -> None:
    batches = opened(Noisy(), workers=2)
    step = first_step_of_workers(batches)
    (victim, *_) = loaders_of(batches, step + 1)

    os.kill(victim, signal.SIGKILL)
    replaced = first_step_of_workers(batches, step + 20)

    assert victim not in loaders_of(batches, replaced + 1)
    (told,) = troubles
    assert told.startswith("loader_worker_died: ")
    assert told.endswith("; a loader's workers are started anew")


def test_after_so_many_deaths_the_rank_loads_by_itself(opened: Open, troubles: list[str]) -> None:
    batches = opened(Noisy(), workers=1)
    step = 0
    for _ in range(MAX_DEATHS):
        step = first_step_of_workers(batches, step + 20)
        (victim,) = loaders_of(batches, step + 1)
        os.kill(victim, signal.SIGKILL)
        until(partial(is_gone, victim), "the worker is gone")
        loaders_of(batches, step + 10)

    assert loaders_of(batches, step + 40) == {os.getpid()}
    assert len(troubles) == MAX_DEATHS
    assert "not started again" in troubles[-1]


def test_a_sample_that_cannot_be_read_is_told_where_it_is_used(opened: Open) -> None:
    samples, far = 8000, 1500  # workers begin long before that
    fault = Batches(samples=samples, shards=4).shard(far, 1).ids[0]
    batches = opened(Faulty(samples, fault), workers=2)
    step = first_step_of_workers(batches)

    fetched = [loaders_of(batches, one) for one in range(step, far)]

    assert fetched
    with pytest.raises(OSError, match=f"sample {fault} cannot be read"):
        _ = batches.shard(far, 1).data


@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (broken_elsewhere, "received 0 items of ancdata"),
        (stuck_elsewhere, "worker"),
        (torn_elsewhere, "worker"),
        (locked_elsewhere, "worker"),
    ],
    ids=["received", "sent", "sent in part", "locked"],
)
def test_what_is_lost_between_a_worker_and_the_rank_is_loaded_anew(
    opened: Open, troubles: list[str], collate: Callable[[Any], Any], said: str
) -> None:
    """torch would wait for it for ever, and all replicas for this one."""
    batches = opened(Noisy(), workers=1, collate=collate)
    steps = iter(range(100_000))

    def given_up() -> bool:
        step = next(steps)
        shard = batches.shard(step, 0)
        assert shard.data[0].tolist() == list(shard.ids)
        return len(troubles) == MAX_DEATHS

    until(given_up, "the rank loads by itself")
    assert said in troubles[0]
    assert "; a loader's workers are started anew" in troubles[0]
    assert "not started again" in troubles[-1]


def read_all(answers: Any) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            answers._reader.recv_bytes()


class Pinning:
    """torch's iterator where there is a card: a thread of its own reads the answers, and whoever
    drops the iterator waits for it."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._workers = iterator._workers
        answers = iterator._worker_result_queue
        self._reading = threading.Thread(target=read_all, args=(answers,), daemon=True)
        self._reading.start()

    def __del__(self) -> None:
        self._reading.join()


@pytest.mark.parametrize("kept", [False, True])
def test_whoever_ends_the_workers_waits_for_no_answer_of_which_a_part_was_sent(
    opened: Open, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Nor whoever drops the error that kept torch's iterator beyond that."""
    monkeypatch.setattr(loading, "STUCK_S", 0.1)
    batches = opened(Noisy(), workers=1)
    first_step_of_workers(batches)
    assert isinstance(batches._loader, loading.Loader)
    crew = batches._loader._crew
    assert crew is not None
    crew._iterator = Pinning(crew._iterator)
    os.write(crew._answers._writer.fileno(), struct.pack("!i", TORN_BYTES))  # and no more
    keeps = [crew._iterator] * kept

    def close() -> None:
        batches.close()
        keeps.clear()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)

    assert not closing.is_alive()


def test_a_child_of_the_script_makes_nobody_wait_for_the_rest_of_a_dead_worker_s_answer(
    opened: Open, troubles: list[str]
) -> None:
    batches = opened(Noisy(), workers=1, collate=torn_elsewhere)
    assert isinstance(batches._loader, loading.Loader)
    crew = batches._loader._crew
    assert crew is not None
    until(crew.ready, "the worker begins")
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()

    until(lambda: batches.shard(0, 0).data and troubles, "the worker's death is told")
    child.kill()
    child.join()

    assert "worker" in troubles[0]


@pytest.mark.parametrize(
    ("short", "said"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (MemoryError(), "MemoryError()"),
    ],
)
def test_workers_for_which_something_runs_short_are_started_again(
    opened: Open,
    troubles: list[str],
    monkeypatch: pytest.MonkeyPatch,
    short: Exception,
    said: str,
) -> None:
    """At first, as they begin."""
    begin, shortage = DataLoader.__iter__, iter([short])

    def begun(loader: DataLoader[Any]) -> Any:
        for error in shortage:
            raise error
        return begin(loader)

    monkeypatch.setattr(DataLoader, "__iter__", begun)
    batches = opened(Noisy(), workers=1)

    assert first_step_of_workers(batches) >= 0
    (told,) = troubles
    assert f"{said}; a loader's workers are started anew" in told


@contextlib.contextmanager
def no_files() -> Iterator[None]:
    """Beside those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield


@pytest.mark.parametrize(
    ("shortage", "said"),
    [(no_files, "Too many open files"), (no_threads, "can't start new thread")],
)
def test_what_runs_short_while_workers_are_started_anew_ends_nobody(
    opened: Open,
    troubles: list[str],
    shortage: Callable[[], AbstractContextManager[None]],
    said: str,
) -> None:
    batches = opened(Noisy(), workers=1)
    step = first_step_of_workers(batches)
    (victim,) = loaders_of(batches, step + 1)
    os.kill(victim, signal.SIGKILL)
    until(partial(is_gone, victim), "the worker is gone")

    with shortage():
        pids = batches.shard(step + 20, 0).data[1]
    anew = first_step_of_workers(batches, step + 21)

    assert pids.tolist() == [os.getpid()]
    assert anew > step + 20
    assert [said in told for told in troubles] == [False, True]


@pytest.mark.parametrize("begins", [die, fail])
def test_workers_that_cannot_begin_are_told_of(
    opened: Open, troubles: list[str], begins: Callable[[int], None]
) -> None:
    batches = opened(DataLoader(Noisy(), batch_size=2, num_workers=1, worker_init_fn=begins))
    steps = iter(range(100_000))

    def given_up() -> bool:
        loaders_of(batches, next(steps))
        return len(troubles) == MAX_DEATHS

    until(given_up, "the rank loads by itself")
    assert "a worker died as it began" in troubles[0]


@LOADERS
def test_a_loader_s_workers_begin_as_it_says(opened: Open, kind: type[Any]) -> None:
    loader = kind(Greeted(), num_workers=1, worker_init_fn=say_hello, prefetch_factor=3)
    batches = opened(loader)

    steps = iter(range(10_000))

    assert until(lambda: batches.shard(next(steps), 0).data[0], "a worker answers") == "0"


def test_a_worker_s_first_function_finds_the_dataset_that_was_given(opened: Open) -> None:
    batches = opened(DataLoader(Labelled(), num_workers=1, worker_init_fn=label))
    steps = iter(range(10_000))

    told = until(lambda: batches.shard(next(steps), 0).data[0], "a worker answers")

    assert told == "of 0"


def test_what_cannot_be_given_to_workers_is_told_with_the_remedy(opened: Open) -> None:
    batches = opened(Noisy(), workers=1, collate=lambda samples: samples)

    with pytest.raises(RuntimeError, match="must be picklable, or use workers=0"):
        until(lambda: batches.shard(0, 0).data and False, "the refusal")


def open_files(pid: str) -> Iterator[str]:
    """What a process has open; it may close some meanwhile."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield str(descriptor.readlink())


def test_workers_die_with_a_killed_rank_and_hold_none_of_its_sockets() -> None:
    rank = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.loading_rank"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert rank.stdout is not None
    *workers, inode = rank.stdout.readline().split()

    held = [name for pid in workers for name in open_files(pid)]
    rank.kill()
    rank.wait()

    assert len(workers) == 2
    assert f"socket:[{inode}]" not in held
    until(lambda: all(map(is_gone, workers)), "the workers end")
    rank.stdout.close()
