from __future__ import annotations

from django.apps import AppConfig


class HealthConfig(AppConfig):
    name = "controlplane.health"
    default_auto_field = "django.db.models.BigAutoField"
