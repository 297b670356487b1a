"""The same write asked for twice happens once: answers are kept by key for a day.

The key is claimed in the transaction of the write itself. So a crash leaves neither half, and of
two at the same moment the second waits for the first at the unique constraint, then gets its
answer.
A request that was refused changed nothing and keeps no answer: its key may be used again.
"""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.http import HttpRequest
from django.utils import timezone

from controlplane.accounts.models import IdempotentRequest, User
from controlplane.rest.problems import invalid

HEADER = "Idempotency-Key"
RETENTION = timedelta(hours=24)
MAX_KEY = 100


def key_of(request: HttpRequest) -> str:
    """The key that the request names; "" for none, 400 for one that cannot be kept."""
    key = request.headers.get(HEADER, "")
    if HEADER in request.headers and not (
        0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()
    ):
        raise invalid(HEADER, f"must have 1 to {MAX_KEY} printable ASCII characters")
    return key


def claim(user: User, key: str, request: HttpRequest, body: Any) -> IdempotentRequest:
    """The row of this key: without a status it is ours to answer, else it holds the first answer.

    Call it in the transaction of the write. 422 if the key belongs to another request.
    """
    digest = _digest(request, body)
    mine = IdempotentRequest.objects.filter(user=user, key=key)
    mine.filter(created_at__lt=timezone.now() - RETENTION).delete()
    row, _ = IdempotentRequest.objects.get_or_create(
        user=user, key=key, defaults={"request_hash": digest}
    )
    if row.request_hash != digest:
        detail = f"the key {key!r} was used for another request"
        raise invalid(HEADER, detail, "idempotency_key_reused")
    return row


def keep(row: IdempotentRequest, status: int, body: Any) -> None:
    """Keep the answer for whoever asks again."""
    IdempotentRequest.objects.filter(pk=row.pk).update(status=status, body=body)


def forget_old_answers(now: datetime) -> int:
    """Drop the answers that are older than a day. Returns how many; the keeper calls it."""
    return IdempotentRequest.objects.filter(created_at__lt=now - RETENTION).delete()[0]


def _digest(request: HttpRequest, body: Any) -> str:
    told = [request.method, request.get_full_path(), body]
    return hashlib.sha256(msgspec.json.encode(told, order="sorted")).hexdigest()
