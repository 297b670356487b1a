"""How peers talk: JSON behind its length, and bytes in hashed chunks. Never pickles."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import xxhash

from runtime.image import Damaged

HEADER = struct.Struct("!I16s")  # length of the chunk, its xxh3-128
LENGTH = struct.Struct("!I")
MAX_JSON = 64 << 20


class PeerFailed(ConnectionError):
    """This peer cannot give what was asked; ask another."""


class Refused(PeerFailed):
    """The request is not carried out, and no other peer would carry it out either."""


class Busy(PeerFailed):
    """The peer serves as many requests as it can; ask it again later."""


def send_json(connection: socket.socket, message: dict[str, Any]) -> None:
    """Raises PeerFailed if it is more than a peer takes, and tells the peer, who waits for it."""
    data = json.dumps(message).encode()
    if len(data) > MAX_JSON:
        error = (
            f"a description of {len(data)} bytes, and a peer takes {MAX_JSON} at most: divide the "
            "state among more ranks"
        )
        send_json(connection, {"error": error})
        raise PeerFailed(error)
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive_json(connection: socket.socket) -> dict[str, Any]:
    """Raises PeerFailed if the peer hung up, says that it failed, or sends no JSON object; Refused
    if it says that so would others, and Busy if it serves too many."""
    (size,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size))
    if size > MAX_JSON:
        raise PeerFailed(f"a description of {size} bytes is not believable")
    try:
        message: dict[str, Any] = json.loads(receive_exactly(connection, size))
    except ValueError as error:
        raise PeerFailed(f"what came is no description: {error}") from error
    if not isinstance(message, dict):
        raise PeerFailed(f"what came is no description: {message!r:.100}")
    if "error" in message:
        told = Busy if message.get("busy") else PeerFailed
        raise (Refused if message.get("everywhere") else told)(message["error"])
    return message


def send_chunk(connection: socket.socket, chunk: memoryview, known: str | None = None) -> None:
    """`known`: its hash, where it was computed before."""
    hashed = bytes.fromhex(known) if known else xxhash.xxh3_128_digest(chunk)
    connection.sendall(HEADER.pack(len(chunk), hashed))
    connection.sendall(chunk)


def receive_chunk(connection: socket.socket, into: memoryview) -> str:
    """Fill `into` with one chunk; returns its hash. Raises Damaged, PeerFailed."""
    size, expected = HEADER.unpack(receive_exactly(connection, HEADER.size))
    if size != len(into):
        raise Damaged(f"a chunk of {size} bytes came where {len(into)} were due")
    receive_into(connection, into)
    found = xxhash.xxh3_128_digest(into)
    if found != expected:
        raise Damaged(f"a chunk of {size} bytes has not the hash that came with it")
    return found.hex()


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes of a connection.

    Raises PeerFailed if the peer hangs up first, the connection fails, or its timeout passes.
    """
    buffer = bytearray(size)
    receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fill `view` with the next bytes of a connection.

    Raises PeerFailed if the peer hangs up first, the connection fails, or its timeout passes.
    `view` is then filled in part.
    """
    done = 0
    while done < len(view):
        try:
            count = connection.recv_into(view[done:])
        except OSError as error:
            raise PeerFailed(str(error)) from error
        if count == 0:
            raise PeerFailed("the peer hung up")
        done += count
