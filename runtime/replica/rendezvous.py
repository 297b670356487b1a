"""Where the members of one epoch leave word for each other while they build their group."""

from __future__ import annotations

from runtime.replica.connection import Peer


class Rendezvous:
    """Values by key; who asks for one too early is answered when it is there."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[tuple[Peer, int]]] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value
        for waiter, number in self._waiting.pop(key, []):
            waiter.tell(op="value", id=number, value=value)

    def get(self, peer: Peer, key: str, number: int) -> None:
        """Answer the peer's request of this number."""
        if key in self._values:
            peer.tell(op="value", id=number, value=self._values[key])
        else:
            self._waiting.setdefault(key, []).append((peer, number))
