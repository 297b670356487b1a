"""Up to where the kernel's log was answered by a reset of the cards: older lines are history.

Holds for the boot in which it was noted, and for the cards that were reset: what the log says of
another card still stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from node_agent.collectors import kmsg, xid
from node_agent.config import Config
from node_agent.files import write_atomically
from node_agent.log import log

FILE = "kernel-log-reset.json"


class _Marks(msgspec.Struct, frozen=True):
    """Positions, counted as the cursor of `kmsg` counts."""

    boot_id: str
    generation: int
    #: All cards, and the switches between them, were reset here.
    everything: int = 0
    #: NVML's PCI address -> where this card was reset.
    cards: dict[str, int] = {}


def note(config: Config, boot_id: str, pcis: list[str]) -> None:
    """The cards at these addresses have just been reset; all of the node's if none is named.

    Raises OSError if that cannot be written down.
    """
    now = _position(config, boot_id)
    known = _load(config.state_dir / FILE, now)
    if pcis:
        cards = {**known.cards, **dict.fromkeys(pcis, now.offset)}
        marks = msgspec.structs.replace(known, cards=cards)
    else:
        marks = _Marks(boot_id, now.generation, everything=now.offset)
    write_atomically(config.state_dir / FILE, msgspec.json.encode(marks))


def standing_lines(config: Config, boot_id: str) -> Iterator[tuple[bytes, xid.Parsed]]:
    """What this boot's log reports of cards and switches that no reset has answered since.

    Raises OSError if the log cannot be read.
    """
    marks = _load(config.state_dir / FILE, _position(config, boot_id))
    for at, line in kmsg.lines(config.kernel_log_path):
        parsed = xid.parse(line.decode(errors="replace"))
        if parsed is not None and at > _reset_at(marks, parsed.pci):
            yield line, parsed


def _reset_at(marks: _Marks, pci: str) -> int:
    own = [at for card, at in marks.cards.items() if xid.same_card(pci, card)]
    return max([marks.everything, *own])


def _position(config: Config, boot_id: str) -> kmsg.Cursor:
    return kmsg.position(config.kernel_log_path, config.state_dir / kmsg.CURSOR_FILE, boot_id)


def _load(path: Path, now: kmsg.Cursor) -> _Marks:
    """What was noted, or nothing where it is of another boot or of a log that was cut since."""
    fresh = _Marks(now.boot_id, now.generation)
    try:
        marks = msgspec.json.decode(path.read_bytes(), type=_Marks)
    except FileNotFoundError:
        return fresh
    except msgspec.DecodeError as error:
        log("reset_marks_broken", "error", path=path, error=str(error))
        return fresh
    same_log = (marks.boot_id, marks.generation) == (now.boot_id, now.generation)
    furthest = max([marks.everything, *marks.cards.values()])
    return marks if same_log and furthest <= now.offset else fresh
