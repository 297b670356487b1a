"""Ports for the servers that tests start in processes of their own."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below the range from which the system takes the ports of outgoing connections (32768 and up on
# Linux, 49152 and up elsewhere): a port from that range may be taken by any connection between
# the moment it was found free and the moment its server binds it.
SERVER_PORTS = range(15_000, 32_000)


#: Given by this process. Of those in one test some are bound much later than they were found free.
_given: set[int] = set()


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback, none given before, that nobody listens on and no connection takes.
    Whatever a test seeds, other processes draw others."""
    found: list[int] = []
    for port in random.SystemRandom().sample(SERVER_PORTS, len(SERVER_PORTS)):
        if len(found) == count:
            break
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found += {port} - _given
            _given.add(port)
    assert len(found) == count, "Few TCP ports on 127.0.0.1 are free: close some programs."
    return found
