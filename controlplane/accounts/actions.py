"""Writes about people and their tokens, and the audit row that every other action writes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.utils import timezone

from controlplane import change_tracking, crypto
from controlplane.accounts import chain
from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor, ApiToken, AuditEvent, Grant, User
from controlplane.errors import Conflict

MAX_TOKEN_DAYS = 366
_PREFIX_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_CHAIN_LOCK = 0x6472_7964_6175  # "drydau"


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
    change_tracking.note(cluster_id, object_type, object_id)


# --- People ---------------------------------------------------------------------------------------


@transaction.atomic
def create_user(
    actor: Actor, username: str, password: str, *, email: str = "", superuser: bool = False
) -> User:
    """Add a person who may log in but sees nothing until granted a role (or superuser).

    Raises Conflict if the name is taken or is none, or if the password is too easily guessed.
    """
    user = User(username=username, email=email, is_superuser=superuser)
    try:
        User.username_validator(username)
    except ValidationError as error:
        raise Conflict("a name is made of letters, digits and @ . + - _") from error
    if len(username) > 150 or len(email) > 254:
        raise Conflict("a name has at most 150 characters, an address at most 254")
    if User.objects.filter(username__iexact=username).exists():
        raise Conflict(f"there is a user {username!r} already; choose another name")
    _check_password(password, user)
    user.set_password(password)
    user.save()
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
def set_password(actor: Actor, user: User, password: str, *, reason: str = "") -> None:
    """Replace a password, which ends the person's sessions; their tokens stay.

    Raises Conflict if it is too easily guessed. Neither password is written down anywhere.
    """
    _check_password(password, user)
    user.set_password(password)
    user.save(update_fields=["password"])
    audit(actor, "user.set_password", "user", str(user.pk), cluster_id=None, reason=reason)


@transaction.atomic
def set_user_active(actor: Actor, user: User, active: bool, reason: str) -> None:
    """Switch a person and their tokens off, or on again; what they did stays on record.

    Raises Conflict if nobody would be left who may do everything.
    """
    if not active:
        _demand_another_superuser(user)
    if not User.objects.filter(pk=user.pk, is_active=not active).update(is_active=active):
        return
    user.is_active = active
    audit(
        actor,
        "user.switch_on" if active else "user.switch_off",
        "user",
        str(user.pk),
        cluster_id=None,
        before={"active": not active},
        after={"active": active},
        reason=reason,
    )


@transaction.atomic
def set_superuser(actor: Actor, user: User, superuser: bool, *, reason: str = "") -> None:
    """Let a person hold every role in every cluster, and see to people and everybody's tokens; or
    no more than the roles that they were given.

    Raises Conflict if nobody would be left who may do everything.
    """
    if not superuser:
        _demand_another_superuser(user)
    changed = User.objects.filter(pk=user.pk, is_superuser=not superuser)
    if not changed.update(is_superuser=superuser):
        return
    user.is_superuser = superuser
    audit(
        actor,
        "user.make_superuser" if superuser else "user.unmake_superuser",
        "user",
        str(user.pk),
        cluster_id=None,
        before={"superuser": not superuser},
        after={"superuser": superuser},
        reason=reason,
    )


def _demand_another_superuser(user: User) -> None:
    """Raises Conflict if this one is the last who may do everything."""
    # Locked in one order, so that two cannot take that from each other at once.
    everybody = User.objects.select_for_update().filter(is_superuser=True).order_by("pk")
    others = [other for other in everybody if other.is_active and other.pk != user.pk]
    if user.is_superuser and not others:
        raise Conflict(f"{user} is the last active superuser; make or switch on another one first")


@transaction.atomic
def grant_role(
    actor: Actor, user: User, role: Role, cluster_id: str | None, *, reason: str = ""
) -> Grant:
    """Give a role in one cluster (everywhere if None), in place of the one there was."""
    held = Grant.objects.filter(user=user, cluster_id=cluster_id).values_list("role", flat=True)
    before = held.first()
    grant, _ = Grant.objects.update_or_create(
        user=user, cluster_id=cluster_id, defaults={"role": role}
    )
    audit(
        actor,
        "user.grant",
        "user",
        str(user.pk),
        cluster_id=cluster_id,
        before={"role": before},
        after={"role": role, "cluster": cluster_id},
        reason=reason,
    )
    return grant


@transaction.atomic
def revoke_role(actor: Actor, user: User, cluster_id: str | None, *, reason: str = "") -> None:
    """Take away the role held in one cluster (the one held everywhere if None).

    Raises Conflict if there is none.
    """
    grant = Grant.objects.select_for_update().filter(user=user, cluster_id=cluster_id).first()
    if grant is None:
        raise Conflict(f"{user} holds no role there; perhaps it was revoked a moment ago")
    grant.delete()
    audit(
        actor,
        "user.revoke",
        "user",
        str(user.pk),
        cluster_id=cluster_id,
        before={"role": grant.role, "cluster": cluster_id},
        reason=reason,
    )


def _check_password(password: str, user: User) -> None:
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise Conflict(" ".join(error.messages)) from error


# --- Tokens ---------------------------------------------------------------------------------------


@transaction.atomic
def create_token(
    actor: Actor,
    user: User,
    *,
    name: str,
    scope: Role,
    cluster_id: str | None,
    ttl_s: float,
) -> tuple[ApiToken, str]:
    """Make a token that lets a program act as `user`, never beyond `scope`, for `ttl_s` seconds.

    What the user holds is looked up at each use: the scope only caps it. The text is returned once
    and never stored. Raises Conflict for a life of more than 366 days or none at all.
    """
    if not 1 <= len(name.strip()) <= 63:
        raise Conflict("give the token a name of at most 63 characters that tells what uses it")
    if not 0 < ttl_s <= MAX_TOKEN_DAYS * 86_400:
        raise Conflict(f"a token lives for at most {MAX_TOKEN_DAYS} days")
    prefix = "".join(secrets.choice(_PREFIX_ALPHABET) for _ in range(10))
    text = f"ddt_{prefix}_{secrets.token_urlsafe(32)}"
    token = ApiToken.objects.create(
        user=user,
        name=name.strip(),
        prefix=prefix,
        hash=crypto.token_hash(text),
        scope=scope,
        cluster_id=cluster_id,
        expires_at=timezone.now() + timedelta(seconds=ttl_s),
    )
    audit(
        actor,
        "token.create",
        "token",
        token.pk,
        cluster_id=cluster_id,
        after={
            "user": user.username,
            "name": token.name,
            "prefix": prefix,
            "scope": scope,
            "expires_at": token.expires_at.isoformat(),
        },
    )
    return token, text


@transaction.atomic
def revoke_token(actor: Actor, token_id: str, reason: str) -> None:
    """Accept this token no more, from the next request on. Raises Conflict if it was revoked."""
    now = timezone.now()
    token = ApiToken.objects.select_related("user").get(pk=token_id)
    if not ApiToken.objects.filter(pk=token_id, revoked_at=None).update(revoked_at=now):
        raise Conflict("this token was revoked already")
    audit(
        actor,
        "token.revoke",
        "token",
        token_id,
        cluster_id=token.cluster_id,
        before={"user": token.user.username, "name": token.name, "scope": token.scope},
        after={"revoked_at": now.isoformat()},
        reason=reason,
    )


# --- The chain ------------------------------------------------------------------------------------


@transaction.atomic
def chain_audit(limit: int = 1000) -> chain.Head:
    """Append the oldest committed rows that are not chained yet, and return the chain's head.

    Rows may be committed out of the order of their ids: late ones simply come later. A lock lets
    one caller append at a time.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_CHAIN_LOCK])
        head = chain.head()
        rows = AuditEvent.objects.filter(position=None, hash="").order_by("pk")
        links: list[tuple[int, int, str]] = []
        for covered in rows.values_list(*chain.COVERED)[:limit]:
            head = chain.Head(head.position + 1, chain.next_hash(head.hash, covered))
            links.append((covered[0], head.position, head.hash))
        if links:
            cursor.execute(
                "UPDATE accounts_auditevent AS row SET position = link.position, hash = link.hash"
                " FROM unnest(%s::bigint[], %s::bigint[], %s::text[]) AS link(id, position, hash)"
                " WHERE row.id = link.id",
                [list(column) for column in zip(*links, strict=True)],
            )
    return head


@transaction.atomic
def record_verification(actor: Actor, report: chain.Report, *, strays: int) -> None:
    """Keep on record that the trail was checked, and what was found.

    `strays` is the number of nodes whose state is not what their events tell.
    """
    audit(
        actor,
        "audit.verify",
        "audit",
        "chain",
        cluster_id=None,
        after={
            "ok": report.ok and not strays,
            "rows": report.rows,
            "head": str(report.head),
            "problems": report.problem_count,
            "strays": strays,
        },
    )
