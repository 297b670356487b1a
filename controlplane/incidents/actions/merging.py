"""One cause, one incident: replicas of one job that are lost together, nodes of one rack
or switch that show the same fault."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection
from django.db.models import Exists, F, OuterRef, Q
from django.utils import timezone

from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.fleet.changes import change, touch
from controlplane.fleet.choices import IN_SERVICE
from controlplane.fleet.models import Node, RepairRecord
from controlplane.health.choices import FaultClass
from controlplane.health.models import Failure
from controlplane.incidents.actions.incidents import add_timeline_entry, open_or_merge, resolve_into
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, EntryKind, Severity
from controlplane.incidents.models import Incident, PlaybookRun, TimelineEntry
from controlplane.incidents.selectors import LOSS
from controlplane.jobs.models import Job, Placement

#: Replicas of one job that are lost within this time of the first are one crash of the job.
CRASH_WINDOW = timedelta(seconds=30)
#: So many nodes of a rack, or of a switch, that show one fault within this time have a cause in
#: common, if they are a share of SILENCE_SHARE of it.
MIN_SHARED_NODES, SHARED_WITHIN = 3, timedelta(minutes=3)


def incident_of_replica(job_id: str, index: int) -> Incident | None:
    """The unresolved incident that this replica's loss is told in: its own, or its job's."""
    unresolved = Incident.objects.filter(state__in=INCIDENT_UNRESOLVED)
    own = unresolved.filter(subject=f"job/{job_id}/{index}").first()
    shared = unresolved.filter(subject=f"job/{job_id}", runs__subject=f"{LOSS}/{job_id}/{index}")
    return own or shared.first()


@change()
def open_for_replica(
    placement: Placement,
    occurred_at: datetime,
    severity: Severity = Severity.MAJOR,
    *,
    actor: Actor = SYSTEM,
) -> Incident:
    """The incident of the replica that this placement holds; everything about it joins there."""
    job = placement.replica.job
    index = placement.replica.index
    there = incident_of_replica(job.pk, index)
    return open_or_merge(
        there.subject if there else f"job/{job.pk}/{index}",
        cluster_id=job.cluster_id,
        title=f"{job.name} lost replica {index} on {placement.node.name}",
        severity=severity,
        occurred_at=occurred_at,
        job_id=job.pk,
        replica=index,
        node_id=placement.node_id,
        actor=actor,
    )


@change()
def open_for_loss(
    placement: Placement, occurred_at: datetime, *, actor: Actor = SYSTEM
) -> Incident:
    """The incident of a replica that was lost: of its job, if that lost others just now.

    One crash of a program, of its network or of its storage takes many replicas at once: whoever is
    paged must not be paged for each.
    """
    job = placement.replica.job
    index = placement.replica.index
    # Two workers that hear of two replicas at once must not each believe to be the first.
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"loss/{job.pk}"])
    first = _lost_with(job, index, occurred_at)
    if first is None or incident_of_replica(job.pk, index) is not None:
        return open_for_replica(placement, occurred_at, actor=actor)
    subject = f"job/{job.pk}"
    if first.subject != subject:
        _widen(actor, first, subject, f"{job.name} lost several replicas")
    return open_or_merge(
        subject,
        cluster_id=job.cluster_id,
        title=first.title,
        severity=Severity.MAJOR,
        occurred_at=occurred_at,
        job_id=job.pk,
        actor=actor,
    )


def title_of_loss(incident: Incident, code: str = "") -> str:
    """What a job's incident is called, by how many replicas it is about and by what ended them."""
    name = incident.job.name if incident.job else ""
    lost = incident.runs.filter(playbook=LOSS).values("subject").distinct().count()
    return f"{name} lost {lost} replicas" + (f": {code}" if code else "")


@change()
def share_cause(node: Node, failure: Failure) -> Incident | None:
    """The incident of the node's rack or switch, if so many of its nodes show this fault that the
    cause must be what they share: power, cooling, the switch itself. None if not.

    A share of SILENCE_SHARE of its nodes in service, MIN_SHARED_NODES at least, within
    SHARED_WITHIN, without those repaired since. The incidents of single nodes about the same are
    merged into it; that of a job which lost replicas there stays its own. A program's faults are
    never shared in this sense. The breaker decides whether automation goes on with single nodes.
    """
    if failure.fault_class == FaultClass.PROGRAM:
        return None
    if node.rack is not None:
        shared = _shared(
            node, failure, f"rack/{node.rack_id}", f"rack {node.rack}", Q(rack=node.rack)
        )
        if shared is not None:
            return shared
    if not node.switch:
        return None
    there = Q(cluster=node.cluster_id, switch=node.switch)
    subject = f"switch/{node.cluster_id[-12:]}/{node.switch[:50]}"
    return _shared(node, failure, subject, f"switch {node.switch}", there)


