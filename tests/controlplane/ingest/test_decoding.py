"""What ranks say is taken at the door, for what is refused there is said no more."""

from __future__ import annotations

import json

import pytest

from controlplane.errors import Refused
from controlplane.ingest import decoding
from controlplane.ingest.decoding import decode_batch, decode_job_name
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


def batch(messages: bytes) -> bytes:
    return b'{"job": "job_1", "messages": ' + messages + b"}"


def test_of_a_batch_whose_token_is_not_known_yet_nothing_but_its_job_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoding, "_deepest", None)

    assert decode_job_name(batch(b"[" * 100 + b"]" * 100)) == "job_1"


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b'{"job": "no spaces"}', "invalid_field", "job"),
        (b"{}", "invalid_field", "job"),
        (b'{"job": ', "malformed_json", ""),
        (b'{"job": "\xff"}', "malformed_json", ""),
        (batch(b"[" * 100_000 + b"]" * 100_000), "invalid_field", ""),
    ],
)
def test_a_batch_that_names_no_job_is_refused(body: bytes, code: str, field: str) -> None:
    with pytest.raises(Refused) as refused:
        decode_job_name(body)

    assert (refused.value.code, refused.value.field) == (code, field)
