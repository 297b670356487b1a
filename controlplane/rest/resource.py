"""One kind of object under the API: listed, shown, and acted upon by its verbs.

A subclass declares which rows there are (through a selector, so already restricted to the caller),
how they are shown, filtered and sorted, and its verbs. It holds no rules of its own.
"""

# Django REST framework carries no types.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

from django.db.models import Model, QuerySet
from django.http import Http404, QueryDict
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from controlplane.accounts.access import Access
from controlplane.rest import etags
from controlplane.rest.filters import Filter, Parameter, demand_known, narrowed, values_of
from controlplane.rest.pagination import DEFAULT_LIMIT, MAX_LIMIT, CursorPagination, page_of
from controlplane.rest.problems import Problem, invalid
from controlplane.rest.serializers import RowSerializer

#: What an id may be made of; anything else is no address of ours.
ID_PATTERN = r"[A-Za-z0-9_.:-]{1,64}"


class Resource(GenericViewSet):
    """Lists and details; see the module."""

    pagination_class = CursorPagination
    lookup_value_regex = ID_PATTERN
    http_method_names = ["get", "head", "post", "delete"]
    #: One word for an object of this kind, in what is said of it.
    noun: ClassVar[str]
    plural: ClassVar[str]
    #: How a single object is shown, where that is more than in a list.
    detail_serializer_class: ClassVar[type[RowSerializer] | None] = None
    filters: ClassVar[Sequence[Filter]] = ()
    #: What may be sorted by: the name in the address and the column, which is never empty.
    sorts: ClassVar[Mapping[str, str]] = {"id": "pk"}
    default_sort: ClassVar[str] = "-id"
    #: Where the object's cluster stands; "" for objects that belong to none.
    cluster_path: ClassVar[str] = "cluster_id"
    #: Fields that move by themselves, also as "report.at": they do not count for If-Match.
    volatile: ClassVar[Collection[str]] = ()
    #: Who may do what, by action: see `rest.permissions`.
    access: ClassVar[Mapping[str, Access]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        handlers: dict[str, Any] = {name: getattr(cls, name, None) for name in dir(cls)}
        cls.access = {
            "list": Access.SIGNED_IN,
            "retrieve": Access.VIEWER if cls.cluster_path else Access.SIGNED_IN,
            **cls.__dict__.get("access", {}),
            **{name: h.verb.access for name, h in handlers.items() if hasattr(h, "verb")},
            **{name: Access.VIEWER for name, h in handlers.items() if hasattr(h, "reading")},
        }

    # --- what a subclass says -----------------------------------------------------------------

    def rows(self) -> QuerySet[Any]:
        """All rows that the caller may see, with what the serializer needs of their relations."""
        raise NotImplementedError

    def detailed(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """The same rows with what the detail shows beyond the list."""
        return rows

    def context_of(self, rows: Sequence[Any]) -> dict[str, Any]:  # noqa: ARG002
        """What the serializer needs beside the rows of a page, in a fixed number of queries."""
        return {}

    def lock(self, target: Any) -> None:
        """Lock the object before If-Match is compared, in the order in which its actions lock."""
        manager = type(target)._default_manager
        manager.select_for_update(no_key=True, of=("self",)).get(pk=target.pk)

    # --- reading ------------------------------------------------------------------------------

    def list(self, request: Request, **_path: str) -> Response:
        query = request.query_params
        demand_known(query, [parameter.name for parameter in self.list_parameters()])
        only = self._only(request, self.serializer_class)
        page = page_of(
            request, narrowed(self.rows(), query, self.filters), self.sorts, self.default_sort
        )
        context = self.context_of(page.rows)
        shown = self.serializer_class(page.rows, many=True, only=only, context=context).data
        body = {"results": shown, "next": page.next, "previous": page.previous}
        return _tagged(request, body, etags.tag_of(body))

    def retrieve(self, request: Request, pk: str, **_path: str) -> Response:
        demand_known(request.query_params, ["fields"])
        only = self._only(request, self._detail)
        found = self.visible(pk)
        whole = self._whole(found)
        body = {name: value for name, value in whole.items() if not only or name in only}
        return _tagged(request, body, etags.tag_of(whole, self.volatile))

    # --- for the verbs ------------------------------------------------------------------------

    def visible(self, pk: str) -> Any:
        """The object, or 404 where there is none that the caller may see."""
        try:
            found = self.detailed(self.rows()).filter(pk=pk).first()
        except ValueError:  # a number is wanted and this is none
            found = None
        if found is None:
            raise Http404(f"there is no such {self.noun}")
        return found

    def referred(self, rows: QuerySet[Any], pk: str, field: str) -> Any:
        """An object that a body names, among those that the caller may see; 404 otherwise."""
        found = rows.filter(pk=pk).first()
        if found is None:
            raise Problem(
                "not_found",
                f"there is no such {field}",
                [{"field": field, "code": "not_found", "detail": f"there is no such {field}"}],
            )
        return found

    def cluster_of(self, target: Model) -> str:
        """The id of the object's cluster; "" if it has none."""
        if not self.cluster_path:
            return ""
        return str(reduce(getattr, self.cluster_path.split("."), target))

    def tag_of(self, target: Model) -> str:
        return etags.tag_of(self._whole(target), self.volatile)

    def shown(
        self,
        target: Model | None,
        result: Model | None,
        answers: type[serializers.BaseSerializer] | None,
    ) -> Mapping[str, Any] | None:
        """What a verb answers with: what its deed returned, or the object anew."""
        if answers is not None:
            return None if result is None else answers(result).data
        made = result if target is None else target
        return None if made is None else self._whole(self.visible(made.pk))

    # --- for the description ------------------------------------------------------------------

    @classmethod
    def list_parameters(cls) -> Sequence[Parameter]:
        names = list(cls.sorts)
        return [
            *(parameter for one in cls.filters for parameter in one.parameters()),
            Parameter(
                "sort",
                f"Order by this; - before it: downwards. Without it: {cls.default_sort}.",
                {"type": "string", "enum": [*names, *(f"-{name}" for name in names)]},
            ),
            Parameter(
                "limit",
                "How many at most.",
                {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
            ),
            Parameter("cursor", "As found in next or previous.", {"type": "string"}),
            fields_parameter(cls.serializer_class),
        ]

    # --- helpers ------------------------------------------------------------------------------

    @property
    def _detail(self) -> type[RowSerializer]:
        return self.detail_serializer_class or self.serializer_class

    def _whole(self, row: Any) -> Mapping[str, Any]:
        return dict(self._detail(row, context=self.context_of([row])).data)

    def _only(self, request: Request, serializer: type[RowSerializer]) -> Sequence[str]:
        if "fields" not in request.query_params:
            return []
        names = values_of(request.query_params, "fields", many=True)
        known = serializer.Meta.fields
        for name in names:
            if name not in known:
                raise invalid(
                    "fields", f"there is no field {name!r}; there are: {', '.join(known)}"
                )
        return names


@dataclass(frozen=True)
class Reading:
    """What a sub-resource that is only read takes and answers."""

    answers: type[serializers.BaseSerializer]
    parameters: Sequence[Parameter]


Handler = Callable[..., Response]
#: (view, object in the path, query) -> the answer's body.
Read = Callable[[Any, Any, QueryDict], Mapping[str, Any]]


def reading(
    answers: type[serializers.BaseSerializer],
    *,
    path: str,
    parameters: Sequence[Parameter] = (),
) -> Callable[[Read], Handler]:
    """Make a function of an object a sub-resource that is read; `answers` describes its answer."""

    def decorate(read: Read) -> Handler:
        def handler(view: Resource, request: Request, pk: str) -> Response:
            demand_known(request.query_params, [parameter.name for parameter in parameters])
            body = read(view, view.visible(pk), request.query_params)
            return _tagged(request, body, etags.tag_of(body))

        handler.__name__ = read.__name__
        handler.__doc__ = read.__doc__
        handler.reading = Reading(answers, parameters)  # type: ignore[attr-defined]
        made: Handler = action(detail=True, methods=["get"], url_path=path)(handler)
        return made

    return decorate


def fields_parameter(serializer: type[RowSerializer]) -> Parameter:
    schema = {"type": "string", "enum": list(serializer.Meta.fields)}
    return Parameter("fields", "Show these fields only.", schema, many=True)


def _tagged(request: Request, body: Mapping[str, Any], tag: str) -> Response:
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if etags.is_unchanged(request, tag):
        return Response(status=304, headers=headers)
    return Response(body, headers=headers)
