"""How failures are shown."""

from __future__ import annotations

from rest_framework import serializers

from controlplane.health.models import Failure, Signal
from controlplane.rest.serializers import RowSerializer


class FailureSerializer(RowSerializer):
    node_name = serializers.CharField(source="node.name", default=None, allow_null=True)
    gpu_uuid = serializers.CharField(source="gpu_id", allow_null=True)
    confidence = serializers.ChoiceField(choices=["high", "medium", "low"], read_only=True)
    to_verify = serializers.ListField(child=serializers.CharField(), read_only=True)

    class Meta:
        model = Failure
        fields: tuple[str, ...] = (
            "id",
            "code",
            "fault_class",
            "summary",
            "needed",
            "urgency",
            "rule",
            "confidence",
            "to_verify",
            "node_id",
            "node_name",
            "gpu_uuid",
            "job_id",
            "replica",
            "observed_at",
            "last_seen_at",
            "count",
            "created_at",
        )


class SignalSerializer(RowSerializer):
    """One observation, as it was made."""

    class Meta:
        model = Signal
        fields = ("id", "kind", "source", "raw", "data", "boot_id", "observed_at", "recorded_at")


class FailureDetailSerializer(FailureSerializer):
    signals = SignalSerializer(many=True, source="newest_signals")

    class Meta(FailureSerializer.Meta):
        fields = (*FailureSerializer.Meta.fields, "signals")
