"""Writes of incidents and their timeline."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db.models import Exists, Max, OuterRef
from django.utils import timezone

from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet.changes import change, touch
from controlplane.health.choices import Urgency
from controlplane.health.models import Failure
from controlplane.incidents import postmortem, pricing
from controlplane.incidents.choices import (
    INCIDENT_UNRESOLVED,
    RUN_UNFINISHED,
    EntryKind,
    IncidentState,
    RunState,
    Severity,
)
from controlplane.incidents.models import (
    Incident,
    PlaybookRun,
    TimelineEntry,
)
from controlplane.incidents.selectors import (
    LOSS,
    latest_loss_runs,
    unrestored_losses,
    waits_for_hands,
)
from controlplane.jobs.choices import JOB_ACTIVE
from controlplane.jobs.models import Job, Placement
from workers.triage import ACTIONS


@change()
def open_or_merge(
    subject: str,
    *,
    cluster_id: str,
    title: str,
    severity: Severity,
    occurred_at: datetime,
    job_id: str | None = None,
    replica: int | None = None,
    node_id: str | None = None,
    actor: Actor = SYSTEM,
) -> Incident:
    """The unresolved incident about this subject, locked; a new one if there is none.

    Raises Conflict if it was resolved in this very moment: ask again.
    """
    fresh = Incident(
        cluster_id=cluster_id,
        subject=subject,
        title=title,
        severity=severity,
        occurred_at=occurred_at,
        job_id=job_id,
        replica=replica,
        node_id=node_id,
    )
    # The unique constraint is the turnstile: whoever comes second waits, then finds the first's.
    Incident.objects.bulk_create([fresh], ignore_conflicts=True)
    # Locked, so that it cannot be resolved while something is attached to it.
    incident = (
        Incident.objects.select_for_update(no_key=True, of=("self",))
        .filter(subject=subject, state__in=INCIDENT_UNRESOLVED)
        .first()
    )
    if incident is None:
        raise Conflict("the incident was resolved in this very moment")
    if incident.pk != fresh.pk:
        if occurred_at < incident.occurred_at:
            Incident.objects.filter(pk=incident.pk).update(occurred_at=occurred_at)
        return incident
    add_timeline_entry(incident, "opened", EntryKind.STATE, f"Incident opened: {title}")
    audit(
        actor,
        "incident.open",
        "incident",
        incident.pk,
        cluster_id=cluster_id,
        after={"title": title, "subject": subject},
    )
    touch(cluster_id)
    return incident


@change()
def add_timeline_entry(
    incident: Incident,
    key: str,
    kind: EntryKind,
    text: str,
    *,
    at: datetime | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Add a line to the timeline, once per key."""
    TimelineEntry.objects.get_or_create(
        incident=incident,
        key=key,
        defaults={"at": at or timezone.now(), "kind": kind, "text": text, "data": dict(data or {})},
    )
    touch(incident.cluster_id, ("incident", incident.pk))


@change()
def set_cause(
    incident_id: str, title: str, cause: str, failure: Failure, *, node_id: str = ""
) -> None:
    """Write what was found to be the cause, in a sentence, with the failure behind it. `node_id`:
    the node that it is about, which may be another than the one that was heard of first.

    Of several failures of one incident the gravest is the cause: one that calls for less than what
    is known, and no sooner, joins it and changes no word.
    """
    incident = Incident.objects.get(pk=incident_id)
    known = list(incident.failures.exclude(pk=failure.pk))
    incident.failures.add(failure)
    if incident.cause and any(_outranks(one, failure) for one in known):
        return
    Incident.objects.filter(pk=incident_id).update(
        title=title[:200],
        cause=cause,
        code=failure.code,
        node_id=node_id or incident.node_id or failure.node_id,
    )
    _move(SYSTEM, incident, IncidentState.MITIGATING, frm={IncidentState.OPEN}, reason=cause)


@change()
def raise_severity(incident_id: str, to: Severity) -> None:
    """Note that an incident is at least this grave; what was foreseen can come to be lost."""
    order = list(Severity)
    milder = order[order.index(to) + 1 :]
    incident = Incident.objects.select_for_update(no_key=True).get(pk=incident_id)
    if Incident.objects.filter(pk=incident_id, severity__in=milder).update(severity=to):
        audit(
            SYSTEM,
            "incident.severity",
            "incident",
            incident_id,
            cluster_id=incident.cluster_id,
            before={"severity": incident.severity},
            after={"severity": to},
        )
        add_timeline_entry(
            incident, f"severity/{to}", EntryKind.STATE, f"Severity raised: {to.label}"
        )


