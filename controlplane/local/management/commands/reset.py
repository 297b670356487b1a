"""Stops the product of this machine and deletes its data."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from controlplane.local import runfile
from controlplane.local.down import down, forget


class Command(BaseCommand):
    help = "Stop the product that `up` started here and delete all that it knew."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--yes", action="store_true", help="do not ask")

    def handle(self, *_args: Any, **options: Any) -> None:
        home = runfile.home()
        if not home.exists():
            forget(home)  # what an earlier one was not let delete
            self.stdout.write(f"nothing to delete: {home} does not exist")
            return
        self.stdout.write(f"This deletes {home}: database, checkpoints, keys, logs.")
        if not options["yes"] and input("Type yes to go on: ").strip() != "yes":
            sys.exit("Nothing was deleted.")
        if not down(home, self.stdout.write):
            sys.exit(1)
        forget(home)
        self.stdout.write("deleted")
