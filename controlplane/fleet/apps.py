from __future__ import annotations

from django.apps import AppConfig


class FleetConfig(AppConfig):
    name = "controlplane.fleet"
    default_auto_field = "django.db.models.BigAutoField"
