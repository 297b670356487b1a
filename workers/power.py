"""Power of a node, through the Redfish interface of its management controller.

Reading is free. Whoever switches must have asked the guards before, and must still hold its step:
another worker that took the step over may have brought the node back to work since.
"""

from __future__ import annotations

import base64
import http.client
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.crypto import unseal
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change
from controlplane.fleet.models import Node
from controlplane.incidents.choices import RUN_ACTIVE, StepState
from controlplane.incidents.models import PlaybookStep

SYSTEM_PATH = "/redfish/v1/Systems/1"
#: What Redfish knows. While a machine goes off, what ran on it may run still.
POWER_STATES = ("On", "Off", "PoweringOn", "PoweringOff", "Paused")
#: Well below a step's lease, so that whoever calls still holds the step when the answer comes.
TIMEOUT_S = 4.0
#: What must be left of it before a switch: a call may take the time to connect and that to answer.
CALL = timedelta(seconds=2 * TIMEOUT_S)

ResetType = Literal["On", "ForceOff", "ForceRestart"]


class PowerError(Exception):
    """The management controller cannot be reached or said no."""


@dataclass(frozen=True)
class Power:
    """Of the states in between neither `on` nor `off` is true: whoever meets one looks again."""

    #: One of `POWER_STATES`.
    state: str
    #: The boot that the machine is in; changes with each start. Empty where the BMC cannot tell.
    boot_id: str

    @property
    def on(self) -> bool:
        return self.state == "On"

    @property
    def off(self) -> bool:
        return self.state == "Off"


def read(node: Node) -> Power:
    """The node's power, and its boot id. Raises PowerError, also where the BMC names no state."""
    answer = _call(node, "GET", SYSTEM_PATH, None)
    state = answer.get("PowerState")
    if state not in POWER_STATES:
        raise PowerError(f"the BMC of {node.name} names no power state: {state!r}")
    own = _part(_part(answer, "Oem"), "Drydock")
    return Power(state=state, boot_id=str(own.get("BootId") or ""))


def switch(node: Node, reset_type: ResetType, step: PlaybookStep | None) -> None:
    """Switch the node's power; look before: an order that changes nothing some BMCs refuse, and
    others do not. Written into the audit trail before it is done.

    `step`: on whose behalf, as it was claimed; None for whoever plays with a simulated machine.
    Raises PowerError, and Conflict if the step is not held for as long as the call may take.
    """
    with change():
        if step is not None:
            _hold(step)
        fleet.record_power_order(SYSTEM, node.pk, reset_type, node.state_reason)
    _call(node, "POST", f"{SYSTEM_PATH}/Actions/ComputerSystem.Reset", {"ResetType": reset_type})


def _hold(claimed: PlaybookStep) -> None:
    """Keep the step from being taken over before what is about to be done is written down."""
    now = timezone.now()
    held = PlaybookStep.objects.select_for_update(no_key=True, of=("self",)).filter(
        pk=claimed.pk,
        lock_token=claimed.lock_token,
        state=StepState.RUNNING,
        lock_expires_at__gt=now + CALL,
        run__state__in=sorted(RUN_ACTIVE),
    )
    if held.first() is None:
        raise Conflict("its worker stood still too long to switch the power: it looks again")


def fit_new_cards(node: Node) -> None:
    """Simulated machines only: put new cards into the node, as a technician would."""
    _call(node, "POST", "/redfish/v1/Oem/Drydock/Cards", {})


def break_card(node: Node, fault: str, card: int) -> dict[str, Any]:
    """Simulated machines only: break one card as this fault does, kernel line and all.

    Returns the line, the card's uuid and serial, and the processes that it took with it.
    """
    return _call(node, "POST", "/redfish/v1/Oem/Drydock/Faults", {"fault": fault, "card": card})


def freeze(node: Node, what: Literal["agent", "all"], *, frozen: bool = True) -> dict[str, Any]:
    """Simulated machines only: stop the agent, or all that runs, where it stands; or go on."""
    body = {"what": what, "frozen": frozen}
    return _call(node, "POST", "/redfish/v1/Oem/Drydock/Freeze", body)


def _part(answer: dict[str, Any], name: str) -> dict[str, Any]:
    """An object within an answer; an empty one where some BMCs say null."""
    part = answer.get(name)
    return part if isinstance(part, dict) else {}


def _call(node: Node, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """What the BMC answers; {} where that is no JSON object, but a page, say: whoever reads finds
    nothing in it, and an order was taken all the same. Raises PowerError."""
    if not node.bmc_url:
        raise PowerError(f"{node.name} has no management controller on record; set its BMC address")
    parts = urlsplit(node.bmc_url)
    connection_type = (
        http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    )
    connection = connection_type(parts.netloc, timeout=TIMEOUT_S)
    credentials = f"{node.bmc_username}:{unseal(node.bmc_password_sealed)}"
    headers = {
        "Authorization": "Basic " + base64.b64encode(credentials.encode()).decode(),
        "Content-Type": "application/json",
    }
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise PowerError(f"the BMC of {node.name} does not answer: {error}") from error
    finally:
        connection.close()
    if response.status >= 300:
        raise PowerError(f"the BMC of {node.name} answered {response.status} to {method} {path}")
    try:
        answer = json.loads(content)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
