"""The page of API tokens: made here, shown once, revoked here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.contrib import messages
from django.db.models import Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.accounts import actions
from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.models import ApiToken, User
from controlplane.accounts.requests import actor_of
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import roles
from controlplane.errors import Conflict
from controlplane.export import Column, as_file, is_wanted
from controlplane.fleet.selectors import clusters_for, is_superuser
from controlplane.form_actions import reason_of, whole
from controlplane.paging import pages_of

#: Of the tokens that open nothing any more only the newest are shown.
SHOWN = 200
#: How long a token may live, in days, by the words of the form.
LIVES = {1: "1 day", 7: "7 days", 30: "30 days", 90: "90 days", 366: "1 year"}
EXPIRES_SOON = timedelta(days=7)


@dataclass(frozen=True)
class Row:
    """A token and whether it still opens anything."""

    token: ApiToken
    label: str
    colour: str

    @property
    def live(self) -> bool:
        return self.label in ("Live", "Expires soon")


COLUMNS: tuple[Column[Row], ...] = (
    Column("id", lambda row: row.token.pk),
    Column("name", lambda row: row.token.name),
    Column("user_name", lambda row: row.token.user.username),
    Column("prefix", lambda row: row.token.prefix),
    Column("scope", lambda row: row.token.scope),
    Column("cluster_id", lambda row: row.token.cluster_id),
    Column("cluster_name", lambda row: row.token.cluster.name if row.token.cluster else None),
    Column("live", lambda row: row.live),
    Column("created_at", lambda row: row.token.created_at),
    Column("expires_at", lambda row: row.token.expires_at),
    Column("last_used_at", lambda row: row.token.last_used_at),
    Column("revoked_at", lambda row: row.token.revoked_at),
)


@signed_in
@needs(Access.SIGNED_IN)
def tokens(request: HttpRequest) -> HttpResponseBase:
    """One's own tokens; to superusers, with `of=all`, everybody's."""
    if is_wanted(request):
        whole = pages_of(_found(request), {}, sorts={"-created": "created_at"})
        return as_file(request, "tokens", COLUMNS, map(_rows, whole), {"of": ("all",)})
    return _page(request)


@require_POST
@signed_in
@needs(Access.SIGNED_IN)
def create(request: HttpRequest) -> HttpResponse:
    """Make a token for oneself; its text is shown in the answer and never again."""
    user = _owner(request)
    cluster_id = request.POST.get("cluster") or None
    if cluster_id and not clusters_for(user).filter(pk=cluster_id).exists():
        raise Http404("no such cluster")
    try:
        token, text = actions.create_token(
            actor_of(request),
            user,
            name=request.POST.get("name", ""),
            scope=_scope(request.POST.get("scope", "")),
            cluster_id=cluster_id,
            ttl_s=_days(request.POST.get("days", "")) * 86_400,
        )
    except Conflict as conflict:
        return _refused(request, conflict, form="create")
    return _page(request, made=token, text=text)


@require_POST
@signed_in
@needs(Access.OWNER)
def revoke(request: HttpRequest, token_id: str) -> HttpResponse:
    """Revoke one's own token; superusers anybody's. To others it does not exist."""
    token = get_object_or_404(roles.tokens_for(_owner(request)), pk=token_id)
    try:
        actions.revoke_token(actor_of(request), token.pk, reason_of(request))
    except Conflict as conflict:
        return _refused(request, conflict)
    everybodys = "" if token.user_id == request.user.pk else "?of=all"
    return HttpResponseRedirect(reverse("tokens") + everybodys)


# --- helpers --------------------------------------------------------------------------------------


def _refused(request: HttpRequest, conflict: Conflict, *, form: str = "") -> HttpResponse:
    """The page with what was refused, where `form` holds what was typed in it."""
    messages.error(request, conflict.detail)
    return _page(request, refused={form: request.POST}, status=409)


def _page(
    request: HttpRequest,
    *,
    made: ApiToken | None = None,
    text: str = "",
    refused: Mapping[str, Mapping[str, str]] | None = None,
    status: int = 200,
) -> HttpResponse:
    user = _owner(request)
    # What is live can be revoked here, so all of it is shown; what is not is history.
    live = Q(revoked_at=None, expires_at__gt=timezone.now())
    found = _found(request)
    past = list(found.exclude(live)[: SHOWN + 1])
    context = {
        # Where the page stands also when it answers an order, see `live_page`.
        "live_path": reverse("tokens"),
        "live_query": request.GET,
        "rows": _rows([*found.filter(live), *past[:SHOWN]]),
        "cut_at": SHOWN if len(past) > SHOWN else None,
        "made": made,
        "text": text,
        "refused": refused or {},
        "public_url": settings.PUBLIC_URL.rstrip("/"),
        "scopes": roles.roles_held(user),
        "clusters": clusters_for(user),
        "lives": LIVES,
        "superuser": is_superuser(user),
        "everybodys": _everybodys(request),
    }
    response = render(request, "people/tokens.html", context, status=status)
    response["Cache-Control"] = "no-store"
    return response


def _found(request: HttpRequest) -> QuerySet[ApiToken]:
    user = _owner(request)
    found = roles.tokens_for(user)
    return found if _everybodys(request) else found.filter(user=user)


def _everybodys(request: HttpRequest) -> bool:
    return is_superuser(_owner(request)) and request.GET.get("of") == "all"


def _rows(tokens: Iterable[ApiToken]) -> list[Row]:
    now = timezone.now()
    return [_row(token, now) for token in tokens]


def _row(token: ApiToken, now: datetime) -> Row:
    if token.revoked_at is not None:
        return Row(token, "Revoked", "quiet")
    if token.expires_at <= now:
        return Row(token, "Expired", "quiet")
    if token.expires_at <= now + EXPIRES_SOON:
        return Row(token, "Expires soon", "warn")
    return Row(token, "Live", "good")


def _scope(word: str) -> Role:
    if word not in Role.values:
        raise Conflict("Choose one of the scopes.")
    return Role(word)


def _days(text: str) -> int:
    days = whole(text, max(LIVES))
    if days not in LIVES:
        raise Conflict("Choose how long the token lives.")
    return days


def _owner(request: HttpRequest) -> User:
    assert isinstance(request.user, User)  # noqa: S101 - `signed_in` stands before every view
    return request.user
