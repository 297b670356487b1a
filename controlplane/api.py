"""Every address of the API, assembled from the apps; see docs/api.md."""

from __future__ import annotations

from django.urls import URLPattern, URLResolver, include, path, re_path
from rest_framework.routers import SimpleRouter

from controlplane.fleet import api as fleet
from controlplane.rest import docs, problems

router = SimpleRouter(trailing_slash=False)
router.register("nodes", fleet.Nodes, "api-nodes")

urlpatterns: list[URLPattern | URLResolver] = [
    path("v1/openapi.json", docs.openapi, name="api-openapi"),
    path("v1/docs", docs.openapi, name="api-docs"),
    path("v1/", include(router.urls)),
    re_path("", problems.not_found),
]
