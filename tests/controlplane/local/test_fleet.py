"""The plan of the simulated fleet, and the settings its agents are given."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.local import fleet
from node_agent.config import load_config


@pytest.mark.parametrize(("nodes", "side"), [(6, 1), (8, 2), (12, 3), (64, 16)])
def test_nodes_are_spread_over_two_clusters(tmp_path: Path, nodes: int, side: int) -> None:
    plan = fleet.plan(tmp_path, nodes)
    assert len(plan) == nodes
    assert sum(node.cluster == fleet.SIDE_CLUSTER for node in plan) == side
    assert [node.name for node in plan if node.spare] == [
        f"harbor-{nodes - side:02d}",
        f"quay-{side:02d}",
    ]


def test_the_main_cluster_has_two_racks(tmp_path: Path) -> None:
    racks = [node.rack for node in fleet.plan(tmp_path, 8) if node.cluster == fleet.MAIN_CLUSTER]
    assert racks == ["harbor-r1"] * 3 + ["harbor-r2"] * 3


@pytest.mark.parametrize("nodes", [-1, 0, 5, 65])
def test_a_fleet_that_cannot_hold_the_job_is_refused(tmp_path: Path, nodes: int) -> None:
    with pytest.raises(fleet.FleetError, match="6 to 64"):
        fleet.plan(tmp_path, nodes)


def test_the_agent_understands_its_settings(tmp_path: Path) -> None:
    node = fleet.plan(tmp_path, 8)[0]
    fleet.prepare(node, "http://127.0.0.1:8001", tmp_path / "shared")
    config = load_config(node.folder / "agent.toml")
    assert config.name == "harbor-01"
    assert config.join_token_file == node.join_token


def test_preparing_again_keeps_port_and_password(tmp_path: Path) -> None:
    node = fleet.plan(tmp_path, 8)[0]
    fleet.prepare(node, "http://127.0.0.1:8001", tmp_path / "shared")
    before = (node.bmc_port, node.bmc_password)
    fleet.prepare(node, "http://127.0.0.1:9001", tmp_path / "shared")
    assert (node.bmc_port, node.bmc_password) == before


def test_no_two_nodes_answer_on_one_port(tmp_path: Path) -> None:
    first, second, *_ = fleet.plan(tmp_path, 8)
    fleet.prepare(first, "http://127.0.0.1:8001", tmp_path / "shared")
    second.folder.mkdir(parents=True)
    (second.folder / "bmc-port").write_text(str(first.bmc_port))  # as one run gave it to both
    fleet.prepare(second, "http://127.0.0.1:8001", tmp_path / "shared", {first.bmc_port})
    assert second.bmc_port != first.bmc_port
