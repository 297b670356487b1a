"""Real agents and chassis against a small control plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node_agent.fleet import ControlPlane, Node, eventually


@pytest.fixture
def plane() -> Iterator[ControlPlane]:
    plane = ControlPlane()
    yield plane
    plane.stop()


@pytest.fixture
def node(tmp_path: Path, plane: ControlPlane) -> Iterator[Node]:
    node = Node(tmp_path / "node", plane)
    yield node
    node.clean_up()


@pytest.fixture
def chassis(node: Node) -> Node:
    """A powered node whose agent has enrolled and reported."""
    node.start_chassis()
    eventually(lambda: node.plane.reports and node.log("chassis_started"))  # its BMC listens, too
    return node


@pytest.fixture
def agent(node: Node) -> Node:
    """A node whose agent is enrolled and has reported."""
    node.start()
    eventually(lambda: node.plane.reports)
    return node
