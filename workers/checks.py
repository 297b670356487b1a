"""What must hold before a keeper or a worker is started."""

from __future__ import annotations

from django.core.checks import CheckMessage, Error, register

from controlplane.health.catalogue import OVERLAY, CatalogueError, catalogue


def refuse_what_cannot_be_judged() -> None:
    """Raises SystemExit for a catalogue that cannot be understood: nothing that hardware says can
    be judged by it, and each signal is taken only once."""
    for found in catalogue_is_understood():
        raise SystemExit(f"{found.msg}. {found.hint}")


@register(deploy=True)
def catalogue_is_understood(**_: object) -> list[CheckMessage]:
    """For `manage.py check --deploy`; other processes start without it."""
    try:
        catalogue()
    except CatalogueError as error:
        remedy = f"Correct it, or start without {OVERLAY}."
        return [Error(str(error), hint=remedy, id="workers.E001")]
    return []
