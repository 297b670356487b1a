"""How jobs, replicas, checkpoints and what is held for jobs are shown, and what is told of them."""

# Django REST framework carries no types.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from controlplane.jobs.models import (
    Checkpoint,
    Directive,
    Job,
    LedgerRange,
    NodeExclusion,
    Placement,
    Replica,
    SpareReservation,
)
from controlplane.rest.serializers import Body, Number, Reasoned, RowSerializer

#: Options travel through encoders that recurse.
MAX_NESTING = 32
MAX_REPLICAS = 4096
MAX_NODES = 512  # of a replica
MAX_GPUS = 8 * MAX_NODES
MAX_WARM_SPARES = 64
MAX_STEP = 2**53


class JobSerializer(RowSerializer):
    cluster_name = serializers.CharField(source="cluster.name")
    active_replicas = serializers.IntegerField()
    failing_tiers = serializers.SerializerMethodField()

    class Meta:
        model = Job
        fields: tuple[str, ...] = (
            "id",
            "name",
            "cluster_id",
            "cluster_name",
            "state",
            "program",
            "world_replicas",
            "min_replicas",
            "gpus_per_replica",
            "nodes_per_replica",
            "warm_spares",
            "whole",
            "active_replicas",
            "step",
            "step_at",
            "epoch",
            "loss",
            "samples_per_s",
            "ledger_step",
            "recomputed_steps",
            "failing_tiers",
            "created_at",
            "started_at",
            "ended_at",
        )

    def get_failing_tiers(self, job: Job) -> list[str]:
        """The tiers to which saves of some replica fail or hang, as its ranks say."""
        return [tier.value for tier in self.context["failing_tiers"].get(job.pk, [])]


class PlacementSerializer(RowSerializer):
    node_name = serializers.CharField(source="node.name")

    class Meta:
        model = Placement
        fields = ("id", "node_rank", "node_id", "node_name", "state", "joined_at")


class ReplicaSerializer(RowSerializer):
    job_name = serializers.CharField(source="job.name")
    placements = PlacementSerializer(many=True, source="present")
    node_id = serializers.SerializerMethodField()
    node_name = serializers.SerializerMethodField()
    placement_id = serializers.SerializerMethodField()

    class Meta:
        model = Replica
        fields = (
            "id",
            "job_id",
            "job_name",
            "index",
            "state",
            "state_since",
            "node_id",
            "node_name",
            "placement_id",
            "placements",
        )

    def get_node_id(self, replica: Replica) -> str | None:
        slot = _slot(replica)
        return slot.node_id if slot else None

    def get_node_name(self, replica: Replica) -> str | None:
        slot = _slot(replica)
        return slot.node.name if slot else None

    def get_placement_id(self, replica: Replica) -> str | None:
        slot = _slot(replica)
        return slot.pk if slot else None


class WarmSpareSerializer(RowSerializer):
    node_name = serializers.CharField(source="node.name")

    class Meta:
        model = Placement
        fields = ("id", "node_id", "node_name", "started_at", "follows_since")


class JobDetailSerializer(JobSerializer):
    replicas = ReplicaSerializer(many=True, source="placed_replicas")
    warm_spares_held = WarmSpareSerializer(many=True, source="held_warm_spares")

    class Meta(JobSerializer.Meta):
        fields = (*JobSerializer.Meta.fields, "options", "replicas", "warm_spares_held")


class CheckpointSerializer(RowSerializer):
    job_name = serializers.CharField(source="job.name")

    class Meta:
        model = Checkpoint
        fields = (
            "id",
            "job_id",
            "job_name",
            "step",
            "tier",
            "path",
            "bytes",
            "stored",
            "digest",
            "stall_s",
            "seconds",
            "at",
            "every_s",
            "ettr",
        )


class LedgerRangeSerializer(RowSerializer):
    class Meta:
        model = LedgerRange
        fields = (
            "step_from",
            "step_to",
            "epoch",
            "samples",
            "computed",
            "lost",
            "duplicated",
            "dropped",
            "merged",
            "proof",
            "order",
            "recorded_at",
        )


class LedgerPage(serializers.Serializer):
    results = LedgerRangeSerializer(many=True)
    next = serializers.CharField(allow_null=True)
    previous = serializers.CharField(allow_null=True)


class ExclusionSerializer(RowSerializer):
    node_name = serializers.CharField(source="node.name")

    class Meta:
        model = NodeExclusion
        fields = ("id", "job_id", "node_id", "node_name", "reason", "created_at")


class SpareReservationSerializer(RowSerializer):
    node_name = serializers.CharField(source="node.name")

    class Meta:
        model = SpareReservation
        fields = (
            "id",
            "cluster_id",
            "node_id",
            "node_name",
            "job_id",
            "holder",
            "reason",
            "created_at",
            "expires_at",
            "released_at",
        )


