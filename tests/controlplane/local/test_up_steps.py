"""The steps of `up` one by one, without a product: what they claim, survive and tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.local.processes import Program
from controlplane.local.supervisor import ProgramFailed, Supervisor
from controlplane.local.up import Options, UpError, _greet, _only_one, _ports, _show_demo, locked
from tests.controlplane.local.conftest import as_nobody, by_root
from tests.ports import free_port, free_ports


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


def test_none_starts_in_a_home_that_is_being_cleared(home: Path) -> None:
    with locked(home), pytest.raises(UpError, match="starts or stops just now"):
        _only(home)
    _only(home)


@by_root
def test_whose_the_lock_is_is_said_to_another_user(home: Path) -> None:
    _only(home)
    with as_nobody(), pytest.raises(SystemExit, match="belongs to root: run this as that user"):
        _only(home)


def test_two_that_start_at_the_same_time_never_share_a_port(home: Path) -> None:
    port, other_port, shared = free_ports(3)
    one = Options(home=home, port=port, ingest_port=shared)
    other = Options(home=home, port=other_port, ingest_port=shared)
    with _ports(one), pytest.raises(UpError, match=f"Port {shared} .* INGEST_PORT="):
        _enter(other)
    _enter(other)


def test_pages_and_ingest_never_share_a_port(home: Path) -> None:
    port = free_port()
    with pytest.raises(UpError, match=f"Port {port} cannot be used"):
        _enter(Options(home=home, port=port, ingest_port=port))


def _only(home: Path) -> None:
    """Hold the home's lock, and give it back."""
    with _only_one(Options(home=home)):
        return


def _enter(options: Options) -> None:
    """Claim the ports, and give them back."""
    with _ports(options):
        return
