"""Who may do what under the API.

Every view in the URLconf tells what each of its methods needs, as pages do:

    view = resolve(path).func
    view.cls.access[view.actions[method]]      an `accounts.access.Access`

(`cls` and `actions` are what Django REST framework leaves there; methods are in lower case.) A role
is needed in the cluster of the object in the path. Where the path names none (POST /jobs), it is
needed in the cluster that the body names as `cluster`, and first of all in any cluster, so that an
empty body is 403 to a viewer. Whoever may not see the object or the cluster gets 404.
The description, its page and unknown addresses are plain views with an `access` attribute.
"""

from __future__ import annotations

from controlplane.accounts.choices import Role
from controlplane.accounts.models import User
from controlplane.fleet.models import Cluster
from controlplane.fleet.selectors import clusters_for, may, may_somewhere
from controlplane.rest.problems import Problem, invalid


def demand(user: User, role: Role, cluster_id: str) -> None:
    """403 unless the caller holds `role` in this cluster, which it is known to see."""
    if not may(user, role, cluster_id):
        raise _lacking(role)


def demand_somewhere(user: User, role: Role) -> None:
    """403 unless the caller holds `role` in at least one cluster."""
    if not may_somewhere(user, role):
        raise _lacking(role)


def cluster_named(user: User, role: Role, name_or_id: str) -> Cluster:
    """The cluster that a body names by id or name: 404 if not visible, 403 without the role."""
    visible = clusters_for(user)
    cluster = visible.filter(pk=name_or_id).first() or visible.filter(name=name_or_id).first()
    if cluster is None:
        raise invalid("cluster", "there is no such cluster", "not_found")
    demand(user, role, cluster.pk)
    return cluster


def _lacking(role: Role) -> Problem:
    return Problem("forbidden", f"this takes the role of {role.label.lower()} in this cluster")
