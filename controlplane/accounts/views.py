"""Signing in and out, and the decorator that every page stands behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from django.conf import settings
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView, LogoutView, redirect_to_login
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.middleware import csrf
from django.shortcuts import render, resolve_url
from django.utils.http import url_has_allowed_host_and_scheme
from django_htmx.http import HttpResponseClientRedirect, HttpResponseClientRefresh

from controlplane.accounts import throttle
from controlplane.accounts.access import Access, needs

View = Callable[..., HttpResponseBase]
#: How a refusal begins that does not come from an old page: the form was sent from elsewhere.
_FROM_ELSEWHERE = (csrf.REASON_BAD_ORIGIN.split("%")[0], csrf.REASON_BAD_REFERER.split("%")[0])


def signed_in(view: View) -> View:
    """Send whoever is not signed in to the login page, also from within a live update.

    From there they come back to the page on which they were.
    """

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if request.user.is_authenticated:
            return view(request, *args, **kwargs)
        login = redirect_to_login(_page_of(request), resolve_url(settings.LOGIN_URL))
        if request.htmx:  # type: ignore[attr-defined]
            return HttpResponseClientRedirect(login.url)
        return login

    return guarded


def _page_of(request: HttpRequest) -> str:
    """Where in our pages the browser stands: orders and live updates are sent from there."""
    if request.htmx:  # type: ignore[attr-defined]
        return _path_of(request.htmx.current_url_abs_path or "")  # type: ignore[attr-defined]
    if request.method == "GET":
        return request.get_full_path()
    told = request.headers.get("Referer", "")
    ours = url_has_allowed_host_and_scheme(told, {request.get_host()})
    return _path_of(told if ours else "")


def _path_of(address: str) -> str:
    parts = urlsplit(address)
    return urlunsplit(("", "", parts.path or "/", parts.query, ""))


class LoginForm(AuthenticationForm):
    """Django's, behind the throttle."""

    #: Who is switched off hears what whoever guesses hears: Django does not tell them apart.
    error_messages = {
        **AuthenticationForm.error_messages,
        "invalid_login": "That name and password do not match an account that is switched on."
        " Both are case-sensitive.",
    }

    def clean(self) -> dict[str, Any]:
        username = self.cleaned_data.get("username") or ""
        address = self.request.META.get("REMOTE_ADDR", "") if self.request else ""
        if throttle.is_blocked(username, address):
            raise ValidationError("Too many failed attempts. Wait five minutes, then try again.")
        try:
            return super().clean()
        except ValidationError:
            throttle.record_failure(username, address)
            raise


class Login(LoginView):
    template_name = "accounts/login.html"
    authentication_form = LoginForm
    redirect_authenticated_user = True


class Logout(LogoutView):
    http_method_names = ["post", "options"]


login = needs(Access.PUBLIC)(Login.as_view())
logout = needs(Access.PUBLIC)(Logout.as_view())


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """What a form hears whose token does not fit: most often its page is from before signing in.

    A page that htmx keeps loads anew. Whoever signs in a second time is led on, as they are where
    the token fits: they are signed in.
    """
    if request.htmx:  # type: ignore[attr-defined]
        return HttpResponseClientRefresh()
    if request.user.is_authenticated and request.path == resolve_url(settings.LOGIN_URL):
        view = Login()
        view.setup(request)
        return HttpResponseRedirect(view.get_success_url())
    told = {
        "reason": reason,
        "from_elsewhere": reason.startswith(_FROM_ELSEWHERE),
        "back": _page_of(request),
    }
    return render(request, "403_csrf.html", told, status=403)
