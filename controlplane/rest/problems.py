"""Errors as the API tells them: problem details (RFC 9457), each with a stable code.

`KINDS` is the whole list: an answer never carries a code that is not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from django.core.exceptions import PermissionDenied
from django.db import IntegrityError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.urls import reverse
from django.views import defaults
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions

from controlplane.accounts import views
from controlplane.accounts.authentication import CsrfFailed
from controlplane.errors import Conflict

MEDIA_TYPE = "application/problem+json"
log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Kind:
    """One kind of problem: the status it comes with, and what to do about it."""

    status: HTTPStatus
    title: str
    remedy: str


_H = HTTPStatus
KINDS: dict[str, Kind] = {
    "invalid_parameter": Kind(
        _H.BAD_REQUEST,
        "A parameter or header has a value that is not allowed",
        "Correct the values that `errors` names.",
    ),
    "unknown_parameter": Kind(
        _H.BAD_REQUEST,
        "A query parameter is not known here",
        "Remove it or correct its name; the description of the operation lists them.",
    ),
    "invalid_cursor": Kind(
        _H.BAD_REQUEST,
        "The cursor was not made by this list",
        "Start again without `cursor`; follow `next` and `previous` as they are.",
    ),
    "malformed_body": Kind(
        _H.BAD_REQUEST, "The body is not valid JSON", "Send one JSON object in UTF-8."
    ),
    "invalid_body": Kind(
        _H.BAD_REQUEST,
        "The body does not fit the operation",
        "Correct the fields that `errors` names.",
    ),
    "bad_request": Kind(_H.BAD_REQUEST, "The request is malformed", "Correct it as `detail` says."),
    "not_authenticated": Kind(
        _H.UNAUTHORIZED,
        "Nobody is signed in",
        "Send `Authorization: Bearer ddt_…`, or sign in.",
    ),
    "invalid_token": Kind(
        _H.UNAUTHORIZED,
        "The token is not accepted",
        "It is unknown, expired or revoked, or its owner is switched off: make another.",
    ),
    "forbidden": Kind(
        _H.FORBIDDEN,
        "You may see this, but not do that",
        "Ask for the role that `detail` names; a token is also bound by its scope.",
    ),
    "csrf_failed": Kind(
        _H.FORBIDDEN,
        "The session's write lacks its CSRF token",
        "Send the `csrftoken` cookie's value as `X-CSRFToken`, or use a token.",
    ),
    "not_found": Kind(
        _H.NOT_FOUND,
        "There is no such thing",
        "Check the id. What you may not see looks the same.",
    ),
    "method_not_allowed": Kind(
        _H.METHOD_NOT_ALLOWED, "This address has no such method", "The `Allow` header lists them."
    ),
    "not_acceptable": Kind(
        _H.NOT_ACCEPTABLE, "The answer cannot be given in that form", "Accept `application/json`."
    ),
    "conflict": Kind(
        _H.CONFLICT,
        "The present state does not allow this",
        "Nothing was changed. `detail` says what stands in the way.",
    ),
    "length_required": Kind(
        _H.LENGTH_REQUIRED,
        "The body comes in chunks, which are not read",
        "Send it whole, with `Content-Length`.",
    ),
    "changed": Kind(
        _H.PRECONDITION_FAILED,
        "The object has changed since you read it",
        "Nothing was changed. Read it again; its present tag is in `ETag`.",
    ),
    "body_too_large": Kind(
        _H.REQUEST_ENTITY_TOO_LARGE, "The body is too large", "Send at most 256 KiB."
    ),
    "unsupported_media_type": Kind(
        _H.UNSUPPORTED_MEDIA_TYPE,
        "The body's media type is not read here",
        "Send `Content-Type: application/json`.",
    ),
    "idempotency_key_reused": Kind(
        _H.UNPROCESSABLE_ENTITY,
        "This idempotency key belongs to another request",
        "Use a fresh key for each different request.",
    ),
    "internal_error": Kind(
        _H.INTERNAL_SERVER_ERROR,
        "Something went wrong on our side",
        "Report `request_id`; the log line under it tells the rest.",
    ),
    "busy": Kind(
        _H.SERVICE_UNAVAILABLE,
        "Another write holds what this one needs",
        "Nothing was changed. Try again after `Retry-After` seconds.",
    ),
    "too_slow": Kind(
        _H.SERVICE_UNAVAILABLE,
        "The database was not done with this in time",
        "Nothing was changed. Narrow the filter: the same again takes as long.",
    ),
    "unavailable": Kind(
        _H.SERVICE_UNAVAILABLE,
        "The database does not answer",
        "Try again after `Retry-After` seconds. A write may have been done nevertheless: send it "
        "again under its `Idempotency-Key`, or look first.",
    ),
}


@dataclass
class Problem(Exception):
    """Raised anywhere under the API. `errors`: {field, code, detail} of each thing to mend."""

    code: str
    detail: str
    errors: Sequence[Mapping[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


def invalid(field_name: str, detail: str, code: str = "invalid_parameter") -> Problem:
    """A problem with one parameter, header or field."""
    return Problem(code, detail, [{"field": field_name, "code": code, "detail": detail}])


def exception_handler(error: Exception, context: Mapping[str, Any]) -> HttpResponse | None:
    """The answer to what a view raised; None for what nobody foresaw."""
    problem = _problem_of(error)
    return None if problem is None else answer(context["request"], problem)


def answer(request: HttpRequest, problem: Problem) -> HttpResponse:
    """A problem as the client reads it."""
    kind = KINDS[problem.code]
    body = {
        "type": f"{reverse('api-docs')}#{problem.code}",
        "title": kind.title,
        "status": kind.status.value,
        "code": problem.code,
        "detail": problem.detail,
        "request_id": getattr(request, "request_id", ""),
    }
    if problem.errors:
        body["errors"] = list(problem.errors)
    response = HttpResponse(msgspec.json.encode(body), status=kind.status, content_type=MEDIA_TYPE)
    for name, value in problem.headers.items():
        response[name] = value
    return response


@csrf_exempt  # what is wrong is the address, and a program with a token has no cookie
def not_found(request: HttpRequest, **_path: str) -> HttpResponse:
    """The view behind every address under the API that is none."""
    return answer(request, Problem("not_found", f"there is nothing at {request.path}"))


def server_error(request: HttpRequest) -> HttpResponse:
    """Django's handler500: problem details under the API, the page elsewhere."""
    problem = _problem_of_database(sys.exception())
    if request.path.startswith("/api/"):
        return answer(request, problem or Problem("internal_error", "an error that nobody foresaw"))
    return defaults.server_error(request) if problem is None else _page(problem)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Django's handler400, for what is refused before a view is reached."""
    if not request.path.startswith("/api/"):
        return defaults.bad_request(request, exception)
    return answer(request, Problem("bad_request", "the request cannot be read"))


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Django's CSRF_FAILURE_VIEW, for what is refused before a view is reached."""
    if not request.path.startswith("/api/"):
        return views.csrf_failure(request, reason)
    return answer(request, Problem("csrf_failed", reason))


