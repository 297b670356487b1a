"""What a simulated machine shows is what its agent may send."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from node_agent.cards import HARDWARE_FILE
from node_agent.simulated import SimulatedHardware
from node_agent.wire import GpuReading

CARD = {
    "index": 0, "uuid": "GPU-a", "serial": "1", "model": "NVIDIA H200",
    "pci_address": "00000000:1B:00.0", "memory_bytes": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "shows",
    [
        {},
        {"unreadable": True},
        {"remap_pending": True, "remap_failed": True, "sram_over_threshold": True},
        {"recovery_action": 4, "ecc_corrected": 3, "ecc_uncorrected": 1},
    ],
)
def test_a_reading_is_taken_as_it_is_sent(tmp_path: Path, shows: dict[str, object]) -> None:
    (tmp_path / HARDWARE_FILE).write_text(json.dumps({"gpus": [{**CARD, **shows}]}))
    hardware = SimulatedHardware(tmp_path, lambda: False)

    (reading,) = hardware.readings().values

    assert msgspec.json.decode(msgspec.json.encode(reading), type=GpuReading) == reading
