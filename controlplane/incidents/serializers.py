"""How incidents, runs, approvals and what limits automation are shown, and told what to do."""

# Django REST framework carries no types.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from controlplane.fleet.models import Node
from controlplane.incidents.choices import Mode, Scope
from controlplane.incidents.models import (
    Approval,
    Breaker,
    Incident,
    Playbook,
    PlaybookRun,
    PlaybookStep,
    RmaCase,
    TimelineEntry,
)
from controlplane.incidents.modes import modes_of
from controlplane.rest.serializers import Body, Reasoned, RowSerializer


class IncidentSerializer(RowSerializer):
    cluster_name = serializers.CharField(source="cluster.name")
    job_name = serializers.CharField(source="job.name", default=None, allow_null=True)
    node_name = serializers.CharField(source="node.name", default=None, allow_null=True)
    owner_name = serializers.CharField(source="owner.username", default=None, allow_null=True)

    class Meta:
        model = Incident
        fields: tuple[str, ...] = (
            "id",
            "title",
            "severity",
            "state",
            "code",
            "cause",
            "subject",
            "cluster_id",
            "cluster_name",
            "job_id",
            "job_name",
            "replica",
            "node_id",
            "node_name",
            "owner_name",
            "occurred_at",
            "opened_at",
            "mitigated_at",
            "restored_at",
            "resolved_at",
            "gpu_seconds_lost",
        )


class IncidentDetailSerializer(IncidentSerializer):
    failures = serializers.SerializerMethodField()
    runs = serializers.SerializerMethodField()

    class Meta(IncidentSerializer.Meta):
        fields = (
            *IncidentSerializer.Meta.fields,
            "impact",
            "postmortem",
            "postmortem_digest",
            "failures",
            "runs",
        )

    def get_failures(self, incident: Incident) -> list[str]:
        """The ids of what broke."""
        return list(incident.failures.order_by("pk").values_list("pk", flat=True))

    def get_runs(self, incident: Incident) -> list[str]:
        """The ids of the playbook runs about it."""
        return list(incident.runs.order_by("pk").values_list("pk", flat=True))


class TimelineEntrySerializer(RowSerializer):
    class Meta:
        model = TimelineEntry
        fields = ("at", "kind", "text", "data")


class Timeline(serializers.Serializer):
    entries = TimelineEntrySerializer(many=True)


class RunSerializer(RowSerializer):
    job_name = serializers.CharField(source="job.name", default=None, allow_null=True)
    node_name = serializers.CharField(source="node.name", default=None, allow_null=True)

    class Meta:
        model = PlaybookRun
        fields: tuple[str, ...] = (
            "id",
            "playbook",
            "version",
            "title",
            "state",
            "state_reason",
            "cluster_id",
            "incident_id",
            "job_id",
            "job_name",
            "node_id",
            "node_name",
            "requested_by",
            "subject",
            "created_at",
            "deadline",
            "finished_at",
        )


class StepSerializer(RowSerializer):
    class Meta:
        model = PlaybookStep
        fields: tuple[str, ...] = (
            "id",
            "run_id",
            "position",
            "key",
            "title",
            "effect",
            "disruptive",
            "state",
            "attempts",
            "wake_at",
            "timeout_s",
            "started_at",
            "finished_at",
            "outcome",
        )


class StepDetailSerializer(StepSerializer):
    class Meta(StepSerializer.Meta):
        fields = (*StepSerializer.Meta.fields, "prose", "undo", "evidence")


class RunDetailSerializer(RunSerializer):
    steps = StepSerializer(many=True)

    class Meta(RunSerializer.Meta):
        fields = (*RunSerializer.Meta.fields, "steps")


class DecisionSerializer(RowSerializer):
    """A step that decided or did something, with what it knew."""

    playbook = serializers.CharField(source="run.playbook")
    cluster_id = serializers.CharField(source="run.cluster_id")
    incident_id = serializers.CharField(source="run.incident_id", allow_null=True)
    job_id = serializers.CharField(source="run.job_id", allow_null=True)
    node_id = serializers.CharField(source="run.node_id", allow_null=True)

    class Meta:
        model = PlaybookStep
        fields = (
            "id",
            "run_id",
            "playbook",
            "cluster_id",
            "incident_id",
            "job_id",
            "node_id",
            "title",
            "state",
            "outcome",
            "evidence",
            "finished_at",
        )


class ApprovalSerializer(RowSerializer):
    playbook = serializers.CharField(source="run.playbook")
    title = serializers.CharField(source="run.title")

    class Meta:
        model = Approval
        fields: tuple[str, ...] = (
            "id",
            "run_id",
            "playbook",
            "title",
            "cluster_id",
            "state",
            "digest",
            "requested_at",
            "decided_at",
            "decided_by",
            "reason",
        )


class ApprovalDetailSerializer(ApprovalSerializer):
    class Meta(ApprovalSerializer.Meta):
        fields = (*ApprovalSerializer.Meta.fields, "plan")


class BreakerSerializer(RowSerializer):
    class Meta:
        model = Breaker
        fields = ("id", "cluster_id", "code", "reason", "opened_at", "closed_at", "closed_by")


