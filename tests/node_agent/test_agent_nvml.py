"""NVML in its own process: a driver that is missing, sound, or hangs on one card."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from node_agent.collectors import HardwareUnknown, nvml
from tests.node_agent.fleet import eventually

#: A stand-in for the vendor's library: three cards, of which one is lost and one may hang.
DRIVER = """
import os, signal
NVML_VOLATILE_ECC = NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
class Box:
    def __init__(self, **fields): self.__dict__.update(fields)
def refuse(*_): raise NVMLError_NotSupported("not supported")
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return "570.1"
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(card): return f"GPU-{card}"
def nvmlDeviceGetName(card): return "NVIDIA H200"
def nvmlDeviceGetPciInfo(card): return Box(busId=f"00000000:1{card}:00.0")
def nvmlDeviceGetMemoryInfo(card): return Box(total=1000, used=10)
def nvmlDeviceGetTemperature(card, _):
    if card == 1: raise NVMLError("GPU is lost")
    if card == 2 and "HANG" in os.environ: signal.pause()
    return 40
def nvmlDeviceGetPowerUsage(card): return 70500
def nvmlDeviceGetUtilizationRates(card): return Box(gpu=7)
def nvmlDeviceGetTotalEccErrors(card, kind, _): return kind
def nvmlDeviceGetRemappedRows(card): return (5, 2, 1, 0)
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_FI_DEV_NVLINK_GET_SPEED = 164
NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 52, 59
NVML_NVLINK_MAX_LINKS, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 4, 1
INT, LONG = 1, 3
VALUES = {
    230: (INT, Box(uiVal=4)), 164: (INT, Box(uiVal=26562)),
    52: (LONG, Box(ullVal=5)), 59: (LONG, Box(ullVal=2)),
}
def nvmlDeviceGetFieldValues(card, fields):
    names = [one[0] if isinstance(one, tuple) else one for one in fields]
    return [Box(nvmlReturn=0, valueType=VALUES[one][0], value=VALUES[one][1]) for one in names]
def nvmlDeviceGetNvLinkState(card, link):
    if link == 3: raise NVMLError("no such link")
    return link != 1
