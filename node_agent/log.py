"""Structured logs: one JSON line per event on stderr. Never a formatted sentence, never a secret.

Standard library only, so that the chassis can use it too.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_threshold = LEVELS["info"]


def set_level(level: str) -> None:
    """Drop events below `level`, one of LEVELS."""
    global _threshold
    _threshold = LEVELS[level]


def log(event: str, level: str = "info", **fields: Any) -> None:
    """Write one event with its fields. A field that is not JSON is written as its text. What
    cannot be written, to a full disk or a closed pipe, is lost."""
    if LEVELS[level] < _threshold:
        return
    line = {"at": round(time.time(), 3), "level": level, "event": event, **fields}
    with contextlib.suppress(OSError):
        sys.stderr.write(json.dumps(line, default=str) + "\n")
        sys.stderr.flush()
