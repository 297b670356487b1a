"""State from a peer's memory arrives whole, from a peer that knows the token, or not at all."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from runtime.replica.peers import (
    HEADER,
    NotKept,
    PeerFailed,
    PeerServer,
    Reduced,
    ReducedLog,
    fetch_reduced,
    fetch_snapshot,
    receive_chunks,
)
from runtime.snapshot import Damaged, Staged, stage

STATE = {"weight": torch.arange(700_000, dtype=torch.float32), "count": 3}


class Donor:
    """A peer whose training thread is always at an edge."""

    def __init__(self) -> None:
        self.log = ReducedLog()
        self.server = PeerServer("127.0.0.1", "right", self.log, self.at_an_edge)

    def at_an_edge(self) -> None:
        self.server.offer(stage(STATE, 7))


@pytest.fixture
def donor() -> Iterator[Donor]:
    donor = Donor()
    yield donor
    donor.server.close()


def test_a_snapshot_arrives_bit_for_bit(donor: Donor) -> None:
    staged = fetch_snapshot(donor.server.address, "right")

    assert staged.step == 7
    assert staged.digest == stage(STATE, 7).digest


def test_a_wrong_token_gets_nothing(donor: Donor) -> None:
    with pytest.raises(PeerFailed, match="wrong token"):
        fetch_snapshot(donor.server.address, "guessed")


def test_reduced_gradients_are_handed_over_while_they_are_kept(donor: Donor) -> None:
    for step in range(4):
        donor.log.add(Reduced(step, 9, torch.full((5,), float(step))))

    newest = fetch_reduced(donor.server.address, "right", 3)

    assert newest.epoch == 9
    assert torch.equal(newest.buffer, torch.full((5,), 3.0))
    with pytest.raises(NotKept):
        fetch_reduced(donor.server.address, "right", 1)
    with pytest.raises(NotKept):
        fetch_reduced(donor.server.address, "right", 4)


def test_once_a_newcomer_came_more_steps_are_kept(donor: Donor) -> None:
    fetch_snapshot(donor.server.address, "right")
    for step in range(8, 40):
        donor.log.add(Reduced(step, 1, torch.zeros(5)))

    assert fetch_reduced(donor.server.address, "right", 8).step == 8


def test_a_chunk_changed_on_the_way_is_found() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HEADER.pack(4, 12345) + b"data")

        with pytest.raises(Damaged):
            receive_chunks(ours, 4)


def test_a_state_whose_digest_differs_is_refused() -> None:
    staged = stage(STATE, 7)
    described = staged.describe()

    staged.buffer[100] ^= 1

    with pytest.raises(Damaged, match="digest"):
        Staged.restore(described, staged.buffer)
