"""`manage.py up`: the whole product on one machine, from the first check to the last process.

Speaks to no database itself: what needs one runs as `manage.py demo …` under the addresses that
are decided here.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from controlplane.local import fleet, processes, runfile, services
from controlplane.local.processes import Program
from controlplane.local.supervisor import Interrupted, ProgramFailed, Supervisor

MIN_FREE_BYTES = 1_000_000_000
#: When `up` began (Unix time), so that what it runs counts the same seconds.
STARTED = "DRYDOCK_UP_STARTED"
#: In a home while the first user's password is another than the one in `admin-password`.
CHANGED = "admin-password-changed"
#: Held by whoever starts or stops a home; in a folder that was refused as one it may lie too.
LOCK = "up.lock"
#: Lies in every home, and says that a folder is one.
MARKER = ".drydock-home"
#: All else that is made in a home, as patterns, the database first. `reset` deletes nothing else.
MADE = (
    *("postgres", "postgres.new", "postgres.half", "nodes", "shared"),
    *("redis", "sockets", "logs", "pids", "run.json", ".run.json.*"),
    *("admin-password", ".admin-password.*", CHANGED, "secret-key", ".secret-key.*"),
)


class UpError(Exception):
    """The product cannot be started here; the message is for the person who asked, as it is."""


@dataclass(frozen=True)
class Options:
    """What `make up` was asked for; `home` is the folder of all its data."""

    home: Path
    nodes: int = 8
    port: int = 8000
    ingest_port: int = 8001
    with_fleet: bool = True
    with_job: bool = True
    ready_file: Path | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ingest_url(self) -> str:
        return f"http://127.0.0.1:{self.ingest_port}"


def up(options: Options) -> int:
    """Start everything, keep it running until asked to stop, stop everything; an exit status."""
    os.environ[STARTED] = str(time.time())
    try:
        nodes = fleet.plan(options.home, options.nodes) if options.with_fleet else []
        _check_home(options.home)
        with _only_one(options):
            _check_machine(options)
            _sweep(options.home)
            with _ports(options):
                _settle(options.home)
                return _run(options, nodes)
    except (UpError, fleet.FleetError, services.ServiceError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def say(line: str) -> None:
    """One line of progress, with the seconds since `up` was typed."""
    elapsed = time.time() - float(os.environ.get(STARTED, time.time()))
    _print(f"{elapsed:5.0f} s  {line}")


def is_home(home: Path) -> bool:
    """Whether `up` has run here: else nothing in this folder is ours to delete."""
    with runfile.ours(home):
        if (home / MARKER).exists():
            return True
        # Earlier versions made no marker, and the lock in any folder that `down` was told of.
        begun = (home / "pids").exists() and (home / LOCK).exists()
        return begun or (home / "admin-password").exists()


def made(home: Path) -> list[Path]:
    """What in this folder has a name that we give, the database first. In a home that is ours."""
    return [path for pattern in MADE for path in home.glob(pattern)]


def holder(home: Path) -> dict[str, str | int] | None:
    """The `up` that runs for this home: its `pid` and `url`, or neither while it begins or the home
    is cleared; None if none does."""
    try:
        with runfile.ours(home), (home / LOCK).open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        content: dict[str, str | int] = json.loads((home / LOCK).read_text() or "{}")
        return content
    return None


@contextmanager
def locked(home: Path) -> Iterator[TextIO]:
    """Hold the home's lock, to write in it who does. Raises BlockingIOError, with a sentence, when
    another command has it."""
    with ExitStack() as held:
        with runfile.ours(home):
            home.mkdir(mode=0o711, parents=True, exist_ok=True)
            stream = held.enter_context((home / LOCK).open("a+"))
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"Drydock starts or stops just now for {home}: try again in a moment."
            ) from None
        stream.truncate(0)
        yield stream


def _run(options: Options, nodes: list[fleet.NodePlan]) -> int:
    interrupted = False
    with Supervisor(options.home, say) as supervisor:
        try:
            whole = _start(options, nodes, supervisor)
            _greet(options, whole=whole)
            while True:
                supervisor.wait(3600)
        except Interrupted:
            interrupted = True
            say("stopping; the demo job writes a checkpoint first (a second Ctrl-C kills at once)")
        except (ProgramFailed, services.ServiceError, OSError) as error:
            say(f"cannot go on: {error}")
            say(f"stopping; the logs are in {options.home / 'logs'}")
    runfile.path().unlink(missing_ok=True)
    left = processes.marked(options.home)
    say(f"stopped; {len(left) or 'no'} processes left")
    return 0 if interrupted and not left else 1


def _start(options: Options, nodes: list[fleet.NodePlan], supervisor: Supervisor) -> bool:
    """Start all there is. False if only the demo did not come up, which has been said."""
    say(f"starting Drydock in {options.home}")
    ports = {options.port, options.ingest_port}
    plan = services.plan(options.home, os.environ, say, taken=ports)
    children = [supervisor.keep(program) for program in plan.programs]
    services.wait_ready(plan, children, supervisor.wait)
    product = _product_environment(options, plan)
    runfile.write(product, os.getpid())
    environment = {**os.environ, **product}
    say("PostgreSQL and Redis answer")

    supervisor.run(_manage(environment, "demo", "prepare", "--nodes", str(len(nodes))))
    say("database ready")
    for program in _servers(options, environment):
        supervisor.keep(program)
    _await_port(options.port, supervisor)
    _await_port(options.ingest_port, supervisor)
    say(f"pages and ingest answer: {options.url}")
    if not nodes:
        return True
    for node in nodes:
        fleet.prepare(node, options.ingest_url, options.home / "shared", ports)
        ports.add(node.bmc_port)
        supervisor.keep(fleet.chassis_program(node))
    say(f"{len(nodes)} simulated nodes booting")
    return _show_demo(options, environment, supervisor)


def _show_demo(options: Options, environment: dict[str, str], supervisor: Supervisor) -> bool:
    """Admit the fleet and start the demo job. False, with a word, for what did not come up.

    What keeps it back is mended on the pages, which answer by now: so it ends nothing.
    """
    whole = True
    for part in ("admit", "job") if options.with_job else ("admit",):
        try:
            supervisor.run(_manage(environment, "demo", part, "--nodes", str(options.nodes)))
        except ProgramFailed as error:
            whole = False
            say(f"{error}; going on without, see {options.url}")
    return whole


def _product_environment(options: Options, plan: services.Plan) -> dict[str, str]:
    return {
        **plan.environment,
        "PUBLIC_URL": options.url,
        "INGEST_URL": options.ingest_url,
        "DRYDOCK_HOME": str(options.home),
        "DJANGO_SETTINGS_MODULE": "controlplane.local.settings",
    }


def _servers(options: Options, environment: dict[str, str]) -> list[Program]:
    """The control plane's own processes.

    What acts stops before the nodes do, and what records after them: our own stop is no fault, and
    what the nodes say of it is still heard.
    """
    granian = (
        *(sys.executable, "-m", "granian", "--host", "127.0.0.1", "--workers", "1"),
        *("--no-ws", "--respawn-failed-workers", "--log-level", "warning"),
    )
    commands: dict[str, tuple[int, tuple[str, ...]]] = {
        "keeper": (0, (sys.executable, "manage.py", "keeper")),
        "worker": (
            0,
            (
                *(sys.executable, "-m", "celery", "-A", "workers.celery:app", "worker"),
                *("--concurrency", "2", "--loglevel", "WARNING", "-O", "fair"),
                *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            ),
        ),
        "ingest": (
            2,
            (
                *(*granian, "--interface", "asgi", "--port", str(options.ingest_port)),
                *("--backpressure", "20000", "controlplane.ingest.app:app"),
            ),
        ),
        "web": (
            2,
            (
                *(*granian, "--interface", "wsgi", "--http", "1", "--port", str(options.port)),
                *("--blocking-threads", "4", "controlplane.wsgi:application"),
            ),
        ),
    }
    return [
        Program(name, argv, runfile.REPOSITORY, environment, stop_order=order)
        for name, (order, argv) in commands.items()
    ]


def _manage(environment: dict[str, str], *arguments: str) -> Program:
    return Program(
        name="-".join(part for part in arguments[:2]),
        argv=(sys.executable, "manage.py", *arguments),
        cwd=runfile.REPOSITORY,
        env=environment,
        logged=False,
    )


def _await_port(port: int, supervisor: Supervisor) -> None:
    deadline = time.monotonic() + services.READY_S
    while not _answers(port):
        if time.monotonic() > deadline:
            raise ProgramFailed(f"Nothing answers on port {port} after {services.READY_S:.0f} s.")
        supervisor.wait(0.1)


def _greet(options: Options, *, whole: bool) -> None:
    shown = (options.home / "admin-password").read_text().strip()
    if (options.home / CHANGED).exists():
        shown = "as it was set on the Users page"
    _print(
        f"\n  Drydock runs:  {options.url}\n"
        f"  log in as      admin\n"
        f"  password       {shown}\n\n"
        "  Now break something, in another terminal, and watch it being mended:\n"
        "                 .venv/bin/python manage.py scenario kill-process\n\n"
        "  Ctrl-C stops everything and keeps the data; `make up` goes on from there.\n",
    )
    if whole and options.ready_file is not None:
        options.ready_file.touch()


def _print(text: str) -> None:
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError:  # the terminal was closed: there is still everything to stop
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - as long as we live


# --- checks ---------------------------------------------------------------------------------------


def _check_home(home: Path) -> None:
    """Raises UpError for a folder that is no home yet and has what we would take for our own."""
    if is_home(home):
        return
    if {path.name for path in home.glob("*")} <= {"secret-key", LOCK}:
        return  # any command of an earlier version made these
    theirs = [path.name for path in made(home)]
    if theirs:
        raise UpError(
            f"{home} holds {', '.join(theirs)}, which Drydock has not made but would use. Choose "
            "another place with DRYDOCK_HOME=/path; or, if all of that is Drydock's, say so: "
            f"touch {home / MARKER}"
        )


@contextmanager
def _only_one(options: Options) -> Iterator[None]:
    """Hold the home's lock. Raises UpError, naming its address, when another `up` has it."""
    with ExitStack() as held:
        try:
            stream = held.enter_context(locked(options.home))
        except BlockingIOError as error:
            other = holder(options.home)
            if not other:
                raise UpError(str(error)) from None
            raise UpError(
                f"Drydock already runs for {options.home} at {other['url']} (process "
                f"{other['pid']}). Use that one, or stop it with `make down`."
            ) from None
        stream.write(json.dumps({"pid": os.getpid(), "url": options.url}))
        stream.flush()
        yield


