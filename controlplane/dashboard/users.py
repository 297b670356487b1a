"""The page of the people: who they are, what they may do where, and how that is changed.

An admin of clusters gives and takes roles there; only superusers make people, switch them off and
give them new passwords.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.views.decorators.http import require_POST

from controlplane.accounts import actions
from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor, Grant, User
from controlplane.accounts.requests import actor_of
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import roles
from controlplane.errors import Conflict
from controlplane.export import Column, as_file, is_wanted
from controlplane.fleet.selectors import clusters_for, is_superuser, may_somewhere
from controlplane.form_actions import reason_of, whole
from controlplane.paging import page_of, pages_of, sort_words

SORTS = {"name": "username"}
COLUMNS: tuple[Column[User], ...] = (
    Column("id", lambda user: user.pk),
    Column("username", lambda user: user.username),
    Column("email", lambda user: user.email),
    Column("is_active", lambda user: user.is_active),
    Column("is_superuser", lambda user: user.is_superuser),
    Column("roles", lambda user: "; ".join(map(_role, user.shown_grants))),  # type: ignore[attr-defined]
    Column("last_login", lambda user: user.last_login),
    Column("date_joined", lambda user: user.date_joined),
)


@signed_in
@needs(Access.ADMIN_SOMEWHERE)
def users(request: HttpRequest) -> HttpResponseBase:
    """The people, by name; `q` narrows, `user` chooses whom the forms are about."""
    if is_wanted(request):
        people = pages_of(_found(request), request.GET, sorts=SORTS)
        return as_file(request, "users", COLUMNS, people, {"sort": sort_words(SORTS)})
    return _page(request)


@require_POST
@signed_in
@needs(Access.SUPERUSER)
def create(request: HttpRequest) -> HttpResponse:
    """Make a person, whose password is shown once."""
    _superusers_only(request)
    username = request.POST.get("username", "").strip()
    password = _new_password()

    def operation(actor: Actor) -> User:
        return actions.create_user(
            actor,
            username,
            password,
            email=request.POST.get("email", "").strip(),
            superuser=request.POST.get("superuser") == "yes",
        )

    try:
        user = operation(actor_of(request))
    except Conflict as conflict:
        return _refused(request, conflict, form="create")
    return _page(request, chosen_id=user.pk, password=password)


@require_POST
@signed_in
@needs(Access.SUPERUSER)
def reset_password(request: HttpRequest, user_id: int) -> HttpResponse:
    """Replace a forgotten password by one that is shown once."""
    _superusers_only(request)
    user = get_object_or_404(User, pk=user_id)
    password = _new_password()
    try:
        actions.set_password(actor_of(request), user, password, reason=reason_of(request))
    except Conflict as conflict:
        return _refused(request, conflict, user_id)
    return _page(request, chosen_id=user_id, password=password)


@require_POST
@signed_in
@needs(Access.SUPERUSER)
def switch(request: HttpRequest, user_id: int) -> HttpResponse:
    """Switch a person off (`active=no`) or on again (`active=yes`)."""
    _superusers_only(request)
    user = get_object_or_404(User, pk=user_id)
    active = request.POST.get("active") == "yes"
    return _act(
        request,
        user,
        lambda actor: actions.set_user_active(actor, user, active, reason_of(request)),
    )


@require_POST
@signed_in
@needs(Access.ADMIN)
def grant(request: HttpRequest) -> HttpResponse:
    """Give `username` a role in a cluster, or everywhere, in place of the one they held there."""
    cluster_id = _managed_cluster(request)
    username = request.POST.get("username", "").strip()
    user = User.objects.filter(username=username).first()
    role = request.POST.get("role", "")
    if user is None:
        unknown = Conflict(f"There is no user {username!r}. A superuser creates people.")
        return _refused(request, unknown, form="grant")
    if role not in Role.values:
        return _refused(request, Conflict("Choose one of the roles."), user.pk, form="grant")

    def operation(actor: Actor) -> object:
        return actions.grant_role(actor, user, Role(role), cluster_id, reason=reason_of(request))

    return _act(request, user, operation, form="grant")


@require_POST
@signed_in
@needs(Access.ADMIN)
def revoke(request: HttpRequest, user_id: int) -> HttpResponse:
    """Take away the role that a person holds in a cluster, or everywhere."""
    cluster_id = _managed_cluster(request)
    user = get_object_or_404(roles.people_for(_current_user(request)), pk=user_id)
    return _act(
        request,
        user,
        lambda actor: actions.revoke_role(actor, user, cluster_id, reason=reason_of(request)),
    )


# --- helpers --------------------------------------------------------------------------------------


def _act(
    request: HttpRequest, user: User, operation: Callable[[Actor], object], *, form: str = ""
) -> HttpResponse:
    try:
        operation(actor_of(request))
    except Conflict as conflict:
        return _refused(request, conflict, user.pk, form=form)
    return HttpResponseRedirect(f"{reverse('users')}?user={user.pk}")


def _refused(
    request: HttpRequest, conflict: Conflict, user_id: int | None = None, *, form: str = ""
) -> HttpResponse:
    """The page with what was refused, where `form` holds what was typed in it."""
    messages.error(request, conflict.detail)
    return _page(request, chosen_id=user_id, refused={form: request.POST}, status=409)


def _page(
    request: HttpRequest,
    *,
    chosen_id: int | None = None,
    password: str = "",
    refused: Mapping[str, Mapping[str, str]] | None = None,
    status: int = 200,
) -> HttpResponse:
    current_user = _current_user(request)
    people = _found(request)
    query = request.GET.copy()
    if chosen_id:
        query["user"] = str(chosen_id)
    chosen_id = whole(query.get("user", ""), 2**31 - 1)
    context = {
        # Where the page stands also when it answers an order, see `live_page`.
        "live_path": reverse("users"),
        "live_query": query,
        "page": page_of(people, request.GET, sorts=SORTS),
        "q": request.GET.get("q", "").strip(),
        "chosen": roles.people_for(current_user).filter(pk=chosen_id).first()
        if chosen_id
        else None,
        "password": password,
        "refused": refused or {},
        "clusters": roles.administered(current_user),
        "roles": Role,
        "superuser": is_superuser(current_user),
        "everywhere": roles.may_grant(current_user, None),
    }
    response = render(request, "people/users.html", context, status=status)
    response["Cache-Control"] = "no-store"
    return response


def _found(request: HttpRequest) -> QuerySet[User]:
    """The people that the asking person manages. Raises PermissionDenied if they manage none."""
    current_user = _current_user(request)
    if not may_somewhere(current_user, Role.ADMIN):
        raise PermissionDenied("Only admins manage who may do what.")
    people = roles.people_for(current_user)
    if q := request.GET.get("q", "").strip():
        people = people.filter(username__icontains=q)
    return people


def _role(grant: Grant) -> str:
    return f"{grant.role} in {grant.cluster.name if grant.cluster else 'all clusters'}"


def _managed_cluster(request: HttpRequest) -> str | None:
    """The cluster named in the form, None for all of them, if the person manages roles there.

    A cluster that they do not see does not exist; one that they only see is refused.
    """
    current_user = _current_user(request)
    cluster_id = request.POST.get("cluster") or None
    if not roles.may_grant(current_user, cluster_id):
        if cluster_id and not clusters_for(current_user).filter(pk=cluster_id).exists():
            raise Http404("no such cluster")
        raise PermissionDenied("Only admins of this cluster manage its roles.")
    return cluster_id


def _superusers_only(request: HttpRequest) -> None:
    if not is_superuser(_current_user(request)):
        raise PermissionDenied("Only superusers may do this.")


def _current_user(request: HttpRequest) -> User:
    assert isinstance(request.user, User)  # noqa: S101 - `signed_in` stands before every view
    return request.user


def _new_password() -> str:
    return secrets.token_urlsafe(12)
