"""Ports of fabric adapters, as the kernel shows them in files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from node_agent.collectors.fabric import read_ports


def make_port(root: Path, adapter: str, state: str, **counters: str) -> None:
    port = root / adapter / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    for name, value in counters.items():
        (port / "counters" / name).write_text(f"{value}\n")


def test_ports_and_their_counters_are_read(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", "4: ACTIVE", symbol_error="3", link_downed="1")
    make_port(tmp_path, "mlx5_1", "2: INIT", symbol_error="N/A (no PMA)")

    first, second = read_ports(tmp_path)

    assert (first.name, first.up, first.symbol_errors, first.link_downs) == ("mlx5_0/1", 1, 3, 1)
    assert first.discards is None
    assert (second.name, second.up, second.symbol_errors) == ("mlx5_1/1", 0, None)


def test_a_node_without_adapters_has_no_ports(tmp_path: Path) -> None:
    assert read_ports(tmp_path / "none") == []


def test_an_adapter_that_is_removed_while_it_is_looked_at_is_no_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_port(tmp_path, "mlx5_0", "4: ACTIVE")
    gone = FileNotFoundError(errno.ENOENT, "No such file or directory")
    monkeypatch.setattr(os, "scandir", Mock(side_effect=[os.scandir(tmp_path), gone]))

    assert read_ports(tmp_path) == []
