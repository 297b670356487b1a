"""How clusters, racks, nodes, cards, repairs and windows are shown."""

from __future__ import annotations

from typing import Any

from django.utils import timezone
from rest_framework import serializers

from controlplane.fleet.models import Cluster, Gpu, MaintenanceWindow, Node, Rack, RepairRecord
from controlplane.rest.serializers import Reasoned, RowSerializer


class ClusterSerializer(RowSerializer):
    class Meta:
        model = Cluster
        fields: tuple[str, ...] = ("id", "name", "gpu_hour_price", "currency", "change_seq")


class ClusterDetailSerializer(ClusterSerializer):
    limits = serializers.SerializerMethodField()

    class Meta(ClusterSerializer.Meta):
        fields = (*ClusterSerializer.Meta.fields, "limits")

    def get_limits(self, cluster: Cluster) -> dict[str, int]:
        """The limits that were set here, in nodes by scope; for others the default holds."""
        return dict(cluster.budget_limits.order_by("scope").values_list("scope", "nodes"))


class RackSerializer(RowSerializer):
    cluster_name = serializers.CharField(source="cluster.name")

    class Meta:
        model = Rack
        fields = ("id", "name", "cluster_id", "cluster_name")


class NodeSerializer(RowSerializer):
    cluster_name = serializers.CharField(source="cluster.name")
    rack_name = serializers.CharField(source="rack.name", default=None, allow_null=True)
    reachable = serializers.BooleanField(source="lease.reachable", default=False)
    unreachable_since = serializers.DateTimeField(
        source="lease.unreachable_since", default=None, allow_null=True
    )
    last_beat_at = serializers.DateTimeField(
        source="lease.last_beat_at", default=None, allow_null=True
    )
    gpu_model = serializers.SerializerMethodField()
    gpu_count = serializers.SerializerMethodField()

    class Meta:
        model = Node
        fields: tuple[str, ...] = (
            "id",
            "name",
            "cluster_id",
            "cluster_name",
            "rack_id",
            "rack_name",
            "switch",
            "address",
            "state",
            "state_since",
            "state_reason",
            "state_deadline",
            "spare",
            "hold_reason",
            "drained_by",
            "reset_pending",
            "reachable",
            "unreachable_since",
            "last_beat_at",
            "boot_id",
            "booted_at",
            "agent_version",
            "gpu_model",
            "gpu_count",
            "enrolled_at",
            "key_revoked_at",
        )

    def get_gpu_model(self, node: Node) -> str:
        """The model of its cards; empty where it has none."""
        return str(self.context["cards"].get(node.pk, (0, ""))[1])

    def get_gpu_count(self, node: Node) -> int:
        return int(self.context["cards"].get(node.pk, (0, ""))[0])


class CardSerializer(RowSerializer):
    """A card as its node shows it."""

    class Meta:
        model = Gpu
        fields = ("uuid", "index", "serial", "model", "memory_bytes", "pci_address")


class NodeDetailSerializer(NodeSerializer):
    gpus = CardSerializer(many=True)

    class Meta(NodeSerializer.Meta):
        fields = (*NodeSerializer.Meta.fields, "gpus", "report")


class GpuSerializer(RowSerializer):
    node_name = serializers.CharField(source="node.name", default=None, allow_null=True)
    cluster_id = serializers.CharField(source="node.cluster_id", default=None, allow_null=True)

    class Meta:
        model = Gpu
        fields = (
            "uuid",
            "serial",
            "model",
            "memory_bytes",
            "node_id",
            "node_name",
            "cluster_id",
            "index",
            "pci_address",
            "first_seen_at",
        )


class RepairSerializer(RowSerializer):
    node_name = serializers.CharField(source="node.name")
    cluster_id = serializers.CharField(source="node.cluster_id")
    gpu_uuid = serializers.CharField(source="gpu_id", allow_null=True)

    class Meta:
        model = RepairRecord
        fields = ("id", "gpu_uuid", "node_id", "node_name", "cluster_id", "rung", "step_id", "at")


class MaintenanceSerializer(RowSerializer):
    class Meta:
        model = MaintenanceWindow
        fields = (
            "id",
            "cluster_id",
            "rack_id",
            "node_id",
            "starts_at",
            "ends_at",
            "closed_at",
            "owner",
            "reason",
        )


# --- bodies ---------------------------------------------------------------------------------------


class NewWindow(Reasoned):
    cluster = serializers.CharField(max_length=64, help_text="The cluster's id or name.")
    rack = serializers.CharField(
        max_length=64, default=None, allow_null=True, help_text="The rack's id: only this rack."
    )
    node = serializers.CharField(
        max_length=64, default=None, allow_null=True, help_text="The node's id: only this node."
    )
    starts_at = serializers.DateTimeField(
        default=None, allow_null=True, help_text="Now if left out."
    )
    ends_at = serializers.DateTimeField()

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        now = timezone.now()
        errors = {}
        if attrs["rack"] is not None and attrs["node"] is not None:
            errors["node"] = "name a rack or a node, not both"
        if attrs["ends_at"] <= (attrs["starts_at"] or now):
            errors["ends_at"] = "must be after starts_at"
        elif attrs["ends_at"] <= now:
            errors["ends_at"] = "must not be over already"
        if errors:
            raise serializers.ValidationError(errors)
        return attrs
