"""Fleets whose ranks run a script of this folder, and what all of them must end with."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.runtime.replicas import PATIENCE_S, Fleet


@dataclass
class ScriptFleet(Fleet):
    """A fleet of another script than `tiny.py`."""

    script: str = ""

    def _run(
        self, name: str, arguments: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        mine = str(Path(__file__).with_name(self.script))
        scripted = [mine if word.endswith("tiny.py") else word for word in arguments]
        return super()._run(name, ["-u", *scripted], {**environment, "OMP_NUM_THREADS": "1"})

    def log(self, replica: int) -> str:
        """What a replica printed, over all its incarnations."""
        return (self.folder / f"rank{replica}.log").read_text()

    def notes(self, replica: int) -> list[str]:
        """What its callbacks heard, in order."""
        return (self.folder / f"heard.{replica}").read_text().splitlines()


def killed_and_back(fleet: ScriptFleet) -> None:
    """Kill the second of three replicas, and the first, which speaks; start both anew; stop."""
    fleet.start()
    fleet.wait_for_members([0, 1, 2])
    fleet.train_on(5)
    for victim, left in ((1, [0, 2]), (0, [1, 2])):
        fleet.kill(victim)
        fleet.wait_for_members(left)
        fleet.train_on(5)
        fleet.start_rank(victim)
        fleet.wait_for_members([0, 1, 2])
    fleet.train_on(5)
    fleet.stop()


def one_is_lost(fleet: ScriptFleet, victim: int) -> None:
    """Of two replicas, of which the first speaks, one is killed; the other trains on."""
    fleet.start()
    fleet.wait_for_members([0, 1])
    fleet.train_on(10)
    fleet.kill(victim)
    fleet.wait_for_members([1 - victim])
    fleet.train_on(10)


def alone(folder: Path, like: ScriptFleet) -> ScriptFleet:
    """One replica that nobody disturbs, after as many steps."""
    folder.mkdir()
    options: dict[str, Any] = {**like.options, "steps_made": like.newest() + 1, "pace_s": 0}
    undisturbed = ScriptFleet(folder, 1, options=options, script=like.script)
    try:
        undisturbed.start()
        assert undisturbed.ranks[0].wait(PATIENCE_S) == 0
    finally:
        undisturbed.close()
    return undisturbed


def trained_as(fleet: ScriptFleet, undisturbed: ScriptFleet) -> None:
    """The third of three replicas, which nobody killed, made what one alone has made."""
    steps = fleet.steps(2)
    assert once_each(steps)
    assert len(fleet.digests()) == 1
    assert fleet.weights() == undisturbed.weights()
    expected = [(step["loss"], step["grad_norm"]) for step in undisturbed.steps(0)]
    assert [(step["loss"], step["grad_norm"]) for step in steps] == expected


def once_each(steps: list[dict[str, Any]]) -> bool:
    """Whether each step was committed in order, with every shard summed once."""
    numbers = [step["step"] for step in steps]
    return numbers == list(range(len(steps))) and {tuple(s["coverage"]) for s in steps} == {
        (1,) * 12
    }


def finished(fleet: ScriptFleet) -> None:
    """Let the job come to its own end."""
    fleet.start()
    for process in fleet.ranks.values():
        assert process.wait(PATIENCE_S) == 0


def cut_off_and_back(fleet: ScriptFleet) -> None:
    """The second of two replicas is silent for a while, and comes back as the same process."""
    fleet.start()
    fleet.wait_for_members([0, 1])
    fleet.train_on(5)
    fleet.ranks[1].send_signal(signal.SIGSTOP)
    fleet.wait_for_members([0])
    fleet.train_on(10)
    fleet.ranks[1].send_signal(signal.SIGCONT)
    fleet.wait_for_members([0, 1])
    fleet.train_on(10)
    fleet.stop()
