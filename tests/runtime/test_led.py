"""A rank that its replica's first one leads, as it comes and as it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from runtime.replica.led import Led
from runtime.replica.rank import Rank


def nothing(*_given: object, **_named: object) -> None:
    """Nobody waits for it."""


def test_it_says_in_what_it_must_be_like_the_first_rank() -> None:
    job = SimpleNamespace(token="t", rank=1)
    saver = SimpleNamespace(delivery=SimpleNamespace())
    rank: Any = SimpleNamespace(
        job=job, saver=saver, address="here:1", holder={}, gloo=SimpleNamespace(address="there:1")
    )

    led = Led(cast(Rank, rank), "127.0.0.1:1", {"seed": "7"}, leave=nothing, abandon=nothing)

    (said,) = led.introduce()
    assert (said["rank"], said["shape"]) == (1, {"seed": "7"})


@pytest.mark.parametrize(
    ("goodbye", "order"),
    [
        (True, ["saves end", "hangs up"]),  # of which the first rank is told
        (False, ["hangs up", "saves end", "hangs up"]),  # so that the others go on at once
    ],
)
def test_who_ends_for_an_error_keeps_nobody_waiting_for_its_saves(
    goodbye: bool, order: list[str]
) -> None:
    done: list[str] = []
    saver = SimpleNamespace(delivery=SimpleNamespace(), finish=lambda: done.append("saves end"))
    rank: Any = SimpleNamespace(job=None, saver=saver)
    led = Led(cast(Rank, rank), "127.0.0.1:1", {}, leave=nothing, abandon=nothing)
    hangs_up = SimpleNamespace(close=lambda goodbye: done.append("hangs up"))
    led.link = rank.link = cast(Any, hangs_up)

    led.close(goodbye=goodbye)

    assert done == order
