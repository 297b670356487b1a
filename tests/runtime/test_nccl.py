"""A group like NCCL's, cut at any time and in any way that it may fail: none holds us up.

What stands behind it is a group of gloo's, or one made up to fail as NCCL's do. No card is needed.
"""

from __future__ import annotations

import datetime
import gc
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo, Store
from torch._subclasses import FakeTensorMode

from runtime.replica import nccl
from runtime.replica.gloo import Gloo
from runtime.replica.membership import Severed
from runtime.replica.nccl import NO_WATCHDOG, Nccl, group_for, make_group, without_watchdog
from runtime.replica.shape import cannot_drop
from tests.runtime import fake_card
from tests.runtime.fake_groups import (
    Blocks,
    Done,
    Ends,
    Fails,
    Fake,
    Guarded,
    Raises,
    Refuses,
    Slow,
    Stuck,
    Untold,
    Works,
)
from tests.runtime.replicas import PATIENCE_S, Board, until

CPU = torch.device("cpu")
PAIR = ["one", "other"]


def nccl_of(*groups: Any) -> Nccl:
    """One that is given these groups, epoch after epoch."""
    left = iter(groups)
    return Nccl(CPU, make=lambda _store, _rank, _members: next(left))


def built(*groups: Any) -> Nccl:
    made = nccl_of(*groups)
    made.build(Board(), 1, PAIR, 0)
    return made


def aside(work: Callable[..., Any], *given: Any) -> Future[Any]:
    """In a thread that may be left behind."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work(*given))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def reducing(group: Nccl) -> Future[Any]:
    """A sum under way."""
    begun = threading.Event()
    group.begun = begun.set
    waiting = aside(group.all_reduce, torch.ones(3))
    until(begun.is_set, "the sum began")
    return waiting


@pytest.fixture(autouse=True)
def _prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs here hangs for ever: nothing is gained by waiting for it."""
    monkeypatch.setattr(nccl, "ABORT_S", 0.2)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    work = Guarded()
    group = Stuck(Done(), work)
    work.group = group
    yield group
    group.free.set()


# --- real sums -----------------------------------------------------------------------------------


def gloo_group(store: Store, rank: int, members: int) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._timeout = datetime.timedelta(seconds=PATIENCE_S)
    return ProcessGroupGloo(store, rank, members, options)


@pytest.fixture
def pair() -> list[Nccl]:
    """Two members, each in an epoch with the other."""
    made = [Nccl(CPU, make=gloo_group) for _ in PAIR]
    together(made, 1)
    return made


def together(members: list[Nccl], epoch: int) -> None:
    board = Board()
    jobs = [aside(one.build, board, epoch, PAIR, rank) for rank, one in enumerate(members)]
    for job in jobs:
        job.result(30)


def all_do(calls: list[Callable[[], Any]]) -> list[Any]:
    return [job.result(30) for job in [aside(call) for call in calls]]


def test_a_sum_over_the_group(pair: list[Nccl]) -> None:
    buffers = [torch.ones(5), torch.full((5,), 2.0)]

    all_do([partial(one.all_reduce, buffer) for one, buffer in zip(pair, buffers, strict=True)])

    assert [buffer.tolist() for buffer in buffers] == [[3.0] * 5] * 2


def test_each_is_given_its_part(pair: list[Nccl]) -> None:
    ours = [torch.tensor([1.0]), torch.tensor([2.0, 3.0])]
    theirs = [torch.tensor([4.0, 5.0]), torch.tensor([6.0])]

    found = all_do(
        [partial(pair[0].exchange, ours, [1, 2]), partial(pair[1].exchange, theirs, [2, 1])]
    )

    assert [[part.tolist() for part in parts] for parts in found] == [
        [[1.0], [4.0, 5.0]],
        [[2.0, 3.0], [6.0]],
    ]


