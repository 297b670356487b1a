"""A simulated machine: its power, its cards, and every process that runs on it.

Power off is SIGKILL for all of them, power on is a new boot id and a new agent. Standard library
only: the chassis, its only user, must stay small.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node_agent import cards, faults, procfs
from node_agent.files import write_atomically
from node_agent.log import log

#: Everything this chassis starts carries it, so that a later life finds what was left behind.
ENV_CHASSIS_DIR = "DRYDOCK_CHASSIS_DIR"
#: What every process of a rank carries, and none of those that only keep what it saves.
ENV_RANK = "DRYDOCK_RANK"
FIRST_RESTART_S, LAST_RESTART_S = 1.0, 30.0
#: An agent that ran this long is no longer counted as failing at its start.
SETTLED_S = 10.0
MAX_LOG_BYTES = 4 * 2**20

MODEL = "NVIDIA H100 80GB HBM3"
MEMORY_BYTES = 85_520_809_984
#: Where the eight cards of a DGX H100 sit.
BUSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")


class Machine:
    """One node's power and cards. All methods may be called from several threads."""

    def __init__(self, folder: Path, name: str, agent_config: Path) -> None:
        self.name = name
        self._folder = folder
        self._agent_config = agent_config
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._on = False
        self._agent_pid = 0
        self._boot_id = ""
        self._booted_at = 0.0
        self._frozen = False
        #: Processes that a lost card left stuck, by pid and start time: nothing thaws them.
        self._stuck: set[tuple[int, int]] = set()
        self._agent_started_at = 0.0
        self._restart_delay = FIRST_RESTART_S
        self._restart: threading.Timer | None = None
        if not (folder / "hardware.json").exists():
            self.fit_cards()

    # --- what the BMC offers

    def describe(self) -> dict[str, Any]:
        """Return the system's Redfish properties: name, power state, boot id and process ids.

        The pids are those of all running descendants of the chassis, in ascending order.
        """
        with self._lock:
            pids = [process.pid for process in procfs.descendants(os.getpid())]
            drydock = {"BootId": self._boot_id, "Processes": sorted(pids)}
            return {
                "Id": "1",
                "Name": self.name,
                "PowerState": "On" if self._on else "Off",
                "Oem": {"Drydock": drydock},
            }

    def reset(self, kind: str) -> None:
        """`On`, `ForceOff` or `ForceRestart`; without effect where the state is that already."""
        with self._lock:
            log("reset", kind=kind, power=self._on)
            if kind in {"ForceOff", "ForceRestart"}:
                self.power_off()
            if kind in {"On", "ForceRestart"}:
                self.power_on()

    def power_on(self) -> None:
        """Boot the node: new boot id, empty kernel log, cards as after a boot, started agent.

        There is no effect if the node is on. Raises OSError or ValueError if the cards' file cannot
        be read or written; the node is then still off.
        """
        with self._lock:
            if self._on:
                return
            self._boot_id = _uuid()
            write_atomically(self._folder / "boot_id", self._boot_id.encode())
            self._booted_at = time.monotonic()
            self._frozen = False
            self._stuck.clear()
            (self._folder / "kernel.log").write_bytes(b"")
            fitted = cards.edit(self._folder, lambda old: [faults.after_boot(c) for c in old])
            self._on = True
            self._say([line for card in fitted for line in faults.boot_lines(card)])
            self._restart_delay = FIRST_RESTART_S
            self._record()
            self._start_agent()

    def power_off(self) -> None:
        """Kill every process of the node; none is left when this returns."""
        with self._lock:
            self._on = False
            self._agent_pid = 0
            if self._restart is not None:
                self._restart.cancel()
            self._record()
            _kill_all(lambda: procfs.descendants(os.getpid()))

    def shut_down(self, grace_s: float) -> None:
        """Let the ranks leave by themselves (they save a checkpoint), then cut the power."""
        with self._lock:
            self._on = False  # an agent that ends is not started again
            agent, self._agent_pid = self._agent_pid, 0
        # The agent first: it would start a coordinator again.
        _end_politely(lambda: [p for p in procfs.descendants(os.getpid()) if p.pid == agent], 5.0)
        _end_politely(lambda: procfs.descendants(os.getpid()), grace_s)
        self.power_off()

    def fit_cards(self) -> list[dict[str, Any]]:
        """Replace all cards by new ones; serial numbers of one delivery follow each other."""
        first = 1_320_000_000_000 + int.from_bytes(os.urandom(5)) % 700_000_000_000
        new: cards.Cards = [
            {
                "index": index,
                "uuid": f"GPU-{_uuid()}",
                "serial": str(first + index),
                "model": MODEL,
                "pci_address": f"00000000:{bus.upper()}:00.0",
                "memory_bytes": MEMORY_BYTES,
            }
            for index, bus in enumerate(BUSES)
        ]
        cards.edit(self._folder, lambda _: new)
        log("cards_fitted", first_serial=first)
        return new

    def kernel_line(self, line: str) -> bool:
        """Append to the kernel's log. False if the node is off: it has no kernel then."""
        with self._lock:
            if self._on:
                self._write_log([line])
            return self._on

    def break_card(self, name: str, index: int) -> dict[str, Any] | None:
        """Let a card have one of `faults.FAULTS`. None if the node is off.

        Returns the kernel's line, the card's `uuid` and `serial`, and the `pids` of the ranks that
        it hit. Raises NoSuchCard.
        """
        fault = faults.FAULTS[name]
        with self._lock:
            if not self._on:
                return None
            ranks = self._ranks()
            pids = [process.pid for process in ranks if process.pid == process.session]
            card = self._mark(fault, index)
            said = self._say(fault.kernel_lines(card, pids[0] if pids else None))
            if fault.signal == signal.SIGSTOP:
                self._stuck |= {(p.pid, p.start_ticks) for p in _stop_all(self._ranks)}
            elif fault.signal is not None:
                for process in ranks:
                    _signal(process.pid, fault.signal)
            if fault.leads_to:
                self._break_later(fault, card)
            log("card_broken", fault=name, uuid=card["uuid"], pids=pids)
            named = {"uuid": card["uuid"], "serial": card["serial"]}
            return {"line": said[fault.main] if said else "", **named, "pids": pids}

    def _break_later(self, fault: faults.Fault, card: dict[str, Any]) -> None:
        """Let the fault that this one leads to come, unless the card was reset or replaced."""

        def come() -> None:
            with self._lock:
                fitted = cards.edit(self._folder, lambda now: now)
                same = [c for c in fitted if c["uuid"] == card["uuid"]]
                if same and same[0].get("drifts_since") == card["drifts_since"]:
                    self.break_card(fault.leads_to, card["index"])

        timer = threading.Timer(fault.after_s, come)
        timer.daemon = True
        timer.start()

    def freeze(self, what: str, frozen: bool) -> bool:
        """Stop (or let go on) the `agent`, or `all` processes of the node. False if it is off.

        A frozen agent is not started again if it dies; a process stuck on a lost card stays so.
        """
        with self._lock:
            if not self._on:
                return False
            log("freeze", what=what, frozen=frozen)
            self._frozen = frozen
            if frozen:
                with cards.locked(self._folder):  # never stop one that keeps the others from them
                    _stop_all(lambda: self._processes(what))
                return True
            for process in self._processes(what):
                if (process.pid, process.start_ticks) not in self._stuck:
                    _signal(process.pid, signal.SIGCONT)
            self._start_agent()
            return True

    def _processes(self, what: str) -> list[procfs.Process]:
        everything = procfs.descendants(os.getpid())
        return [p for p in everything if what == "all" or p.pid == self._agent_pid]

    def _ranks(self) -> list[procfs.Process]:
        everything = procfs.descendants(os.getpid())
        return [process for process in everything if procfs.has_variable(process.pid, ENV_RANK)]

    def _mark(self, fault: faults.Fault, index: int) -> dict[str, Any]:
        def change(fitted: cards.Cards) -> cards.Cards:
            if not any(card["index"] == index for card in fitted):
                raise faults.NoSuchCard(f"card {index}: {len(fitted)} cards are fitted")
            return [fault.mark(card) if card["index"] == index else card for card in fitted]

        after = cards.edit(self._folder, change)
        return next(card for card in after if card["index"] == index)

    def _say(self, lines: list[str]) -> list[str]:
        """Write to the kernel's log as the kernel does, with its clock: the lines as written."""
        uptime = time.monotonic() - self._booted_at
        stamped = [f"[{uptime:12.6f}] {line}" for line in lines]
        self._write_log(stamped)
        return stamped

    def _write_log(self, lines: list[str]) -> None:
        with (self._folder / "kernel.log").open("a") as file:
            file.write("".join(line + "\n" for line in lines))

    # --- the agent, as an init system keeps it

    def reap(self) -> None:
        """Collect the dead for ever, ours and adopted ones; start an agent that died again."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                with self._changed:
                    self._changed.wait_for(lambda: self._agent_pid != 0)
                continue
            with self._lock:
                if pid == self._agent_pid and self._on:
                    self._agent_ended(os.waitstatus_to_exitcode(status))

    def _agent_ended(self, code: int) -> None:
        if time.monotonic() - self._agent_started_at > SETTLED_S:
            self._restart_delay = FIRST_RESTART_S
        delay, self._restart_delay = (
            self._restart_delay,
            min(LAST_RESTART_S, self._restart_delay * 2),
        )
        log("agent_ended", "warning", code=code, restart_s=delay)
        self._agent_pid = 0
        self._restart = threading.Timer(delay, self._start_agent)
        self._restart.daemon = True
        self._restart.start()

    def _start_agent(self) -> None:
        with self._lock:
            if not self._on or self._agent_pid or self._frozen:
                return
            argv = [sys.executable, "-m", "node_agent", "--config", str(self._agent_config)]
            output = os.open(self._agent_log(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                self._agent_pid = os.posix_spawn(
                    sys.executable,
                    argv,
                    self._environment(),
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, output, 1),
                        (os.POSIX_SPAWN_DUP2, output, 2),
                    ],
                    setsid=True,
                    setsigmask=[],
                )
            finally:
                os.close(output)
            self._agent_started_at = time.monotonic()
            log("agent_started", pid=self._agent_pid, boot_id=self._boot_id)
            self._changed.notify_all()

    def _environment(self) -> dict[str, str]:
        package_root = str(Path(__file__).resolve().parent.parent)
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            ENV_CHASSIS_DIR: str(self._folder),
        }

    def _agent_log(self) -> Path:
        # In a folder of its own: the agent watches the one above.
        path = self._folder / "logs" / "agent.log"
        path.parent.mkdir(exist_ok=True)
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return path

    def _record(self) -> None:
        """Who owns this folder: see `sweep`."""
        own = procfs.read(os.getpid())
        record = {
            "pid": os.getpid(),
            "start_ticks": own.start_ticks if own is not None else 0,
            "power": "On" if self._on else "Off",
        }
        write_atomically(self._folder / "chassis.json", json.dumps(record).encode())


def sweep(folder: Path) -> int:
    """Kill what an earlier life of this folder left behind, its chassis first. Returns how many.

    A process that emptied its own environment is not found.
    """
    record = _read_record(folder / "chassis.json")
    killed = 0
    if record is not None and procfs.is_alive(record["pid"], record["start_ticks"]):
        _signal(record["pid"], signal.SIGKILL)
        killed += 1

    def left() -> list[procfs.Process]:
        found = procfs.with_environment(ENV_CHASSIS_DIR, str(folder))
        return [process for process in found if process.pid != os.getpid()]

    killed += _kill_all(left)
    if killed:
        log("swept", folder=folder, killed=killed)
    return killed


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return record


Find = Callable[[], list[procfs.Process]]


def _kill_all(find: Find) -> int:
    """SIGKILL everything that `find` finds until it finds nothing. Returns how many there were.

    All are stopped first, so that none escapes by forking while another is being killed.
    """
    killed: set[tuple[int, int]] = set()
    while found := _stop_all(find):
        for process in found:
            _signal(process.pid, signal.SIGKILL)
            killed.add((process.pid, process.start_ticks))
        _wait_for_one(found, 1.0)
    return len(killed)


def _stop_all(find: Find) -> list[procfs.Process]:
    """SIGSTOP everything that `find` finds, until it finds nothing new. Returns all of them."""
    found = find()
    stopped: set[int] = set()
    while new := [process for process in found if process.pid not in stopped]:
        for process in new:
            _signal(process.pid, signal.SIGSTOP)
            stopped.add(process.pid)
        found = find()
    return found


def _end_politely(find: Find, grace_s: float) -> None:
    """SIGTERM every leader of a session that `find` finds, and wait until all are gone.

    One that is stopped cannot leave by itself: it is passed over.
    """
    deadline = time.monotonic() + grace_s

    def able() -> list[procfs.Process]:
        return [process for process in find() if process.state != "T"]

    for process in able():
        if process.pid == process.session:
            _signal(process.pid, signal.SIGTERM)
    while (found := able()) and (left := deadline - time.monotonic()) > 0:
        _wait_for_one(found, left)


def _wait_for_one(processes: list[procfs.Process], timeout_s: float) -> None:
    """Sleep until one of them has ended, or time is up."""
    fds = []
    try:
        for process in processes:
            fds.append(os.pidfd_open(process.pid))
        select.select(fds, [], [], timeout_s)
    except ProcessLookupError:
        return
    finally:
        for fd in fds:
            os.close(fd)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _uuid() -> str:
    return Path("/proc/sys/kernel/random/uuid").read_text().strip()
