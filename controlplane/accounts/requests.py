"""Who stands behind a request."""

from __future__ import annotations

from django.http import HttpRequest

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import Actor


def actor_of(request: HttpRequest) -> Actor:
    """The person behind this request, as actions and audit rows name them."""
    return Actor(ActorKind.USER, str(request.user.pk), getattr(request, "request_id", ""))
