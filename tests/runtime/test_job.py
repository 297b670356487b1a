"""Who is a rank of its job, and who only runs its script again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.client import Sender
from runtime.job import Job
from tests.runtime.replicas import PATIENCE_S, ROOT
from tests.runtime.test_client import Door
from tests.runtime.whole.runs import told

NEW_PROCESSES = ("spawn", "forkserver")
OBEYED = 7  # the exit status of a rank that was told to end, and noted it

#: Joins at its top, as do those that run it again, and starts one process that does.
SCRIPT = """
import multiprocessing, sys
import runtime
job = runtime.join()

def again():
    sys.stdout.write("ran again")

if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=again)
    worker.start()
    worker.join()
    job.sender.close(300.0)
"""


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def join_and_end(environment: dict[str, str]) -> None:
    runtime.join(environment).sender.close(PATIENCE_S)


def join_and_obey(environment: dict[str, str]) -> None:
    job = runtime.join(environment)
    os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(OBEYED * job.told.wait(PATIENCE_S))


def rank_of(start: str, target: Callable[..., None], environment: dict[str, str]) -> BaseProcess:
    """A function that multiprocessing ran as a rank, and has ended."""
    context: Any = multiprocessing.get_context(start)
    rank: BaseProcess = context.Process(target=target, args=(environment,))
    rank.start()
    rank.join(PATIENCE_S)
    return rank


@pytest.mark.parametrize("start", NEW_PROCESSES)
def test_a_rank_that_multiprocessing_started_tells_of_itself(
    start: str, door: Door, tmp_path: Path
) -> None:
    rank = rank_of(start, join_and_end, told(tmp_path, DRYDOCK_URL=door.url))

    assert [hello["pid"] for hello in door.messages("hello")] == [rank.pid]


@pytest.mark.parametrize("start", NEW_PROCESSES)
def test_a_rank_that_multiprocessing_started_notes_that_it_is_to_end(
    start: str, door: Door, tmp_path: Path
) -> None:
    rank = rank_of(start, join_and_obey, told(tmp_path, DRYDOCK_URL=door.url))

    assert rank.exitcode == OBEYED


@pytest.mark.parametrize("start", NEW_PROCESSES)
def test_who_runs_the_script_s_top_again_is_no_rank(start: str, door: Door, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), start],
        env={**os.environ, **told(tmp_path, DRYDOCK_URL=door.url), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )

    assert done.stdout == b"ran again"
    assert len(door.messages("hello")) == 1


#: What torch would find when it first looks how long NCCL may wait for a peer.
LOOKS = """
import os, runtime
runtime.join().sender.close(0.0)
print(os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "torch's own"))
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"DRYDOCK_WORLD_REPLICAS": "2"}, "60"),
        ({"DRYDOCK_WORLD_REPLICAS": "2", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "7"}, "7"),
        ({"DRYDOCK_WORLD_REPLICAS": "1"}, "torch's own"),
    ],
    ids=["of several replicas", "as the script's author says", "of one replica"],
)
def test_nccl_waits_no_longer_for_a_dead_peer_from_the_first_on(
    given: dict[str, str], found: str, tmp_path: Path
) -> None:
    """Torch looks once, which may be before a group of ours is made."""
    done = subprocess.run(
        [sys.executable, "-c", LOOKS],
        env={**told(tmp_path), **given},  # not what a group of ours may have set in this process
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )

    assert done.stdout.decode().strip() == found


def test_what_an_engineer_is_told_stands_in_the_rank_s_own_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There may be no control plane."""
    job = Job(
        name="j", replica=0, rank=0, world_replicas=1, placement="p", coordinator="127.0.0.1:1",
        token="t", state_dir=tmp_path, sender=Sender("", "t", job="j", replica=0, rank=0,
        placement="p"), stop=threading.Event(),
    )  # fmt: skip

    job.trouble("checkpoint_refused", "a bit is another", "local")

    assert "trouble kind=checkpoint_refused subject=local text=a bit is another" in caplog.text
