"""A copy that several threads make: whole, in order, and failed on no side unseen."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from runtime import snapshot
from runtime.image import Damaged, Piece, Staged, Table, pages
from runtime.snapshot import (
    MARKED,
    SLICE_BYTES,
    Changed,
    Copying,
    When,
    digest_of,
    on_host,
    stage,
    state_of,
)
from tests.runtime import fake_card

PATIENCE_S = 30.0
STATE = {"model": {f"w{n}": torch.randn(n + 1, 50) for n in range(40)}, "step": 3}


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is taken on by itself, however small."""
    monkeypatch.setattr(snapshot, "BATCH_BYTES", 0)


def later(_name: str, _tensor: torch.Tensor) -> When:
    return "soon"


class Held(Copying):
    """Whoever comes to one of these pieces first waits there."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.held, self.go_on = threading.Event(), threading.Event()
        super().__init__(STATE, 7, due=later)

    def _copy(self, piece: Piece, tensor: torch.Tensor) -> None:
        if piece.name in self.names:
            self.held.set()
            assert self.go_on.wait(PATIENCE_S)
        super()._copy(piece, tensor)


class Failing(Held):
    """The piece that was held cannot be copied."""

    def _copy(self, piece: Piece, tensor: torch.Tensor) -> None:
        super()._copy(piece, tensor)
        if piece.name in self.names:
            raise MemoryError("no more")


def test_who_waits_helps_and_the_copy_is_whole() -> None:
    copying = Held(".model.w3")
    finishing = threading.Thread(target=copying.finish)
    finishing.start()
    assert copying.held.wait(PATIENCE_S)
    waiting = threading.Thread(target=copying.wait)
    waiting.start()
    while copying._rest:  # all but what is held the waiting thread copies
        assert waiting.is_alive()
    early = copying.finished.is_set()
    copying.go_on.set()
    finishing.join(PATIENCE_S)
    waiting.join(PATIENCE_S)

    assert not early
    assert copying.finished.is_set()
    assert copying.waited_s > 0


class Meeting(Copying):
    """Each thread that copies waits at its first piece until so many have come."""

    def __init__(self, threads: int) -> None:
        self.met: set[int] = set()
        self.barrier = threading.Barrier(threads)
        super().__init__(STATE, 7, due=later)

    def _copy(self, piece: Piece, tensor: torch.Tensor) -> None:
        me = threading.get_ident()
        if me not in self.met:
            self.met.add(me)
            self.barrier.wait(PATIENCE_S)
        super()._copy(piece, tensor)


def finished_while_awaited(copying: Copying) -> Staged:
    """By a thread of its own, while this one waits."""
    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(copying.finish)
        copying.wait()
        return finishing.result(PATIENCE_S)


def test_where_torch_computes_on_more_threads_so_many_copy_what_the_step_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(snapshot, "SLICE_BYTES", 1000)
    copying = Meeting(5)

    copied = finished_while_awaited(copying)

    assert len(copying.met) == 5
    assert copied.digest == Copying(STATE, 7, due=later).finish().digest


def test_no_thread_is_begun_for_a_little_or_once_there_are_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    class Refused(threading.Thread):
        def start(self) -> None:
            started.append(self.name)
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    little, much = (Copying(STATE, 7, due=later) for _ in range(2))
    monkeypatch.setattr(threading, "Thread", Refused)

    little.wait()
    for_a_little = list(started)
    monkeypatch.setattr(snapshot, "SLICE_BYTES", 1000)
    much.wait()

    assert (for_a_little, started) == ([], ["drydock-copy"])
    assert (
        little.finish().digest
        == much.finish().digest
        == Copying(STATE, 7, due=later).finish().digest
    )


@pytest.mark.parametrize(("batch", "part"), [(0, SLICE_BYTES), (600, 40), (1 << 20, 1000)])
def test_tensors_of_any_kind_are_copied_however_many_at_a_time(
    batch: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "BATCH_BYTES", batch)
    monkeypatch.setattr(snapshot, "SLICE_BYTES", part)
    kinds = {
        "none": torch.zeros(0, 3),
        "number": torch.tensor(7, dtype=torch.int16),
        "half": torch.randn(5, 3).bfloat16(),
        "turned": torch.randn(4, 6).t(),
        "trained": torch.nn.Parameter(torch.randn(9)),
        "every other": torch.arange(10)[::2],
        "truth": torch.tensor([True, False, True]),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "large": torch.randn(64, 64),
    }

    copying = Copying({**kinds, "again": dict(kinds)}, 7, due=later)
    copied = state_of(copying.finish())

    again = copied.pop("again")
    for found in (copied, again):
        assert {name: one.dtype for name, one in found.items()} == {
            name: one.dtype for name, one in kinds.items()
        }
        assert all(torch.equal(found[name], one) for name, one in kinds.items())


def test_what_shares_memory_and_is_read_otherwise_is_kept_apart() -> None:
    value = torch.randn(3, dtype=torch.complex64)
    state = {"model": {"a": value, "tied": value, "conj": value.conj(), "neg": value.conj().imag,
                       "imag": value.imag}}  # fmt: skip

    copied = state_of(stage(state, 0))["model"]

    assert copied["a"] is copied["tied"]
    assert all(torch.equal(copied[name], one) for name, one in state["model"].items())


@pytest.mark.parametrize(("dtype", "shape"), [("float8_e5m2", [9]), ("half", [3]), ("uint4", [9])])
def test_memory_that_nobody_saved_makes_no_tensor(dtype: str, shape: list[int]) -> None:
    piece = Piece(name=".w", dtype=dtype, shape=shape, offset=0, bytes=0)

    with pytest.raises(Damaged, match=f"tensor w, {dtype} of .*, has 0 bytes, . expected"):
        state_of(Staged(0, Table({"$tensor": 0}, (piece,), 0, 0, 0), pages(0), ()))


def test_what_is_told_is_there() -> None:
    whole = stage(STATE, 7)
    copying = Copying(STATE, 7, due=later)
    told = [0]

    def look(there: int) -> None:
        told.append(there)
        ends = [p.offset + p.bytes for p in copying.table.pieces if p.offset + p.bytes <= there]
        end = max(ends, default=0)
        assert bytes(copying._buffer[:end]) == bytes(staged_alike.buffer[:end])

    staged_alike = Copying(STATE, 7, due=later).finish()
    staged = copying.finish(look)

    assert told == sorted(told)
    assert told[-1] == staged.table.bytes
    assert torch.equal(state_of(staged)["model"]["w39"], state_of(whole)["model"]["w39"])


def test_nobody_is_told_while_the_training_waits() -> None:
    copying = Held(".model.w0")
    told: list[int] = []
    finishing = threading.Thread(target=copying.finish, args=(told.append,))
    finishing.start()
    assert copying.held.wait(PATIENCE_S)
    waiting = threading.Thread(target=copying.wait)
    waiting.start()
    while copying._rest:
        assert waiting.is_alive()
    copying.go_on.set()
    finishing.join(PATIENCE_S)
    waiting.join(PATIENCE_S)

    assert told == [copying.table.bytes]


def test_a_piece_that_fails_fails_the_copy_and_never_the_training() -> None:
    copying = Failing(".model.w5")
    copying.go_on.set()
    waiting = threading.Thread(target=copying.wait)
    waiting.start()
    assert copying.held.wait(PATIENCE_S)
    with pytest.raises(MemoryError, match="no more"):
        copying.finish()
    waiting.join(PATIENCE_S)

    assert copying.finished.is_set()
    assert not waiting.is_alive()


class Interrupted(Held):
    """A signal comes while the training thread copies."""

    def _copy(self, piece: Piece, tensor: torch.Tensor) -> None:
        if piece.name in self.names:
            raise KeyboardInterrupt
        super()._copy(piece, tensor)


def test_an_interrupted_copy_is_none() -> None:
    copying = Interrupted(".model.w0")

    with pytest.raises(KeyboardInterrupt):
        copying.wait()

    with pytest.raises(RuntimeError, match="interrupted by KeyboardInterrupt"):
        copying.finish()
    assert copying.finished.is_set()


FROZEN = {"model": {"frozen": torch.randn(3 * MARKED), "trained": torch.randn(50)}}


def due_by_name(name: str, _tensor: torch.Tensor) -> When:
    return "whenever" if name == ".model.frozen" else "soon"


class HeldFrozen(Held):
    """Of a state most of which no step changes."""

    def __init__(self) -> None:
        self.names = (".model.frozen",)
        self.held, self.go_on = threading.Event(), threading.Event()
        Copying.__init__(
            self, FROZEN, 7, due=due_by_name, steady={FROZEN["model"]["frozen"].data_ptr()}
        )


def test_nobody_waits_for_what_no_step_changes() -> None:
    before = stage(FROZEN, 7)
    copying = HeldFrozen()
    copies: list[Staged] = []
    finishing = threading.Thread(target=lambda: copies.append(copying.finish()))
    finishing.start()
    assert copying.held.wait(PATIENCE_S)

    copying.wait()
    early = copying.finished.is_set()
    FROZEN["model"]["trained"].add_(1)
    copying.go_on.set()
    finishing.join(PATIENCE_S)

    assert not early
    for name, tensor in state_of(before)["model"].items():
        assert torch.equal(state_of(copies[0])["model"][name], tensor)


def test_who_is_to_replace_the_state_waits_for_all_of_it() -> None:
    copying = HeldFrozen()
    finishing = threading.Thread(target=copying.finish)
    finishing.start()
    assert copying.held.wait(PATIENCE_S)
    waiting = threading.Thread(target=copying.wait, kwargs={"whole": True})
    waiting.start()
    waiting.join(0.05)
    waits = waiting.is_alive()
    copying.go_on.set()
    waiting.join(PATIENCE_S)
    finishing.join(PATIENCE_S)

    assert waits
    assert copying.finished.is_set()


@pytest.mark.parametrize(
    "change",
    [
        lambda frozen: frozen[1:2].add_(1),  # a little of it
        lambda frozen: frozen.data.mul_(0.99),  # all of it, where torch does not count
    ],
)
def test_what_was_changed_although_no_step_had_changed_it_is_no_copy(
    change: Callable[[torch.Tensor], object],
) -> None:
    copying = HeldFrozen()
    copying.go_on.set()

    change(FROZEN["model"]["frozen"])

    copying.wait()  # nor does it harm the training
    with pytest.raises(Changed, match=r"\.model\.frozen was changed while it was copied"):
        copying.finish()
    assert copying.finished.is_set()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> fake_card.Card:
    return fake_card.Card(monkeypatch)


def test_what_is_copied_from_a_card_begins_to_use_no_other(
    card: fake_card.Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each process of a node would take memory of the first card."""
    monkeypatch.setattr(snapshot, "stream_beside", lambda _tensors, _stream: fake_card.Stream())

    copying = Copying(STATE, 7, due=later)
    finishing = threading.Thread(target=copying.finish)
    finishing.start()
    finishing.join(PATIENCE_S)

    assert copying.finished.is_set()
    assert card.current == [fake_card.NUMBER] * 2  # as it begins, and by the thread


