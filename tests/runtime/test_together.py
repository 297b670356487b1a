"""What membership decides, done by all ranks of a replica or by none: a real first rank, and one
other whose answers are given here."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import Checkpointer
from runtime.checkpoint.coding import NotInstalled
from runtime.checkpoint.draft import Draft
from runtime.checkpoint.interval import Pace
from runtime.checkpoint.manifest import digest_of_all
from runtime.checkpoint.suspects import HELD_BACK_S, TOO_MANY, TRIAL_STEPS, DoesNotTrain
from runtime.client import CheckpointSaved, Trouble
from runtime.data import Batches
from runtime.image import Damaged, Staged
from runtime.job import Job
from runtime.replica import rank as rank_module
from runtime.replica import together as together_module
from runtime.replica.division import Division
from runtime.replica.gloo import Gloo
from runtime.replica.gradients import Tail, Wishes
from runtime.replica.link import Link
from runtime.replica.membership import CannotFollow, Severed, Silent
from runtime.replica.observing import Observer
from runtime.replica.peers import PeerServer, Reduced, ReducedLog
from runtime.replica.rank import Rank
from runtime.replica.siblings import Incomplete, Siblings
from runtime.replica.state import TrainingState
from runtime.replica.step import Applied, NotWhole, StepEngine
from runtime.replica.telling import Committed, Teller
from runtime.replica.together import HANGS_S, MAX_TRIES, MAX_UNTOLD, Together
from runtime.snapshot import Changed, Copying, state_of, touched
from tests.runtime.replicas import PATIENCE_S, Board, until
from tests.runtime.told import Told

TOKEN = "of this test"
SAVE = "save5"
REFUSED = {"failed": "unloadable", "text": "a bit"}
GRANT = {
    "epoch": 1, "members": [{"replica": 0, "placement": "p", "gloo": ["here:1", "here:2"]}],
    "lost": [], "begins": True, "joined": [], "step": -1, "started_at": 1.0,
}  # fmt: skip


class Other:
    """The other rank: does nothing, and answers what it is told to."""

    def __init__(self, address: str) -> None:
        #: empty where it says nothing
        self.answers: dict[str, Any] = {"seen_epoch": {"value": 0}, "broken": {}, "give_up": {}}
        self.heard: list[str] = []
        host, _, port = address.rpartition(":")
        self.connection = socket.create_connection((host, int(port)))
        self._say(
            {"op": "join", "token": TOKEN, "rank": 1, "address": "a:1", "gloo": "g:1", "holder": {}}
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for line in self.connection.makefile("r"):
            op = json.loads(line)["op"]
            self.heard.append(op)
            if answer := self.answers.get(op, {"value": None}):
                self._say({"op": "answer", **answer})

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the test is over
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class Counted:
    """Of the script's own."""

    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Pair:
    """A replica of two ranks."""

    def __init__(self, folder: Path) -> None:
        self.told = Told()
        job = Job(
            name="j", replica=0, rank=0, ranks=2, world_replicas=1, placement="p",
            coordinator="127.0.0.1:1", token=TOKEN, state_dir=folder, sender=self.told,
            stop=threading.Event(),
        )  # fmt: skip
        self.state = new_state()
        gloo = Gloo("127.0.0.1")
        division = Division(self.state.model, 0)
        engine = StepEngine(
            self.state, gloo, Observer(), division, mode="cover", max_grad_norm=None
        )
        self.saver = Checkpointer(job)
        self.rank = Rank(
            job, self.state, engine, gloo, self.saver, Observer(), host="127.0.0.1", on_step=None
        )
        link = Link("127.0.0.1:1", list, lambda _epoch, _message: None)
        self.rank.link = link
        siblings = Siblings("127.0.0.1", TOKEN, 2, link, lambda _r, _m: None, lambda _r: None)
        self.other = Other(siblings.address)
        siblings.meet()
        self.together = Together(self.rank, siblings, Teller(job, self.state.ledger, 1))
        self.together.member.replica = 0


