"""In the place of a checkpoint's writer: the same, which finds slow whatever it has written to."""

from __future__ import annotations

from runtime.checkpoint import writer
from runtime.checkpoint.meter import Meter
from runtime.checkpoint.packing import Packer

SLOW = 1e3


def note(packer: Packer, _meter: Meter) -> None:
    packer._speeds.append(SLOW)


if __name__ == "__main__":
    Packer.note = note  # type: ignore[method-assign, assignment]
    writer.main()
