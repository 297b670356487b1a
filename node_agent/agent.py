"""The agent put together: beats, reports, events, commands, each on its own thread and connection.

Decides nothing: it tells what it sees and does what it is told by a signed command.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from node_agent import __version__, field_diagnostic, wire
from node_agent.collectors import Hardware, HardwareUnknown, ResetFailed, kmsg, reset_marks
from node_agent.collectors.repeats import Told
from node_agent.commands import Commands
from node_agent.config import Config, ConfigError, load_config
from node_agent.diagnostics import diagnose
from node_agent.files import TakenByAnother, take_alone, write_atomically
from node_agent.hardware import open_hardware
from node_agent.identity import Identity, identify
from node_agent.link import Backoff, Link, Refused, Unreachable
from node_agent.log import log, set_level
from node_agent.sender import EVENTS_AT_ONCE, Sender, events_body, result_body
from node_agent.spool import Spool
from node_agent.supervisor import Supervisor
from node_agent.threads import Wake, start_thread

LOCK_FILE = "agent.lock"
POLL_WAIT_S = 20.0
REPEATED_PAUSE_S = 0.5
#: A beat that got no answer by then is given up: the next one is worth more.
BEAT_TIMEOUT_S = 5.0
FAILED_BEAT_RETRY_S = 1.0
#: A report that did not arrive is sent again after so long: first, and at most.
FIRST_REPORT_RETRY_S, LAST_REPORT_RETRY_S = 1.0, 10.0
#: Beats never come faster or more slowly, whatever the answers say.
LEAST_BEAT_S, MOST_BEAT_S = 0.1, 60.0
#: The driver lists its cards for the first time within this time.
FIRST_LIST_S = 60.0
#: A card that does not answer is told of again after so long; one that has answered for so long
#: is silent no more.
STILL_SILENT_S, ANSWERS_AGAIN_S = 5.0, 10.0


@dataclass
class _Silence:
    """A card that does not answer."""

    at: float  # when that began, as a Unix time
    began: float  # and by a clock that nobody sets
    count: int = 0  # how often it was told, and when last
    told: float = 0.0
    answered: float | None = None  # since when it answers, until that has lasted


class Agent:
    """One agent. `run` returns after `stop`; ranks stay. Raises ConfigError when it is made."""

    def __init__(self, config_path: Path) -> None:
        self._config_path = config_path
        self._config = config = load_config(config_path)
        set_level(config.log_level)
        config.state_dir.mkdir(parents=True, exist_ok=True)
        self._lock = _only_one(config_path, config)
        self._boot_id = config.boot_id_path.read_text().strip()
        self._wake = Wake()
        self._stopped = threading.Event()
        self._cards_were_reset = threading.Event()
        self._stopping = False
        self._events = Spool(config.state_dir / "events.jsonl")
        self._results = Spool(config.state_dir / "results.jsonl")
        self._supervisor = Supervisor(config, self._boot_id, self._emit, self._wake.ring)
        self._hardware: Hardware = open_hardware(config, self._busy)
        self._silences: dict[str, _Silence] = {}  # by the card
        self._reported = ""

    def stop(self) -> None:
        """Ask `run` to return. Safe in a signal handler."""
        self._stopping = True
        self._wake.ring()

    def run(self) -> None:
        """Enrol if needed, then work until stopped. Raises CannotEnrol."""
        self._first_word()
        field_diagnostic.end_left_over(self._config)
        identity = identify(self._config, self._boot_id, __version__, self._inventory, self._pause)
        if identity is None:
            return
        log("agent_started", node_id=identity.node_id, boot_id=self._boot_id)
        self._supervisor.recover()
        commands = Commands(
            self._config,
            identity,
            self._supervisor,
            self._diagnose,
            self._reset_cards,
            self._field_diagnose,
            self._results,
        )
        commands.recover()
        self._start_senders(identity)
        start_thread("kernel-log", self._follow_kernel_log)
        start_thread("commands", lambda: self._poll(identity, commands))
        try:
            self._beat(identity)
        finally:
            self._stopped.set()
            self._hardware.close()
            log("agent_stopped", processes=len(self._supervisor.processes()))

    def _first_word(self) -> None:
        """The `boot` event, before anything else of this boot."""
        path = self._config.state_dir / "boot_id"
        if path.exists() and path.read_text() == self._boot_id:
            return
        self._emit("boot", "boot", {})
        try:
            write_atomically(path, self._boot_id.encode())
        except OSError as error:  # told again at the next start, it counts once
            log("boot_not_noted", "error", error=str(error))

    def _start_senders(self, identity: Identity) -> None:
        events = Sender(
            self._events,
            identity.link(self._config),
            "/v1/events",
            events_body,
            EVENTS_AT_ONCE,
            self._stopped.wait,
        )
        results = Sender(
            self._results,
            identity.link(self._config),
            "/v1/commands/result",
            result_body,
            1,
            self._stopped.wait,
        )
        start_thread("events", events.run)
        start_thread("results", results.run)

    # --- beats and reports, on the main thread

    def _beat(self, identity: Identity) -> None:
        link = identity.link(self._config)
        interval = identity.beat_interval_s
        retry = Backoff(FIRST_REPORT_RETRY_S, LAST_REPORT_RETRY_S)
        next_at = report_at = 0.0
        change_fd = self._hardware.change_fd()
        also = () if change_fd is None else (change_fd,)
        while not self._stopping:
            # Once a turn: what changes after that rings.
            readings = self._hardware.readings()
            self._notice_unreadable(readings.unreadable)
            now = time.monotonic()
            if now >= report_at:
                if self._report_if_changed(link):
                    retry.reset()
                else:
                    report_at = now + retry.next()
            if now >= next_at:
                reported = self._reported
                interval = self._send_beat(link, interval, readings.values)
                # Up to a tenth early, never late: a fleet must not beat in step.
                in_s = min(max(interval, LEAST_BEAT_S), MOST_BEAT_S)
                next_at = now + in_s * random.uniform(0.9, 1.0)  # noqa: S311 - spreads load
                if reported and not self._reported:  # it is wanted again
                    continue
            wake_at = min(next_at, report_at) if report_at > now else next_at
            self._wake.wait(wake_at - time.monotonic(), also)

    def _send_beat(self, link: Link, interval: float, readings: list[wire.GpuReading]) -> float:
        """One beat. Returns the time to the next one in seconds."""
        beat = wire.Beat(
            boot_id=self._boot_id,
            # Rises over the agent's own restarts too.
            seq=time.monotonic_ns() // 1_000_000,
            at=time.time(),
            report_digest=self._reported,
            readings=readings,
            ports=self._hardware.ports(),
        )
        body = msgspec.json.encode(beat)
        try:
            answer = link.post("/v1/beat", body, wire.BeatAnswer, BEAT_TIMEOUT_S)
        except (Unreachable, Refused) as error:
            log("beat_failed", "warning", error=str(error))
            return min(interval, FAILED_BEAT_RETRY_S)
        if answer.want_report:
            self._reported = ""
        return answer.next_in_s

    def _report_if_changed(self, link: Link) -> bool:
        """Send the full report unless the last one still holds. False: it did not arrive."""
        inventory = self._inventory()
        if inventory is None:  # `change_fd` rings once it is known
            return True
        processes = sorted(self._supervisor.processes(), key=lambda process: process.placement)
        has_diagnostic = bool(self._config.field_diagnostic)
        said = (inventory, processes, self._config.switch, has_diagnostic)
        digest = hashlib.sha256(msgspec.json.encode(said)).hexdigest()
        if digest == self._reported:
            return True
        report = wire.Report(
            boot_id=self._boot_id,
            at=time.time(),
            digest=digest,
            agent_version=__version__,
            inventory=inventory,
            switch=self._config.switch,
            field_diagnostic=has_diagnostic,
            processes=processes,
        )
        try:
            link.post("/v1/report", msgspec.json.encode(report), wire.Accepted)
        except (Unreachable, Refused) as error:
            log("report_failed", "warning", error=str(error))
            return False
        log("reported", gpus=len(inventory.gpus), processes=len(processes))
        self._reported = digest
        return True

    def _notice_unreadable(self, unreadable: dict[str, str]) -> None:
        """One event for each card that stops answering, at once; told again, as its repeats, for
        as long as it does not answer. One that answers for moments is silent still."""
        now = time.monotonic()
        for uuid in self._silences.keys() - unreadable.keys():
            silence = self._silences[uuid]
            silence.answered = silence.answered or now
        for uuid, reason in unreadable.items():
            known = self._silences.get(uuid)
            if known is None or (known.answered and now - known.answered > ANSWERS_AGAIN_S):
                known = self._silences[uuid] = _Silence(time.time(), now)
            known.answered = None
            if known.count == 0 or now - known.told >= STILL_SILENT_S:
                known.count, known.told = known.count + 1, now
                self._tell_silence(uuid, known, reason)

    def _tell_silence(self, uuid: str, silence: _Silence, reason: str) -> None:
        data: dict[str, Any] = {"reason": reason}
        if silence.count > 1:
            last_at = silence.at + silence.told - silence.began
            data |= {"count": silence.count, "last_at": last_at}
        key = f"unreadable {uuid} {silence.at}"
        self._emit("gpu_unreadable", key, data, source="hardware", gpu_uuid=uuid, at=silence.at)

    # --- events

    def _emit(self, kind: wire.EventKind, key: str, data: dict[str, Any], **fields: Any) -> None:
        self._events.put([self._event(kind, key, data, **fields)])

    def _event(
        self,
        kind: wire.EventKind,
        key: str,
        data: dict[str, Any],
        source: str = "agent",
        gpu_uuid: str = "",
        raw: str = "",
        at: float | None = None,
    ) -> dict[str, Any]:
        """The id follows from what happened (`key`, in this boot): told twice, it counts once."""
        digest = hashlib.sha256(f"{self._config.name} {self._boot_id} {key}".encode())
        event = wire.Event(
            id=f"ev_{digest.hexdigest()[:32]}",
            kind=kind,
            at=time.time() if at is None else at,
            boot_id=self._boot_id,
            source=source,
            gpu_uuid=gpu_uuid,
            raw=raw,
            data=data,
        )
        encoded: dict[str, Any] = msgspec.to_builtins(event)
        return encoded

    def _follow_kernel_log(self) -> None:
        def deliver(lines: list[Told]) -> None:
            # The kernel's log is itself a buffer: where the spool is full, leave the rest there.
            self._events.wait_for_room()
            self._events.put(
                self._event(
                    "kernel_line",
                    f"kernel {one.key}",
                    {} if one.count == 1 else {"count": one.count, "last_at": one.last_at},
                    source="kmsg",
                    raw=one.line,
                    at=one.first_at,
                )
                for one in lines
            )

        cursor = self._config.state_dir / kmsg.CURSOR_FILE
        path = self._config.kernel_log_path
        kmsg.follow(path, cursor, self._boot_id, deliver, self._cards_were_reset)

    # --- commands

    def _poll(self, identity: Identity, commands: Commands) -> None:
        link = identity.link(self._config)
        backoff = Backoff(0.2, 5.0)
        body = msgspec.json.encode(wire.CommandPoll(boot_id=self._boot_id, wait_s=POLL_WAIT_S))
        while not self._stopping:
            try:
                answer = link.post("/v1/commands/poll", body, wire.Commands, POLL_WAIT_S + 10)
            except (Unreachable, Refused) as error:
                log("poll_failed", "warning", error=str(error))
                self._stopped.wait(backoff.next())
                continue
            backoff.reset()
            new = [commands.handle(signed) for signed in answer.commands]
            if new and not any(new):
                # Offered once more, before their results arrived or since they get none: do not ask
                # in a tight loop.
                self._stopped.wait(REPEATED_PAUSE_S)

    def _diagnose(self, level: int) -> dict[str, Any]:
        return diagnose(self._config_path, level)

    def _reset_cards(self, uuids: list[str]) -> dict[str, Any]:
        """Raises ResetFailed or HardwareUnknown."""
        fitted = {gpu.uuid: gpu.pci_address for gpu in self._hardware.inventory().gpus}
        reset = self._hardware.reset(uuids)
        log("cards_reset", uuids=reset)
        self._note_reset([] if fitted.keys() <= set(reset) else [fitted[uuid] for uuid in reset])
        return {"reset": reset}

    def _note_reset(self, pcis: list[str]) -> None:
        self._cards_were_reset.set()
        try:
            reset_marks.note(self._config, self._boot_id, pcis)
        except OSError as error:
            raise ResetFailed(
                f"the cards were reset, but that could not be noted ({error}), so older lines of"
                " the kernel's log still speak against them: see that the agent can read that log"
                " and write its state folder, then reset them again"
            ) from error

    def _field_diagnose(self, uuid: str, limit_s: float) -> dict[str, Any]:
        """Raises NoVerdict or HardwareUnknown; ResetFailed if a pass could not be noted."""
        card = next((gpu for gpu in self._fitted() if gpu.uuid == uuid), None)
        if card is None:  # one that is listed and does not answer is the tool's to judge
            return {"uuid": uuid, "outcome": "absent"}
        with self._hardware.let_go():
            found = field_diagnostic.examine(self._config, card, limit_s)
        if found["outcome"] == "passed":
            # It takes the card from the driver and resets it: what was said before is answered.
            self._note_reset([card.pci_address])
        return found

    def _fitted(self) -> list[wire.GpuInfo]:
        """The cards that are listed, which after a boot takes a while. Raises HardwareUnknown."""
        deadline = time.monotonic() + FIRST_LIST_S
        while True:
            try:
                return self._hardware.inventory().gpus
            except HardwareUnknown:
                if time.monotonic() > deadline or self._stopped.wait(0.5):
                    raise

    def _busy(self) -> bool:
        return any(process.kind == "rank" for process in self._supervisor.processes())

    def _inventory(self) -> wire.Inventory | None:
        try:
            return self._hardware.inventory()
        except HardwareUnknown as error:
            log("hardware_unknown", "error", error=str(error))
            return None

    def _pause(self, seconds: float) -> bool:
        """Wait, before the threads run; true when the agent shall stop."""
        deadline = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < deadline:
            self._wake.wait(deadline - time.monotonic())
        return self._stopping


def _only_one(config_path: Path, config: Config) -> int:
    """Hold the state folder for as long as this process lives. Raises ConfigError.

    Its journals say which orders were executed already: two agents that each rewrite them would
    lose each other's lines, and execute an order twice.
    """
    try:
        return take_alone(config.state_dir / LOCK_FILE)
    except TakenByAnother as error:
        raise ConfigError(
            f"{config_path}: another agent (pid {error}) works in `state_dir`"
            f" {config.state_dir}: end that one first, or give this one a folder of its own"
        ) from error
