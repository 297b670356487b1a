"""Secrets that the control plane makes and keeps: derived tokens, sealed values, command keys.

Everything follows from SECRET_KEY, so there is one secret to guard and nothing to lose.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from functools import cache

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

from node_agent.wire import COMMAND_CONTEXT


def job_token(job_id: str) -> str:
    """The bearer token of a job's ranks. Derived, so that it is never stored."""
    digest = hmac.new(_derive("job-token"), job_id.encode(), hashlib.sha256).digest()
    return "ddj_" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def token_hash(token: str) -> str:
    """What is stored of a secret token: an HMAC under a pepper that is not in the database."""
    return hmac.new(_derive("token-pepper"), token.encode(), hashlib.sha256).hexdigest()


def audit_chain_key() -> bytes:
    """The key of the audit chain's hashes: without it nobody can make an edited chain fit."""
    return _derive("audit-chain")


def seal(plaintext: str) -> str:
    """Encrypt a credential for storage in the database."""
    return _fernet().encrypt(plaintext.encode()).decode()


def unseal(sealed: str) -> str:
    """Undo `seal`. Raises ValueError if SECRET_KEY is not the one that sealed it."""
    try:
        return _fernet().decrypt(sealed.encode()).decode()
    except InvalidToken:
        raise ValueError(
            "this credential was sealed under another SECRET_KEY; set it anew"
        ) from None


def sign_command(payload: str) -> str:
    """Ed25519 over a command's exact JSON text, in base64."""
    return base64.b64encode(_signing_key().sign(COMMAND_CONTEXT + payload.encode())).decode()


def command_public_keys() -> list[str]:
    """The keys under which agents verify commands, in base64."""
    raw = (
        _signing_key()
        .public_key()
        .public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    )
    return [base64.b64encode(raw).decode()]


@cache
def _signing_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(_derive("command-signing"))


@cache
def _fernet() -> Fernet:
    return Fernet(base64.urlsafe_b64encode(_derive("sealed-values")))


@cache
def _derive(purpose: str) -> bytes:
    kdf = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=f"drydock/{purpose}".encode())
    return kdf.derive(settings.SECRET_KEY.encode())