def new_state(*, frozen: bool = False) -> TrainingState:
    """`frozen`: one of its weights is not trained."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainingState(model, [optimizer], Batches(samples=24, shards=2))


def trained(step: int) -> TrainingState:
    state = new_state()
    state.committed = step
    return state


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.other.connection.shutdown(socket.SHUT_RDWR)
    made.rank.close()


@pytest.fixture
def offer() -> Iterator[Callable[[TrainingState], tuple[str, str]]]:
    """Hold a copy ready, as a member does; its address and digest."""
    servers: list[PeerServer] = []

    def hold(state: TrainingState) -> tuple[str, str]:
        ready = threading.Event()
        server = PeerServer("127.0.0.1", TOKEN, ReducedLog(), lambda _step, _digest: ready.set())
        servers.append(server)
        server.offer(state.begin_copy(None))
        assert ready.wait(30)
        return server.address, state.copy().digest

    yield hold
    for server in servers:
        server.close()


def test_a_state_is_taken_by_all_ranks_or_by_none(
    pair: Pair, offer: Callable[[TrainingState], tuple[str, str]]
) -> None:
    address, digest = offer(trained(7))
    pair.other.answers["take"] = {"failed": "cannot_follow", "text": "the donor died"}

    with pytest.raises(CannotFollow, match="the donor died"):
        pair.together.take(7, f"{digest}-other", [[address, "a:2"]])
    before = pair.state.committed
    del pair.other.answers["take"]
    pair.together.take(7, f"{digest}-other", [[address, "a:2"]])

    assert (before, pair.state.committed) == (-1, 7)
    assert pair.other.heard == ["take", "take", "load"]


def test_ranks_at_different_steps_never_train(pair: Pair) -> None:
    pair.other.answers["connect"] = {"value": 3}

    with pytest.raises(Incomplete, match=r"are at the steps \[-1, 3\]; start it anew"):
        pair.together.connect(GRANT)


def test_a_group_that_one_rank_could_not_build_is_nobody_s(pair: Pair) -> None:
    pair.other.answers["connect"] = {"failed": "severed", "text": "it broke"}

    with pytest.raises(Severed, match="it broke"):
        pair.together.connect(GRANT)


@pytest.fixture
def waiting(pair: Pair) -> Iterator[Gloo]:
    """The pair are members of an epoch, with a peer that does not sum yet."""
    board, peer = Board(), Gloo("127.0.0.1")
    addresses = [pair.rank.gloo.address, peer.address]
    pair.rank.gloo.build(board, 1, addresses, 0)
    peer.build(board, 1, addresses, 1)
    pair.rank.engine.shares = pair.rank.engine._usual = {0: []}
    pair.rank.engine.epoch = pair.together.member.epoch = 1
    yield peer
    peer.sever(1)
    pair.rank.gloo.sever(1)
    peer.close()


def why_not_summed(pair: Pair) -> BaseException | None:
    """What ends a sum, which must end."""
    pool = ThreadPoolExecutor(1)
    sum_ = pool.submit(pair.together.reduce)
    pool.shutdown(wait=False)
    return sum_.exception(timeout=30)


@pytest.mark.parametrize(("failed", "expected"), [("silent", Silent), ("severed", Severed)])
def test_a_sum_that_failed_on_another_rank_is_not_waited_for_here(
    pair: Pair, waiting: Gloo, failed: str, expected: type
) -> None:
    pair.other.answers["reduce"] = {"failed": failed, "text": "its peer answers nothing"}

    why = why_not_summed(pair)

    assert type(why) is expected
    until(lambda: pair.other.heard == ["reduce", "broken", "broken"], "all ranks hear of it")
    assert pair.rank.gloo.broken(1)


def test_a_sum_that_failed_here_is_not_waited_for_on_another_rank(
    pair: Pair, waiting: Gloo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_wishes: Wishes) -> Any:
        raise Silent("our peer answers nothing")

    monkeypatch.setattr(pair.rank.engine, "reduce", fails)
    pair.other.answers |= {"reduce": {}, "broken": {"failed": "severed", "text": "it broke"}}

    why = why_not_summed(pair)

    assert type(why) is Silent
    assert pair.other.heard[:2] == ["reduce", "broken"]


def test_what_cannot_be_followed_breaks_no_epoch(pair: Pair, waiting: Gloo) -> None:
    pair.other.answers["fetch"] = {"failed": "cannot_follow", "text": "nobody has it"}

    with pytest.raises(CannotFollow):
        pair.together._all("fetch", donors=[["127.0.0.1:1", "a:2"]])

    assert pair.other.heard == ["fetch"]
    assert not pair.rank.gloo.broken(1)


def test_a_step_that_is_not_whole_on_one_rank_is_computed_anew_on_all(pair: Pair) -> None:
    pair.rank.engine.shares = pair.rank.engine._usual = {0: []}
    pair.rank.engine.epoch = 1
    pair.other.answers["reduce"] = {"value": ["step 0: summed [1, 0]", True, True]}

    with pytest.raises(NotWhole, match=r"summed \["):
        pair.together.reduce()

    assert pair.other.heard == ["reduce", "refuse"]


@pytest.mark.parametrize("is_free", [True, False])
def test_a_replica_writes_alone_to_the_folder_of_all_if_each_of_its_ranks_can(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_free: bool
) -> None:
    pair.rank.engine.shares = pair.rank.engine._usual = {0: []}
    pair.rank.engine.epoch = 1
    pair.other.answers["reduce"] = {"value": ["step 0: summed [1, 0]", False, is_free]}
    monkeypatch.setattr(pair.saver, "is_free", lambda _tier: True)

    with pytest.raises(NotWhole):
        pair.together.reduce()

    assert pair.together.can_write_alone() is is_free


def test_a_tier_that_hangs_on_one_rank_waits_on_all_and_alone(pair: Pair) -> None:
    pair.other.answers["ready"] = {"value": ["peer", "shared"]}

    ready = pair.together.ready({"local", "peer", "shared"})

    assert ready == {"peer", "shared"}


def begin(pair: Pair, op: str, step: int) -> None:
    """A copy of this step's state, for that."""
    pair.state.committed = step
    pair.together._begin_to_hash(op)


def test_a_copy_is_held_once_every_part_is_of_one_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    troubles: list[tuple[str, str]] = []
    monkeypatch.setattr(pair.together, "trouble", lambda *told: troubles.append(told))

    def say(op: str, **message: Any) -> bool:
        said.append({"op": op, **message})
        return True

    pair.rank.link.say = say  # type: ignore[method-assign]

    begin(pair, "staged", 4)
    pair.together.hashed("staged", 4, "b", rank=1)
    begin(pair, "staged", 5)
    pair.together.hashed("staged", 5, "a", rank=0)
    pair.together.hashed("staged", 5, "c", rank=1)
    begin(pair, "staged", 6)
    pair.together.hashed("staged", 4, "b", rank=0)  # another took its place
    pair.together.hashed("staged", 6, "a", rank=0)
    pair.together.hashed("staged", 6, "", rank=1)  # it could not be made there

    assert [one["op"] for one in said] == ["staged", "staged"]
    assert [(one["step"], one["digest"]) for one in said] == [(5, "a-c"), (6, "")]
    ((kind, what),) = troubles
    assert kind == "not_staged"
    assert "rank 1 could make no copy of step 6" in what


def test_what_the_ranks_held_after_two_steps_is_told_in_any_order(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[int, str]] = []
    monkeypatch.setattr(
        pair.rank.link, "say", lambda _op, **told: said.append((told["step"], told["digest"]))
    )

    for step in (4, 9):
        begin(pair, "proved", step)
    for rank, step, digest in [(0, 4, "a"), (0, 9, "c"), (1, 9, "d"), (1, 4, "b")]:
        pair.together.hashed("proved", step, digest, rank=rank)

    assert said == [(9, "c-d"), (4, "a-b")]


def test_a_step_that_a_peer_hands_over_is_moved_to_where_the_gradients_are(pair: Pair) -> None:
    gradients = pair.rank.engine.gradients
    tail = gradients.tail(Wishes(prove=1))
    buffer = torch.cat([torch.zeros(gradients.size), tail])
    gradients.device = torch.device("meta")

    pair.rank.hold(Reduced(pair.rank.engine.pending, 1, buffer))

    held = pair.rank._reduced
    assert held is not None
    assert held.buffer.is_meta
    assert pair.rank.tail is not None
    assert pair.rank.tail.wishes.prove == 1


