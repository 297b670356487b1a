"""The control plane's processes, started as in production, on the database of the tests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.local import runfile
from tests.controlplane.ingest.door import database_url, wait_until
from tests.ports import free_port

# Far more than the two seconds that a start takes: other tests run beside it on the same cores.
START_TIMEOUT_S = 120.0

GRANIAN_LOGS = runfile.REPOSITORY / "controlplane" / "granian-logs.json"


@dataclass
class Process:
    """One running process; its log is what it wrote to stderr, its output to stdout."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.with_suffix(".out").read_text()

    def lines(self) -> list[dict[str, Any]]:
        """Every line of its log. Raises ValueError if one of them is not JSON."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def said(self, event: str) -> bool:
        return any(line["event"] == event for line in self.lines())

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 120) -> int:
        return self.popen.wait(timeout)


@contextmanager
def running(log: Path, *argv: str, **environment: str) -> Iterator[Process]:
    """Run `python -m …` or `python manage.py …` and kill its session at the end."""
    with log.open("ab") as errors, log.with_suffix(".out").open("ab") as output:
        popen = subprocess.Popen(
            [sys.executable, *argv],
            cwd=runfile.REPOSITORY,
            env={**os.environ, "DATABASE_URL": database_url(), **environment},
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
    try:
        yield Process(popen, log)
    finally:
        if popen.poll() is None:
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


@contextmanager
def keeper(log: Path, **environment: str) -> Iterator[tuple[Process, int]]:
    """A keeper, and the port on which it tells how it is."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with running(
        log, "manage.py", "keeper", KEEPER_METRICS_ADDRESS=address, **environment
    ) as process:
        _wait_until_up(process, port)
        yield process, port


@contextmanager
def web(log: Path, *, workers: int = 1, **environment: str) -> Iterator[tuple[Process, int]]:
    """The pages under granian, with its own logs as in production."""
    port = free_port()
    with running(
        log,
        *("-m", "granian", "--interface", "wsgi", "--port", str(port), "--no-ws"),
        *("--workers", str(workers), "--blocking-threads", "2"),
        *("--log-config", str(GRANIAN_LOGS)),
        "controlplane.wsgi:application",
        **environment,
    ) as process:
        _wait_until_up(process, port)
        yield process, port


@contextmanager
def worker(log: Path, name: str) -> Iterator[Process]:
    """A Celery worker with one hand."""
    with running(
        log,
        *("-m", "celery", "--quiet", "-A", "workers.celery:app", "worker", "-n", name),
        *("--concurrency", "1", "-O", "fair"),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ) as process:
        yield process


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    """Status and text of one answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def _wait_until_up(process: Process, port: int) -> None:
    """Return once it answers on `port`; one that ended, or is silent, fails with its own log."""
    with suppress(AssertionError):
        wait_until(
            lambda: answers(port, "/healthz") or process.popen.poll() is not None, START_TIMEOUT_S
        )
    assert answers(port, "/healthz"), f"not up on port {port}: {process.log.read_text()}"


def answers(port: int, path: str) -> bool:
    try:
        return get(port, path)[0] == 200
    except OSError:
        return False