#: What the framework raises, and the code under which it is told.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (Http404, "not_found"),
    (exceptions.NotFound, "not_found"),
    (exceptions.NotAuthenticated, "not_authenticated"),
    (exceptions.AuthenticationFailed, "invalid_token"),
    (CsrfFailed, "csrf_failed"),
    (PermissionDenied, "forbidden"),
    (exceptions.PermissionDenied, "forbidden"),
    (exceptions.ParseError, "malformed_body"),
    (exceptions.MethodNotAllowed, "method_not_allowed"),
    (exceptions.NotAcceptable, "not_acceptable"),
    (exceptions.UnsupportedMediaType, "unsupported_media_type"),
)


def _problem_of(error: Exception) -> Problem | None:
    if isinstance(error, Problem):
        return error
    if isinstance(error, Conflict):
        return Problem("conflict", error.detail)
    if isinstance(error, exceptions.ValidationError):
        return Problem("invalid_body", "some fields cannot be accepted", [*_flat(error.detail, "")])
    for kind, code in _CODES:
        if isinstance(error, kind):
            header = getattr(error, "auth_header", None)
            headers = {"WWW-Authenticate": header} if header else {}
            return Problem(code, str(error) or KINDS[code].title, headers=headers)
    return _problem_of_database(error)


#: A lock that was not got in time, a deadlock, a row that another wrote first. All leave nothing
#: behind: the caller may ask again, and then hears what there is.
_CONTENTION = ("55P03", "40P01", "23505")
_CANCELED = "57014"
#: The connection is lost or refused: the driver alone noticed (no state), or the server says that
#: it has no room for one more, ends, or is still starting.
_AWAY = ("08", "53300", "57P")


def _problem_of_database(error: BaseException | None) -> Problem | None:
    """What the database could not do at this moment; None for any other error."""
    if not isinstance(error, OperationalError | InterfaceError | IntegrityError):
        return None
    state = getattr(error.__cause__, "sqlstate", None) or ""
    if state in _CONTENTION:
        return Problem("busy", "another write was in the way", headers={"Retry-After": "1"})
    if state == _CANCELED:
        return Problem("too_slow", "the database was not done in time; narrow the filter")
    if isinstance(error, IntegrityError) or (state and not state.startswith(_AWAY)):
        return None
    log.warning("http.postgres_unavailable", error=str(error))
    return Problem("unavailable", "the database does not answer", headers={"Retry-After": "5"})


#: What a page says of these, where the API has codes and headers.
_ON_PAGES = {
    "busy": "Nothing was changed. Try again in a moment.",
    "too_slow": "Nothing was changed. Narrow the filter if there is one, then try again.",
    "unavailable": "Try again in a moment. If you sent a form, look first whether it was done.",
}


def _page(problem: Problem) -> HttpResponse:
    """A problem of the database as people read it; made without asking the database anything."""
    kind = KINDS[problem.code]
    told = {"title": kind.title, "status": kind.status.value, "remedy": _ON_PAGES[problem.code]}
    page = render_to_string("503.html", told)
    return HttpResponse(page, status=kind.status, headers=dict(problem.headers))


def _flat(detail: Any, path: str) -> Iterator[dict[str, str]]:
    """DRF's nested lists and dicts of errors, one entry for each, with a dotted path."""
    if isinstance(detail, dict):
        for name, inner in detail.items():
            yield from _flat(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(detail, list):
        for number, inner in enumerate(detail):
            yield from _flat(inner, f"{path}.{number}" if isinstance(inner, dict) else path)
    else:
        yield {"field": path, "code": getattr(detail, "code", "invalid"), "detail": str(detail)}