def test_all_are_given_all(pair: list[Nccl]) -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]

    found = all_do([partial(one.gather, part, 2) for one, part in zip(pair, parts, strict=True)])

    assert [one.tolist() for one in found] == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_a_new_group_is_made_for_the_next_epoch(pair: list[Nccl]) -> None:
    for one in pair:
        one.sever(1)
    buffers = [torch.ones(2), torch.ones(2)]

    together(pair, 2)
    all_do([partial(one.all_reduce, buffer) for one, buffer in zip(pair, buffers, strict=True)])

    assert [buffer.tolist() for buffer in buffers] == [[2.0, 2.0]] * 2


def test_alone_nothing_is_exchanged() -> None:
    alone = nccl_of()
    alone.build(Board(), 1, ["one"], 0)
    buffer = torch.ones(2)

    alone.all_reduce(buffer)

    assert buffer.tolist() == [1.0, 1.0]
    assert alone.exchange([buffer], [2]) == [buffer]
    assert alone.gather(buffer, 1) is buffer


# --- cut -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Ends, Fails, Fake, Refuses])
def test_a_sum_whose_epoch_breaks_is_none(kind: type[Fake]) -> None:
    fake = kind(Done(), Works())
    group = built(fake)
    waiting = reducing(group)

    group.sever(1)

    with pytest.raises(Severed, match="epoch 1 broke"):
        waiting.result(30)
    until(lambda: fake.aborts, "it was aborted")
    assert group.broken(1)


def test_a_sum_that_an_abort_ended_as_if_all_were_well_is_none() -> None:
    fake = Ends(Done(), Works())
    group = built(fake)
    assert group._live is not None
    watching = group._live.hands.thread

    def cut() -> None:
        group.sever(1)
        until(lambda: fake.aborts and not watching.is_alive(), "who watched it has its answer")

    group.begun = cut  # only then it is looked at

    with pytest.raises(Severed, match="epoch 1 broke"):
        group.all_reduce(torch.ones(3))


def test_an_abort_that_hangs_holds_nobody_up(stuck: Stuck) -> None:
    group = nccl_of(stuck, Ends(Done(), Done()))
    group.build(Board(), 1, PAIR, 0)
    waiting = reducing(group)

    group.sever(1)
    with pytest.raises(Severed):
        waiting.result(30)
    until(stuck.lock.locked, "the abort hangs")
    group.build(Board(), 2, PAIR, 0)
    group.all_reduce(torch.ones(3))

    assert stuck.aborts == 1


