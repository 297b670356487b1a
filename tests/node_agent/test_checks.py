"""What the node's own examination makes of its cards and of the kernel's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.health import catalogue
from node_agent.collectors import xid
from node_agent.config import Config
from node_agent.diagnostics import checks
from tests.node_agent.test_agent_nvml import DRIVER
from tests.node_agent.test_agent_reset import LINE
from workers.triage import condemns_node, judge_line

CATALOGUE = catalogue.read(catalogue.DATA)
SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): {code}, Fatal, Link 46 (First)"
RECOVERY = "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x0 (None) to {to}"
RECOVERIES = ["0x0 (None)", "0x1 (GPU Reset Required)", "0x2 (Node Reboot Required)", "(a new one)"]
#: All that have a code, and some that have none.
SAID = [
    *(LINE.format(pci="1b", code=code) for code in range(1, 1000)),
    *(SWITCH.format(code=code) for code in [*CATALOGUE.sxids, 99999]),
    *(RECOVERY.format(to=to) for to in RECOVERIES),
    "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.",
]


def speaks_against(line: str) -> bool:
    parsed = xid.parse(line)
    assert parsed is not None
    return checks._speaks_against_a_card(parsed)


def condemns(line: str) -> bool:
    verdict = judge_line(line, CATALOGUE)
    assert verdict is not None
    return condemns_node(verdict)


def test_a_line_fails_a_node_that_the_control_plane_would_take_out_for_it() -> None:
    found = [line for line in SAID if speaks_against(line)]

    assert found == [line for line in SAID if condemns(line)]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        name="node-a",
        address="127.0.0.1",
        ingest_url="http://127.0.0.1",
        state_dir=tmp_path,
        shared_dir=tmp_path,
        hardware="nvml",
    )


ALL_ANSWER = "def nvmlDeviceGetTemperature(card, _): return 40"


@pytest.mark.parametrize(
    ("counter", "outcome"),
    [
        ("return 0", ("passed", "3 cards show no uncorrectable error, 0 for want of ECC")),
        ("refuse()", ("passed", "3 cards show no uncorrectable error, 3 for want of ECC")),
        ("return kind", ("failed", "uncorrectable errors: GPU-0: 1, GPU-1: 1, GPU-2: 1")),
        ("raise NVMLError('lost')", ("skipped", "no counter can be read on GPU-0, GPU-1, GPU-2")),
    ],
)
def test_a_card_without_ecc_passes_and_one_that_does_not_answer_does_not(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counter: str,
    outcome: tuple[str, str],
) -> None:
    counts = f"def nvmlDeviceGetTotalEccErrors(card, kind, _): {counter}"
    (tmp_path / "pynvml.py").write_text(f"{DRIVER}{ALL_ANSWER}\n{counts}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    assert checks.ecc(config, 1) == outcome
