"""Who is speaking: nodes by their key, jobs by their token.

Keys are held in memory and read anew each second, so that a beat costs no query and a revoked key
is refused within two seconds. While Postgres is away the keys last read stay good: nobody could
have revoked one, and a node must not look silent because our own database is.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import structlog
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from django.db import DatabaseError, InterfaceError, close_old_connections, connection

from controlplane import crypto
from controlplane.errors import Refused
from controlplane.fleet.models import Node
from controlplane.ingest.http import Request, unavailable
from node_agent import wire

log = structlog.get_logger(__name__)

REFRESH_S = 1.0
#: An unknown node makes us read again at once, but no more often than this.
MISS_GAP_S = 0.2
MAX_MISSES = 1000


@dataclass(frozen=True, slots=True)
class Identity:
    """A node as ingest knows it."""

    node_id: str
    public_key: str
    revoked: bool
    boot_id: str
    report_digest: str
    key: Ed25519PublicKey


class Directory:
    """The keys of all nodes, in memory."""

    def __init__(self) -> None:
        self._identities: dict[str, Identity] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ingest-directory")
        self._next_read: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._wanted = asyncio.Event()
        self._misses = 0

    async def run(self) -> None:
        """Keep the keys fresh until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                waiting, self._next_read = self._next_read, loop.create_future()
                self._wanted.clear()
                read = await loop.run_in_executor(self._reader, _read, self._identities)
                self._identities = read if read is not None else self._identities
                waiting.set_result(read is not None)
                await asyncio.sleep(MISS_GAP_S)
                try:
                    await asyncio.wait_for(self._wanted.wait(), REFRESH_S - MISS_GAP_S)
                except TimeoutError:
                    continue
        finally:
            self._reader.submit(connection.close)
            self._reader.shutdown(wait=False)

    def learn(self, node: Node) -> None:
        """Know a node that was just enrolled without reading it back."""
        self._identities[node.pk] = _identity(
            node.pk, node.public_key, None, node.boot_id, node.report_digest, None
        )

    def learn_report(self, node_id: str, digest: str) -> None:
        known = self._identities.get(node_id)
        if known is not None:
            self._identities[node_id] = replace(known, report_digest=digest)

    async def authenticate(self, request: Request) -> Identity:
        """The node that the request's head names, before its body is read.

        Raises Refused: no or an unknown node, a revoked key, a clock that is off.
        """
        node_id = request.header(wire.HEADER_NODE)
        if not node_id:
            raise Refused(401, "unknown_node", wire.HEADER_NODE, "say which node is speaking")
        identity = self._identities.get(node_id) or await self._read_for(node_id)
        if identity.revoked:
            raise Refused(
                403, "node_revoked", wire.HEADER_NODE, "this node's key is revoked; enrol it anew"
            )
        _check_clock(request.header(wire.HEADER_TIME))
        return identity

    async def _read_for(self, node_id: str) -> Identity:
        if self._misses >= MAX_MISSES:
            raise unavailable("too many unknown nodes at once; try again")
        self._misses += 1
        self._wanted.set()
        try:
            read = await asyncio.shield(self._next_read)
        finally:
            self._misses -= 1
        identity = self._identities.get(node_id)
        if identity is None and not read:
            raise unavailable("the database does not answer, so the node cannot be looked up")
        if identity is None:
            raise Refused(
                401, "unknown_node", wire.HEADER_NODE, "no such node is enrolled here; enrol it"
            )
        return identity


def verify_signature(identity: Identity, request: Request, body: bytes) -> None:
    """Raises Refused if the node did not sign exactly this request."""
    signed = wire.signing_input(
        request.path, identity.node_id, request.header(wire.HEADER_TIME), body
    )
    try:
        signature = base64.b64decode(request.header(wire.HEADER_SIGNATURE), validate=True)
        identity.key.verify(signature, signed)
    except (InvalidSignature, binascii.Error, ValueError):
        raise Refused(
            401,
            "bad_signature",
            wire.HEADER_SIGNATURE,
            "the signature does not fit this request under the key that the node enrolled with",
        ) from None


def bearer_token(request: Request) -> str:
    """The bearer token of a request. Raises Refused where there is none."""
    scheme, _, token = request.header("Authorization").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Refused(401, "wrong_job_token", "Authorization", "send the job's token as Bearer")
    return token


def verify_job_token(job_id: str, token: str) -> None:
    """Raises Refused if this is not the token of this job."""
    if not hmac.compare_digest(crypto.job_token(job_id).encode(), token.encode()):
        raise Refused(
            401, "wrong_job_token", "Authorization", "this is not the token of the batch's job"
        )


def _check_clock(text: str) -> None:
    try:
        skew = float(text) - time.time()
    except ValueError:
        skew = math.inf
    # Written so that "nan" is refused.
    if not abs(skew) <= wire.MAX_CLOCK_SKEW_S:
        raise Refused(
            401,
            "clock_skew",
            wire.HEADER_TIME,
            f"must be Unix seconds within {wire.MAX_CLOCK_SKEW_S:.0f} of ours: set the clock",
        )


def _read(known: dict[str, Identity]) -> dict[str, Identity] | None:
    """All nodes, on the reader's thread; None if Postgres does not answer."""
    try:
        close_old_connections()  # pings it, and drops it if Postgres has gone meanwhile
        rows = list(
            Node.objects.values_list(
                "pk", "public_key", "key_revoked_at", "boot_id", "report_digest"
            ).iterator()
        )
    except (DatabaseError, InterfaceError) as error:
        log.warning("ingest.directory_unreadable", error=str(error))
        connection.close()
        return None
    return {row[0]: _identity(*row, known.get(row[0])) for row in rows}


def _identity(
    node_id: str,
    public_key: str,
    revoked_at: object,
    boot_id: str,
    report_digest: str,
    known: Identity | None,
) -> Identity:
    # Parsing a key is what costs, so an unchanged key is kept parsed.
    unchanged = known is not None and known.public_key == public_key
    key = (
        known.key
        if known is not None and unchanged
        else Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key))
    )
    return Identity(node_id, public_key, revoked_at is not None, boot_id, report_digest, key)
