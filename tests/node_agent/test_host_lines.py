"""What the kernel says of a host beside its cards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.collectors.host_lines import parse

LINES = [
    (
        "oom", False, "4242 (python3)",
        "[ 1.2] Out of memory: Killed process 4242 (python3) total-vm:1kB, anon-rss:1kB",
    ),
    (
        "oom", False, "7 (train)",
        "Memory cgroup out of memory: Killed process 7 (train) total-vm:1kB",
    ),
    ("memory_error", True, "MC0", "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0"),
    ("memory_error", False, "MC1", "EDAC MC1: 1 UE memory scrubbing error on DIMM_B1"),
    ("memory_error", False, "fatal", "{1}[Hardware Error]: event severity: fatal"),
    ("memory_error", True, "corrected", "{2}[Hardware Error]: event severity: corrected"),
    ("memory_error", False, "", "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 1"),
    (
        "pcie_error", True, "0000:80:01.1",
        "pcieport 0000:80:01.1: AER: Corrected error message received from 0000:81:00.0",
    ),
    (
        "pcie_error", False, "0000:81:00.0",
        "nvidia 0000:81:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
    ),
    (
        "pcie_error", True, "0000:17:00.0",
        "nvidia 0000:17:00.0: AER: PCIe Bus Error: severity=Corrected, type=Physical Layer",
    ),
    (
        "disk_error", False, "nvme1",
        "nvme nvme1: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10",
    ),
    ("disk_error", False, "nvme0", "nvme nvme0: I/O 12 QID 3 timeout, aborting"),
    (
        "disk_error", False, "nvme2",
        "nvme nvme2: I/O tag 0 (1000) opcode 0x2 (I/O Cmd) QID 1 timeout, aborting req_op:READ(0)",
    ),
    ("disk_error", False, "nvme0n1", "blk_update_request: I/O error, dev nvme0n1, sector 2048 op"),
    (
        "filesystem_error", False, "nvme0n1p1",
        "EXT4-fs error (device nvme0n1p1): ext4_find_entry:1455: inode #2: comm python",
    ),
    ("filesystem_error", False, "sda1", "XFS (sda1): Corruption of in-memory data detected."),
    (
        "filesystem_error", False, "sda2",
        "BTRFS error (device sda2 state EA): bdev /dev/sda2 errs: wr 1, rd 0, flush 0, corrupt 0",
    ),
    ("filesystem_error", False, "sdb1", "EXT4-fs (sdb1): Remounting filesystem read-only"),
    ("link_down", False, "eth0", "mlx5_core 0000:17:00.0 eth0: Link down"),
    ("link_down", False, "enp1s0", "igb 0000:01:00.0 enp1s0: igb: enp1s0 NIC Link is Down"),
    (
        "blocked_task", False, "python3:4711",
        "INFO: task python3:4711 blocked for more than 120 seconds.",
    ),
    ("panic", False, "Fatal exception", "Kernel panic - not syncing: Fatal exception"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "corrected", "subject", "line"), LINES)
def test_a_host_line_is_read(kind: str, corrected: bool, subject: str, line: str) -> None:
    parsed = parse(f"Mar 29 15:38:59 node-7 kernel: [12.5] {line}")

    assert parsed is not None
    assert (parsed.kind, parsed.corrected, parsed.subject) == (kind, corrected, subject)


@pytest.mark.parametrize(
    "line",
    [
        "EXT4-fs (nvme0n1p1): mounted filesystem with ordered data mode",
        "nvme nvme0: 8/0/0 default/read/poll queues",
        "EDAC MC0: Giving out device to module skx_edac",
        "pcieport 0000:00:1c.0: AER: enabled with IRQ 122",
        "mlx5_core 0000:17:00.0 eth0: Link up",
        "XFS (sda1): Mounting V5 Filesystem",
        "audit: blocked by policy",
    ],
)
def test_what_is_no_fault_is_nothing(line: str) -> None:
    assert parse(line) is None


@given(st.text() | st.sampled_from([line for *_, line in LINES]).flatmap(st.just))
def test_any_text_is_read_without_an_error(line: str) -> None:
    parsed = parse(line)

    assert parsed is None or parsed.text in line
