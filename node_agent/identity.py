"""Who this node is: its key, its id, and the keys it obeys. Enrols once, then remembers.

The private key is made here and never leaves the node.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from node_agent import wire
from node_agent.config import Config
from node_agent.files import write_atomically
from node_agent.link import Backoff, Link, Refused, Unreachable
from node_agent.log import log

#: A refused token may be replaced by a person: try again this often, in seconds.
REFUSED_RETRY_S = 3.0


class CannotEnrol(Exception):
    """Enrolment was refused for a reason that trying again will not mend."""


@dataclass(frozen=True)
class Identity:
    """An enrolled node: its id, its private key, and the public keys of whom it obeys.

    `beat_interval_s` is the time between two beats in seconds, as the control plane told at
    enrolment.
    """

    node_id: str
    key: Ed25519PrivateKey
    command_keys: tuple[Ed25519PublicKey, ...]
    beat_interval_s: float

    def link(self, config: Config) -> Link:
        """A new signed connection."""
        return Link(config.ingest_url, self.node_id, self.key)

    def trusts(self, payload: bytes, signature: str) -> bool:
        """Whether one of the enrolled command keys signed this command."""
        try:
            raw = base64.b64decode(signature, validate=True)
        except ValueError:
            return False
        return any(_verifies(key, raw, payload) for key in self.command_keys)


def identify(
    config: Config,
    boot_id: str,
    version: str,
    inventory: Callable[[], wire.Inventory | None],
    wait: Callable[[float], bool],
) -> Identity | None:
    """The stored identity, or a new one by enrolling; tries until it works. Raises CannotEnrol.

    `inventory()` is None while the hardware cannot be listed. `wait(seconds)` is true when the
    agent shall stop: then None.
    """
    path = config.state_dir / "identity.json"
    key = _own_key(config.state_dir / "node.key")
    if path.exists():
        return _identity(key, msgspec.json.decode(path.read_bytes(), type=wire.EnrollAnswer))
    answer = _enrol(config, key, boot_id, version, inventory, wait)
    if answer is None:
        return None
    write_atomically(path, msgspec.json.encode(answer))
    log("enrolled", node_id=answer.node_id, command_keys=len(answer.command_keys))
    return _identity(key, answer)


def _own_key(path: Path) -> Ed25519PrivateKey:
    if path.exists():
        return Ed25519PrivateKey.from_private_bytes(base64.b64decode(path.read_bytes()))
    key = Ed25519PrivateKey.generate()
    write_atomically(path, base64.b64encode(key.private_bytes_raw()))
    return key


def _identity(key: Ed25519PrivateKey, answer: wire.EnrollAnswer) -> Identity:
    command_keys = tuple(
        Ed25519PublicKey.from_public_bytes(base64.b64decode(text)) for text in answer.command_keys
    )
    return Identity(answer.node_id, key, command_keys, answer.beat_interval_s)


def _enrol(
    config: Config,
    key: Ed25519PrivateKey,
    boot_id: str,
    version: str,
    inventory: Callable[[], wire.Inventory | None],
    wait: Callable[[float], bool],
) -> wire.EnrollAnswer | None:
    link = Link(config.ingest_url)
    backoff = Backoff(0.25, REFUSED_RETRY_S)
    while True:
        fitted = inventory()
        if fitted is None:  # enrolling with no cards would be a lie
            if wait(backoff.next()):
                return None
            continue
        request = wire.Enroll(
            join_token=_join_token(config),
            name=config.name,
            public_key=base64.b64encode(key.public_key().public_bytes_raw()).decode(),
            boot_id=boot_id,
            address=config.address,
            agent_version=version,
            inventory=fitted,
            rack=config.rack,
        )
        try:
            return link.post("/v1/enroll", msgspec.json.encode(request), wire.EnrollAnswer)
        except Unreachable as error:
            delay = backoff.next()
            log("enrol_unreachable", "warning", error=str(error), retry_s=round(delay, 2))
        except Refused as refused:
            delay = REFUSED_RETRY_S
            problem = msgspec.to_builtins(refused.problem)
            log("enrol_refused", "error", problem=problem, retry_s=delay)
            if refused.problem.status in {400, 413, 422}:
                raise CannotEnrol(f"mend the configuration: {refused}") from refused
        if wait(delay):
            return None


def _join_token(config: Config) -> str:
    path = config.join_token_file
    if path is None or not path.exists():
        raise CannotEnrol(
            "this node is not enrolled: put a join token into a file and name it as"
            f" `join_token_file` (now: {path})"
        )
    return path.read_text().strip()


def _verifies(key: Ed25519PublicKey, signature: bytes, payload: bytes) -> bool:
    try:
        key.verify(signature, wire.COMMAND_CONTEXT + payload)
    except InvalidSignature:
        return False
    return True
