from __future__ import annotations

from django.urls import path

from controlplane.local import views

urlpatterns = [path("nodes/<str:node_id>/fault", views.break_card, name="node-fault")]
