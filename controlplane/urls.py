"""Every page's address."""

from __future__ import annotations

from django.urls import URLPattern, URLResolver, include, path

from controlplane.metrics import metrics

urlpatterns: list[URLPattern | URLResolver] = [
    path("metrics", metrics, name="metrics"),
    path("", include("controlplane.dashboard.urls")),
    path("", include("controlplane.accounts.urls")),
    path("", include("controlplane.dashboard.people_urls")),
    path("enrolment/", include("controlplane.fleet.enrolment_urls")),
    path("", include("controlplane.local.urls")),
    path("api/", include("controlplane.api")),
    path("jobs/", include("controlplane.jobs.urls")),
    path("", include("controlplane.incidents.urls")),
]

handler400 = "controlplane.rest.problems.bad_request"
handler500 = "controlplane.rest.problems.server_error"
