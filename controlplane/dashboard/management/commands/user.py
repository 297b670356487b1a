"""`manage.py user NAME`: let a person in, or change their role.

`--role ROLE [--cluster CLUSTER]` gives a role; `--superuser` all of them, and the care for people,
and `--no-superuser` takes those back.
"""

from __future__ import annotations

import secrets
from argparse import BooleanOptionalAction
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.accounts import actions
from controlplane.accounts.choices import Role
from controlplane.accounts.models import SYSTEM, User
from controlplane.errors import Conflict
from controlplane.fleet.models import Cluster


class Command(BaseCommand):
    help = (
        "Give a person a role in one cluster, or in all, or make them a superuser; a new one gets"
        " a password, shown once."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")
        given = parser.add_mutually_exclusive_group(required=True)
        given.add_argument("--role", choices=Role.values)
        given.add_argument(
            "--superuser",
            action=BooleanOptionalAction,
            help="every role in every cluster; makes people, sees and revokes everybody's tokens;"
            " or no longer, but for the roles that they were given",
        )
        parser.add_argument("--cluster", help="its name; without it the role holds in all clusters")

    def handle(self, *_args: Any, **options: Any) -> None:
        name, superuser = options["name"], options["superuser"]
        if superuser is not None and options["cluster"] is not None:
            raise CommandError("argument --cluster: not allowed with argument --superuser")
        cluster_id = self._cluster_id(options["cluster"])
        user = User.objects.filter(username=name).first()
        if user is None and superuser is False:
            raise CommandError(f"There is no person {name!r}.")
        user = user or self._made(name, bool(superuser))
        if superuser is not None:
            self._set_superuser(user, superuser)
        else:
            grant = actions.grant_role(SYSTEM, user, Role(options["role"]), cluster_id)
            self.stdout.write(str(grant))

    def _set_superuser(self, user: User, superuser: bool) -> None:
        try:
            actions.set_superuser(SYSTEM, user, superuser)
        except Conflict as conflict:
            raise CommandError(conflict.detail) from conflict
        told = "a superuser: every role in every cluster" if superuser else "no superuser"
        self.stdout.write(f"{user} is {told}")

    def _made(self, name: str, superuser: bool) -> User:
        password = secrets.token_urlsafe(12)
        try:
            user = actions.create_user(SYSTEM, name, password, superuser=superuser)
        except Conflict as conflict:
            raise CommandError(f"argument name: {conflict.detail}") from conflict
        self.stdout.write(f"password of {user}: {password}")
        return user

    def _cluster_id(self, name: str | None) -> str | None:
        if name is None:
            return None
        cluster = Cluster.objects.filter(name=name).first()
        if cluster is None:
            known = ", ".join(Cluster.objects.values_list("name", flat=True)) or "none"
            raise CommandError(f"There is no cluster {name!r}; there are: {known}.")
        return cluster.pk
