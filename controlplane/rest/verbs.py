"""Writes: one verb each, checked, done once, and answered the same way everywhere.

Order of things: see the object (404), hold the role (403), read the body (400), then in one
transaction: the idempotency key (replay, 422), If-Match (412), the action (409). A dry run goes all
that way and is rolled back. Whatever raises leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from django.db import connection
from django.db.models import Model
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.accounts.access import Access
from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor, AuditEvent
from controlplane.accounts.requests import actor_of
from controlplane.fleet.changes import change
from controlplane.rest import etags, idempotency, permissions
from controlplane.rest.filters import boolean, demand_known, values_of
from controlplane.rest.media import body_of
from controlplane.rest.serializers import Body, Reasoned

if TYPE_CHECKING:
    from controlplane.rest.resource import Resource

#: A write waits this long for rows that others hold; then it answers 503 and has changed nothing.
LOCK_TIMEOUT_MS = 5_000

#: What a verb does: (view, actor, target, order) -> the row that the answer shows, if any. The
#: target is the object in the path; for a collection, the cluster that the body names.
VerbAction = Callable[[Any, Actor, Any, dict[str, Any]], Model | None]
#: What the automation would do: (target, order) -> the plan.
Plan = Callable[[Any, dict[str, Any]], Mapping[str, Any]]
Handler = Callable[..., Response]


@dataclass(frozen=True)
class Verb:
    """What a verb demands and answers."""

    access: Access
    takes: type[Body]
    answers: type[serializers.BaseSerializer] | None
    status: HTTPStatus
    plan: Plan | None
    detail: bool

    @property
    def role(self) -> Role:
        return Role(self.access.value)


def verb(
    *,
    access: Access = Access.OPERATOR,
    takes: type[Body] = Reasoned,
    answers: type[serializers.BaseSerializer] | None = None,
    status: HTTPStatus = HTTPStatus.OK,
    plan: Plan | None = None,
    detail: bool = True,
    path: str | None = None,
    method: str = "post",
) -> Callable[[VerbAction], Handler]:
    """Make a deed a sub-resource that is written to.

    `answers` is the serializer of what the deed returns; without it the answer shows the object
    anew. `plan` adds what the automation would do to the answer of a dry run.
    """
    told = Verb(access, takes, answers, status, plan, detail)

    def decorate(operation: VerbAction) -> Handler:
        def handler(view: Resource, request: Request, **path_values: str) -> Response:
            return _perform(view, request, told, operation, path_values)

        handler.__name__ = operation.__name__
        handler.__doc__ = operation.__doc__
        handler.verb = told  # type: ignore[attr-defined]
        if operation.__name__ == "create":
            return handler  # the router finds it by this name
        made: Handler = action(detail=detail, methods=[method], url_path=path)(handler)
        return made

    return decorate


class _Undone(Exception):
    """Ends a dry run: whatever was written is rolled back."""


def _perform(
    view: Resource, request: Request, verb: Verb, operation: VerbAction, path_values: dict[str, str]
) -> Response:
    in_query = request.method == "DELETE"  # its body may be dropped on the way
    demand_known(request.query_params, ["dry_run", "reason"] if in_query else ["dry_run"])
    target = view.visible(path_values["pk"]) if verb.detail else None
    if target is not None and view.cluster_of(target):
        permissions.demand(request.user, verb.role, view.cluster_of(target))
    else:
        permissions.demand_somewhere(request.user, verb.role)
    told = request.query_params.dict() if in_query else body_of(request)
    order = _order_of(request, verb, told)
    dry_run = order.pop("dry_run") or _asks_for_dry_run(request)
    key = idempotency.key_of(request)
    answer: dict[str, Any] = {}
    row = None
    try:
        with change():
            _wait_briefly()
            if key and not dry_run:
                row = idempotency.claim(request.user, key, request, told)
                if row.status is not None:
                    return Response(
                        row.body, status=row.status, headers={"Idempotent-Replay": "true"}
                    )
            if target is not None and "If-Match" in request.headers:
                view.lock(target)
                etags.demand_match(request, view.tag_of(view.visible(target.pk)))
            answer = _do(view, request, verb, operation, target, order | _path_order(path_values))
            if dry_run:
                raise _Undone
            if row is not None:
                idempotency.keep(row, verb.status, answer)
    except _Undone:
        plan = verb.plan(target, order) if verb.plan else None
        return Response({**answer, "dry_run": True, "result": None, "plan": plan})
    return Response(answer, status=verb.status)


def _do(
    view: Resource,
    request: Request,
    verb: Verb,
    operation: VerbAction,
    target: Model | None,
    order: dict[str, Any],
) -> dict[str, Any]:
    """Do it inside the present transaction; what came of it, and what it wrote."""
    newest = AuditEvent.objects.order_by("-pk").values_list("pk", flat=True).first() or 0
    subject = target if target is not None else order.pop("cluster")
    shown = operation(view, actor_of(request), subject, order)
    written = AuditEvent.objects.filter(pk__gt=newest, request_id=request.request_id)
    return {
        "dry_run": False,
        "result": view.shown(target, shown, verb.answers),
        "changes": list(
            written.order_by("pk").values("verb", "object_type", "object_id", "before", "after")
        ),
        "plan": None,
    }


def _order_of(request: Request, verb: Verb, told: Mapping[str, Any]) -> dict[str, Any]:
    body = verb.takes(data=told)
    body.is_valid(raise_exception=True)
    order = dict(body.validated_data)
    if "cluster" in order:
        order["cluster"] = permissions.cluster_named(request.user, verb.role, order["cluster"])
    return order


def _path_order(path_values: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in path_values.items() if name != "pk"}


def _asks_for_dry_run(request: Request) -> bool:
    if "dry_run" not in request.query_params:
        return False
    return boolean("dry_run", values_of(request.query_params, "dry_run", many=False)[0])


def _wait_briefly() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [str(LOCK_TIMEOUT_MS)])
