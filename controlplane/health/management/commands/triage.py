"""`manage.py triage`: what kernel lines mean, as the rules of today judge them."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.health.catalogue import CatalogueError, catalogue
from node_agent.collectors.xid import LostGpu, SxidLine, XidLine
from workers.triage import Catalogue
from workers.triage.logs import Judged, judge_log

#: Begins another machine's log.
ANOTHER_LOG = "# log"


class Command(BaseCommand):
    help = """Judge kernel lines, one JSON value per line of a file: null for what is nothing.
    The file is one machine's log; a line "# log" begins another's. Touches no database."""
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--lines", required=True, metavar="FILE", help="- for standard input")

    def handle(self, *_args: Any, **options: Any) -> None:
        path = str(options["lines"])
        try:
            data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
            known = catalogue()
        except OSError as error:
            raise CommandError(f"--lines {path}: {error.strerror}") from error
        except CatalogueError as error:
            raise CommandError(str(error)) from error
        text = data.decode(errors="replace")
        lines = text.removesuffix("\n").split("\n") if text else []
        for found in judged(lines, known):
            print(json.dumps(None if found is None else described(found)))


def judged(lines: list[str], known: Catalogue) -> Iterator[Judged | None]:
    """Each line of one log after another."""
    begin = 0
    for number, line in enumerate([*lines, ANOTHER_LOG]):
        if line.startswith(ANOTHER_LOG):
            yield from judge_log(lines[begin:number], known)
            if number < len(lines):
                yield None
            begin = number + 1


def described(found: Judged) -> dict[str, Any]:
    """As JSON."""
    parsed, verdict = found.parsed, found.verdict
    return {
        "xid": parsed.code if isinstance(parsed, XidLine) else None,
        "sxid": parsed.code if isinstance(parsed, SxidLine) else None,
        "pci": verdict.pci or None,
        "mig": (parsed.mig or None) if isinstance(parsed, XidLine) else None,
        "lost_gpu": isinstance(parsed, LostGpu),
        "class": verdict.fault,
        "action": verdict.action,
        "follow_up": verdict.follow_up or None,
        "urgency": verdict.urgency,
        "rule": verdict.rule,
        "why": verdict.summary,
    }
