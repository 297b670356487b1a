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
        #: How often it still says that the node is on once it was told to switch it off.
        self.lingers = 0
        self._going_off = False

    def order(self, kind: str) -> None:
        self.orders.append(kind)
        starts = kind == "ForceRestart" or (kind == "On" and not self.on)
        self.boots += int(starts)
        self._going_off |= kind == "ForceOff" and self.lingers > 0  # nothing keeps it from that
        self.on = kind != "ForceOff" or self._going_off

    def state(self) -> str:
        if self._going_off:
            self.on = self._going_off = self.lingers > 0
            self.lingers -= 1
        return "On" if self.on else "Off"


@contextmanager
def bmc_of(node: Node) -> Iterator[Bmc]:
    """Give the node a controller on a port of this machine."""
    bmc = Bmc()

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            oem = {"Drydock": {"BootId": f"boot-{bmc.boots}"}}
            self.answer({"PowerState": bmc.state(), "Oem": oem})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bmc.order(body["ResetType"])
            self.answer({})

        def answer(self, content: dict[str, object]) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
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
