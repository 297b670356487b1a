"""The coordinator's socket and clock: listens, ticks, and goes after its members.

Decides nothing about epochs, and must never be taken for a death of those still connected.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.replica.connection import Peer, read_line
from runtime.replica.network import address_of
from runtime.replica.roster import LEASE_S, PEER_SILENT_S, TICK_S
from runtime.replica.succession import Superseded

if TYPE_CHECKING:
    from runtime.replica.coordinator import Coordinator

log = logging.getLogger("drydock.coordinator")

LEAST_LEASE_S = 1.0  # they are asked for a sign of life twice in that time
FIRST_LINE_S = 10.0  # how long a stranger may take to say who it is
MAX_STRANGERS = 64  # each has a descriptor, without which no record is written
DRAIN_S = 10.0  # how long members may take to leave once we are told to end
MAX_LINE = 1 << 20


def options(description: str) -> argparse.Namespace:
    """The command line and the environment of a coordinator; ends the process if one is wrong."""
    parser = argparse.ArgumentParser(
        prog="runtime.replica.coordinator",
        description=description,
        epilog="In the environment: DRYDOCK_TOKEN, the job's token, which must be there; and "
        "DRYDOCK_WORLD_REPLICAS, with how many replicas the job starts: as many as --min-replicas "
        "if it is not set, or more once one that joins says so.",
    )
    parser.add_argument("--job", required=True, help="the job's id, the same on all its ranks")
    parser.add_argument(
        "--min-replicas",
        type=int,
        default=1,
        help="train with as few replicas as this; the others may be missing",
    )
    parser.add_argument(
        "--state-dir",
        type=Path,
        required=True,
        help="the folder of the coordinator's record, on storage that outlives this machine",
    )
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port; port 0 chooses one")
    parser.add_argument("--port-file", type=Path, help="the chosen port is written here")
    parser.add_argument(
        "--lease",
        type=float,
        default=LEASE_S,
        help="seconds that members may train without a word from the coordinator",
    )
    parser.add_argument(
        "--silence",
        type=float,
        default=PEER_SILENT_S,
        help="seconds that a member may answer nothing before it is given up: more than one call "
        "ever holds its Python's lock for",
    )
    parser.add_argument(
        "--adopt",
        choices=("majority", "any"),
        default="majority",
        help="whose word of an epoch that the record does not know is taken: any only if the "
        "members that are missing are surely dead",
    )
    given = parser.parse_args()
    if not given.lease >= LEAST_LEASE_S:
        parser.error(f"--lease is {given.lease:g}: give {LEAST_LEASE_S:g} seconds at least")
    if not given.silence >= PEER_SILENT_S:
        parser.error(f"--silence is {given.silence:g}: give {PEER_SILENT_S:g} seconds at least")
    try:
        given.host, given.port = address_of(given.listen)
    except ValueError:
        parser.error(f"--listen is {given.listen}: give host:port, as 0.0.0.0:7070")
    given.token = os.environ.get("DRYDOCK_TOKEN", "")
    world = os.environ.get("DRYDOCK_WORLD_REPLICAS", str(given.min_replicas))
    try:
        given.world = int(world)
    except ValueError:
        parser.error(f"DRYDOCK_WORLD_REPLICAS is {world!r}: give a whole number, or do not set it")
    if given.world < given.min_replicas:
        parser.error(
            f"--min-replicas is {given.min_replicas} and DRYDOCK_WORLD_REPLICAS {given.world}: "
            "once one is gone nothing would be trained any more"
        )
    if not given.token:
        parser.error("DRYDOCK_TOKEN is empty: give the job's token in the environment")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return given


async def run(coordinator: Coordinator, host: str, port: int, port_file: Path | None) -> None:
    """Serve until SIGTERM or SIGINT, then for as long as members are connected, but DRAIN_S. Raises
    SystemExit where it cannot listen."""
    connections: set[asyncio.Task[None]] = set()
    strangers: dict[asyncio.StreamWriter, None] = {}  # whoever came first is the first

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        strangers[writer] = None
        # All members may return at once.
        if len(strangers) > max(MAX_STRANGERS, 2 * coordinator.world):
            first = next(iter(strangers))  # it has had most time
            del strangers[first]
            first.close()
        known = functools.partial(strangers.pop, writer, None)
        task = asyncio.create_task(serve(coordinator, reader, writer, known))
        connections.add(task)
        task.add_done_callback(connections.discard)

    try:
        server = await asyncio.start_server(accept, host, port, limit=MAX_LINE)
    except OSError as error:
        raise SystemExit(
            f"--listen is {host}:{port}, and nothing can listen there ({error}): give an address "
            "of this machine, as 0.0.0.0, and a port that no other process has, as ss -ltnp shows"
        ) from error
    bound = server.sockets[0].getsockname()
    if port_file is not None:
        draft = port_file.with_name(port_file.name + ".new")
        draft.write_text(f"{bound[1]}\n")
        draft.replace(port_file)
    log.info("listening host=%s port=%s epoch=%s", bound[0], bound[1], coordinator.record.epoch)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), TICK_S)
            coordinator.tick()
        await drain(coordinator)
    finally:
        server.close()  # not as a context: since Python 3.12.1 that waits for all who are connected
    log.info("ended epoch=%s connected=%s", coordinator.record.epoch, sorted(coordinator.peers))


async def serve(
    coordinator: Coordinator,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    known: Callable[[], object] = lambda: None,
) -> None:
    """One connection, from its first line to its end. `known` is called once it is no stranger any
    more: it has said something, and is answered at once unless it may stay."""
    peer: Peer | None = None
    try:
        try:
            async with asyncio.timeout(FIRST_LINE_S):
                first = await read_line(reader)
        finally:
            known()
        if first is None or writer.is_closing():
            return
        if first.get("op") == "join":
            refusal = await place_for(coordinator, first, reader)
            if reader.at_eof():
                return  # it did not wait
        else:
            refusal = coordinator.refusal(first)
        if refusal:
            told = {"ok": False, "error": refusal, "must_end": isinstance(refusal, Superseded)}
            writer.write(json.dumps(told).encode() + b"\n")
        elif first["op"] == "join":
            peer = coordinator.join(first, writer)
            while (message := await read_line(reader)) is not None:
                if not coordinator.hear(peer, message):
                    return
        else:
            writer.write(json.dumps(coordinator.answer(first)).encode() + b"\n")
    except (OSError, ValueError, KeyError, asyncio.LimitOverrunError) as error:
        log.warning("connection_failed error=%r", error)
    except (TypeError, AttributeError) as error:
        # A message of another shape, or a fault of ours: the traceback tells which.
        log.warning("connection_failed error=%r", error, exc_info=True)
    except asyncio.CancelledError:
        peer = None  # it is we who end, not the peer
        raise
    finally:
        if peer is not None:
            coordinator.gone(peer, "reset")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()


async def place_for(
    coordinator: Coordinator, first: dict[str, Any], reader: asyncio.StreamReader
) -> str:
    """Wait until whoever says this first line may join, or hangs up; why it never may."""
    found = coordinator.place_of(first, None)
    while not isinstance(found, str) and not reader.at_eof():
        coordinator.stirred.clear()
        await coordinator.stirred.wait()
        found = coordinator.place_of(first, found)
    return found if isinstance(found, str) else ""


async def drain(coordinator: Coordinator) -> None:
    """At power-off all get SIGTERM at once: members that stop still need our leave to go."""
    deadline = time.monotonic() + DRAIN_S
    while coordinator.peers and time.monotonic() < deadline:
        await asyncio.sleep(TICK_S)  # the clock that tick() counts on
        coordinator.tick()
