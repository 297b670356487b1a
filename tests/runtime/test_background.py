"""What is to be done beside the training is done, also where no thread is to be had."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from runtime.background import in_background
from tests.runtime.replicas import PATIENCE_S


def refuses(_thread: threading.Thread) -> NoReturn:
    raise RuntimeError("can't start new thread")


def test_it_is_done_on_another_thread_which_may_give_way() -> None:
    done: list[tuple[str, bool]] = []
    ended = threading.Event()

    def work(low_priority: bool) -> None:
        done.append((threading.current_thread().name, low_priority))
        ended.set()

    in_background("drydock-x", work)

    assert ended.wait(PATIENCE_S)
    assert done == [("drydock-x", True)]


def test_without_a_thread_it_is_done_here_which_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[bool] = []
    monkeypatch.setattr(threading.Thread, "start", refuses)

    in_background("drydock-x", done.append)

    assert done == [False]