class RmaCaseSerializer(RowSerializer):
    gpu_uuid = serializers.CharField(source="gpu_id")
    gpu_serial = serializers.CharField(source="gpu.serial")
    node_name = serializers.CharField(source="node.name")

    class Meta:
        model = RmaCase
        fields: tuple[str, ...] = (
            "id",
            "state",
            "gpu_uuid",
            "gpu_serial",
            "node_id",
            "node_name",
            "cluster_id",
            "incident_id",
            "reason",
            "vendor_reference",
            "opened_at",
            "closed_at",
        )


class RmaCaseDetailSerializer(RmaCaseSerializer):
    class Meta(RmaCaseSerializer.Meta):
        fields = (*RmaCaseSerializer.Meta.fields, "bundle")


class PlaybookModeRow(serializers.Serializer):
    cluster_id = serializers.CharField()
    cluster_name = serializers.CharField()
    mode = serializers.ChoiceField(Mode.choices)


class PlaybookSerializer(RowSerializer):
    """A playbook, and how far it may go in each cluster that the caller sees."""

    disruptive = serializers.BooleanField()
    modes = serializers.SerializerMethodField()

    class Meta:
        model = Playbook
        fields: tuple[str, ...] = (
            "name",
            "version",
            "summary",
            "deadline_s",
            "disruptive",
            "modes",
        )

    @extend_schema_field(PlaybookModeRow(many=True))
    def get_modes(self, playbook: Playbook) -> list[dict[str, str]]:
        told: dict[tuple[str, str], str] = self.context["modes"]
        modes = modes_of(playbook)
        return [
            {
                "cluster_id": pk,
                "cluster_name": name,
                "mode": modes.in_force(told.get((playbook.pk, pk))),
            }
            for pk, name in self.context["clusters"]
        ]


class PlaybookDetailSerializer(PlaybookSerializer):
    class Meta(PlaybookSerializer.Meta):
        fields = (*PlaybookSerializer.Meta.fields, "steps")


# --- what schedulers read -------------------------------------------------------------------------


class UsableNodeSerializer(serializers.ModelSerializer):
    rack_name = serializers.CharField(allow_null=True)
    gpu_model = serializers.CharField(allow_null=True)
    gpu_count = serializers.IntegerField()

    class Meta:
        model = Node
        fields = (
            "id",
            "name",
            "address",
            "rack_id",
            "rack_name",
            "spare",
            "gpu_model",
            "gpu_count",
        )
        read_only_fields = fields


class UsableNodes(serializers.Serializer):
    """The nodes that may take work now, and the number to ask for changes after."""

    change_seq = serializers.IntegerField()
    nodes = UsableNodeSerializer(many=True)


class ChangedObject(serializers.Serializer):
    type = serializers.CharField()
    id = serializers.CharField()
    seq = serializers.IntegerField()
    url = serializers.CharField(allow_null=True)


class Changes(serializers.Serializer):
    """What was written after a number; ask again after `seq`, at once where there is `more`."""

    seq = serializers.IntegerField()
    more = serializers.BooleanField()
    changes = ChangedObject(many=True)


class BudgetUseRow(serializers.Serializer):
    scope = serializers.ChoiceField(Scope.choices)
    label = serializers.CharField()
    limit = serializers.IntegerField()
    used = serializers.IntegerField()
    left = serializers.IntegerField()


class Budgets(serializers.Serializer):
    budgets = BudgetUseRow(many=True)


# --- bodies ---------------------------------------------------------------------------------------


class MaybeReasoned(Body):
    reason = serializers.CharField(
        max_length=500, default="", allow_blank=True, help_text="Stands in the timeline as a note."
    )


class NewNote(Body):
    text = serializers.CharField(max_length=10_000)


class NewPostmortem(Body):
    text = serializers.CharField(max_length=100_000, allow_blank=True, trim_whitespace=False)
    edited = serializers.CharField(
        max_length=64,
        help_text="The `postmortem_digest` of the text that you have read: that text is replaced.",
    )


class Signature(Reasoned):
    digest = serializers.CharField(
        max_length=64, help_text="The digest of the plan that you have read: that plan is approved."
    )


class Sending(Reasoned):
    vendor_reference = serializers.CharField(max_length=100)


class NewMove(Reasoned):
    replica = serializers.IntegerField(
        min_value=0, max_value=4096, help_text="The replica's number in the job."
    )
    node = serializers.CharField(
        max_length=64,
        default=None,
        allow_null=True,
        help_text="The id of the node it moves to; the one that suits it best if left out.",
    )
    leaving = serializers.CharField(
        max_length=64,
        default=None,
        allow_null=True,
        help_text="The id of the node it leaves, where the replica is on several.",
    )


class NewMode(Reasoned):
    cluster = serializers.CharField(max_length=64, help_text="The cluster's id or name.")
    mode = serializers.ChoiceField(Mode.choices)


class NewLimit(Reasoned):
    scope = serializers.ChoiceField(Scope.choices)
    nodes = serializers.IntegerField(min_value=0, max_value=1_000_000)
