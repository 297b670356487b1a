"""Who calls the API: a session of our pages, or a program with a token.

A token's text is `ddt_<prefix>_<secret>`: the prefix finds the row, an HMAC of the whole text under
a pepper outside the database must equal what is stored. What it may do is looked up at each use.
"""

# Django REST framework carries no types.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import hmac
from datetime import timedelta

from django.http import HttpRequest
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication
from rest_framework.authentication import SessionAuthentication as DjangoSession
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied

from controlplane import crypto
from controlplane.accounts.models import ApiToken, User

#: `last_used_at` is written at most this often.
USE_NOTED_EVERY = timedelta(minutes=1)


class TokenAuthentication(BaseAuthentication):
    """`Authorization: Bearer ddt_…`; the user it returns carries the token as `user.token`."""

    def authenticate(self, request: HttpRequest) -> tuple[User, ApiToken] | None:
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        token = _token_of(text.strip())
        if token is None:
            raise AuthenticationFailed("this token is unknown, expired or revoked")
        now = timezone.now()
        if token.last_used_at is None or token.last_used_at < now - USE_NOTED_EVERY:
            ApiToken.objects.filter(pk=token.pk).update(last_used_at=now)
        token.user.token = token  # type: ignore[attr-defined]
        return token.user, token

    def authenticate_header(self, _request: HttpRequest) -> str:
        return 'Bearer realm="drydock"'


class SessionAuthentication(DjangoSession):
    """A signed-in browser; its writes carry the CSRF token."""

    def enforce_csrf(self, request: HttpRequest) -> None:
        try:
            super().enforce_csrf(request)
        except PermissionDenied as refusal:
            raise CsrfFailed(str(refusal)) from None


class CsrfFailed(PermissionDenied):
    """The write came without the CSRF token that belongs to its session."""


def _token_of(text: str) -> ApiToken | None:
    """The valid token with this text. One answer for all that is wrong: no hints for guessers."""
    kind, _, rest = text.partition("_")
    prefix, _, secret = rest.partition("_")
    if kind != "ddt" or not secret or not text.isascii() or not 0 < len(prefix) <= 12:
        return None
    token = ApiToken.objects.select_related("user").filter(prefix=prefix).first()
    # Compared even where there is no row, so that time does not tell which prefixes exist.
    same = hmac.compare_digest(token.hash if token else "", crypto.token_hash(text))
    if token is None or not same:
        return None
    alive = token.revoked_at is None and token.expires_at > timezone.now()
    return token if alive and token.user.is_active else None
