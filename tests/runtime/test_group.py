"""How a script makes a ReplicaGroup and loops over it; what it is told where it does so otherwise.
Nothing here trains: there is no coordinator."""

from __future__ import annotations

import json
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from runtime.checkpoint import Checkpointer
from runtime.client import Stopped, Trouble
from runtime.data import Batches
from runtime.job import Job
from runtime.replica.gradients import Wishes
from runtime.replica.group import ReplicaGroup
from runtime.replica.leader import Leader
from runtime.replica.siblings import Incomplete
from tests.runtime.replicas import PATIENCE_S, until
from tests.runtime.told import Told

Make = Callable[..., ReplicaGroup]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A group that has not joined its job."""
    handler = signal.getsignal(signal.SIGTERM)
    job = Job(
        name="j", replica=0, rank=0, world_replicas=1, placement="p", coordinator="127.0.0.1:1",
        token="t", state_dir=tmp_path, sender=Told(), stop=threading.Event(),
    )  # fmt: skip

    def made(trained: nn.Module | None = None, **given: Any) -> ReplicaGroup:
        model = nn.Linear(2, 1)
        parameters = [*model.parameters(), *(trained.parameters() if trained else ())]
        optimizer = torch.optim.SGD(parameters)
        batches = given.pop("batches", None) or Batches(samples=24)
        ours = replace(job, coordinator=given.pop("coordinator", job.coordinator))
        return ReplicaGroup(ours, model, optimizer, batches, Checkpointer(ours), **given)

    yield made
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_grad_norm": -1.0}, r"max_grad_norm=-1.0: give one above 0, None not to clip"),
        ({"max_grad_norm": 0}, "max_grad_norm=0: give one above 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan: give one above 0"),
        ({"steps": -1}, "steps=-1: give a number of steps, None for no end"),
        ({"compare_every": -1}, "compare_every=-1: give a number of steps"),
        ({"mode": "covers"}, "there is no mode 'covers'; use one of: cover"),
        (
            {"trained": nn.Linear(1, 5)},
            r"optimizer 0, SGD, trains a tensor of shape \(5, 1\) that is no parameter of the mod",
        ),
    ],
)
def test_what_would_train_something_else_is_refused(
    make: Make, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make(**given)


@pytest.mark.parametrize("coordinator", ["none", "node1", "node1:", "7070", "node1:http"])
def test_an_address_of_the_coordinator_that_is_none_is_named(make: Make, coordinator: str) -> None:
    with pytest.raises(RuntimeError, match=f"DRYDOCK_COORDINATOR is '{coordinator}'; give host:po"):
        make(coordinator=coordinator)


@pytest.mark.parametrize(
    "error", [socket.gaierror(-2, "Name or service not known"), UnicodeError("label too long")]
)
def test_a_coordinator_whose_host_is_not_found_is_named_with_its_variable(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def nowhere(_host: str) -> str:
        raise error

    monkeypatch.setattr("runtime.replica.network.source_towards", nowhere)

    with pytest.raises(RuntimeError, match=r"DRYDOCK_COORDINATOR is 'node9:7070', .*hosts node9`"):
        make(coordinator="node9:7070")


class Files(Dataset[torch.Tensor]):
    """Its samples would be read from there."""

    folder = "/data"

    def __len__(self) -> int:
        return 24


class Named(Files):
    fingerprint = "v1"


def test_data_that_nothing_tells_apart_is_said_to_be_so(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    make(batches=Batches(Named()))
    make()
    assert "data_not_compared" not in caplog.text

    make(batches=Batches(Files()))

    assert "data_not_compared dataset=Files: it holds no array in memory" in caplog.text


def test_replicas_compare_how_their_loops_go_before_they_join(make: Make) -> None:
    replica = make(steps=7, compare_every=30)

    loop = replica._loop
    assert isinstance(loop, Leader)
    shape = loop.introduce()[0]["shape"]
    assert (shape["steps"], shape["compare_every"], shape["after_step"]) == ("7", "30", "none")


@pytest.fixture
def wants_to_stop(make: Make, monkeypatch: pytest.MonkeyPatch) -> Leader:
    """One of a job that was in an epoch, which broke."""
    monkeypatch.setattr("runtime.replica.leader.LEAVE_S", 0.05)
    loop = make()._loop
    assert isinstance(loop, Leader)
    loop.member.epoch = 3
    loop.wish_stop()
    assert loop._next() == {"op": "wished"}
    return loop


@pytest.mark.parametrize(
    ("replica", "failed", "lost", "shared"),
    [(0, 0, 9, 1), (1, 0, 9, 0), (0, 1, 9, 0), (1, 1, 9, 1), (1, 0, 0, 1)],
)
def test_the_last_save_to_the_folder_of_all_is_of_whose_turn_it_is(
    make: Make, monkeypatch: pytest.MonkeyPatch, replica: int, failed: int, lost: int, shared: int
) -> None:
    """Who could not write there alone before cannot write there now, and who is gone does not."""
    loop = make()._loop
    assert isinstance(loop, Leader)
    saved: list[set[str]] = []
    monkeypatch.setattr(loop.together, "save", lambda tiers, **_how: saved.append(set(tiers)))
    loop.reporter.members, loop.reporter.replica = [0, 1], replica
    gone = {"epoch": 1, "replica": lost, "placement": "g", "how": "exit", "at": 1.0}
    loop.reporter.lost(gone, 3)
    loop.rank.state.committed = 3
    loop.sharing.decide(Wishes(alone_failed=bool(failed)), 2)

    loop._save_last()

    assert saved == [{"shared"}] * shared


def test_who_wants_the_job_to_stop_waits_for_an_epoch_to_say_so_in(
    wants_to_stop: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def silent_s() -> float:
        """It is there, and grants an epoch once we have waited three times."""
        asked.append(0.0)
        if len(asked) == 3:
            wants_to_stop.link.inbox.put({"op": "epoch"})
        return 0.0

    monkeypatch.setattr(wants_to_stop.link, "silent_s", silent_s)

    assert wants_to_stop._next() == {"op": "epoch"}


@pytest.mark.parametrize(
    ("silent_s", "stop_s", "told"), [(9.0, 60.0, 0), (0.0, 0.0, 0), (0.0, 60.0, 1)]
)
def test_it_goes_unheard_if_nobody_is_there_or_it_is_to_be_killed(
    wants_to_stop: Leader,
    monkeypatch: pytest.MonkeyPatch,
    silent_s: float,
    stop_s: float,
    told: int,
) -> None:
    monkeypatch.setattr("runtime.replica.leader.STOP_S", stop_s)
    monkeypatch.setattr(wants_to_stop.link, "silent_s", lambda: silent_s)
    for _ in range(told):
        wants_to_stop.job.told.set()

    assert wants_to_stop._next() == {"op": "dismissed"}


def test_who_waits_for_an_epoch_hears_of_a_signal_that_another_thread_noted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`join` ran in the main thread, and the group is entered in another."""
    monkeypatch.setattr("runtime.replica.leader.LOOK_S", 0.05)
    replica = make()
    loop = replica._loop
    assert isinstance(loop, Leader)
    is_to_end, looked = loop._is_to_end, threading.Event()

    def looks() -> bool:
        found = is_to_end()
        looked.set()
        return found

    def trains() -> None:
        with replica:
            list(replica)

    monkeypatch.setattr(loop, "_is_to_end", looks)
    training = threading.Thread(target=trains, daemon=True)
    training.start()
    assert looked.wait(PATIENCE_S)
    replica.job.told.set()
    training.join(PATIENCE_S)

    assert not training.is_alive()


