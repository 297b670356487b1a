"""`manage.py user NAME --role ROLE [--cluster CLUSTER]`: let a person in, or change their role."""

from __future__ import annotations

import secrets
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.accounts import actions
from controlplane.accounts.choices import Role
from controlplane.accounts.models import SYSTEM, User
from controlplane.fleet.models import Cluster


class Command(BaseCommand):
    help = "Give a person a role in one cluster, or in all; a new one gets a password, shown once."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")
        parser.add_argument("--role", required=True, choices=Role.values)
        parser.add_argument("--cluster", help="its name; without it the role holds in all clusters")

    def handle(self, *_args: Any, **options: Any) -> None:
        cluster_id = self._cluster_id(options["cluster"])
        user = User.objects.filter(username=options["name"]).first()
        if user is None:
            password = secrets.token_urlsafe(12)
            user = actions.create_user(SYSTEM, options["name"], password)
            self.stdout.write(f"password of {user}: {password}")
        grant = actions.grant_role(SYSTEM, user, Role(options["role"]), cluster_id)
        self.stdout.write(str(grant))

    def _cluster_id(self, name: str | None) -> str | None:
        if name is None:
            return None
        cluster = Cluster.objects.filter(name=name).first()
        if cluster is None:
            known = ", ".join(Cluster.objects.values_list("name", flat=True)) or "none"
            raise CommandError(f"There is no cluster {name!r}; there are: {known}.")
        return cluster.pk
