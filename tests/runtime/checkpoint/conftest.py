"""What the tests of a rank's checkpoints have at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.checkpoint.one_rank import OneRank


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[OneRank]:
    one = OneRank(tmp_path)
    yield one
    one.saver.finish()


@pytest.fixture
def on_two_tiers(tmp_path: Path) -> Iterator[OneRank]:
    one = OneRank(tmp_path, own_disk=True)
    yield one
    one.saver.finish()
