"""Homes for products of their own, beside the services of the test run."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controlplane.local import processes, runfile
from tests.ports import free_ports


@contextmanager
def new_home() -> Iterator[Path]:
    """An empty home that servers run by another user can reach; swept afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="home-", dir=os.environ["DRYDOCK_HOME"])).resolve()
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        processes.sweep(folder)


#: For tests of what belongs to another user.
by_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def home() -> Iterator[Path]:
    with new_home() as folder:
        yield folder


class Product:
    """`manage.py` for one home, as a person would type it, on ports of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port, self.ingest_port = free_ports(2)
        self.ready = home / "ready"
        self.url = f"http://127.0.0.1:{self.port}"
        self.started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*arguments),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def up(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.argv("up", "--no-fleet", "--ready-file", str(self.ready), *arguments),
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, str(runfile.REPOSITORY / "manage.py"), *arguments]

    def environment(self) -> dict[str, str]:
        return {
            **processes.plain_environment(),
            "DRYDOCK_HOME": str(self.home),
            "DRYDOCK_PORT": str(self.port),
            "DRYDOCK_INGEST_PORT": str(self.ingest_port),
        }


Running = tuple[Product, subprocess.Popen[str]]
Eventually = Callable[..., object]


@pytest.fixture
def product(home: Path) -> Product:
    return Product(home)


@contextmanager
def started(home: Path, eventually: Eventually) -> Iterator[Running]:
    """A product without a fleet, ready; ended whatever the test did to it, or if it never was."""
    product = Product(home)
    with product.up() as process:  # at whose end its end is waited for, however long that takes
        try:
            eventually(
                lambda: product.ready.exists() or process.poll() is not None,
                300,
                "the product is ready",
            )
            yield product, process
        finally:
            for one in product.started:
                one.kill()


@pytest.fixture
def running(home: Path, eventually: Eventually) -> Iterator[Running]:
    """One for a test that ends it."""
    with started(home, eventually) as running:
        yield running


@pytest.fixture(scope="module")
def shared(eventually: Eventually) -> Iterator[Running]:
    """One for all tests that leave it running."""
    with new_home() as home, started(home, eventually) as running:
        yield running
