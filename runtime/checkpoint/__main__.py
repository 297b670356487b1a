"""Looks at checkpoints: python -m runtime.checkpoint ls|inspect|verify PATH.

PATH is a checkpoint, a folder of them, or a job's state folder. Exit status: 0 if all is well, 1 if
something is damaged, 2 if there is nothing to look at. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runtime.checkpoint import store
from runtime.checkpoint.manifest import Manifest
from runtime.image import Damaged

NOTHING = 2
#: One line for a person, beside the object for a program.
Answer = tuple[dict[str, Any], list[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    asked = _asked(arguments)
    try:
        paths = store.found_in(asked.path)
    except Damaged as error:
        print(error, file=sys.stderr)  # noqa: T201
        return NOTHING
    verbs: dict[str, Callable[[Path], Answer]] = {"ls": ls, "inspect": inspect, "verify": verify}
    well = True
    found = []
    for path in paths if asked.verb != "inspect" else paths[:1]:
        answer, lines = verbs[asked.verb](path)
        well &= not answer.get("findings")
        found.append(answer)
        if not asked.json:
            print("\n".join(lines), flush=True)  # noqa: T201
    if asked.json:
        print(json.dumps(found))  # noqa: T201
    return 0 if well else 1


def ls(path: Path) -> Answer:
    """What its manifest says."""
    try:
        manifest = store.manifest_of(path)
    except Damaged as error:
        return {"path": str(path), "findings": [str(error)]}, [f"{path.name:<16} {error}"]
    size = sum(part.bytes for part in manifest.parts)
    answer = {
        "path": str(path), "step": manifest.step, "bytes": size, "ranks": len(manifest.parts),
        "digest": manifest.digest, "facts": manifest.facts, "findings": [],
    }  # fmt: skip
    made = at(manifest)
    line = f"{path.name:<16} {made}  {size:>15,} bytes  {len(manifest.parts)} ranks"
    return answer, [f"{line}  {manifest.digest}"]


def inspect(path: Path) -> Answer:
    """What is in it, tensor by tensor."""
    try:
        manifest = store.manifest_of(path)
        parts = [store.part_of(path, manifest, one.rank) for one in manifest.parts]
    except Damaged as error:
        return {"path": str(path), "findings": [str(error)]}, [str(error)]
    tensors = [{"rank": part.rank, **vars(piece)} for part in parts for piece in part.table.pieces]
    answer = {
        "path": str(path), "step": manifest.step, "digest": manifest.digest,
        "facts": manifest.facts, "tensors": tensors, "findings": [],
    }  # fmt: skip
    lines = [f"step {manifest.step}, saved {at(manifest)}, digest {manifest.digest}"]
    lines += [f"{name}: {value}" for name, value in manifest.facts.items()]
    lines += [
        f"rank {one['rank']}  {one['bytes']:>13,} bytes  {one['dtype']:<9} "
        f"{'x'.join(map(str, one['shape'])) or 'scalar':<14} {one['name'].removeprefix('.')}"
        for one in tensors
    ]
    return answer, lines


def verify(path: Path) -> Answer:
    """Read every byte of it."""
    findings = [str(finding) for finding in store.verify(path)]
    lines = [f"{path.name:<16} {'DAMAGED' if findings else 'well'}"]
    lines += [f"  {finding}" for finding in findings]
    return {"path": str(path), "findings": findings}, lines


def at(manifest: Manifest) -> str:
    """When it was saved, as far as it says so."""
    when = manifest.facts.get("at")
    return "-" if when is None else f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M:%S}Z"


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m runtime.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    helps = {
        "ls": "list checkpoints, newest first",
        "inspect": "who made the newest one, and every tensor in it",
        "verify": "read every byte again; name what is damaged",
    }
    for verb, text in helps.items():
        one = verbs.add_parser(verb, help=text)
        one.add_argument("path", type=Path)
        one.add_argument("--json", action="store_true", help="print one list of objects")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends with `head`
    sys.exit(main())