@change()
def set_mitigated(incident_id: str, at: datetime, text: str) -> None:
    """Note when the job committed steps again."""
    incident = Incident.objects.get(pk=incident_id)
    if Incident.objects.filter(pk=incident_id, mitigated_at=None).update(mitigated_at=at):
        add_timeline_entry(incident, f"mitigated/{at.timestamp()}", EntryKind.JOB, text, at=at)


@change()
def set_restored(run: PlaybookRun) -> None:
    """Note when the job had all its replicas again, and what the time between cost: `run` brought
    one back, or found it there. Nothing while another one that the incident is about is away."""
    losses = PlaybookRun.objects.filter(incident=run.incident_id, playbook=LOSS)
    others = [one for one in latest_loss_runs(losses) if one.subject != run.subject]
    if any(one.state != RunState.SUCCEEDED for one in others):
        return
    back = [
        placement
        for context in losses.values_list("context", flat=True)
        for placement in (context.get("placement", ""), *context.get("placements", []))
    ]
    at = Placement.objects.filter(pk__in=back).aggregate(at=Max("joined_at"))["at"]
    if at is not None:
        Incident.objects.filter(pk=run.incident_id).update(restored_at=at)
        _price(str(run.incident_id), at)


@change()
def resolve(actor: Actor, incident_id: str, reason: str) -> bool:
    """Resolve an incident unless a run of it is still at work; drafts the post-mortem.

    Returns whether it is resolved now.
    """
    incident = Incident.objects.select_for_update(no_key=True).get(pk=incident_id)
    if incident.runs.filter(state__in=RUN_UNFINISHED).exists() or not incident.unresolved:
        return not incident.unresolved
    now = timezone.now()
    Incident.objects.filter(pk=incident_id).update(resolved_at=now)
    _price(incident_id, now)
    _move(actor, incident, IncidentState.RESOLVED, frm=INCIDENT_UNRESOLVED, reason=reason)
    add_timeline_entry(
        incident, f"resolved/{now.timestamp()}", EntryKind.STATE, f"Resolved: {reason}", at=now
    )
    incident.refresh_from_db()
    if not incident.postmortem:
        Incident.objects.filter(pk=incident_id).update(postmortem=postmortem.draft(incident))
    return True


@change()
def resolve_if_over(actor: Actor, incident_id: str, reason: str) -> bool:
    """The same, unless something of it is left to people, or a replica that it is about is missed:
    who was to bring that back may have been called off."""
    incident = Incident.objects.select_for_update(no_key=True, of=("self",)).get(pk=incident_id)
    return _is_over(incident) and resolve(actor, incident_id, reason)


def resolve_losses() -> int:
    """Resolve the incidents of replicas at which nothing is at work any more and that all train
    again, or whose job ends: the last run of such a one may have been called off, or only shown,
    and a replica may have been brought back by whoever has its job. Returns how many; the keeper
    calls it."""
    runs = PlaybookRun.objects.filter(incident=OuterRef("pk"))
    left = Incident.objects.filter(
        Exists(runs.filter(playbook=LOSS)),
        ~Exists(runs.filter(state__in=RUN_UNFINISHED)),
        state__in=INCIDENT_UNRESOLVED,
    ).select_related("job")
    return sum(resolve_if_over(SYSTEM, one.pk, _why_over(one.job)) for one in left if _is_over(one))


@change()
def resolve_into(incident_id: str, into: Incident) -> None:
    """Close an incident whose story goes on in another."""
    incident = Incident.objects.select_for_update(no_key=True).get(pk=incident_id)
    now = timezone.now()
    reason = f"merged into “{into.title}”"
    Incident.objects.filter(pk=incident_id).update(resolved_at=now)
    _move(SYSTEM, incident, IncidentState.RESOLVED, frm=INCIDENT_UNRESOLVED, reason=reason)
    add_timeline_entry(
        incident, "merged", EntryKind.STATE, f"Resolved: {reason}", at=now, data={"into": into.pk}
    )


@change()
def resolve_by_hand(actor: Actor, incident_id: str, reason: str) -> None:
    """A person says it is over. Raises Conflict if it is, or while a run of it is at work."""
    incident = Incident.objects.select_for_update(no_key=True).get(pk=incident_id)
    if not incident.unresolved:
        raise Conflict("this incident is resolved already")
    if incident.runs.filter(state__in=RUN_UNFINISHED).exists():
        raise Conflict("a playbook is at work on it; cancel that first")
    resolve(actor, incident_id, reason)


