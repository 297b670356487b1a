"""What comes in the place of an answer ends no agent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from node_agent import wire
from node_agent.link import Link, Refused, Unreachable
from tests.node_agent.fleet import ControlPlane

RUBBISH = [
    b"<html>",
    b'{"node_id": 1, "status": "bad"}',
    b'{"node_id": "\xff", "title": "\xff"}',
    b'{"more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]


def answering(plane: ControlPlane, status: int, body: bytes) -> Link:
    def answer(*_: Any) -> tuple[int, Any]:
        return status, msgspec.Raw(body)

    plane.answer = answer  # type: ignore[method-assign, assignment]
    return Link(plane.url)


@pytest.mark.parametrize("body", RUBBISH, ids=["page", "kind", "bytes", "depth"])
def test_an_answer_that_is_none_is_no_answer(plane: ControlPlane, body: bytes) -> None:
    link = answering(plane, 200, body)

    with pytest.raises(Unreachable, match="not understood"):
        link.post("/v1/enroll", b"{}", wire.EnrollAnswer)


@pytest.mark.parametrize("body", RUBBISH, ids=["page", "kind", "bytes", "depth"])
def test_a_refusal_that_gives_no_reason_is_one(plane: ControlPlane, body: bytes) -> None:
    link = answering(plane, 503, body)

    with pytest.raises(Refused) as refused:
        link.post("/v1/enroll", b"{}", wire.EnrollAnswer)
    assert (refused.value.problem.status, refused.value.problem.code) == (503, "unknown")
