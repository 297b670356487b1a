"""Who may do what where, as far as the asking person may know it."""

from __future__ import annotations

from django.db.models import Prefetch, Q, QuerySet

from controlplane.accounts.choices import Role
from controlplane.accounts.models import ApiToken, Grant, User
from controlplane.fleet.models import Cluster
from controlplane.fleet.selectors import (
    clusters_for,
    is_superuser,
    may_everywhere,
    may_somewhere,
)


def administered(user: User) -> QuerySet[Cluster]:
    """The clusters whose people `user` manages."""
    return clusters_for(user, Role.ADMIN)


def people_for(user: User) -> QuerySet[User]:
    """Everybody, to a superuser; to an admin of clusters, whoever holds a role there.

    Each carries as `shown_grants` the roles that the asking person may know of.
    """
    grants = Grant.objects.select_related("cluster").order_by("cluster__name")
    people = User.objects.all()
    if not is_superuser(user):
        known = Q(cluster=None) | Q(cluster__in=administered(user))
        grants = grants.filter(known)
        people = people.filter(Q(is_superuser=True) | Q(pk__in=grants.values("user")))
    return people.prefetch_related(Prefetch("grants", queryset=grants, to_attr="shown_grants"))


def may_grant(user: User, cluster_id: str | None) -> bool:
    """Whether `user` gives and takes roles there (everywhere if None)."""
    if cluster_id is None:
        return may_everywhere(user, Role.ADMIN)
    return administered(user).filter(pk=cluster_id).exists()


def tokens_for(user: User) -> QuerySet[ApiToken]:
    """A person's own tokens; to a superuser, everybody's."""
    tokens = ApiToken.objects.select_related("user", "cluster")
    return tokens if is_superuser(user) else tokens.filter(user=user)


def roles_held(user: User) -> list[Role]:
    """The roles that `user` holds in some cluster or other, the least first."""
    return [role for role in Role if may_somewhere(user, role)]
