"""A card made up: notes what is asked of it, and computes nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from runtime import snapshot
from runtime.snapshot import size_in_bytes

NUMBER = 1  # a thread that says nothing has the first, 0
DEVICE = torch.device("cuda", NUMBER)


class OnCard(torch.Tensor):
    """Says that it is there."""

    is_cuda = True
    device = DEVICE


def takes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes are taken from there from now on, each time."""
    taken: list[int] = []

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        taken.append(tensor.is_cuda * size_in_bytes(tensor))
        return tensor.as_subclass(torch.Tensor)

    monkeypatch.setattr(snapshot, "on_host", on_host)
    return taken


class Stream:
    """On which all is done at once."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        self.device = device
        self.waited: list[Stream] = []  # for these

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)

    def synchronize(self) -> None: ...


class Card:
    """In the place of torch's, for as long as a test takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._current = threading.local()  # each thread has one, and the first until it says so
        #: of each time that something was put on a stream: the card that was current
        self.current: list[int] = []
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)

    @contextlib.contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before, self._current.number = getattr(self._current, "number", 0), device.index
        yield
        self._current.number = before

    @contextlib.contextmanager
    def _stream(self, _stream: Stream | None) -> Iterator[None]:
        self.current.append(getattr(self._current, "number", 0))
        yield
