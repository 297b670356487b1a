"""How many orders an agent remembers."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from node_agent import commands, wire
from node_agent.commands import Commands

KEEP = 3
BEGUN = {"id": "cmd_long", "expires_at": 1.0, "verb": "diagnose", "placement": ""}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of an agent that remembers few orders, and had begun one when it ended."""
    monkeypatch.setattr(commands, "KEEP", KEEP)
    (tmp_path / "commands.jsonl").write_text(json.dumps(BEGUN) + "\n")
    return tmp_path


def opened(folder: Path) -> Commands:
    identity = Mock(node_id="node-1", trusts=Mock(return_value=True))
    hands = [Mock() for _ in range(5)]
    return Commands(Mock(state_dir=folder), identity, *hands)


def refuse(taken: Commands, count: int) -> None:
    """Let it be offered orders whose time is over."""
    for number in range(count):
        order = wire.Command(
            id=f"cmd_{number}",
            node_id="node-1",
            issued_at=1.0,
            expires_at=2.0,
            action=wire.Diagnose(),
        )
        payload = msgspec.json.encode(order).decode()
        taken.handle(wire.SignedCommand(payload=payload, signature=""))


def remembered(folder: Path) -> list[str]:
    lines = (folder / "commands.jsonl").read_text().splitlines()
    return [json.loads(line)["id"] for line in lines]


def test_the_newest_are_remembered_and_each_that_is_not_finished(folder: Path) -> None:
    refuse(opened(folder), 5 * KEEP)
    opened(folder)

    assert remembered(folder) == ["cmd_long", "cmd_12", "cmd_13", "cmd_14"]


def test_an_agent_that_runs_on_forgets_too(folder: Path) -> None:
    refuse(opened(folder), 20 * KEEP)

    assert len(remembered(folder)) <= 2 * KEEP + 1


def test_an_order_that_took_long_is_remembered_from_its_end_on(folder: Path) -> None:
    agent = opened(folder)
    refuse(agent, KEEP)
    agent.recover()
    opened(folder)

    assert remembered(folder) == ["cmd_1", "cmd_2", "cmd_long"]
