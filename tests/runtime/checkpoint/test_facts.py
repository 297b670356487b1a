"""What computes otherwise than where a checkpoint was made is said in one text."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.checkpoint import facts
from runtime.checkpoint.facts import changed_since, computes

HERE = {
    "script": {"name": "train.py", "xxh3": "00"},
    "torch": "2.13.0", "numpy": None, "cuda": "13.0", "python": "3.11.7",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "computes", lambda: HERE)


@pytest.mark.parametrize(
    ("there", "changed"),
    [
        ({}, ""),
        (HERE, ""),
        ({**HERE, "torch": "2.12.1"}, "torch was '2.12.1', is '2.13.0'"),
        ({**HERE, "numpy": "2.4.0"}, ""),  # nobody imported it here
        (
            {"script": {"name": "old.py", "xxh3": "ff"}, "python": "3.12.1"},
            "script was {'name': 'old.py', 'xxh3': 'ff'}, "
            "is {'name': 'train.py', 'xxh3': '00'}; python was '3.12.1', is '3.11.7'",
        ),
    ],
)
def test_what_both_say_is_compared(there: dict[str, Any], changed: str) -> None:
    assert changed_since(there) == changed


def test_facts_that_anybody_wrote_make_one_short_line() -> None:
    said = changed_since({"script": "\x1b[2J\n" * 99, "torch": [[1] * 99], "cuda": {"name": "\n"}})

    assert said.startswith("script was ")
    assert said.isprintable()
    assert len(said) < 500


def test_what_computes_here_says_which_torch() -> None:
    assert computes()["torch"].startswith("2.")
