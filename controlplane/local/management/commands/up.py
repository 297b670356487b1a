"""Starts the whole product on this machine and keeps it running."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandParser

from controlplane.local import runfile
from controlplane.local.up import Options, up


class Command(BaseCommand):
    help = "Start the whole product on this machine, with a simulated fleet. Ctrl-C stops it."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--nodes", type=int, default=int(os.environ.get("NODES", "8")), help="simulated (8)"
        )
        parser.add_argument(
            "--port", type=int, default=_port("DRYDOCK_PORT", 8000), help="of pages (8000)"
        )
        parser.add_argument(
            "--ingest-port", type=int, default=_port("DRYDOCK_INGEST_PORT", 8001), help="for agents"
        )
        parser.add_argument("--home", type=Path, help="where data goes (default: .drydock)")
        parser.add_argument("--no-fleet", action="store_true", help="the control plane only")
        parser.add_argument("--no-job", action="store_true", help="no demo training job")
        parser.add_argument("--ready-file", type=Path, help="touched once everything runs")

    def handle(self, *_args: Any, **options: Any) -> None:
        if options["home"] is not None and options["home"].resolve() != runfile.home():
            _begin_again(options["home"].resolve())
        status = up(
            Options(
                home=runfile.home(),
                nodes=options["nodes"],
                port=options["port"],
                ingest_port=options["ingest_port"],
                with_fleet=not options["no_fleet"],
                with_job=not options["no_job"],
                ready_file=options["ready_file"],
            )
        )
        sys.exit(status)


def _begin_again(home: Path) -> NoReturn:
    """The settings have been read for another home: start anew, from the caller's environment."""
    environment = {**runfile.callers_environment(), "DRYDOCK_HOME": str(home)}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)  # noqa: S606 - ourselves


def _port(variable: str, default: int) -> int:
    return int(os.environ.get(variable) or default)
