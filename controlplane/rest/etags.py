"""Tags of what was answered: "not changed" for readers, "changed under your hands" for writers.

A tag has two parts. The first covers what a decision rests on, the second also what moves all the
time (the last beat, a job's step). Readers compare both, writers (If-Match) the first only: a
node's heartbeat must not void an order to it. The tags are weak for that reason.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from django.http import HttpRequest

from controlplane.rest.problems import Problem

_TAG = re.compile(r'(?:W/)?"([^"]*)"')


def tag_of(body: Mapping[str, Any], volatile: Collection[str] = ()) -> str:
    """The tag of an object; the fields in `volatile` do not count for writers.

    One that is named as "report.at" is `at` in the object `report`.
    """
    return f'W/"{_digest(_without(body, volatile))}.{_digest(body)}"'


def is_unchanged(request: HttpRequest, tag: str) -> bool:
    """Whether the caller holds exactly this already (If-None-Match)."""
    header = request.headers.get("If-None-Match", "")
    return header.strip() == "*" or _opaque(tag) in _TAG.findall(header)


def demand_match(request: HttpRequest, tag: str) -> None:
    """412 if the caller names a tag (If-Match) and the object has changed since."""
    header = request.headers.get("If-Match")
    if header is None or header.strip() == "*":
        return
    steady = _opaque(tag).partition(".")[0]
    if steady not in [one.partition(".")[0] for one in _TAG.findall(header)]:
        raise Problem(
            "changed", "the object is not what If-Match names any more", headers={"ETag": tag}
        )


def _without(body: Mapping[str, Any], volatile: Collection[str], within: str = "") -> Any:
    return {
        name: _without(value, volatile, f"{within}{name}.") if isinstance(value, dict) else value
        for name, value in body.items()
        if f"{within}{name}" not in volatile
    }


def _opaque(tag: str) -> str:
    return tag.removeprefix("W/").strip('"')


def _digest(body: Any) -> str:
    return hashlib.blake2b(msgspec.json.encode(body), digest_size=9).hexdigest()
