"""The move of a replica to another node, before it is ordered: may it, where to, at what price.

Reads only. The order and its dry run ask here, so that what is shown is what is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.utils import timezone

from controlplane.accounts.selectors import username
from controlplane.errors import Conflict
from controlplane.fleet.models import Gpu, Node
from controlplane.incidents import limits, pricing
from controlplane.incidents.candidates import free_nodes, wanted_by
from controlplane.incidents.choices import RUN_UNFINISHED
from controlplane.incidents.models import Playbook, PlaybookRun
from controlplane.incidents.plans import Plan, step_of
from controlplane.jobs.accounting import median_step_s
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState
from controlplane.jobs.models import Job, Placement, Replica
from workers.placement import Candidate, choose_spare
from workers.recovery import expected_start_s

PLAYBOOK = "move-replica"
#: The same for a job that lives and dies as one, which stands still while it moves.
AS_WHOLE = "move-job"
#: So long it may take to end its step and to save, in seconds; then it is killed.
SAVE_S = 300.0


@dataclass(frozen=True)
class Move:
    """A replica's way from the process that trains to a second one on another node."""

    replica: Replica
    before: Placement
    target: Node
    #: Why it goes there.
    why: str

    @property
    def playbook(self) -> str:
        return AS_WHOLE if self.replica.job.whole else PLAYBOOK

    @property
    def title(self) -> str:
        if self.replica.job.nodes_per_replica > 1:
            where = f"{self.before.node.name} to {self.target.name}"
            return f"Move {self.replica.job.name} from {where}"
        if self.replica.job.whole:
            return f"Move {self.replica.job.name} to {self.target.name}"
        return f"Move replica {self.replica.index} of {self.replica.job.name} to {self.target.name}"


def plan_move(job: Job, index: int, node_id: str = "", *, leaving: str = "") -> Move:
    """How this replica would move now, to this node or else to the one that suits it best.

    `leaving`: of a replica on several nodes the one that it is to leave. Raises Conflict if it
    cannot be moved, or not there.
    """
    before = _movable(job, index, leaving)
    candidates = _candidates(job, before)
    if node_id:
        target = Node.objects.select_related("lease", "rack").get(pk=node_id)
        if node_id not in [one.node_id for one in candidates]:
            raise Conflict(f"{target.name} cannot take replica {index}: {_why_not(target, before)}")
        return Move(before.replica, before, target, "chosen by whoever ordered it")
    racks = Placement.objects.filter(replica__job=job, standby=False).exclude(
        state=PlacementState.ENDED
    )
    others = racks.exclude(replica=before.replica).values_list("node__rack__name", flat=True)
    choice = choose_spare(
        candidates, [rack or "" for rack in others], wanted_by(before.node, job.gpus_per_node)
    )
    if choice is None:
        raise Conflict(
            f"no node is free that replica {index} of {job.name} fits on; "
            "free one, or wait until a repair has ended"
        )
    target = Node.objects.select_related("lease", "rack").get(pk=choice.node_id)
    return Move(before.replica, before, target, choice.reason)


def targets_of(job: Job, index: int, *, leaving: str = "") -> list[Candidate]:
    """The nodes that this replica could be moved to, by name. Raises Conflict if it cannot be."""
    return sorted(_candidates(job, _movable(job, index, leaving)), key=lambda one: one.name)


def plan_of_move(move: Move) -> Plan:
    """The dry run of a move."""
    job, target, before = move.replica.job, move.target, move.before
    known = Playbook.objects.filter(pk=move.playbook).first()
    pause_s = _absence_s(job) if job.whole else median_step_s(job, timezone.now())
    at_stake = pause_s * job.gpus_per_replica * job.world_replicas
    return Plan(
        playbook=move.playbook,
        version=known.version if known else 0,
        title=move.title,
        node={
            "id": target.pk,
            "name": target.name,
            "state": target.state,
            "boot_id": target.boot_id,
            "gpus": Gpu.objects.filter(node=target).count(),
        },
        steps=[step_of(step, target, None) for step in (known.steps if known else [])],
        jobs=[
            {
                "id": job.pk,
                "name": job.name,
                "replica": move.replica.index,
                "placement": before.pk,
            }
        ],
        gpu_hours_at_stake=round(at_stake / 3600, 4),
        money=f"{pricing.money(target.cluster, at_stake):.2f} {target.cluster.currency}",
        objections=[],
        budgets=[],
        mode=limits.mode_of(job.cluster_id, move.playbook).value,
        notes=_notes(move, pause_s),
    )


def _notes(move: Move, pause_s: float) -> list[str]:
    index, there, here = move.replica.index, move.target.name, move.before.node
    if move.replica.job.whole:
        return _notes_as_whole(move, pause_s)
    pause = f"about a step, {pause_s:.2g} s" if pause_s else "about a step"
    notes = [
        f"{there} starts a second process of replica {index}: {move.why}",
        "all replicas train on while it takes the state from their memory and follows them",
        f"at a step's edge it takes the place of the process on {here.name}: no sample is lost, "
        f"and the job pauses for {pause}",
        f"{here.name} is free once that process has ended",
    ]
    return notes + _reset_of(here)


