"""A store that hangs is waited for so long, and costs nobody more than that."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.checkpoint import watched_store
from runtime.checkpoint.watched_store import WatchedStore
from tests.runtime.replicas import PATIENCE_S, ROOT, until

LEFT_BEHIND = """
import sys
from pathlib import Path
from runtime.checkpoint import threads, watched_store
watched_store.ANSWER_S = 0.1
def read(path):
    threads.run_in_threads(Path.read_text, [path], 1, "reads")
try:
    watched_store.WatchedStore("the store").call(lambda: read(Path(sys.argv[1])))
except TimeoutError as error:
    print(error)
"""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> WatchedStore:
    monkeypatch.setattr(watched_store, "ANSWER_S", 1.0)
    return WatchedStore("the store")


def test_its_answer_is_passed_on_whatever_it_is(store: WatchedStore) -> None:
    assert store.call(lambda: 7) == 7
    with pytest.raises(PermissionError, match="not you"):
        store.call(raising(PermissionError("not you")))


def raising(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def test_while_it_hangs_it_is_asked_once(store: WatchedStore) -> None:
    back, asked = threading.Event(), list[int]()

    with pytest.raises(TimeoutError, match=r"the store has not answered for 1 s"):
        store.call(back.wait)
    with pytest.raises(OSError, match="the store hangs"):
        store.call(lambda: asked.append(1))
    back.set()
    until(lambda: store._hung is not None and store._hung.done(), "it is back")
    store.call(lambda: asked.append(2))

    assert asked == [2]


def test_as_long_as_it_gives_signs_of_life_it_is_waited_for(
    store: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_store, "ANSWER_S", 4.0)
    pause = threading.Event()

    def slow() -> str:
        for _ in range(4):
            pause.wait(1.5)
            store.alive()
        return "all of it"

    assert store.call(slow) == "all of it"


def test_who_asks_it_later_makes_nobody_wait_longer(store: WatchedStore) -> None:
    back, given_up = threading.Event(), threading.Event()

    def ask() -> None:
        with pytest.raises(TimeoutError):
            store.call(back.wait)
        given_up.set()

    first = threading.Thread(target=ask)
    first.start()
    with pytest.raises(TimeoutError, match="the store hangs"):  # as soon as the first gave up
        until(lambda: store.call(lambda: None, PATIENCE_S), "the first gives up")
    first.join()
    back.set()

    assert given_up.is_set()


def test_it_keeps_no_process_from_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hangs")  # who reads it waits for ever
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND, str(tmp_path / "hangs")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )

    assert (done.returncode, done.stdout) == (0, "the store has not answered for 0.1 s\n")
