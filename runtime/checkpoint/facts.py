"""What a checkpoint says of who made it: for a person who has two that should be alike."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import xxhash

from runtime.job import Job


def facts_of(job: Job) -> dict[str, Any]:
    """The job's shape, and the versions of what computes."""
    return {
        "job": job.name,
        "replicas": job.world_replicas,
        "ranks": job.ranks,
        "replica": job.replica,
        "script": script(),
        "torch": version_of("torch"),
        "numpy": version_of("numpy"),
        "cuda": cuda(),
        "python": platform.python_version(),
    }


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
