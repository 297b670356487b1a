"""Checkpoints: copied at a step's edge, written and verified by a process of their own.

Only `Checkpointer` needs torch; it is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.checkpoint.saver import Checkpointer

__all__ = ["Checkpointer"]


def __getattr__(name: str) -> Any:
    if name != "Checkpointer":
        raise AttributeError(f"module 'runtime.checkpoint' has no attribute {name!r}")
    from runtime.checkpoint.saver import Checkpointer

    return Checkpointer