def _notes_as_whole(move: Move, pause_s: float) -> list[str]:
    name, there, here = move.replica.job.name, move.target.name, move.before.node
    others = [one.node.name for one in move.replica.alive if one.pk != move.before.pk]
    end, begin = ", ".join([here.name, *others]), ", ".join([there, *others])
    s = "" if others else "s"
    notes = [
        f"{name} restarts as a whole: no second process can follow it while it trains",
        "it saves a checkpoint first",
        f"{end} tell{s} it to end, which it does at its next edge; if it has not after "
        f"{SAVE_S:g} s it is killed, and goes on from that checkpoint",
        f"then {begin} start{s} it, and it goes on from there: {move.why}",
        f"it stands still meanwhile, for about {pause_s:.0f} s",
    ]
    return notes + _reset_of(here)


def _reset_of(here: Node) -> list[str]:
    if not here.reset_pending:
        return []
    return [f"{here.name} is idle then, and its cards are reset: {here.reset_pending}"]


def _absence_s(job: Job) -> float:
    """How long it usually takes from its start to its first step."""
    earlier = Placement.objects.filter(replica__job=job, joined_at__isnull=False, warm=False)
    taken = [(p.joined_at - p.created_at).total_seconds() for p in earlier if p.joined_at]
    return expected_start_s(taken)


def _movable(job: Job, index: int, leaving: str) -> Placement:
    """The process of this replica that trains, on the node that it leaves. Raises Conflict if it
    cannot be moved."""
    if job.state != JobState.RUNNING:
        state = job.get_state_display().lower()
        raise Conflict(f"{job.name} is {state}; only a replica of a running job can be moved")
    if not job.coordinator_address:
        raise Conflict(
            f"the ranks of {job.name} are started by its own scheduler, not by Drydock; "
            "have that move them"
        )
    replica = job.replicas.filter(index=index).first()
    if replica is None:
        raise Conflict(f"{job.name} has no replica {index}; it has {job.world_replicas}")
    subjects = [f"{playbook}/{job.pk}/{index}" for playbook in (PLAYBOOK, AS_WHOLE)]
    runs = PlaybookRun.objects.filter(subject__in=subjects, state__in=sorted(RUN_UNFINISHED))
    under_way = runs.first()
    if under_way is not None:
        raise Conflict(f"“{under_way.title}” is under way; wait for it, or cancel it")
    alive = replica.placements.select_related("node__rack", "node__cluster", "replica__job")
    trains = alive.filter(state=PlacementState.RUNNING, standby=False).order_by("node_rank")
    names = ", ".join(f"{one.node.name} ({one.node_id})" for one in trains)
    if job.nodes_per_replica > 1 and not leaving:
        raise Conflict(
            f"replica {index} of {job.name} is on several nodes; say in `leaving` which it is to "
            f"leave: {names}"
        )
    before = (trains.filter(node_id=leaving) if leaving else trains).first()
    if before is None and leaving and trains:
        raise Conflict(f"replica {index} of {job.name} is not on that node; it is on {names}")
    if before is None or replica.state != ReplicaState.ACTIVE:
        raise Conflict(
            f"replica {index} of {job.name} is {replica.get_state_display().lower()}; "
            "only one that trains can be moved"
        )
    return before


def _candidates(job: Job, before: Placement) -> list[Candidate]:
    """The free nodes with enough cards; where a report has not come, none are known to lack."""
    wanted = wanted_by(before.node, job.gpus_per_node)
    return [one for one in free_nodes(job.cluster_id, job.pk) if one.has(wanted.gpus)]


def _why_not(node: Node, before: Placement) -> str:
    job = before.replica.job
    if before.replica.alive.filter(node=node).exists():
        return "it runs there already"
    if node.cluster_id != job.cluster_id:
        return f"it is not in the cluster of {job.name}"
    if node.state != "available":
        return f"it is {node.get_state_display().lower()}; only an available node takes work"
    if not node.reachable:
        return "it is not heard"
    if node.hold_reason:
        return f"it is on hold: {node.hold_reason}"
    if node.drained_by:
        return f"it was drained by {username(node.drained_by)}"
    exclusion = node.exclusions.filter(job=job).first()
    if exclusion is not None:
        return f"{job.name} is kept from it: {exclusion.reason}"
    if limits.maintenance_of(node).exists():
        return "it is in maintenance"
    cards = Gpu.objects.filter(node=node).count()
    if cards and cards < job.gpus_per_node:
        return f"it has {cards} cards, and the replica needs {job.gpus_per_node}"
    return "it is reserved, or about to be taken out"
