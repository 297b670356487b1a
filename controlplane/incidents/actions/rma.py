"""Writes of RMA cases: cards that go back to their vendor, with the evidence."""

from __future__ import annotations

from django.utils import timezone

from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet.changes import change, touch
from controlplane.fleet.models import Gpu, Node
from controlplane.incidents import evidence
from controlplane.incidents.actions.incidents import add_timeline_entry
from controlplane.incidents.actions.runs import request_run
from controlplane.incidents.choices import CaseState, EntryKind
from controlplane.incidents.models import Incident, RmaCase


@change()
def open_case(
    actor: Actor, gpu: Gpu, node: Node, incident: Incident | None, reason: str
) -> RmaCase:
    """Open the case of a card, with its evidence bundle; the open one if there is one."""
    there = RmaCase.objects.filter(gpu=gpu).exclude(state=CaseState.CLOSED).first()
    if there is not None:
        return there
    case = RmaCase.objects.create(
        cluster_id=node.cluster_id,
        gpu=gpu,
        node=node,
        incident=incident,
        reason=reason,
        bundle=evidence.bundle(gpu, node),
    )
    audit(
        actor,
        "rma.open",
        "rma",
        case.pk,
        cluster_id=node.cluster_id,
        after={"serial": gpu.serial, "node": node.pk},
        reason=reason,
    )
    if incident is not None:
        text = f"RMA case opened for card {gpu.serial}, with its evidence: {reason}"
        add_timeline_entry(incident, f"rma/{case.pk}", EntryKind.NODE, text)
    touch(node.cluster_id)
    return case


@change()
def send_case(actor: Actor, case_id: str, vendor_reference: str, reason: str) -> None:
    """Note that the vendor has it. Raises Conflict unless it is open, or without a reference."""
    case = RmaCase.objects.select_for_update(no_key=True, of=("self",)).get(pk=case_id)
    if case.state != CaseState.OPEN:
        raise Conflict(f"this case is {case.get_state_display().lower()}")
    if not vendor_reference.strip():
        raise Conflict("give the vendor's reference, so that the case is found again")
    _set_state(actor, case, CaseState.SENT, reason, vendor_reference=vendor_reference.strip())


@change()
def close_case(actor: Actor, case_id: str, reason: str) -> None:
    """End a case. Raises Conflict if it is closed."""
    case = RmaCase.objects.select_for_update(no_key=True, of=("self",)).get(pk=case_id)
    if case.state == CaseState.CLOSED:
        raise Conflict("this case is closed already")
    _set_state(actor, case, CaseState.CLOSED, reason, closed_at=timezone.now())


@change()
def readmit_replaced() -> int:
    """Have each node admitted again in which new cards sit in place of its RMA cards. Returns how
    many.

    A card that is only no longer listed may be dead in its slot. The record of one that left stays
    with its serial.
    """
    waiting = Node.objects.filter(state="rma", rma_cases__isnull=False, lease__reachable=True)
    count = 0
    for node in waiting.distinct():
        cases = list(node.rma_cases.exclude(state=CaseState.CLOSED).select_related("gpu"))
        # A case that a person closed says nothing of the card: they order the return themselves.
        fitted = set(node.gpus.values_list("pk", flat=True))
        new = fitted.difference(*(case.bundle["node"].get("cards", []) for case in cases))
        gone = all(case.gpu_id not in fitted for case in cases) and len(new) >= len(cases)
        if not cases or not gone:
            continue
        if node.runs.filter(playbook="return-node", finished_at=None).exists():
            continue
        for case in cases:
            tellable = f"card {case.gpu.serial} has left {node.name}"
            _set_state(SYSTEM, case, CaseState.CLOSED, tellable, closed_at=timezone.now())
        request_run(
            SYSTEM,
            "return-node",
            node.pk,
            cluster_id=node.cluster_id,
            title=f"Return {node.name} with its new cards",
            node_id=node.pk,
            context={"reason": "its cards were replaced", "spare": True},
        )
        count += 1
    return count


def _set_state(actor: Actor, case: RmaCase, to: CaseState, reason: str, **fields: object) -> None:
    RmaCase.objects.filter(pk=case.pk).update(state=to, **fields)
    audit(
        actor,
        f"rma.{'send' if to == CaseState.SENT else 'close'}",
        "rma",
        case.pk,
        cluster_id=case.cluster_id,
        before={"state": case.state},
        after={"state": to, "vendor_reference": str(fields.get("vendor_reference", ""))},
        reason=reason,
    )
    touch(case.cluster_id)
