"""Resetting cards by command, and what the kernel's log is worth afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from node_agent import cards, procfs, wire
from node_agent.collectors import ResetFailed, nvidia_smi, nvml
from tests.node_agent.fleet import Node, eventually
from tests.node_agent.test_agent_nvml import DRIVER

LINE = "NVRM: Xid (PCI:0000:{pci}:00): {code}, pid=1, name=python3, Ch 00000008\n"


def say(node: Node, pci: str, code: int) -> None:
    with (node.folder / "kernel.log").open("a") as log:
        log.write(LINE.format(pci=pci, code=code))


def reset(node: Node, *uuids: str) -> wire.CommandResult:
    return node.plane.result(node.plane.send(wire.ResetGpus(uuids=list(uuids))))


def kernel_log_outcome(node: Node) -> str:
    result = node.plane.result(node.plane.send(wire.Diagnose()))
    outcomes = {test["name"]: test["outcome"] for test in result.output["tests"]}
    return str(outcomes["kernel_log"])


def errors(node: Node) -> list[int]:
    return [card["ecc_uncorrected"] for card in node.cards()]


def test_a_reset_without_names_is_of_all_cards(agent: Node) -> None:
    agent.fit("GPU-a", "GPU-b", ecc_uncorrected=2, contained=True)

    result = reset(agent)

    assert (result.state, result.output) == ("done", {"reset": ["GPU-a", "GPU-b"]})
    assert errors(agent) == [0, 0]
    assert [card["contained"] for card in agent.cards()] == [False, False]


def test_a_reset_of_one_card_leaves_the_others(agent: Node) -> None:
    agent.fit("GPU-a", "GPU-b", ecc_uncorrected=2)

    assert reset(agent, "GPU-b").output == {"reset": ["GPU-b"]}
    assert errors(agent) == [2, 0]


def test_what_a_card_says_again_after_a_reset_is_news(agent: Node) -> None:
    def told() -> set[str]:
        return {event.id for event in agent.plane.events_of("kernel_line")}

    agent.fit("GPU-a")
    say(agent, "0000:1b", 119)
    eventually(lambda: len(told()) == 1)
    before = told()
    reset(agent)
    say(agent, "0000:1b", 119)
    eventually(lambda: len(told()) == 2)

    assert len(told() - before) == 1


def test_no_card_is_reset_under_a_rank(agent: Node) -> None:
    agent.fit("GPU-a", "GPU-b", ecc_uncorrected=2)
    agent.started_rank()

    result = reset(agent)

    assert result.state == "failed"
    assert "p-1 runs" in result.error
    assert errors(agent) == [2, 2]


def test_a_lost_card_cannot_be_reset_and_the_remedy_is_named(agent: Node) -> None:
    agent.fit("GPU-a", "GPU-b", ecc_uncorrected=2, unreadable=True)

    result = reset(agent)

    assert result.state == "failed"
    assert "fallen off the bus: reboot the node" in result.error
    assert errors(agent) == [2, 2]


def test_a_card_that_is_not_fitted_cannot_be_reset(agent: Node) -> None:
    result = reset(agent, "GPU-z")

    assert (result.state, "GPU-z" in result.error) == ("failed", True)


def test_no_rank_starts_during_a_reset_and_one_starts_after_it(agent: Node) -> None:
    with cards.locked(agent.folder):
        command_id = agent.plane.send(wire.ResetGpus())
        eventually(lambda: agent.log("command"))
        early = agent.plane.result(agent.plane.send(agent.rank()))
        second = reset(agent)

    assert (early.state, "being reset" in early.error) == ("failed", True)
    assert (second.state, "being reset" in second.error) == ("failed", True)
    assert agent.plane.result(command_id).state == "done"
    assert agent.started_rank("p-2") > 0


def test_a_reset_that_its_agent_did_not_survive_has_failed_and_is_not_repeated(
    agent: Node,
) -> None:
    agent.fit("GPU-a", "GPU-b", ecc_uncorrected=2)
    with cards.locked(agent.folder):
        command_id = agent.plane.send(wire.ResetGpus())
        eventually(lambda: agent.log("command"))
        agent.kill()
        agent.start()
        result = agent.plane.result(command_id)

    assert result.state == "failed"
    assert "not under way" in result.error
    agent.plane.send(wire.ResetGpus(), id=command_id)
    eventually(lambda: len(agent.plane.results) == 2)
    assert errors(agent) == [2, 2]


def test_old_lines_do_not_speak_against_cards_that_were_reset_and_new_ones_do(agent: Node) -> None:
    say(agent, "10", 48)
    assert kernel_log_outcome(agent) == "failed"

    reset(agent)
    assert kernel_log_outcome(agent) == "passed"

    say(agent, "10", 95)
    assert kernel_log_outcome(agent) == "failed"


def test_a_reset_of_one_card_does_not_answer_for_another(agent: Node) -> None:
    say(agent, "10", 48)
    say(agent, "11", 48)

    reset(agent, "GPU-a")
    assert kernel_log_outcome(agent) == "failed"

    reset(agent, "GPU-b")
    assert kernel_log_outcome(agent) == "passed"


def test_a_reset_does_not_answer_for_the_next_boot(agent: Node) -> None:
    reset(agent)
    agent.kill()
    agent.boot("boot-2")
    say(agent, "10", 79)
    agent.start()

    assert kernel_log_outcome(agent) == "failed"


def test_a_reset_does_not_answer_for_a_log_that_was_cut_since(agent: Node) -> None:
    say(agent, "10", 48)
    say(agent, "10", 48)
    reset(agent)
    (agent.folder / "kernel.log").write_text("")
    say(agent, "10", 48)

    assert kernel_log_outcome(agent) == "failed"


@pytest.mark.parametrize("code", [13, 31, 43, 45])
def test_a_fault_of_a_program_does_not_speak_against_the_card(agent: Node, code: int) -> None:
    say(agent, "10", code)

    assert kernel_log_outcome(agent) == "passed"


def tool(folder: Path, script: str) -> Path:
    """A stand-in for the vendor's tool."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_real_cards_are_reset_by_the_vendors_tool_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(DRIVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hardware = nvml.NvmlHardware(tool(tmp_path, f'echo "$@" >> {tmp_path}/asked'))
    eventually(lambda: hardware.readings().values)

    everything = hardware.reset([])
    one = hardware.reset(["GPU-2"])

    assert (everything, one) == (["GPU-0", "GPU-1", "GPU-2"], ["GPU-2"])
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["--gpu-reset -i GPU-0,GPU-1,GPU-2", "--gpu-reset -i GPU-2"]
    with pytest.raises(ResetFailed, match="GPU-9"):
        hardware.reset(["GPU-9"])
    hardware.close()


def test_a_tool_that_fails_is_quoted(tmp_path: Path) -> None:
    failing = tool(tmp_path, "echo GPU is in use by another client; exit 19")

    with pytest.raises(ResetFailed, match="status 19: GPU is in use"):
        nvidia_smi.reset(failing, ["GPU-0"])


def test_a_missing_tool_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ResetFailed, match="name it as `nvidia_smi`"):
        nvidia_smi.reset(tmp_path / "nvidia-smi", ["GPU-0"])


def test_a_tool_that_hangs_is_killed(tmp_path: Path) -> None:
    hanging = tool(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")

    with pytest.raises(ResetFailed, match="did not end in 5 s: reboot"):
        nvidia_smi.reset(hanging, ["GPU-0"], deadline_s=5.0)

    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: (process := procfs.read(pid)) is None or not process.running)


def test_a_reset_left_behind_by_a_dead_agent_is_ended(tmp_path: Path) -> None:
    hanging = tool(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    environment = {**os.environ, nvidia_smi.ENV_RESET: str(hanging)}
    pid = os.posix_spawn(hanging, [str(hanging)], environment)
    eventually((tmp_path / "pid").exists)

    nvidia_smi.end_left_over(hanging)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