@pytest.mark.parametrize(
    "end",
    [lambda group: group.sever(1), Nccl.close],  # or an exception in the middle of a sum
    ids=["cut", "closed"],
)
def test_nothing_is_asked_of_a_group_that_is_being_aborted(
    end: Callable[[Nccl], None],
    stuck: Stuck,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(nccl, "LINGER_S", 0.0)
    monkeypatch.setattr(nccl, "CLOSE_S", 0.1)
    group = built(stuck)
    waiting = reducing(group)
    work = stuck.works[1]
    assert isinstance(work, Guarded)
    until(lambda: work.asked, "it is watched")

    end(group)
    with pytest.raises(Severed):
        waiting.result(30)
    until(stuck.lock.locked, "the abort hangs")
    asked = work.asked
    until(lambda: "abandoned epoch=1" in caplog.text, "it was left behind")

    assert work.asked == asked


@pytest.mark.parametrize("kind", [Works, Untold])
def test_an_error_of_a_collective_cuts_its_group(kind: type[Works]) -> None:
    work = kind()
    fake = Ends(Done(), work)
    group = built(fake)
    waiting = reducing(group)

    work.error = RuntimeError("NCCL error: remote process exited")
    work.over.set()

    with pytest.raises(Severed, match="remote process exited"):
        waiting.result(30)
    until(lambda: fake.aborts, "it was aborted")
    assert group.broken(1)


class OverUntold(Untold):
    """One that has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.over.set()


def test_a_sum_of_which_no_error_can_be_told_is_one_if_there_is_none() -> None:
    buffer = torch.ones(3)

    group = built(Ends(Done(), OverUntold()))
    group.all_reduce(buffer)

    assert not group.broken(1)


def test_an_error_that_hangs_before_it_is_told_cuts_the_group() -> None:
    work = Untold()
    work.is_completed = lambda: True  # type: ignore[method-assign]
    group = built(Ends(Done(), work))

    with pytest.raises(Severed, match="what is wrong is not told"):
        group.all_reduce(torch.ones(3))  # whoever waits for it, hangs
    assert group.broken(1)
    work.over.set()


def test_a_collective_that_cannot_begin_holds_nobody_up() -> None:
    fake = Blocks(Done())
    group = built(fake)
    waiting = aside(group.exchange, [torch.ones(1), torch.ones(1)], [1, 1])
    until(fake.reached.is_set, "it hangs before it began")

    group.sever(1)

    with pytest.raises(Severed):
        waiting.result(30)
    fake.free.set()


def test_a_collective_that_is_refused_cuts_its_group() -> None:
    fake = Raises(Done())
    group = built(fake)

    with pytest.raises(Severed, match="internal error"):
        group.exchange([torch.ones(1), torch.ones(1)], [1, 1])
    until(lambda: fake.aborts, "it was aborted")
    assert group.broken(1)


def test_an_error_of_the_card_is_no_lost_peer() -> None:
    work = Works()
    group = built(Ends(Done(), work))
    waiting = reducing(group)

    def broken() -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    work.is_completed = broken  # type: ignore[method-assign]

    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        waiting.result(30)
    assert not group.broken(1)


# --- when, how often, by whom --------------------------------------------------------------------


def test_what_was_cut_before_does_not_begin() -> None:
    fake = Ends(Done())
    group = built(fake)

    group.sever(1)

    with pytest.raises(Severed, match="epoch 1 broke"):
        group.all_reduce(torch.ones(3))
    assert fake.begun == 1


def test_what_is_cut_just_before_it_begins_makes_no_peer_a_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are told that the epoch broke, and look for nobody who says nothing."""
    fake = Ends(Done())
    group = built(fake)
    assert group._live is not None
    do = group._live.hands.do

    def late(call: Callable[[], Any]) -> Future[Any]:
        def cut_first() -> Any:
            group.sever(1)
            return call()

        asked = do(cut_first)
        asked.result(30)  # the training thread looks only then
        return asked

    monkeypatch.setattr(group._live.hands, "do", late)

    with pytest.raises(Severed, match="epoch 1 broke") as raised:
        group.all_reduce(torch.ones(3))
    assert type(raised.value) is Severed
    assert fake.begun == 1


def test_what_ended_before_the_cut_stays() -> None:
    fake = Ends(Done(), Done())
    group = built(fake)

    buffer = torch.ones(3)
    group.all_reduce(buffer)  # raises nothing
    group.sever(1)
    until(lambda: fake.aborts, "it was aborted")

    assert fake.begun == 2
    assert buffer.tolist() == [1.0, 1.0, 1.0]
    assert group.broken(1)


def test_a_cut_of_an_earlier_epoch_is_none() -> None:
    fake = Ends(Done(), Done())
    group = nccl_of(fake)
    group.build(Board(), 5, PAIR, 0)

    group.sever(4)
    group.all_reduce(torch.ones(3))

    assert (fake.aborts, group.broken(5)) == (0, False)


def test_a_group_is_aborted_once_however_often_it_is_cut() -> None:
    fake = Ends(Done(), Works())
    next_one = Ends(Done())
    group = nccl_of(fake, next_one)
    group.build(Board(), 1, PAIR, 0)
    waiting = reducing(group)

    all_do([partial(group.sever, 1)] * 8)
    with pytest.raises(Severed):
        waiting.result(30)
    group.build(Board(), 2, PAIR, 0)
    group.sever(2)
    until(lambda: next_one.aborts, "the next was aborted too")

    assert (fake.aborts, next_one.aborts) == (1, 1)


def test_a_group_is_aborted_when_the_next_is_made() -> None:
    """At a planned change of members nobody cuts it."""
    fake, next_one = Ends(Done()), Ends(Done(), Done())
    group = nccl_of(fake, next_one)

    group.build(Board(), 1, PAIR, 0)
    group.build(Board(), 2, PAIR, 0)
    group.all_reduce(torch.ones(3))

    until(lambda: fake.aborts, "it was aborted")
    assert next_one.aborts == 0


def test_what_peers_still_need_of_a_group_is_sent_before_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "LINGER_S", 60.0)
    fake, next_one = Ends(Done()), Ends(Done(), Done())
    group = nccl_of(fake, next_one)

    group.build(Board(), 1, PAIR, 0)
    group.build(Board(), 2, PAIR, 0)
    group.all_reduce(torch.ones(3))
    assert fake.aborts == 0
    group.sever(1)  # now nobody needs anything of it

    until(lambda: fake.aborts, "it was aborted")


