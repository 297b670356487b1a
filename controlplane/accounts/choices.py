"""What a person may do."""

from __future__ import annotations

from django.db.models import TextChoices


class Role(TextChoices):
    """Each role includes those before it."""

    VIEWER = "viewer", "Viewer"  # sees
    OPERATOR = "operator", "Operator"  # acts on incidents, nodes and jobs
    ADMIN = "admin", "Admin"  # also enrols nodes, manages users


#: Roles that include the key's powers, the key itself among them.
ROLES_INCLUDING: dict[Role, tuple[Role, ...]] = {
    Role.VIEWER: (Role.VIEWER, Role.OPERATOR, Role.ADMIN),
    Role.OPERATOR: (Role.OPERATOR, Role.ADMIN),
    Role.ADMIN: (Role.ADMIN,),
}


class ActorKind(TextChoices):
    USER = "user", "User"
    AGENT = "agent", "Node agent"
    RUNTIME = "runtime", "Training job"
    SYSTEM = "system", "Drydock"
