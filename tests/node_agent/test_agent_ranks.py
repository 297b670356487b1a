"""Ranks and coordinators: their start, their end, and their life without an agent."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node_agent import procfs, wire
from node_agent.launch import MAX_LOGS
from node_agent.supervisor import restart_delay
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


def journal_of(node: Node) -> list[dict[str, Any]]:
    lines = (node.state / "placements.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def started_coordinator(node: Node) -> dict[str, Any]:
    start = wire.StartCoordinator(job="job-1", placement="c-1", token="t", min_replicas=1)
    result = node.plane.result(node.plane.send(start))
    assert result.state == "done", result.error
    return result.output


@contextmanager
def nothing_starts(node: Node) -> Iterator[None]:
    """There is no folder for what processes print."""
    logs = node.state / "logs"
    kept = logs.rename(node.folder / "kept")
    logs.write_text("no folder")
    yield
    logs.unlink()
    kept.rename(logs)


def test_a_coordinator_that_cannot_be_started_again_is_tried_ever_more_rarely(
    agent: Node,
) -> None:
    coordinator = started_coordinator(agent)
    agent.kill()
    journal = agent.state / "placements.jsonl"
    last = journal_of(agent)[-1]["put"]
    journal.write_text(json.dumps({"put": {**last, "started_at": 0.0}}) + "\n")  # it has settled
    os.kill(coordinator["pid"], signal.SIGKILL)
    with nothing_starts(agent):
        agent.start()
        eventually(lambda: agent.log("coordinator_not_started")[2:])
        failed = agent.log("coordinator_not_started")
        agent.kill()
    known = journal_of(agent)
    agent.start()

    event = eventually(lambda: agent.plane.events_of("coordinator_restarted"))[0]

    assert failed[2]["at"] - failed[1]["at"] > 1.5  # twice the pause before
    assert {"gone": "c-1"} not in known
    assert event.data["address"] == coordinator["address"]


def test_a_stop_of_a_coordinator_that_waits_for_its_next_start_is_for_ever(agent: Node) -> None:
    coordinator = started_coordinator(agent)
    with nothing_starts(agent):
        os.kill(coordinator["pid"], signal.SIGKILL)
        eventually(lambda: agent.log("coordinator_not_started"))
        stop = agent.plane.send(wire.StopProcess(placement="c-1"))
        assert agent.plane.result(stop).output == {"stopped": True}
        known = journal_of(agent)

    assert known[-1] == {"gone": "c-1"}


def test_a_coordinator_whose_stop_the_agent_did_not_survive_is_not_started_again(
    agent: Node,
) -> None:
    coordinator = started_coordinator(agent)
    os.kill(coordinator["pid"], signal.SIGSTOP)
    agent.plane.send(wire.StopProcess(placement="c-1", grace_s=600))
    eventually((agent.state / "notices" / "c-1").exists)
    agent.kill()
    os.kill(coordinator["pid"], signal.SIGKILL)
    agent.start()

    event = eventually(lambda: exits(agent.plane))[0]

    assert event.data["pid"] == coordinator["pid"]
    assert journal_of(agent)[-1] == {"gone": "c-1"}


@pytest.mark.parametrize(
    ("deaths", "delay_s"), [(1, 0.0), (2, 1.0), (3, 2.0), (6, 10.0), (100_000, 10.0)]
)
def test_a_coordinator_is_started_again_ever_later_up_to_a_bound(
    deaths: int, delay_s: float
) -> None:
    assert restart_delay(deaths) == delay_s


def test_a_folder_or_a_program_that_is_missing_is_named(node: Node) -> None:
    node.configure(workdir=str(node.folder / "work"))
    node.start()
    first = node.plane.result(node.plane.send(node.rank("p-1")))
    (node.folder / "work").mkdir()
    second = node.plane.result(node.plane.send(node.rank("p-2", program="missing")))

    assert (first.state, second.state) == ("failed", "failed")
    assert f"No such file or directory: '{node.folder / 'work'}'" in first.error
    assert "No such file or directory: './no-such-program'" in second.error


def test_a_rank_starts_in_its_folder_with_the_signals_that_any_program_has(node: Node) -> None:
    (node.folder / "work").mkdir()
    node.configure(workdir=str(node.folder / "work"))
    node.start()

    pid = node.started_rank(program="shell")

    status = Path(f"/proc/{pid}/status").read_text()
    (ignored,) = re.findall(r"^SigIgn:\s+(\w+)$", status, re.MULTILINE)
    of_python = [signal.SIGPIPE, signal.SIGXFSZ]
    assert Path(f"/proc/{pid}/cwd").resolve() == node.folder / "work"
    assert [number for number in of_python if int(ignored, 16) >> (number - 1) & 1] == []


@contextmanager
def hanging(folder: Path) -> Iterator[None]:
    """A file system that answers nothing."""
    folder.mkdir()
    daemon = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={daemon},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"hangs", os.fsencode(folder), b"fuse", 0, options)
    assert mounted == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        os.close(daemon)  # whoever waits for it gets an error
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="only root may mount, with FUSE"
)
def test_a_folder_that_hangs_holds_up_its_rank_and_nothing_else(node: Node) -> None:
    with hanging(node.folder / "work"):
        node.configure(workdir=str(node.folder / "work"))
        node.start()
        order = node.plane.send(node.rank())
        eventually(lambda: node.log("command"))
        beats = len(node.plane.beats)
        eventually(lambda: len(node.plane.beats) > beats + 3)
        started = node.plane.result(order)
        stopped = node.plane.result(node.plane.send(wire.StopProcess(placement="p-1", grace_s=0)))

    assert (started.state, stopped.output) == ("done", {"stopped": True})


def test_old_logs_make_way_and_never_those_that_are_written_to(agent: Node) -> None:
    agent.started_rank("p-1")
    logs = agent.state / "logs"
    kept = [logs / "p-1.log", logs / "field-diagnostic-GPU-a.log"]
    others = [logs / f"old-{number}.log" for number in range(2 * MAX_LOGS)]
    for path in [*kept, *others]:
        path.touch()
    for path in [*kept, others[0]]:
        os.utime(path, (0, 0))

    agent.started_rank("p-2")

    assert [path.exists() for path in [*kept, others[0]]] == [True, True, False]
    assert sum(path.exists() for path in others) == MAX_LOGS