@change()
def close_incident(actor: Actor, incident_id: str, reason: str = "") -> None:
    """A person is done with it, and with its post-mortem. Raises Conflict unless it is resolved."""
    incident = Incident.objects.select_for_update(no_key=True).get(pk=incident_id)
    if incident.unresolved:
        raise Conflict("this incident is not resolved yet; resolve it first")
    if incident.state == IncidentState.CLOSED:
        raise Conflict("this incident is closed already")
    _move(actor, incident, IncidentState.CLOSED, frm={IncidentState.RESOLVED}, reason=reason)
    text = f"Closed: {reason}" if reason else "Closed"
    add_timeline_entry(incident, "closed", EntryKind.STATE, text, data={"by": actor.id})


@change()
def acknowledge(actor: Actor, incident_id: str) -> None:
    """Say that a person has seen it. Raises Conflict if it is resolved or acknowledged already."""
    incident = Incident.objects.select_for_update(no_key=True).get(pk=incident_id)
    if not incident.unresolved:
        raise Conflict("this incident is resolved; there is nothing to acknowledge")
    if incident.owner_id is not None:
        raise Conflict("somebody has acknowledged this incident already")
    if incident.state == IncidentState.OPEN:
        _move(actor, incident, IncidentState.ACKNOWLEDGED, frm={IncidentState.OPEN})
    Incident.objects.filter(pk=incident_id).update(owner_id=actor.id)
    add_timeline_entry(incident, f"acknowledged/{actor.id}", EntryKind.STATE, "Acknowledged")
    audit(
        actor,
        "incident.acknowledge",
        "incident",
        incident_id,
        cluster_id=incident.cluster_id,
        after={"owner": actor.id},
    )


@change()
def add_note(actor: Actor, incident_id: str, text: str) -> None:
    """Add a person's words to the timeline. Raises Conflict if there are none."""
    if not text.strip():
        raise Conflict("a note needs some words")
    incident = Incident.objects.get(pk=incident_id)
    now = timezone.now()
    add_timeline_entry(
        incident, f"note/{now.timestamp()}", EntryKind.NOTE, text.strip(), data={"by": actor.id}
    )
    audit(
        actor,
        "incident.note",
        "incident",
        incident_id,
        cluster_id=incident.cluster_id,
        after={"text": text.strip()},
    )


@change()
def save_postmortem(actor: Actor, incident_id: str, text: str, *, edited: str) -> None:
    """Replace the post-mortem's text.

    `edited` is the digest of the text that was edited; raises Conflict if another one stands there
    by now: it would be lost unread.
    """
    incident = Incident.objects.select_for_update(no_key=True).get(pk=incident_id)
    if incident.postmortem_digest != edited:
        raise Conflict(
            "the post-mortem was written or changed since you opened it, so yours is not saved; "
            "look at both, then save what shall stand"
        )
    Incident.objects.filter(pk=incident_id).update(postmortem=text)
    audit(
        actor,
        "incident.save_postmortem",
        "incident",
        incident_id,
        cluster_id=incident.cluster_id,
        before={"text": incident.postmortem},
        after={"text": text},
    )
    touch(incident.cluster_id)


def _is_over(incident: Incident) -> bool:
    """Whether nothing of it is left but what runs do that are at work."""
    return not waits_for_hands(incident) and not unrestored_losses(
        incident.runs.select_related("job")
    )


def _why_over(job: Job | None) -> str:
    ends = job is not None and job.state not in JOB_ACTIVE
    return "its job has ended, or is to" if ends else "all its replicas train again"


def _outranks(one: Failure, other: Failure) -> bool:
    """Whether the first calls for more, and is not what can wait while the other cannot."""
    sooner = Urgency(other.urgency).before(one.urgency)
    return not sooner and ACTIONS.index(one.needed) > ACTIONS.index(other.needed)


def _price(incident_id: str, until: datetime) -> None:
    """Write down what the incident has cost so far, and what that is made of."""
    incident = Incident.objects.select_related("job", "cluster").get(pk=incident_id)
    parts = pricing.parts(incident, until)
    lost = round(sum(part["gpu_seconds"] for part in parts), 1) if parts else None
    Incident.objects.filter(pk=incident_id).update(impact=parts, gpu_seconds_lost=lost)


def _move(
    actor: Actor,
    incident: Incident,
    to: IncidentState,
    *,
    frm: set[IncidentState] | frozenset[IncidentState],
    reason: str = "",
) -> None:
    """Compare-and-set of an incident's state, with its audit row."""
    before = incident.state
    if Incident.objects.filter(pk=incident.pk, state__in=frm).update(state=to):
        audit(
            actor,
            "incident.transition",
            "incident",
            incident.pk,
            cluster_id=incident.cluster_id,
            before={"state": before},
            after={"state": to},
            reason=reason,
        )
        touch(incident.cluster_id)
