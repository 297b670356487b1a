"""The samples of a shard, collated: loaded in the training process, or beforehand by workers.

Workers are torch's own, but never forked: a forked child would inherit the group's sockets, and a
dead rank would look alive until it ended. What is loaded is the same whoever loads it; whether a
worker lives or dies changes only the time it takes.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sized
from dataclasses import dataclass
from multiprocessing import connection, forkserver, queues
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from runtime.forking import in_children

log = logging.getLogger("drydock.loading")

START_METHODS = ("forkserver", "spawn")
PREFETCH = 2  # shards that each worker is ahead, unless a DataLoader says otherwise
STUCK_S = 2.0  # so long torch may take to end its own thread
MAX_DEATHS = 3  # of workers; then everything is loaded in the training process
#: What tells a loader from a dataset that keeps another, and a function to collate.
_OF_A_LOADER = ("dataset", "collate_fn", "batch_size", "num_workers", "drop_last")
#: Orders of torch's own making, which Batches replaces by its own.
_PLAIN_SAMPLERS = ("SequentialSampler", "RandomSampler")

#: One shard of one step.
Key = tuple[int, int]
#: A shard and its samples, as it is asked of a worker.
Asked = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where samples come from, and how they become a batch."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    batch_size: int
    drop_last: bool
    workers: int
    start: str
    prefetch: int = PREFETCH
    worker_init: Callable[[int], None] | None = None
    pin_memory: bool = False


def source_of(
    data: Any,
    *,
    batch_size: int | None,
    workers: int | None,
    collate: Callable[[list[Any]], Any] | None,
    start: str | None,
    drop_last: bool | None,
) -> Source:
    """What a dataset, or a loader over one, gives. None stands for what was not said.

    Raises TypeError or ValueError, with the remedy, if no order can be put on it.
    """
    if all(hasattr(data, name) for name in _OF_A_LOADER):
        said = {"shard_size": batch_size, "workers": workers, "collate": collate,
                "drop_last": drop_last}  # fmt: skip
        if twice := [name for name, value in said.items() if value is not None]:
            raise ValueError(
                f"the DataLoader already says what {', '.join(twice)} would; say it there alone"
            )
        found = _of_loader(data, start)
    else:
        found = Source(
            dataset=data,
            collate=collate or default_collate,
            batch_size=batch_size or 1,
            drop_last=bool(drop_last),
            workers=workers or 0,
            start=start or START_METHODS[0],
        )
    _demand_map(found.dataset)
    if found.start not in START_METHODS:
        raise ValueError(
            f"workers cannot be started by {found.start!r}: use one of "
            f"{', '.join(START_METHODS)}; a forked one would keep a dead replica's sockets open"
        )
    return found


def load(source: Source, seed: int, rank: int, step: int, index: int, ids: tuple[int, ...]) -> Any:
    """The samples of one shard, or this rank's part of it. What is drawn at random hangs on seed,
    step, shard and rank alone."""
    with random_numbers(seed_of(seed, rank, step, index)):
        if hasattr(source.dataset, "__getitems__"):
            return source.collate(source.dataset.__getitems__(list(ids)))
        return source.collate([source.dataset[sample] for sample in ids])


def seed_of(seed: int, rank: int, step: int, index: int) -> int:
    """What is drawn from while a rank's part of a shard is put together: of several ranks, each
    has samples of its own."""
    drawn = (seed, step, index, 1)
    return hash((*drawn, rank) if rank else drawn)  # a job of one rank draws what it always drew


class Loader:
    """Gives the data of any shard; workers load beforehand what is expected of this replica."""

    def __init__(
        self,
        source: Source,
        seed: int,
        rank: int,
        ids_of: Callable[[int, int], tuple[int, ...]],
        trouble: Callable[[str, str], None],
    ) -> None:
        """`rank`: of those that divide each shard, which we are."""
        self._source = source
        self._seed = seed
        self._rank = rank
        self._upcoming = _Upcoming(ids_of)
        self._trouble = trouble
        self._crew: _Crew | None = None
        self._deaths = 0
        self._loaded: dict[Key, Any] = {}  # beforehand
        if source.workers and source.start == "forkserver":
            # Its imports take longest, and are over by the time this replica is let in. Without the
            # first line it would run the training script too, to be ready for its functions.
            forkserver.set_forkserver_preload([__name__])
            forkserver.ensure_running()

    def expect(self, step: int, shards: Collection[int], _now: Collection[int] = ()) -> None:
        """From this step on these shards will be asked for. Starts the workers."""
        if not shards:
            return  # what was expected before may be again
        self._upcoming.expect(step, shards)
        if self._crew is None and self._source.workers and self._deaths < MAX_DEATHS:
            self._crew = self._new_crew()

    def fetch(self, step: int, index: int, ids: tuple[int, ...]) -> Any:
        """The data of a shard: as loaded beforehand, else loaded now."""
        self._loaded = {key: data for key, data in self._loaded.items() if key[0] >= step}
        if self._crew is not None and self._crew.lacking is not None:
            # It may be there again: open files, memory, threads, the fork server.
            self._bury(self._crew, self._crew.lacking)
        if self._crew is not None and self._crew.ready():
            self._receive(self._crew, (step, index))
        elif self._crew is not None and not self._crew.alive():
            self._bury(self._crew, RuntimeError("a worker died as it began"))
        if (step, index) in self._loaded:
            return self._loaded.pop((step, index))
        if not self._source.workers:
            return load(self._source, self._seed, self._rank, step, index, ids)
        with _threads_of_a_worker():
            return load(self._source, self._seed, self._rank, step, index, ids)

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def _receive(self, crew: _Crew, wanted: Key) -> None:
        """Take what the workers have, up to what is wanted; and what comes too late for use."""
        if wanted not in self._loaded and wanted not in crew.asked:
            self._upcoming.skip_to(wanted[0] + 1)
        while crew.asked and wanted not in self._loaded:
            if wanted not in crew.asked and crew.asked[0][0] >= wanted[0]:
                return
            key = crew.asked[0]
            try:
                data = crew.take()
            except Exception as error:  # torch would wait for ever for an answer that was lost
                self._bury(crew, error)
                return
            if isinstance(data, _Fault):
                # It is raised where the shard is used, if it is: it is loaded once more.
                log.debug("not_loaded step=%s shard=%s error=%s", *key, data.error)
                continue
            if key[0] >= wanted[0]:
                self._loaded[key] = data

    def _bury(self, crew: _Crew, error: Exception) -> None:
        self._deaths += 1
        crew.close()
        again = self._deaths < MAX_DEATHS
        then = "started anew" if again else "not started again: the rank itself loads from now on"
        told = str(error) or repr(error)  # that memory runs short has no words
        self._trouble("loader_worker_died", f"{told}; a loader's workers are {then}")
        self._crew = self._new_crew() if again else None

    def _new_crew(self) -> _Crew:
        return _Crew(self._source, self._seed, self._rank, self._upcoming)


class _Upcoming:
    """What this replica will be asked for, one shard after another, without end."""

    def __init__(self, ids_of: Callable[[int, int], tuple[int, ...]]) -> None:
        self._ids_of = ids_of
        self._lock = threading.Lock()  # workers are started on a thread of their own
        self._shards: list[int] = []
        self._next = (0, 0)  # step, and the place of its next shard in the list

    def expect(self, step: int, shards: Collection[int]) -> None:
        with self._lock:
            ahead, place = self._next
            self._shards = sorted(shards)
            self._next = (max(step, ahead + (place > 0)), 0)

    def skip_to(self, step: int) -> None:
        with self._lock:
            self._next = max(self._next, (step, 0))

    def __iter__(self) -> Iterator[Asked]:
        while self._shards:
            with self._lock:
                step, place = self._next
                if place >= len(self._shards):
                    step, place = step + 1, 0
                index = self._shards[place]
                self._next = (step, place + 1)
            yield step, index, self._ids_of(step, index)


class _Crew:
    """Workers that load one shard after another; started in the background, gone at the first
    death among them."""

    def __init__(self, source: Source, seed: int, rank: int, upcoming: _Upcoming) -> None:
        self.asked: deque[Key] = deque()  # of the workers, in the order of their answers
        self._asleep = source.workers
        self._iterator: Any = None
        self._answers: Any = None  # the queue of what the workers loaded
        self._never_set: Any = None  # by which torch would tell the workers that they are to end
        #: why they cannot be started: what ran short, or what they can never be given
        self.lacking: Exception | None = None
        self._unpicklable: Exception | None = None
        self._closed = False
        self._lock = threading.Lock()
        context = multiprocessing.get_context(source.start)
        try:
            self._woken = context.Semaphore(0)
            self._loader: DataLoader[Any] = DataLoader(
                _Shards(source, seed, rank),
                batch_size=None,
                sampler=self._asking(upcoming),
                num_workers=source.workers,
                prefetch_factor=source.prefetch,
                collate_fn=_as_it_is,
                pin_memory=source.pin_memory,
                worker_init_fn=_Wake(self._woken, source.worker_init),
                multiprocessing_context=context,
                generator=torch.Generator(),  # the training's own random numbers stay untouched
            )
            threading.Thread(target=self._start, name="drydock-loader", daemon=True).start()
        except (OSError, RuntimeError, MemoryError) as error:
            self.lacking = error

    def ready(self) -> bool:
        """Whether all are there: until then nobody is to wait for them.

        Raises RuntimeError if they can never be given what they are to have.
        """
        if self._unpicklable is not None:
            raise RuntimeError(
                f"the loader's workers cannot be started: {self._unpicklable!r}; what the dataset, "
                "the collate function and worker_init_fn hold must be picklable, or use workers=0"
            ) from self._unpicklable
        if self._iterator is None:
            return False
        while self._asleep and self._woken.acquire(block=False):
            self._asleep -= 1
        return self._asleep == 0

    def alive(self) -> bool:
        return all(worker.is_alive() for worker in self._workers())

    def take(self) -> Any:
        """The next answer, a `_Fault` if a sample raised. Raises RuntimeError if a worker died, and
        whatever happens to an answer on its way."""
        if not self.alive():
            raise RuntimeError("a worker died")
        try:
            return next(self._iterator)
        finally:
            self.asked.popleft()

    def close(self) -> None:
        """End them at once: they hold nothing that would be missed."""
        with self._lock:
            self._closed = True
            for worker in self._workers():
                worker.kill()
            if self._answers is None:
                return
            # torch waits for its thread that pins, if it has one. That may be in the middle of an
            # answer whose worker is dead by now, and others hold the end that would tell it.
            stuck = threading.Timer(STUCK_S, self._answers._writer.close)
            stuck.daemon = True
            with contextlib.suppress(RuntimeError):  # no more threads
                stuck.start()
            self._iterator = None  # an error that it raised may keep it for a moment longer

    def _start(self) -> None:
        try:
            iterator: Any = iter(self._loader)
        except Exception as error:  # whatever pickling raises; told where shards are fetched
            if _runs_short(error):
                self.lacking = error
            else:
                self._unpicklable = error
            return
        # By this event torch tells workers that they are to end, which we do by killing them. Who
        # is killed while it looks at it keeps its lock: torch would wait for that for ever. It is
        # kept, for workers that begin find it by a name that goes with it.
        self._never_set = iterator._workers_done_event
        iterator._workers_done_event = threading.Event()
        workers, answers = list(iterator._workers), iterator._worker_result_queue
        in_children(self._close_copies)
        with self._lock:
            self._iterator, self._answers = iterator, answers
        del iterator  # it is ended by whoever closes us, and not when this thread ends
        if self._closed:
            self.close()
        self._watch(workers, answers)

    def _watch(self, workers: list[Any], answers: Any) -> None:
        """Of an answer that a dead worker has sent in part whoever reads it awaits the rest: for
        ever, while others hold the end that it would be written to, as we do. So none is left."""
        connection.wait([worker.sentinel for worker in workers])
        with self._lock:
            if not self._closed:
                for worker in workers:
                    worker.kill()
                answers._writer.close()

    def _close_copies(self) -> None:
        """In a child of the script: while it held the end of a dead worker's answer nobody would
        ever hear that the rest does not come."""
        if self._answers is not None:
            self._answers._writer.close()
            self._answers._reader.close()

    def _workers(self) -> list[Any]:
        # torch offers no other way to learn of a death than to wait five seconds for an answer.
        return [] if self._iterator is None else list(self._iterator._workers)

    def _asking(self, upcoming: _Upcoming) -> Iterator[Asked]:
        for asked in upcoming:
            self.asked.append(asked[:2])
            yield asked


class _Shards(Dataset[Any]):
    """A dataset whose samples are whole shards."""

    def __init__(self, source: Source, seed: int, rank: int) -> None:
        self.source = source
        self._seed = seed
        self._rank = rank

    def __getitem__(self, asked: Asked) -> Any:
        try:
            return load(self.source, self._seed, self._rank, *asked)
        except Exception as error:
            return _Fault(repr(error))


@dataclass(frozen=True)
class _Fault:
    """What a sample raised in a worker."""

    error: str


class _Wake:
    """What a worker does first."""

    def __init__(self, woken: Any, init: Callable[[int], None] | None) -> None:
        self._woken = woken
        self._init = init

    def __call__(self, worker: int) -> None:
        # Scripts that join a job at their top have taken the signal for themselves.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_die_with_the_rank, daemon=True).start()
        # An answer that cannot be sent would be dropped, and waited for without end.
        queues.Queue._on_queue_feeder_error = staticmethod(_die_unheard)  # type: ignore[attr-defined]
        try:
            info: Any = get_worker_info()  # frozen, and its dataset is ours of shards
            object.__setattr__(info, "dataset", info.dataset.source.dataset)
            if self._init is not None:
                self._init(worker)
        except BaseException:  # torch would have it live on, and answer nothing
            traceback.print_exc()
            os._exit(1)
        self._woken.release()


def _die_unheard(error: Exception, _answer: Any) -> None:
    traceback.print_exception(error)
    os._exit(1)


def _die_with_the_rank() -> None:
    """torch looks at the parent's pid, which is the fork server's and outlives a killed rank."""
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


def _runs_short(error: Exception) -> bool:
    """Whether what keeps workers from starting may be over the next time."""
    no_thread = isinstance(error, RuntimeError) and str(error).startswith("can't start new thread")
    return no_thread or isinstance(error, OSError | EOFError | MemoryError)


def _as_it_is(data: Any) -> Any:
    return data


@contextlib.contextmanager
def _threads_of_a_worker() -> Iterator[None]:
    """Compute as torch has its workers do: what several threads sum together has other last bits.

    The number is the calling thread's own, which trains only once it has loaded. Threads that first
    compute meanwhile keep to one; ours only copy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Draw from this seed within, on the current card too if one is in use, and go on outside as if
    nothing had been drawn."""
    mixed = seed & 0x7FFF_FFFF_FFFF_FFFF
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    of_torch = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        of_torch.append(torch.cuda.default_generators[torch.cuda.current_device()])
    kept = ([one.get_state() for one in of_torch], random.getstate(), numpy and numpy.get_state())
    for one in of_torch:
        one.manual_seed(mixed)
    random.seed(mixed)
    if numpy is not None:
        numpy.seed(mixed & 0xFFFF_FFFF)
    try:
        yield
    finally:
        for one, state in zip(of_torch, kept[0], strict=True):
            one.set_state(state)
        random.setstate(kept[1])
        if numpy is not None:
            numpy.set_state(kept[2])


def _of_loader(loader: Any, start: str | None) -> Source:
    """Duck typing: torch's DataLoader, torchdata's StatefulDataLoader, and their like."""
    if loader.batch_size is None:
        raise ValueError(
            "the DataLoader makes no batches of its own, or a batch_sampler makes them: give it "
            "batch_size=…, which becomes the size of a shard"
        )
    kind = type(getattr(loader, "sampler", None)).__name__
    own = getattr(loader, "sampler", None)
    _demand_map(loader.dataset)
    samples = len(loader.dataset)
    drawn = len(own) if isinstance(own, Sized) else samples
    if kind not in _PLAIN_SAMPLERS or getattr(own, "replacement", False) or drawn != samples:
        raise ValueError(
            f"the DataLoader has a {kind} of its own ({drawn} of {samples} samples), but order and "
            "position are kept by Batches: leave sampler and batch_sampler out; a subset or "
            "weights belong into the dataset"
        )
    context = getattr(loader, "multiprocessing_context", None)
    method = context.get_start_method() if context is not None else START_METHODS[0]
    return Source(
        dataset=loader.dataset,
        collate=loader.collate_fn,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        workers=loader.num_workers,
        start=start or (START_METHODS[0] if method == "fork" else method),
        prefetch=getattr(loader, "prefetch_factor", None) or PREFETCH,
        worker_init=getattr(loader, "worker_init_fn", None),
        pin_memory=bool(getattr(loader, "pin_memory", False)),
    )


def _demand_map(dataset: Any) -> None:
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not indexed:
        raise TypeError(
            f"{type(dataset).__name__} has no samples that can be asked for by number: give a "
            "map dataset, with __len__ and __getitem__, or make a stream for each shard, by "
            "Batches(factory=…)"
        )