def test_a_proof_leaves_out_what_only_the_loop_changes(pair: Pair) -> None:
    pair.state.extra = {"seen": Counted(3)}
    hashed: queue.Queue[tuple[str, int, str]] = queue.Queue()
    pair.rank.on_hashed = lambda *told: hashed.put(told)
    pair.rank.prove()
    before = hashed.get(timeout=30)
    pair.state.extra = {"seen": Counted(4)}
    whole = pair.state.copy().digest
    pair.rank.prove()

    assert hashed.get(timeout=30) == before
    assert before[:2] == ("proved", pair.state.committed)
    assert before[2] not in ("", whole)


def test_what_nothing_here_unpacks_is_not_passed_over_for_what_is_older(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: object, **_also: object) -> None:
        raise NotInstalled("it is packed with zstd")

    monkeypatch.setattr(pair.saver.sources, "ranks", fails)

    with pytest.raises(NotInstalled):
        pair.rank.obey("read", {"name": "step-00000009", "tier": "shared", "number": 1})
    assert not pair.told.messages


def test_no_newcomer_is_worth_the_training(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script wants kept became something of which no copy can be made."""
    hashed: list[tuple[str, int, str]] = []
    pair.rank.on_hashed = lambda *told: hashed.append(told)
    monkeypatch.setattr(pair.state, "extra", {"odd": Counted({1})})

    pair.rank.make_room()
    until(pair.rank.has_room, "it is tried")
    pair.rank.stage()

    assert hashed == [("staged", pair.state.committed, "")]


@pytest.mark.parametrize("in_place", [1 << 30, 0])
def test_who_follows_proves_a_state_where_it_lies_unless_that_takes_long(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, in_place: int
) -> None:
    """Nobody waits for it, and memory for a copy would cost what the members train with."""
    hashed: queue.SimpleQueue[tuple[str, int, str]] = queue.SimpleQueue()
    made: list[int] = []

    def noted(size: int) -> memoryview:
        made.append(size)
        return touched(size)

    pair.rank.on_hashed = lambda *told: hashed.put(told)
    monkeypatch.setattr(rank_module, "IN_PLACE_BYTES", in_place)
    monkeypatch.setattr(rank_module, "touched", noted)
    pair.state.committed = 9
    expected = pair.state.begin_proof(None).finish().digest

    pair.rank.follow([["127.0.0.1:1"]])
    until(lambda: in_place or pair.rank.has_room(), "there is memory")
    pair.rank.prove()

    assert hashed.get(timeout=PATIENCE_S) == ("proved", 9, expected)
    assert bool(made) == (not in_place)
    pair.rank.stop_following()


def test_a_proof_that_cannot_be_made_is_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[tuple[str, int, str]] = []
    pair.rank.on_hashed = lambda *told: hashed.append(told)
    monkeypatch.setattr(pair.state, "_proof", lambda: {"odd": Counted({1})})

    pair.rank.prove()

    assert hashed == [("proved", pair.state.committed, "")]
    assert [one.kind for one in pair.told.messages if isinstance(one, Trouble)] == ["not_compared"]


def test_who_is_no_member_any_more_holds_no_copy_for_newcomers(pair: Pair) -> None:
    """It is not told when that was taken, and its memory is needed for checkpoints."""
    pair.rank.make_room()
    until(pair.saver.rooms.all_free, "there is room")
    pair.rank.stage()
    taken = not pair.saver.rooms.all_free()

    pair.rank.forget()

    until(pair.saver.rooms.all_free, "it is given back")
    assert taken
    assert not pair.rank._kept.copied


def test_room_that_cannot_be_had_is_told_and_asked_for_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fails(size: int) -> memoryview:
        asked.append(size)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(rank_module, "touched", fails)
    monkeypatch.setattr(pair.saver.rooms, "made", lambda: True)
    for _ in range(2):
        pair.rank.make_room()
        until(pair.rank.has_room, "it was tried")
        assert pair.rank._spare() is None

    assert len(asked) == 2
    told = [one.kind for one in pair.told.messages if isinstance(one, Trouble)]
    assert told == ["no_room_for_newcomers"] * 2


@pytest.mark.parametrize(("replica", "first"), [(0, "a"), (1, "b"), (2, "c"), (4, "b")])
def test_those_who_are_behind_ask_different_donors_first(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, replica: int, first: str
) -> None:
    asked: list[str] = []

    def fetch(donors: Any, _token: str, step: int, *_known: object) -> Reduced:
        asked.extend(donors)
        gradients = pair.rank.engine.gradients
        summed = torch.cat([torch.zeros(gradients.size), gradients.tail(Wishes())])
        return Reduced(step, 1, summed)

    monkeypatch.setattr(rank_module, "fetch_reduced", fetch)
    pair.rank.replica = replica

    pair.rank.fetch([["a"], ["b"], ["c"]])

    assert sorted(asked) == ["a", "b", "c"]
    assert asked[0] == first


def test_who_is_behind_in_an_epoch_that_broke_says_so_and_not_that_it_cannot_follow(
    pair: Pair,
) -> None:
    nobody = [["127.0.0.1:1", "127.0.0.1:1"]]
    pair.rank.gloo.sever(3)

    with pytest.raises(Severed, match="epoch 3 broke"):
        pair.rank.fetch(nobody, epoch=3)
    with pytest.raises(CannotFollow):
        pair.rank.fetch(nobody, epoch=4)
    with pytest.raises(CannotFollow):
        pair.rank.fetch(nobody)


def test_who_enters_fetches_no_step_again_that_it_was_given_as_it_followed(
    pair: Pair, offer: Callable[[TrainingState], tuple[str, str]]
) -> None:
    gradients = pair.rank.engine.gradients
    kept = ReducedLog()
    server = PeerServer("127.0.0.1", TOKEN, kept, lambda _step, _digest: None)
    summed = torch.cat([torch.zeros(gradients.size), gradients.tail(Wishes())])
    kept.add(Reduced(0, 1, summed))
    pair.rank.follow([[server.address]])
    assert pair.rank.link.inbox.get(timeout=30)["op"] == "up_to_date"
    pair.rank.stop_following()
    stopped = pair.rank._stopped
    assert stopped is not None

    pair.rank.fetch([[server.address]])

    assert pair.rank._reduced is stopped.drawn(0, [server.address])
    server.close()


def test_what_the_loop_changes_of_extra_makes_no_two_states_differ() -> None:
    digests = set()
    for seen in (3, 4):
        state = new_state()
        state.extra = {"loop": Counted(seen)}
        digests.add(state.begin_comparison(None).finish().digest)

    assert len(digests) == 1


def test_no_proof_is_worth_the_training(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_into: object) -> None:
        raise MemoryError("nothing is left")

    hashed: list[tuple[str, int, str]] = []
    pair.rank.on_hashed = lambda *told: hashed.append(told)
    monkeypatch.setattr(pair.state, "begin_proof", fails)

    pair.rank.prove()

    assert hashed == [("proved", pair.state.committed, "")]
    told = [one.kind for one in pair.told.messages if isinstance(one, Trouble)]
    assert told == ["not_compared"]


def saved_locally(step: int, rank: int) -> CheckpointSaved:
    """A rank's part, on the disk of its node."""
    return CheckpointSaved(
        step=step, tier="local", path=f"/{rank}", bytes=10, digest=f"d{rank}", stall_s=0.1,
        seconds=1.0, at=rank,
    )  # fmt: skip


def test_a_checkpoint_is_told_of_once_every_part_is_durable(pair: Pair) -> None:
    parts = [saved_locally(9, rank) for rank in (0, 1)]

    pair.together.saved(0, parts[0])
    early = list(pair.told.messages)
    pair.together.saved(1, parts[1])

    assert early == []
    (told,) = pair.told.messages
    assert isinstance(told, CheckpointSaved)
    assert (told.step, told.bytes, told.digest, told.path) == (
        9,
        20,
        digest_of_all(["d0", "d1"]),
        "/0",
    )


def test_parts_of_which_one_rank_tells_nothing_do_not_add_up(pair: Pair) -> None:
    for step in range(5 * MAX_UNTOLD):
        pair.together.saved(0, saved_locally(step, 0))
    kept = len(pair.together._saved["local"])
    pair.together.saved(1, saved_locally(step, 1))

    assert kept == MAX_UNTOLD
    assert [one.step for one in pair.told.messages if isinstance(one, CheckpointSaved)] == [step]


def test_a_checkpoint_in_the_folder_of_all_is_told_of_by_whoever_finished_it(pair: Pair) -> None:
    whole = CheckpointSaved(
        step=9, tier="shared", path="/9", bytes=20, digest="d", stall_s=0.1, seconds=1.0, at=1.0
    )

    pair.together.saved(1, whole)

    assert pair.told.messages == [whole]
    said = pair.together.sharing.wishes(0, 1, due=False, able=False, free=False)
    assert said["whole"]


def test_what_is_to_be_compared_waits_for_checkpoints_once_and_not_for_ever(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"all": False, "any": True}
    monkeypatch.setattr(pair.saver.rooms, "all_free", lambda: free["all"])
    monkeypatch.setattr(pair.saver.rooms, "any_free", lambda: free["any"])
    pair.together._compare_every = 10
    pair.other.answers["has_room_to_compare"] = {"value": True}

    pair.state.committed = 8
    in_time = pair.together.ready_to_compare()
    pair.state.committed = 18
    late = pair.together.ready_to_compare()
    free["any"] = False
    never = [pair.together.ready_to_compare() for _ in range(3)]

    assert (in_time, late, never) == (False, True, [False] * 3)
    (told,) = [m for m in pair.told.messages if isinstance(m, Trouble)]
    assert told.kind == "not_compared"
    assert "for 2 times 10 steps" in told.text


@pytest.mark.parametrize(("late", "told"), [(False, []), (True, ["not_compared"])])
def test_states_are_compared_once_every_rank_has_room_for_a_copy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, late: bool, told: list[str]
) -> None:
    monkeypatch.setattr(pair.saver.rooms, "all_free", lambda: True)
    pair.together._compare_every = 10
    pair.state.committed = 18 if late else 8
    pair.other.answers["has_room_to_compare"] = {"value": False}

    before = pair.together.ready_to_compare()
    pair.other.answers["has_room_to_compare"] = {"value": True}

    assert (before, pair.together.ready_to_compare()) == (False, True)
    assert [m.kind for m in pair.told.messages if isinstance(m, Trouble)] == told


