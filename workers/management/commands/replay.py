"""`manage.py replay`: past decisions under the rules of today."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from workers.replay import Replayed, replay, stored


class Command(BaseCommand):
    help = "Judge stored signals by the rules of today, and show which decisions would change."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--since", required=True, metavar="WHEN", help="2026-11-20T00:00 (UTC), or 7d, or 12h"
        )
        parser.add_argument("--node", default="", metavar="NAME", help="of this node alone")
        parser.add_argument("--all", action="store_true", help="also those that stay as they are")
        parser.add_argument("--json", action="store_true", help="one JSON value per line")

    def handle(self, *_args: Any, **options: Any) -> None:
        since = moment(str(options["since"]))
        judged = changed = 0
        for one in replay(stored(since, str(options["node"]))):
            judged += 1
            changed += one.differs
            if one.differs or options["all"]:
                self.stdout.write(as_json(one) if options["json"] else as_text(one))
        if not options["json"]:
            word = "decision" if judged == 1 else "decisions"
            self.stdout.write(
                f"{judged} {word} since {since:%Y-%m-%d %H:%M} UTC, {changed} would change"
            )


def moment(text: str) -> datetime:
    """Raises CommandError."""
    units = {"d": "days", "h": "hours", "m": "minutes"}
    if text[:-1].isdigit() and text[-1:] in units:
        return timezone.now() - timedelta(**{units[text[-1]]: int(text[:-1])})
    try:
        found = parse_datetime(text if "T" in text or " " in text else f"{text}T00:00")
    except ValueError as error:
        raise CommandError(f"--since {text}: {error}") from error
    if found is None:
        raise CommandError(f"--since {text}: give a time as 2026-11-20T00:00, or 7d, 12h, 30m")
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def as_text(one: Replayed) -> str:
    node = one.signal.node.name if one.signal.node else ""
    code = one.verdict.code if one.verdict else (one.failure.code if one.failure else "")
    arrow = f"{one.was} -> {one.now}" if one.differs else f"{one.now}, as it was"
    rule = f" ({one.verdict.rule})" if one.verdict else ""
    return f"{one.signal.observed_at:%Y-%m-%d %H:%M:%S} {node} {code}: {arrow}{rule}"


def as_json(one: Replayed) -> str:
    return json.dumps(
        {
            "signal": one.signal.pk,
            "failure": one.failure.pk if one.failure else None,
            "node": one.signal.node.name if one.signal.node else None,
            "at": one.signal.observed_at.isoformat(),
            "raw": one.signal.raw,
            "was": one.was,
            "now": one.now,
            "rule": one.verdict.rule if one.verdict else None,
            "why": one.verdict.summary if one.verdict else None,
        }
    )
