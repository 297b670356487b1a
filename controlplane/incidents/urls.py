from __future__ import annotations

from django.urls import path

from controlplane.incidents import views
from controlplane.incidents.views import approvals, runs

urlpatterns = [
    path("incidents/", views.incidents, name="incidents"),
    path("incidents/<str:incident_id>", views.incident, name="incident"),
    path("incidents/<str:incident_id>/acknowledge", views.acknowledge, name="incident-acknowledge"),
    path("incidents/<str:incident_id>/bring-back", views.bring_back, name="incident-bring-back"),
    path("incidents/<str:incident_id>/close", views.close, name="incident-close"),
    path("incidents/<str:incident_id>/note", views.note, name="incident-note"),
    path("incidents/<str:incident_id>/resolve", views.resolve, name="incident-resolve"),
    path("incidents/<str:incident_id>/postmortem", views.postmortem, name="incident-postmortem"),
    path("incidents/<str:incident_id>/postmortem.md", views.export, name="incident-export"),
    path("runs/<str:run_id>", runs.run, name="run"),
    path("runs/<str:run_id>/retry", runs.retry, name="run-retry"),
    path("runs/<str:run_id>/pause", runs.pause, name="run-pause"),
    path("runs/<str:run_id>/resume", runs.resume, name="run-resume"),
    path("runs/<str:run_id>/cancel", runs.cancel, name="run-cancel"),
    path("approvals/<str:approval_id>/approve", approvals.approve, name="approval-approve"),
    path("approvals/<str:approval_id>/reject", approvals.reject, name="approval-reject"),
]