def test_each_rank_that_can_make_no_copy_to_compare_is_told(pair: Pair) -> None:
    """Its replica says nothing of that step then, and the comparison ends for all."""
    pair.other.answers["compare"] = {"value": "no copy could be made: MemoryError()"}
    pair.state.committed = 9

    pair.together.compare()  # here no memory was asked for

    told = [(one.kind, one.text) for one in pair.told.messages if isinstance(one, Trouble)]
    assert told == [
        ("not_compared", "step 9, rank 0: another copy has just taken the memory"),
        ("not_compared", "step 9, rank 1: no copy could be made: MemoryError()"),
    ]


def test_who_writes_alone_for_far_too_long_passes_it_on_and_tells(pair: Pair) -> None:
    sharing = pair.together.sharing
    sharing.wishes(0, 1, due=True, able=False, free=True)
    assert sharing.decide(Wishes(shared=True, alone=True), 1) == "one"
    pair.other.answers["ready"] = {"value": []}

    pair.together.begins_alone()
    early = pair.together.passes_on()
    pair.together._alone_since -= HANGS_S + 1.0
    late = pair.together.passes_on()
    heard = sharing.wishes(0, 1, due=True, able=False, free=False)
    sharing.decide(Wishes(alone_failed=heard["alone_failed"]), 1)

    assert (early, late, pair.together.passes_on()) == (False, True, False)
    assert pair.other.heard == ["ready"]


