"""Checkpoints: taken at a step's edge, written and verified in the background."""

from __future__ import annotations

from runtime.checkpoint.saver import Checkpointer

__all__ = ["Checkpointer"]
