"""`manage.py bmc NODE URL USER`: tell where a node's management controller answers."""

from __future__ import annotations

import getpass
import sys
from typing import Any
from urllib.parse import urlsplit

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions
from controlplane.fleet.models import Node
from workers import power


class Command(BaseCommand):
    help = (
        "Record the address and login of a node's BMC (Redfish), and try them. The password is "
        "asked for, or read from standard input; it is stored encrypted."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("node", help="its name, or CLUSTER/NAME where two clusters share it")
        parser.add_argument("url", help="as https://10.0.0.7")
        parser.add_argument("user")

    def handle(self, *_args: Any, **options: Any) -> None:
        node = self._node(options["node"])
        if urlsplit(options["url"]).scheme not in ("http", "https"):
            raise CommandError(f"{options['url']!r} is no address: it begins with https://")
        password = getpass.getpass("Password: ") if sys.stdin.isatty() else sys.stdin.readline()
        if not password.strip():
            raise CommandError("The password is empty; nothing was changed.")
        actions.set_bmc(SYSTEM, node.pk, options["url"], options["user"], password.strip())
        node.refresh_from_db()
        try:
            state = power.read(node)
        except power.PowerError as error:
            raise CommandError(f"Recorded, but it does not work: {error}") from error
        words = state.state.lower() if state.on or state.off else f"in between ({state.state})"
        self.stdout.write(f"{node.name}: its BMC answers; the node is {words}")

    def _node(self, name: str) -> Node:
        cluster, _, short = name.rpartition("/")
        nodes = Node.objects.filter(name=short)
        found = list(nodes.filter(cluster__name=cluster) if cluster else nodes)
        if len(found) != 1:
            raise CommandError(f"There are {len(found)} nodes {name!r}; name one as CLUSTER/NAME.")
        return found[0]
