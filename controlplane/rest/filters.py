"""What a list may be narrowed by: each resource declares its filters, and nothing else is accepted.

Several values of one filter mean "any of these"; several filters mean "all of these".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

from django.db.models import Choices, Model, Q, QuerySet
from django.http import QueryDict
from django.utils.dateparse import parse_datetime

from controlplane.rest.problems import Problem, invalid

Row = TypeVar("Row", bound=Model)
#: What an id has after its prefix: see `controlplane.ids`.
_MADE = "[0-7][0-9a-hjkmnp-tv-z]{25}"
MAX_VALUES = 100
MAX_LENGTH = 200


@dataclass(frozen=True)
class Parameter:
    """One query parameter, as the description of the API shows it."""

    name: str
    description: str
    schema: Mapping[str, Any]
    many: bool = False
    required: bool = False


class Filter(Protocol):
    def parameters(self) -> list[Parameter]: ...

    def condition(self, name: str, values: list[str], /) -> Q: ...


@dataclass(frozen=True)
class Exact:
    """Equal to one of the values; with `choices` only those are accepted."""

    name: str
    lookup: str = ""
    choices: type[Choices] | None = None

    def parameters(self) -> list[Parameter]:
        schema: dict[str, Any] = {"type": "string"}
        if self.choices is not None:
            schema["enum"] = list(self.choices.values)
        return [Parameter(self.name, f"Only with this {_readable(self.name)}.", schema, many=True)]

    def condition(self, name: str, values: list[str]) -> Q:
        if self.choices is not None:
            unknown = [value for value in values if value not in self.choices.values]
            if unknown:
                allowed = ", ".join(self.choices.values)
                raise invalid(name, f"{unknown[0]!r} is none of: {allowed}")
        return Q(**{f"{self.lookup or self.name}__in": values})


@dataclass(frozen=True)
class Reference:
    """A related object by its id, or by its name where it has one."""

    name: str
    lookup: str = ""
    id_prefix: str = ""  # "clu_": what is no id of this kind is a name

    def parameters(self) -> list[Parameter]:
        words = "id or name" if self.id_prefix else "id"
        description = f"Only of this {_readable(self.name)}, by {words}."
        return [Parameter(self.name, description, {"type": "string"}, many=True)]

    def condition(self, _name: str, values: list[str]) -> Q:
        lookup = self.lookup or self.name
        ids = [value for value in values if self._is_id(value)]
        names = [value for value in values if value not in ids]
        if not names:
            return Q(**{f"{lookup}_id__in": ids})
        if not ids:
            return Q(**{f"{lookup}__name__in": names})
        return Q(**{f"{lookup}_id__in": ids}) | Q(**{f"{lookup}__name__in": names})

    def _is_id(self, value: str) -> bool:
        """A name may begin as an id does, but goes on in other ways."""
        return not self.id_prefix or re.fullmatch(self.id_prefix + _MADE, value) is not None


@dataclass(frozen=True)
class Flag:
    """True or false; `when_true` is the condition that true stands for."""

    name: str
    when_true: Q
    description: str

    def parameters(self) -> list[Parameter]:
        return [Parameter(self.name, self.description, {"type": "boolean"})]

    def condition(self, name: str, values: list[str]) -> Q:
        return self.when_true if boolean(name, values[-1]) else ~self.when_true


@dataclass(frozen=True)
class Times:
    """A moment, from one (included) to another (not included)."""

    name: str

    def parameters(self) -> list[Parameter]:
        schema = {"type": "string", "format": "date-time"}
        words = _readable(self.name)
        return [
            Parameter(f"{self.name}__gte", f"Only with {words} at this moment or later.", schema),
            Parameter(f"{self.name}__lt", f"Only with {words} before this moment.", schema),
        ]

    def condition(self, name: str, values: list[str]) -> Q:
        return Q(**{name: moment(name, values[-1])})


@dataclass(frozen=True)
class Whole:
    """Equal to one of these whole numbers."""

    name: str
    most: int = 2**31 - 1

    def parameters(self) -> list[Parameter]:
        schema = {"type": "integer", "minimum": 0, "maximum": self.most}
        return [Parameter(self.name, f"Only with this {_readable(self.name)}.", schema, many=True)]

    def condition(self, name: str, values: list[str]) -> Q:
        return Q(**{f"{self.name}__in": [whole(name, value, 0, self.most) for value in values]})


@dataclass(frozen=True)
class Search:
    """Part of a name, whatever its case."""

    lookups: Sequence[str]
    name: str = "q"

    def parameters(self) -> list[Parameter]:
        words = " or ".join(_readable(lookup.replace("__", "'s ")) for lookup in self.lookups)
        description = f"Only where {words} contains this, whatever the case."
        return [Parameter(self.name, description, {"type": "string", "maxLength": MAX_LENGTH})]

    def condition(self, _name: str, values: list[str]) -> Q:
        found = Q()
        for lookup in self.lookups:
            found |= Q(**{f"{lookup}__icontains": values[-1]})
        return found


def narrowed(rows: QuerySet[Row], query: QueryDict, filters: Sequence[Filter]) -> QuerySet[Row]:
    """The rows that fit every filter in the query."""
    for one in filters:
        for parameter in one.parameters():
            if parameter.name in query:
                values = values_of(query, parameter.name, many=parameter.many)
                rows = rows.filter(one.condition(parameter.name, values))
    return rows


def demand_known(query: QueryDict, known: Sequence[str]) -> None:
    """400 for a parameter that does not exist here: a misspelt filter must not mean "all"."""
    unknown = sorted(set(query) - set(known))
    if unknown:
        raise Problem(
            "unknown_parameter",
            f"there is no parameter {unknown[0]!r} here",
            [
                {"field": name, "code": "unknown_parameter", "detail": "not known here"}
                for name in unknown
            ],
        )


def values_of(query: QueryDict, name: str, *, many: bool) -> list[str]:
    """The values of a parameter: repeated, or with `many` also separated by commas."""
    values = query.getlist(name)
    if many:
        values = [value for text in values for value in text.split(",")]
    elif len(values) > 1:
        raise invalid(name, "give this parameter once")
    if len(values) > MAX_VALUES:
        raise invalid(name, f"at most {MAX_VALUES} values")
    if any(not value or len(value) > MAX_LENGTH or "\0" in value for value in values):
        raise invalid(name, f"a value must have 1 to {MAX_LENGTH} characters, none of them NUL")
    return values


def boolean(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise invalid(name, "must be true or false")
    return text == "true"


def whole(name: str, text: str, least: int, most: int) -> int:
    """A whole number within bounds; 400 otherwise."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise invalid(name, "must be a whole number")
    if not least <= int(text) <= most:
        raise invalid(name, f"must be from {least} to {most}")
    return int(text)


def moment(name: str, text: str) -> datetime:
    """An ISO 8601 time with its zone; 400 otherwise."""
    try:
        # An unescaped "+" of a zone arrives as a space.
        parsed = parse_datetime(text.replace(" ", "+") if "T" in text else text)
        if parsed is not None and parsed.tzinfo is not None:
            return parsed.astimezone(UTC)  # the database knows fewer zones than Python
    except (ValueError, OverflowError):
        pass
    raise invalid(name, "must be a time with its zone, such as 2026-11-21T12:00:00Z")


def _readable(name: str) -> str:
    return name.replace("_", " ")
