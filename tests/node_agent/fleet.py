"""A node in a folder, and a small control plane that really checks signatures."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from node_agent import bmc, procfs, wire
from tests.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
#: What is awaited here takes a second or two; on a machine that has other work, far longer.
DEADLINE_S = 600.0
TOKEN = "join-me"
BASIC = base64.b64encode(b"drydock:secret").decode()


def eventually(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """The condition's first true value; fails after the deadline."""
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end, f"not in {deadline_s} s: {condition}"
        pause.wait(0.02)
    return value


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    plane: ControlPlane


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        plane = self.server.plane
        status, answer = plane.answer(self.path, dict(self.headers), body, self.connection)
        data = msgspec.json.encode(answer)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return


class ControlPlane:
    """Keeps what agents send; `refuse` may turn a request down; `stop` and `start` the server."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.nodes: dict[str, Ed25519PublicKey] = {}
        self.enrolments: list[wire.Enroll] = []
        self.beats: list[wire.Beat] = []
        self.reports: list[wire.Report] = []
        self.events: dict[str, wire.Event] = {}
        self.results: list[wire.CommandResult] = []
        self.refuse: Callable[[str, bytes], wire.Problem | None] = lambda path, body: None
        self.want_report = False
        self.next_in_s = 0.2
        self._commands: list[wire.SignedCommand] = []
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._port = free_port()  # one that is still free after it was stopped for a while
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        plane = self

        class Server(_Server):
            def process_request(self, request: Any, address: Any) -> None:
                plane._sockets.append(request)
                super().process_request(request, address)

            def handle_error(self, request: Any, address: Any) -> None:
                return  # agents are killed in the middle of requests here

        self._server = Server(("127.0.0.1", self._port), _Handler)
        self._server.plane = self
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Go away, and cut every open connection."""
        self._server.shutdown()
        self._server.server_close()
        self.cut()

    def cut(self) -> None:
        """Break all connections; the server stays."""
        sockets, self._sockets = self._sockets, []
        for connection in sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def send(self, action: Any, node_id: str = "node-1", **more: Any) -> str:
        """Sign a command and let the next poll carry it. Returns its id."""
        command_id = more.pop("id", f"cmd_{os.urandom(6).hex()}")
        now = time.time()
        command = wire.Command(
            id=command_id,
            node_id=node_id,
            issued_at=more.pop("issued_at", now),
            expires_at=more.pop("expires_at", now + 60),
            action=action,
        )
        payload = msgspec.json.encode(command)
        key = more.pop("key", self.key)
        signature = base64.b64encode(key.sign(wire.COMMAND_CONTEXT + payload)).decode()
        self.offer(wire.SignedCommand(payload=payload.decode(), signature=signature))
        return str(command_id)

    def offer(self, signed: wire.SignedCommand) -> None:
        """Let the next poll carry it, whatever it is."""
        with self._changed:
            self._commands.append(signed)
            self._changed.notify_all()

    def result(self, command_id: str) -> wire.CommandResult:
        """Wait for a command's result."""
        found: wire.CommandResult = eventually(
            lambda: next((result for result in self.results if result.id == command_id), None)
        )
        return found

    def events_of(self, kind: str) -> list[wire.Event]:
        return [event for event in list(self.events.values()) if event.kind == kind]

    def answer(
        self, path: str, headers: dict[str, str], body: bytes, connection: socket.socket
    ) -> tuple[int, Any]:
        problem = self.refuse(path, body) or self._unsigned(path, headers, body)
        if problem is not None:
            return problem.status, problem
        if path == "/v1/commands/poll":
            return 200, self._await_commands(body, connection)
        handler = getattr(self, "_on_" + path.removeprefix("/v1/").replace("/", "_"))
        return 200, handler(body)

    def _unsigned(self, path: str, headers: dict[str, str], body: bytes) -> wire.Problem | None:
        if path == "/v1/enroll":
            return None
        node, at = headers[wire.HEADER_NODE], headers[wire.HEADER_TIME]
        signature = base64.b64decode(headers[wire.HEADER_SIGNATURE])
        assert abs(float(at) - time.time()) < wire.MAX_CLOCK_SKEW_S
        try:
            self.nodes[node].verify(signature, wire.signing_input(path, node, at, body))
        except Exception as error:
            return problem(401, "bad_signature", repr(error))
        return None

    def _on_enroll(self, body: bytes) -> wire.EnrollAnswer:
        request = msgspec.json.decode(body, type=wire.Enroll)
        self.enrolments.append(request)
        public = base64.b64decode(request.public_key)
        self.nodes["node-1"] = Ed25519PublicKey.from_public_bytes(public)
        return wire.EnrollAnswer(
            node_id="node-1",
            command_keys=[base64.b64encode(self.key.public_key().public_bytes_raw()).decode()],
            beat_interval_s=0.2,
            lease_s=3.0,
        )

    def _on_beat(self, body: bytes) -> wire.BeatAnswer:
        self.beats.append(msgspec.json.decode(body, type=wire.Beat))
        want, self.want_report = self.want_report, False
        return wire.BeatAnswer(next_in_s=self.next_in_s, want_report=want)

    def _on_report(self, body: bytes) -> wire.Accepted:
        self.reports.append(msgspec.json.decode(body, type=wire.Report))
        return wire.Accepted()

    def _on_events(self, body: bytes) -> wire.Accepted:
        events = msgspec.json.decode(body, type=wire.Events).events
        self.events.update({event.id: event for event in events})
        return wire.Accepted(ids=[event.id for event in events])

    def _await_commands(self, body: bytes, connection: socket.socket) -> wire.Commands:
        poll = msgspec.json.decode(body, type=wire.CommandPoll)
        with self._changed:
            self._changed.wait_for(lambda: self._commands, poll.wait_s)
            if has_hung_up(connection):  # an agent that died: they are for the next one
                return wire.Commands()
            commands, self._commands = self._commands, []
        return wire.Commands(commands=commands)

    def _on_commands_result(self, body: bytes) -> wire.Accepted:
        result = msgspec.json.decode(body, type=wire.CommandResult)
        self.results.append(result)
        return wire.Accepted(ids=[result.id])


