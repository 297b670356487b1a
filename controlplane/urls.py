"""Every page's address."""

from __future__ import annotations

from django.urls import URLPattern, URLResolver, include, path

urlpatterns: list[URLPattern | URLResolver] = [
    path("", include("controlplane.dashboard.urls")),
    path("", include("controlplane.accounts.urls")),
    path("jobs/", include("controlplane.jobs.urls")),
    path("incidents/", include("controlplane.incidents.urls")),
]
