"""Executing signed commands, each at most once, whatever dies when.

A command's id is written down before its effect. An id seen before is never executed again: its
stored result is sent once more; a start whose end is unknown is settled by looking at the world.
A stop, which may be executed twice, is executed also where nothing can be written down.

What is not proven to be an order to this node gets no answer: it may be a genuine order that was
altered on its way, of which "nothing was executed" would be untrue once the order itself arrives.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from node_agent import wire
from node_agent.collectors import HardwareUnknown, ResetFailed
from node_agent.config import Config
from node_agent.field_diagnostic import NoVerdict
from node_agent.files import Journal
from node_agent.identity import Identity
from node_agent.link import NOT_UNDERSTOOD
from node_agent.log import log
from node_agent.spool import Spool
from node_agent.supervisor import CannotStart, CannotStop, CardsInUse, Supervisor
from node_agent.threads import start_thread

#: So many finished orders are remembered at least, the newest; what is older its expiry refuses. By
#: number: a clock that is not set yet would have it forget what may still be offered.
KEEP = 5_000

Output = dict[str, Any]
#: What a command may come to grief on: its result is then `failed`, with the reason.
FAILURES = (CannotStart, CannotStop, CardsInUse, HardwareUnknown, NoVerdict, ResetFailed)


class _Refusal(Exception):
    """Why an order to this node is not executed, now or ever."""


class _Head(msgspec.Struct, frozen=True):
    """As much of a command as is needed to answer it."""

    id: wire.Id
    node_id: wire.Id


class Commands:
    """Takes commands from the poll and leaves results in the spool."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        supervisor: Supervisor,
        diagnose: Callable[[int], Output],
        reset: Callable[[list[str]], Output],
        field_diagnose: Callable[[str, float], Output],
        results: Spool,
    ) -> None:
        self._config = config
        self._identity = identity
        self._supervisor = supervisor
        self._diagnose = diagnose
        self._reset = reset
        self._field_diagnose = field_diagnose
        self._results = results
        self._lock = threading.Lock()
        self._journal = Journal(config.state_dir / "commands.jsonl")
        #: By id, in the order of what was last written down of each.
        self._seen: dict[str, dict[str, Any]] = {}
        for entry in self._journal.load():
            self._note(entry)
        self._forget_oldest()

    def recover(self) -> None:
        """Settle commands that were under way when the agent died.

        To be called once, after the supervisor has recovered and before `handle`.
        """
        for entry in list(self._seen.values()):
            if "result" not in entry:
                self._finish(entry["id"], self._look_at_the_world(entry))

    def handle(self, signed: wire.SignedCommand) -> bool:
        """Check one command and execute it. Returns soon: what takes long goes on in a thread.

        To be called by one thread. False if nothing new came of it.
        """
        payload = signed.payload.encode()
        try:
            head = msgspec.json.decode(payload, type=_Head)
        except NOT_UNDERSTOOD as error:
            log("command_unreadable", "error", error=str(error))
            return False
        if not self._is_order_to_us(head, payload, signed.signature):
            return False
        with self._lock:
            seen = self._seen.get(head.id)
        if seen is not None:
            self._repeat(seen)
            return False
        try:
            command = self._check(payload)
        except _Refusal as refusal:
            self._refuse(head.id, str(refusal))
            return False
        with self._lock:
            begun = self._begin(command)
        if begun:
            self._execute(command)
        return begun

    def _is_order_to_us(self, head: _Head, payload: bytes, signature: str) -> bool:
        if not self._identity.trusts(payload, signature):
            reason = "signature: no enrolled key made it"
        elif head.node_id != self._identity.node_id:
            reason = f"node: it is for {head.node_id}"
        else:
            return True
        log("command_not_proven", "error", id=head.id, reason=reason)
        return False

    def _check(self, payload: bytes) -> wire.Command:
        try:
            command = msgspec.json.decode(payload, type=wire.Command)
        except NOT_UNDERSTOOD as error:
            raise _Refusal(f"allow-list: {error}") from error
        now = time.time()
        if command.expires_at <= now:
            raise _Refusal(_late(command, now))
        self._check_allowed(command.action)
        return command

    def _check_allowed(self, action: wire.Verb) -> None:
        if isinstance(action, wire.StartRank) and action.program not in self._config.programs:
            raise _Refusal(f"allow-list: no program {action.program!r} in the agent's `programs`")
        if isinstance(action, wire.FieldDiagnose) and not self._config.field_diagnostic:
            raise _Refusal("allow-list: no `field_diagnostic` in the agent's configuration")
        if isinstance(action, wire.StartRank | wire.StartCoordinator):
            # They become names of files; wire.Id excludes the slash but not these two.
            for name in (action.job, action.placement):
                if re.fullmatch(r"\.+", name):
                    raise _Refusal(f"allow-list: {name!r} cannot name a job or a placement")

    def _begin(self, command: wire.Command) -> bool:
        """Write the id down, before any effect. False, and a failed result, if that fails; but a
        stop goes on without."""
        action = command.action
        entry: dict[str, Any] = {
            "id": command.id,
            "expires_at": command.expires_at,  # an earlier agent that is put back forgets by it
            "verb": type(action).__struct_config__.tag,
            "placement": getattr(action, "placement", ""),
        }
        try:
            self._journal.append([entry])
        except OSError as error:
            log("command_journal_full", "error", id=command.id, error=str(error))
            if not isinstance(action, wire.StopProcess):
                result = _failed(command.id, f"not executed: the journal refused it: {error}")
                # Nor is it executed when it is offered again, once there is room.
                self._seen[command.id] = {**entry, "result": msgspec.to_builtins(result)}
                self._send(result)
                return False
            # What is stopped may be what fills the disk, and may be stopped twice.
        self._seen[command.id] = entry
        return True

    def _execute(self, command: wire.Command) -> None:
        """Starts happen here, in the order of the commands; all waiting happens in a thread."""
        log("command", id=command.id, verb=type(command.action).__name__)
        action = command.action
        try:
            if isinstance(action, wire.StartRank):
                rank = self._supervisor.start_rank(action)
                output = {"pid": rank.pid, "started_at": rank.started_at}
                self._finish(command.id, _done(command.id, output))
                return
            wait = self._begin_slow(action)
        except FAILURES as error:
            self._finish(command.id, _failed(command.id, str(error)))
            return

        def finish() -> None:
            try:
                result = _done(command.id, wait())
            except FAILURES as error:
                result = _failed(command.id, str(error))
            self._finish(command.id, result)

        start_thread(f"command-{command.id}", finish)

    def _begin_slow(
        self,
        action: wire.StartCoordinator
        | wire.StopProcess
        | wire.Diagnose
        | wire.ResetGpus
        | wire.FieldDiagnose,
    ) -> Callable[[], Output]:
        if isinstance(action, wire.StartCoordinator):
            started = self._supervisor.start_coordinator(action)
            return lambda: self._coordinator_up(started.placement)
        if isinstance(action, wire.StopProcess):
            return lambda: self._stop(action.placement, action.grace_s)
        if isinstance(action, wire.ResetGpus):
            # Held from here on, so that a start that comes right behind it cannot overtake it.
            self._supervisor.hold_cards("being reset")
            return lambda: self._release_after(lambda: self._reset(action.uuids))
        if isinstance(action, wire.FieldDiagnose):
            self._supervisor.hold_cards("being examined")
            return lambda: self._release_after(
                lambda: self._field_diagnose(action.uuid, action.limit_s)
            )
        self._supervisor.check_cards_free()
        return lambda: self._diagnose(action.level)

    def _stop(self, placement: str, grace_s: float) -> Output:
        if not self._supervisor.stop(placement, grace_s):
            raise CannotStop("the kernel has not let go of it since SIGKILL: it may hold its cards")
        return {"stopped": True}

    def _release_after(self, work: Callable[[], Output]) -> Output:
        try:
            return work()
        finally:
            self._supervisor.release_cards()

    def _coordinator_up(self, placement: str) -> Output:
        """Wait for its port. One that opens none is stopped: the control plane decides anew."""
        running = self._supervisor.find(placement)
        if running is None:
            raise CannotStart("the coordinator ended at once; see its log")
        try:
            address = self._supervisor.coordinator_address(running)
        except CannotStart:
            self._supervisor.stop(placement, grace_s=0)
            raise
        return {"address": address, "pid": running.pid}

    def _look_at_the_world(self, entry: dict[str, Any]) -> wire.CommandResult:
        command_id, verb = entry["id"], entry["verb"]
        running = self._supervisor.find(entry["placement"])
        if verb == "start_rank" and running is not None:
            return _done(command_id, {"pid": running.pid, "started_at": running.started_at})
        if verb == "start_coordinator" and running is not None:
            try:
                return _done(command_id, self._coordinator_up(entry["placement"]))
            except CannotStart as error:
                return _failed(command_id, str(error))
        if verb == "stop_process" and running is None:
            self._supervisor.stop(entry["placement"], 0)  # it may wait for its next start
            return _done(command_id, {"stopped": True})
        return _failed(
            command_id, f"the agent was restarted during this {verb}; it is not under way"
        )

    def _finish(self, command_id: str, result: wire.CommandResult) -> None:
        log("command_result", id=command_id, state=result.state, error=result.error)
        self._remember({**self._seen[command_id], "result": msgspec.to_builtins(result)})
        self._send(result)

    def _refuse(self, command_id: str, reason: str) -> None:
        log("command_refused", "error", id=command_id, reason=reason)
        result = wire.CommandResult(id=command_id, state="refused", at=time.time(), error=reason)
        entry = {"id": command_id, "expires_at": time.time(), "verb": "", "placement": ""}
        self._remember({**entry, "result": msgspec.to_builtins(result)})
        self._send(result)

    def _repeat(self, entry: dict[str, Any]) -> None:
        if "result" not in entry:
            log("command_under_way", id=entry["id"])
            return
        log("command_repeated", id=entry["id"])
        self._results.put([entry["result"]])

    def _remember(self, entry: dict[str, Any]) -> None:
        with self._lock:
            self._note(entry)
            try:
                self._journal.append([entry])
            except OSError as error:
                log("command_journal_full", "error", id=entry["id"], error=str(error))
            if len(self._seen) > 2 * KEEP:
                self._forget_oldest()

    def _note(self, entry: dict[str, Any]) -> None:
        self._seen.pop(entry["id"], None)
        self._seen[entry["id"]] = entry

    def _forget_oldest(self) -> None:
        """An order that has no result yet is never forgotten."""
        finished = [one for one, entry in self._seen.items() if "result" in entry]
        for one in finished[:-KEEP]:
            del self._seen[one]
        try:
            self._journal.rewrite(self._seen.values())
        except OSError as error:  # it is only longer than it needs to be
            log("command_journal_not_shortened", "error", error=str(error))

    def _send(self, result: wire.CommandResult) -> None:
        self._results.put([msgspec.to_builtins(result)])


def _late(command: wire.Command, now: float) -> str:
    """What is handed out was in time by the control plane's clock: ours differs by as much."""
    least, most = now - command.expires_at, now - command.issued_at
    return (
        f"expiry: by this node's clock its time was over {least:.0f} s ago. The control plane "
        f"hands out no such order, so this clock is {least:.0f} to {most:.0f} s ahead of its own, "
        "unless the order was that long on its way: set it (chrony)"
    )


def _done(command_id: str, output: Output) -> wire.CommandResult:
    return wire.CommandResult(id=command_id, state="done", at=time.time(), output=output)


def _failed(command_id: str, error: str) -> wire.CommandResult:
    return wire.CommandResult(id=command_id, state="failed", at=time.time(), error=error[:8192])
