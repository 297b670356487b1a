"""The scenario of a site that goes quiet as a whole."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from controlplane.accounts.models import AuditEvent
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Node
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, RunState
from controlplane.incidents.models import Incident
from controlplane.local.fleet import SIDE_CLUSTER
from controlplane.local.scenarios.base import (
    MENDED_S,
    READY_S,
    Result,
    Say,
    await_rows,
    resolved,
    seconds_since,
    url,
)
from workers import power

#: What must not happen to a node whose state is unknown.
DISRUPTIVE = ("node.power", "node.transition", "command.stop_process", "command.reset_gpus")


def silence(say: Say) -> Result:
    """Stop every agent of one cluster, see that nothing is done to its nodes, let them go on."""
    cluster = Cluster.objects.get(name=SIDE_CLUSTER)
    nodes = await_rows(lambda: _ready(cluster), READY_S, f"{cluster.name} is not all well")
    at = datetime.now(UTC)
    say(f"SIGSTOP to the agents of all {len(nodes)} nodes of {cluster.name}")
    facts: dict[str, Any] = {"nodes": [node.name for node in nodes]}
    try:
        for node in nodes:
            power.freeze(node, "agent")
        incident = await_rows(lambda: _incident(cluster, at), 60, "no incident was opened")
        say(f"incident: {url(incident)}")
        await_rows(lambda: _all_silent(nodes), 60, "the leases did not run out")
        await_rows(lambda: _watched(incident), 30, "nobody watches the site")
        problems = _problems(cluster, nodes, at)
        facts["title"] = Incident.objects.get(pk=incident.pk).title
    finally:
        for node in nodes:
            power.freeze(node, "agent", frozen=False)
    incident = await_rows(lambda: resolved(incident.pk), MENDED_S, "it is not resolved")
    problems += _problems(cluster, nodes, at)
    return Result(
        scenario="site-silent",
        ok=not problems,
        seconds={
            "incident": seconds_since(at, incident.opened_at),
            "resolved": seconds_since(at, incident.resolved_at),
        },
        incident=url(incident),
        facts={**facts, "code": incident.code},
        problems=sorted(set(problems)),
    )


def _ready(cluster: Cluster) -> list[Node] | None:
    nodes = list(
        Node.objects.filter(cluster=cluster, hold_reason="").exclude(state=NodeState.RETIRED)
    )
    well = Node.objects.filter(
        pk__in=[node.pk for node in nodes],
        lease__reachable=True,
        state__in=[NodeState.AVAILABLE, NodeState.ALLOCATED],
    )
    open_ones = Incident.objects.filter(cluster=cluster, state__in=INCIDENT_UNRESOLVED)
    return nodes if well.count() == len(nodes) >= 2 and not open_ones.exists() else None


def _incident(cluster: Cluster, since: datetime) -> Incident | None:
    return Incident.objects.filter(cluster=cluster, opened_at__gte=since).first()


def _all_silent(nodes: list[Node]) -> bool:
    return not Node.objects.filter(
        pk__in=[node.pk for node in nodes], lease__reachable=True
    ).exists()


def _watched(incident: Incident) -> bool:
    return incident.runs.filter(playbook="site-silent", state=RunState.WAITING).exists()


def _problems(cluster: Cluster, nodes: list[Node], since: datetime) -> list[str]:
    problems = []
    opened = Incident.objects.filter(cluster=cluster, opened_at__gte=since)
    if opened.count() != 1:
        problems.append(f"{opened.count()} incidents instead of one on the site")
    done = AuditEvent.objects.filter(
        verb__in=DISRUPTIVE, object_id__in=[node.pk for node in nodes], at__gte=since
    )
    problems += [f"{event.verb} on {event.object_id}: {event.after}" for event in done[:5]]
    return problems
