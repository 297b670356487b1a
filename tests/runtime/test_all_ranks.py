"""What membership decides, done by all ranks of a replica or by none."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from runtime.checkpoint.compression import NotInstalled
from runtime.client import Trouble
from runtime.replica import rank as rank_module
from runtime.replica.gloo import Gloo
from runtime.replica.gradients import Wishes
from runtime.replica.membership import CannotFollow, Severed, Silent
from runtime.replica.peers import PeerServer, Reduced, ReducedLog
from runtime.replica.siblings import Incomplete
from runtime.replica.state import TrainingState
from runtime.replica.step import NotWhole
from runtime.snapshot import touched
from tests.runtime.pair import GRANT, TOKEN, Counted, Pair, new_state, trained
from tests.runtime.replicas import PATIENCE_S, Board, until


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

    with pytest.raises(NotWhole, match=r"summed \[1, 0\]; .* see that all replicas read the same "):
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
    (told,) = [one for one in pair.told.messages if isinstance(one, Trouble)]
    assert told.kind == "not_compared"
    assert "training goes on" in told.text


def test_who_is_no_member_any_more_holds_no_copy_for_newcomers(pair: Pair) -> None:
    """It is not told when that was taken, and its memory is needed for checkpoints."""
    pair.rank.make_room()
    until(pair.saver.copy_buffers.all_free, "there is room")
    pair.rank.stage()
    taken = not pair.saver.copy_buffers.all_free()

    pair.rank.forget()

    until(pair.saver.copy_buffers.all_free, "it is given back")
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
    monkeypatch.setattr(pair.saver.copy_buffers, "made", lambda: True)
    for _ in range(2):
        pair.rank.make_room()
        until(pair.rank.has_room, "it was tried")
        assert pair.rank._spare() is None

    assert len(asked) == 2
    told = [one for one in pair.told.messages if isinstance(one, Trouble)]
    assert [one.kind for one in told] == ["no_room_for_newcomers"] * 2
    assert told[0].text.startswith(f"{asked[0]} bytes")
    assert "free memory on this node" in told[0].text


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
