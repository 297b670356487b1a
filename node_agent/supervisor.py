"""Keeps the processes of jobs: starts them, notices their end, adopts them after a restart.

Processes outlive the agent (an init system must not kill them with it: systemd's
`KillMode=process`). What runs is in a journal, by pid and start time, and nothing else is trusted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from node_agent import procfs, wire
from node_agent.config import Config
from node_agent.exits import ExitWatcher, tell_coordinator
from node_agent.files import Journal
from node_agent.launch import (
    Placement,
    coordinator_argv,
    coordinator_environment,
    cut_logs,
    notice_file,
    port_file,
    rank_environment,
    spawn,
)
from node_agent.log import log
from node_agent.threads import start_thread
from node_agent.watch import wait_for_file

#: A coordinator must have opened its port within this time.
COORDINATOR_START_S = 10.0
#: One that lived shorter than this died "repeatedly": its next start is delayed.
SETTLED_S = 10.0
MAX_RESTART_DELAY_S = 10.0
#: After SIGKILL the kernel needs a moment; a process in uninterruptible sleep may need for ever.
KILL_WAIT_S = 5.0
#: How often it is seen to that no log has grown too long.
LOGS_S = 5.0

#: emit(kind, key, data): keep an event, durably; the same `key` is the same event.
Emit = Callable[[wire.EventKind, str, dict[str, Any]], None]


class CannotStart(Exception):
    """A process could not be started, or did not come up."""


class CannotStop(Exception):
    """A process was killed, and is still there."""


class CardsInUse(Exception):
    """Something uses the cards, so they cannot be held."""


@dataclass
class Running:
    """A process under watch. `child` is None when it was adopted."""

    placement: Placement
    child: subprocess.Popen[bytes] | None
    pidfd: int = -1
    stopping: bool = False
    gone: threading.Event = field(default_factory=threading.Event)


class Supervisor:
    """All placements of this node. Safe for several threads."""

    def __init__(
        self, config: Config, boot_id: str, emit: Emit, changed: Callable[[], None]
    ) -> None:
        self._config = config
        self._boot_id = boot_id
        self._emit = emit
        self._changed = changed
        self._lock = threading.RLock()
        self._watcher = ExitWatcher()
        self._running: dict[str, Running] = {}
        self._restarts: dict[str, int] = {}  # placement of a coordinator -> deaths in a row
        self._cards_held = ""
        (config.state_dir / "ports").mkdir(parents=True, exist_ok=True)
        self._journal = Journal(config.state_dir / "placements.jsonl")

    def recover(self) -> None:
        """Adopt what still runs of this boot, report what does not, and begin to watch."""
        known = _fold(self._journal.load())
        try:
            self._journal.rewrite(_put(placement) for placement in known.values())
        except OSError as error:  # it is only longer than it needs to be
            log("placements_not_shortened", "error", error=str(error))
        for placement in known.values():
            if placement.boot_id != self._boot_id:
                self._report_exit(placement, None, reason="reboot")
                self._forget(placement)
            else:
                self._adopt(placement)
        start_thread("exits", self._watcher.run)
        start_thread("logs", self._keep_logs_short)

    def processes(self) -> list[wire.ProcessInfo]:
        # Without the lock: no beat waits for a start that takes long.
        return [_info(running.placement) for running in list(self._running.values())]

    def find(self, placement: str) -> Placement | None:
        """The running process of a placement."""
        with self._lock:
            running = self._running.get(placement)
            return running.placement if running is not None else None

    def hold_cards(self, why: str) -> None:
        """Keep ranks away until `release_cards`: none starts meanwhile. Raises CardsInUse.

        `why` goes on "the cards are".
        """
        with self._lock:
            ranks = [r.placement.placement for r in self._running.values() if _is_rank(r)]
            if ranks:
                raise CardsInUse(f"the rank {ranks[0]} runs on this node: stop it first")
            self.check_cards_free()
            self._cards_held = why

    def check_cards_free(self) -> None:
        """Raises CardsInUse if something has the cards to itself."""
        with self._lock:
            if self._cards_held:
                raise CardsInUse(f"the cards are {self._cards_held} already: wait for that")

    def release_cards(self) -> None:
        with self._lock:
            self._cards_held = ""

    def start_rank(self, action: wire.StartRank) -> Placement:
        """Start a rank; one that already runs is returned as it is. Raises CannotStart."""
        argv = self._config.argv(action.program)
        if action.together is not None and "--standalone" in argv:
            raise CannotStart(
                f"the program {action.program!r} has --standalone, and is to run on "
                f"{action.together.nodes} nodes: take it out of the agent's `programs`, for "
                "torchrun finds the other nodes by its environment"
            )
        environment = rank_environment(self._config, action)
        placement = Placement(
            kind="rank",
            job=action.job,
            placement=action.placement,
            token=action.token,
            boot_id=self._boot_id,
            replica=action.replica,
            rank=action.rank,
            coordinator=action.coordinator,
        )
        return self._start(placement, argv, environment)

    def start_coordinator(self, action: wire.StartCoordinator) -> Placement:
        """Start a coordinator; `coordinator_address` then waits for its port."""
        placement = Placement(
            kind="coordinator",
            job=action.job,
            placement=action.placement,
            token=action.token,
            boot_id=self._boot_id,
            port=action.port,
            min_replicas=action.min_replicas,
        )
        return self._start_coordinator(placement)

    def coordinator_address(self, placement: Placement) -> str:
        """The "host:port" of a started coordinator; its port is kept for a later restart.

        Raises CannotStart if it ends, or opens no port in time; it may then still run.
        """
        path = port_file(self._config, placement.placement)
        output = self._config.state_dir / "logs" / f"{placement.placement}.log"
        if not wait_for_file(
            path.parent, lambda: _port(path) > 0, COORDINATOR_START_S, placement.pid
        ):
            raise CannotStart(f"the coordinator opened no port; see {output}")
        with self._lock:
            running = self._running.get(placement.placement)
            if running is None or running.placement.pid != placement.pid:
                raise CannotStart(f"the coordinator ended at once; see {output}")
            up = msgspec.structs.replace(placement, port=_port(path), up=True)
            if running.placement != up and not running.stopping:
                running.placement = up
                self._record(_put(up))
        return f"{self._config.address}:{up.port}"

    def stop(self, placement: str, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL after the grace. True when nothing of it runs any more."""
        notice = notice_file(self._config, placement)
        with self._lock:
            self._restarts.pop(placement, None)
            running = self._running.get(placement)
            if running is None:
                # It may wait for its next start: the next agent is not to start it either.
                self._record({"gone": placement})
                return True
            running.stopping = True
            if running.placement.up:  # nor one whose stop we do not live to see through
                self._record(_put(msgspec.structs.replace(running.placement, up=False)))
            _write_notice(notice, grace_s)
            _signal(running, signal.SIGTERM)
        if not running.gone.wait(grace_s):
            self._kill(running)
        gone = running.gone.wait(KILL_WAIT_S)
        if gone:
            with contextlib.suppress(OSError):
                notice.unlink()
        return gone

    def _kill(self, running: Running) -> None:
        with self._lock:
            # Its pidfd is open for as long as it is in the table.
            if self._running.get(running.placement.placement) is running:
                _signal(running, signal.SIGKILL)

    def _start_coordinator(self, placement: Placement) -> Placement:
        with self._lock:
            if placement.placement not in self._running:
                # Made by the process that ran before: it would name a port nobody listens on.
                with contextlib.suppress(OSError):
                    port_file(self._config, placement.placement).unlink()
            # It makes its folder itself: a shared folder that hangs would hang all of the agent.
            argv = coordinator_argv(self._config, placement)
            return self._start(placement, argv, coordinator_environment(placement))

    def _start(
        self, placement: Placement, argv: list[str], environment: dict[str, str]
    ) -> Placement:
        with self._lock:
            already = self._running.get(placement.placement)
            if already is not None:
                return already.placement
            if self._cards_held and placement.kind == "rank":
                raise CannotStart(
                    f"the cards of this node are {self._cards_held}: start it afterwards"
                )
            try:
                # Written first: after a crash right here the process is still found as an orphan.
                self._journal.append([_put(placement)])
                child, at, ticks = spawn(
                    self._config, placement.placement, argv, environment, self._running
                )
            except OSError as error:
                if not placement.up:  # else it is tried again, by the next agent too
                    self._record({"gone": placement.placement})
                raise CannotStart(f"{argv[0]}: {error}") from error
            started = msgspec.structs.replace(
                placement, pid=child.pid, start_ticks=ticks, started_at=at
            )
            self._record(_put(started))
            self._watch(Running(started, child))
        log("started", placement=started.placement, kind=started.kind, pid=started.pid)
        self._changed()
        return started

    def _watch(self, running: Running) -> None:
        """Raises ProcessLookupError if it is gone already (a child never is: it waits for us)."""
        with self._lock:
            running.pidfd = self._watcher.watch(
                running.placement.pid, lambda: self._on_exit(running)
            )
            self._running[running.placement.placement] = running

    def _on_exit(self, running: Running) -> None:
        # Left-over members of its session would go on holding the GPU. While the child is not yet
        # reaped its pid, and so its group's, belongs to nobody else.
        _kill_group(running.placement.pid)
        code = running.child.wait() if running.child is not None else None
        with self._lock:
            placement = running.placement
            del self._running[placement.placement]
            restart = placement.up and not running.stopping
            if restart:
                self._count_death(placement)
        self._report_exit(placement, code, requested=running.stopping)
        if restart:
            self._restart_coordinator(placement)
        else:
            self._forget(placement)
        running.gone.set()

    def _report_exit(self, placement: Placement, code: int | None, **more: Any) -> None:
        """The coordinator first, for it is what training waits for; then the control plane."""
        if placement.kind == "rank" and "reason" not in more:
            start_thread(f"tell-{placement.placement}", lambda: _tell(placement, code))
        log("exited", placement=placement.placement, pid=placement.pid, code=code, **more)
        data = {
            "kind": placement.kind,
            "job": placement.job,
            "replica": placement.replica,
            "rank": placement.rank,
            "placement": placement.placement,
            "pid": placement.pid,
            "exit_code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            **more,
        }
        self._emit("process_exited", f"exit {_key(placement)}", data)
        self._changed()

    def _count_death(self, placement: Placement) -> None:
        settled = time.time() - placement.started_at > SETTLED_S
        deaths = 0 if settled else self._restarts.get(placement.placement, 0)
        self._restarts[placement.placement] = deaths + 1

    def _restart_coordinator(self, placement: Placement) -> None:
        """Start it again on its port: at once, or later if it keeps dying.

        Its journal entry stands meanwhile, so an agent restarted during the delay takes it up.
        """
        delay = restart_delay(self._restarts.get(placement.placement, 1))
        again = msgspec.structs.replace(placement, pid=0, start_ticks=0)

        def restart() -> None:
            threading.Event().wait(delay)
            self._restart_now(again)

        start_thread(f"restart-{placement.placement}", restart)

    def _restart_now(self, placement: Placement) -> None:
        with self._lock:
            if placement.placement not in self._restarts:  # stopped by a command meanwhile
                self._forget(placement)
                return
            try:
                started = self._start_coordinator(placement)
            except CannotStart as error:
                log("coordinator_not_started", "error", job=placement.job, error=str(error))
                self._restarts[placement.placement] += 1  # however long it had lived before
                self._restart_coordinator(placement)
                return
            running = self._running.get(started.placement)
        try:
            address = self.coordinator_address(started)
        except CannotStart as error:
            log("coordinator_not_back", "error", job=started.job, error=str(error))
            if running is not None:
                self._kill(running)  # its exit leads back here
            return
        data = {"job": started.job, "placement": started.placement, "address": address}
        self._emit("coordinator_restarted", f"coordinator {_key(started)}", data)

    def _adopt(self, placement: Placement) -> None:
        if placement.pid == 0:
            placement = self._find_orphan(placement)
        if placement.pid and procfs.is_alive(placement.pid, placement.start_ticks):
            try:
                self._watch(Running(placement, None))
            except ProcessLookupError:
                log("adoption_too_late", placement=placement.placement, pid=placement.pid)
            else:
                log("adopted", placement=placement.placement, pid=placement.pid)
                return
        if placement.pid:
            self._report_exit(placement, None)
        if placement.up:
            self._count_death(placement)
            self._restart_coordinator(placement)
        else:
            self._forget(placement)

    def _keep_logs_short(self) -> None:
        while True:
            time.sleep(LOGS_S)
            cut_logs(self._config.state_dir / "logs")

    def _find_orphan(self, placement: Placement) -> Placement:
        """The process of a start that was interrupted before its pid was written down."""
        for process in procfs.with_environment("DRYDOCK_PLACEMENT", placement.placement):
            if process.session == process.pid:
                found = msgspec.structs.replace(
                    placement,
                    pid=process.pid,
                    start_ticks=process.start_ticks,
                    started_at=time.time(),
                )
                self._record(_put(found))
                return found
        return placement

    def _forget(self, placement: Placement) -> None:
        with self._lock:
            if placement.placement not in self._running:
                self._record({"gone": placement.placement})

    def _record(self, entry: dict[str, Any]) -> None:
        """Note what has already happened. If the disk refuses, the world itself still tells: a
        restarted agent finds processes by their environment, and a repeated exit has the same id.
        """
        try:
            self._journal.append([entry])
        except OSError as error:
            log("placements_not_durable", "error", error=str(error))


