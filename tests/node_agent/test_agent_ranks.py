"""Ranks and coordinators: their start, their end, and their life without an agent."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node_agent import procfs, wire
from tests.node_agent.fleet import ControlPlane, Node, eventually


class Coordinator:
    """A listener that takes one JSON line per connection and says ok."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, connection.makefile("rwb") as stream:
                self.lines.append(json.loads(stream.readline()))
                stream.write(b'{"ok": true}\n')

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    coordinator = Coordinator()
    yield coordinator
    coordinator.close()


def exits(plane: ControlPlane) -> list[wire.Event]:
    return plane.events_of("process_exited")


def test_a_rank_gets_its_environment_and_is_reported(agent: Node) -> None:
    pid = agent.started_rank()
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")

    expected = {
        "DRYDOCK_JOB=job-1",
        "DRYDOCK_REPLICA=2",
        "DRYDOCK_RANK=0",
        "DRYDOCK_WORLD_REPLICAS=4",
        "DRYDOCK_PLACEMENT=p-1",
        "DRYDOCK_STANDBY=",
        "DRYDOCK_COORDINATOR=127.0.0.1:1",
        "DRYDOCK_TOKEN=job-token",
        f"DRYDOCK_URL={agent.plane.url}",
        'DRYDOCK_OPTIONS={"steps": 3}',
        f"DRYDOCK_STATE_DIR={agent.shared / 'job-1'}",
        f"DRYDOCK_LOCAL_DIR={agent.folder / 'checkpoints'}",
        f"DRYDOCK_HOLDER_DIR={agent.folder / 'memory'}",
        "DRYDOCK_DOMAIN=rack-1/node-a",
        "DRYDOCK_GRACE_S=10.0",
        "OMP_NUM_THREADS=1",
    }
    assert expected <= set(environment)
    reported = eventually(lambda: agent.plane.reports[-1].processes)
    assert [(process.placement, process.pid) for process in reported] == [("p-1", pid)]


def test_a_rank_that_is_to_take_anothers_place_is_told_so(agent: Node) -> None:
    pid = agent.started_rank(standby="migrate")

    assert "DRYDOCK_STANDBY=migrate" in Path(f"/proc/{pid}/environ").read_text().split("\0")


def test_a_rank_on_one_of_several_nodes_is_told_where_the_others_are(agent: Node) -> None:
    meets = wire.Together(nodes=2, node_rank=1, address="node-b", port=20_007, start="p-0")
    pid = agent.started_rank(together=meets)

    assert {
        "DRYDOCK_NODES=2",
        "DRYDOCK_NODE_RANK=1",
        "MASTER_ADDR=node-b",
        "MASTER_PORT=20007",
        "PET_NNODES=2",
        "PET_NODE_RANK=1",
        "PET_MASTER_ADDR=node-b",
        "PET_MASTER_PORT=20007",
        "PET_RDZV_ID=p-0",
    } <= set(Path(f"/proc/{pid}/environ").read_text().split("\0"))


def test_a_program_for_one_node_is_not_started_on_several(agent: Node) -> None:
    meets = wire.Together(nodes=2, node_rank=0, address="node-a", port=20_007, start="p-1")
    result = agent.plane.result(agent.plane.send(agent.rank(program="whole", together=meets)))

    assert result.state == "failed"
    assert "'whole' has --standalone, and is to run on 2 nodes: take it out of" in result.error


def test_what_is_at_its_default_is_not_sent_for_older_agents_to_refuse() -> None:
    plain = wire.StartRank(
        job="job-1",
        placement="p-1",
        replica=0,
        rank=0,
        world_replicas=1,
        coordinator="",
        token="t",
        ingest_url="",
        program="train",
    )

    assert {"standby", "together"}.isdisjoint(msgspec.to_builtins(plain))
    assert msgspec.convert(msgspec.to_builtins(plain), wire.StartRank) == plain


def test_a_killed_rank_is_told_to_its_coordinator_and_to_the_control_plane(
    agent: Node, coordinator: Coordinator
) -> None:
    pid = agent.started_rank(coordinator=coordinator.address)
    os.kill(pid, signal.SIGKILL)

    line = eventually(lambda: coordinator.lines)[0]
    event = eventually(lambda: exits(agent.plane))[0]

    assert line == {
        "op": "exit",
        "token": "job-token",
        "replica": 2,
        "placement": "p-1",
        "code": -9,
    }
    assert event.data == {
        "kind": "rank",
        "job": "job-1",
        "replica": 2,
        "rank": 0,
        "placement": "p-1",
        "pid": pid,
        "exit_code": None,
        "signal": 9,
        "requested": False,
    }


def test_a_rank_stopped_by_order_is_told_to_its_coordinator_at_once(
    agent: Node, coordinator: Coordinator
) -> None:
    agent.started_rank(coordinator=coordinator.address)
    agent.plane.send(wire.StopProcess(placement="p-1", grace_s=5))

    line = eventually(lambda: coordinator.lines)[0]

    assert (line["op"], line["placement"], line["code"]) == ("exit", "p-1", -15)
    event = eventually(lambda: exits(agent.plane))[0]
    assert event.data["requested"] is True


def test_a_rank_that_is_to_stop_can_read_how_long_it_has(agent: Node) -> None:
    pid = agent.started_rank()
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    (notice,) = [Path(one.partition("=")[2]) for one in environment if "NOTICE_FILE" in one]
    os.kill(pid, signal.SIGSTOP)

    order = agent.plane.send(wire.StopProcess(placement="p-1", grace_s=4))

    assert eventually(lambda: notice.exists() and notice.read_text()) == "4\n"
    assert agent.plane.result(order).output == {"stopped": True}
    assert not notice.exists()


