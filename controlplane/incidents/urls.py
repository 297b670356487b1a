from __future__ import annotations

from django.urls import path

from controlplane.incidents import views

urlpatterns = [
    path("", views.incidents, name="incidents"),
    path("<str:incident_id>", views.incident, name="incident"),
    path("<str:incident_id>/acknowledge", views.acknowledge, name="incident-acknowledge"),
    path("<str:incident_id>/note", views.note, name="incident-note"),
    path("<str:incident_id>/postmortem", views.postmortem, name="incident-postmortem"),
    path("<str:incident_id>/postmortem.md", views.export, name="incident-export"),
    path("<str:incident_id>/runs/<str:run_id>/retry", views.retry, name="run-retry"),
    path("<str:incident_id>/runs/<str:run_id>/cancel", views.cancel, name="run-cancel"),
]
