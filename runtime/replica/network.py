"""At which address of this machine peers reach us, where it has several. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

from runtime.client import ENV_NETWORK

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
#: For documentation (RFC 5737): no packet is sent there, and the way is that of most others.
ELSEWHERE = "192.0.2.1"
PORTS = 1 << 16
_NAME_BYTES, _REQUEST_BYTES = 15, 40


def address_of(value: str) -> tuple[str, int]:
    """Host and port, of "node1:7070". Raises ValueError if it is no such text."""
    host, colon, port = value.rpartition(":")
    if not colon or int(port) not in range(PORTS):
        raise ValueError(f"{value!r} is no host:port")
    return host, int(port)


def own_address(coordinator: str, network: str = "") -> str:
    """The IPv4 address that `network` names: itself, that of an interface of this name, or ours
    within that network ("10.1.0.0/16"). Else the one by which we reach the coordinator.

    Raises RuntimeError, with the addresses that there are, if `network` names none of them.
    """
    if not network:
        return _towards(coordinator)
    found = addresses()
    if network in found:
        return found[network]
    try:
        wanted = ipaddress.IPv4Network(network, strict=False)
    except ValueError as error:
        raise _unknown(network, found) from error
    if wanted.num_addresses == 1 and _is_ours(network):
        return str(wanted.network_address)
    within = [one for one in found.values() if ipaddress.IPv4Address(one) in wanted]
    if not within:
        raise _unknown(network, found)
    return within[0]


def addresses() -> dict[str, str]:
    """The IPv4 addresses of this machine, by interface; those that have none are left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = name.encode()[:_NAME_BYTES].ljust(_REQUEST_BYTES, b"\0")
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:
                continue  # it is down, or speaks IPv6 alone
            found[name] = socket.inet_ntoa(struct.unpack_from("4s", answer, 20)[0])
    return found


def _towards(coordinator: str) -> str:
    host = coordinator.rpartition(":")[0]
    address = source_towards(host)
    if address.startswith("127.") and host != "localhost" and not host.startswith("127."):
        # For a machine's own name /etc/hosts often gives the loopback, on which peers on other
        # machines would reach themselves.
        with contextlib.suppress(OSError):  # there is no other network
            return source_towards(ELSEWHERE)
    return address


def source_towards(host: str) -> str:
    """Our address on the way there. Raises OSError if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def _is_ours(address: str) -> bool:
    """Also a second address of an interface, which `addresses` does not tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address.partition("/")[0], 0))
        except OSError:
            return False
        return True


def _unknown(network: str, found: dict[str, str]) -> RuntimeError:
    told = ", ".join(f"{name} {address}" for name, address in found.items())
    return RuntimeError(
        f"{ENV_NETWORK} is {network!r}, which is no interface, network or address of this machine; "
        f"it has {told}"
    )
