"""A node is believed about its own processes alone."""

from __future__ import annotations

import msgspec
import structlog
from django.db.models import Q

from controlplane.errors import Refused
from controlplane.health import actions as health
from controlplane.jobs.models import Job, Placement
from node_agent import wire

log = structlog.get_logger(__name__)

#: What an event says of a process, in its data.
WHOSE = ("job", "replica", "rank", "placement")


def record_events(node_id: str, events: list[wire.Event]) -> list[str]:
    """Keep what a node's agent observed; see `health.actions.record_events`.

    What it says of another node's process is kept as said by it, and tells nobody that the process
    has ended: who holds one node's key must not take replicas off others.

    Raises Refused, naming the field, for an id that two events have: only one of them can be kept.
    """
    _demand_distinct(events)
    named = {_placement_of(one) for one in events}
    elsewhere = _elsewhere(node_id, {one for one in named if one}) | {""}
    foreign = [one.id for one in events if _placement_of(one) in elsewhere]
    if foreign:
        log.warning("ingest.another_nodes_process", node=node_id, events=sorted(foreign))
    return health.record_events(
        node_id, [_only_said(one) if _placement_of(one) in elsewhere else one for one in events]
    )


def _demand_distinct(events: list[wire.Event]) -> None:
    told: set[str] = set()
    for index, event in enumerate(events):
        if event.id in told:
            raise Refused(
                422, "invalid_field", f"events[{index}].id", "another event of these has this id"
            )
        told.add(event.id)


def _placement_of(event: wire.Event) -> str | None:
    """The placement whose process an event is about; None where it is about no process."""
    if all(event.data.get(key) is None for key in WHOSE):
        return None
    return health.text_of(event.data.get("placement"))


def _elsewhere(node_id: str, placements: set[str]) -> set[str]:
    """Those of these, which are replicas' or coordinators', that are on another node."""
    if not placements:
        return set()
    replicas = Placement.objects.filter(~Q(node_id=node_id), pk__in=placements)
    led = Job.objects.filter(~Q(coordinator_node_id=node_id), coordinator_placement__in=placements)
    return {
        *replicas.values_list("pk", flat=True),
        *led.values_list("coordinator_placement", flat=True),
    }


def _only_said(event: wire.Event) -> wire.Event:
    said = {key: event.data[key] for key in WHOSE if key in event.data}
    rest = {key: value for key, value in event.data.items() if key not in WHOSE}
    return msgspec.structs.replace(event, data={**rest, "said_of": said})
