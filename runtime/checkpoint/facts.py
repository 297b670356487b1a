"""What a checkpoint says of who made it: for a person who has two that should be alike."""

from __future__ import annotations

import functools
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from runtime.checkpoint.manifest import shown
from runtime.job import Job

MOST_MODULES = 1000  # that are hashed, and of each so many bytes: milliseconds, usually
MOST_BYTES = 1 << 18
INSTALLED = frozenset({"site-packages", "dist-packages"})
OURS = __name__.partition(".")[0]


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
        "own_modules": own_modules(),
        "torch": version_of("torch"),
        "numpy": version_of("numpy"),
        "cuda": cuda(),
        "python": platform.python_version(),
    }


def saved_when(facts: Mapping[str, Any]) -> str:
    """When it was saved, as far as they say so: they may be anybody's."""
    try:
        return f"{datetime.fromtimestamp(facts['at'], UTC):%Y-%m-%d %H:%M:%S}Z"
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "-"


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
    path = _script()
    if path is None:
        return {}
    return {"name": path.name, "xxh3": xxhash.xxh3_128_hexdigest(path.read_bytes())}


@functools.cache
def own_modules() -> dict[str, Any]:
    """How many modules of the user's own are imported, and one hash of them all, of their names and
    what is in them; empty if there are none. Looked up once: what is imported later must not pass
    for a change, for it is not there yet when a checkpoint is looked for."""
    found = dict(_users_own())
    if not found:
        return {}
    hashed = xxhash.xxh3_128()
    for name, file in sorted(found.items())[:MOST_MODULES]:
        try:
            with Path(file).open("rb") as source:
                size, start = os.fstat(source.fileno()).st_size, source.read(MOST_BYTES)
        except OSError:  # it was imported from there, and is gone
            continue
        hashed.update(f"{name}\0{size}\0".encode())
        hashed.update(start)
    return {"files": len(found), "xxh3": hashed.hexdigest()}


def _script() -> Path | None:
    """The program's file."""
    path = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    return path if path is not None and path.is_file() else None


def _users_own() -> Iterator[tuple[str, str]]:
    """The names and files of modules that are neither Python's, nor of an installed package, nor
    ours, wherever they lie: beside the script, in a folder of PYTHONPATH, or as a package that is
    installed to be edited. The script itself, which has other names too, is told of apart."""
    python = f"{sysconfig.get_path('stdlib')}/"
    for name, module in list(sys.modules.items()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if not isinstance(file, str) or file.startswith(python):
            continue
        whose = name.partition(".")[0]
        if whose not in ("__main__", "__mp_main__", OURS) and INSTALLED.isdisjoint(
            Path(file).parts
        ):
            yield name, file


def version_of(module: str) -> str | None:
    """Return the version of an imported module; None if it is not imported."""
    found = sys.modules.get(module)
    return None if found is None else str(getattr(found, "__version__", None))


def cuda() -> str | None:
    """Return the CUDA version that torch was built with, as "12.8".

    The result is None if torch is not imported here, or was built without CUDA.
    """
    torch = sys.modules.get("torch")
    return None if torch is None else torch.version.cuda
