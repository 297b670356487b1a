"""Stops the product of this machine, also what a killed run has left."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand

from controlplane.local import runfile
from controlplane.local.down import down


class Command(BaseCommand):
    help = "Stop the product that `up` started here. Its data stays."
    requires_system_checks = []

    def handle(self, *_args: Any, **_options: Any) -> None:
        sys.exit(0 if down(runfile.home(), self.stdout.write) else 1)
