"""The HTTP door of a simulated BMC: Redfish's paths and words, one request at a time.

Holds no state and kills nothing itself: every request becomes one call of the machine behind it.
"""

from __future__ import annotations

import base64
import hmac
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Protocol

from node_agent.faults import FAULTS, NoSuchCard
from node_agent.log import log

USER = "drydock"
MAX_BODY_BYTES = 65_536
#: A client that connects and says nothing must not keep the others out.
REQUEST_TIMEOUT_S = 2.0
RESET_TYPES = ("On", "ForceOff", "ForceRestart")

SYSTEM = "/redfish/v1/Systems/1"
RESET = f"{SYSTEM}/Actions/ComputerSystem.Reset"
CARDS = "/redfish/v1/Oem/Drydock/Cards"
KERNEL_LOG = "/redfish/v1/Oem/Drydock/KernelLog"
BREAK = "/redfish/v1/Oem/Drydock/Faults"
FREEZE = "/redfish/v1/Oem/Drydock/Freeze"
FREEZABLE = ("agent", "all")


class Switches(Protocol):
    """What stands behind the door."""

    def describe(self) -> dict[str, Any]: ...
    def reset(self, kind: str) -> None: ...
    def fit_cards(self) -> list[dict[str, Any]]: ...
    def kernel_line(self, line: str) -> bool: ...
    def break_card(self, name: str, index: int) -> dict[str, Any] | None: ...
    def freeze(self, what: str, frozen: bool) -> bool: ...


class PasswordError(Exception):
    """The password file is missing, empty or readable by others."""


class _Problem(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def read_password(path: Path) -> str:
    """The BMC's password. Raises PasswordError."""
    if not path.exists():
        raise PasswordError(f"{path} is missing: write the BMC's password into it, mode 0600")
    if path.stat().st_mode & 0o077:
        raise PasswordError(f"{path} is open to others: chmod 600 it")
    password = path.read_text().strip()
    if not password:
        raise PasswordError(f"{path} is empty: write the BMC's password into it")
    return password


def server(machine: Switches, address: tuple[str, int], password: str) -> HTTPServer:
    """A server ready for `serve_forever`. One thread: requests take effect one after the other."""
    expected = "Basic " + base64.b64encode(f"{USER}:{password}".encode()).decode()

    class Handler(_Handler):
        pass

    Handler.machine = machine
    Handler.expected = expected
    return HTTPServer(address, Handler)


class _Handler(BaseHTTPRequestHandler):
    machine: Switches
    expected: str
    timeout = REQUEST_TIMEOUT_S
    server_version = "Drydock-BMC"

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _get(self) -> tuple[int, Any]:
        if self.path.rstrip("/") != SYSTEM:
            raise _Problem(404, "ResourceMissing", f"there is no {self.path}")
        return 200, self.machine.describe()

    def _post(self) -> tuple[int, Any]:
        orders = {
            RESET: self._reset,
            CARDS: self._fit_cards,
            KERNEL_LOG: self._kernel_line,
            BREAK: self._break_card,
            FREEZE: self._freeze,
        }
        order = orders.get(self.path.rstrip("/"))
        if order is None:
            raise _Problem(404, "ResourceMissing", f"there is no {self.path}")
        return order(self._body())

    def _reset(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.machine.reset(_one_of(body, "ResetType", RESET_TYPES))
        return 204, None

    def _fit_cards(self, _body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"gpus": self.machine.fit_cards()}

    def _kernel_line(self, body: dict[str, Any]) -> tuple[int, Any]:
        line = body.get("line")
        if not isinstance(line, str) or not line or "\n" in line:
            raise _Problem(400, "PropertyValueFormatError", "line: one line of text")
        if not self.machine.kernel_line(line):
            raise _off()
        return 204, None

    def _break_card(self, body: dict[str, Any]) -> tuple[int, Any]:
        fault = _one_of(body, "fault", tuple(FAULTS))
        index = body.get("card")
        if not isinstance(index, int) or isinstance(index, bool):
            raise _Problem(400, "PropertyValueTypeError", "card: the index of a card")
        try:
            broken = self.machine.break_card(fault, index)
        except NoSuchCard as error:
            raise _Problem(400, "PropertyValueOutOfRange", str(error)) from error
        if broken is None:
            raise _off()
        return 200, broken

    def _freeze(self, body: dict[str, Any]) -> tuple[int, Any]:
        what = _one_of(body, "what", FREEZABLE)
        frozen = body.get("frozen")
        if not isinstance(frozen, bool):
            raise _Problem(400, "PropertyValueTypeError", "frozen: true or false")
        if not self.machine.freeze(what, frozen):
            raise _off()
        return 204, None

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            raise _Problem(400, "MalformedJSON", f"a body of at most {MAX_BODY_BYTES} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)) or b"{}")
        except ValueError as error:
            raise _Problem(400, "MalformedJSON", str(error)) from error
        if not isinstance(body, dict):
            raise _Problem(400, "MalformedJSON", "an object is expected")
        return body

    def _answer(self, handle: Any) -> None:
        try:
            given = self.headers.get("Authorization", "")
            if not hmac.compare_digest(given.encode(), self.expected.encode()):
                raise _Problem(401, "NoValidSession", f"HTTP Basic, user {USER}")
            status, body = handle()
        except _Problem as problem:
            error = {"code": f"Base.1.0.{problem.code}", "message": str(problem)}
            status, body = problem.status, {"error": error}
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="bmc"')
        if body is not None:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, template: str, *args: Any) -> None:
        log("bmc_request", "debug", line=template % args)


def _one_of(body: dict[str, Any], name: str, allowed: tuple[str, ...]) -> str:
    value = body.get(name)
    if value not in allowed:
        raise _Problem(400, "ActionParameterNotSupported", f"{name}: one of {', '.join(allowed)}")
    return str(value)


def _off() -> _Problem:
    return _Problem(409, "InvalidPowerState", "the system is off")
