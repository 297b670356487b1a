from __future__ import annotations

from django.urls import path

from controlplane.jobs import views

urlpatterns = [
    path("", views.jobs, name="jobs"),
    path("<str:job_id>/series", views.series, name="job-series"),
]
