"""Reads what else the kernel says of a host that a training job may suffer from.

Pure and total, as `xid`: it says what the line says and judges nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "oom", "memory_error", "pcie_error", "disk_error", "filesystem_error", "link_down",
    "blocked_task", "panic",
]  # fmt: skip


@dataclass(frozen=True)
class HostLine:
    """One of them. `subject` is what it is about, as the line names it; "" if it does not."""

    kind: Kind
    subject: str
    #: The kernel or the hardware has put it right by itself.
    corrected: bool
    text: str


#: What each kind looks like, after the kernel's sources that print it. The first that fits counts.
_KINDS: tuple[tuple[Kind, bool, re.Pattern[str]], ...] = (
    # mm/oom_kill.c
    ("oom", False, re.compile(
        r"(?:Out of memory|Memory cgroup out of memory): Killed process (?P<subject>\d+ \([^)]*\))"
    )),
    # arch/x86/kernel/cpu/mce, drivers/edac, drivers/acpi/apei
    ("memory_error", True, re.compile(r"\bEDAC (?P<subject>MC\d+): \d+ CE\b")),
    ("memory_error", False, re.compile(r"\bEDAC (?P<subject>MC\d+): \d+ UE\b")),
    ("memory_error", True, re.compile(
        r"\{\d+\}\[Hardware Error\]: event severity: (?P<subject>corrected)"
    )),
    ("memory_error", False, re.compile(
        r"\{\d+\}\[Hardware Error\]: event severity: (?P<subject>fatal|recoverable)"
    )),
    ("memory_error", True, re.compile(
        r"\[Hardware Error\]: (?P<subject>Corrected|Deferred) error"
    )),
    ("memory_error", False, re.compile(
        r"(?:\[Hardware Error\]: (?P<subject>Uncorrected)|Memory failure: 0x[0-9a-f]+: recovery|"
        r"mce: \[Hardware Error\]: CPU \d+: Machine Check Exception)"
    )),
    # drivers/pci/pcie/aer.c
    ("pcie_error", True, re.compile(
        r"(?P<subject>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]): "
        r"(?:AER: (?:Multiple )?Correct(?:ed|able) error|"
        r"(?:AER: )?PCIe Bus Error: severity=Correct(?:ed|able))"
    )),
    ("pcie_error", False, re.compile(
        r"(?P<subject>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]): "
        r"(?:AER: (?:Multiple )?Uncorrect(?:ed|able)|"
        r"(?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able))"
    )),
    # drivers/nvme/host/pci.c, block/blk-core.c
    ("disk_error", False, re.compile(
        r"\b(?P<subject>nvme\d+(?:n\d+)?): "
        r"(?:I/O .{0,80}timeout|controller is down|Removing after probe|Device not ready)"
    )),
    ("disk_error", False, re.compile(
        r"\b(?:I/O error|critical (?:medium|target|space allocation) error), dev (?P<subject>\S+?),"
    )),
    # fs/ext4, fs/xfs, fs/btrfs
    ("filesystem_error", False, re.compile(r"\bEXT4-fs error \(device (?P<subject>[^)]+)\)")),
    ("filesystem_error", False, re.compile(
        r"\bXFS \((?P<subject>[^)]+)\): (?:Corruption|Metadata corruption|log I/O error|"
        r"Filesystem has been shut down|metadata I/O error)"
    )),
    ("filesystem_error", False, re.compile(
        r"\bBTRFS (?:error|critical) \(device (?P<subject>[^)\s]+)"
    )),
    ("filesystem_error", False, re.compile(
        r"\b(?:EXT4-fs \((?P<subject>[^)]+)\): Remounting filesystem read-only)"
    )),
    # drivers/net, drivers/infiniband
    ("link_down", False, re.compile(
        r"\b(?P<subject>[a-z][\w.-]{1,30}):? (?:NIC )?Link (?:is )?Down\b", re.IGNORECASE
    )),
    ("link_down", False, re.compile(r"\b(?P<subject>mlx\d_\w+ [0-9a-f:.]+): .*\bLink DOWN\b")),
    # kernel/hung_task.c
    ("blocked_task", False, re.compile(
        r"INFO: task (?P<subject>\S+:\d+) blocked (?:in I/O wait )?for more than \d+ seconds"
    )),
    # kernel/panic.c
    ("panic", False, re.compile(r"Kernel panic - not syncing: (?P<subject>[^\n]{0,80})")),
)  # fmt: skip
#: One of these stands in each of them: most lines are dismissed by it.
WORDS = (
    "ut of memory: Killed", "EDAC", "Hardware Error", "Memory failure", "AER:", "PCIe Bus Error",
    "nvme", "error, dev", "EXT4-fs", "XFS (", "BTRFS", "ink is ", "ink Down", "ink down",
    "ink DOWN", "blocked ", "Kernel panic",
)  # fmt: skip


def parse(line: str) -> HostLine | None:
    """What the line says of the host; None if nothing of these."""
    if not any(word in line for word in WORDS):
        return None
    for kind, corrected, pattern in _KINDS:
        if found := pattern.search(line):
            return HostLine(kind, found["subject"] or "", corrected, line[found.start() :].strip())
    return None