@pytest.mark.parametrize(
    ("word", "said"),
    [(b"", ["join"]), (b'{"op": "donors", "donors": []}\n', ["join", "goodbye"])],
    ids=["it waits for its place", "it was let in"],
)
def test_who_leaves_says_goodbye_if_it_was_let_in(make: Make, word: bytes, said: list[str]) -> None:
    """Else that would be heard only once it had been given the place of another."""

    def hears(server: socket.socket) -> list[str]:
        connection, _ = server.accept()
        with connection, connection.makefile() as lines:
            connection.sendall(word)
            return [json.loads(line)["op"] for line in lines]

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(PATIENCE_S)
        hearing = pool.submit(hears, server)
        with make(coordinator=f"127.0.0.1:{server.getsockname()[1]}") as replica:
            loop = replica._loop
            assert isinstance(loop, Leader)
            link = loop.link
            until(lambda: link._socket is not None and link.heard == bool(word), "it has joined")

        assert hearing.result(PATIENCE_S) == said


def test_who_leaves_tells_so_before_it_waits_for_what_it_still_writes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be killed meanwhile, and nobody would know that it was sent away."""
    replica = make()
    sender, close = replica.job.sender, replica._loop.close
    assert isinstance(sender, Told)
    told: list[str] = []

    def closes(*, goodbye: bool) -> None:
        told.extend(one.reason for one in sender.messages if isinstance(one, Stopped))
        close(goodbye=goodbye)

    monkeypatch.setattr(replica._loop, "close", closes)

    with replica:
        pass

    assert told == ["left the loop"]


def test_each_step_is_judged_by_what_came_of_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make()._loop
    assert isinstance(loop, Leader)
    loop.member.members = {0: "p"}
    monkeypatch.setattr(loop, "_await_lease", lambda: None)
    summed = SimpleNamespace(wishes=Wishes(), who=[], seconds=[], loss=1.0)
    monkeypatch.setattr(loop.together, "reduce", lambda: summed)
    monkeypatch.setattr(loop.together, "commit", lambda: math.nan)

    loop._finish_step()

    assert loop.together.holds_back


@pytest.mark.parametrize(("again_s", "told"), [(60.0, 1), (0.0, 3)])
def test_who_holds_out_of_reach_says_so_now_and_then(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    again_s: float,
    told: int,
) -> None:
    monkeypatch.setattr("runtime.replica.leader.STILL_AWAY_S", again_s)
    loop = make()._loop
    assert isinstance(loop, Leader)
    silent_s = iter([99.0, 99.0, 99.0, 0.0])
    monkeypatch.setattr(loop.link, "silent_s", lambda: next(silent_s))
    monkeypatch.setattr(loop.link, "await_word", lambda _limit_s: None)
    loop.member.lease_s = 30.0

    loop._await_lease()

    assert caplog.text.count("holding step=0 silent_s=99.0") == told


def test_who_cannot_begin_tells_why_it_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = make()

    def start() -> None:
        raise Incomplete("ranks [1] of this replica of 2 did not come")

    monkeypatch.setattr(replica._loop, "start", start)

    with pytest.raises(Incomplete), replica:
        pass
    assert isinstance(replica.job.sender, Told)
    why, ended = replica.job.sender.messages
    assert isinstance(why, Trouble)
    assert isinstance(ended, Stopped)
    assert (why.kind, why.text) == (
        "exception", "Incomplete: ranks [1] of this replica of 2 did not come",
    )  # fmt: skip
    assert (ended.reason, ended.clean) == ("exception", False)


def test_who_ends_for_an_error_is_not_ended_by_the_ranks_that_it_hangs_up_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make()
    loop = replica._loop
    assert isinstance(loop, Leader)
    ended: list[int] = []
    monkeypatch.setattr("runtime.replica.group.os._exit", ended.append)
    monkeypatch.setattr(loop.siblings, "close", lambda: replica._abandon("rank 1 is gone"))

    with pytest.raises(ValueError, match="of the script"), replica:
        raise ValueError("of the script")

    assert ended == []


def test_shards_are_given_within_the_with_block(make: Make) -> None:
    with pytest.raises(RuntimeError, match="has not joined its job: loop over its shards within"):
        iter(make())


def test_a_loop_that_was_left_is_not_begun_again(make: Make) -> None:
    with make() as replica:
        iter(replica)
        with pytest.raises(RuntimeError, match="shards was left before, in the middle of a step"):
            iter(replica)


def test_a_loop_after_the_last_one_is_told_that_there_is_no_more(make: Make) -> None:
    with make(steps=0) as replica:
        iter(replica)
        replica._leave("all steps done", goodbye=False)
        with pytest.raises(RuntimeError, match=r"has left its job: end this process\. One"):
            iter(replica)
