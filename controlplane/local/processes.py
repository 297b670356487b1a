"""The processes of one home: started, remembered, stopped, and found again after a crash.

Signals only what it can prove to be its own: by a process's identity, or by the mark in the
environment that everything started here inherits. Never by name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from controlplane.local import runfile

#: Set, to the home's path, for all that `up` starts and for whatever those start in turn.
MARK = "DRYDOCK_STARTED_FOR"

PLAIN_NAMES = frozenset(
    {"PATH", "PYTHONPATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ", "VIRTUAL_ENV"}
)

#: A log above this size is begun anew, in bytes; the old one is kept once.
MAX_LOG_BYTES = 20_000_000


@dataclass(frozen=True)
class Program:
    """What to run and how to end it."""

    name: str
    argv: tuple[str, ...]
    cwd: Path
    #: The whole environment: nothing of ours is inherited but the mark.
    env: Mapping[str, str] = field(default_factory=lambda: plain_environment())
    #: Another user to run as; None is ourselves.
    user: str | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    #: How long it may take to end before it is killed, in seconds.
    stop_s: float = 10.0
    #: Lower ones are stopped first, equal ones together.
    stop_order: int = 1
    #: Whether what it prints goes to its log, or to our own output.
    logged: bool = True


def plain_environment() -> dict[str, str]:
    """What any program needs of our environment, without addresses and secrets."""
    return {name: value for name, value in os.environ.items() if name in PLAIN_NAMES}


class Child:
    """One running program of a home, remembered on disk so that a later `up` can find it."""

    def __init__(self, home: Path, program: Program) -> None:
        self.program = program
        self.log = home / "logs" / f"{program.name}.log"
        self._record = home / "pids" / f"{program.name}.json"
        self._home = home
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start in a session of its own, so that a Ctrl-C in the terminal reaches only us.

        Raises OSError when the program cannot be started or remembered: then it does not run.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.bound_log()
        with ExitStack() as stack:
            log = stack.enter_context(self.log.open("ab")) if self.program.logged else None
            self._popen = subprocess.Popen(
                self.program.argv,
                cwd=self.program.cwd,
                env={**self.program.env, MARK: str(self._home)},
                user=self.program.user,
                group=self.program.user,
                extra_groups=[] if self.program.user else None,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._remember(self._popen.pid)
        except OSError:
            self.kill()
            raise

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen and self._popen.returncode is None else None

    def poll(self) -> int | None:
        """The exit status, or None while it runs or before it has been started."""
        return self._popen.poll() if self._popen else None

    def ask_to_stop(self) -> None:
        if self._popen and self._popen.poll() is None:
            self._popen.send_signal(self.program.stop_signal)

    def finish(self, deadline: float) -> bool:
        """Wait until `deadline` (monotonic), then kill its session. True if it ended by itself."""
        if self._popen is None:
            return True
        try:
            self._popen.wait(max(0.0, deadline - time.monotonic()))
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
            self.kill()
        self._record.unlink(missing_ok=True)
        return ended

    def kill(self) -> None:
        if self._popen and self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def stop(self) -> bool:
        """Ask, wait as long as the program may take, then kill. True if it ended by itself."""
        self.ask_to_stop()
        return self.finish(time.monotonic() + self.program.stop_s)

    def bound_log(self) -> None:
        """Begin a large log anew, also under a running program: it appends, wherever that is.

        Where there is no room for the old one, it is not kept.
        """
        if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            old = self.log.with_suffix(".log.1")
            try:
                shutil.copyfile(self.log, old)
            except OSError:  # a full disk: beginning anew is what makes room
                old.unlink(missing_ok=True)
            os.truncate(self.log, 0)

    def tail(self, lines: int = 12) -> str:
        """The end of its log, for a message that says why it did not come up."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _remember(self, pid: int) -> None:
        try:
            identity = runfile.identity(pid)
        except ProcessLookupError:
            return
        record: dict[str, object] = {
            **identity,
            "stop_signal": int(self.program.stop_signal),
            "stop_s": self.program.stop_s,
            "stop_order": self.program.stop_order,
        }
        runfile.write_private(self._record, json.dumps(record))


def sweep(home: Path) -> int:
    """Stop whatever a killed `up` of this home has left running; how many processes that were.

    Those with a record are asked the way and in the order they want; the rest get SIGTERM. What
    does not end in its time is killed.
    """
    remains = _recorded(home)
    strays = {process.pid for process in marked(home)}
    for order in sorted({remain.stop_order for remain in remains}):
        _stop_remains([remain for remain in remains if remain.stop_order == order])
    stop_marked(home)
    for record in (home / "pids").glob("*.json"):
        record.unlink(missing_ok=True)
    return len(strays | {remain.process.pid for remain in remains})


def stop_marked(home: Path) -> int:
    """Stop what was started for this home, whatever lies in its folder; how many that were."""
    strays = marked(home)
    _stop_remains([_Remain(process, signal.SIGTERM, 5.0, 0) for process in strays])
    return len(strays)


def marked(home: Path) -> list[psutil.Process]:
    """The living processes that were started for this home, but for this one and its parents."""
    ourselves = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in ourselves:
            continue
        try:
            if _lives(process) and process.environ().get(MARK) == str(home):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # gone meanwhile, or another user's, hence not ours
    return found


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to all of these processes, and wait up to 5 s until they are gone."""
    victims = list(processes)
    for process in victims:
        _signal(process, signal.SIGKILL)
    wait_gone(victims, 5)


def wait_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until these have ended, and return those that have not.

    A zombie has ended: its parent may be slow to notice, and is not always us.
    """
    deadline = time.monotonic() + seconds
    alive = [process for process in processes if _lives(process)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)  # nobody tells us of the end of another's children
        alive = [process for process in alive if _lives(process)]
    return alive


@dataclass(frozen=True)
class _Remain:
    process: psutil.Process
    stop_signal: signal.Signals
    stop_s: float
    stop_order: int


def _recorded(home: Path) -> list[_Remain]:
    found = []
    for path in sorted((home / "pids").glob("*.json")):
        record: dict[str, Any] = json.loads(path.read_text())
        if runfile.is_alive(record):
            found.append(
                _Remain(
                    psutil.Process(record["pid"]),
                    signal.Signals(record["stop_signal"]),
                    record["stop_s"],
                    record["stop_order"],
                )
            )
    return found


def _stop_remains(remains: list[_Remain]) -> None:
    for remain in remains:
        _signal(remain.process, remain.stop_signal)
    patience = max((remain.stop_s for remain in remains), default=0.0)
    kill_all(wait_gone([remain.process for remain in remains], patience))


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it ended by itself: that is what was wanted
