"""The whole product as a person starts it: `manage.py up`, with data and ports of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from controlplane.local.processes import MARK
from tests.ports import free_ports

REPOSITORY = Path(__file__).resolve().parents[1]
#: What the test run has set for itself; the product beside it must not see it.
OURS = ("DATABASE_URL", "REDIS_URL", "SECRET_KEY", "PUBLIC_URL", "INGEST_URL")
START_S = 600.0
STOP_S = 200.0
SCENARIO_S = 1500.0


@dataclass
class Product:
    """A home with its ports; `up` runs while `process` is set."""

    home: Path
    port: int
    ingest_port: int
    process: subprocess.Popen[str] | None = None
    scenarios: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def password(self) -> str:
        return (self.home / "admin-password").read_text().strip()

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in OURS}
        return {**kept, "DRYDOCK_HOME": str(self.home)}

    def start(self) -> None:
        """Return once the job trains. Fails the test with what `up` printed otherwise."""
        ready = self.home / "ready"
        ready.unlink(missing_ok=True)
        self.home.mkdir(parents=True, exist_ok=True)
        log = (self.home / "up.log").open("w")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "manage.py", "up", "--ready-file", str(ready)),
                *("--port", str(self.port), "--ingest-port", str(self.ingest_port)),
            ],
            cwd=REPOSITORY,
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_S
        while not ready.exists():
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
            pytest.fail("`up` did not start the product:\n" + self.log())

    def stop(self) -> int:
        """Ctrl-C, and the exit status of `up`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """SIGKILL of `up` alone: what it started stays behind."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(STOP_S)

    def clear(self) -> None:
        """Leave nothing running, whatever became of `up` and of the scenarios."""
        for scenario in self.scenarios:
            scenario.kill()
        try:
            self.stop()
        finally:
            self.kill()
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):  # its parent took it along
                    process.kill()

    def log(self) -> str:
        return (self.home / "up.log").read_text()

    def processes(self) -> list[psutil.Process]:
        """Everything that was started under this home, and still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.home):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return [p for p in found if p.pid != os.getpid()]

    def manage(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=REPOSITORY,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SCENARIO_S,
        )

    def begin(self, name: str) -> subprocess.Popen[str]:
        """Start a scenario and return once it has made its fault and found the incident."""
        process = subprocess.Popen(
            [sys.executable, "manage.py", "scenario", name, "--json"],
            cwd=REPOSITORY,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.scenarios.append(process)
        assert process.stderr is not None
        told = []
        limit = threading.Timer(SCENARIO_S, process.kill)  # which ends what it tells
        limit.start()
        try:
            for line in process.stderr:
                told.append(line)
                if line.startswith("incident:"):
                    return process
        finally:
            limit.cancel()
        pytest.fail(f"{name} did not begin:\n{''.join(told)}")

    def end(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """The JSON object of a scenario that was begun."""
        output, _ = process.communicate(timeout=SCENARIO_S)
        result: dict[str, Any] = json.loads(output)
        return result

    def scenario(self, name: str) -> dict[str, Any]:
        """Play a scenario and return its JSON object; its exit status must agree with it."""
        done = self.manage("scenario", name, "--json")
        result: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode == 0) == result["ok"], done.stderr
        return result

    def membership(self) -> str:
        """What the job's coordinator wrote last: whom it lost, whom it let in, in which epochs."""
        logs = [log.read_text().splitlines() for log in self.home.glob("nodes/*/state/logs/*.log")]
        told = (" granted epoch=", " lost replica=", " joined replica=")
        lines = [line for log in logs for line in log if any(word in line for word in told)]
        return "\n".join(sorted(lines)[-40:])

    def job(self) -> dict[str, Any]:
        """The demo job's row."""
        code = (
            "import json; from controlplane.jobs.models import Job\n"
            "print(json.dumps(Job.objects.values('step','state','epoch','ledger_step',"
            "'recomputed_steps').get(name='gpt-demo')))"
        )
        done = self.manage("shell", "--no-imports", "-v0", "-c", code)
        row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return row


@pytest.fixture(scope="session")
def product(request: pytest.FixtureRequest) -> Iterator[Product]:
    """The running product; where a test failed, its rows and logs are kept for whoever looks."""
    # Not under pytest's own temporary folder: each run of pytest closes that to other users, and
    # as root the embedded PostgreSQL is another user.
    home = Path(tempfile.mkdtemp(prefix="drydock-e2e-"))
    port, ingest_port = free_ports(2)
    product = Product(home, port, ingest_port)
    try:
        product.start()
        yield product
    finally:
        product.clear()
    if request.session.testsfailed:
        reporter = request.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.write_line(f"the product's rows and logs are kept in {home}")
        reporter.write_line(product.membership())
    else:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def chromium() -> str:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no Chromium on this machine; install it to run the browser tests")
    return path