def nvmlDeviceGetTemperatureThreshold(card, _): return 87
def nvmlDeviceGetCurrentClocksThrottleReasons(card): return 0x44
def nvmlDeviceGetRowRemapperHistogram(card): return Box(none=1)
def nvmlDeviceGetCurrPcieLinkWidth(card): return 8
def nvmlDeviceGetMaxPcieLinkWidth(card): return 16
nvmlEccSramErrorStatus_v1 = 7
class c_nvmlEccSramErrorStatus_v1_t: version = bThresholdExceeded = 0
def byref(box): return box
def nvmlDeviceGetSramEccErrorStatus(card, status): status.bThresholdExceeded = status.version == 7
nvmlDeviceGetSerial = nvmlDeviceGetClockInfo = nvmlDeviceGetPcieReplayCounter = refuse
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(DRIVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_cards_and_sensors_are_read_and_what_is_missing_is_none(driver: None) -> None:
    inventory, readings = nvml.look_once()

    assert inventory.driver_version == "570.1"
    assert (inventory.gpus[0].uuid, inventory.gpus[0].serial) == ("GPU-0", "GPU-0")
    first = readings.values[0]
    assert (first.temperature_c, first.power_w, first.ecc_uncorrected) == (40, 70.5, 1)
    assert (first.sm_clock_mhz, first.pcie_replays) == (None, None)
    assert (first.remap_pending, first.remap_failed) == (1, 0)
    assert (first.sram_over_threshold, first.recovery_action) == (1, 4)
    assert (first.remapped_rows, first.exhausted_banks) == (2, 1)
    assert (first.slowdown_c, first.throttle_reasons) == (87, 0x44)
    assert (first.pcie_lanes, first.pcie_lanes_max) == (8, 16)
    assert first.nvlink_mb_s == 2 * 26_562  # of three links one is down
    assert first.nvlink_errors == 7


def test_a_card_under_an_older_driver_is_read_without_what_that_does_not_know(
    driver: None, tmp_path: Path
) -> None:
    older = """
def unknown(*_): raise NVMLError("function not found")
nvmlDeviceGetRemappedRows = nvmlDeviceGetFieldValues = nvmlDeviceGetSramEccErrorStatus = unknown
nvmlDeviceGetNvLinkState = nvmlDeviceGetTemperatureThreshold = unknown
del nvmlDeviceGetRowRemapperHistogram, nvmlDeviceGetCurrPcieLinkWidth
"""
    (tmp_path / "pynvml.py").write_text(DRIVER + older)

    _, readings = nvml.look_once()

    first = readings.values[0]
    assert first.temperature_c == 40
    assert (first.remap_pending, first.sram_over_threshold, first.recovery_action) == (None,) * 3
    assert (first.exhausted_banks, first.nvlink_mb_s, first.slowdown_c) == (None,) * 3


def test_a_lost_card_is_named_and_the_others_are_read(driver: None) -> None:
    _, readings = nvml.look_once()

    assert [value.uuid for value in readings.values] == ["GPU-0", "GPU-2"]
    assert readings.unreadable == {"GPU-1": "card 1: GPU is lost"}


def test_a_card_that_falls_silent_is_noticed_without_being_asked_for(
    driver: None, tmp_path: Path
) -> None:
    hardware = nvml.NvmlHardware(tmp_path / "nvidia-smi")
    changed = hardware.change_fd()
    assert changed is not None

    assert select.select([changed], [], [], 20) == ([changed], [], [])
    assert hardware.readings().unreadable == {"GPU-1": "card 1: GPU is lost"}
    assert select.select([changed], [], [], 0) == ([], [], [])
    hardware.close()


def test_a_card_that_hangs_is_named_and_the_process_is_replaced(
    driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANG", "1")
    process = nvml.NvmlProcess(nvml.COMMAND)

    process.ask("inventory", 60.0)  # it has started
    with pytest.raises(nvml.NoAnswer) as hang:
        process.ask("readings", 5.0)
    assert hang.value.card == "GPU-2"

    monkeypatch.delenv("HANG")
    assert len(process.ask("readings", 20.0)) == 6
    process.kill()


def test_a_driver_that_cannot_be_loaded_is_not_an_empty_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = DRIVER.replace(
        "def nvmlInit(): pass", 'def nvmlInit(): raise NVMLError("Driver Not Loaded")'
    )
    (tmp_path / "pynvml.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(HardwareUnknown, match="Driver Not Loaded"):
        nvml.look_once()


#: And one card gives no answer to what is asked of it by this.
LOST = """
def lost(card):
    if card == 1: raise NVMLError("GPU is lost")
    return card
"""


@pytest.mark.parametrize(
    "call",
    [
        "def nvmlDeviceGetHandleByIndex(index): return lost(index)",
        "def nvmlDeviceGetUUID(card): return f'GPU-{lost(card)}'",
    ],
)
def test_a_card_that_tells_nothing_hides_no_other(driver: None, tmp_path: Path, call: str) -> None:
    (tmp_path / "pynvml.py").write_text(f"{DRIVER}{LOST}{call}\n")

    inventory, readings = nvml.look_once()

    assert [card.uuid for card in inventory.gpus] == ["GPU-0", "GPU-2"]
    assert [value.uuid for value in readings.values] == ["GPU-0", "GPU-2"]
    assert readings.unreadable == {"": "card 1: GPU is lost"}


def test_a_card_that_tells_little_is_listed_with_that(driver: None, tmp_path: Path) -> None:
    calls = """
def nvmlDeviceGetMemoryInfo(card): return Box(total=1000 + lost(card), used=10)
def nvmlDeviceGetSerial(card): return f"132{lost(card)}"
"""
    (tmp_path / "pynvml.py").write_text(DRIVER + LOST + calls)

    inventory, _ = nvml.look_once()

    assert [(card.uuid, card.serial, card.memory_bytes) for card in inventory.gpus] == [
        ("GPU-0", "1320", 1000), ("GPU-1", "GPU-1", 0), ("GPU-2", "1322", 1002)
    ]  # fmt: skip
    assert {card.model for card in inventory.gpus} == {"NVIDIA H200"}


@pytest.mark.parametrize(
    ("told", "serial"),
    [
        ("'N/A'", "GPU-0"),
        ("''", "GPU-0"),
        ("bytes([255]).decode()", "GPU-0"),
        ("'1320000000000 '", "1320000000000"),
    ],
)
def test_a_serial_that_names_nothing_is_none(
    driver: None, tmp_path: Path, told: str, serial: str
) -> None:
    odd = f"def nvmlDeviceGetSerial(card): return {told}\n"
    (tmp_path / "pynvml.py").write_text(DRIVER + odd)

    inventory, _ = nvml.look_once()

    assert inventory.gpus[0].serial == serial


def test_a_driver_that_tells_what_no_card_can_be_is_not_known(driver: None, tmp_path: Path) -> None:
    odd = "def nvmlDeviceGetUUID(card): return 'no card'\n"
    (tmp_path / "pynvml.py").write_text(DRIVER + odd)

    with pytest.raises(HardwareUnknown, match="no card"):
        nvml.look_once()


@pytest.mark.parametrize("gone", ["handle", "details"])
def test_a_card_that_is_lost_later_stays_what_it_was_until_a_reset(
    driver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    lost_later = f"""
def lost(card, what):
    if card == 2 and os.path.exists(f"{tmp_path}/{{what}}"): raise NVMLError("GPU is lost")
    return card
def nvmlDeviceGetHandleByIndex(index): return lost(index, "handle")
def nvmlDeviceGetSerial(card): return f"132{{lost(card, 'details')}}"
def nvmlDeviceGetMemoryInfo(card): return Box(total=1000 + lost(card, "details"), used=10)
"""
    (tmp_path / "pynvml.py").write_text(DRIVER + lost_later)
    monkeypatch.setattr(nvml, "LIST_PERIOD_S", 0.0)
    hardware = nvml.NvmlHardware(tmp_path / "nvidia-smi")
    eventually(lambda: hardware.readings().values)
    before = hardware.inventory()
    (tmp_path / gone).touch()
    eventually(lambda: "GPU-2" in hardware.readings().unreadable)
    seen = hardware.inventory()
    listed_again = eventually(lambda: hardware.inventory() is not seen and hardware.inventory())
    with hardware.let_go():  # as a diagnostic has it, which resets nothing
        examined = hardware.inventory()
    kept = eventually(lambda: hardware.inventory() is not examined and hardware.inventory())
    answers = {"handle": ["GPU-0", "GPU-1"], "details": ["GPU-0", "GPU-1", "GPU-2"]}[gone]
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    hardware.reset(["GPU-2"])
    eventually(lambda: [card.uuid for card in hardware.inventory().gpus] == answers)
    hardware.close()

    assert listed_again == kept == before
    assert [card.serial for card in before.gpus] == ["1320", "1321", "1322"]
