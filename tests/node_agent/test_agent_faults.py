"""Faults let into a simulated machine: the card, then the kernel's line, then the programs."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent import bmc, faults, procfs, wire
from node_agent.collectors import xid
from tests.node_agent.fleet import ControlPlane, Node, call, eventually, reset


def break_card(node: Node, fault: str, card: int = 0) -> dict[str, Any]:
    status, answer = call(node, bmc.BREAK, {"fault": fault, "card": card})
    assert status == 200, answer
    return answer


def freeze(node: Node, what: str, frozen: bool) -> int:
    return call(node, bmc.FREEZE, {"what": what, "frozen": frozen})[0]


def parsed_lines(plane: ControlPlane) -> list[Any]:
    return [xid.parse(event.raw) for event in plane.events_of("kernel_line")]


def state_of(pid: int) -> str:
    process = procfs.read(pid)
    return process.state if process is not None and process.running else ""


def agent_pid(node: Node) -> int:
    return int(node.log("agent_started")[-1]["pid"])


def test_a_lost_card_is_silent_the_kernel_says_so_and_its_rank_hangs(chassis: Node) -> None:
    pid = chassis.started_rank()

    answer = break_card(chassis, "xid79", card=1)

    line, loss = eventually(lambda: _two(parsed_lines(chassis.plane)))
    assert line == xid.XidLine(79, "0000:11:00", "", pid, "python3", "GPU has fallen off the bus.")
    assert loss == xid.LostGpu("0000:11:00", "GPU 0000:11:00.0: GPU has fallen off the bus.")
    assert chassis.plane.events_of("kernel_line")[0].raw == answer["line"]
    assert (answer["uuid"], answer["serial"], answer["pids"]) == ("GPU-b", "131", [pid])
    event = eventually(lambda: chassis.plane.events_of("gpu_unreadable"))[0]
    assert event.gpu_uuid == "GPU-b"
    eventually(lambda: state_of(pid) == "T")
    assert not chassis.plane.events_of("process_exited")


@pytest.mark.parametrize(
    ("fault", "codes", "errors"), [("xid94", [63, 94], 1), ("xid31", [31], 0), ("xid48", [48], 1)]
)
def test_an_error_kills_the_rank_and_leaves_the_card_readable(
    chassis: Node, fault: str, codes: list[int], errors: int
) -> None:
    pid = chassis.started_rank()

    break_card(chassis, fault)

    exited = eventually(lambda: chassis.plane.events_of("process_exited"))[0]
    assert (exited.data["pid"], exited.data["signal"]) == (pid, signal.SIGABRT)
    eventually(lambda: [line.code for line in parsed_lines(chassis.plane)] == codes)
    first = chassis.cards()[0]
    assert first["ecc_uncorrected"] == errors
    assert first.get("contained", False) is (fault == "xid94")
    assert not chassis.plane.events_of("gpu_unreadable")


def test_a_fault_on_an_idle_node_names_no_process(chassis: Node) -> None:
    assert break_card(chassis, "xid79")["pids"] == []

    line = eventually(lambda: parsed_lines(chassis.plane))[0]
    assert (line.pid, line.process) == (None, "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (bmc.BREAK, {"fault": "xid1", "card": 0}),
        (bmc.BREAK, {"fault": "xid79", "card": 2}),
        (bmc.BREAK, {"fault": "xid79", "card": True}),
        (bmc.FREEZE, {"what": "bmc", "frozen": True}),
        (bmc.FREEZE, {"what": "all", "frozen": 1}),
    ],
)
def test_faults_that_do_not_exist_are_refused(
    chassis: Node, path: str, body: dict[str, Any]
) -> None:
    before = chassis.cards()

    status, answer = call(chassis, path, body)

    assert status == 400, answer
    assert chassis.cards() == before


def test_a_node_that_is_off_can_neither_break_nor_freeze(chassis: Node) -> None:
    reset(chassis, "ForceOff")

    assert call(chassis, bmc.BREAK, {"fault": "xid79", "card": 0})[0] == 409
    assert freeze(chassis, "all", True) == 409


def test_a_boot_brings_a_lost_card_back(chassis: Node) -> None:
    break_card(chassis, "xid79", card=0)
    break_card(chassis, "xid94", card=1)

    reset(chassis, "ForceRestart")

    said = [(c["unreadable"], c["contained"], c["ecc_uncorrected"]) for c in chassis.cards()]
    assert said == [(False, False, 0), (False, False, 0)]
    assert (chassis.folder / "kernel.log").read_text() == ""


def test_no_boot_brings_a_dead_card_back(chassis: Node) -> None:
    break_card(chassis, "dead-card")
    eventually(lambda: chassis.plane.events_of("gpu_unreadable"))

    reset(chassis, "ForceRestart")

    boots = eventually(lambda: _two([e.boot_id for e in chassis.plane.events_of("boot")]))
    again = eventually(
        lambda: [e for e in chassis.plane.events_of("gpu_unreadable") if e.boot_id == boots[1]]
    )
    assert again[0].gpu_uuid == "GPU-a"
    assert isinstance(eventually(lambda: parsed_lines(chassis.plane)[2:])[0], xid.LostGpu)


def test_a_frozen_agent_is_silent_while_its_rank_runs_and_then_goes_on(chassis: Node) -> None:
    pid = chassis.started_rank()

    assert freeze(chassis, "agent", True) == 204
    eventually(lambda: state_of(agent_pid(chassis)) == "T")
    beats = len(chassis.plane.beats)
    assert state_of(pid) != "T"

    assert freeze(chassis, "agent", False) == 204
    eventually(lambda: len(chassis.plane.beats) > beats + 1)


def test_a_frozen_node_stands_still_and_power_still_works(chassis: Node) -> None:
    pid = chassis.started_rank()

    freeze(chassis, "all", True)
    eventually(lambda: [state_of(pid), state_of(agent_pid(chassis))] == ["T", "T"])

    assert reset(chassis, "ForceRestart") == 204
    assert state_of(pid) == ""
    eventually(lambda: len(chassis.plane.events_of("boot")) == 2)


def test_thawing_does_not_free_a_process_that_a_lost_card_holds(chassis: Node) -> None:
    pid = chassis.started_rank()
    break_card(chassis, "xid79")

    freeze(chassis, "all", True)
    freeze(chassis, "all", False)

    eventually(lambda: state_of(agent_pid(chassis)) in {"R", "S", "D"})
    assert state_of(pid) == "T"


def test_an_agent_that_dies_frozen_comes_back_with_the_thaw(chassis: Node) -> None:
    freeze(chassis, "agent", True)
    first = agent_pid(chassis)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: chassis.log("agent_ended"))

    assert freeze(chassis, "agent", False) == 204

    eventually(lambda: agent_pid(chassis) != first)
    beats = len(chassis.plane.beats)
    eventually(lambda: len(chassis.plane.beats) > beats)
    assert state_of(agent_pid(chassis)) != "T"
    assert len(chassis.log("agent_started")) == 2


def test_a_chassis_ends_at_once_though_everything_hangs(chassis: Node) -> None:
    pid = chassis.started_rank()
    break_card(chassis, "xid79")
    freeze(chassis, "agent", True)

    assert chassis.kill(signal.SIGTERM) == 0
    assert state_of(pid) == ""


def test_a_reset_mends_a_contained_error_and_the_node_passes_its_diagnostic(chassis: Node) -> None:
    chassis.started_rank()
    break_card(chassis, "xid94")
    eventually(lambda: chassis.plane.events_of("process_exited"))
    before = chassis.plane.result(chassis.plane.send(wire.Diagnose()))
    assert before.output["passed"] is False

    done = chassis.plane.result(chassis.plane.send(wire.ResetGpus(uuids=["GPU-a"])))
    after = chassis.plane.result(chassis.plane.send(wire.Diagnose()))

    assert (done.state, done.output) == ("done", {"reset": ["GPU-a"]})
    assert after.output["passed"] is True, after.output
    assert "94" in (chassis.folder / "kernel.log").read_text()


def _two(values: list[Any]) -> list[Any]:
    return values[:2] * (len(values) >= 2)


def test_a_drifting_card_corrects_ever_more_errors_until_it_is_reset(chassis: Node) -> None:
    pid = chassis.started_rank()

    answer = break_card(chassis, "ecc-drift", card=1)

    assert (answer["line"], answer["uuid"], answer["pids"]) == ("", "GPU-b", [pid])
    eventually(lambda: newest_errors(chassis, "GPU-b") > 4)
    assert newest_errors(chassis, "GPU-a") == 0
    assert state_of(pid) != "T"
    assert not chassis.plane.events_of("kernel_line")

    os.kill(pid, signal.SIGKILL)
    eventually(lambda: chassis.plane.events_of("process_exited"))
    done = chassis.plane.result(chassis.plane.send(wire.ResetGpus(uuids=["GPU-b"])))
    assert done.state == "done"
    eventually(lambda: newest_errors(chassis, "GPU-b") == 0)


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 1000))
def test_corrected_errors_only_grow(at: float, passed: float, before: int) -> None:
    counts = [faults.corrected_errors(before, 1.0, now) for now in (at, at + passed)]
    assert before <= counts[0] <= counts[1] <= faults.MAX_ERRORS + before
    assert faults.corrected_errors(before, 0.0, at) == before


def newest_errors(node: Node, uuid: str) -> float:
    readings = node.plane.beats[-1].readings
    return next((card.ecc_corrected or 0 for card in readings if card.uuid == uuid), 0)
