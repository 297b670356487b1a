"""The file of a simulated machine's cards under several writers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from node_agent import cards
from tests.node_agent.fleet import DEADLINE_S, REPOSITORY

WRITER = """
import sys
from pathlib import Path
from node_agent import cards
for number in range(20):
    cards.edit(Path(sys.argv[1]), lambda fitted: [*fitted, {"uuid": f"{sys.argv[2]}-{number}"}])
"""


def test_no_change_of_several_writers_is_lost(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name], cwd=REPOSITORY)
        for name in ("a", "b", "c")
    ]
    codes = [writer.wait(DEADLINE_S) for writer in writers]

    fitted = cards.edit(tmp_path, lambda fitted: fitted)

    assert codes == [0, 0, 0]
    assert len({card["uuid"] for card in fitted}) == 60


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    cards.edit(tmp_path, lambda _: [{"uuid": "GPU-a"}])

    def refuse(_: cards.Cards) -> cards.Cards:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cards.edit(tmp_path, refuse)

    assert cards.edit(tmp_path, lambda fitted: fitted) == [{"uuid": "GPU-a"}]
