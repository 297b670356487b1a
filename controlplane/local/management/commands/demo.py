"""The parts of `up` that need the database. Run by `up`, in this order."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandParser

from controlplane.local import demo, fleet, runfile
from controlplane.local.up import say


class Command(BaseCommand):
    help = "Used by `up`: prepare the database, admit the simulated fleet, start the demo job."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("part", choices=["prepare", "admit", "job"])
        parser.add_argument("--nodes", type=int, required=True)

    def handle(self, *_args: Any, **options: Any) -> None:
        home, count = runfile.home(), options["nodes"]
        nodes = fleet.plan(home, count) if count else []
        try:
            if options["part"] == "prepare":
                call_command("migrate", verbosity=0, interactive=False)
                demo.ensure_admin(home)
                demo.choose_nodes(home, nodes)
                demo.resume()
                demo.believe_all_alive()
                demo.ensure_clusters(nodes)
            elif options["part"] == "admit":
                demo.admit_fleet(nodes, say)
            else:
                demo.start_job(say)
        except demo.DemoError as error:
            sys.exit(str(error))
