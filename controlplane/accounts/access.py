"""What a page asks of whoever opens it, declared beside the view.

The declaration enforces nothing: views and selectors do. A test tries every route as every kind of
caller against what is declared here, and fails for a route that declares nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

View = TypeVar("View", bound=Callable[..., Any])


class Access(Enum):
    PUBLIC = "public"  # anybody
    SIGNED_IN = "signed in"  # any person; lists show each what is theirs to see
    VIEWER = "viewer"  # of the cluster that the object belongs to
    OPERATOR = "operator"
    ADMIN = "admin"
    ADMIN_SOMEWHERE = "admin somewhere"  # of any cluster; shows and changes those only
    OWNER = "owner"  # of what only they and superusers see
    SUPERUSER = "superuser"


def needs(access: Access) -> Callable[[View], View]:
    """Declare who may use a view. Survives the decorators above it, if they use `wraps`."""

    def declare(view: View) -> View:
        view.access = access  # type: ignore[attr-defined]
        return view

    return declare
