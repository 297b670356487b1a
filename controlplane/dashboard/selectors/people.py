"""Who stands behind what was audited."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import AuditEvent
from controlplane.accounts.selectors import usernames


def actors(events: Iterable[AuditEvent]) -> dict[int, str]:
    """Who did each of these, by the event's id: a person's name, or the kind of program."""
    events = list(events)
    names = usernames(e.actor_id for e in events if e.actor_kind == ActorKind.USER)
    return {
        e.pk: names[e.actor_id] if e.actor_kind == ActorKind.USER else ActorKind(e.actor_kind).label
        for e in events
    }
