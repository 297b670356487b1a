"""What ranks say is taken at the door, for what is refused there is said no more."""

from __future__ import annotations

import json

import pytest

from controlplane.ingest.decoding import decode_batch
from runtime import client


def lost(how: client.How) -> client.PeerLost:
    return client.PeerLost(epoch=1, replica=3, placement="plc", step=4, at=5.0, how=how)


@pytest.mark.parametrize(
    "message",
    [
        lost("reset"),
        lost("agent"),
        lost("heartbeat"),
        lost("unreached"),
        client.Trouble(kind="exception", text="of a compiler, with all its code " * 1000, at=5.0),
        client.Stopped(
            step=4, reason="none of its checkpoints can be loaded: " + "x" * 10_000, at=5.0
        ),
    ],
    ids=lambda message: f"{message.type} {getattr(message, 'how', '')}",
)
def test_what_a_rank_says_is_taken(message: client.Message) -> None:
    head = {"job": "job_1", "replica": 0, "rank": 0, "placement": "plc", "sent_at": 1.0}
    body = json.dumps({**head, "messages": [client.encode(message)]}).encode()

    _, (taken,) = decode_batch(body)

    assert client.encode(taken) == client.encode(message)
