"""What is done about a failure: its incident is opened and named, and its repair asked for."""

from __future__ import annotations

from functools import partial

from django.db.models import Q

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Node
from controlplane.health.choices import Action, Urgency
from controlplane.health.models import Failure, Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, Severity
from controlplane.incidents.models import Incident
from controlplane.jobs.choices import JOB_ACTIVE
from controlplane.jobs.models import Placement
from workers import triage
from workers.intake.lost_replicas import open_for_replica
from workers.intake.timeline import add_signal_entry

#: What a repair of the node can be asked for; the last two only where a card is to blame.
REPAIRS = triage.NODE_REPAIRS | {"field_diagnostic", "contact_vendor"}


def act_on_failure(
    signal: Signal,
    node: Node,
    placement: Placement | None,
    failure: Failure,
    verdict: triage.LineVerdict,
) -> Incident | None:
    """Open the incident, and ask for the runs that mend it. Returns it, if there is one."""
    can_examine = failure.gpu_id is not None and node.can_examine
    for_people = not verdict.replace_card and triage.is_for_people(
        verdict.action, verdict.fault, can_examine=can_examine
    )
    incident = _incident_of_failure(signal, node, placement, verdict, for_people)
    if incident is None:
        return None
    title, sentence = _words_of_cause(failure, node, verdict)
    incidents.set_cause(incident.pk, title, sentence, failure)
    incidents.open_breaker_on_burst(node.cluster_id, verdict.code)
    shared = incidents.share_cause(node, failure)
    if shared is not None and incident.subject == f"node/{node.pk}":
        incident = shared
    repair = partial(
        incidents.repair_node,
        SYSTEM,
        node.pk,
        incident,
        sentence,
        gpu_uuid=failure.gpu_id or "",
        code=verdict.code,
        lost_placement=placement.pk if placement else "",
    )
    if verdict.reset_when_idle:
        fleet.set_reset_pending(SYSTEM, node.pk, sentence)
        repair(action=Action.RESET_GPU, urgency=Urgency.IDLE)
    elif verdict.action in REPAIRS and not for_people:
        repair(action=Action(verdict.action), urgency=Urgency(verdict.urgency))
    return incident


def name_incidents(failure: Failure, node: Node, verdict: triage.LineVerdict) -> None:
    """A later line may name better what an incident is called by."""
    named_otherwise = failure.incidents.filter(state__in=INCIDENT_UNRESOLVED).exclude(
        Q(code=verdict.code) | Q(subject__startswith="rack/") | Q(subject__startswith="switch/")
    )
    for incident in named_otherwise:
        title, sentence = _words_of_cause(failure, node, verdict)
        incidents.set_cause(incident.pk, title, sentence, failure)


def _words_of_cause(failure: Failure, node: Node, verdict: triage.LineVerdict) -> tuple[str, str]:
    """The incident's title, and its cause in a sentence."""
    where = f"card {failure.gpu.index} of {node.name}" if failure.gpu else node.name
    sentence = f"{where}: {verdict.summary[0].upper()}{verdict.summary[1:]}."
    return f"{verdict.code} on {where}", sentence


def _incident_of_failure(
    signal: Signal,
    node: Node,
    placement: Placement | None,
    verdict: triage.LineVerdict,
    for_people: bool,
) -> Incident | None:
    """The incident of the replica that the node holds, or one about the node; None: no incident.

    A fault of a program on a node that holds none of ours is nobody's incident here.
    """
    harmless = verdict.urgency == "idle"  # the replica that the node holds trains on
    in_use = placement is not None and placement.replica.job.state in JOB_ACTIVE
    if placement is not None and in_use and not for_people and not harmless:
        if verdict.urgency == "next_checkpoint":
            # Nothing is lost yet: its replica is brought back once its node is emptied.
            incident = incidents.open_for_replica(placement, signal.observed_at, Severity.MINOR)
            add_signal_entry(incident, signal)
            return incident
        incident = open_for_replica(signal, placement)
        incidents.raise_severity(incident.pk, Severity.MAJOR)
        return incident
    if verdict.action == "restart_app":
        return None
    incident = incidents.open_or_merge(
        f"node/{node.pk}",
        cluster_id=node.cluster_id,
        title=f"{verdict.code} on {node.name}",
        severity=Severity.MINOR,
        occurred_at=signal.observed_at,
        node_id=node.pk,
    )
    add_signal_entry(incident, signal)
    return incident
