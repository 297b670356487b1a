"""What serializers share: rows that may be shown in part, and bodies that refuse what they lack."""

# Django REST framework carries no types.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from rest_framework import serializers

REASON_MAX = 500


class RowSerializer(serializers.ModelSerializer):
    """A row as it is read. `only` names the fields to show; none: all of them."""

    def __init__(self, *args: Any, only: Collection[str] = (), **kwargs: Any) -> None:
        self._only = frozenset(only)
        super().__init__(*args, **kwargs)

    def get_fields(self) -> dict[str, serializers.Field]:
        fields = super().get_fields()
        for field in fields.values():
            field.read_only = True
            field.required = False
        return {name: f for name, f in fields.items() if not self._only or name in self._only}


class Number(serializers.FloatField):
    """A finite number, as JSON knows it: neither text nor NaN."""

    def to_internal_value(self, data: Any) -> float:
        if not isinstance(data, int | float) or isinstance(data, bool):
            self.fail("invalid")
        value: float = super().to_internal_value(data)
        if not math.isfinite(value):
            self.fail("invalid")
        return value


class Body(serializers.Serializer):
    """The body of a write. A field that it does not know is refused, not ignored."""

    dry_run = serializers.BooleanField(
        default=False, help_text="Check everything, tell what would change, and change nothing."
    )

    def to_internal_value(self, data: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(data) - set(self.fields))
        if unknown:
            raise serializers.ValidationError(
                {
                    name: serializers.ErrorDetail("not known here", "unknown_field")
                    for name in unknown
                }
            )
        known: dict[str, Any] = super().to_internal_value(data)
        return known


class Reasoned(Body):
    reason = serializers.CharField(
        max_length=REASON_MAX, help_text="Why; it stands in the audit trail beside your name."
    )


class Change(serializers.Serializer):
    """One entry that the write leaves in the audit trail."""

    verb = serializers.CharField()
    object_type = serializers.CharField()
    object_id = serializers.CharField()
    before = serializers.DictField()
    after = serializers.DictField()
