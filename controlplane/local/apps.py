from __future__ import annotations

from django.apps import AppConfig


class LocalConfig(AppConfig):
    name = "controlplane.local"
    default_auto_field = "django.db.models.BigAutoField"
