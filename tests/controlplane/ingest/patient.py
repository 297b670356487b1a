"""Ingest that gives up nothing within a minute, and carries no order again, for a test on a slow
machine."""

from __future__ import annotations

from controlplane.ingest.app import app

# The models of what follows can be imported once `app` has set Django up.
# isort: split
from controlplane.ingest import polls, writer

__all__ = ["app"]

polls.CARRY_AGAIN_S = 60.0
writer.ANSWER_S = writer.CLOSE_S = 60.0
writer.LOCK_TIMEOUT_MS = writer.STATEMENT_TIMEOUT_MS = 60_000
