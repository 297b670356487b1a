"""What the agent can see of its node, each source alone behind a deadline."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from node_agent.wire import GpuReading, Inventory, PortReading


class HardwareUnknown(Exception):
    """The hardware cannot be listed now. Not the same as "there is none"."""


class ResetFailed(Exception):
    """The cards were not reset; the message names the remedy."""


@dataclass(frozen=True)
class Readings:
    """The latest sensors. `unreadable`: cards that do not answer, by UUID, with the reason.

    The UUID is "" where the whole driver is silent and no card can be named.
    """

    values: list[GpuReading] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)


class Hardware(Protocol):
    """Where cards and sensors are read. Only `reset` blocks for longer than a moment."""

    def inventory(self) -> Inventory:
        """What is fitted now. Raises HardwareUnknown."""
        ...

    def readings(self) -> Readings:
        """The latest. From then on `change_fd` tells of newer changes only."""
        ...

    def ports(self) -> list[PortReading]:
        """The ports of the node's fabric adapters, now."""
        ...

    def change_fd(self) -> int | None:
        """A descriptor that is readable when the cards, or which of them answer, may have changed.

        None where there is no such descriptor.
        """
        ...

    def reset(self, uuids: list[str]) -> list[str]:
        """Reset these cards, or all if none is named; returns which. No process may use them.

        Takes up to a minute. Raises ResetFailed; HardwareUnknown if the cards cannot be listed.
        """
        ...

    def let_go(self) -> AbstractContextManager[None]:
        """Hold no card open within: a tool is to have them for itself.

        Entering raises HardwareUnknown if they cannot be let go.
        """
        ...

    def close(self) -> None: ...
