"""Real PostgreSQL and Redis for every test run, in a folder and on ports of its own.

Set DATABASE_URL and REDIS_URL to test against servers of your own instead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import django
import hypothesis
import psutil
import pytest
from django.conf import settings

from controlplane.local import processes, services
from tests.browser import browser
from tests.product import chromium, product

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("unhurried", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("unhurried")

__all__ = ["browser", "chromium", "product"]  # fixtures for every folder

T = TypeVar("T")
Eventually = Callable[..., T]

HOMES = Path(tempfile.gettempdir()) / f"drydock-tests-{os.getuid()}"
HOME = HOMES / str(os.getpid())
_children: list[processes.Child] = []


def pytest_configure() -> None:
    """Start the services before Django reads its settings, which it does after this hook."""
    _clear_after_killed_runs()
    HOME.mkdir(parents=True)
    os.environ["DRYDOCK_HOME"] = str(HOME)
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.local.settings"
    plan = services.plan(HOME, os.environ, print, durable=False)
    for program in plan.programs:
        child = processes.Child(HOME, program)
        child.start()
        _children.append(child)
    services.wait_ready(plan, _children)
    os.environ.update(plan.environment)
    django.setup()
    # Every one of Django's test clients makes the middleware anew, and WhiteNoise would look
    # through all static files each time; so it looks for a file when one is asked for.
    settings.WHITENOISE_AUTOREFRESH = True


def pytest_unconfigure() -> None:
    for child in reversed(_children):
        child.stop()
    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def eventually() -> Eventually[object]:
    """Waits until `predicate()` is true, and returns what it gave; fails after `timeout` s."""

    def wait(predicate: Callable[[], T], timeout: float = 120.0, message: str = "") -> T:
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while not (value := predicate()):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout} s: {message or predicate}")
            pause.wait(0.05)
        return value

    return wait


def _clear_after_killed_runs() -> None:
    for home in HOMES.glob("*"):
        if not psutil.pid_exists(int(home.name)):
            processes.sweep(home)
            shutil.rmtree(home, ignore_errors=True)
