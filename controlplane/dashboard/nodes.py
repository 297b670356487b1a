"""The page of one node, its readings, and what people may have done to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_POST

from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import nodes as selectors
from controlplane.dashboard.selectors.node_timeline import story_of
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Node
from controlplane.fleet.selectors import may
from controlplane.form_actions import act, reason_of
from controlplane.incidents import actions as incidents
from controlplane.incidents.plans import NODE_ORDERS, ORDER_STATES, Plan, plan_of_order
from controlplane.jobs import actions as jobs
from controlplane.jobs.selectors import may_be_spare
from controlplane.live import live_page


@dataclass(frozen=True)
class Order:
    """Something that a person may ask for, and what it means in a sentence."""

    verb: str
    label: str
    effect: str
    disruptive: bool = True
    #: The name of the address that takes it.
    route: str = "node-order"
    role: Role = Role.OPERATOR
    #: What is asked, where label and name do not say it: "{}" stands for the name.
    words: str = ""
    #: What it takes beside a state that the playbook allows.
    allows: Callable[[Node], bool] = field(default=lambda _node: True)

    def fits(self, node: Node) -> bool:
        """Whether the node's present state allows it."""
        allowed = ORDER_STATES.get(self.verb)
        return (allowed is None or node.state in allowed) and self.allows(node)

    def of(self, node: Node) -> str:
        """The whole order in words."""
        return (self.words or f"{self.label} {{}}").format(node.name)


ORDERS: dict[str, Order] = {
    one.verb: one
    for one in (
        Order("drain", "Drain", "Nothing new lands on it; what runs there is moved away first."),
        Order("quarantine", "Quarantine", "Taken out at once; what runs there is killed."),
        Order(
            "diagnose",
            "Diagnose",
            "Runs the level-1 diagnostic beside whatever runs. The node keeps its work.",
        ),
        Order("reset", "Reset GPUs", "Resets its GPUs; what runs on them is killed."),
        Order("reboot", "Reboot", "Reboots it through its BMC; what runs there is killed."),
        Order("return", "Return", "Validates it and gives it back to the fleet.", False),
        Order("retire", "Retire", "Strikes it off the fleet for good; its history stays."),
        Order(
            "hold",
            "Hold",
            "Automation keeps its hands off until it is released.",
            disruptive=False,
            route="node-hold",
        ),
        Order(
            "release",
            "Release",
            "Lifts the hold: automation may act on it again.",
            disruptive=False,
            route="node-release",
        ),
        Order(
            "spare",
            "Make it a spare",
            "Kept free for replicas that lose their node, and for whoever reserves one.",
            disruptive=False,
            route="node-spare",
            words="Make {} a spare",
            allows=lambda node: not node.spare and may_be_spare(node),
        ),
        Order(
            "unspare",
            "No longer a spare",
            "Jobs may start on it as on any other node.",
            disruptive=False,
            route="node-unspare",
            words="Let {} be a spare no longer",
            allows=lambda node: node.spare,
        ),
        Order(
            "maintenance",
            "Maintenance",
            "Announces work on it: automation keeps its hands off for that time.",
            disruptive=False,
            route="node-maintenance",
        ),
        Order(
            "revoke-key",
            "Revoke key",
            "Nothing that it says is taken any more, and it is given no orders. What runs there"
            " goes on until a quarantine cuts its power. It comes back only under another name.",
            route="node-revoke-key",
            role=Role.ADMIN,
            words="Revoke the key of {}",
            allows=lambda node: node.key_revoked_at is None,
        ),
    )
}
#: The faults that the simulated hardware can show, by the word its scenario has.
FAULTS: dict[str, str] = {
    "xid79": "XID 79: the card falls off the bus",
    "xid94": "XID 94: contained memory error",
    "ecc-drift": "Corrected errors accelerate",
    "nvlink-slow": "NVLink falls below its own baseline",
    "overheating": "The card heats up to its limit",
    "remap-failed": "A row of its memory cannot be remapped",
    "port-down": "Its port of the fabric goes down",
    "xid31": "XID 31: the program touches memory that is not its own",
}
#: How long a maintenance window may be announced for, in hours.
MAX_MAINTENANCE_H = 24 * 14


@signed_in
@needs(Access.VIEWER)
def node(request: HttpRequest, node_id: str) -> HttpResponse:
    """One node; `order` shows the dry run of an order, `before` an older part of its story."""
    return _page(request, selectors.node_for(request.user, node_id))


@gzip_page
@signed_in
@needs(Access.VIEWER)
def samples(request: HttpRequest, node_id: str) -> HttpResponse:
    """The readings of its cards as JSON columns, over `window`."""
    found = selectors.node_for(request.user, node_id)
    word = _window_word(request)
    response = JsonResponse(selectors.readings_of(found, selectors.WINDOWS[word][1]))
    response["Cache-Control"] = "no-store"
    return response


@require_POST
@signed_in
@needs(Access.OPERATOR)
def order(request: HttpRequest, node_id: str) -> HttpResponse:
    """Have a playbook do `verb` to the node, for `reason`."""
    verb = request.POST.get("verb", "")
    return _act(
        request,
        node_id,
        lambda actor: incidents.order_node(actor, node_id, verb, reason_of(request)),
    )


@require_POST
@signed_in
@needs(Access.OPERATOR)
def hold(request: HttpRequest, node_id: str) -> HttpResponse:
    return _act(request, node_id, lambda actor: fleet.set_hold(actor, node_id, reason_of(request)))


