"""What a playbook would do to a node, before it does it: for dry runs and approvals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from controlplane.errors import Conflict
from controlplane.fleet.choices import EDGES, IN_SERVICE, NodeState
from controlplane.fleet.models import Gpu, Node
from controlplane.incidents import limits, pricing
from controlplane.incidents.choices import Mode
from controlplane.incidents.models import Incident, Playbook, PlaybookRun
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Placement

#: What people may order for a node, and the playbook that does it.
NODE_ORDERS: dict[str, str] = {
    "drain": "drain-node",
    "quarantine": "quarantine-node",
    "diagnose": "diagnose-node",
    "reset": "reset-node",
    "reboot": "reboot-node",
    "return": "return-node",
    "retire": "retire-node",
}
#: The states of a node in which each order makes sense; `diagnose` leaves the state as it is.
_OUT = frozenset(
    {
        NodeState.VALIDATION_FAILED,
        NodeState.SUSPECT,
        NodeState.DRAIN_FAILED,
        NodeState.QUARANTINED,
        NodeState.REPAIR_FAILED,
    }
)
ORDER_STATES: dict[str, frozenset[NodeState]] = {
    "drain": IN_SERVICE | {NodeState.DRAIN_FAILED},
    "quarantine": IN_SERVICE | {NodeState.DRAIN_FAILED, NodeState.VALIDATION_FAILED},
    "diagnose": frozenset(NodeState) - {NodeState.RETIRED},
    "reset": IN_SERVICE | _OUT,
    "reboot": IN_SERVICE | _OUT,
    # One whose drain failed may hold work yet: it is quarantined first.
    "return": _OUT - {NodeState.DRAIN_FAILED} | {NodeState.ENROLLED, NodeState.RMA},
    "retire": frozenset(state for state in NodeState if NodeState.RETIRED in EDGES[state]),
}
#: What a run says that ended at its first disruptive step, for its mode is dry run.
ONLY_SHOWN = "dry run: this is what would be done; nothing was"
#: Where a job has not been started before: how long a lost replica is away, in seconds.
TYPICAL_ABSENCE_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What would be done, to what, at what cost, and what speaks against it."""

    playbook: str
    version: int
    title: str
    node: dict[str, Any]
    #: {"key", "title", "disruptive", "does": the exact words of what it does}.
    steps: list[dict[str, Any]]
    #: {"id", "name", "replica"} of what runs on the node.
    jobs: list[dict[str, Any]]
    gpu_hours_at_stake: float
    money: str
    #: Why automation would not do it now; a person may all the same.
    objections: list[str]
    #: {"scope", "label", "limit", "used"} of the cluster's budgets.
    budgets: list[dict[str, Any]]
    mode: str
    #: How often the run went back before: a plan is approved for one turn.
    turn: int = 0
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def digest(self) -> str:
        """Over what is done and the world it rests on; numbers that move by themselves stay out."""
        fixed = {
            "playbook": self.playbook,
            "version": self.version,
            "steps": self.steps,
            "node": self.node,
            "jobs": self.jobs,
            "turn": self.turn,
        }
        text = json.dumps(fixed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def plan_of_order(node: Node, verb: str) -> Plan:
    """The dry run of a person's order. Raises Conflict for a verb that there is not."""
    playbook = NODE_ORDERS.get(verb)
    if playbook is None:
        raise Conflict(f"there is no order {verb!r}; one of {', '.join(NODE_ORDERS)}")
    plan = _plan(
        playbook,
        node,
        f"{verb.capitalize()} {node.name}",
        objections=limits.objections(node, job_id=_job_on(node)),
    )
    try:
        check_order(node, verb)
    except Conflict as conflict:
        plan.notes.insert(0, conflict.detail)
    return plan


def check_order(node: Node, verb: str) -> None:
    """Raises Conflict if there is no such order, or the node's state does not allow it."""
    if verb not in NODE_ORDERS:
        raise Conflict(f"there is no order {verb!r}; one of {', '.join(NODE_ORDERS)}")
    if node.state not in ORDER_STATES[verb]:
        allowed = ", ".join(sorted(state.label.lower() for state in ORDER_STATES[verb]))
        raise Conflict(
            f"{node.name} is {node.get_state_display().lower()}: it cannot be told to {verb}; "
            f"that is for nodes that are {allowed}"
        )


def plan_of_run(run: PlaybookRun, does: dict[str, Iterable[str]]) -> Plan:
    """What the rest of a run would do. `does` gives the exact words of its disruptive steps."""
    if run.node is None:
        raise ValueError(f"{run.playbook} has a disruptive step but no node")
    return _plan(
        run.playbook,
        run.node,
        run.title,
        objections=limits.objections(
            run.node, code=code_of(run), job_id=job_of(run, run.node), run=run
        ),
        version=run.version,
        does={key: list(words) for key, words in does.items()},
        turn=int(run.context.get("round", 0)),
    )


def code_of(run: PlaybookRun) -> str:
    """The failure code that a run acts upon: its own, or that of its incident."""
    incident: Incident | None = run.incident
    return str(run.context.get("code") or "") or (incident.code if incident else "")


def job_of(run: PlaybookRun, node: Node) -> str | None:
    """The job that the run's node is out for: the one on it, or the one whose replica was lost with
    it, also if another process has its place by now."""
    lost = Placement.objects.filter(pk=run.context.get("lost_placement", ""))
    return _job_on(node) or lost.values_list("replica__job_id", flat=True).first() or run.job_id


def _job_on(node: Node) -> str | None:
    placements = Placement.objects.filter(node=node, standby=False)
    alive = placements.exclude(state=PlacementState.ENDED)
    return alive.values_list("replica__job_id", flat=True).first()


def _plan(
    playbook: str,
    node: Node,
    title: str,
    *,
    objections: list[str],
    version: int = 0,
    does: dict[str, list[str]] | None = None,
    turn: int = 0,
) -> Plan:
    known = Playbook.objects.filter(pk=playbook).first()
    placements = list(
        Placement.objects.select_related("replica__job")
        .filter(node=node, standby=False)
        .exclude(state=PlacementState.ENDED)
    )
    at_stake = sum(
        p.replica.job.gpus_per_replica * _expected_absence_s(p) / 3600 for p in placements
    )
    return Plan(
        playbook=playbook,
        version=version or (known.version if known else 0),
        title=title,
        node={
            "id": node.pk,
            "name": node.name,
            "state": node.state,
            "boot_id": node.boot_id,
            "gpus": Gpu.objects.filter(node=node).count(),
        },
        steps=[step_of(step, node, does) for step in (known.steps if known else [])],
        jobs=[
            {
                "id": p.replica.job_id,
                "name": p.replica.job.name,
                "replica": p.replica.index,
                "placement": p.pk,
            }
            for p in placements
        ],
        gpu_hours_at_stake=round(at_stake, 4),
        money=f"{pricing.money(node.cluster, at_stake * 3600):.2f} {node.cluster.currency}",
        objections=objections,
        budgets=[
            {"scope": use.scope.value, "label": use.label, "limit": use.limit, "used": use.used}
            for use in limits.budgets_of(node.cluster)
        ],
        mode=limits.mode_of(node.cluster_id, playbook).value or Mode.AUTOMATIC.value,
        turn=turn,
        notes=_notes(node, placements, moves=playbook == NODE_ORDERS["drain"]),
    )


def step_of(step: dict[str, Any], node: Node, does: dict[str, list[str]] | None) -> dict[str, Any]:
    """A step as a plan shows it; `does` gives exact words in place of the playbook's own."""
    words = (does or {}).get(step["key"], step.get("does", []))
    return {
        "key": step["key"],
        "title": step["title"],
        "disruptive": step["disruptive"],
        "does": [line.replace("{node}", node.name) for line in words],
    }


def _notes(node: Node, placements: list[Placement], *, moves: bool) -> list[str]:
    notes = []
    if not node.reachable:
        notes.append(f"{node.name} is not heard: what its agent must do will wait or fail")
    for placement in placements:
        job = placement.replica.job
        if moves and job.whole:
            notes.append(
                f"{job.name} saves, ends, and resumes on another node first; it stands still "
                "meanwhile, and longer where none is free"
            )
            continue
        if moves:
            notes.append(
                f"replica {placement.replica.index} of {job.name} moves to another node first, "
                "with no loss; where none is free it is stopped, and returns when one is"
            )
            continue
        if job.whole:
            notes.append(
                f"{job.name} stands still, and goes on from its newest checkpoint once a node is "
                f"free in place of {node.name}"
            )
            continue
        notes.append(
            f"{job.name} loses replica {placement.replica.index}; its survivors take over, and it "
            "returns on a spare if one is free"
        )
    for job in node.coordinated_jobs.filter(state="running"):
        notes.append(f"{node.name} runs the coordinator of {job.name}")
    coming = node.placements.filter(standby=True).exclude(state=PlacementState.ENDED)
    for placement in coming.select_related("replica__job"):
        replica = placement.replica
        notes.append(
            f"a warm spare of {replica.job.name} ends"
            if placement.warm
            else f"the move of replica {replica.index} of {replica.job.name} is given up"
        )
    return notes


def _expected_absence_s(placement: Placement) -> float:
    """How long the job's replicas took to train after they were placed, the median."""
    earlier = Placement.objects.filter(
        replica__job=placement.replica.job, joined_at__isnull=False, warm=False
    ).values_list("created_at", "joined_at")
    times = sorted((joined - created).total_seconds() for created, joined in earlier if joined)
    return times[len(times) // 2] if times else TYPICAL_ABSENCE_S
