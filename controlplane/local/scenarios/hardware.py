"""The scenario of a card that fails again after its repair."""

from __future__ import annotations

from datetime import UTC, datetime

from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import Gpu, Node, RepairRecord
from controlplane.incidents.choices import CaseState
from controlplane.incidents.models import Incident, RmaCase
from controlplane.local.scenarios import replicas
from controlplane.local.scenarios.base import (
    MENDED_S,
    Result,
    Say,
    await_rows,
    last_reached,
    replace_cards,
    resolved,
    seconds_since,
    state_reached,
    url,
)
from workers import power


def second_failure(say: Say) -> Result:
    """XID 79, its repair, and the same card again: RMA with its evidence, then a new card.

    The technician is played too: new cards are fitted once the case is open, and the node must
    come back with them by itself, while the old card's record stays with its serial.
    """
    first = replicas.play("xid79", say)
    if not first.ok:
        first.scenario = "second-failure"
        return first
    card = Gpu.objects.select_related("node").get(serial=first.facts["serial"])
    if card.node is None or card.index is None:
        raise RuntimeError("a repaired card sits where it sat")
    node = card.node
    at = datetime.now(UTC)
    say(f"XID 79 again: card {card.serial} of {node.name}")
    facts = power.break_card(node, "xid79", card.index)
    incident = await_rows(
        lambda: Incident.objects.filter(node=node, opened_at__gte=at).first(),
        60,
        "no incident was opened",
    )
    say(f"incident: {url(incident)}")
    incident = await_rows(lambda: resolved(incident.pk), MENDED_S, "it is not resolved")
    case = RmaCase.objects.filter(gpu=card, opened_at__gte=at).first()
    problems = _problems(node, case)
    replace_cards(node, say)
    await_rows(lambda: _returned(node, at), MENDED_S, f"{node.name} did not come back")
    problems += _problems_of_record(card)
    moments = {
        "incident": incident.opened_at,
        "quarantined": state_reached(node.pk, NodeState.QUARANTINED, at),
        "rma": state_reached(node.pk, NodeState.RMA, at),
        "resolved": incident.resolved_at,
        "returned": last_reached(node.pk, NodeState.AVAILABLE, at),
    }
    return Result(
        scenario="second-failure",
        ok=not problems,
        seconds={key: seconds_since(at, moment) for key, moment in moments.items()},
        longest_gap_s=first.longest_gap_s,
        samples=first.samples,
        incident=url(incident),
        facts={
            **facts,
            "code": incident.code,
            "case": case.pk if case else None,
            "evidence": sorted(case.bundle) if case else [],
            "repairs": list(card.repairs.order_by("at").values_list("rung", flat=True)),
        },
        problems=problems,
    )


def _problems(node: Node, case: RmaCase | None) -> list[str]:
    problems = []
    node.refresh_from_db()
    if node.state != NodeState.RMA:
        problems.append(f"{node.name} is {node.state}, not out for RMA")
    if case is None:
        return [*problems, "no RMA case was opened"]
    if len(case.bundle["failures"]) < 2 or not case.bundle["repairs"]:
        problems.append("the evidence bundle lacks the failures or the repair")
    return problems


def _problems_of_record(card: Gpu) -> list[str]:
    card.refresh_from_db()
    problems = []
    if card.node_id is not None:
        problems.append("the card that was taken out is still believed to be in its node")
    rungs = set(RepairRecord.objects.filter(gpu=card).values_list("rung", flat=True))
    if not {Rung.REBOOT, Rung.RMA} <= rungs:
        problems.append(f"the card's record lost its repairs: {sorted(rungs)}")
    if card.rma_cases.exclude(state=CaseState.CLOSED).exists():
        problems.append("its case stayed open though the card has left")
    return problems


def _returned(node: Node, since: datetime) -> bool:
    return Node.objects.filter(
        pk=node.pk, state=NodeState.AVAILABLE, state_since__gte=since
    ).exists()