def _shared(node: Node, failure: Failure, subject: str, where: str, there: Q) -> Incident | None:
    """The incident of one thing that nodes share; `there`: they, of all nodes."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [subject])
    since = timezone.now() - SHARED_WITHIN
    members = Node.objects.filter(there)
    repaired = RepairRecord.objects.filter(node=OuterRef("node"), at__gt=OuterRef("last_seen_at"))
    told = Failure.objects.filter(
        ~Exists(repaired), code=failure.code, last_seen_at__gte=since, node__in=members
    )
    nodes = set(told.values_list("node", flat=True)) | {node.pk}
    in_service = members.filter(state__in=sorted(IN_SERVICE)).values_list("pk", flat=True)
    total = len(nodes.union(in_service))
    if len(nodes) < MIN_SHARED_NODES or len(nodes) < settings.SILENCE_SHARE * total:
        return None
    title = f"{failure.code} on {len(nodes)} of {total} nodes of {where}"
    others = Incident.objects.filter(
        subject__in=[f"node/{one}" for one in nodes],
        code=failure.code,
        state__in=INCIDENT_UNRESOLVED,
    )
    # It began with the first of them, not with the one that made them many. What is older was not
    # of one cause with it.
    of_now = others.filter(occurred_at__gte=failure.observed_at - SHARED_WITHIN)
    seen = [failure.observed_at, *of_now.values_list("occurred_at", flat=True)]
    shared = open_or_merge(
        f"{subject}/{failure.code}"[:100],
        cluster_id=node.cluster_id,
        title=title[:200],
        severity=Severity.CRITICAL,
        occurred_at=min(seen),
    )
    Incident.objects.filter(pk=shared.pk).update(
        title=title[:200],
        code=failure.code,
        cause=f"{title}, within {SHARED_WITHIN.total_seconds():g} s. Look at what they share: "
        "power, cooling, a switch.",
    )
    shared.failures.add(failure)
    merge_into(shared, others)
    return shared


@change()
def merge_into(incident: Incident, others: Iterable[Incident]) -> None:
    """Let other incidents go on as parts of this one; the incident itself among them is none."""
    for other in sorted(others, key=lambda one: one.pk):
        if other.pk != incident.pk:
            _absorb(other, incident)


def _lost_with(job: Job, index: int, at: datetime) -> Incident | None:
    """The incident of other replicas of this job that were lost at about this time."""
    around = Incident.objects.select_for_update(no_key=True, of=("self",)).filter(
        job=job,
        subject__startswith=f"job/{job.pk}",
        state__in=INCIDENT_UNRESOLVED,
        severity__in=[Severity.MAJOR, Severity.CRITICAL],
        occurred_at__range=(at - CRASH_WINDOW, at + CRASH_WINDOW),
    )
    # That of the job itself, if there is one, comes before those of single replicas.
    return around.exclude(replica=index).order_by(F("replica").asc(nulls_first=True)).first()


def _widen(actor: Actor, incident: Incident, subject: str, title: str) -> None:
    """Let an incident be about more than it was."""
    if Incident.objects.filter(subject=subject, state__in=INCIDENT_UNRESOLVED).exists():
        return  # an earlier crash, that is not mended yet: this one joins it
    Incident.objects.filter(pk=incident.pk).update(subject=subject, replica=None, title=title)
    add_timeline_entry(
        incident, "widened", EntryKind.STATE, f"{title} within {CRASH_WINDOW.total_seconds():g} s"
    )
    audit(
        actor,
        "incident.widen",
        "incident",
        incident.pk,
        cluster_id=incident.cluster_id,
        before={"subject": incident.subject, "title": incident.title},
        after={"subject": subject, "title": title},
    )
    incident.title = title


def _absorb(other: Incident, into: Incident) -> None:
    """Let one incident go on as a part of another: its story, its failures and its runs."""
    other = Incident.objects.select_for_update(no_key=True, of=("self",)).get(pk=other.pk)
    if not other.unresolved:
        return  # it has been merged, or resolved, meanwhile
    into.failures.add(*other.failures.all())
    told = set(into.timeline.values_list("key", flat=True))
    TimelineEntry.objects.bulk_create(
        [
            TimelineEntry(
                incident=into,
                key=f"{other.pk}/{entry.key}"[:120],
                at=entry.at,
                kind=entry.kind,
                text=entry.text,
                data=entry.data,
            )
            for entry in other.timeline.exclude(key__in=told)
        ],
        ignore_conflicts=True,
    )
    runs = PlaybookRun.objects.filter(incident=other)
    moved = [("run", run_id) for run_id in runs.values_list("pk", flat=True)]
    runs.update(incident=into)
    resolve_into(other.pk, into)
    touch(into.cluster_id, ("incident", into.pk), *moved)
