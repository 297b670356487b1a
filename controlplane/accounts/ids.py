"""Ids of people as audit rows and timelines hold them: text, where it is a person's a number."""

from __future__ import annotations


def person_id(text: str) -> int | None:
    """The id that the text is, or None: a node's or a job's id is no person's."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None
