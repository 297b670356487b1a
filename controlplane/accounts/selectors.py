"""What a caller may see and do. Every other selector starts from `clusters_for`.

Whatever lies outside it must look as if it did not exist.
"""

from __future__ import annotations

from django.contrib.auth.models import AnonymousUser
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest

from controlplane.accounts.choices import ROLES_INCLUDING, ActorKind, Role
from controlplane.accounts.models import Actor, Grant, User
from controlplane.fleet.models import Cluster


def clusters_for(user: User | AnonymousUser, role: Role = Role.VIEWER) -> QuerySet[Cluster]:
    """The clusters in which `user` holds `role` or one that includes it."""
    if not user.is_active:
        return Cluster.objects.none()
    if user.is_superuser:
        return Cluster.objects.all()
    grants = Grant.objects.filter(user_id=user.pk, role__in=ROLES_INCLUDING[role])
    return Cluster.objects.filter(
        Exists(grants.filter(Q(cluster=None) | Q(cluster=OuterRef("pk"))))
    )


def may(user: User | AnonymousUser, role: Role, cluster_id: str) -> bool:
    """Whether `user` holds `role` in this cluster."""
    return clusters_for(user, role).filter(pk=cluster_id).exists()


def actor_of(request: HttpRequest) -> Actor:
    """The signed-in person behind this request, as actions and audit rows name them."""
    return Actor(ActorKind.USER, str(request.user.pk), getattr(request, "request_id", ""))
