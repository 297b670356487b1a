"""Users, what they may do in which cluster, and who did what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.db.models import Q

from controlplane.accounts.choices import ActorKind, Role
from controlplane.ids import new_id


class User(AbstractUser):
    """A person. `is_superuser` holds every role in every cluster."""

    def __str__(self) -> str:
        return self.username


class Grant(models.Model):
    """A role of a user in one cluster, or in all of them where `cluster` is empty."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="grants")
    cluster = models.ForeignKey("fleet.Cluster", null=True, blank=True, on_delete=models.CASCADE)
    role = models.CharField(max_length=16, choices=Role.choices)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["user", "cluster"], nulls_distinct=False, name="grant_once_per_cluster"
            ),
            models.CheckConstraint(condition=Q(role__in=Role.values), name="grant_role_known"),
        ]

    def __str__(self) -> str:
        return f"{self.user}: {self.role} in {self.cluster or 'all clusters'}"


class ApiToken(models.Model):
    """Lets a program act as its owner, never beyond `scope`. Only an HMAC of the secret is kept."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "tok"))
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=63)
    #: The public part, by which a token is found and recognised in lists.
    prefix = models.CharField(max_length=12, unique=True)
    hash = models.CharField(max_length=64)
    #: The most that the token may do, whatever its owner may.
    scope = models.CharField(max_length=16, choices=Role.choices, default=Role.VIEWER)
    #: Restricts the token to one cluster; empty: all that its owner may see.
    cluster = models.ForeignKey("fleet.Cluster", null=True, blank=True, on_delete=models.CASCADE)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.CheckConstraint(condition=Q(scope__in=Role.values), name="token_scope_known")
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"


class IdempotentRequest(models.Model):
    """The answer to a write that named an idempotency key: the same key again gets it again."""

    user = models.ForeignKey(User, on_delete=models.CASCADE)
    key = models.CharField(max_length=100)
    #: Hash of method, path and body: the same key with another request is an error.
    request_hash = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField(null=True)  # empty: still being answered
    body = models.JSONField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["user", "key"], name="idempotency_key_once_per_user")
        ]
        indexes = [models.Index(fields=["created_at"], name="idempotent_by_age")]


@dataclass(frozen=True)
class Actor:
    """Who does a thing: handed to every action, written into its audit row."""

    kind: ActorKind
    id: str
    request_id: str = ""


#: The control plane itself, where no person, agent or job stands behind a write.
SYSTEM = Actor(ActorKind.SYSTEM, "drydock")


class AuditEvent(models.Model):
    """One write: who, what, before, after, why. Appended to, never changed."""

    id = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(auto_now_add=True)
    actor_kind = models.CharField(max_length=16, choices=ActorKind.choices)
    actor_id = models.CharField(max_length=150)
    request_id = models.CharField(max_length=40, blank=True)
    cluster = models.ForeignKey("fleet.Cluster", null=True, blank=True, on_delete=models.PROTECT)
    verb = models.CharField(max_length=64)
    object_type = models.CharField(max_length=32)
    object_id = models.CharField(max_length=64)
    before = models.JSONField(default=dict)
    after = models.JSONField(default=dict)
    reason = models.TextField(blank=True)
    #: The keeper's chain: each row's keyed hash covers the row and the hash before it. Empty until
    #: the keeper has come by, within a second or two.
    position = models.BigIntegerField(null=True, unique=True)
    hash = models.CharField(max_length=64, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["object_type", "object_id", "id"], name="audit_by_object"),
            models.Index(fields=["cluster", "-id"], name="audit_by_cluster"),
            # The newest rows of a verb that is rare, without walking all others.
            models.Index(fields=["verb", "-id"], name="audit_by_verb"),
            models.Index(fields=["at", "id"], name="audit_by_time"),
            models.Index(fields=["id"], condition=Q(position=None), name="audit_to_chain"),
        ]

    def __str__(self) -> str:
        return f"{self.verb} {self.object_type} {self.object_id}"
