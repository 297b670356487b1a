from __future__ import annotations

from django.urls import path

from controlplane.fleet import enrolment_views as views

urlpatterns = [
    path("", views.enrolment, name="enrolment"),
    path("create", views.create, name="join-token-create"),
    path("<str:join_token_id>/revoke", views.revoke, name="join-token-revoke"),
]
