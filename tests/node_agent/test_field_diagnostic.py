"""The vendor's field diagnostic by command: its verdicts, and every way to come to none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node_agent import procfs, wire
from node_agent.collectors import HardwareUnknown, nvml
from node_agent.config import ConfigError, load_config
from tests.node_agent.fleet import Node, eventually
from tests.node_agent.test_agent_nvml import DRIVER
from tests.node_agent.test_agent_reset import kernel_log_outcome, say, tool


@pytest.fixture
def hospital(node: Node) -> Node:
    """An agent that has the field diagnostic of simulated cards."""
    module = ["python", "-m", "node_agent.simulated_diagnostic"]
    return with_tool(node, [*module, "--hardware", str(node.folder), "--card", "{uuid}"])


def with_tool(node: Node, argv: list[str]) -> Node:
    node.configure(field_diagnostic=argv)
    node.start()
    eventually(lambda: node.plane.reports)
    return node


def with_script(node: Node, script: str) -> Node:
    return with_tool(node, [str(tool(node.folder, script)), "{uuid}"])


def order(node: Node, uuid: str = "GPU-a", limit_s: float = 60.0) -> str:
    return node.plane.send(wire.FieldDiagnose(uuid=uuid, limit_s=limit_s))


def examine(node: Node, uuid: str = "GPU-a", limit_s: float = 60.0) -> wire.CommandResult:
    return node.plane.result(order(node, uuid, limit_s))


def pid_in(path: Path) -> int:
    eventually(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


def has_ended(pid: int) -> bool:
    process = procfs.read(pid)
    return process is None or not process.running


def test_a_card_that_passes_was_reset_and_older_lines_are_answered(hospital: Node) -> None:
    hospital.fit("GPU-a", "GPU-b", ecc_uncorrected=2)
    say(hospital, "10", 48)

    result = examine(hospital)

    assert (result.state, result.output["outcome"], result.output["status"]) == (
        "done", "passed", 0
    )  # fmt: skip
    assert result.output["said"] == "PASS"
    assert [card["ecc_uncorrected"] for card in hospital.cards()] == [0, 2]
    assert kernel_log_outcome(hospital) == "passed"


@pytest.mark.parametrize(
    ("defect", "value"),
    [("sram_over_threshold", True), ("remap_failed", True), ("exhausted_banks", 1)],
)
def test_a_defective_card_fails_and_the_tools_words_are_kept(
    hospital: Node, defect: str, value: int
) -> None:
    hospital.fit("GPU-a", "GPU-b", **{defect: value})
    say(hospital, "10", 48)

    result = examine(hospital)

    assert (result.state, result.output["outcome"]) == ("done", "failed")
    assert result.output["uuid"] == "GPU-a"
    assert result.output["said"] == f"FAIL: {defect}"
    assert Path(result.output["log"]).read_text() == f"FAIL: {defect}\n"
    assert kernel_log_outcome(hospital) == "failed"


def test_a_card_that_is_not_listed_is_not_examined(hospital: Node) -> None:
    result = examine(hospital, "GPU-z")

    assert (result.state, result.output) == ("done", {"uuid": "GPU-z", "outcome": "absent"})


def test_on_a_card_that_does_not_answer_the_tool_has_the_word(hospital: Node) -> None:
    hospital.fit("GPU-a", "GPU-b", unreadable=True)

    result = examine(hospital)

    assert result.state == "failed"
    assert "no verdict on the card: RETEST: the card does not answer" in result.error


def test_cards_that_are_not_listed_yet_are_waited_for(hospital: Node) -> None:
    listed = hospital.folder / "hardware.json"
    kept = listed.rename(hospital.folder / "kept")
    command_id = order(hospital)
    eventually(lambda: hospital.log("command"))
    kept.rename(listed)

    assert hospital.plane.result(command_id).output["outcome"] == "passed"


def test_without_a_tool_the_order_is_refused_and_the_report_says_so(agent: Node) -> None:
    result = examine(agent)

    assert result.state == "refused"
    assert "`field_diagnostic`" in result.error
    assert not agent.plane.reports[-1].field_diagnostic


def test_the_report_says_that_there_is_one(hospital: Node) -> None:
    assert hospital.plane.reports[-1].field_diagnostic


def test_a_tool_that_wants_to_be_run_again_has_given_no_verdict(node: Node) -> None:
    result = examine(with_script(node, "echo RETEST: unload the driver first; exit 2"))

    assert result.state == "failed"
    assert "status 2, no verdict on the card: RETEST: unload the driver first" in result.error


def test_a_tool_that_is_missing_is_named_with_its_setting(node: Node) -> None:
    result = examine(with_tool(node, ["/nowhere/fieldiag", "{pci}"]))

    assert result.state == "failed"
    assert "/nowhere/fieldiag" in result.error
    assert "`field_diagnostic`" in result.error


def test_a_tool_that_takes_too_long_is_ended_with_all_that_it_started(node: Node) -> None:
    script = f"setsid sleep 600 & echo $! > {node.folder}/child; echo $$ > {node.folder}/tool"
    result = examine(with_script(node, f"{script}; sleep 600"), limit_s=5.0)

    assert result.state == "failed"
    assert "did not end in 5 s" in result.error
    eventually(lambda: has_ended(pid_in(node.folder / "tool")))
    eventually(lambda: has_ended(pid_in(node.folder / "child")))


def test_what_a_progress_bar_draws_is_no_part_of_its_words(node: Node) -> None:
    bar = r"printf 'test 1 |==  |\rtest 2 |====|\r\000\033[2K\nPASS\n'"
    assert examine(with_script(node, bar)).output["said"].splitlines() == [
        "test 1 |==  |", "test 2 |====|", "[2K", "PASS"
    ]  # fmt: skip


def test_only_the_last_words_go_with_the_verdict(node: Node) -> None:
    result = examine(with_script(node, "seq 100000; exit 1"))

    assert result.output["said"].endswith("99999\n100000")
    assert len(result.output["said"]) <= 4000
    assert Path(result.output["log"]).read_text().startswith("1\n2\n")


def test_no_card_is_examined_under_a_rank(hospital: Node) -> None:
    hospital.started_rank()

    result = examine(hospital)

    assert (result.state, "p-1 runs" in result.error) == ("failed", True)


def test_no_rank_starts_and_nothing_is_reset_meanwhile(node: Node) -> None:
    door = node.folder / "door"
    agent = with_script(node, f"echo $$ > {node.folder}/tool; until [ -e {door} ]; do :; done")
    command_id = order(agent)
    pid_in(node.folder / "tool")

    early = agent.plane.result(agent.plane.send(agent.rank()))
    reset = agent.plane.result(agent.plane.send(wire.ResetGpus()))

    assert (early.state, "being examined" in early.error) == ("failed", True)
    diagnosed = agent.plane.result(agent.plane.send(wire.Diagnose()))
    assert (reset.state, "being examined" in reset.error) == ("failed", True)
    assert (diagnosed.state, "being examined" in diagnosed.error) == ("failed", True)
    door.touch()
    assert agent.plane.result(command_id).output["outcome"] == "passed"
    assert agent.started_rank("p-2") > 0


def test_an_agent_that_died_meanwhile_ends_the_tool_and_does_not_begin_again(node: Node) -> None:
    script = f"echo $$ >> {node.folder}/tools; cp {node.folder}/tools {node.folder}/tool; sleep 600"
    agent = with_script(node, script)
    command_id = order(agent)
    pid = pid_in(node.folder / "tool")
    agent.kill()
    agent.start()
    result = agent.plane.result(command_id)

    assert result.state == "failed"
    assert "not under way" in result.error
    eventually(lambda: has_ended(pid))
    agent.plane.send(wire.FieldDiagnose(uuid="GPU-a", limit_s=60), id=command_id)
    eventually(lambda: len(agent.plane.results) == 2)
    assert (node.folder / "tools").read_text().split() == [str(pid)]


def test_the_card_is_named_as_the_tool_wants_it(node: Node) -> None:
    node.configure(field_diagnostic=["fieldiag", "pci={pci}", "{uuid}", "-i", "{index}", "{x}"])
    card = wire.GpuInfo(
        index=3, uuid="GPU-1", serial="s", model="m", pci_address="00000000:1B:00.0",
        memory_bytes=1,
    )  # fmt: skip

    argv = load_config(node.config).field_diagnostic_argv(card)

    assert argv == ["fieldiag", "pci=0000:1b:00.0", "GPU-1", "-i", "3", "{x}"]


@pytest.mark.parametrize("argv", [["fieldiag"], ["{uuid}"], ["fieldiag", "--all"]])
def test_a_tool_that_is_not_told_its_card_is_refused(node: Node, argv: list[str]) -> None:
    node.configure(field_diagnostic=argv)

    with pytest.raises(ConfigError, match="which card"):
        load_config(node.config)


def test_real_cards_are_let_go_of_while_a_tool_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(DRIVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("READS_CARDS_OF", str(tmp_path))

    def readers() -> list[Any]:
        return procfs.with_environment("READS_CARDS_OF", str(tmp_path))

    hardware = nvml.NvmlHardware(tmp_path / "nvidia-smi")
    eventually(lambda: hardware.readings().values)
    assert len(readers()) == 1
    with hardware.let_go():
        assert readers() == []
    eventually(readers)
    hardware.close()


def test_cards_that_the_kernel_holds_cannot_be_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader hangs in the kernel: nothing can kill it."""

    def hang(_self: nvml.NvmlProcess) -> None:
        raise nvml.NoAnswer("the process that reads NVML hangs in the kernel")

    (tmp_path / "pynvml.py").write_text(DRIVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hardware = nvml.NvmlHardware(tmp_path / "nvidia-smi")
    eventually(lambda: hardware.readings().values)
    with monkeypatch.context() as patch:
        patch.setattr(nvml.NvmlProcess, "wait_for_its_end", hang)
        with pytest.raises(HardwareUnknown, match="hangs in the kernel"):
            hardware.let_go().__enter__()
    hardware.close()
