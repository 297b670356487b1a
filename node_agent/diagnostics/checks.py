"""The tests themselves. Each returns (outcome, detail) and may block: it runs in a child."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from node_agent.collectors import host
from node_agent.config import Config
from node_agent.hardware import look_once

Outcome = tuple[str, str]

#: Below and above these a sensor is broken, or the card is not fit for work.
SANE_TEMPERATURE_C = (5.0, 90.0)
MIN_AVAILABLE_BYTES = 256 * 2**20
#: SHA-256 applied this often to its own output, from 32 zero bytes.
ROUNDS = 200_000
KNOWN_ANSWER = "c4773d4f7ba4ea18ce27038cca89df4b29a1d5c12808fd05ea0037fb2579fecd"
XID = re.compile(rb"\bS?Xid\b")


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
    """No uncorrectable memory error since the driver was loaded."""
    _, readings = look_once(config)
    counts = {value.uuid: value.ecc_uncorrected for value in readings.values}
    bad = [f"{uuid}: {count:g}" for uuid, count in counts.items() if count]
    if bad:
        return "failed", f"uncorrectable errors: {', '.join(bad)}"
    unknown = [uuid for uuid, count in counts.items() if count is None]
    if unknown or not counts:
        return "skipped", f"no counter can be read on {', '.join(unknown) or 'any card'}"
    return "passed", f"{len(counts)} cards without uncorrectable errors"


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
    """No Xid or SXid since boot."""
    try:
        lines = _kernel_lines(config.kernel_log_path)
    except OSError as error:
        return "skipped", f"{config.kernel_log_path}: {error.strerror}"
    bad = [line for line in lines if XID.search(line)]
    if bad:
        return "failed", f"{len(bad)} lines, first: {bad[0][:300].decode(errors='replace')}"
    return "passed", "no Xid since boot"


CHECKS: dict[str, Callable[[Config, int], Outcome]] = {
    "cards": cards,
    "ecc": ecc,
    "memory": memory,
    "disk": disk,
    "compute": compute,
    "kernel_log": kernel_log,
}


def _kernel_lines(path: Path) -> list[bytes]:
    """Everything the log holds now; the device gives one record to each read."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    lines: list[bytes] = []
    try:
        while block := _next_block(fd):
            lines.append(block)
    finally:
        os.close(fd)
    return b"".join(lines).splitlines()


def _next_block(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return b""
    except BrokenPipeError:  # records were overwritten while we read: go on with the next
        return b"\n"
