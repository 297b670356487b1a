"""Ingest that gives up nothing within a minute, for a test that holds it up on a slow machine."""

from __future__ import annotations

from controlplane.ingest.app import app

# The models of what follows can be imported once `app` has set Django up.
# isort: split
from controlplane.ingest import writer

__all__ = ["app"]

writer.ANSWER_S = writer.CLOSE_S = 60.0
writer.LOCK_TIMEOUT_MS = writer.STATEMENT_TIMEOUT_MS = 60_000
