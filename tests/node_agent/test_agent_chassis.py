"""The simulated BMC: it owns every process of its node, and power means power."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from node_agent import bmc, procfs
from tests.node_agent.fleet import BASIC, DEADLINE_S, REPOSITORY, Node, call, eventually, reset


def system(node: Node) -> dict[str, Any]:
    return call(node, bmc.SYSTEM)[1]


@pytest.fixture
def bare(node: Node) -> Node:
    """A powered node whose agent cannot start."""
    node.config.unlink()
    node.start_chassis()
    eventually(lambda: node.log("chassis_started"))
    return node


def test_it_describes_the_system(chassis: Node) -> None:
    answer = system(chassis)

    assert (answer["Id"], answer["Name"], answer["PowerState"]) == ("1", "node-a", "On")
    assert answer["Oem"]["Drydock"]["BootId"] == chassis.plane.reports[0].boot_id
    assert len(answer["Oem"]["Drydock"]["Processes"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "basic", "status"),
    [
        (bmc.SYSTEM, None, "", 401),
        (bmc.RESET, {"ResetType": "ForceOff"}, base64.b64encode(b"drydock:no").decode(), 401),
        ("/redfish/v1/Systems/2", None, BASIC, 404),
        ("/redfish/v1/Nothing", {}, BASIC, 404),
        (bmc.RESET, {"ResetType": "Explode"}, BASIC, 400),
        (bmc.RESET, [], BASIC, 400),
        (bmc.KERNEL_LOG, {"line": "two\nlines"}, BASIC, 400),
    ],
)
def test_bad_requests_are_refused(
    bare: Node, path: str, body: Any, basic: str, status: int
) -> None:
    answer = call(bare, path, body, basic)

    assert answer[0] == status
    assert answer[1]["error"]["message"]
    assert system(bare)["PowerState"] == "On"


def test_a_power_cycle_kills_every_descendant_and_gives_a_new_boot_id(chassis: Node) -> None:
    pid = chassis.started_rank(program="fork")
    told = chassis.shared / "job-1" / "p-1-escaped"
    escaped = int(eventually(lambda: told.exists() and told.read_text()))
    before = system(chassis)["Oem"]["Drydock"]
    assert {pid, escaped} <= set(before["Processes"])

    assert reset(chassis, "ForceOff") == 204
    off = system(chassis)

    assert (off["PowerState"], off["Oem"]["Drydock"]["Processes"]) == ("Off", [])
    assert not procfs.with_environment("DRYDOCK_JOB", "job-1")
    assert reset(chassis, "On") == 204
    after = system(chassis)["Oem"]["Drydock"]["BootId"]
    event = eventually(lambda: chassis.plane.events_of("process_exited"))[0]
    assert after != before["BootId"]
    assert (event.boot_id, event.data["reason"]) == (after, "reboot")


def test_resets_are_idempotent_and_a_restart_is_one_of_them(chassis: Node) -> None:
    first = system(chassis)["Oem"]["Drydock"]["BootId"]
    assert reset(chassis, "On") == 204
    assert system(chassis)["Oem"]["Drydock"]["BootId"] == first

    assert reset(chassis, "ForceRestart") == 204
    second = system(chassis)["Oem"]["Drydock"]["BootId"]
    assert second != first
    eventually(lambda: {e.boot_id for e in chassis.plane.events_of("boot")} == {first, second})

    assert reset(chassis, "ForceOff") == 204
    assert reset(chassis, "ForceOff") == 204
    assert system(chassis)["PowerState"] == "Off"


def test_a_dead_agent_is_started_again_and_its_ranks_stay(chassis: Node) -> None:
    pid = chassis.started_rank()
    reports = len(chassis.plane.reports)
    os.kill(int(chassis.log("agent_started")[-1]["pid"]), signal.SIGKILL)

    eventually(lambda: len(chassis.plane.reports) > reports)

    assert [process.pid for process in chassis.plane.reports[-1].processes] == [pid]
    assert pid in system(chassis)["Oem"]["Drydock"]["Processes"]


def test_new_cards_have_new_names_and_are_reported(chassis: Node) -> None:
    cards = call(chassis, bmc.CARDS, {})[1]["gpus"]
    uuids = [card["uuid"] for card in cards]
    serials = [int(card["serial"]) for card in cards]

    assert len(set(uuids)) == 8
    assert serials == list(range(serials[0], serials[0] + 8))
    eventually(lambda: [gpu.uuid for gpu in chassis.plane.reports[-1].inventory.gpus] == uuids)


def test_a_kernel_line_becomes_an_event_and_a_boot_empties_the_log(chassis: Node) -> None:
    line = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, GPU has fallen off the bus."
    assert call(chassis, bmc.KERNEL_LOG, {"line": line})[0] == 204
    event = eventually(lambda: chassis.plane.events_of("kernel_line"))[0]
    assert event.raw == line

    reset(chassis, "ForceOff")
    assert call(chassis, bmc.KERNEL_LOG, {"line": line})[0] == 409
    reset(chassis, "On")

    assert (chassis.folder / "kernel.log").read_text() == ""


def test_a_silent_client_does_not_keep_others_out_for_long(bare: Node) -> None:
    with socket.create_connection(("127.0.0.1", bare.bmc_port)):
        assert system(bare)["PowerState"] == "On"


def test_sigterm_lets_ranks_leave_and_leaves_nothing_behind(chassis: Node) -> None:
    chassis.started_rank()

    assert chassis.kill(signal.SIGTERM) == 0
    assert not procfs.with_environment("DRYDOCK_CHASSIS_DIR", str(chassis.folder))


def test_sweep_removes_what_a_killed_chassis_left_behind(chassis: Node) -> None:
    chassis.started_rank()
    chassis.kill()
    command = [sys.executable, "-m", "node_agent.chassis", "--dir", str(chassis.folder)]

    subprocess.run([*command, "--sweep"], cwd=REPOSITORY, check=True, timeout=DEADLINE_S)

    assert not procfs.with_environment("DRYDOCK_CHASSIS_DIR", str(chassis.folder))


def test_a_new_chassis_takes_over_from_one_that_still_lives(chassis: Node) -> None:
    first = chassis.process
    assert first is not None
    pid = chassis.started_rank()
    start = procfs.read(pid)
    assert start is not None
    chassis.start_chassis()

    eventually(lambda: len(chassis.plane.events_of("boot")) == 2)

    assert first.wait(DEADLINE_S) == -signal.SIGKILL
    assert not procfs.is_alive(pid, start.start_ticks)
