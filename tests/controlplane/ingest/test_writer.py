"""In which order ingest writes what came at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from controlplane.ingest import writer as module
from controlplane.ingest.writer import Writer


def test_rows_of_jobs_are_locked_in_one_order_and_each_job_s_messages_in_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes that took them as they came would wait for each other."""
    came = [("b", 1), ("", 2), ("a", 3), ("b", 4)]
    written: list[tuple[str, int]] = []

    def commit(batch: Sequence[Any]) -> tuple[list[None], list[Any]]:
        return [item.write() for item in batch], []

    async def submit_all() -> None:
        writer = Writer()
        await asyncio.gather(
            *(writer.submit(partial(written.append, one), job=one[0]) for one in came)
        )
        await writer.close()

    monkeypatch.setattr(module, "_commit", commit)
    monkeypatch.setattr(module, "MAX_BATCH", len(came))
    monkeypatch.setattr(module, "GATHER_S", 60.0)
    asyncio.run(submit_all())

    assert written == [("", 2), ("a", 3), ("b", 1), ("b", 4)]
