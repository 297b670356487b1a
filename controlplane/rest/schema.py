"""The description of the API (OpenAPI 3.1), taken from what the resources declare.

Nothing is described by hand beside the code: what a filter or a verb declares is what is checked
and what is described.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import inline_serializer
from rest_framework import serializers

from controlplane.rest import problems
from controlplane.rest.filters import Parameter
from controlplane.rest.resource import Reading, Resource, fields_parameter
from controlplane.rest.serializers import REASON_MAX, Change
from controlplane.rest.verbs import Verb

DRY_RUN = Parameter(
    "dry_run", "Check everything, tell what would change, and change nothing.", {"type": "boolean"}
)
REASON = Parameter(
    "reason",
    "Why; it stands in the audit trail beside your name.",
    {"type": "string", "minLength": 1, "maxLength": REASON_MAX},
    required=True,
)
_TEXT = {"type": "string"}
IDEMPOTENCY_KEY = Parameter(
    "Idempotency-Key",
    "Any text of your own, kept for 24 hours: the same request under the same key is done once.",
    {"type": "string", "minLength": 1, "maxLength": 100, "pattern": "^[ -~]+$"},
)
IF_MATCH = Parameter("If-Match", "Act only if the object still has this tag.", _TEXT)
IF_NONE_MATCH = Parameter("If-None-Match", "Answer 304 if the tag is still this.", _TEXT)

#: Which problems an operation may answer with.
_ALWAYS = (400, 401, 404, 405, 406, 500, 503)
_WRITING = (403, 409, 411, 412, 413, 415, 422)


class ApiSchema(AutoSchema):
    """Describes one operation of a resource."""

    def get_operation(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        operation = super().get_operation(*args, **kwargs)
        if operation is None or not isinstance(self.view, Resource):
            return operation
        told = operation.setdefault("parameters", [])
        for parameter in told:
            parameter["schema"].update({"type": "string", "maxLength": 64})
        for place, parameters in self._declared().items():
            told.extend(_parameter(one, place) for one in parameters)
        responses = operation["responses"]
        if self.method == "GET":
            responses["304"] = {"description": "It is still what `If-None-Match` names."}
        for status in _ALWAYS + (_WRITING if self._verb else ()):
            responses[str(status)] = _problem(status)
        if self._verb and self.method != "DELETE":
            body = self.resolve_serializer(self._verb.takes, "request")
            body.schema["additionalProperties"] = False
        return operation

    def get_operation_id(self) -> str:
        """As "nodes_list" or "nodes_drain": the place in the path, then what is done there."""
        place = self.path.removeprefix("/api/v1/").partition("/")[0].replace("-", "_")
        return f"{place}_{self.view.action}"

    def get_auth(self) -> list[dict[str, Any]]:
        return [{"token": []}, {"session": []}]

    def get_request_serializer(self) -> Any:
        return self._verb.takes if self._verb else None

    def get_response_serializers(self) -> Any:
        if self._verb:
            return {self._verb.status.value: self._outcome(self._verb)} | (
                {200: self._outcome(self._verb)} if self._verb.status != 200 else {}
            )
        if self._reading:
            return self._reading.answers
        if getattr(self.view, "action", "") == "retrieve":
            return self.view.detail_serializer_class or self.view.serializer_class
        return super().get_response_serializers()

    def get_summary(self) -> str | None:
        if not isinstance(self.view, Resource):
            return super().get_summary()
        told = {"list": f"List {self.view.plural}", "retrieve": f"Show one {self.view.noun}"}
        return told.get(self.view.action) or _first_line(getattr(self.view, self.view.action))

    def get_description(self) -> str:
        if not isinstance(self.view, Resource) or self.view.action in ("list", "retrieve"):
            return ""
        return "\n".join(
            (getattr(self.view, self.view.action).__doc__ or "").splitlines()[1:]
        ).strip()

    @property
    def _verb(self) -> Verb | None:
        return getattr(self._handler, "verb", None)

    @property
    def _reading(self) -> Reading | None:
        return getattr(self._handler, "reading", None)

    @property
    def _handler(self) -> Any:
        return getattr(self.view, getattr(self.view, "action", None) or "", None)

    def _declared(self) -> Mapping[str, list[Parameter]]:
        view = self.view
        if self._verb:
            held = [IDEMPOTENCY_KEY, IF_MATCH] if self._verb.detail else [IDEMPOTENCY_KEY]
            query = [DRY_RUN, REASON] if self.method == "DELETE" else [DRY_RUN]
            return {"query": query, "header": held}
        query = (
            list(self._reading.parameters)
            if self._reading
            else view.list_parameters()
            if view.action == "list"
            else [fields_parameter(view.detail_serializer_class or view.serializer_class)]
        )
        return {"query": query, "header": [IF_NONE_MATCH]}

    def _outcome(self, verb: Verb) -> Any:
        """What every verb answers, around the object that this one answers with."""
        view = self.view
        shown = verb.answers or view.detail_serializer_class or view.serializer_class
        name = f"{shown.__name__.removesuffix('Serializer')}Outcome"
        if name not in _outcomes:
            _outcomes[name] = inline_serializer(
                name,
                {
                    "dry_run": serializers.BooleanField(),
                    "result": shown(allow_null=True),
                    "changes": Change(many=True),
                    "plan": serializers.DictField(allow_null=True),
                },
            )
        return _outcomes[name]


_outcomes: dict[str, Any] = {}


def complete(result: dict[str, Any], **_kwargs: Any) -> dict[str, Any]:
    """Add what all operations share: the shape of a problem and the list of its codes."""
    components = result.setdefault("components", {})
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer", "bearerFormat": "ddt_<prefix>_<secret>"},
        "session": {"type": "apiKey", "in": "cookie", "name": "sessionid"},
    }
    schemas = components.setdefault("schemas", {})
    text = {"type": "string"}
    schemas["Problem"] = {
        "type": "object",
        "required": ["type", "title", "status", "code", "detail", "request_id"],
        "properties": {
            "type": {"type": "string", "format": "uri-reference"},
            "title": text,
            "status": {"type": "integer"},
            "code": {"type": "string", "enum": list(problems.KINDS)},
            "detail": text,
            "request_id": text,
            "errors": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["field", "code", "detail"],
                    "properties": {"field": text, "code": text, "detail": text},
                },
            },
        },
    }
    return result


def _parameter(parameter: Parameter, place: str) -> dict[str, Any]:
    schema: dict[str, Any] = dict(parameter.schema)
    told: dict[str, Any] = {
        "name": parameter.name,
        "in": place,
        "description": parameter.description,
        "required": parameter.required,
    }
    if parameter.many:
        schema = {"type": "array", "items": schema, "maxItems": 100, "minItems": 1}
        told |= {"style": "form", "explode": True}
    return told | {"schema": schema}


def _problem(status: int) -> dict[str, Any]:
    kinds = [f"`{code}`" for code, kind in problems.KINDS.items() if kind.status == status]
    return {
        "description": f"Problem: {', '.join(kinds)}",
        "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }


def _first_line(handler: Any) -> str:
    return (handler.__doc__ or "").strip().splitlines()[0] if handler.__doc__ else ""
