"""Which modes mean something for a playbook: how far it can be told to go by itself."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.incidents.choices import Mode
from controlplane.incidents.models import Playbook
from controlplane.incidents.move_plans import AS_WHOLE
from controlplane.incidents.move_plans import PLAYBOOK as MOVE_PLAYBOOK
from controlplane.incidents.plans import NODE_ORDERS

#: Playbooks that run only when somebody asks for it. (Automation returns a node by itself too.)
ONLY_ASKED_FOR = frozenset(NODE_ORDERS.values()) - {NODE_ORDERS["return"]} | {
    *("admit-node", "start-job"),
    *(MOVE_PLAYBOOK, AS_WHOLE),
}


@dataclass(frozen=True)
class Modes:
    """The modes that mean something for a playbook, and why no others do; "" where all do."""

    allowed: tuple[Mode, ...]
    why_no_others: str = ""

    def in_force(self, chosen: str | None) -> Mode:
        """What a mode that was chosen once, or none, comes to."""
        mode = Mode(chosen or Mode.AUTOMATIC)
        return mode if mode in self.allowed else Mode.AUTOMATIC


def modes_of(playbook: Playbook) -> Modes:
    """How far this playbook can be told to go by itself.

    A plan is shown or signed before a disruptive step. Where there is none the playbook does what
    it is there for, or is off.
    """
    if playbook.pk in ONLY_ASKED_FOR:
        why = f"{playbook.pk} runs only when somebody asks for it: no mode holds that up"
        return Modes((Mode.AUTOMATIC,), why)
    if playbook.disruptive:
        return Modes(tuple(Mode))
    if playbook.acts:
        why = f"{playbook.pk} has no disruptive step to show or sign: it is automatic, or off"
        return Modes((Mode.AUTOMATIC, Mode.OFF), why)
    why = f"{playbook.pk} only looks on: there is nothing that a mode could hold up"
    return Modes((Mode.AUTOMATIC,), why)
