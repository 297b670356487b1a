"""How much memory is left, as the machine and its control groups tell."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from runtime.checkpoint.memory_left import left_bytes

MEMINFO = """\
MemTotal:       1000 kB
MemAvailable:   {available} kB
SwapFree:       10 kB
AnonPages:      500 kB
Shmem:          100 kB
HugePages_Total:       0
"""


@pytest.mark.parametrize(
    ("available", "limits", "kib"),
    [
        (300, {}, 410),  # what is not told as available may be a file system's own cache
        (600, {}, 610),  # what others hold may be told, and not be of this container
        (300, {"": "max", "job": "max"}, 410),
        (300, {"job": "204800"}, 90),
        (300, {"": "143360", "job": "204800"}, 30),
    ],
)
def test_memory_is_left_as_far_as_machine_and_control_groups_have_it(
    tmp_path: Path, available: int, limits: dict[str, str], kib: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO.format(available=available))
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/\n0::/job/task\n")
    for name, limit in limits.items():
        group = tmp_path / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.stat").write_text("anon 102400\nfile 9999999\nshmem 20480\n")

    assert left_bytes(tmp_path) == kib << 10


@pytest.mark.parametrize(
    ("limits", "kib"),
    [
        ({"job": "0"}, 80),  # as Slurm and Kubernetes say where jobs are not to swap
        ({"": "0", "job": "max"}, 80),
        ({"job": "max"}, 90),
        ({"job": "9216"}, 85),
        ({"job": "2048"}, 80),  # there was more before it was told
    ],
)
def test_a_control_group_has_no_more_swap_than_it_may(
    tmp_path: Path, limits: dict[str, str], kib: int
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO.format(available=300))
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    job = tmp_path / "sys/fs/cgroup/job"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("204800\n")
    (job / "memory.stat").write_text("anon 102400\nfile 9999999\nshmem 20480\n")
    for name, limit in limits.items():
        (job.parent / name / "memory.swap.max").write_text(f"{limit}\n")
        (job.parent / name / "memory.swap.current").write_text("4096\n")

    assert left_bytes(tmp_path) == kib << 10


def test_where_nothing_tells_how_much_memory_is_left_there_may_be_any(tmp_path: Path) -> None:
    assert left_bytes(tmp_path) == math.inf