def test_the_process_ends_once_no_thread_is_in_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LINGER_S", 0.0)
    fake = Slow(Done())
    group = built(fake)

    closing = aside(group.close)
    until(lambda: fake.aborts, "it is being aborted")
    assert not closing.done()
    fake.free.set()

    closing.result(30)


def test_an_abort_that_hangs_does_not_keep_the_process(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "LINGER_S", 0.0)
    monkeypatch.setattr(nccl, "CLOSE_S", 0.1)
    group = built(stuck)

    aside(group.close).result(30)

    until(lambda: stuck.aborts, "it is being aborted")


def test_it_is_warmed_up_by_a_group_of_its_own() -> None:
    alone, pair = Ends(Done()), Ends(Done(), Done())
    group = nccl_of(alone, pair)

    group.warm_up()
    group.build(Board(), 1, PAIR, 0)
    group.all_reduce(torch.ones(3))

    until(lambda: alone.aborts, "the first was given up")
    assert (alone.begun, pair.begun, pair.aborts) == (1, 2, 0)


def failed() -> Works:
    work = Done()
    work.error = RuntimeError("NCCL error: unhandled system error")
    return work


@pytest.mark.parametrize("first", [failed, Works], ids=["fails", "hangs"])
def test_a_warm_up_that_comes_to_nothing_stops_nobody(
    first: Callable[[], Works], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl, "CONNECT_S", 0.1)
    work = first()
    alone, pair = Fake(work), Ends(Done(), Done())
    group = Nccl(CPU, make=lambda _store, _rank, members: alone if members == 1 else pair)

    group.warm_up()
    group.build(Board(), 1, PAIR, 0)
    group.all_reduce(torch.ones(3))
    work.over.set()

    assert "not_warmed_up" in caplog.text


# --- while it is made ----------------------------------------------------------------------------


def test_a_peer_that_dies_before_the_group_is_made_holds_nobody_up() -> None:
    reached, free = threading.Event(), threading.Event()
    late = Ends(Done())

    def make(_store: Store, _rank: int, _members: int) -> Fake:
        reached.set()
        free.wait()
        return late

    group = Nccl(CPU, make=make)
    waiting = aside(group.build, Board(), 1, PAIR, 1)
    until(reached.is_set, "it waits for its peer")

    group.sever(1)
    with pytest.raises(Severed):
        waiting.result(30)
    free.set()

    until(lambda: late.aborts, "what was made too late was aborted")
    assert (late.aborts, late.begun) == (1, 0)


def test_a_peer_that_dies_before_it_is_connected_holds_nobody_up() -> None:
    fake = Ends(Works())
    group = nccl_of(fake, Ends(Done(), Done()))
    waiting = aside(group.build, Board(), 1, PAIR, 0)
    until(lambda: fake.begun, "the communicator comes to be")

    group.sever(1)
    with pytest.raises(Severed):
        waiting.result(30)
    group.build(Board(), 2, PAIR, 0)
    group.all_reduce(torch.ones(3))

    until(lambda: fake.aborts, "the first was aborted")


def test_a_group_that_cannot_be_made_breaks_its_epoch() -> None:
    def make(_store: Store, _rank: int, _members: int) -> Fake:
        raise RuntimeError("NCCL error: unhandled system error")

    group = Nccl(CPU, make=make)

    with pytest.raises(Severed, match="unhandled system error"):
        group.build(Board(), 1, PAIR, 0)
    assert group.broken(1)


# --- what is left behind -------------------------------------------------------------------------


def test_what_an_abort_ended_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "ABORT_S", 60.0)  # this one comes, however busy the machine is
    group = built(Ends(Done(), Works()))

    cut = cut_while_reducing(group)

    until(lambda: gc.collect() >= 0 and cut() is None, "its buffer was freed")
    assert cut() is None


