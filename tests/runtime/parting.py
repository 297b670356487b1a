"""Lets survivors disagree about a step: PART_AT is "deaf:step" or "late:step".

Who is deaf hears nothing more of the replica with the next number once it begins to share the
slices of that step's sum: of its peers one lacks a slice then, and the other has all. Who is late
loses its own sum of the step, while all others have theirs, and says so once the epoch is broken.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from typing import Any

import psutil

from runtime.replica.gloo import Gloo, group_sockets
from runtime.replica.membership import Severed
from runtime.replica.observing import Observer, Phase
from runtime.torture.injector import around
from runtime.torture.kinds import SO_ATTACH_FILTER


class Parting(Observer):
    """Knows which step is summed."""

    def __init__(self) -> None:
        self.step = -1

    def at(self, phase: Phase, step: int) -> None:
        if phase == "forward":
            self.step = step


def make() -> Observer:
    what, _, at = os.environ["PART_AT"].partition(":")
    seen = Parting()

    def deaf(inner: Any, group: Gloo, *given: Any) -> Any:
        if seen.step == int(at):
            hear_nothing_of(int(os.environ["DRYDOCK_REPLICA"]) + 1, group)
        return inner(group, *given)

    def late(inner: Any, group: Gloo, buffer: Any) -> None:
        if seen.step != int(at):
            inner(group, buffer)
            return
        inner(group, buffer.clone())
        while not group.broken(1):
            time.sleep(0.001)
        raise Severed("its own sum of the step is lost")

    method, wrapped = {"deaf": ("gather", deaf), "late": ("all_reduce", late)}[what]
    around(Gloo, method, wrapped)
    return seen


def hear_nothing_of(replica: int, group: Gloo) -> None:
    """The kernel drops what arrives from there, acknowledgements too, and resets nothing."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # accept no byte
    dropping = struct.pack("HP", 1, ctypes.addressof(program))
    ends = {(one.laddr, one.raddr): one.pid for one in psutil.net_connections("tcp")}
    for connection in group_sockets(group.address, group._peers).values():
        with connection:
            pid = ends[connection.getpeername(), connection.getsockname()]
            if psutil.Process(pid).environ()["DRYDOCK_REPLICA"] == str(replica):
                connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, dropping)
