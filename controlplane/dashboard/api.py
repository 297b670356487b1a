"""The API's audit trail, which belongs to no single app."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import AuditEvent
from controlplane.fleet.api import IN_CLUSTER
from controlplane.fleet.selectors import audit_for
from controlplane.rest.filters import Exact, Search, Times
from controlplane.rest.resource import Resource
from controlplane.rest.serializers import RowSerializer


class AuditEventSerializer(RowSerializer):
    class Meta:
        model = AuditEvent
        fields = (
            "id",
            "at",
            "actor_kind",
            "actor_id",
            "request_id",
            "cluster_id",
            "verb",
            "object_type",
            "object_id",
            "before",
            "after",
            "reason",
            "position",
            "hash",
        )


class Audit(Resource):
    noun, plural = "audit event", "audit events"
    queryset = AuditEvent.objects.none()
    serializer_class = AuditEventSerializer
    filters = (
        IN_CLUSTER,
        Exact("verb"),
        Exact("object_type"),
        Exact("object_id"),
        Exact("actor_kind", choices=ActorKind),
        Exact("actor_id"),
        Times("at"),
        Search(["reason"]),
    )

    def rows(self) -> QuerySet[AuditEvent]:
        return audit_for(self.request.user)
