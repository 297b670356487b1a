"""Checks a sample ledger: python -m runtime.ledger PATH. Exit status 0 if it is whole.

PATH is a checkpoint, a folder of checkpoints, or a job's state folder; of several checkpoints the
newest whole one is taken. PATH may also be the JSON that `GET /api/v1/jobs/{id}/ledger` answered,
as several files if it came in several pages. Exit status 1: the ledger is not whole. Exit status 2:
there is no ledger to be read.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.checkpoint import store
from runtime.checkpoint.manifest import shown
from runtime.image import Damaged
from runtime.ledger.check import Entry, Report, Weights, check, shards_of
from runtime.ledger.record import SampleLedger

UNREADABLE = 2
#: What something that only looks like a ledger may come to.
MALFORMED = (
    LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError,
    struct.error,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the ledger and print the report; exit status 0: whole, 1: not whole, 2: unreadable.

    With --step the shards of that step are printed instead, and the status is 0.
    """
    asked = _asked(arguments)
    try:
        entries, weights = read(asked.path)
        if asked.step is not None:
            shards = shards_of(entries, asked.step)
            print(json.dumps(shards) if asked.json else _shards_in_words(shards))  # noqa: T201
            return 0
        report = check(entries, weights)
    except (OSError, ValueError, Damaged, *MALFORMED) as error:
        told = isinstance(error, OSError | ValueError | Damaged)
        named = str(error) if told else f"no ledger: {shown(error)} is missing or wrong"
        print(f"{' '.join(map(str, asked.path))}: {named}", file=sys.stderr)  # noqa: T201
        if asked.json:
            print(json.dumps({"error": named}))  # noqa: T201
        return UNREADABLE
    found = {"whole": report.whole, **asdict(report)}
    print(json.dumps(found) if asked.json else in_words(report))  # noqa: T201
    return 0 if report.whole else 1


def read(paths: Sequence[Path]) -> tuple[list[Entry], Weights | None]:
    """The entries that a checkpoint or files hold, and the weights of the checkpoint.

    Raises OSError, ValueError or Damaged if there is nothing of that kind, and ValueError if of
    several pages the last one is missing: what they hold would look whole.
    """
    if len(paths) == 1 and paths[0].is_dir():
        return _of_checkpoint(paths[0])
    pages = [_page(path) for path in paths]
    if all(following for _entries, following in pages):
        raise ValueError(f"there are more pages: give them too, from {pages[-1][1]} on")
    return [entry for entries, _following in pages for entry in entries], None


def _page(path: Path) -> tuple[list[Entry], str | None]:
    """Its entries, and where the next page is, if it is one of several."""
    told = json.loads(path.read_text())
    return (told["results"], told.get("next")) if isinstance(told, dict) else (told, None)


def in_words(report: Report) -> str:
    """A table of the passes over the data, then what is wrong."""
    lines = [f"steps {report.step_from} to {report.step_to}"]
    for one in report.epochs:
        counts = {
            "trained once": one.trained_once, "to come": one.to_come, "left out": one.left_out,
            "lost": one.lost, "duplicated": one.duplicated, "dropped": one.dropped,
            "unknown": one.unknown,
        }  # fmt: skip
        always = ("trained once", "lost", "duplicated")
        told = [f"{count:,} {what}" for what, count in counts.items() if count or what in always]
        who = [f"{replica}: {count:,}" for replica, count in sorted(one.computed.items())]
        lines.append(f"data epoch {one.epoch}, {one.samples:,} samples: {', '.join(told)}")
        lines.append(f"  computed by replica {', '.join(who) or '(not known)'}")
    lines += report.notes
    lines += report.problems
    lines.append("whole" if report.whole else "NOT WHOLE")
    return "\n".join(lines)


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m runtime.ledger", description=__doc__)
    parser.add_argument("path", type=Path, nargs="+")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--step", type=int, help="print this step's shards, their ids, and who")
    return parser.parse_args(arguments)


def _of_checkpoint(path: Path) -> tuple[list[Entry], Weights]:
    staged = next(filter(None, map(store.verified, store.found_in(path))), None)
    if staged is None:
        raise ValueError("there is no whole checkpoint in this folder")
    from runtime.snapshot import state_of  # and with it torch, which other files do not need

    state: dict[str, Any] = state_of(staged)
    ledger = SampleLedger(state["batches"])
    ledger.load_state_dict(state["ledger"])
    # What may be saved before a step's edge says which of its shards were taken.
    weights = Weights(step=int(state["step"]), ahead="taken" in state)
    return [asdict(entry) for entry in ledger.since()], weights


def _shards_in_words(shards: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"shard {one['shard']}: {one['fate']}"
        + ("" if one["replica"] is None else f" by replica {one['replica']}")
        + f": {' '.join(map(str, one['ids']))}"
        for one in shards
    )


if __name__ == "__main__":
    sys.exit(main())