def test_a_copy_waits_for_the_stream_that_computes_the_state_and_is_waited_for_by_it(
    card: fake_card.Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for it may be another thread than the training, with a stream of its own."""
    monkeypatch.setattr(snapshot, "PLAIN", (torch.Tensor, fake_card.OnCard))
    monkeypatch.setattr(snapshot, "allocate", lambda size, **_how: pages(size))
    training: Any = fake_card.Stream()

    state = {"w": torch.ones(3).as_subclass(fake_card.OnCard)}
    copying: Any = Copying(state, 7, computed_on=training)

    assert copying._stream.waited == [training]
    assert training.waited == [copying._stream]


def test_what_a_card_was_asked_for_stays_until_it_has_copied_it(
    card: fake_card.Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `state_dict` may make tensors anew, that nobody else holds."""
    made = torch.randn(5)
    there, stayed = weakref.ref(made), []

    def synchronize() -> None:
        gc.collect()
        stayed.append(there() is not None)

    stream = fake_card.Stream()
    monkeypatch.setattr(stream, "synchronize", synchronize)
    monkeypatch.setattr(snapshot, "stream_beside", lambda _tensors, _stream: stream)

    copying = Copying({"made": made}, 7, due=later)
    del made
    copying.finish()
    gc.collect()

    assert stayed == [True]
    assert there() is None


def test_nor_does_what_is_sent_of_one(
    card: fake_card.Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_given, **_how: torch.zeros(3))

    on_host(torch.ones(3).as_subclass(fake_card.OnCard))

    assert card.current == [fake_card.NUMBER]


def test_the_digest_of_what_is_on_a_card_is_taken_slice_by_slice(
    card: fake_card.Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else torch would pin as much memory as the largest tensor takes, and never give it back."""
    taken = fake_card.takes(monkeypatch)
    monkeypatch.setattr(snapshot, "PLAIN", (torch.Tensor, fake_card.OnCard))
    numbers = torch.arange(3 * SLICE_BYTES // 8)
    flat, turned = numbers[:40], numbers[40:].view(8, -1).t()

    found = digest_of(
        {"w": [one.as_subclass(fake_card.OnCard) for one in (flat, turned, torch.ones(0))]}
    )

    assert found == digest_of({"w": [flat, turned, torch.ones(0)]})
    assert max(taken) <= SLICE_BYTES


def test_a_copy_of_what_is_on_no_card_asks_nothing_of_one(card: fake_card.Card) -> None:
    """Asked for no stream at all, torch begins to use the card that is there."""
    stage(STATE, 7)

    assert card.current == []
