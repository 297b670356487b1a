"""The audit trail as its page shows it: narrowed, with names for ids and each change as a diff."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from django.db import connection
from django.db.models import Q, QuerySet
from django.urls import reverse
from django.utils.dateparse import parse_datetime

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import ApiToken, AuditEvent, User
from controlplane.dashboard.templatetags.drydock import evidence, short_id
from controlplane.fleet.models import Cluster, Node
from controlplane.jobs.models import Job

_MOMENT = re.compile(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)\.\d+\+00:00$")
#: The page of each kind of object, by its address's name.
PAGES = {"node": "node", "job": "job", "incident": "incident", "run": "run"}


@dataclass(frozen=True)
class Asked:
    """What the form asks for; every field is optional."""

    actor: str = ""
    verb: str = ""
    object: str = ""
    cluster: str = ""
    since: str = ""
    until: str = ""
    q: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Asked:
        return cls(**{field.name: query.get(field.name, "").strip() for field in fields(cls)})

    def __bool__(self) -> bool:
        return self != Asked()

    @property
    def unreadable(self) -> dict[str, str]:
        """The moments that could not be understood, by their field; the page leaves them out."""
        moments = {"since": self.since, "until": self.until}
        return {field: text for field, text in moments.items() if text and _moment(text) is None}


@dataclass(frozen=True)
class Change:
    """One field of the object, before and after; None where there was nothing to tell."""

    label: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Row:
    """One write, with names where the trail keeps ids."""

    event: AuditEvent
    actor: str
    object: str
    address: str
    cluster: str
    changes: list[Change]


def narrowed(events: QuerySet[AuditEvent], asked: Asked) -> QuerySet[AuditEvent]:
    """Those of `events` that fit every field that was filled in."""
    if asked.actor:
        events = events.filter(_by_actor(asked.actor))
    if asked.verb:
        # As values: only then is the index by verb of use, and the planner knows how rare they are.
        events = events.filter(verb__in=_verbs(asked.verb))
    if asked.object:
        events = events.filter(_about(asked.object))
    if asked.cluster:
        events = events.filter(cluster__name=asked.cluster)
    if (since := _moment(asked.since)) is not None:
        events = events.filter(at__gte=since)
    if (until := _moment(asked.until)) is not None:
        events = events.filter(at__lte=until)
    if asked.q:
        events = events.filter(
            Q(reason__icontains=asked.q) | Q(verb__icontains=asked.q) | Q(request_id=asked.q)
        )
    return events


def rows_of(events: list[AuditEvent]) -> list[Row]:
    """These events with names in place of ids, in a query per kind of object."""
    ids = {(e.object_type, e.object_id) for e in events}
    ids |= {(_type_of_actor(e), e.actor_id) for e in events}
    # Among the values, nodes are what is most often told by id.
    values = [value for e in events for value in (*e.before.values(), *e.after.values())]
    ids |= {("node", value) for value in values if str(value).startswith("nod_")}
    names = {
        "user": _names(User, "username", [i for kind, i in ids if kind == "user" and i.isdigit()]),
        "node": _names(Node, "name", [i for kind, i in ids if kind == "node"]),
        "job": _names(Job, "name", [i for kind, i in ids if kind == "job"]),
        "token": _names(ApiToken, "name", [i for kind, i in ids if kind == "token"]),
        "cluster": _names(Cluster, "name", [e.cluster_id for e in events if e.cluster_id]),
    }

    def name(kind: str, key: str) -> str:
        known = names.get(kind, {}).get(key)
        return known or (short_id(key) if kind == "join_token" else key)

    return [
        Row(
            event=event,
            actor=name(_type_of_actor(event), event.actor_id),
            object=name(event.object_type, event.object_id),
            address=_address(event),
            cluster=name("cluster", event.cluster_id or ""),
            changes=changes(event.before, event.after, known=event.cluster_id, names=names["node"]),
        )
        for event in events
    ]


def changes(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    known: str | None = None,
    names: Mapping[str, str] | None = None,
) -> list[Change]:
    """A diff of two JSON objects, field by field; what stayed the same is left out.

    So is `known`, the cluster's id, which stands in a column of its own. `names` holds names by id.
    """
    was, now = _told(before, known, names or {}), _told(after, known, names or {})
    labels = [*was, *(label for label in now if label not in was)]
    return [
        Change(label, was.get(label), now.get(label))
        for label in labels
        if was.get(label) != now.get(label)
    ]


def last_verification() -> AuditEvent | None:
    """When the trail was last verified, and what came of it."""
    done = AuditEvent.objects.filter(object_type="audit", object_id="chain", verb="audit.verify")
    return done.order_by("-pk").first()


# SELECT DISTINCT verb, by one look into the index for each: there are few verbs in many rows.
_VERBS_SQL = """
WITH RECURSIVE known (verb) AS (
    (SELECT verb FROM accounts_auditevent ORDER BY verb LIMIT 1)
    UNION ALL
    SELECT (SELECT verb FROM accounts_auditevent WHERE verb > known.verb ORDER BY verb LIMIT 1)
    FROM known WHERE known.verb IS NOT NULL
)
SELECT verb FROM known WHERE verb IS NOT NULL
"""


def _verbs(beginning: str) -> list[str]:
    """The verbs in the trail that begin so."""
    with connection.cursor() as cursor:
        cursor.execute(_VERBS_SQL)
        return [verb for (verb,) in cursor.fetchall() if verb.startswith(beginning)]


def _by_actor(text: str) -> Q:
    people = [str(pk) for pk in User.objects.filter(username=text).values_list("pk", flat=True)]
    nodes = list(Node.objects.filter(name=text).values_list("pk", flat=True))
    return (
        Q(actor_kind=ActorKind.USER, actor_id__in=people)
        | Q(actor_kind=ActorKind.AGENT, actor_id__in=nodes)
        | Q(actor_id=text)
    )


def _about(text: str) -> Q:
    people = [str(pk) for pk in User.objects.filter(username=text).values_list("pk", flat=True)]
    return (
        Q(object_id=text)
        | Q(object_type=text)
        | Q(object_type="node", object_id__in=Node.objects.filter(name=text).values("pk"))
        | Q(object_type="job", object_id__in=Job.objects.filter(name=text).values("pk"))
        | Q(object_type="user", object_id__in=people)
    )


def _moment(text: str) -> datetime | None:
    """“2026-11-21 03:00”, read as UTC; None for anything else."""
    try:
        moment = parse_datetime(text)
        if moment is None:
            return None
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


def _told(values: Mapping[str, Any], known: str | None, names: Mapping[str, str]) -> dict[str, str]:
    """The fields that say something, as label and text: names for ids, moments to the second."""
    said = {label: value for label, value in values.items() if value not in (None, known)}
    return {
        label: names.get(text) or _MOMENT.sub(r"\1 \2 UTC", text) for label, text in evidence(said)
    }


def _type_of_actor(event: AuditEvent) -> str:
    kinds = {ActorKind.USER: "user", ActorKind.AGENT: "node", ActorKind.RUNTIME: "job"}
    return kinds.get(ActorKind(event.actor_kind), "system")


def _names(model: Any, field: str, ids: Iterable[str]) -> dict[str, str]:
    wanted = set(ids)
    if not wanted:
        return {}
    return {
        str(pk): name for pk, name in model.objects.filter(pk__in=wanted).values_list("pk", field)
    }


def _address(event: AuditEvent) -> str:
    """Where the object can be looked at, or empty."""
    if event.object_type in PAGES:
        return reverse(PAGES[event.object_type], args=[event.object_id])
    if event.object_type == "user":
        return f"{reverse('users')}?user={event.object_id}"
    lists = {"token": "tokens", "join_token": "enrolment"}
    return reverse(lists[event.object_type]) if event.object_type in lists else ""
