"""Chooses the hardware interface that the configuration names."""

from __future__ import annotations

from collections.abc import Callable

from node_agent.collectors import Hardware, Readings, nvml
from node_agent.config import Config
from node_agent.simulated import SimulatedHardware
from node_agent.wire import Inventory


def open_hardware(config: Config, busy: Callable[[], bool]) -> Hardware:
    """`busy` says whether a rank runs on this node; real cards show it by themselves."""
    if config.hardware_dir is not None and config.hardware == "simulated":
        return SimulatedHardware(config.hardware_dir, busy)
    return nvml.NvmlHardware(config.nvidia_smi)


def look_once(config: Config) -> tuple[Inventory, Readings]:
    """What is fitted and what it reads, now. May block: for a child that has a deadline.

    Raises HardwareUnknown.
    """
    if config.hardware == "nvml":
        return nvml.look_once()
    hardware = open_hardware(config, busy=lambda: False)
    try:
        return hardware.inventory(), hardware.readings()
    finally:
        hardware.close()
