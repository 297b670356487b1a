"""A job whose ranks live and die as one, started by the agent as one program, torchrun."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from node_agent import wire
from tests.node_agent.fleet import Node, eventually


def start(agent: Node, placement: str, folder: Path, **options: object) -> None:
    """All of its ranks, by one order."""
    order = agent.rank(
        placement,
        program="whole",
        replica=0,
        world_replicas=1,
        options={"folder": str(folder), **options},
    )
    result = agent.plane.result(agent.plane.send(order))
    assert result.state == "done", result


def end_of(agent: Node, placement: str) -> wire.Event:
    """What the agent tells of its end."""

    def told() -> list[wire.Event]:
        events = agent.plane.events_of("process_exited")
        return [one for one in events if one.data["placement"] == placement]

    return eventually(told)[0]  # type: ignore[no-any-return]


@pytest.fixture
def undisturbed(agent: Node, tmp_path: Path) -> Path:
    """The folder of one that nobody disturbed. It leaves no checkpoint behind."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    start(agent, "p-undisturbed", folder, steps=30)
    assert end_of(agent, "p-undisturbed").data["exit_code"] == 0
    (agent.shared / "job-1").rename(tmp_path / "shared-before")
    (agent.folder / "checkpoints").rename(tmp_path / "local-before")
    return folder


def digests(folder: Path) -> list[str]:
    return [(folder / f"digest.{rank}").read_text() for rank in range(2)]


def test_a_rank_s_death_ends_the_job_and_its_next_start_goes_on(
    agent: Node, undisturbed: Path, tmp_path: Path
) -> None:
    start(agent, "p-1", tmp_path, steps=30, dies=True)
    died = end_of(agent, "p-1").data
    start(agent, "p-2", tmp_path, steps=30, dies=True)
    ended = end_of(agent, "p-2").data

    assert (tmp_path / "died").exists()
    assert (died["exit_code"], died["requested"]) == (1, False)
    assert (ended["exit_code"], ended["requested"]) == (0, False)
    assert {line.split()[0] for line in (tmp_path / "steps.1").open()} == {"1", "2"}
    assert digests(tmp_path) == digests(undisturbed)


def test_torchrun_takes_its_ranks_along_however_it_is_ended(agent: Node, tmp_path: Path) -> None:
    start(agent, "p-1", tmp_path, steps=10**9)
    eventually((tmp_path / "steps.1").exists)
    ranks = [psutil.Process(int((tmp_path / f"pid.{rank}").read_text())) for rank in range(2)]

    stopped = agent.plane.result(agent.plane.send(wire.StopProcess(placement="p-1", grace_s=0)))

    assert stopped.state == "done"
    assert eventually(lambda: not any(rank.is_running() for rank in ranks))


def test_a_job_that_is_to_stop_saves_its_last_step_to_every_tier(
    agent: Node, tmp_path: Path
) -> None:
    start(agent, "p-1", tmp_path, steps=10**9, every_s={"local": 0, "shared": 10**9})
    eventually(lambda: (tmp_path / "steps.0").exists() and (tmp_path / "steps.0").read_text())

    stopped = agent.plane.result(agent.plane.send(wire.StopProcess(placement="p-1", grace_s=600)))

    last = int((tmp_path / "steps.0").read_text().split()[-1])
    assert stopped.state == "done"
    assert (agent.shared / "job-1" / "checkpoints" / f"step-{last:08}").exists()
