"""What an agent's file may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_agent.config import ConfigError, load_config

SETTINGS = """
name = "node-a"
address = "127.0.0.1"
ingest_url = "http://127.0.0.1"
state_dir = "state"
shared_dir = "shared"
hardware = "nvml"
"""


def test_the_kernels_log_of_real_hardware_is_a_device(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(f'{SETTINGS}kernel_log = "/dev/null"\n')
    device = load_config(path).kernel_log_path
    (tmp_path / "kern.log").touch()
    path.write_text(f'{SETTINGS}kernel_log = "kern.log"\n')

    with pytest.raises(ConfigError, match="`kernel_log` must be the kernel's own device"):
        load_config(path)
    assert device == Path("/dev/null")
