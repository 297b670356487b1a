"""What a signal's handler may rely on."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from runtime.forking import take_signal

NUMBER = signal.SIGUSR1


@pytest.fixture(autouse=True)
def _handled_as_before() -> Iterator[None]:
    before = signal.getsignal(NUMBER)
    yield
    signal.signal(NUMBER, before)


def test_a_signal_that_comes_while_its_handler_runs_does_not_enter_it_again() -> None:
    """As where a launcher passes on what the whole group of processes was sent."""
    handled = []

    def handle(number: int, _frame: object) -> None:
        handled.append(number)
        signal.raise_signal(NUMBER)

    take_signal(NUMBER, handle)
    signal.raise_signal(NUMBER)
    in_its_middle = len(handled)
    signal.raise_signal(NUMBER)

    assert (in_its_middle, len(handled)) == (1, 2)


def test_a_handler_that_raises_is_entered_the_next_time() -> None:
    def handle(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    take_signal(NUMBER, handle)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(NUMBER)
