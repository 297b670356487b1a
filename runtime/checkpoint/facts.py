"""What a checkpoint says of who made it: for a person who has two that should be alike."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from runtime.checkpoint.manifest import shown
from runtime.job import Job


def facts_of(job: Job) -> dict[str, Any]:
    """The job's shape, and what computes."""
    return {
        "job": job.name,
        "replicas": job.world_replicas,
        "ranks": job.ranks,
        "replica": job.replica,
        **computes(),
    }


def computes() -> dict[str, Any]:
    """The program that trains here, and the versions of what may give it other numbers."""
    return {
        "script": script(),
        "torch": version_of("torch"),
        "numpy": version_of("numpy"),
        "cuda": cuda(),
        "python": platform.python_version(),
    }


def changed_since(facts: Mapping[str, Any]) -> str:
    """What computes here otherwise than where these facts are from, as far as both say: one text
    for a person, "" if it is the same. They may be anybody's, and of any type."""
    found = []
    for what, here in computes().items():
        there = facts.get(what)
        if there and here and there != here:
            found.append(f"{what} was {shown(there)}, is {shown(here)}")
    return "; ".join(found)


def script() -> dict[str, str]:
    """The name and hash of the program that trains; empty where it is not a file."""
    path = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    if path is None or not path.is_file():
        return {}
    return {"name": path.name, "xxh3": xxhash.xxh3_128_hexdigest(path.read_bytes())}


def version_of(module: str) -> str | None:
    """Of a module that is imported."""
    found = sys.modules.get(module)
    return None if found is None else str(getattr(found, "__version__", None))


def cuda() -> str | None:
    torch = sys.modules.get("torch")
    return None if torch is None else torch.version.cuda