def test_who_took_too_long_and_then_fails_tells_that_too(pair: Pair) -> None:
    pair.other.answers["ready"] = {"value": []}
    pair.together.sharing.writes_alone = True
    pair.together._alone_since = -math.inf
    assert pair.together.passes_on()

    pair.together.hear_of_shared(Wishes(alone_failed=True))
    pair.saver.delivery.failed("shared", "no space left")

    assert "no space left" in str(pair.told.messages)


def test_what_one_alone_could_not_write_either_is_told_by_that_one(pair: Pair) -> None:
    pair.together.hear_of_shared(Wishes(alone_failed=True))
    pair.saver.delivery.failed("shared", "no space left")

    assert pair.told.messages == []


def test_only_a_checkpoint_whose_parts_are_of_one_run_is_loaded(pair: Pair) -> None:
    for step in (5, 8):
        staged = trained(step).copy()
        draft = Draft(pair.saver.folders.shared, step, f"save{step}", 2, {"torch": "1.0"})
        for rank in (0, 1):
            draft.write(rank, staged.table, memoryview(staged.buffer))
        assert draft.publish()
        draft.close()
    history = rank_module.history_of(state_of(trained(5).copy()))
    pair.other.answers["checkpoints"] = {
        "value": [[8, "save8", "shared"], [5, "save5", "shared"], [2, "save2", "shared"]]
    }
    pair.other.answers["read"] = {"value": ["of another run", "d"]}
    of_others = r"\(shared, step 8: its parts are of other runs; shared, step 5: its .*\)"
    with pytest.raises(ValueError, match=rf"none of the 2 .* {of_others}.*runtime.checkpoint v"):
        pair.together.load([])
    refused = pair.state.committed
    pair.other.answers["read"] = {"value": [history, "d1"]}
    pair.other.answers["digest"] = {"value": "d1"}
    pair.together.load([])

    assert (refused, pair.state.committed) == (-1, 8)
    told = [m for m in pair.told.messages if isinstance(m, Trouble)]
    damaged = "shared, step 8: a part is damaged, or of another run"
    assert ("shared", damaged) in [(m.subject, m.text.split(";")[0]) for m in told]
    assert [m.text.partition(", is")[0] for m in told if m.kind == "changed_since"] == [
        "since save8 was saved: torch was '1.0'"
    ]
    assert pair.together.digest() == f"{pair.state.digest(ledger=True)}-d1"


def seen_by_both(pair: Pair, staged: Staged) -> Staged:
    """As the checkpoint SAVE."""
    draft = Draft(pair.saver.folders.shared, 5, SAVE, 2, {})
    for rank in (0, 1):
        draft.write(rank, staged.table, memoryview(staged.buffer))
    assert draft.publish()
    draft.close()
    pair.other.answers["checkpoints"] = {"value": [[5, SAVE, "shared"]]}
    return staged


@pytest.fixture
def saved(pair: Pair) -> Staged:
    """What both ranks see as the checkpoint SAVE."""
    return seen_by_both(pair, trained(5).copy())


