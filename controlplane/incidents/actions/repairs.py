"""Requests for repairs: a node gets one run, which later reasons add to."""

from __future__ import annotations

from typing import Any

from django.utils import timezone

from controlplane.accounts.models import SYSTEM, Actor
from controlplane.fleet.changes import change, touch
from controlplane.fleet.models import Node
from controlplane.health.choices import Action, Urgency
from controlplane.incidents.actions.incidents import resolve_if_over
from controlplane.incidents.actions.merging import (
    merge_into,
)
from controlplane.incidents.actions.runs import look_again, request_run
from controlplane.incidents.choices import (
    StepState,
)
from controlplane.incidents.models import (
    Incident,
    PlaybookRun,
    PlaybookStep,
)
from workers.triage import ACTIONS, FOR_PEOPLE


@change()
def repair_node(
    actor: Actor,
    node_id: str,
    incident: Incident | None,
    reason: str,
    *,
    only_if_silent: bool = False,
    lost_placement: str = "",
    action: Action = Action.POWER_CYCLE,
    gpu_uuid: str = "",
    code: str = "",
    urgency: Urgency = Urgency.NOW,
) -> PlaybookRun:
    """Have a node taken out, repaired, validated and returned as a spare.

    `only_if_silent`: silence is all that speaks against it, so a word from it ends the repair.
    `lost_placement` is the one that may be ended with it; another on it is a reason to stop.
    `action` is what the failure calls for, `gpu_uuid` the card that failed where one is known,
    `code` the failure's.
    A repair that waits until the node is idle is nobody's incident: it may take days. One that is
    under way for less takes over what this one calls for, and decides anew, also if it had asked
    for a person.
    """
    node = Node.objects.get(pk=node_id)
    context: dict[str, Any] = {
        "reason": reason,
        "only_if_silent": only_if_silent,
        "lost_placement": lost_placement,
        "hardware": bool(gpu_uuid),
        "action": action,
        "gpu": gpu_uuid,
        "code": code,
        "urgency": urgency,
    }
    idle = urgency == Urgency.IDLE
    # What waits for idleness may take days: of incidents only the node's own waits with it.
    its_own = incident is not None and incident.subject == f"node/{node_id}"
    run = request_run(
        actor,
        "repair-node",
        node_id,
        cluster_id=node.cluster_id,
        title=f"Repair {node.name}" + (" when idle" if idle else ""),
        incident=incident if its_own or not idle else None,
        node_id=node_id,
        context=context,
    )
    wanted = _both(run.context, context)
    if not idle and wanted != run.context:
        PlaybookRun.objects.filter(pk=run.pk).update(
            incident=incident, title=f"Repair {node.name}", context=wanted
        )
        touch(node.cluster_id, ("run", run.pk))
        _let_go_on_within(incident, run.incident, node)
        PlaybookStep.objects.filter(run=run, state=StepState.WAITING).update(wake_at=timezone.now())
        if news := _news_of_need(run.context, wanted):
            look_again(run.pk, news, afresh=True)
    return run


def _let_go_on_within(incident: Incident | None, before: Incident | None, node: Node) -> None:
    """Nothing else would end the incident that a repair leaves: a node's own is a part of that
    which took its repair over, another is over if nothing else of it is under way. Unless
    something of it is left to people, who would not be shown it there."""
    if incident is None or before is None or before == incident:
        return
    if before.subject == f"node/{node.pk}":
        if not before.failures.filter(needed__in=sorted(FOR_PEOPLE)).exists():
            merge_into(incident, [before])
    else:
        why = f"the repair of {node.name} goes on in “{incident.title}”"
        resolve_if_over(SYSTEM, before.pk, why)


def _news_of_need(before: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What a repair is for that it was not for before, in words; "" if only the words differ."""
    news = {
        ("action", "gpu"): "a graver failure came meanwhile",
        ("urgency",): "it is wanted sooner by now",
        ("only_if_silent", "hardware"): "more than silence speaks against the node by now",
        ("lost_placement",): "another replica was lost with the node",
    }
    told = (
        text
        for keys, text in news.items()
        if any(key in before and before[key] != wanted[key] for key in keys)
    )
    return next(told, "")


def _both(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a repair is for that was asked for twice: the gravest action, on the card that calls for
    it, as soon as either wants it."""
    there = str(before.get("action", now["action"]))
    same_card = before.get("gpu") == now["gpu"]
    graver = _gravity(now["action"], same_card) > _gravity(there, same_card)
    same_fault = same_card and there == now["action"]
    wanted = {**before, **now} if graver or same_fault else {**now, **before}
    since = str(before.get("urgency", now["urgency"]))
    return {
        **wanted,
        "urgency": now["urgency"] if Urgency(now["urgency"]).before(since) else since,
        "only_if_silent": bool(before.get("only_if_silent")) and bool(now["only_if_silent"]),
        "hardware": bool(before.get("hardware")) or bool(now["hardware"]),
        "lost_placement": now["lost_placement"] or before.get("lost_placement", ""),
    }


def _gravity(action: str, same_card: bool) -> float:
    """Actions in their order, but for the field diagnostic: it mends nothing of another card, and a
    card that calls for a restart must have had it to be examined."""
    if action != Action.FIELD_DIAGNOSTIC:
        return ACTIONS.index(action)
    return ACTIONS.index("drain_and_reset" if same_card else "update_software") + 0.5
