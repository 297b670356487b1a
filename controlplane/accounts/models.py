"""Users, what they may do in which cluster, and who did what."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.db.models import Q

from controlplane.accounts.choices import ActorKind, Role


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

    class Meta:
        indexes = [models.Index(fields=["object_type", "object_id", "id"], name="audit_by_object")]

    def __str__(self) -> str:
        return f"{self.verb} {self.object_type} {self.object_id}"
