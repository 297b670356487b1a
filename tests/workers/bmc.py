"""A management controller at the edge where hardware would be: answers as Redfish does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Node


class Bmc:
    """One node's power, and every order that it was given."""

    def __init__(self) -> None:
        self.on = True
        self.boots = 1
        self.orders: list[str] = []
        #: How often it says of the node that this is the case once it was told to switch it off.
        self.lingers = 0
        self.meanwhile = "On"
        self._going_off = False
        #: Whether it refuses an order that changes nothing, or that is under way, as some do.
        self.strict = False
        #: Whether it refuses every order.
        self.broken = False
        #: What it says instead of a state, as some do that are being started.
        self.answers: dict[str, object] | None = None
        #: The bytes that it answers everything with, where they are not what they should be.
        self.body: bytes | None = None

    def order(self, kind: str) -> bool:
        """False if it refuses."""
        self.orders.append(kind)
        vain = self._going_off or self.on == (kind == "On")
        if self.broken or (self.strict and vain and kind != "ForceRestart"):
            return False
        starts = kind == "ForceRestart" or (kind == "On" and not self.on)
        self.boots += int(starts)
        self._going_off |= kind == "ForceOff" and self.lingers > 0  # nothing keeps it from that
        self.on = kind != "ForceOff" or self._going_off
        return True

    def state(self) -> str:
        if self._going_off:
            self.on = self._going_off = self.lingers > 0
            self.lingers -= 1
        if self._going_off:
            return self.meanwhile
        return "On" if self.on else "Off"


@contextmanager
def bmc_of(node: Node) -> Iterator[Bmc]:
    """Give the node a controller on a port of this machine."""
    bmc = Bmc()

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            oem = {"Drydock": {"BootId": f"boot-{bmc.boots}"}}
            says = {"PowerState": bmc.state()} if bmc.answers is None else bmc.answers
            self.answer(200, {**says, "Oem": oem})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(200 if bmc.order(body["ResetType"]) else 409, {})

        def answer(self, status: int, content: dict[str, object]) -> None:
            body = json.dumps(content).encode() if bmc.body is None else bmc.body
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    fleet.set_bmc(SYSTEM, node.pk, url, "drydock", "secret")
    yield bmc
    server.shutdown()
    server.server_close()
