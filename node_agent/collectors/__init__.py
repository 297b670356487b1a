"""What the agent can see of its node, each source alone behind a deadline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from node_agent.wire import GpuReading, Inventory


class HardwareUnknown(Exception):
    """The hardware cannot be listed now. Not the same as "there is none"."""


@dataclass(frozen=True)
class Readings:
    """The latest sensors. `unreadable`: cards that do not answer, by UUID, with the reason.

    The UUID is "" where the whole driver is silent and no card can be named.
    """

    values: list[GpuReading] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)


class Hardware(Protocol):
    """Where cards and sensors are read. Neither call blocks for longer than a moment."""

    def inventory(self) -> Inventory:
        """What is fitted now. Raises HardwareUnknown."""
        ...

    def readings(self) -> Readings: ...

    def change_fd(self) -> int | None:
        """A descriptor that is readable when `inventory` may have changed, if there is one."""
        ...

    def close(self) -> None: ...