def _check_machine(options: Options) -> None:
    free = shutil.disk_usage(options.home).free
    if free < MIN_FREE_BYTES:
        raise UpError(
            f"Only {free / 1e9:.1f} GB of disk are free at {options.home}, and Drydock wants 1 GB. "
            "Free some, or choose another place with DRYDOCK_HOME=/path."
        )


@contextmanager
def _ports(options: Options) -> Iterator[None]:
    """Hold the ports that the servers will listen on. Raises UpError for one that is taken."""
    with ExitStack() as claims:
        for port, variable in ((options.port, "PORT"), (options.ingest_port, "INGEST_PORT")):
            try:
                claims.enter_context(_claimed(port))
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise UpError(
                    f"Port {port} cannot be used ({error.strerror}). Stop what listens there, or "
                    f"choose another: make up {variable}={port + 100}"
                ) from error
        yield


def _claimed(port: int) -> socket.socket:
    """The only one of its name in this machine's network, while it is open. Raises OSError.

    Servers of one user may listen on one port together: each of two that start at the same time
    finds it free, and each gets half of the other's requests.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0drydock-port-{port}")
    except OSError:
        claim.close()
        raise
    return claim


def _settle(home: Path) -> None:
    """Make the folder a home, now that nothing speaks against it."""
    with runfile.ours(home):
        (home / MARKER).touch()
        runfile.keep_secret_key(os.environ)


def _sweep(home: Path) -> None:
    """Clear what a killed `up` has left: the nodes' own records first, they know best."""
    swept = processes.sweep(home)
    for folder in sorted((home / "nodes").glob("*")):
        fleet.sweep(folder)
    runfile.path().unlink(missing_ok=True)
    if swept:
        say(f"stopped {swept} processes that a killed run had left")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
