"""An epoch's collectives, as gloo does them: when one fails, some may have got the sum.

Has no abort and no time limit: who waits for a dead or frozen member waits until it is severed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.replica.membership import Severed, Silent
from tests.runtime.simulation.clock import Process, Thread
from tests.runtime.simulation.network import Network

AGAIN_S = 0.2
SILENT_S = 1.5
SILENT = "a peer is silent"


@dataclass(eq=False)
class Round:
    """One all-reduce: what each has brought, and who got the sum, or an error."""

    brought: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, Any] = field(default_factory=dict)
    blocked: dict[str, float] = field(default_factory=dict)  # since when, for whom


class Group:
    """The members of one epoch, connected with each other."""

    def __init__(self, network: Network, members: Sequence[Process]) -> None:
        self.network = network
        self.members = {member.name: member for member in members}
        self._rounds: dict[int, Round] = {}
        self._done: dict[str, int] = {}  # name -> rounds that it has begun
        self._hurt: list[str] = []  # whose sockets are gone

    def reduce(self, thread: Thread, mine: Any, broken: Callable[[], bool]) -> list[Any]:
        """In a member's thread: what all brought. Raises Severed.

        `broken`: whether the epoch is known here to be over.
        """
        name = thread.process.name
        if len(self.members) == 1:
            return [mine]
        if name in self._hurt:
            raise Severed("our sockets are gone")
        number = self._done.get(name, 0)
        self._done[name] = number + 1
        this = self._rounds.setdefault(number, Round())
        self._rounds.pop(number - 2, None)
        this.brought[name] = mine
        if self._hurt:
            self._fail_sometime(this, self.members[name])
        elif len(this.brought) == len(self.members):
            for member in self.members.values():
                member.after(self.network.delay(), this, self._finish, this, member)
        thread.wait(lambda: name in this.ends or broken())
        end = this.ends.get(name)
        if end == SILENT:
            raise Silent(SILENT)
        if end is None or isinstance(end, str):
            raise Severed(end or "the epoch broke")
        return list(this.brought.values())

    def hurt(self, victim: Process) -> None:
        """This member's sockets are gone: it fails; of the others, some do, some wait for ever,
        and some have all they need."""
        self._hurt.append(victim.name)
        for this in self._rounds.values():
            this.ends.setdefault(victim.name, "its sockets are gone")
            for member in self.members.values():
                if member.name not in this.ends:
                    self._fail_sometime(this, member)

    def _fail_sometime(self, this: Round, member: Process) -> None:
        if self.network.clock.random.random() < 0.5:
            delay = self.network.clock.random.uniform(0.0, 0.04)
            member.after(delay, this, self._end, this, member, "a peer is gone")

    def _finish(self, this: Round, member: Process) -> None:
        """The sum arrives at a member, if all could take part."""
        chance = self.network.clock.random.random
        passes = self.network.connects(list(self.members))
        moving = not any(m.frozen for m in self.members.values()) or chance() < 0.3
        if self._hurt and chance() < 0.6:
            return
        if (not passes or not moving) and not self._hurt:
            if self._hears_nothing(this, member):
                self._end(this, member, SILENT)
                return
            member.after(AGAIN_S, this, self._finish, this, member)
            return
        self._end(this, member, this)

    def _hears_nothing(self, this: Round, member: Process) -> bool:
        """One of its peers answers nothing, for so long that its kernel has given it up."""
        others = [name for name in self.members if name != member.name]
        if all(self.network.both_ways(member.name, other) for other in others):
            this.blocked.pop(member.name, None)
            return False
        since = this.blocked.setdefault(member.name, self.network.clock.now)
        return self.network.clock.now - since > SILENT_S

    def _end(self, this: Round, member: Process, how: Any) -> None:
        this.ends.setdefault(member.name, how)
