"""`manage.py audit verify | tail | export`: prove that the audit trail is intact, or read it.

Reads everything and changes nothing, but for one row that says the trail was verified.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.accounts import actions, chain
from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.fleet.state_audit import StateMismatch, state_mismatches


class Command(BaseCommand):
    help = "Verify the audit trail, or print it as JSON lines."

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        verify = verbs.add_parser(
            "verify", help="walk the chain; exit status 1 if anything was edited"
        )
        verify.add_argument("--json", action="store_true", help="answer with one JSON object")
        verify.add_argument(
            "--head",
            metavar="POSITION:HASH",
            help="a head noted outside the database (event audit.head of the keeper's log): finds"
            " an end that was cut off",
        )
        verify.add_argument(
            "--no-record", action="store_true", help="write nothing, as on a read-only replica"
        )
        tail = verbs.add_parser("tail", help="the newest rows, oldest of them first")
        tail.add_argument("-n", type=int, default=20, help="how many (20)")
        export = verbs.add_parser("export", help="all chained rows in the order of the chain")
        export.add_argument("--after", type=int, default=0, help="begin after this position")

    def handle(self, *_args: Any, **options: Any) -> None:
        match options["verb"]:
            case "verify":
                self._verify(options)
            case "tail":
                newest = AuditEvent.objects.order_by("-pk")[: options["n"]]
                self._print(reversed(newest))
            case "export":
                chained = AuditEvent.objects.filter(position__gt=options["after"])
                self._print(chained.order_by("position").iterator(chunk_size=chain.CHUNK))

    def _verify(self, options: dict[str, Any]) -> None:
        report = chain.verify(_head(options["head"]))
        mismatched = state_mismatches()
        if not options["no_record"]:
            actions.record_verification(SYSTEM, report, strays=len(mismatched))
        if options["json"]:
            told = report.as_dict() | {"ok": report.ok and not mismatched}
            told["strays"] = [asdict(node) for node in mismatched]
            self.stdout.write(json.dumps(told))
        else:
            self._tell(report, mismatched)
        if not report.ok or mismatched:
            raise SystemExit(1)

    def _tell(self, report: chain.Report, mismatched: list[StateMismatch]) -> None:
        for problem in report.problems:
            where = "unchained" if problem.position is None else f"position {problem.position}"
            row = "" if problem.event_id is None else f", row {problem.event_id}"
            self.stdout.write(f"{where}{row}: {problem.what}")
        if report.problem_count > len(report.problems):
            self.stdout.write(f"… {report.problem_count} problems in all")
        for node in mismatched:
            self.stdout.write(f"node {node.name}: {node.what}")
        verdict = "intact" if report.ok else "BROKEN"
        self.stdout.write(
            f"The chain of {report.rows} rows is {verdict}; {report.unchained} not chained yet;"
            f" {len(mismatched)} nodes whose state does not match their events."
        )
        self.stdout.write(f"head {report.head}")

    def _print(self, events: Iterable[AuditEvent]) -> None:
        for event in events:
            values = {name: getattr(event, name) for name in (*chain.COVERED, "position", "hash")}
            self.stdout.write(json.dumps(values, default=lambda moment: moment.isoformat()))


def _head(text: str | None) -> chain.Head | None:
    if text is None:
        return None
    position, _, hashed = text.partition(":")
    if not position.isdecimal() or len(hashed) != len(chain.GENESIS):
        raise CommandError("--head takes POSITION:HASH as the keeper's log tells them")
    return chain.Head(int(position), hashed)
