"""Ingest with a fault of its own: the task that hears announcements dies of the first one."""

from __future__ import annotations

from controlplane.ingest import polls
from controlplane.ingest.app import app

__all__ = ["app"]


def _unforeseen(data: bytes | str) -> str:
    raise RuntimeError("a fault of ours")


polls._text = _unforeseen
