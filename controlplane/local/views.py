"""The buttons that break a simulated node. They exist only where the fleet is simulated."""

from __future__ import annotations

import random

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.requests import actor_of
from controlplane.accounts.views import signed_in
from controlplane.dashboard.nodes import FAULTS
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Node
from controlplane.fleet.selectors import clusters_for, may
from controlplane.form_actions import whole
from workers import power


@require_POST
@signed_in
@needs(Access.OPERATOR)
def break_card(request: HttpRequest, node_id: str) -> HttpResponse:
    """Break a card of this simulated node, as `manage.py scenario` does.

    404 where the fleet is real or the node is not the caller's to see.
    """
    node = Node.objects.filter(pk=node_id, cluster__in=clusters_for(request.user)).first()
    fault = request.POST.get("kind", "")
    if not settings.SIMULATED_FLEET or node is None or fault not in FAULTS:
        raise Http404("no such node, or no such fault")
    if not may(request.user, Role.OPERATOR, node.cluster_id):
        raise PermissionDenied("Only operators of this cluster may break its nodes.")
    card = _card(request, node)
    fleet.record_power_order(actor_of(request), node.pk, f"break card {card}: {fault}", "asked for")
    try:
        power.break_card(node, fault, card)
    except power.PowerError as error:
        messages.error(request, str(error))
    return HttpResponseRedirect(reverse("node", args=[node.pk]))


def _card(request: HttpRequest, node: Node) -> int:
    """The card that was named, or any."""
    fitted = list(node.gpus.exclude(index=None).values_list("index", flat=True)) or [0]
    wanted = whole(request.POST.get("card", ""), 63)
    if wanted is not None and wanted in fitted:
        return wanted
    return random.choice(fitted)  # type: ignore[return-value]  # noqa: S311 - any will do