class DirectiveSerializer(RowSerializer):
    class Meta:
        model = Directive
        fields = ("id", "job_id", "verb", "args", "created_at", "expires_at")


# --- bodies ---------------------------------------------------------------------------------------


class NewJob(Body):
    cluster = serializers.CharField(max_length=64, help_text="The cluster's id or name.")
    name = serializers.RegexField(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=63)
    program = serializers.RegexField(
        r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$",  # what `node_agent.wire` takes for a name
        max_length=63,
        help_text="As the nodes' agents name it.",
    )
    world_replicas = serializers.IntegerField(min_value=1, max_value=MAX_REPLICAS)
    min_replicas = serializers.IntegerField(min_value=1, max_value=MAX_REPLICAS, default=1)
    gpus_per_replica = serializers.IntegerField(
        min_value=1,
        max_value=MAX_GPUS,
        default=None,
        allow_null=True,
        help_text="On all of its nodes together; eight on each if left out.",
    )
    nodes_per_replica = serializers.IntegerField(
        min_value=1,
        max_value=MAX_NODES,
        default=1,
        help_text="One that is on several nodes lives and dies as one, on all of them.",
    )
    warm_spares = serializers.IntegerField(
        min_value=0,
        max_value=MAX_WARM_SPARES,
        default=0,
        help_text="How many processes hold its state for whichever replica dies; for jobs that "
        "Drydock starts.",
    )
    options = serializers.DictField(
        default=dict, help_text="Handed to the program, as its agents allow."
    )

    def validate_options(self, options: dict[str, Any]) -> dict[str, Any]:
        if _depth(options) > MAX_NESTING:
            raise serializers.ValidationError(
                f"may be nested {MAX_NESTING} deep at most", code="too_deep"
            )
        return options

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if attrs["min_replicas"] > attrs["world_replicas"]:
            raise serializers.ValidationError(
                {"min_replicas": "must not exceed world_replicas"}, code="max_value"
            )
        if attrs["nodes_per_replica"] > 1:
            _check_several_nodes(attrs)
        return attrs


def _check_several_nodes(attrs: dict[str, Any]) -> None:
    nodes, gpus = attrs["nodes_per_replica"], attrs["gpus_per_replica"]
    errors = {}
    if attrs["world_replicas"] > 1:
        errors["nodes_per_replica"] = (
            "only a job of one replica can have it on several nodes: set world_replicas to 1"
        )
    if attrs["warm_spares"]:
        errors["warm_spares"] = (
            "no process can hold the state of a replica on several nodes: leave it at 0"
        )
    if gpus is not None and gpus % nodes:
        errors["gpus_per_replica"] = (
            f"must be shared out evenly to {nodes} nodes: give a multiple of {nodes}"
        )
    if errors:
        raise serializers.ValidationError(errors, code="invalid")


class WarmSpares(Reasoned):
    count = serializers.IntegerField(min_value=0, max_value=MAX_WARM_SPARES)


class Progress(Body):
    step = serializers.IntegerField(
        min_value=0, max_value=MAX_STEP, help_text="The newest step that is done."
    )
    at = serializers.DateTimeField(
        default=None, allow_null=True, help_text="When; now if left out."
    )
    loss = Number(default=None, allow_null=True)
    samples_per_s = Number(default=None, allow_null=True, min_value=0)


class NewDirective(Reasoned):
    verb = serializers.ChoiceField(["checkpoint"])
    ttl_s = Number(
        default=60, min_value=1, max_value=3600, help_text="Not obeyed later than this, in seconds."
    )


class NewExclusion(Reasoned):
    node = serializers.CharField(max_length=64, help_text="The node's id.")


class NewReservation(Reasoned):
    cluster = serializers.CharField(max_length=64, help_text="The cluster's id or name.")
    holder = serializers.CharField(
        max_length=150, help_text="Who keeps it, as your scheduler names it."
    )
    ttl_s = Number(
        min_value=1, max_value=7 * 86_400, help_text="Given back after this, in seconds."
    )
    job = serializers.CharField(max_length=64, default=None, allow_null=True)
    gpu_model = serializers.CharField(max_length=255, default="", allow_blank=True)
    rack = serializers.CharField(max_length=64, default=None, allow_null=True)


def _slot(replica: Replica) -> Placement | None:
    """Where it sits now; the selector fetches the present placement only."""
    return next(iter(replica.present), None)  # type: ignore[attr-defined]


def _depth(value: Any) -> int:
    """How deep lists and objects are nested, without recursion of our own."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [
            inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth
