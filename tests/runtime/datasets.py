"""Datasets that tell who loads them; in a module of their own, so that workers import little."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

TORN_BYTES = 1 << 20


class Noisy(Dataset[Any]):
    """A number with noise, as augmentation adds it, and the process that loaded it."""

    def __init__(self, samples: int = 1000) -> None:
        self.values = torch.arange(float(samples))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        return self.values[sample] + torch.rand(()), os.getpid()


class Fetching(Noisy):
    """Fetches many samples at once."""

    def __getitems__(self, samples: list[int]) -> list[int]:
        return [10 * sample for sample in samples]


class Faulty(Noisy):
    """One of its samples cannot be read."""

    def __init__(self, samples: int, fault: int) -> None:
        super().__init__(samples)
        self.fault = fault

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        if sample == self.fault:
            raise OSError(f"sample {sample} cannot be read")
        return super().__getitem__(sample)


class Averages(Noisy):
    """Of so many numbers that several threads would share the work."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.rand(32, 1 << 16, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, _sample: int) -> tuple[torch.Tensor, int]:
        return torch.stack([row.mean() for row in self.rows]), os.getpid()


class Keeping(Noisy):
    """Keeps another dataset, and how its samples are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.dataset = self.values

    def collate_fn(self, samples: list[tuple[torch.Tensor, int]]) -> list[float]:
        return [float(value.floor()) for value, _pid in samples]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


def say_hello(worker: int) -> None:
    """A worker_init_fn."""
    os.environ["HELLO"] = str(worker)


class Broken:
    """A worker makes it, and nobody can receive it."""

    def __reduce__(self) -> Any:
        return _receive, (os.getpid(),)


def _receive(made_by: int) -> Broken:
    if os.getpid() != made_by:
        raise OSError("received 0 items of ancdata")
    return Broken()


def broken_elsewhere(samples: list[tuple[torch.Tensor, int]]) -> Any:
    """A collate function: what workers make of it is lost on its way."""
    values, pids = zip(*samples, strict=True)
    ids = torch.tensor([int(value) for value in values])
    here = multiprocessing.parent_process() is None
    return ids, torch.tensor(pids), (None if here else Broken())


def stuck_elsewhere(samples: list[tuple[torch.Tensor, int]]) -> Any:
    """Another one: what workers make of it cannot be sent."""
    values, _pids = zip(*samples, strict=True)
    ids = torch.tensor([int(value) for value in values])
    here = multiprocessing.parent_process() is None
    return ids, (None if here else threading.Lock())


def torn_elsewhere(samples: list[tuple[torch.Tensor, int]]) -> Any:
    """Another one: the worker dies once the rank has read a part of what it made."""
    values, _pids = zip(*samples, strict=True)
    ids = torch.tensor([int(value) for value in values])
    if multiprocessing.parent_process() is None:
        return ids, None
    send = Connection._send  # type: ignore[attr-defined]

    def half(connection: Connection, data: Any, *how: Any) -> None:
        if len(data) > TORN_BYTES:
            os.write(connection.fileno(), memoryview(data)[:TORN_BYTES])  # a pipe holds less
            os._exit(137)
        send(connection, data, *how)

    Connection._send = half  # type: ignore[attr-defined]
    return ids, bytes(2 * TORN_BYTES)


def locked_elsewhere(samples: list[tuple[torch.Tensor, int]]) -> Any:
    """Another one: the worker is killed while it looks whether it is to end, and keeps the lock."""
    values, _pids = zip(*samples, strict=True)
    ids = torch.tensor([int(value) for value in values])
    frame = sys._getframe()
    while "done_event" not in frame.f_locals:  # torch's loop
        if frame.f_back is None:
            return ids, None  # loaded by the rank
        frame = frame.f_back
    frame.f_locals["done_event"]._cond.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def die(_worker: int) -> None:
    """A worker_init_fn."""
    os._exit(3)


def fail(_worker: int) -> None:
    """Another one."""
    raise OSError("no such file")


class Greeted(Noisy):
    """Tells what the worker's first function left."""

    def __getitem__(self, sample: int) -> Any:
        return os.environ.get("HELLO", "")


class Labelled(Noisy):
    """Tells what a worker's first function did to it."""

    label = ""

    def __getitem__(self, _sample: int) -> Any:
        return self.label


def label(worker: int) -> None:
    """A worker_init_fn, of the kind that torch's documentation shows."""
    info: Any = get_worker_info()
    info.dataset.label = f"of {worker}"


def as_list(samples: list[Any]) -> list[Any]:
    """A collate function."""
    return samples
