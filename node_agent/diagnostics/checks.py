"""The tests themselves. Each returns (outcome, detail) and may block: it runs in a child."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable

from node_agent.collectors import host, reset_marks, xid
from node_agent.config import Config
from node_agent.hardware import look_once

Outcome = tuple[str, str]

#: Below and above these a sensor is broken, or the card is not fit for work.
SANE_TEMPERATURE_C = (5.0, 90.0)
#: What a card that is fit for work shows as 0, by the reading's name (NVIDIA's memory guide; what
#: the driver wants: NVML's GPU_RECOVERY_ACTION).
WELL_AT_ZERO = (
    "remap_pending",
    "remap_failed",
    "exhausted_banks",
    "sram_over_threshold",
    "recovery_action",
)
MIN_AVAILABLE_BYTES = 256 * 2**20
#: SHA-256 applied this often to its own output, from 32 zero bytes.
ROUNDS = 200_000
KNOWN_ANSWER = "c4773d4f7ba4ea18ce27038cca89df4b29a1d5c12808fd05ea0037fb2579fecd"
#: Xids for which NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors) wants more done than to
#: start the program again: the control plane would take the node out for one too. Any other says
#: nothing of the card, or it repeats, and the record of the card tells.
OF_THE_CARD = frozenset(
    {46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 142, 143, *range(144, 152)}
    | {154, 155, 156, 158, 166, 167, 168, 169, 170, 173}
)
#: SXids that an NVSwitch goes on after, by NVIDIA's guide to the Fabric Manager: errors that it
#: corrected, notes of its links' performance, warnings of its temperature and host interface.
NOT_OF_THE_SWITCH = frozenset(
    {11012, 11021, 11022, 11023, 12021, 12023, 15008, 15011, 19049, 19055, 19057, 19059, 19062}
    | {19065, 19068, 19071, 22013, 24001, 24002, 24003}
    | {20001, 20009, 20012, 28006}
    | {10001, 10002, 10004, 10005}
)
#: Of the Xids, the one that says what the driver wants done, and its words for nothing.
RECOVERY_ACTION = 154
_NOTHING_WANTED = re.compile(r"\bto\s+(?:0x)?0+\b", re.IGNORECASE)


def cards(config: Config, _level: int) -> Outcome:
    """Every card answers, with readings a healthy card can have."""
    inventory, readings = look_once(config)
    listed = {card.uuid for card in inventory.gpus}
    if not listed:
        return "failed", "no card is listed"
    if readings.unreadable:
        return "failed", "; ".join(f"{uuid}: {why}" for uuid, why in readings.unreadable.items())
    silent = listed - {value.uuid for value in readings.values}
    if silent:
        return "failed", f"no readings from {', '.join(sorted(silent))}"
    low, high = SANE_TEMPERATURE_C
    for value in readings.values:
        if value.temperature_c is None or not low <= value.temperature_c <= high:
            return "failed", f"{value.uuid}: temperature {value.temperature_c} °C"
    return "passed", f"{len(listed)} cards answer"


def ecc(config: Config, _level: int) -> Outcome:
    """No uncorrectable memory error since the driver was loaded. A card that answers, and has no
    counter of them, does not correct its memory, or has that switched off."""
    inventory, readings = look_once(config)
    counts = {value.uuid: value.ecc_uncorrected for value in readings.values}
    bad = [f"{uuid}: {count:g}" for uuid, count in counts.items() if count]
    if bad:
        return "failed", f"uncorrectable errors: {', '.join(bad)}"
    silent = {card.uuid for card in inventory.gpus} - counts.keys()
    if silent or not counts:
        return "skipped", f"no counter can be read on {', '.join(sorted(silent)) or 'any card'}"
    without = sum(count is None for count in counts.values())
    return "passed", f"{len(counts)} cards show no uncorrectable error, {without} for want of ECC"


def remapping(config: Config, _level: int) -> Outcome:
    """No row of a card's memory waits to be remapped or could not be, its SRAM's errors are below
    the vendor's threshold, and the driver wants nothing done. A card that tells none of it is too
    old to remap."""
    _, readings = look_once(config)
    bad = [
        f"{value.uuid}: {name} {shown:g}"
        for value in readings.values
        for name in WELL_AT_ZERO
        if (shown := getattr(value, name))
    ]
    if bad:
        return "failed", "; ".join(bad)
    if not readings.values:
        return "failed", "no card tells of its memory"
    telling = sum(value.remap_failed is not None for value in readings.values)
    return "passed", f"{telling} of {len(readings.values)} cards tell of remapped rows: none waits"


def memory(_config: Config, level: int) -> Outcome:
    """Host memory is free, and keeps what is written to it."""
    available = host.available_bytes()
    if available < MIN_AVAILABLE_BYTES:
        return "failed", f"only {available >> 20} MiB are free"
    size = (16 if level == 1 else 64) * 2**20
    for pattern in (0x00, 0xFF, 0x55, 0xAA):
        block = bytearray([pattern]) * size
        if block.count(pattern) != size:
            return "failed", f"memory does not keep the pattern {pattern:#04x}"
    return "passed", f"{available >> 20} MiB free"


def disk(config: Config, _level: int) -> Outcome:
    """The agent's folder and the checkpoint root take a block and give it back."""
    block = os.urandom(2**20)
    for folder in (config.state_dir, config.shared_dir):
        path = folder / f".diagnostic-{config.name}-{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(block)
            same = path.read_bytes() == block
            path.unlink()
        except OSError as error:
            return "failed", f"{folder}: {os.strerror(error.errno or errno.EIO)}"
        if not same:
            return "failed", f"{folder}: read back something else than was written"
    return "passed", "writable"


def compute(_config: Config, level: int) -> Outcome:
    """The processor computes a known answer."""
    for _ in range(1 if level == 1 else 5):
        value = bytes(32)
        for _ in range(ROUNDS):
            value = hashlib.sha256(value).digest()
        if value.hex() != KNOWN_ANSWER:
            return "failed", f"computed {value.hex()}"
    return "passed", "known answer"


def kernel_log(config: Config, _level: int) -> Outcome:
    """Nothing against a card or a switch since boot, or since the reset that answered it."""
    try:
        boot_id = config.boot_id_path.read_text().strip()
        told = list(reset_marks.standing_lines(config, boot_id))
    except OSError as error:
        return "skipped", f"{config.kernel_log_path}: {error.strerror}"
    bad = [(line, parsed.pci) for line, parsed in told if _speaks_against_a_card(parsed)]
    if bad:
        where = ", ".join(sorted({pci for _line, pci in bad if pci})) or "no card that is named"
        first = bad[0][0][:300].decode(errors="replace")
        return "failed", f"{len(bad)} lines on {where}, first: {first}"
    return "passed", "no Xid against a card since boot or reset"


CHECKS: dict[str, Callable[[Config, int], Outcome]] = {
    "cards": cards,
    "ecc": ecc,
    "remapping": remapping,
    "memory": memory,
    "disk": disk,
    "compute": compute,
    "kernel_log": kernel_log,
}


def _speaks_against_a_card(parsed: xid.Parsed) -> bool:
    if isinstance(parsed, xid.SxidLine):
        return parsed.code not in NOT_OF_THE_SWITCH
    if isinstance(parsed, xid.LostGpu):
        return True
    if parsed.code == RECOVERY_ACTION and _NOTHING_WANTED.search(parsed.text):
        return False
    return parsed.code in OF_THE_CARD
