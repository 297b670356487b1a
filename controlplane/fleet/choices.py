"""The states of a node and of a command, and which changes of state there are.

The table below is the node's whole life: `fleet.actions.transition` refuses whatever is not in it.
"""

from __future__ import annotations

from django.db.models import TextChoices


class NodeState(TextChoices):
    ENROLLED = "enrolled", "Enrolled"  # known, not yet trusted with work
    VALIDATING = "validating", "Validating"  # running its diagnostics
    VALIDATION_FAILED = "validation_failed", "Validation failed"
    AVAILABLE = "available", "Available"  # may take work
    ALLOCATED = "allocated", "Allocated"  # holds a rank of a job
    SUSPECT = "suspect", "Suspect"  # evidence below the bar: watched, given no new work
    DRAINING = "draining", "Draining"  # being emptied, the scheduler's way
    DRAIN_FAILED = "drain_failed", "Drain failed"
    QUARANTINED = "quarantined", "Quarantined"  # empty; nothing may land on it
    REPAIRING = "repairing", "Repairing"  # reset, reboot, power cycle or diagnostic under way
    REPAIR_FAILED = "repair_failed", "Repair failed"
    RMA = "rma", "RMA"  # out for replacement
    RETIRED = "retired", "Retired"  # gone; its history stays


_S = NodeState

#: Transient states, each with the failed twin it falls into when its deadline passes.
FAILED_TWIN: dict[NodeState, NodeState] = {
    _S.VALIDATING: _S.VALIDATION_FAILED,
    _S.DRAINING: _S.DRAIN_FAILED,
    _S.REPAIRING: _S.REPAIR_FAILED,
}
TRANSIENT = frozenset(FAILED_TWIN)
STABLE = frozenset(NodeState) - TRANSIENT

#: Where a node goes back to whose drain is called off before it was emptied.
_BACK = frozenset({_S.AVAILABLE, _S.ALLOCATED, _S.SUSPECT})

#: Every allowed change of state. Nothing reaches `available` but from validation, from work, or
#: from a drain that was called off: a node that was emptied comes back through its diagnostics.
EDGES: dict[NodeState, frozenset[NodeState]] = {
    _S.ENROLLED: frozenset({_S.VALIDATING, _S.RETIRED}),
    _S.VALIDATING: frozenset({_S.AVAILABLE, _S.VALIDATION_FAILED, _S.QUARANTINED}),
    _S.VALIDATION_FAILED: frozenset(
        {_S.VALIDATING, _S.QUARANTINED, _S.REPAIRING, _S.RMA, _S.RETIRED}
    ),
    _S.AVAILABLE: frozenset({_S.ALLOCATED, _S.SUSPECT, _S.DRAINING, _S.QUARANTINED}),
    _S.ALLOCATED: frozenset({_S.AVAILABLE, _S.SUSPECT, _S.DRAINING, _S.QUARANTINED}),
    _S.SUSPECT: frozenset({_S.VALIDATING, _S.DRAINING, _S.QUARANTINED}),
    _S.DRAINING: frozenset({_S.QUARANTINED, _S.DRAIN_FAILED}) | _BACK,
    _S.DRAIN_FAILED: frozenset({_S.DRAINING, _S.QUARANTINED}) | _BACK,
    _S.QUARANTINED: frozenset({_S.REPAIRING, _S.VALIDATING, _S.RMA, _S.RETIRED}),
    _S.REPAIRING: frozenset({_S.VALIDATING, _S.REPAIR_FAILED}),
    _S.REPAIR_FAILED: frozenset({_S.REPAIRING, _S.VALIDATING, _S.RMA, _S.RETIRED}),
    _S.RMA: frozenset({_S.VALIDATING, _S.RETIRED}),
    _S.RETIRED: frozenset(),
}

#: States in which automation has taken a node out: what the budget of a cluster counts.
TAKEN_OUT = frozenset(
    {
        _S.DRAINING,
        _S.DRAIN_FAILED,
        _S.QUARANTINED,
        _S.REPAIRING,
        _S.REPAIR_FAILED,
        _S.VALIDATION_FAILED,
    }
)

#: States in which a node is expected to beat and may hold work.
IN_SERVICE = frozenset({_S.AVAILABLE, _S.ALLOCATED, _S.SUSPECT})

#: Colour by state, as a CSS class: colour only for what needs a person.
COLOURS: dict[NodeState, str] = {
    _S.ENROLLED: "quiet",
    _S.VALIDATING: "busy",
    _S.VALIDATION_FAILED: "bad",
    _S.AVAILABLE: "good",
    _S.ALLOCATED: "good",
    _S.SUSPECT: "warn",
    _S.DRAINING: "busy",
    _S.DRAIN_FAILED: "bad",
    _S.QUARANTINED: "warn",
    _S.REPAIRING: "busy",
    _S.REPAIR_FAILED: "bad",
    _S.RMA: "bad",
    _S.RETIRED: "quiet",
}


class CommandState(TextChoices):
    QUEUED = "queued", "Queued"  # signed, not yet carried to the node
    DELIVERED = "delivered", "Delivered"  # handed to the agent's poll
    DONE = "done", "Done"
    FAILED = "failed", "Failed"
    REFUSED = "refused", "Refused"  # the agent executed nothing
    EXPIRED = "expired", "Expired"  # no word from the agent in time


#: What an order may be in that has no end yet. A list: an index's condition has it in this order.
COMMAND_PENDING = [CommandState.QUEUED, CommandState.DELIVERED]
COMMAND_FINISHED = frozenset(
    {CommandState.DONE, CommandState.FAILED, CommandState.REFUSED, CommandState.EXPIRED}
)


class Rung(TextChoices):
    """The repair ladder, gentlest first."""

    RESTART_PROGRAM = "restart_program", "Restart the program"
    RESET_GPU = "reset_gpu", "Reset the GPU"
    REBOOT = "reboot", "Reboot"
    POWER_CYCLE = "power_cycle", "Power cycle"
    FIELD_DIAGNOSTIC = "field_diagnostic", "Field diagnostic"
    RMA = "rma", "RMA"
