"""What a person does on a page: checked, done, and answered the same way everywhere.

The object must have been found through a selector before: whoever may not see it hears 404 there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor
from controlplane.accounts.requests import actor_of
from controlplane.errors import Conflict
from controlplane.fleet.selectors import may

REASON_MAX = 500


def act(
    request: HttpRequest,
    cluster_id: str,
    operation: Callable[[Actor], Any],
    *,
    back: str,
    again: Callable[[int], HttpResponse],
    role: Role = Role.OPERATOR,
) -> HttpResponse:
    """Do one action as `role` of a cluster, then lead to `back`.

    403 to whoever may only see; where the action says that the present state does not allow it, its
    words stand above the page, which `again` shows anew with the status 409.
    """
    if not may(request.user, role, cluster_id):
        raise PermissionDenied(f"This takes the role {role.label.lower()} in this cluster.")
    try:
        operation(actor_of(request))
    except Conflict as conflict:
        messages.error(request, conflict.detail)
        return again(409)
    return HttpResponseRedirect(back)


def whole(text: str, most: int) -> int | None:
    """A whole number from 0 to `most`, or None."""
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        return None
    return int(text) if int(text) <= most else None


def reason_of(request: HttpRequest) -> str:
    """The reason given in a form. Raises Conflict if there is none."""
    reason = request.POST.get("reason", "").strip()
    if not reason:
        raise Conflict("give a reason: it stands in the audit trail beside your name")
    return reason[:REASON_MAX]
