"""Hardware that is not there, behind the same interface: eight cards described by hardware.json.

The chassis writes that file when it fits cards and when it breaks one: a card with
`unreadable = true` does not answer, `ecc_uncorrected` is what its counter shows since the last
boot or reset. What else stands there is of the chassis: see `cards`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec

from node_agent import faults
from node_agent.cards import HARDWARE_FILE, Cards, edit
from node_agent.collectors import HardwareUnknown, Readings, ResetFailed, host
from node_agent.faults import after_reset, corrected_errors
from node_agent.watch import FolderWatch
from node_agent.wire import GpuInfo, GpuReading, Inventory, PortReading

DRIVER = "simulated"
#: Seconds in which a card gets two thirds of the way to its new temperature, or load.
WARM_S, LOAD_S = 40.0, 2.0
#: 18 links of an H100 together.
NVLINK_MB_S = 18 * 26_562
PCIE_LANES = 16
SLOWDOWN_C = 87.0


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One card in hardware.json; `cards` says what its fields mean."""

    index: int
    uuid: str
    serial: str
    model: str
    pci_address: str
    memory_bytes: int
    unreadable: bool = False
    ecc_uncorrected: int = 0
    ecc_corrected: int = 0
    drifts_since: float = 0.0
    remap_pending: bool = False
    remap_failed: bool = False
    sram_over_threshold: bool = False
    recovery_action: int = 0
    remapped_rows: int = 0
    exhausted_banks: int = 0
    nvlink_share: float = 1.0
    nvlink_errors_since: float = 0.0
    heats_since: float = 0.0
    throttle_reasons: int = 0
    pcie_lanes: int = PCIE_LANES
    pcie_replays_since: float = 0.0
    port_down: bool = False
    port_flaps_since: float = 0.0
    port_errors_since: float = 0.0


class _File(msgspec.Struct, frozen=True):
    gpus: list[Card]


@dataclass
class _Sensors:
    load: float = 0.0
    temperature: float = 31.0


