"""Whoever is killed, at whatever moment: all that is visible is whole, and the newest restores, to
the bit."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import store
from runtime.checkpoint.draft import sweep
from runtime.snapshot import Copying
from tests.runtime.checkpoint.one_rank import OneRank
from tests.runtime.checkpoint.states import due, staged_at, state_of_step
from tests.runtime.replicas import PATIENCE_S, Fleet, Lives, until

FIRST = 4  # step whose writer is killed
#: By how much the time in which a kill comes grows if it came before the save was over, and if it
#: came late: a save takes as long as the machine lets it, and of six kills about one is to be late.
AIM = (1.02, 0.9)


def newest(folder: Path) -> int:
    found = store.newest(folder)
    assert found is not None
    return found[1].step


def large_copy(step: int, into: memoryview | None) -> Copying:
    """Of a state of 34 MB: it takes long enough to write to be struck in the middle."""
    more = torch.arange(8_000_000, dtype=torch.float32) + step
    return Copying({**state_of_step(step), "more": more}, step, into, due)


def begin_to_save(trainer: OneRank, step: int) -> None:
    """Until its writer, which may have to be started, writes."""
    assert trainer.save(step, begin=large_copy) is not None
    await_in(trainer.saver.folders.shared, f"*{step:08d}*")


def await_in(folder: Path, pattern: str) -> None:
    end, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not [*folder.glob(pattern)]:
        assert time.monotonic() < end, pattern
        pause.wait(0.001)  # how much later the kill comes is to be drawn


def seconds_to_save(trainer: OneRank, step: int) -> float:
    """By a writer that was just started, until it has read it back."""
    kill_writer(trainer)
    begin_to_save(trainer, step)
    began = time.monotonic()
    trainer.told.until(lambda: step in trainer.told.saved())
    return time.monotonic() - began


def kill_writer(trainer: OneRank) -> None:
    os.kill(trainer.writer(), signal.SIGKILL)
    trainer.told.until(lambda: trainer.saver.dispatcher._writers["shared"].pid is None)


@pytest.mark.parametrize(
    "kills", [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.soak)]
)
def test_a_writer_killed_during_a_save_leaves_the_newest_whole(tmp_path: Path, kills: int) -> None:
    """Those are counted that fell between the begin of a save and the word that it was read
    back."""
    chance = random.Random(kills)  # noqa: S311 - moments, not secrets
    trainer = OneRank(tmp_path)
    trainer.save_all(0)
    folder = trainer.saver.folders.shared
    save_s = statistics.median(seconds_to_save(trainer, step) for step in range(1, FIRST))
    restored, struck, in_draft, flaws = [FIRST - 1], 0, 0, []
    steps = itertools.count(FIRST)
    kill_writer(trainer)

    # However the machine's speed changes some come before it is visible, and some after.
    while struck < kills or (struck < 9 * kills and not kills / 5 <= in_draft < struck):
        step = next(steps)
        begin_to_save(trainer, step)
        threading.Event().wait(chance.uniform(0, save_s))
        kill_writer(trainer)
        came_late = step in trainer.told.saved()
        save_s *= AIM[came_late]
        struck += not came_late
        in_draft += len([*folder.glob(f".writing-{step:08d}-*")])
        flaws += [one for path in store.candidates(folder) for one in store.verify(path)]
        restored.append(newest(folder))
        assert restored[-1] in (step, restored[-2])
        assert max(trainer.told.saved()) <= restored[-1]
    last = next(steps)
    trainer.save_all(last)
    trainer.saver.finish()
    for left in folder.glob(".writing-*"):  # killed between two steps of a moment: they go by age
        for path in (*left.iterdir(), left):
            os.utime(path, (1.0, 1.0))
    sweep(folder)

    assert flaws == []
    assert kills / 5 <= in_draft < struck  # some came when it was visible, and some before
    assert restored == sorted(restored)
    assert not list(folder.glob(".writing-*"))
    assert store.read(folder / f"step-{last:08d}").digest == staged_at(last).digest


def test_a_trainer_killed_after_the_copy_is_saved_all_the_same(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path;"
        "from tests.runtime.checkpoint.one_rank import OneRank;"
        f"one = OneRank(Path({str(tmp_path)!r})); one.save_all(1);"
        "os.kill(one.writer(), signal.SIGSTOP); one.save(2);"
        "one.told.until(lambda: ('shared', 'save2') in one.saver.dispatcher._asked);"
        "one.saver.dispatcher._given.put(None); one.saver.dispatcher._thread.join();"
        "os.kill(one.writer(), signal.SIGCONT); os.kill(os.getpid(), signal.SIGKILL)"
    )

    done = subprocess.run([sys.executable, "-c", program], check=False)

    assert done.returncode == -signal.SIGKILL
    until(lambda: newest(tmp_path / "checkpoints") == 2, "the writer finished what it was given")
    assert store.verify(tmp_path / "checkpoints" / "step-00000002") == []


@pytest.mark.parametrize(
    ("mode", "kills"),
    [("cover", 2), pytest.param("cover", 50, marks=pytest.mark.soak)],
)
def test_a_job_killed_again_and_again_ends_as_one_left_alone(
    make_fleet: Callable[..., Fleet], mode: str, kills: int
) -> None:
    """Every other time at any moment, and else once its workers load."""
    chance = random.Random(kills)  # noqa: S311 - moments, not secrets
    settings = {"rich": True, "data": "dataset", "workers": 2, "signed": True, "mode": mode}
    killed = make_fleet(1, options={**settings, "checkpoint_s": 0.01})
    killed.start_coordinator()
    checkpoints = killed.folder / "state" / "checkpoints"
    lives = Lives(killed)

    for when in itertools.islice(itertools.cycle([lambda: None, lives.wait_for_workers]), kills):
        killed.start_rank(0)
        until(lambda: store.candidates(checkpoints), "a checkpoint")
        saved = store.candidates(checkpoints)[0]
        until(lambda saved=saved: store.candidates(checkpoints)[0] > saved, "it goes on")  # type: ignore[misc]
        when()
        threading.Event().wait(chance.uniform(0, 0.5))
        killed.kill(0)
        killed.tell_ended()
        lives.ended()
    killed.start_rank(0)
    lives.wait_for_workers()
    killed.stop()
    alone = make_fleet(1, options={**settings, "steps": killed.last(0)["step"] + 1})
    alone.start()

    assert alone.ranks[0].wait(PATIENCE_S) == 0
    assert lives.began_too_early() == []
    assert killed.weights() == alone.weights()
    assert len({*lives.saved}) > 1 + kills / 2  # so many have saved something new
    assert lives.loaded_by_workers() >= (kills + 1) / 2
