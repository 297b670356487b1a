"""Every address of the API, assembled from the apps; see docs/api.md."""

from __future__ import annotations

from django.urls import URLPattern, URLResolver, include, path, re_path
from rest_framework.routers import SimpleRouter

from controlplane.dashboard import api as dashboard
from controlplane.fleet import api as fleet
from controlplane.incidents import api as incidents
from controlplane.jobs import api as jobs
from controlplane.rest import docs, problems
from controlplane.rest.resource import Resource

RESOURCES: dict[str, type[Resource]] = {
    "clusters": incidents.Clusters,
    "racks": fleet.Racks,
    "nodes": incidents.Nodes,
    "gpus": fleet.Gpus,
    "spares": incidents.Spares,
    "spare-reservations": jobs.SpareReservations,
    "repairs": fleet.Repairs,
    "maintenance": fleet.MaintenanceWindows,
    "jobs": incidents.Jobs,
    "replicas": jobs.Replicas,
    "checkpoints": jobs.Checkpoints,
    "exclusions": jobs.Exclusions,
    "failures": incidents.Failures,
    "incidents": incidents.Incidents,
    "runs": incidents.Runs,
    "steps": incidents.Steps,
    "decisions": incidents.Decisions,
    "approvals": incidents.Approvals,
    "playbooks": incidents.Playbooks,
    "breakers": incidents.Breakers,
    "rma-cases": incidents.RmaCases,
    "audit": dashboard.Audit,
}

router = SimpleRouter(trailing_slash=False)
for name, resource in RESOURCES.items():
    router.register(name, resource, f"api-{name}")

urlpatterns: list[URLPattern | URLResolver] = [
    path("v1/openapi.json", docs.openapi, name="api-openapi"),
    path("v1/docs", docs.page, name="api-docs"),
    path("v1/", include(router.urls)),
    re_path("", problems.not_found),
]