class SimulatedHardware:
    """The cards of hardware.json, with sensors that follow the node's load.

    `busy()` says whether a rank runs here. Load, temperature and memory follow it smoothly.
    """

    def __init__(self, folder: Path, busy: Callable[[], bool]) -> None:
        self._folder = folder
        self._path = folder / HARDWARE_FILE
        self._busy = busy
        self._watch = FolderWatch(folder)
        self._version = (0, 0)
        self._cards: list[Card] = []
        self._sensors: dict[str, _Sensors] = {}
        self._at = time.monotonic()

    def inventory(self) -> Inventory:
        """Return the cards of hardware.json, with the real host's CPUs, memory and kernel.

        `simulated` is true in it. Raises HardwareUnknown if the file cannot be read or decoded.
        """
        self._load()
        return Inventory(
            gpus=[_info(card) for card in self._cards],
            cpus=host.cpus(),
            memory_bytes=host.memory_bytes(),
            kernel=host.kernel(),
            driver_version=DRIVER,
            simulated=True,
        )

    def readings(self) -> Readings:
        """Return made-up sensor values, which follow the load of the node over time.

        A card with `unreadable = true` has an empty reading and is listed as unreadable. If the
        file cannot be read there are no values, and the reason stands under the UUID "".
        """
        self._watch.clear()
        try:
            self._load()
        except HardwareUnknown as error:
            return Readings(unreadable={"": str(error)})
        now = time.monotonic()
        passed, self._at = now - self._at, now
        busy = self._busy()
        values = [self._read(card, busy, passed, now) for card in self._cards]
        silent = {card.uuid: "does not answer" for card in self._cards if card.unreadable}
        return Readings(values=values, unreadable=silent)

    def ports(self) -> list[PortReading]:
        """Each card has an adapter of its own beside it, as in the machines it stands for."""
        try:
            self._load()
        except HardwareUnknown:
            return []
        return [self._read_port(card, time.time()) for card in self._cards]

    def change_fd(self) -> int | None:
        return self._watch.fd

    def reset(self, uuids: list[str]) -> list[str]:
        """Reset cards in hardware.json: either all of the named ones or none of them.

        Returns the UUIDs that were reset; every card is, if none is named. Raises ResetFailed for a
        UUID that is not fitted and for a card that does not answer. Raises HardwareUnknown if the
        file cannot be read or written.
        """
        reset: list[str] = []

        def change(cards: Cards) -> Cards:
            known = {card["uuid"] for card in cards}
            strange = [uuid for uuid in uuids if uuid not in known]
            if strange:
                raise ResetFailed(f"no card {strange[0]} is fitted: name one of this node's")
            wanted = [card for card in cards if not uuids or card["uuid"] in uuids]
            lost = [card["uuid"] for card in wanted if card.get("unreadable")]
            if lost:
                raise ResetFailed(f"{', '.join(lost)} has fallen off the bus: reboot the node")
            reset.extend(card["uuid"] for card in wanted)
            return [after_reset(card) if card["uuid"] in reset else card for card in cards]

        try:
            edit(self._folder, change)
        except (OSError, ValueError, KeyError) as error:
            raise HardwareUnknown(f"{self._path}: {error!r}") from error
        return reset

    def let_go(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._watch.close()

    def _load(self) -> None:
        try:
            stat = self._path.stat()
            version = (stat.st_mtime_ns, stat.st_ino)
            if version == self._version:
                return
            self._cards = msgspec.json.decode(self._path.read_bytes(), type=_File).gpus
        except (OSError, msgspec.DecodeError) as error:
            raise HardwareUnknown(f"{self._path}: {error}") from error
        self._version = version

    def _read(self, card: Card, busy: bool, passed: float, now: float) -> GpuReading:
        if card.unreadable:
            return GpuReading(uuid=card.uuid)
        sensors = self._sensors.setdefault(card.uuid, _Sensors())
        sensors.load += (float(busy) - sensors.load) * (1 - math.exp(-passed / LOAD_S))
        warm = 31.0 + 37.0 * sensors.load
        sensors.temperature += (warm - sensors.temperature) * (1 - math.exp(-passed / WARM_S))
        wobble = math.sin(now / 7 + card.index * 1.7)
        load = sensors.load
        heated = sensors.temperature + faults.heat_since(card.heats_since, time.time())
        heat = min(heated, SLOWDOWN_C)
        return GpuReading(
            uuid=card.uuid,
            temperature_c=round(heat + card.index * 0.6 + 0.4 * wobble, 1),
            power_w=round(72 + load * (560 + 15 * wobble) + card.index, 1),
            utilization=round(max(0.0, load * (96 + 3 * wobble)), 1),
            sm_clock_mhz=round(345 + load * 1635),
            memory_used_bytes=round(card.memory_bytes * (0.01 + 0.81 * load)),
            ecc_corrected=corrected_errors(card.ecc_corrected, card.drifts_since, time.time()),
            ecc_uncorrected=card.ecc_uncorrected,
            pcie_replays=faults.count_since(card.pcie_replays_since, time.time()),
            remap_pending=float(card.remap_pending),
            remap_failed=float(card.remap_failed),
            sram_over_threshold=float(card.sram_over_threshold),
            recovery_action=card.recovery_action,
            remapped_rows=card.remapped_rows,
            exhausted_banks=card.exhausted_banks,
            slowdown_c=SLOWDOWN_C,
            throttle_reasons=card.throttle_reasons,
            nvlink_mb_s=round(NVLINK_MB_S * card.nvlink_share),
            nvlink_errors=faults.count_since(card.nvlink_errors_since, time.time()),
            pcie_lanes=card.pcie_lanes,
            pcie_lanes_max=PCIE_LANES,
        )

    def _read_port(self, card: Card, now: float) -> PortReading:
        flapping = faults.is_down_by_flaps(card.port_flaps_since, now)
        errors = faults.count_since(card.port_errors_since, now)
        return PortReading(
            name=f"mlx5_{card.index}/1",
            up=float(not (card.port_down or flapping)),
            symbol_errors=errors,
            link_recoveries=errors // 50,
            link_downs=0,
            receive_errors=0,
            discards=0,
        )


def _info(card: Card) -> GpuInfo:
    return GpuInfo(
        index=card.index,
        uuid=card.uuid,
        serial=card.serial,
        model=card.model,
        pci_address=card.pci_address,
        memory_bytes=card.memory_bytes,
    )
