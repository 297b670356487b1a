"""The steps of `up` one by one, without a product: what they claim, survive and tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.local.processes import Program
from controlplane.local.supervisor import ProgramFailed, Supervisor
from controlplane.local.up import Options, UpError, _greet, _ports, _show_demo
from tests.ports import free_port


class Refusing(Supervisor):
    """One under which every program that runs once fails."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, print)
        self.ran: list[str] = []

    def run(self, program: Program) -> None:
        self.ran.append(program.name)
        raise ProgramFailed(f"{program.name} failed (status 1)")


def test_a_demo_that_does_not_come_up_is_said_and_not_fatal(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    supervisor = Refusing(home)
    assert not _show_demo(Options(home=home), {}, supervisor)
    assert supervisor.ran == ["demo-admit", "demo-job"]
    told = capsys.readouterr().out
    assert "demo-admit failed (status 1)" in told
    assert "demo-job failed (status 1)" in told


def test_what_waits_for_everything_is_not_told_that_half_of_it_runs(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "admin-password").write_text("secret")
    _greet(Options(home=home, ready_file=home / "ready"), whole=False)
    assert not (home / "ready").exists()
    assert "secret" in capsys.readouterr().out


def test_two_that_start_at_the_same_time_never_share_a_port(home: Path) -> None:
    one = Options(home=home, port=free_port(), ingest_port=free_port())
    other = Options(home=home, port=free_port(), ingest_port=one.ingest_port)
    with _ports(one), pytest.raises(UpError, match=f"Port {one.ingest_port} .* INGEST_PORT="):
        _enter(other)
    _enter(other)


def test_pages_and_ingest_never_share_a_port(home: Path) -> None:
    port = free_port()
    with pytest.raises(UpError, match=f"Port {port} cannot be used"):
        _enter(Options(home=home, port=port, ingest_port=port))


def _enter(options: Options) -> None:
    """Claim the ports, and give them back."""
    with _ports(options):
        return
