"""An agent that has lost a thread ends, and one that cannot log goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.node_agent.fleet import REPOSITORY

DIES = """
import threading
from node_agent.threads import start_thread

def surprised():
    raise RuntimeError("not foreseen")

start_thread("work", surprised)
threading.Event().wait(60)
"""


def run_on_a_full_disk(program: str) -> subprocess.CompletedProcess[str]:
    with Path("/dev/full").open("w") as full:
        return subprocess.run(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
        )


def test_a_thread_that_dies_takes_the_agent_along_though_that_cannot_be_logged() -> None:
    assert run_on_a_full_disk(DIES).returncode == 70


def test_what_cannot_be_logged_is_lost_and_nothing_else() -> None:
    ended = run_on_a_full_disk(
        "from node_agent.log import log; log('one'); log('two'); print('went on', flush=True)"
    )

    assert ended.stdout == "went on\n"
