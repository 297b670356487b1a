"""`manage.py scenario NAME`: break one thing of the running product, measure its mending."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import OperationalError, connection

from controlplane.local import scenarios
from workers.power import PowerError


class Command(BaseCommand):
    help = "Play one failure against the running product and tell what happened."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", choices=scenarios.NAMES)
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            connection.ensure_connection()
            result = scenarios.play(options["name"], self._say)
        except OperationalError:
            result = self._without_result(options, "Drydock does not run here: `make up` first.")
        except (scenarios.ScenarioError, PowerError) as error:
            result = self._without_result(options, str(error))
        if options["json"]:
            self.stdout.write(json.dumps(asdict(result)))
        else:
            self._print(result)
        if not result.ok:
            sys.exit(1)

    def _without_result(self, options: dict[str, Any], problem: str) -> scenarios.Result:
        self._say(problem)
        return scenarios.Result(scenario=options["name"], problems=[problem])

    def _say(self, line: str) -> None:
        self.stderr.write(line)

    def _print(self, result: scenarios.Result) -> None:
        for name, seconds in sorted(result.seconds.items(), key=lambda item: item[1] or 0.0):
            shown = "never" if seconds is None else f"{seconds:8.2f} s"
            self.stdout.write(f"  {name:<18}{shown}")
        if result.longest_gap_s is not None:
            self.stdout.write(f"  longest gap       {result.longest_gap_s:8.2f} s between commits")
        self.stdout.write(
            "".join(f"  samples {k:<10}{n:8}\n" for k, n in result.samples.items()), ending=""
        )
        for name, fact in result.facts.items():
            self.stdout.write(f"  {name:<18}{fact}")
        for problem in result.problems:
            self.stdout.write(f"  problem: {problem}")
        self.stdout.write("all came true" if result.ok else "NOT all came true")
