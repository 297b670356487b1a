"""The page on which nodes are let in: join tokens, the words to paste, and who came lately."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import F, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.requests import actor_of
from controlplane.accounts.views import signed_in
from controlplane.errors import Conflict
from controlplane.export import Column, as_file, is_wanted
from controlplane.fleet import actions
from controlplane.fleet.models import Cluster, JoinToken, Node
from controlplane.fleet.selectors import clusters_for, may_somewhere
from controlplane.form_actions import act, reason_of, whole
from controlplane.live import live_page
from controlplane.paging import pages_of

#: Of the tokens that let nobody in any more only the newest are shown.
TOKENS_SHOWN = 50
NODES_SHOWN = 50
MAX_USES = 10_000
#: How long a join token may live, in seconds, by the words of the form.
LIVES = {1800: "30 minutes", 7200: "2 hours", 86_400: "1 day", 7 * 86_400: "7 days"}


@dataclass(frozen=True)
class Row:
    """A join token and whether it still lets anybody in."""

    token: JoinToken
    label: str
    colour: str

    @property
    def live(self) -> bool:
        return self.label == "Live"


COLUMNS: tuple[Column[Row], ...] = (
    Column("id", lambda row: row.token.pk),
    Column("cluster_id", lambda row: row.token.cluster_id),
    Column("cluster_name", lambda row: row.token.cluster.name),
    Column("live", lambda row: row.live),
    Column("uses", lambda row: row.token.uses),
    Column("max_uses", lambda row: row.token.max_uses),
    Column("created_at", lambda row: row.token.created_at),
    Column("expires_at", lambda row: row.token.expires_at),
    Column("revoked_at", lambda row: row.token.revoked_at),
)


@dataclass(frozen=True)
class Made:
    """A token that was made a moment ago: its text, and where it leads."""

    text: str
    cluster: Cluster
    uses: int
    life: str
    ingest_url: str


@signed_in
@needs(Access.ADMIN_SOMEWHERE)
def enrolment(request: HttpRequest) -> HttpResponseBase:
    """Join tokens and the nodes that came lately, of the clusters that one is admin of."""
    if is_wanted(request):
        whole = pages_of(_tokens_in(_administered(request)), {}, sorts={"-created": "created_at"})
        return as_file(request, "join-tokens", COLUMNS, map(_rows, whole))
    return _page(request)


@require_POST
@signed_in
@needs(Access.ADMIN)
def create(request: HttpRequest) -> HttpResponse:
    """Make a join token; its text is shown in the answer, with what to do, and never again."""
    cluster = get_object_or_404(clusters_for(request.user), pk=request.POST.get("cluster", ""))
    if not clusters_for(request.user, Role.ADMIN).filter(pk=cluster.pk).exists():
        raise PermissionDenied("Only admins of this cluster let nodes in.")
    uses, life = request.POST.get("uses", "1"), request.POST.get("ttl_s", "1800")
    try:
        _check(uses, life)
    except Conflict as conflict:
        messages.error(request, conflict.detail)
        return _page(request, status=409)
    text = actions.create_join_token(
        actor_of(request), cluster.pk, max_uses=int(uses), ttl_s=int(life)
    )
    made = Made(text, cluster, int(uses), LIVES[int(life)], settings.INGEST_URL)
    return _page(request, made=made)


@require_POST
@signed_in
@needs(Access.ADMIN)
def revoke(request: HttpRequest, join_token_id: str) -> HttpResponse:
    """Let nobody in by this token any more."""
    mine = JoinToken.objects.filter(cluster__in=clusters_for(request.user))
    token = get_object_or_404(mine, pk=join_token_id)
    return act(
        request,
        token.cluster_id,
        lambda actor: actions.revoke_join_token(actor, token.pk, reason_of(request)),
        back=reverse("enrolment"),
        again=lambda status: _page(request, status=status),
        role=Role.ADMIN,
    )


def _page(request: HttpRequest, *, made: Made | None = None, status: int = 200) -> HttpResponse:
    clusters = _administered(request)

    def context() -> dict[str, Any]:
        nodes = Node.objects.filter(cluster__in=clusters).select_related("cluster", "rack")
        # What is live can be revoked here, so all of it is shown; what is not is history.
        live = Q(revoked_at=None, uses__lt=F("max_uses"), expires_at__gt=timezone.now())
        found = _tokens_in(clusters).order_by("-created_at")
        past = list(found.exclude(live)[: TOKENS_SHOWN + 1])
        return {
            "live_path": reverse("enrolment"),
            "rows": _rows([*found.filter(live), *past[:TOKENS_SHOWN]]),
            "cut_at": TOKENS_SHOWN if len(past) > TOKENS_SHOWN else None,
            "nodes": nodes.order_by("-enrolled_at")[:NODES_SHOWN],
            "clusters": clusters,
            "lives": LIVES,
            "made": made,
            "typed": request.POST if made is None else {},
        }

    expiring = _tokens_in(clusters), ("expires_at",)
    return live_page(
        request, "enrolment/enrolment", clusters, context, moments=[expiring], status=status
    )


def _administered(request: HttpRequest) -> QuerySet[Cluster]:
    """The clusters that one is admin of. Raises PermissionDenied if there are none, but to whoever
    is admin of all that will be: the first is yet to be made."""
    if not may_somewhere(request.user, Role.ADMIN):
        raise PermissionDenied("Only admins of a cluster let nodes in.")
    return clusters_for(request.user, Role.ADMIN)


def _tokens_in(clusters: QuerySet[Cluster]) -> QuerySet[JoinToken]:
    return JoinToken.objects.filter(cluster__in=clusters).select_related("cluster")


def _rows(tokens: Iterable[JoinToken]) -> list[Row]:
    now = timezone.now()
    return [_row(token, now) for token in tokens]


def _row(token: JoinToken, now: datetime) -> Row:
    if token.revoked_at is not None:
        return Row(token, "Revoked", "quiet")
    if token.uses >= token.max_uses:
        return Row(token, "Used up", "quiet")
    if token.expires_at <= now:
        return Row(token, "Expired", "quiet")
    return Row(token, "Live", "good")


def _check(uses: str, life: str) -> None:
    if not whole(uses, MAX_USES):
        raise Conflict(f"A join token lets in 1 to {MAX_USES:,} nodes.")
    if whole(life, max(LIVES)) not in LIVES:
        raise Conflict("Choose how long the token lives.")