def test_what_all_ranks_have_on_their_disks_is_known_from_the_start(
    pair: Pair, saved: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stays, if a disk fails before they have another one."""
    there = [(5, SAVE, "shared"), (4, "c", "local"), (3, "b", "local"), (2, "a", "peer")]
    pair.other.answers["checkpoints"] = {"value": [[*found] for found in there if found[0] != 4]}
    history = rank_module.history_of(state_of(saved))
    pair.other.answers["read"] = {"value": [history, "d"]}
    pair.other.answers["digest"] = {"value": "d"}
    monkeypatch.setattr(pair.saver.sources, "saves", lambda _elsewhere, _after: there)

    pair.together.load([])

    assert pair.together._common == {"local": 3, "peer": 2}


def test_a_state_that_is_not_what_was_saved_is_told(pair: Pair, saved: Staged) -> None:
    pair.other.answers["read"] = {"value": [rank_module.history_of(state_of(saved)), "saved"]}
    pair.other.answers["digest"] = {"value": "loaded"}

    pair.together.load([])

    (told,) = [m for m in pair.told.messages if isinstance(m, Trouble)]
    assert told.kind == "checkpoint_not_restored"
    assert told.text.startswith("step 5, ranks [1]")


class Forgetful(Counted):
    """Gives back less."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(("kind", "told"), [(Counted, []), (Forgetful, ["step 5, ranks [0]"])])
def test_that_weights_are_trained_that_were_not_when_they_were_saved_is_no_flaw(
    pair: Pair, kind: type[Counted], told: list[str]
) -> None:
    """They lie elsewhere in each copy from now on, and among members only such copies count."""
    before = new_state(frozen=True)
    before.committed, before.extra = 5, {"own": Counted(3)}
    staged = seen_by_both(pair, before.copy())
    pair.other.answers["read"] = {"value": [rank_module.history_of(state_of(staged)), ""]}
    pair.other.answers["digest"] = {"value": "other"}
    pair.state.extra = {"own": kind(0)}

    pair.together.load([])

    flaws = [m.text for m in pair.told.messages if isinstance(m, Trouble)]
    assert [text.partition(":")[0] for text in flaws] == told
    assert pair.together.digest() == f"{pair.state.digest(ledger=True)}-other"
    assert pair.state.digest(ledger=True) != staged.digest


def test_a_tier_of_which_two_checkpoints_fail_comes_after_the_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [(9, "d", "local"), (8, "c", "local"), (7, "b", "local"), (5, "a", "shared")]
    pair.other.answers["checkpoints"] = {"value": [[*found] for found in there]}
    pair.other.answers["read"] = REFUSED
    tried: list[str] = []
    monkeypatch.setattr(pair.saver.sources, "saves", lambda _elsewhere, _after: there)

    def read(name: str, *_where: object, **_also: object) -> Staged:
        tried.append(name)
        raise Damaged("a bit")

    monkeypatch.setattr(pair.saver.sources, "ranks", lambda *_asked, **_also: 2)
    monkeypatch.setattr(pair.saver.sources, "read", read)

    with pytest.raises(ValueError, match="none of the 4 checkpoints of this job can be loaded"):
        pair.together.load([])

    assert tried == ["d", "c", "a", "b"]
    text = "\n".join(map(str, pair.told.messages))
    assert re.findall(r"the next one is (\w+, step \d)", text) == [
        "local, step 8",
        "shared, step 5",
        "local, step 7",
    ]


@pytest.mark.usefixtures("saved")
def test_what_another_rank_refuses_is_not_read_to_its_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.other.answers["read"] = REFUSED

    def endless(*_where: object, progress: Callable[[int], object]) -> Staged:
        until(lambda: progress(1), "the block comes after which it is given up")
        raise AssertionError("nothing was there to be read")

    monkeypatch.setattr(pair.saver.sources, "read", endless)

    with pytest.raises(ValueError, match="none of the 1 checkpoints of this job can be loaded"):
        pair.together.load([])

    (told,) = [m for m in pair.told.messages if isinstance(m, Trouble)]
    assert told.text.startswith("shared, step 5: a part is damaged")  # its own part it blames not


@pytest.mark.usefixtures("saved")
def test_the_others_hear_at_once_that_the_first_rank_refuses_a_checkpoint(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.other.answers |= {"read": {}, "give_up": REFUSED}  # it reads on until then

    def fails(*_where: object, **_also: object) -> Staged:
        raise Damaged("a bit")

    monkeypatch.setattr(pair.saver.sources, "read", fails)

    with pytest.raises(ValueError, match="none of the 1 checkpoints of this job can be loaded"):
        pair.together.load([])

    assert pair.other.heard[-2:] == ["read", "give_up"]


@pytest.mark.usefixtures("saved")
def test_what_is_given_up_is_not_used_and_the_next_read_is_not_given_up(
    pair: Pair,
) -> None:
    """Also if that is known before the read begins: the other rank may be that much quicker."""
    asked = {"name": SAVE, "tier": "shared"}
    pair.rank.give_up(1)

    given_up = pair.rank.obey("read", {**asked, "number": 1})
    with pytest.raises(RuntimeError, match="no state was read"):
        pair.rank.obey("load", {})
    read = pair.rank.obey("read", {**asked, "number": 2})

    assert given_up == {"failed": "unloadable", "text": "another rank refused it"}
    assert len(read["value"]) == 2
    assert pair.told.messages == []


def test_what_lies_where_all_should_see_it_and_we_do_not_is_no_reason_to_begin_anew(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.other.answers["checkpoints"] = {"value": [[9, "a", "shared"]]}
    monkeypatch.setattr(pair.saver.sources, "saves", lambda _elsewhere, _after: [])

    with pytest.raises(ValueError, match=r"none of the 1 .* loaded \(ranks \[0\] see no check"):
        pair.together.load([])

    (told,) = pair.told.messages
    assert "ranks [0] see no checkpoint in " in str(told)


def test_a_bounded_number_of_checkpoints_is_tried_before_a_person_has_to_look(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [(step, f"save{step}", "shared") for step in range(MAX_TRIES + 3, 0, -1)]
    pair.other.answers["checkpoints"] = {"value": [[*found] for found in there]}
    pair.other.answers["read"] = REFUSED
    monkeypatch.setattr(pair.saver.sources, "saves", lambda _elsewhere, _after: there)

    with pytest.raises(ValueError, match=r"none of the 11 checkpoints of this job can be loaded"):
        pair.together.load([])

    assert pair.other.heard.count("read") == MAX_TRIES


@pytest.mark.usefixtures("saved")
def test_that_none_can_be_loaded_says_which_rank_refuses_what(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gives_up = {"failed": "unloadable", "text": "another rank refused it"}
    pair.other.answers |= {"read": {}, "give_up": gives_up}

    def fails(*_where: object, **_also: object) -> Staged:
        raise Damaged("a bit")

    with monkeypatch.context() as patch:
        patch.setattr(pair.saver.sources, "read", fails)
        with pytest.raises(ValueError, match=r"loaded \(shared, step 5: rank 0: a bit\): mend"):
            pair.together.load([])
    pair.other.answers |= {"read": {**REFUSED, "text": "another bit"}, "give_up": {}}
    with pytest.raises(ValueError, match=r"loaded \(shared, step 5: rank 1: another bit\): mend"):
        pair.together.load([])


def test_of_many_reasons_why_none_can_be_loaded_the_last_are_said_in_short(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [(step, f"save{step}", "shared") for step in range(MAX_TRIES, 0, -1)]
    pair.other.answers["checkpoints"] = {"value": [[*found] for found in there]}
    pair.other.answers |= {"read": {}, "give_up": REFUSED}
    monkeypatch.setattr(pair.saver.sources, "saves", lambda _elsewhere, _after: there)

    def fails(*_where: object, **_also: object) -> Staged:
        raise Damaged("a bit\n" * 1000)

    monkeypatch.setattr(pair.saver.sources, "ranks", lambda *_asked, **_also: 2)
    monkeypatch.setattr(pair.saver.sources, "read", fails)

    with pytest.raises(ValueError, match=r"\(shared, step 3: rank 0: a bit a bit") as error:
        pair.together.load([])

    assert len(str(error.value)) < 2000
    assert str(error.value).count("…; shared, step ") == 2
    assert "\n" not in str(error.value)


def test_a_step_that_one_rank_does_not_hear_of_is_not_made(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_module, "FOLLOWED_S", 0.1)

    assert pair.rank.obey("await_followed", {}) == {
        "failed": "cannot_follow",
        "text": "this rank heard of no step",
    }


def test_no_order_but_the_known_ones_is_obeyed(pair: Pair) -> None:
    with pytest.raises(ValueError, match="orders 'close', which is not known here"):
        pair.rank.obey("close", {})


@pytest.mark.parametrize(
    ("began", "begins", "holds_back"),
    [
        ({"epoch": 0, "step": -1}, True, False),  # a new job
        ({"epoch": 1, "step": 5}, True, True),
        ({"epoch": 1, "step": 0}, False, True),  # a newcomer in the middle of the trial
        ({"epoch": 1, "step": 5 - TRIAL_STEPS}, False, False),  # which is over
        (None, False, False),
    ],
)
def test_a_state_that_the_job_began_from_is_on_trial_with_all_members(
    pair: Pair, began: dict[str, int] | None, begins: bool, holds_back: bool
) -> None:
    pair.state.committed = 5
    pair.together.put_on_trial({**GRANT, "began": began, "begins": begins})

    assert pair.together.holds_back is holds_back


def test_with_long_steps_a_trial_holds_saves_back_for_some_minutes_and_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together_module, "HELD_BACK_S", 0.0)
    pair.state.committed = 5
    pair.together.put_on_trial({**GRANT, "began": {"epoch": 1, "step": 5}, "begins": True})

    assert not pair.together.holds_back
    for _ in range(TOO_MANY - 1):
        pair.together.judge(math.nan)
        assert pair.together.holds_back  # what may lead nowhere must not become the newest
    with pytest.raises(DoesNotTrain):
        pair.together.judge(math.nan)


def test_nothing_is_saved_while_losses_are_no_numbers_however_long_the_job_has_trained(
    pair: Pair,
) -> None:
    """What leads nowhere verifies too, and would take the place of all that is good."""
    pair.together.teller.members = [0]
    pair.together.judge(1.0)
    assert not pair.together.holds_back
    for _ in range(TOO_MANY + 2):
        pair.together.judge(math.nan)
        assert pair.together.holds_back
    pair.together.judge(1.0)

    assert not pair.together.holds_back
    told = [one.kind for one in pair.told.messages if isinstance(one, Trouble)]
    assert told == ["loss_not_finite", "loss_finite_again"]


def test_who_was_away_during_a_trial_comes_back_with_none_of_before(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end alone, and have a state that trains remembered as one that does not."""
    pair.state.committed = 5
    began = {"epoch": 1, "step": 5}
    pair.together.put_on_trial({**GRANT, "began": began, "begins": True})
    pair.together.judge(math.nan)

    monkeypatch.setattr(pair.together, "_all", lambda *_order, **_with: [])  # it has the state
    pair.together.take(5000, "", [])
    pair.state.committed = 5000
    pair.together.put_on_trial({**GRANT, "began": began, "begins": False})

    assert not pair.together.holds_back
    for _ in range(TOO_MANY):
        pair.together.judge(math.nan)


def test_a_suspect_that_cannot_be_noted_is_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is started next would load it again, and end of it again."""

    def full(_folder: Path, _state: tuple[int, int]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runtime.checkpoint.saver.suspect", full)
    pair.state.committed = 5
    pair.together.put_on_trial({**GRANT, "began": {"epoch": 1, "step": 5}, "begins": True})

    for _ in range(TOO_MANY - 1):
        pair.together.judge(math.nan)

    with pytest.raises(DoesNotTrain):
        pair.together.judge(math.nan)

    (told,) = [one for one in pair.told.messages if isinstance(one, Trouble)]
    assert told.kind == "suspect_not_noted"
    assert told.text.endswith("the next start may load it: [Errno 28] No space left on device")


def test_who_comes_within_a_trial_holds_back_no_longer_than_the_others(pair: Pair) -> None:
    pair.state.committed = 6
    began = {"epoch": 1, "step": 5, "at": 1.0 - HELD_BACK_S}

    pair.together.put_on_trial({**GRANT, "began": began, "begins": False})

    assert not pair.together.holds_back


def test_a_clock_that_was_put_back_makes_no_trial_longer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together_module, "HELD_BACK_S", 0.0)
    pair.state.committed = 6
    began = {"epoch": 1, "step": 5, "at": 1e9}

    pair.together.put_on_trial({**GRANT, "began": began, "begins": False})

    assert not pair.together.holds_back


def test_a_step_that_peers_hand_over_is_judged_as_they_judge_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.together.put_on_trial({**GRANT, "began": {"epoch": 1, "step": 0}, "begins": True})

    def handed_over(op: str, **_given: Any) -> list[Any]:
        pair.state.committed += op == "commit"
        return [math.nan, math.nan]

    monkeypatch.setattr(pair.together, "_all", handed_over)

    with pytest.raises(DoesNotTrain):
        pair.together.replay(pair.state.committed + TOO_MANY, [])


def hold_summed(pair: Pair, gradient: float) -> None:
    """A step whose loss is 1, and whose gradients are this."""
    gradients = pair.rank.engine.gradients
    gradients.samples, gradients.losses = 2, [1.0, 1.0]
    gradients.coverage = gradients.who = [1.0, 1.0]
    gradients.touched = [1.0] * len(gradients.parameters)
    summed = torch.full((gradients.size,), gradient)
    buffer = torch.cat([summed, gradients.tail(Wishes())])
    pair.rank.hold(Reduced(pair.rank.engine.pending, 1, buffer))
    pair.other.answers["commit"] = {"value": 1.0}


def is_sound(pair: Pair) -> bool:
    """Whether the weights are numbers."""
    return all(bool(one.isfinite().all()) for one in pair.state.model.parameters())


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
@pytest.mark.parametrize("clipped", [None, 1.0])
def test_nothing_is_saved_of_weights_that_took_gradients_that_are_no_numbers(
    pair: Pair, gradient: float, clipped: float | None
) -> None:
    """The loss is told before, and is a number."""
    pair.rank.engine.max_grad_norm = clipped
    hold_summed(pair, gradient)

    pair.together.judge(pair.together.commit())

    assert not is_sound(pair)
    assert pair.together.holds_back


def test_gradients_that_a_scaler_keeps_from_the_weights_hold_nothing_back(pair: Pair) -> None:
    pair.state.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    hold_summed(pair, math.inf)

    pair.together.judge(pair.together.commit())

    assert (is_sound(pair), pair.state.loss_scale) == (True, 2.0)
    assert not pair.together.holds_back


def test_a_scaler_that_is_off_keeps_nothing_from_the_weights(pair: Pair) -> None:
    pair.state.scaler = torch.amp.GradScaler("cpu", enabled=False)
    hold_summed(pair, math.inf)

    pair.together.judge(pair.together.commit())

    assert not is_sound(pair)
    assert pair.together.holds_back


def test_an_optimizer_that_refuses_such_gradients_holds_nothing_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (optimizer,) = pair.state.optimizers
    monkeypatch.setattr(optimizer, "step", lambda *_given: None)
    hold_summed(pair, math.inf)

    pair.together.judge(pair.together.commit())

    assert is_sound(pair)
    assert not pair.together.holds_back


def test_spoilt_weights_are_never_saved_whatever_the_losses_are(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = spied(pair.rank, "_save", monkeypatch)
    pair.rank._members = [0]
    hold_summed(pair, math.nan)
    pair.together.judge(pair.together.commit())
    pair.rank.save_aside()
    monkeypatch.setattr(
        pair.rank.engine, "apply", lambda *_given: Applied(loss=1.0, grad_norm=1.0, samples=4)
    )
    hold_summed(pair, 1.0)

    pair.together.judge(pair.together.commit())

    assert pair.together.holds_back
    assert saved == []


def test_who_takes_over_spoilt_weights_saves_them_no_more_than_who_spoilt_them(
    pair: Pair,
) -> None:
    with torch.no_grad():
        next(pair.state.model.parameters())[0, 0] = math.nan
    spoilt = pair.state.copy()
    pair.state.load(trained(6).copy())
    before = pair.state.spoilt

    pair.state.load(spoilt)

    assert (before, pair.state.spoilt) == (False, True)


def test_weights_that_the_script_has_made_infinite_are_not_spoilt(pair: Pair) -> None:
    with torch.no_grad():
        next(pair.state.model.parameters())[0, 0] = -math.inf
    pair.state.load(pair.state.copy())
    pair.state.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    hold_summed(pair, math.inf)

    pair.together.judge(pair.together.commit())

    assert not pair.together.holds_back


@pytest.mark.parametrize("made", [[1.0, math.nan], [math.nan, 1.0]])
def test_weights_that_are_spoilt_on_one_rank_are_on_all(
    pair: Pair, made: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.together, "_all", lambda _op, **_given: made)

    pair.together.judge(pair.together.commit())

    assert pair.together.holds_back
    assert pair.state.spoilt


def test_a_loss_that_is_no_number_on_another_rank_alone_counts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_summed(pair, 1.0)
    of_all = Applied(loss=math.nan, grad_norm=1.0, samples=4)
    monkeypatch.setattr(pair.rank.engine, "apply", lambda _reduced, _tail: of_all)

    pair.together.judge(pair.together.commit())

    assert pair.rank.tail is not None
    assert math.isfinite(pair.rank.tail.loss)
    assert pair.together.holds_back


def test_what_an_evaluation_puts_in_the_weights_place_is_not_saved_aside(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Staged] = []
    weight = pair.state.model.weight
    assert isinstance(weight, torch.nn.Parameter)

    def save(begin: Callable[[None], Copying], *_given: object, **_how: object) -> None:
        with contextlib.suppress(Changed):
            copies.append(begin(None).finish())

    def evaluates(_step: Committed) -> None:
        with torch.no_grad():
            trained = weight.clone()
            weight.zero_()
            pair.rank.save_aside()
            weight.copy_(trained)

    monkeypatch.setattr(pair.saver, "save", save)
    pair.rank._members, pair.rank.on_step = [0], evaluates
    hold_summed(pair, 1.0)

    pair.rank.commit(newcomer=False)
    during = len(copies)
    pair.rank.save_aside()

    assert during == 0
    (saved,) = copies
    assert saved.digest == pair.state.copy().digest


def test_a_step_that_was_applied_in_part_is_not_saved(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.state.committed = 7
    pair.rank._members = [0]
    begun = spied(pair.saver, "save", monkeypatch)

    def apply(_reduced: Reduced, _tail: Tail) -> Applied:
        raise RuntimeError("of the script's own")

    pair.rank.save_aside()
    pair.rank._reduced, pair.rank.tail = Reduced(8, 1, torch.zeros(1)), Tail.__new__(Tail)
    monkeypatch.setattr(pair.rank.engine, "apply", apply)
    with pytest.raises(RuntimeError, match="of the script's own"):
        pair.rank.commit(newcomer=True)
    pair.rank.save_aside()

    assert len(begun) == 1


def spied(of: object, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A call more for each."""
    calls: list[str] = []
    monkeypatch.setattr(of, name, lambda *_given, **_named: calls.append(name))
    return calls


@pytest.mark.parametrize(("bad", "saves"), [(TOO_MANY - 1, ["_save"]), (TOO_MANY, [])])
def test_what_leads_nowhere_is_not_saved_aside_either(
    pair: Pair, bad: int, saves: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = spied(pair.rank, "_save", monkeypatch)
    pair.rank._members, pair.state.committed = [0], 6
    for _ in range(bad):
        pair.together.judge(math.nan)

    pair.rank.save_aside()

    assert saved == saves


def test_who_waits_for_room_to_save_aside_holds_up_no_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    monkeypatch.setattr(
        pair.saver.rooms, "await_free", lambda _s: held.append(pair.rank._changing.locked())
    )

    pair.rank.save_aside()

    assert held == [False]


def fails(pair: Pair) -> None:
    """What was saved to the disk of our node last."""
    pair.saver.delivery.failed("local", "No space left on device")


def hangs(pair: Pair) -> None:
    """What is being saved there."""
    pair.saver.delivery._under_way["local", "save6"] = time.monotonic() - 60.0


@pytest.mark.parametrize("happens", [fails, hangs])
def test_whoever_is_to_be_killed_relies_on_no_tier_that_takes_nothing_now(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Pair], None]
) -> None:
    pair.state.committed = 7
    pair.rank._members = [0]
    tiers = pair.saver.tiers
    pace = Pace(None, 1, lambda: 1e-3)
    tiers["local"] = replace(tiers["shared"], name="local", own=True, pace=pace)
    pace.note(0.0, 0.5)
    tiers["shared"].pace.note(0.0, 16.0)
    asked: list[set[str]] = []
    monkeypatch.setattr(
        pair.saver, "save", lambda _begin, _name, tiers, **_how: asked.append(tiers)
    )
    monkeypatch.setattr(pair.rank.preemption, "left_s", lambda: 16.2)

    usually = pair.rank._save_takes_s()
    pair.rank.save_aside()
    happens(pair)
    now = pair.rank._save_takes_s()
    pair.rank.save_aside()

    assert asked == [{"local"}, {"shared"}]
    assert usually < pair.rank.preemption.grace_s < now  # which is at once