@require_POST
@signed_in
@needs(Access.OPERATOR)
def release(request: HttpRequest, node_id: str) -> HttpResponse:
    return _act(
        request,
        node_id,
        lambda actor: fleet.set_hold(actor, node_id, "", lifted_because=reason_of(request)),
    )


@require_POST
@signed_in
@needs(Access.OPERATOR)
def spare(request: HttpRequest, node_id: str) -> HttpResponse:
    return _act(request, node_id, lambda actor: jobs.make_spare(actor, node_id, reason_of(request)))


@require_POST
@signed_in
@needs(Access.OPERATOR)
def unspare(request: HttpRequest, node_id: str) -> HttpResponse:
    return _act(
        request, node_id, lambda actor: jobs.unmake_spare(actor, node_id, reason_of(request))
    )


@require_POST
@signed_in
@needs(Access.ADMIN)
def revoke_key(request: HttpRequest, node_id: str) -> HttpResponse:
    """Hear this node no more."""
    return _act(
        request,
        node_id,
        lambda actor: fleet.revoke_node_key(actor, node_id, reason_of(request)),
        role=Role.ADMIN,
    )


@require_POST
@signed_in
@needs(Access.OPERATOR)
def maintenance(request: HttpRequest, node_id: str) -> HttpResponse:
    """Announce work on this node, from now on for `hours`."""

    def operation(actor: Actor) -> None:
        now = timezone.now()
        fleet.open_maintenance(
            actor,
            selectors.node_for(request.user, node_id).cluster_id,
            starts_at=now,
            ends_at=now + timedelta(hours=hours_of(request)),
            reason=reason_of(request),
            node_id=node_id,
        )

    return _act(request, node_id, operation)


def hours_of(request: HttpRequest) -> float:
    """The length of a maintenance window. Raises Conflict if it is no sensible number."""
    try:
        hours = float(request.POST.get("hours", ""))
    except ValueError:
        raise Conflict("say for how many hours the maintenance lasts, such as 2 or 0.5") from None
    if not 0 < hours <= MAX_MAINTENANCE_H:
        raise Conflict(f"a maintenance lasts up to {MAX_MAINTENANCE_H} hours; announce it in parts")
    return hours


def _act(
    request: HttpRequest,
    node_id: str,
    operation: Callable[[Actor], object],
    role: Role = Role.OPERATOR,
) -> HttpResponse:
    found = selectors.node_for(request.user, node_id)
    return act(
        request,
        found.cluster_id,
        operation,
        back=reverse("node", args=[node_id]),
        again=lambda status: _page(
            request, selectors.node_for(request.user, node_id), status=status
        ),
        role=role,
    )


def _page(request: HttpRequest, found: Node, status: int = 200) -> HttpResponse:
    def context() -> dict[str, Any]:
        cards = selectors.cards_of(found)
        own = selectors.faults_of_itself(found)
        story, older = story_of(found, before=_moment(request.GET.get("before")))
        administers = may(request.user, Role.ADMIN, found.cluster_id)
        may_act = administers or may(request.user, Role.OPERATOR, found.cluster_id)
        held = {Role.OPERATOR: may_act, Role.ADMIN: administers}
        asked = ORDERS.get(_asked_verb(request))
        if asked is not None and not held[asked.role]:
            asked = None
        query = request.GET.copy()
        if asked is not None:
            query["order"] = asked.verb
        return {
            "live_path": reverse("node", args=[found.id]),
            "live_query": query,
            "typed": request.POST,
            "node": found,
            "reachable": found.reachable,
            "standing": selectors.standing_of(found),
            "cards": cards,
            "own_faults": own,
            "health": selectors.health_of(cards, own),
            "work": selectors.work_of(found),
            "story": story,
            "older": older,
            "windows": {word: label for word, (label, _) in selectors.WINDOWS.items()},
            "window": _window_word(request),
            "may_act": may_act,
            "orders": [
                (one, one.fits(found), one.of(found)) for one in _offered(found) if held[one.role]
            ],
            "asked": asked,
            "asked_words": asked.of(found) if asked else "",
            "fits": asked is not None and asked.fits(found),
            "plan": _plan(found, asked) if asked else None,
            "faults": _faults(found) if may_act else {},
        }

    return live_page(request, "nodes/node", [found.cluster], context, status=status)


def _asked_verb(request: HttpRequest) -> str:
    """Of the order whose form is shown: the one that the address asks for, or that was refused."""
    if request.method != "POST":
        return request.GET.get("order", "")
    route = request.resolver_match.view_name if request.resolver_match else ""
    own = (one.verb for one in ORDERS.values() if one.route == route != "node-order")
    return next(own, request.POST.get("verb", ""))


def _offered(found: Node) -> list[Order]:
    hidden = {
        "hold" if found.hold_reason else "release",
        "spare" if found.spare else "unspare",
        "revoke-key" if found.key_revoked_at else "",
    }
    return [one for one in ORDERS.values() if one.verb not in hidden]


def _plan(found: Node, asked: Order) -> Plan | None:
    """The dry run of what a playbook would do; holds and announcements do nothing to a node."""
    return plan_of_order(found, asked.verb) if asked.verb in NODE_ORDERS else None


def _faults(found: Node) -> dict[str, str]:
    """What can be broken here: only in a fleet that is simulated, and nowhere else."""
    if not settings.SIMULATED_FLEET:
        return {}
    try:
        reverse("node-fault", args=[found.id])
    except NoReverseMatch:
        return {}
    return FAULTS


def _window_word(request: HttpRequest) -> str:
    word = request.GET.get("window", "10m")
    return word if word in selectors.WINDOWS else "10m"


def _moment(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else timezone.make_aware(moment)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise Http404("before must be a time in ISO 8601") from None
