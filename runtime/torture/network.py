"""A network of the run's own, in which each replica is a machine of its own.

The machines are network namespaces of Linux, joined by a bridge. What is cut there loses packets,
and nobody is told of it.

    python -m runtime.torture.network --socket PATH --replicas N

It is a process of its own. It takes everything down when the runner's end of its standard input is
closed, however the runner ended. It needs root and the command `ip` (of iproute2). It uses the
standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

#: Where a struck replica asks for it; a Unix socket is reached from every namespace.
ENV_SOCKET = "DRYDOCK_TORTURE_NETWORK"
#: Set aside for tests of networks (RFC 2544): nobody's real machines are hidden by it.
SUBNET = "198.18.{}.{}"
SUBNETS = 256
#: The name of an interface or a namespace of a run: of whose, and which.
_OURS = re.compile(r"dd(\d+)(?:[p-](\d+))?$")
NOBODY = "02:00:00:00:00:01"  # a hardware address that no machine here has
MAX_REPLICAS = 250
ASK_S = 10.0


@functools.cache
def impossible() -> str:
    """Why there can be none here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces are for root"
    if shutil.which("ip") is None:
        return "the command ip (of iproute2) is not installed"
    try:
        with Bridge(str(os.getpid()), 1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return why(error)


def why(error: Exception) -> str:
    """What `ip` says."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}"
    return str(error)


class NoNetwork(RuntimeError):
    """The run's network could not be made."""


class Network:
    """The runner's handle of the process that keeps the run's network."""

    def __init__(self, socket_path: Path, replicas: int) -> None:
        """Raises NoNetwork if it does not come up."""
        if replicas > MAX_REPLICAS:
            raise NoNetwork(f"a network has room for {MAX_REPLICAS} replicas, not {replicas}")
        self.socket_path = socket_path
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, "--socket", socket_path, "--replicas", str(replicas)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.name = str(self._process.pid)
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        told = self._process.stdout.readline().split()
        if told[:1] != [b"up"]:
            self.close()
            raise NoNetwork("the network of the run could not be made: see above")
        self._number = int(told[1])
        self.host = SUBNET.format(self._number, 1)  # of the runner and the coordinator

    def within(self, replica: int) -> list[str]:
        """What stands before a command that is to run on this replica's machine."""
        return ["ip", "netns", "exec", _machine(self.name, replica)]

    def address(self, replica: int) -> str:
        """Of this replica's machine."""
        return SUBNET.format(self._number, replica + 2)

    def close(self) -> None:
        """Take it down."""
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        self._process.stdin.close()
        self._process.wait()


def ask(path: str, **asked: Any) -> None:
    """From a struck replica: cut something. Returns once it is cut. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ASK_S)
        connection.connect(path)
        connection.sendall(json.dumps(asked).encode() + b"\n")
        if connection.recv(1) != b"\n":
            raise OSError(f"the run's network did not do {asked}")


class Bridge:
    """The namespaces of all replicas and the bridge between them, made on entry."""

    def __init__(self, name: str, replicas: int) -> None:
        self.name = name
        self.replicas = replicas
        self.number = -1  # of the subnet, once there is one
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        for words in (
            *(("netns", "del", _machine(self.name, replica)) for replica in range(self.replicas)),
            ("link", "del", f"dd{self.name}"),
        ):
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                _ip(*words)

    def _make(self) -> None:
        bridge = f"dd{self.name}"
        self.number = free_subnet()
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{SUBNET.format(self.number, 1)}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for replica in range(self.replicas):
            machine, port = _machine(self.name, replica), self._port(replica)
            _ip("netns", "add", machine)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", machine)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", machine, "addr", "add", f"{self._address(replica)}/24", "dev", "eth0")
            _ip("-n", machine, "link", "set", "eth0", "up")
            _ip("-n", machine, "link", "set", "lo", "up")

    def isolate(self, replica: int, seconds: float) -> None:
        """Nothing reaches this machine, and nothing of it reaches another, for some seconds."""
        port = self._port(replica)
        self._for(seconds, ("link", "set", port, "nomaster"), self._joined(port))

    def part(self, replica: int, other: int, seconds: float) -> None:
        """Nothing of this machine reaches the other one, so that no connection of theirs lives."""
        neighbour = (self._address(other), "dev", "eth0")
        within = ("-n", _machine(self.name, replica), "neigh")
        lost = (*within, "replace", *neighbour, "lladdr", NOBODY, "nud", "permanent")
        self._for(seconds, lost, (*within, "del", *neighbour))

    def _for(self, seconds: float, cut: tuple[str, ...], mend: tuple[str, ...]) -> None:
        with self._lock:
            _ip(*cut)
        timer = threading.Timer(seconds, self._mend, (mend,))
        timer.daemon = True
        timer.start()

    def _mend(self, words: tuple[str, ...]) -> None:
        with self._lock, contextlib.suppress(subprocess.CalledProcessError):  # it was mended
            _ip(*words)

    def _joined(self, port: str) -> tuple[str, ...]:
        return ("link", "set", port, "master", f"dd{self.name}")

    def _address(self, replica: int) -> str:
        return SUBNET.format(self.number, replica + 2)

    def _port(self, replica: int) -> str:
        return f"dd{self.name}p{replica}"


def _machine(name: str, replica: int) -> str:
    return f"dd{name}-{replica}"


def _ip(*words: str) -> bytes:
    return subprocess.run(["ip", *words], check=True, capture_output=True).stdout  # noqa: S607


def free_subnet() -> int:
    """The number of one that no interface of this machine is in. Raises OSError."""
    there = _ip("-o", "-4", "addr", "show").decode()
    first = os.getpid()
    numbers = [(first + more) % SUBNETS for more in range(SUBNETS)]
    free = [number for number in numbers if SUBNET.format(number, 1) + "/" not in there]
    if not free:
        raise OSError("all subnets of 198.18.0.0/16 are in use here")
    return free[0]


def _sweep() -> None:
    """What runs left behind that were killed together with their networks."""
    names = [name for _, name in socket.if_nameindex()]
    names += [one["name"] for one in json.loads(_ip("-json", "netns", "list") or b"[]")]
    parts = [found for name in names if (found := _OURS.match(name))]
    for owner in {found[1] for found in parts if not Path(f"/proc/{found[1]}").exists()}:
        last = max((int(found[2] or 0) for found in parts if found[1] == owner), default=0)
        Bridge(owner, last + 1).__exit__()


def _serve(server: socket.socket, bridge: Bridge) -> None:
    cuts: dict[str, Callable[..., None]] = {"isolate": bridge.isolate, "part": bridge.part}
    while True:
        connection, _ = server.accept()
        try:
            with connection:
                asked = json.loads(connection.makefile().readline())
                cuts[asked.pop("op")](**asked)
                connection.sendall(b"\n")
        except (OSError, ValueError, KeyError, TypeError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"a cut was not made: {why(error)}\n")  # who asked may be dead


def main() -> None:
    """Keep the run's network until the standard input is closed, then take it down.

    "up N" is printed once the network is there; N is the number of its subnet. Raises SystemExit
    with the reason if the network cannot be made.
    """
    parser = argparse.ArgumentParser(prog="runtime.torture.network", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    given = parser.parse_args()
    try:
        serve_until_alone(given.socket, given.replicas)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"a network of the run's own cannot be made: {why(error)}") from error


def serve_until_alone(path: Path, replicas: int) -> None:
    """Until the runner has ended."""
    _sweep()
    with socket.socket(socket.AF_UNIX) as server, Bridge(str(os.getpid()), replicas) as bridge:
        server.bind(str(path))
        server.listen()
        threading.Thread(target=_serve, args=(server, bridge), daemon=True).start()
        sys.stdout.write(f"up {bridge.number}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
