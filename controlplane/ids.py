"""One scheme for identifiers: a type's prefix, then 26 characters that sort by time of making."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u


def new_id(prefix: str) -> str:
    """A fresh id such as `inc_01hz…`: 48 bits of milliseconds, then 80 random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    digits = [_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5)]
    return f"{prefix}_{''.join(digits)}"
