"""Nodes whose leases ran out: one by itself, or many together for something that they share.

Many together are one incident, and nothing disruptive is done to any of them.
"""

from __future__ import annotations

from django.conf import settings
from django.db.models import Exists, F, OuterRef, Q, Subquery

from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.fleet.choices import IN_SERVICE
from controlplane.fleet.models import Node
from controlplane.health.actions import record_failure, repeat_failure
from controlplane.health.choices import Action, FaultClass, SignalKind
from controlplane.health.models import Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents import limits
from controlplane.incidents.actions.runs import BEING_DRAINED
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, RUN_UNFINISHED, Severity
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.jobs.choices import JOB_ACTIVE
from controlplane.jobs.models import Job, Placement
from workers.intake.coordinators import coordinators_went_with
from workers.intake.lost_replicas import live_placement, open_for_replica
from workers.intake.timeline import add_signal_entry, add_to_node_incident


def node_went_silent(signal: Signal) -> None:
    """A lease ran out: the incident of the replica that the node holds, or one about the node."""
    node = signal.node
    if node is None:
        raise ValueError("a lease belongs to a node")
    if node.lease.reachable:
        add_to_node_incident(signal)  # it has been heard again since
        return
    silence = limits.silence_around(node)
    if silence is not None:
        _site_went_silent(signal, node, silence)
        return
    placement = live_placement(node)
    coordinators_went_with(node, signal, Job.objects.filter(coordinator_node=node))
    if placement is not None and placement.replica.job.state in JOB_ACTIVE:
        open_for_replica(signal, placement)
        return
    if node.state not in IN_SERVICE or node.hold_reason:
        add_to_node_incident(signal)  # it is in somebody's hands already
        return
    replaced = _incident_of_the_replaced(node)
    if replaced is not None:
        add_signal_entry(
            replaced, signal
        )  # it is looked into already, for the replica that it held
        return
    incident = incidents.open_or_merge(
        f"node/{node.pk}",
        cluster_id=node.cluster_id,
        title=f"{node.name} went silent",
        severity=Severity.MINOR,
        occurred_at=signal.observed_at,
        node_id=node.pk,
    )
    add_signal_entry(incident, signal)
    failure = record_failure(
        fault_class=FaultClass.PLATFORM,
        code="node-lost",
        summary=f"{node.name} has not been heard within its lease",
        needed=Action.POWER_CYCLE,
        rule="lease-lost",
        signals=[signal],
        observed_at=signal.observed_at,
        node_id=node.pk,
    )
    incidents.set_cause(
        incident.pk, incident.title, "The node stopped beating; it held no replica.", failure
    )
    incidents.open_breaker_on_burst(node.cluster_id, failure.code)
    incidents.repair_node(SYSTEM, node.pk, incident, "it went silent", only_if_silent=True)


def unreported_silent_nodes() -> list[tuple[Node, AuditEvent]]:
    """Nodes in service that are silent, that were on hold or being drained since they fell silent,
    and of which nobody was told since they are not: while somebody had them in hand their silence
    led to nothing. With the word that lifted each hold, or called the drain off.

    None that a run, an open incident or the watch over its whole site has in hand.
    """
    node = OuterRef("pk")
    held = Q(verb="node.hold")
    drained = Q(
        verb="node.transition",
        before__state__in=BEING_DRAINED,
        after__state__in=sorted(IN_SERVICE),
    )
    words = AuditEvent.objects.filter(held | drained, object_type="node", object_id=node)
    last = words.order_by("-id")
    told = Signal.objects.filter(
        Q(triaged_at=None) | Q(observed_at__gte=OuterRef("let_go_at")),
        kind=SignalKind.LEASE_LOST,
        node=node,
    )
    runs = PlaybookRun.objects.filter(state__in=sorted(RUN_UNFINISHED))
    watch = runs.filter(playbook="site-silent", cluster=OuterRef("cluster"))
    incident = Incident.objects.filter(node=node, state__in=sorted(INCIDENT_UNRESOLVED))
    silent = Node.objects.select_related("lease").filter(
        state__in=sorted(IN_SERVICE), hold_reason="", lease__reachable=False
    )
    let_go = silent.annotate(
        word=Subquery(last.values("pk")[:1]), let_go_at=Subquery(last.values("at")[:1])
    ).filter(
        ~Exists(told),
        ~Exists(runs.filter(node=node)),
        ~Exists(watch),
        ~Exists(incident),
        let_go_at__gte=F("lease__unreachable_since"),
    )
    found = {one.word: one for one in let_go}
    return [(found[pk], word) for pk, word in AuditEvent.objects.in_bulk([*found]).items()]


def _site_went_silent(signal: Signal, node: Node, silence: limits.Silence) -> None:
    """Many nodes went quiet together: one incident of what they share, and nothing done to them."""
    incident = incidents.open_or_merge(
        f"silence/{node.cluster_id}",
        cluster_id=node.cluster_id,
        title=f"{silence}",
        severity=Severity.CRITICAL,
        occurred_at=node.lease.last_beat_at,
    )
    add_signal_entry(incident, signal)
    failure = incident.failures.first() or record_failure(
        fault_class=FaultClass.FABRIC,
        code="site-silent",
        summary=f"{silence}",
        needed=Action.UNDECODABLE,
        rule="correlated-silence",
        signals=[signal],
        observed_at=signal.observed_at,
    )
    repeat_failure(failure, signal)
    incidents.set_cause(
        incident.pk,
        f"{silence}",
        f"{silence}, within {settings.SILENCE_WINDOW_S:g} s. Something that they share failed: "
        "their own state is unknown, and nothing disruptive is done to them.",
        failure,
    )
    incidents.request_run(
        SYSTEM,
        "site-silent",
        node.cluster_id,
        cluster_id=node.cluster_id,
        title=f"Watch {node.cluster.name} until it is heard again",
        incident=incident,
    )


def _incident_of_the_replaced(node: Node) -> Incident | None:
    """The incident of the replica that this node held until a warm spare took its place, while its
    cause is being looked for."""
    replaced = Placement.objects.filter(node=node, successors__warm=True)
    last = replaced.select_related("replica").order_by("-ended_at").first()
    if last is None:
        return None
    looking = PlaybookRun.objects.filter(
        playbook="replica-lost", context__lost_placement=last.pk, state__in=sorted(RUN_UNFINISHED)
    ).first()
    found = looking is not None and "node_fit" in looking.context
    return looking.incident if looking is not None and not found else None