def test_what_may_still_be_written_to_is_never_freed(caplog: pytest.LogCaptureFixture) -> None:
    group = built(Fake(Done(), Works()))

    cut = cut_while_reducing(group)

    until(lambda: "abandoned epoch=1" in caplog.text, "it was given up")
    gc.collect()
    assert cut() is not None


def cut_while_reducing(group: Nccl) -> weakref.ref[torch.Tensor]:
    begun = threading.Event()
    group.begun = begun.set
    buffer = torch.ones(3)

    def reduce(given: list[torch.Tensor]) -> str:
        with pytest.raises(Severed) as raised:
            group.all_reduce(given.pop())
        return str(raised.value)

    waiting = aside(reduce, [buffer])
    until(begun.is_set, "the sum began")
    group.sever(1)
    waiting.result(30)
    return weakref.ref(buffer)


# --- on which card -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "asked"), [(Done, 1), (OverUntold, 2)])
def test_a_sum_s_threads_use_the_model_s_card_and_no_other(
    kind: type[Works], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each process of a node would take memory of the first card. What nobody can tell
    otherwise is waited for by another thread."""
    card = fake_card.Card(monkeypatch)
    group = built(Ends(Done(), kind()))
    group.device = fake_card.DEVICE

    group.all_reduce(torch.ones(3))

    assert card.current == [fake_card.NUMBER] * asked


# --- which group, and with which settings --------------------------------------------------------


def test_what_is_in_the_processor_s_memory_is_exchanged_by_gloo() -> None:
    assert isinstance(group_for(torch.nn.Linear(2, 2), "127.0.0.1", 0), Gloo)


class Options:
    """As torch's in a build for CUDA."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(blocking=1)
        self.is_high_priority_stream = False
        self._timeout = datetime.timedelta(minutes=10)


class Group:
    """The same; notes how it is made."""

    Options = Options

    def __init__(self, store: Store, rank: int, members: int, options: Any) -> None:
        self.given = (store, rank, members)
        self.options = options
        self.watchdog = os.environ[NO_WATCHDOG] == "0"


def test_torch_s_group_is_made_so_that_it_can_be_aborted_and_ends_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv(NO_WATCHDOG, "0")
    store = HashStore()

    made = make_group(store, 1, 2)

    assert made.given == (store, 1, 2)
    assert made.options.config.blocking == 0  # else it could not be aborted before it is connected
    assert made.options.is_high_priority_stream  # no kernel of its holds up a stream of ours
    assert made.options._timeout.total_seconds() == nccl.ABORT_S
    assert not made.watchdog
    assert os.environ[NO_WATCHDOG] == "0"


def test_only_groups_of_ours_lack_the_watchdog() -> None:
    Nccl(CPU)

    with without_watchdog():
        ours = os.environ[NO_WATCHDOG]

    assert (ours, os.environ[NO_WATCHDOG]) == ("1", "0")


def on_a_card() -> torch.nn.Module:
    """A model whose parameters say that they are there."""
    model = torch.nn.Module()
    with FakeTensorMode():
        model.weight = torch.nn.Parameter(torch.empty(2, device="cuda"))
    return model


def test_what_is_on_a_card_needs_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    told = rf"is on cuda:0, and torch {re.escape(torch.__version__)} was built without NCCL"

    assert re.match(f"the parameter weight {told}: install", cannot_drop(on_a_card()))
    with pytest.raises(RuntimeError, match=f"the model {told}"):
        group_for(on_a_card(), "127.0.0.1", 0)


def test_what_is_on_a_card_is_exchanged_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)

    group = group_for(on_a_card(), "127.0.0.1", 1)

    assert cannot_drop(on_a_card()) == ""
    assert isinstance(group, Nccl)
    assert (group.device, group.lane) == (torch.device("cuda", 0), 1)


def test_what_lies_in_two_places_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    both = torch.nn.Sequential(on_a_card(), torch.nn.Linear(2, 2))

    assert "the parameters are on cpu and cuda:0: put them in one place" in cannot_drop(both)