def has_hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def problem(status: int, code: str, detail: str = "", field: str = "") -> wire.Problem:
    return wire.Problem(status=status, code=code, title=code, detail=detail, field=field)


#: A rank that says that it is up, and then only waits. SIGTERM ends it.
RANK = "import os,pathlib,signal; p=pathlib.Path(os.environ['DRYDOCK_STATE_DIR']); "
RANK += "p.mkdir(parents=True, exist_ok=True); "
RANK += "(p/os.environ['DRYDOCK_PLACEMENT']).write_text(str(os.getpid())); signal.pause()"

#: The same, in another language.
SHELL = 'mkdir -p "$DRYDOCK_STATE_DIR"; echo $$ > "$DRYDOCK_STATE_DIR/$DRYDOCK_PLACEMENT"; '
SHELL += "exec sleep 600"

#: All ranks of a job that lives and dies as one, on one node.
TORCHRUN = [
    *("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "--monitor-interval=0.1",
]


class Node:
    """One simulated node's folder, and the agent or chassis that runs in it."""

    def __init__(self, folder: Path, plane: ControlPlane) -> None:
        self.folder = folder
        self.plane = plane
        self.state = folder / "state"
        self.shared = folder / "shared"
        self.config = folder / "agent.toml"
        self.process: subprocess.Popen[bytes] | None = None
        self.bmc_port = 0
        folder.mkdir(parents=True)
        (folder / "token").write_text(TOKEN + "\n")
        (folder / "bmc-password").write_text("secret\n")
        (folder / "bmc-password").chmod(0o600)
        self.boot("boot-1")
        self.fit("GPU-a", "GPU-b")
        self.configure()

    def configure(self, **more: Any) -> None:
        settings = {
            "name": "node-a",
            "rack": "rack-1",
            "address": "127.0.0.1",
            "ingest_url": self.plane.url,
            "state_dir": str(self.state),
            "shared_dir": str(self.shared),
            "local_dir": "checkpoints",
            "holder_dir": "memory",
            "join_token_file": str(self.folder / "token"),
            "hardware": "simulated",
            "hardware_dir": str(self.folder),
            **more,
        }
        programs = {
            "wait": ["python", "-c", RANK],
            "quit": ["python", "-c", "raise SystemExit(3)"],
            "fork": ["python", "-c", FORKING],
            "child": ["python", "-c", f"import os; os.fork()\n{RANK}"],
            "shell": ["sh", "-c", SHELL],
            "missing": ["./no-such-program"],
            "whole": [*TORCHRUN, str(REPOSITORY / "tests/runtime/whole/script.py")],
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        lines += ["[programs]", *(f"{name} = {json.dumps(v)}" for name, v in programs.items())]
        self.config.write_text("\n".join(lines) + "\n")

    def boot(self, boot_id: str) -> None:
        (self.folder / "boot_id").write_text(boot_id)
        (self.folder / "kernel.log").write_text("")

    def fit(self, *uuids: str, **more: Any) -> None:
        cards = [
            {
                "index": index,
                "uuid": uuid,
                "serial": f"13{index}",
                "model": "NVIDIA H100 80GB HBM3",
                "pci_address": f"00000000:1{index}:00.0",
                "memory_bytes": 85_520_809_984,
                **more,
            }
            for index, uuid in enumerate(uuids)
        ]
        new = self.folder / "hardware.json.new"
        new.write_text(json.dumps({"gpus": cards}))
        new.replace(self.folder / "hardware.json")

    def start(self) -> None:
        """The agent alone, as an init system starts it."""
        self._run(["-m", "node_agent", "--config", str(self.config)])

    def start_chassis(self, *more: str) -> None:
        self.bmc_port = free_port()
        listen = f"127.0.0.1:{self.bmc_port}"
        arguments = ["--dir", str(self.folder), "--listen", listen, "--name", "node-a"]
        config = ["--agent-config", str(self.config)]
        self._run(["-m", "node_agent.chassis", *arguments, *config, *more])

    def cards(self) -> list[dict[str, Any]]:
        """What hardware.json says now."""
        cards: list[dict[str, Any]] = json.loads((self.folder / "hardware.json").read_bytes())[
            "gpus"
        ]
        return cards

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def log(self, event: str) -> list[dict[str, Any]]:
        """What was logged under this name."""
        lines = (self.folder / "process.log").read_text().splitlines()
        logged = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in logged if line["event"] == event]

    def rank(self, placement: str = "p-1", program: str = "wait", **more: Any) -> wire.StartRank:
        return wire.StartRank(
            job="job-1",
            placement=placement,
            replica=more.pop("replica", 2),
            rank=0,
            world_replicas=more.pop("world_replicas", 4),
            coordinator=more.pop("coordinator", "127.0.0.1:1"),
            token="job-token",
            ingest_url=self.plane.url,
            program=program,
            options=more.pop("options", {"steps": 3}),
            standby=more.pop("standby", ""),
            together=more.pop("together", None),
        )

    def started_rank(self, placement: str = "p-1", **more: Any) -> int:
        """Start a rank by command and wait until it is up: its pid."""
        result = self.plane.result(self.plane.send(self.rank(placement, **more)))
        assert result.state == "done", result
        eventually((self.shared / "job-1" / placement).exists)
        return int(result.output["pid"])

    def clean_up(self) -> None:
        if self.process is not None and self.process.poll() is None:
            # Stopped first: what it is just starting has no environment yet that would tell.
            self.process.send_signal(signal.SIGSTOP)
            starting = psutil.Process(self.process.pid).children(recursive=True)
            self.kill()
            for child in starting:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        left = [
            *procfs.with_environment("DRYDOCK_STATE_DIR", str(self.shared / "job-1")),
            *procfs.with_environment("DRYDOCK_CHASSIS_DIR", str(self.folder)),
            # A coordinator: another run of these tests has one of the same job.
            *filter(self._is_ours, procfs.with_environment("DRYDOCK_JOB", "job-1")),
        ]
        for process in left:
            with contextlib.suppress(ProcessLookupError):  # it ends by itself just now
                os.kill(process.pid, signal.SIGKILL)

    def _is_ours(self, process: procfs.Process) -> bool:
        """Whether its command line names our folder."""
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return os.fsencode(self.folder) in words

    def _run(self, arguments: list[str]) -> None:
        with (self.folder / "process.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], cwd=REPOSITORY, stdout=output, stderr=output
            )


def call(node: Node, path: str, body: Any = None, basic: str = BASIC) -> tuple[int, dict[str, Any]]:
    """One request to the BMC: (status, answer)."""
    data = None if body is None else json.dumps(body).encode()
    url = f"http://127.0.0.1:{node.bmc_port}{path}"
    request = urllib.request.Request(url, data, {"Authorization": f"Basic {basic}"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:  # noqa: S310
            return response.status, json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def reset(node: Node, kind: str) -> int:
    return call(node, bmc.RESET, {"ResetType": kind})[0]


#: A rank with a child that has left its session and its parent: only its environment tells.
FORKING = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ["DRYDOCK_PLACEMENT"] += "-escaped"
        os.execv(sys.executable, [sys.executable, "-c", {RANK!r}])
    os._exit(0)
os.wait()
{RANK}
"""
