from __future__ import annotations

from django.urls import path

from controlplane.dashboard import views

urlpatterns = [
    path("", views.overview, name="overview"),
    path("automation", views.automation, name="automation"),
    path("healthz", views.healthz, name="healthz"),
    path("readyz", views.readyz, name="readyz"),
]
