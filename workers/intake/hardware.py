"""What hardware says of itself, and what a job says of one of its nodes: each is judged here.

What calls for nothing is a note in a timeline; the rest is taken up as a failure of its node.
"""

from __future__ import annotations

import re

from controlplane.fleet.models import Node
from controlplane.health.actions import card_at
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.jobs.choices import PlacementState, Tier
from controlplane.jobs.models import Placement
from workers import triage
from workers.intake.failures import only_repeats, take_up
from workers.intake.timeline import add_to_node_incident
from workers.signal_triage import verdict_of

#: By the tier that a rank finds damaged, where only its own node can have done it: what that is.
OF_ITS_NODE = {Tier.LOCAL: triage.DAMAGED, Tier.PEER: triage.DAMAGED_MEMORY}


def hardware_spoke(signal: Signal) -> None:
    """A line of a node's kernel log, or a card's readings: nothing, a note, or a failure that
    somebody must act on."""
    node: Node | None = signal.node
    verdict = verdict_of(signal)
    if node is None or verdict is None or triage.is_note(verdict):
        add_to_node_incident(signal)
        return
    if signal.repeated_at is not None and only_repeats(signal, node, verdict):
        return
    card = signal.gpu or card_at(node.pk, verdict.pci)
    if card is not None and signal.gpu_id is None:
        Signal.objects.filter(pk=signal.pk).update(gpu=card)
    take_up(signal, node, card, verdict)


def job_blamed_a_replica(signal: Signal, index: int) -> None:
    """Its peers say that a replica is slow, or holds what nobody else does: something is wrong with
    its node that nothing else shows. The failure is its node's, whoever told it; of a replica on
    several nodes nobody knows which it is."""
    held = list(
        Placement.objects.select_related("node__lease", "node__cluster", "node__rack")
        .filter(replica__job=signal.job_id, replica__index=index, standby=False)
        .exclude(state=PlacementState.ENDED)
    )
    if len(held) == 1:
        verdict = triage.judge_blame(str(signal.data["kind"]), str(signal.data.get("text", "")))
        take_up(signal, held[0].node, None, verdict)


def job_blamed_its_node(signal: Signal) -> None:
    """A rank reads back from its node's own disk or memory what was not given to it. The failure is
    that node's: its own, of however many the replica is on."""
    told_by = Placement.objects.select_related("node__lease", "node__cluster", "node__rack")
    for placement in told_by.filter(pk=signal.placement_id, replica__job=signal.job_id):
        code = OF_ITS_NODE[signal.data["subject"]]
        verdict = triage.judge_blame(code, str(signal.data.get("text", "")))
        take_up(signal, placement.node, None, verdict)


def blames_its_node(signal: Signal) -> bool:
    """Whether that is what a rank says. Of what all nodes share nobody knows whose fault it is."""
    told = signal.kind == SignalKind.JOB_TROUBLE and signal.data.get("kind") == triage.DAMAGED
    return told and signal.data.get("subject") in OF_ITS_NODE


def blamed(signal: Signal) -> int | None:
    """Which replica a job says to be unlike its peers, as its runtime puts it; None if none."""
    found = re.fullmatch(r"replica (\d{1,6})", str(signal.data.get("subject", "")))
    told = signal.kind == SignalKind.JOB_TROUBLE and signal.data.get("kind") in triage.BLAMES
    return int(found[1]) if told and found else None
