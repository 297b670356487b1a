"""Whoever is killed, at whatever moment: the newest complete checkpoint restores, to the bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.checkpoint import store
from runtime.checkpoint.draft import sweep
from tests.runtime.checkpoint.one_rank import OneRank
from tests.runtime.checkpoint.states import staged_at
from tests.runtime.replicas import PATIENCE_S, Fleet, until


def newest(folder: Path) -> int:
    found = store.newest(folder)
    assert found is not None
    return found[1].step


@pytest.mark.parametrize(
    "kills", [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.soak)]
)
def test_a_writer_killed_during_a_save_leaves_the_newest_whole(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)  # noqa: S311 - moments, not secrets
    trainer = OneRank(tmp_path)
    trainer.save_all(0)
    save_s = seconds_of_a_save_by_a_new_writer(trainer)
    folder = trainer.saver.folders.shared
    restored = []

    for step in range(2, kills + 2):
        assert trainer.save(step) is not None
        trainer.told.until(lambda: trainer.saver.delivery._writers["shared"].pid is not None)
        threading.Event().wait(chance.uniform(0, 2 * save_s))
        os.kill(trainer.writer(), signal.SIGKILL)
        trainer.told.until(lambda: trainer.saver.delivery._writers["shared"].pid is None)
        restored.append(newest(folder))
        assert restored[-1] in (step, *restored[-2:-1], 1)
        assert max(trainer.told.saved()) <= restored[-1]
    trainer.save_all(kills + 2)
    trainer.saver.finish()
    for left in folder.glob(".writing-*"):  # killed between two steps of a moment: they go by age
        for path in (*left.iterdir(), left):
            os.utime(path, (1.0, 1.0))
    sweep(folder)

    assert restored == sorted(restored)
    assert len({*restored}) > 1  # some kills came after the save, and some before
    assert not list(folder.glob(".writing-*"))
    assert store.read(folder / f"step-{kills + 2:08d}").digest == staged_at(kills + 2).digest


def seconds_of_a_save_by_a_new_writer(trainer: OneRank) -> float:
    os.kill(trainer.writer(), signal.SIGKILL)
    trainer.told.until(lambda: trainer.saver.delivery._writers["shared"].pid is None)
    began = time.monotonic()
    trainer.save_all(1)
    return time.monotonic() - began


def test_a_trainer_killed_after_the_copy_is_saved_all_the_same(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path;"
        "from tests.runtime.checkpoint.one_rank import OneRank;"
        f"one = OneRank(Path({str(tmp_path)!r})); one.save_all(1);"
        "os.kill(one.writer(), signal.SIGSTOP); one.save(2);"
        "one.told.until(lambda: ('shared', 'save2') in one.saver.delivery._asked);"
        "one.told.until(lambda: one.saver.delivery._given.empty());"
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
    chance = random.Random(kills)  # noqa: S311 - moments, not secrets
    settings = {"rich": True, "data": "dataset", "workers": 2, "mode": mode}
    steps = 40 + 20 * kills
    alone = make_fleet(1, options={**settings, "steps": steps})
    alone.start()
    killed = make_fleet(1, options={**settings, "steps": steps, "checkpoint_s": 0.01})
    killed.start()
    checkpoints = killed.folder / "state" / "checkpoints"

    for _ in range(kills):
        until(lambda: store.candidates(checkpoints), "a checkpoint")
        saved = store.candidates(checkpoints)[0]
        until(lambda saved=saved: store.candidates(checkpoints)[0] > saved, "it goes on")  # type: ignore[misc]
        threading.Event().wait(chance.uniform(0, 0.5))
        killed.kill(0)
        killed.start_rank(0)

    assert killed.ranks[0].wait(PATIENCE_S) == 0
    assert alone.ranks[0].wait(PATIENCE_S) == 0
    assert killed.weights() == alone.weights()
