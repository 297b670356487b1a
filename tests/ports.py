"""Ports for the servers that tests start in processes of their own."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below the range from which the system takes the ports of outgoing connections (32768 and up on
# Linux, 49152 and up elsewhere): a port from that range may be taken by any connection between
# the moment it was found free and the moment its server binds it.
SERVER_PORTS = range(15_000, 32_000)


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on, and that no connection will take."""
    for port in random.sample(SERVER_PORTS, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("No free TCP port on 127.0.0.1 in a hundred tries: close some programs.")