def restart_delay(deaths: int) -> float:
    """Before a coordinator is started again that died so often in a row."""
    return 0.0 if deaths == 1 else min(MAX_RESTART_DELAY_S, 0.25 * 2 ** min(deaths, 10))


def _is_rank(running: Running) -> bool:
    return running.placement.kind == "rank"


def _tell(placement: Placement, code: int | None) -> None:
    if placement.coordinator and placement.replica is not None:
        tell_coordinator(
            placement.coordinator, placement.token, placement.replica, placement.placement, code
        )


def _write_notice(path: Path, grace_s: float) -> None:
    """In how many seconds SIGKILL follows; whoever cannot read it counts on its usual time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{grace_s:g}\n")
    except OSError as error:
        log("notice_not_written", path=str(path), error=str(error))


def _signal(running: Running, number: signal.Signals) -> None:
    """Signal the process; by pidfd, so never a stranger that took over its number."""
    try:
        signal.pidfd_send_signal(running.pidfd, number)
    except ProcessLookupError as error:
        log("signal_too_late", placement=running.placement.placement, error=str(error))


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _fold(entries: list[dict[str, Any]]) -> dict[str, Placement]:
    known: dict[str, Placement] = {}
    for entry in entries:
        if "put" in entry:
            placement = msgspec.convert(entry["put"], Placement)
            known[placement.placement] = placement
        else:
            known.pop(entry.get("gone", ""), None)
    return known


def _put(placement: Placement) -> dict[str, Any]:
    return {"put": msgspec.to_builtins(placement)}


def _key(placement: Placement) -> str:
    """Names one process for ever."""
    return f"{placement.placement} {placement.pid} {placement.start_ticks}"


def _info(placement: Placement) -> wire.ProcessInfo:
    return wire.ProcessInfo(
        kind="rank" if placement.kind == "rank" else "coordinator",
        job=placement.job,
        placement=placement.placement,
        pid=placement.pid,
        started_at=placement.started_at,
        replica=placement.replica,
        rank=placement.rank,
    )


def _port(path: Path) -> int:
    """What a port file says ("PORT" or "HOST:PORT"), 0 while it says nothing whole."""
    try:
        text = path.read_text().strip().rpartition(":")[2]
    except FileNotFoundError:
        return 0
    return int(text) if text.isdigit() else 0
