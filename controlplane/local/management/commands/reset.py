"""Stops the product of this machine and deletes its data, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from controlplane.local import runfile
from controlplane.local.down import down, forget, forget_earlier
from controlplane.local.up import MARKER, is_home


class Command(BaseCommand):
    help = "Stop the product that `up` started here and delete all that it knew."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--yes", action="store_true", help="do not ask")

    def handle(self, *_args: Any, **options: Any) -> None:
        home = runfile.home()
        to_forget = is_home(home)
        if to_forget:
            self.stdout.write(
                f"This deletes what Drydock keeps in {home}: database, checkpoints, keys, logs."
            )
            if not options["yes"] and input("Type yes to go on: ").strip() != "yes":
                sys.exit("Nothing was deleted.")
        if not down(home, self.stdout.write):
            sys.exit(1)
        forget_earlier(home)
        if to_forget:
            self._forget(home)
        else:
            self.stdout.write(
                f"nothing to delete: Drydock has not run in {home}. If it has, say so with "
                f"`touch {home / MARKER}`, and try again."
            )

    def _forget(self, home: Path) -> None:
        left = forget(home)
        self.stdout.write("deleted")
        if left:
            words = ", ".join(f"{name} ({why})" for name, why in left.items())
            self.stdout.write(f"left in {home}: {words}")
