"""Writes about people, and the audit row that every other action writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction

from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor, AuditEvent, Grant, User


def audit(
    actor: Actor,
    verb: str,
    object_type: str,
    object_id: str,
    *,
    cluster_id: str | None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    reason: str = "",
) -> None:
    """Record one write. Called inside the transaction of the write itself."""
    AuditEvent.objects.create(
        actor_kind=actor.kind,
        actor_id=actor.id,
        request_id=actor.request_id,
        cluster_id=cluster_id,
        verb=verb,
        object_type=object_type,
        object_id=object_id,
        before=dict(before or {}),
        after=dict(after or {}),
        reason=reason,
    )


@transaction.atomic
def create_user(
    actor: Actor, username: str, password: str, *, email: str = "", superuser: bool = False
) -> User:
    """Add a person who may log in but sees nothing until granted a role (or superuser)."""
    user = User.objects.create_user(username, email, password, is_superuser=superuser)
    audit(
        actor,
        "user.create",
        "user",
        str(user.pk),
        cluster_id=None,
        after={"username": username, "superuser": superuser},
    )
    return user


@transaction.atomic
def grant_role(actor: Actor, user: User, role: Role, cluster_id: str | None) -> Grant:
    """Give a role in one cluster (everywhere if None), in place of the one there was."""
    grant, _ = Grant.objects.update_or_create(
        user=user, cluster_id=cluster_id, defaults={"role": role}
    )
    audit(
        actor,
        "user.grant",
        "user",
        str(user.pk),
        cluster_id=cluster_id,
        after={"role": role, "cluster": cluster_id},
    )
    return grant
