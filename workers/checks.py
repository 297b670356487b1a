"""What must hold before a process is started: `manage.py check`, the keeper and the workers ask."""

from __future__ import annotations

from django.core.checks import CheckMessage, Error, register

from controlplane.health.catalogue import OVERLAY, CatalogueError, catalogue


@register
def catalogue_is_understood(**_: object) -> list[CheckMessage]:
    """Without it nothing that hardware says can be judged, and each signal is taken only once."""
    try:
        catalogue()
    except CatalogueError as error:
        remedy = f"Correct it, or start without {OVERLAY}."
        return [Error(str(error), hint=remedy, id="workers.E001")]
    return []