def test_a_rank_that_hangs_is_killed_by_a_stop_without_grace(
    agent: Node, coordinator: Coordinator
) -> None:
    pid = agent.started_rank(coordinator=coordinator.address)
    os.kill(pid, signal.SIGSTOP)

    result = agent.plane.result(agent.plane.send(wire.StopProcess(placement="p-1", grace_s=0)))

    assert result.output == {"stopped": True}
    assert eventually(lambda: coordinator.lines)[0]["code"] == -signal.SIGKILL


def test_an_exit_code_is_reported_though_the_coordinator_is_dead(agent: Node) -> None:
    agent.plane.send(agent.rank(program="quit"))

    event = eventually(lambda: exits(agent.plane))[0]

    assert (event.data["exit_code"], event.data["signal"]) == (3, None)
    eventually(lambda: agent.log("coordinator_not_told"))


def test_a_restarted_agent_adopts_its_ranks(agent: Node, coordinator: Coordinator) -> None:
    pid = agent.started_rank(coordinator=coordinator.address)
    agent.kill()
    agent.plane.reports.clear()
    agent.start()
    eventually(lambda: agent.log("adopted"))
    eventually(lambda: agent.plane.reports)
    os.kill(pid, signal.SIGKILL)

    event = eventually(lambda: exits(agent.plane))[0]

    assert agent.plane.reports[0].processes[0].pid == pid
    assert (event.data["pid"], event.data["exit_code"], event.data["signal"]) == (pid, None, None)
    assert eventually(lambda: coordinator.lines)[0]["code"] is None


def test_a_rank_whose_start_was_not_written_down_is_adopted_all_the_same(agent: Node) -> None:
    pid = agent.started_rank()
    agent.kill()
    journal = agent.state / "placements.jsonl"
    journal.write_text(journal.read_text().splitlines()[0] + "\n")
    agent.start()

    adopted = eventually(lambda: agent.log("adopted"))

    assert adopted[0]["pid"] == pid


def test_a_rank_that_ended_while_the_agent_was_away_is_reported(agent: Node) -> None:
    pid = agent.started_rank()
    agent.kill()
    os.kill(pid, signal.SIGKILL)
    agent.start()

    event = eventually(lambda: exits(agent.plane))[0]

    assert (event.data["pid"], event.data["exit_code"]) == (pid, None)


def test_after_a_reboot_nothing_is_adopted_and_the_boot_is_told_first(agent: Node) -> None:
    agent.started_rank()
    agent.kill()
    agent.boot("boot-2")
    agent.start()

    event = eventually(lambda: exits(agent.plane))[0]

    kinds = [(event.kind, event.boot_id) for event in agent.plane.events.values()]
    assert kinds == [("boot", "boot-1"), ("boot", "boot-2"), ("process_exited", "boot-2")]
    assert event.data["reason"] == "reboot"
    assert not agent.log("adopted")


def test_what_a_rank_leaves_behind_in_its_session_is_killed_with_it(agent: Node) -> None:
    pid = agent.started_rank(program="child")
    eventually(lambda: len(procfs.with_environment("DRYDOCK_JOB", "job-1")) == 2)
    os.kill(pid, signal.SIGKILL)
    event = eventually(lambda: exits(agent.plane))[0]

    eventually(lambda: not procfs.with_environment("DRYDOCK_JOB", "job-1"))
    assert (event.data["pid"], event.data["signal"]) == (pid, signal.SIGKILL)


def test_a_dead_coordinator_is_back_on_its_port_at_once(agent: Node) -> None:
    start = wire.StartCoordinator(job="job-1", placement="c-1", token="t", min_replicas=1)
    result = agent.plane.result(agent.plane.send(start))
    assert result.state == "done", result.error
    os.kill(result.output["pid"], signal.SIGKILL)

    event = eventually(lambda: agent.plane.events_of("coordinator_restarted"))[0]

    assert event.data["address"] == result.output["address"]
    host, _, port = event.data["address"].rpartition(":")
    socket.create_connection((host, int(port)), 5).close()
    stop = wire.StopProcess(placement="c-1", grace_s=5)
    assert agent.plane.result(agent.plane.send(stop)).output == {"stopped": True}
    assert len(agent.plane.events_of("coordinator_restarted")) == 1


def test_a_coordinator_that_died_with_its_agent_is_started_by_the_next_agent(agent: Node) -> None:
    start = wire.StartCoordinator(job="job-1", placement="c-1", token="t", min_replicas=1)
    result = agent.plane.result(agent.plane.send(start))
    agent.kill()
    os.kill(result.output["pid"], signal.SIGKILL)
    agent.start()

    event = eventually(lambda: agent.plane.events_of("coordinator_restarted"))[0]

    assert event.data["address"] == result.output["address"]


def test_a_coordinator_that_cannot_start_is_a_failed_command(agent: Node) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    start = wire.StartCoordinator(
        job="job-1", placement="c-1", token="t", min_replicas=1, port=taken.getsockname()[1]
    )
    result = agent.plane.result(agent.plane.send(start))
    taken.close()

    assert result.state == "failed"
    assert "c-1.log" in result.error


def test_a_coordinator_whose_folder_cannot_be_made_does_not_take_the_agent_along(
    agent: Node,
) -> None:
    agent.shared.mkdir(exist_ok=True)
    (agent.shared / "job-1").write_text("no folder")
    start = wire.StartCoordinator(job="job-1", placement="c-1", token="t", min_replicas=1)

    result = agent.plane.result(agent.plane.send(start))

    assert (result.state, "c-1.log" in result.error) == ("failed", True)
    assert agent.process is not None
    assert agent.process.poll() is None
