"""`manage.py up`, `down` and `reset` with real processes: what they refuse, keep and clear."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import psutil
import pytest

from controlplane.local import processes
from controlplane.local.up import MARKER, MIN_FREE_BYTES, Options, UpError, _check_machine
from tests.controlplane.local.conftest import Eventually, Product, Running

pytestmark = pytest.mark.e2e


def pid_of(home: Path, name: str) -> int:
    return int(json.loads((home / "pids" / f"{name}.json").read_text())["pid"])


def test_a_running_product_serves_pages_and_commands_beside_it(shared: Running) -> None:
    product, _ = shared
    with urllib.request.urlopen(product.url, timeout=60) as page:  # noqa: S310 - our own loopback
        assert page.status == 200
    told = product.run(
        "shell", "-v0", "-c", "from django.conf import settings as s; print(s.PUBLIC_URL)"
    )
    assert told.stdout.strip() == product.url


def test_a_second_up_is_refused_and_told_the_address(shared: Running) -> None:
    product, _ = shared
    second = product.run("up")
    assert second.returncode == 1
    assert product.url in second.stderr
    assert "make down" in second.stderr


def test_a_program_that_dies_is_started_again(shared: Running, eventually: Eventually) -> None:
    product, _ = shared
    victim = pid_of(product.home, "keeper")
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: pid_of(product.home, "keeper") != victim, 120, "a new keeper")

    successor = psutil.Process(pid_of(product.home, "keeper"))
    assert "keeper" in successor.cmdline()
    assert not psutil.pid_exists(victim)


def test_sigterm_stops_everything(running: Running) -> None:
    product, process = running
    process.terminate()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "no processes left" in output
    assert processes.marked(product.home) == []
    assert not (product.home / "run.json").exists()


def test_a_closed_terminal_stops_everything(running: Running) -> None:
    product, process = running
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(200) == 0
    assert processes.marked(product.home) == []


def test_down_stops_a_running_product(running: Running) -> None:
    product, process = running
    told = product.run("down")
    assert told.returncode == 0, told.stdout
    assert process.wait(200) == 0


def test_down_and_reset_clear_what_a_killed_up_has_left(running: Running) -> None:
    product, process = running
    process.kill()
    process.wait(200)
    assert processes.marked(product.home) != []
    told = product.run("down")
    assert "a killed run had left" in told.stdout
    assert processes.sweep(product.home) == 0
    assert product.run("reset", "--yes").returncode == 0
    assert [*product.home.iterdir()] == [product.ready]  # which is not of a home


def test_the_next_up_recovers_from_a_killed_one(running: Running, eventually: Eventually) -> None:
    product, process = running
    process.kill()
    process.communicate(timeout=200)
    product.ready.unlink()
    again = product.up()
    eventually(lambda: product.ready.exists() or again.poll() is not None, 300, "it is ready again")
    again.terminate()
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0, output
    assert "a killed run had left" in output


def test_a_taken_port_is_named_with_a_remedy(product: Product) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = product.run("up", "--port", str(port))
    assert told.returncode == 1
    assert f"Port {port} cannot be used" in told.stderr
    assert f"make up PORT={port + 100}" in told.stderr
    assert [path.name for path in product.home.iterdir()] == ["up.lock"]  # it became no home


def test_too_few_nodes_are_refused(product: Product) -> None:
    told = product.run("up", "--nodes", "3")
    assert told.returncode == 1
    assert "6 to 64 nodes" in told.stderr


def test_reset_asks_first(product: Product) -> None:
    marker = product.home / MARKER
    marker.touch()
    told = subprocess.run(
        product.argv("reset"),
        env=product.environment(),
        input="no\n",
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert told.returncode == 1
    assert marker.exists()


def test_a_command_leaves_nothing_where_drydock_has_not_run(product: Product) -> None:
    told = product.run("reset", "--yes")
    assert "Drydock has not run" in told.stdout
    assert [*product.home.iterdir()] == []


def test_a_full_disk_is_named_with_a_remedy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.local.up.MIN_FREE_BYTES", MIN_FREE_BYTES * 10**9)
    with pytest.raises(UpError, match="DRYDOCK_HOME=/path"):
        _check_machine(Options(home=home))
