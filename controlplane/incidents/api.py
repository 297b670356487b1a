"""The API's incidents, runs, approvals, and what automation is allowed and told to do.

Nodes, spares, clusters and jobs gain here what concerns automation: orders, usable nodes, what
changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from django.db.models import Count, F, Min, Prefetch, Q, QuerySet
from django.http import QueryDict

from controlplane.accounts.access import Access
from controlplane.accounts.models import Actor
from controlplane.fleet import api as fleet
from controlplane.fleet.api import IN_CLUSTER, OF_NODE
from controlplane.fleet.models import Changed, Cluster, Node
from controlplane.fleet.selectors import clusters_for, nodes_for, racks_for
from controlplane.health.choices import Action, FaultClass, Urgency
from controlplane.health.models import Failure, Signal
from controlplane.health.serializers import FailureDetailSerializer, FailureSerializer
from controlplane.incidents import actions, limits, selectors
from controlplane.incidents.actions.job_end import end_job
from controlplane.incidents.actions.runs import lock_run
from controlplane.incidents.choices import (
    STEP_FINISHED,
    ApprovalState,
    CaseState,
    IncidentState,
    RunState,
    Severity,
    StepState,
)
from controlplane.incidents.models import (
    Approval,
    Breaker,
    Incident,
    Playbook,
    PlaybookMode,
    PlaybookRun,
    PlaybookStep,
    RmaCase,
)
from controlplane.incidents.move_plans import plan_move, plan_of_move
from controlplane.incidents.plans import plan_of_order
from controlplane.incidents.serializers import (
    ApprovalDetailSerializer,
    ApprovalSerializer,
    BreakerSerializer,
    Budgets,
    Changes,
    DecisionSerializer,
    IncidentDetailSerializer,
    IncidentSerializer,
    MaybeReasoned,
    NewLimit,
    NewMode,
    NewMove,
    NewNote,
    NewPostmortem,
    PlaybookDetailSerializer,
    PlaybookSerializer,
    RmaCaseDetailSerializer,
    RmaCaseSerializer,
    RunDetailSerializer,
    RunSerializer,
    Sending,
    Signature,
    StepDetailSerializer,
    StepSerializer,
    Timeline,
    TimelineEntrySerializer,
    UsableNodes,
    UsableNodeSerializer,
)
from controlplane.jobs import api as jobs
from controlplane.jobs import selectors as job_selectors
from controlplane.jobs.actions import reserve_spare
from controlplane.jobs.api import OF_JOB
from controlplane.jobs.models import Job, SpareReservation
from controlplane.jobs.serializers import NewReservation, SpareReservationSerializer
from controlplane.rest.filters import (
    Exact,
    Flag,
    Parameter,
    Reference,
    Search,
    Times,
    Whole,
    boolean,
    values_of,
    whole,
)
from controlplane.rest.resource import Resource, reading
from controlplane.rest.verbs import VerbAction, verb

#: Change numbers told in one answer at most.
CHANGES_WINDOW = 1000
NEWEST_SIGNALS = 20
MAX_TIMELINE = 500


# --- clusters, nodes and jobs, as automation sees them --------------------------------------------


class Clusters(fleet.Clusters):
    @reading(
        UsableNodes,
        path="usable-nodes",
        parameters=[
            Parameter("gpu_model", "Only with cards of this model.", {"type": "string"}),
            Parameter("rack", "Only in this rack, by id or name.", {"type": "string"}),
            Parameter("job", "For this job: what it holds and avoids counts.", {"type": "string"}),
            Parameter("spare", "Only spares, or only the others.", {"type": "boolean"}),
        ],
    )
    def usable_nodes(self, cluster: Cluster, query: QueryDict) -> Mapping[str, Any]:
        """Tell which nodes may take work now

        Available, heard, trusted; not on hold, drained, in maintenance, about to be taken out,
        reserved for others, or excluded for the job. Ask for changes after `change_seq`.
        """
        given = {name: values_of(query, name, many=False)[0] for name in query}
        job = None
        if "job" in given:
            visible = job_selectors.jobs_for(self.request.user).filter(cluster=cluster)
            job = self.referred(visible, given["job"], "job").pk
        nodes = selectors.usable_nodes(cluster.pk, job)
        if "gpu_model" in given:
            nodes = nodes.filter(pk__in=job_selectors.nodes_with(given["gpu_model"]))
        if "rack" in given:
            nodes = nodes.filter(Q(rack=given["rack"]) | Q(rack__name=given["rack"]))
        if "spare" in given:
            nodes = nodes.filter(spare=boolean("spare", given["spare"]))
        shown = nodes.annotate(
            rack_name=F("rack__name"), gpu_model=Min("gpus__model"), gpu_count=Count("gpus")
        )
        return {
            "change_seq": cluster.change_seq,
            "nodes": list(shown.values(*UsableNodeSerializer.Meta.fields)),
        }

    @reading(
        Changes,
        path="changes",
        parameters=[
            Parameter(
                "after",
                "The number up to which all is known; 0 for the beginning.",
                {"type": "integer", "minimum": 0, "maximum": 2**53},
            )
        ],
    )
    def changes(self, cluster: Cluster, query: QueryDict) -> Mapping[str, Any]:
        """Tell what was written after a number

        Each object stands once, with the number of its latest change. Numbers are in the order of
        commits, so nothing is missed by asking again after `seq`; where there is `more`, at once.
        """
        after = 0
        if "after" in query:
            after = whole("after", values_of(query, "after", many=False)[0], 0, 2**53)
        seq, rows = changed_after(cluster, after)
        return {
            "seq": seq,
            "more": seq < cluster.change_seq,
            "changes": [
                {"type": row.object_type, "id": row.object_id, "seq": row.seq, "url": _url_of(row)}
                for row in rows
            ],
        }

    @reading(Budgets, path="budgets")
    def budgets(self, cluster: Cluster, _query: QueryDict) -> Mapping[str, Any]:
        """Tell how much of the blast radius's limits is in use"""
        return {
            "budgets": [
                {
                    "scope": use.scope.value,
                    "label": use.label,
                    "limit": use.limit,
                    "used": use.used,
                    "left": use.left,
                }
                for use in limits.budgets_of(cluster)
            ]
        }

    @verb(access=Access.ADMIN, takes=NewLimit)
    def limits(self, actor: Actor, cluster: Cluster, order: dict[str, Any]) -> None:
        """Limit how many nodes automation may have out at once"""
        actions.set_limit(actor, cluster.pk, order["scope"], order["nodes"], order["reason"])


def changed_after(cluster: Cluster, after: int) -> tuple[int, list[Changed]]:
    """What was written after a number, and the number up to which that is all.

    Cut at a number, never between two objects of one change. `cluster` was read before.
    """
    newer = Changed.objects.filter(cluster=cluster, seq__gt=after, seq__lte=cluster.change_seq)
    cut = newer.order_by("seq").values_list("seq", flat=True)[CHANGES_WINDOW : CHANGES_WINDOW + 1]
    upto = next(iter(cut), cluster.change_seq)
    return upto, list(newer.filter(seq__lte=upto).order_by("seq", "pk"))


#: Where the objects of the audit trail are found; others are told without an address.
_LISTS = {
    "node": "nodes",
    "job": "jobs",
    "incident": "incidents",
    "run": "runs",
    "approval": "approvals",
    "breaker": "breakers",
    "rma": "rma-cases",
    "maintenance": "maintenance",
    "spare_reservation": "spare-reservations",
    "playbook": "playbooks",
}


def _url_of(row: Changed) -> str | None:
    folder = _LISTS.get(row.object_type)
    return f"/api/v1/{folder}/{row.object_id}" if folder else None


def _order(name: str, words: str, *, path: str | None = None) -> Any:
    """A verb of a node that becomes a run; its dry run shows the plan."""

    def operation(_view: Nodes, actor: Actor, node: Node, order: dict[str, Any]) -> PlaybookRun:
        return actions.order_node(actor, node.pk, name, order["reason"])

    operation.__name__ = name if path is None else f"{path}_node"
    operation.__doc__ = f"{words}\n\nThe answer is the run that does it. A dry run shows its plan."
    told: VerbAction = operation
    return verb(
        answers=RunSerializer,
        status=HTTPStatus.ACCEPTED,
        plan=partial(_plan, name),
        path=path,
    )(told)


def _plan(name: str, node: Node, _order: dict[str, Any]) -> Mapping[str, Any]:
    return plan_of_order(node, name).as_dict()


class Nodes(jobs.NodesToSpare):
    drain = _order("drain", "Empty a node, the scheduler's way")
    quarantine = _order("quarantine", "Take a node out, so that nothing lands on it")
    diagnose = _order("diagnose", "Run a node's diagnostics")
    reset = _order("reset", "Reset a node's GPUs")
    reboot = _order("reboot", "Reboot a node")
    return_node = _order("return", "Validate a node and give it back", path="return")
    retire = _order("retire", "Strike a node that is out off the fleet; its history stays")


class Spares(fleet.Spares):
    @verb(
        detail=False,
        takes=NewReservation,
        answers=SpareReservationSerializer,
        status=HTTPStatus.CREATED,
    )
    def reserve(self, actor: Actor, cluster: Cluster, order: dict[str, Any]) -> SpareReservation:
        """Keep a spare

        One that fits and is among the usable nodes is chosen; of two who ask at once each gets
        another. It is given back when its time is up, or when the job is placed on it.
        """
        user = self.request.user
        job, rack = order["job"], order["rack"]
        if job is not None:
            visible = job_selectors.jobs_for(user).filter(cluster=cluster)
            job = self.referred(visible, job, "job").pk
        if rack is not None:
            rack = self.referred(racks_for(user).filter(cluster=cluster), rack, "rack").pk
        return reserve_spare(
            actor,
            cluster.pk,
            holder=order["holder"],
            ttl_s=order["ttl_s"],
            reason=order["reason"],
            job_id=job,
            gpu_model=order["gpu_model"],
            rack_id=rack,
            among=selectors.usable_nodes(cluster.pk, job),
        )


def _plan_of_move(job: Job, order: dict[str, Any]) -> Mapping[str, Any]:
    move = plan_move(job, order["replica"], order["node"] or "", leaving=order["leaving"] or "")
    return plan_of_move(move).as_dict()


class Jobs(jobs.Jobs):
    @verb(answers=RunSerializer, status=HTTPStatus.ACCEPTED)
    def start(self, actor: Actor, job: Job, order: dict[str, Any]) -> PlaybookRun:
        """Have Drydock start a job

        For a job that was registered and that no scheduler starts: the agents of free nodes start
        its coordinator and its ranks. The answer is the run that does it; it waits for nodes.
        """
        return actions.start_registered(actor, job.pk, order["reason"])

    @verb(takes=NewMove, answers=RunSerializer, status=HTTPStatus.ACCEPTED, plan=_plan_of_move)
    def migrate(self, actor: Actor, job: Job, order: dict[str, Any]) -> PlaybookRun:
        """Move a replica of a running job to another node

        It trains on meanwhile: a second process follows it, and takes its place at a step's edge.
        No sample is lost. A job that restarts as a whole (`whole`) cannot be followed: it saves,
        ends, and resumes on the other node. The answer is the run that does it. A dry run shows
        its plan.
        """
        for field in ("node", "leaving"):
            if order[field] is not None:
                self.referred(nodes_for(self.request.user), order[field], field)
        return actions.move_replica(
            actor,
            job.pk,
            order["replica"],
            node_id=order["node"] or "",
            leaving=order["leaving"] or "",
            reason=order["reason"],
        )

    @verb()
    def end(self, actor: Actor, job: Job, order: dict[str, Any]) -> None:
        """End a job

        Its ranks leave at a step's edge. If Drydock started none it ends at once, and those that
        tell of themselves hear of it. Nothing brings it back.
        """
        end_job(actor, job.pk, order["reason"])


# --- failures and incidents -----------------------------------------------------------------------


class _OfClusters(Reference):
    """Of these clusters also what no node is blamed for."""

    def condition(self, _name: str, values: list[str]) -> Q:
        named = Cluster.objects.filter(Q(pk__in=values) | Q(name__in=values))
        return selectors.failed_in(named)


class Failures(Resource):
    noun, plural = "failure", "failures"
    queryset = Failure.objects.none()
    serializer_class = FailureSerializer
    detail_serializer_class = FailureDetailSerializer
    filters = (
        _OfClusters("cluster", id_prefix="clu_"),
        OF_NODE,
        Exact("gpu", "gpu_id"),
        Exact("job", "job_id"),
        Exact("code"),
        Exact("fault_class", choices=FaultClass),
        Exact("needed", choices=Action),
        Exact("urgency", choices=Urgency),
        Exact("rule"),
        Times("observed_at"),
        Search(["summary"]),
    )
    sorts = {"id": "pk", "observed_at": "observed_at", "code": "code"}

    def rows(self) -> QuerySet[Failure]:
        return selectors.failures_for(self.request.user)

    def detailed(self, rows: QuerySet[Failure]) -> QuerySet[Failure]:
        newest = Signal.objects.order_by("-observed_at")[:NEWEST_SIGNALS]
        return rows.prefetch_related(Prefetch("signals", newest, to_attr="newest_signals"))


class Incidents(Resource):
    noun, plural = "incident", "incidents"
    queryset = Incident.objects.none()
    serializer_class = IncidentSerializer
    detail_serializer_class = IncidentDetailSerializer
    filters = (
        IN_CLUSTER,
        OF_NODE,
        OF_JOB,
        Exact("state", choices=IncidentState),
        Exact("severity", choices=Severity),
        Exact("code"),
        Times("occurred_at"),
        Times("opened_at"),
        Search(["title"]),
    )
    sorts = {"id": "pk", "opened_at": "opened_at", "occurred_at": "occurred_at"}

    def rows(self) -> QuerySet[Incident]:
        return selectors.incidents_for(self.request.user)

    @reading(Timeline, path="timeline")
    def timeline(self, incident: Incident, _query: QueryDict) -> Mapping[str, Any]:
        """Tell an incident's story: its newest 500 lines, oldest first"""
        entries = list(incident.timeline.order_by("-at", "-id")[:MAX_TIMELINE])[::-1]
        return {"entries": TimelineEntrySerializer(entries, many=True).data}

    @verb(takes=MaybeReasoned)
    def acknowledge(self, actor: Actor, incident: Incident, order: dict[str, Any]) -> None:
        """Say that you have seen an incident, and own it"""
        actions.acknowledge(actor, incident.pk)
        if order["reason"]:
            actions.add_note(actor, incident.pk, order["reason"])

    @verb(takes=NewNote)
    def note(self, actor: Actor, incident: Incident, order: dict[str, Any]) -> None:
        """Add a note to an incident's timeline"""
        actions.add_note(actor, incident.pk, order["text"])

    @verb(takes=NewPostmortem)
    def postmortem(self, actor: Actor, incident: Incident, order: dict[str, Any]) -> None:
        """Save an incident's post-mortem

        `edited` names the text that you have read; if it is another by now, a conflict.
        """
        actions.save_postmortem(actor, incident.pk, order["text"], edited=order["edited"])

    @verb(path="bring-back")
    def bring_back(self, actor: Actor, incident: Incident, order: dict[str, Any]) -> None:
        """Have a replica brought back after all whose run was called off

        A conflict if none is away, or while a run brings it back.
        """
        actions.bring_back_missed(actor, incident.pk, order["reason"])

    @verb(takes=MaybeReasoned)
    def close(self, actor: Actor, incident: Incident, order: dict[str, Any]) -> None:
        """Close a resolved incident, of which the post-mortem is complete"""
        actions.close_incident(actor, incident.pk, order["reason"])

    @verb()
    def resolve(self, actor: Actor, incident: Incident, order: dict[str, Any]) -> None:
        """Resolve an incident by hand

        A conflict while a run of it is at work: cancel that first.
        """
        actions.resolve_by_hand(actor, incident.pk, order["reason"])


# --- runs, steps, decisions, approvals ------------------------------------------------------------


class Runs(Resource):
    noun, plural = "run", "runs"
    queryset = PlaybookRun.objects.none()
    serializer_class = RunSerializer
    detail_serializer_class = RunDetailSerializer
    filters = (
        IN_CLUSTER,
        OF_NODE,
        OF_JOB,
        Reference("incident"),
        Exact("playbook"),
        Exact("state", choices=RunState),
        Times("created_at"),
        Search(["title"]),
    )
    sorts = {"id": "pk", "created_at": "created_at", "deadline": "deadline"}
    volatile = ("steps", "deadline")  # they move while nobody does anything

    def rows(self) -> QuerySet[PlaybookRun]:
        return selectors.runs_for(self.request.user).prefetch_related(None)

    def detailed(self, rows: QuerySet[PlaybookRun]) -> QuerySet[PlaybookRun]:
        return rows.prefetch_related("steps")

    def lock(self, target: PlaybookRun) -> None:
        """Incident before run, as cancelling does."""
        lock_run(target.pk)

    @verb()
    def pause(self, actor: Actor, run: PlaybookRun, order: dict[str, Any]) -> None:
        """Pause a run before its next step"""
        actions.pause_run(actor, run.pk, order["reason"])

    @verb()
    def resume(self, actor: Actor, run: PlaybookRun, order: dict[str, Any]) -> None:
        """Let a run go on that is paused or waits for a person"""
        actions.resume_run(actor, run.pk, order["reason"])

    @verb()
    def cancel(self, actor: Actor, run: PlaybookRun, order: dict[str, Any]) -> None:
        """Stop a run where it stands; what is done stays done"""
        actions.call_off(actor, run.pk, order["reason"])


class Steps(Resource):
    noun, plural = "step", "steps"
    queryset = PlaybookStep.objects.none()
    serializer_class = StepSerializer
    detail_serializer_class = StepDetailSerializer
    filters = (
        Reference("cluster", "run__cluster", id_prefix="clu_"),
        Reference("run"),
        Exact("playbook", "run__playbook"),
        Exact("key"),
        Exact("state", choices=StepState),
        Flag("disruptive", Q(disruptive=True), "Only those that disrupt work, or the others."),
        Whole("position"),
    )
    cluster_path = "run.cluster_id"

    def rows(self) -> QuerySet[PlaybookStep]:
        return selectors.steps_for(self.request.user)


class Decisions(Resource):
    """Steps that came to something: what automation decided or did, and what it knew."""

    noun, plural = "decision", "decisions"
    queryset = PlaybookStep.objects.none()
    serializer_class = DecisionSerializer
    filters = (
        Reference("cluster", "run__cluster", id_prefix="clu_"),
        Reference("incident", "run__incident"),
        Reference("node", "run__node", id_prefix="nod_"),
        Reference("job", "run__job", id_prefix="job_"),
        Exact("playbook", "run__playbook"),
        Times("finished_at"),
    )
    sorts = {"finished_at": "finished_at"}
    default_sort = "-finished_at"
    cluster_path = "run.cluster_id"

    def rows(self) -> QuerySet[PlaybookStep]:
        told = [*STEP_FINISHED, StepState.FAILED]
        steps = selectors.steps_for(self.request.user).exclude(outcome="")
        return steps.filter(state__in=told, finished_at__isnull=False)


class Approvals(Resource):
    noun, plural = "approval", "approvals"
    queryset = Approval.objects.none()
    serializer_class = ApprovalSerializer
    detail_serializer_class = ApprovalDetailSerializer
    filters = (
        IN_CLUSTER,
        Reference("run"),
        Exact("state", choices=ApprovalState),
        Times("requested_at"),
    )
    sorts = {"id": "pk", "requested_at": "requested_at"}

    def rows(self) -> QuerySet[Approval]:
        return selectors.approvals_for(self.request.user)

    def lock(self, target: Approval) -> None:
        """Its run before it, as signing does."""
        lock_run(target.run_id)
        super().lock(target)

    @verb(takes=Signature)
    def approve(self, actor: Actor, approval: Approval, order: dict[str, Any]) -> None:
        """Sign a plan

        `digest` names the plan that you have read; if it is another by now, nothing is approved.
        """
        actions.approve(actor, approval.pk, order["digest"], order["reason"])

    @verb()
    def reject(self, actor: Actor, approval: Approval, order: dict[str, Any]) -> None:
        """Refuse a plan; its run is cancelled"""
        actions.reject(actor, approval.pk, order["reason"])


# --- what limits automation, and cards that go back -----------------------------------------------


class Playbooks(Resource):
    noun, plural = "playbook", "playbooks"
    queryset = Playbook.objects.none()
    serializer_class = PlaybookSerializer
    detail_serializer_class = PlaybookDetailSerializer
    filters = (Exact("name"), Search(["name", "summary"]))
    sorts = {"name": "pk"}
    default_sort = "name"
    cluster_path = ""

    def rows(self) -> QuerySet[Playbook]:
        return Playbook.objects.all()

    def context_of(self, rows: Sequence[Playbook]) -> dict[str, Any]:
        clusters = list(clusters_for(self.request.user).values_list("pk", "name"))
        modes = PlaybookMode.objects.filter(
            cluster__in=[pk for pk, _ in clusters], playbook__in=[row.pk for row in rows]
        )
        return {
            "clusters": clusters,
            "modes": {
                (playbook, cluster): mode
                for playbook, cluster, mode in modes.values_list("playbook", "cluster", "mode")
            },
        }

    @verb(access=Access.ADMIN, takes=NewMode)
    def mode(self, actor: Actor, playbook: Playbook, order: dict[str, Any]) -> None:
        """Say how far a playbook may go by itself in a cluster"""
        actions.set_mode(actor, order["cluster"].pk, playbook.pk, order["mode"], order["reason"])


class Breakers(Resource):
    noun, plural = "breaker", "breakers"
    queryset = Breaker.objects.none()
    serializer_class = BreakerSerializer
    filters = (
        IN_CLUSTER,
        Exact("code"),
        Flag("closed", ~Q(closed_at=None), "Only those that a person closed, or the open ones."),
        Times("opened_at"),
    )
    sorts = {"id": "pk", "opened_at": "opened_at"}

    def rows(self) -> QuerySet[Breaker]:
        return selectors.breakers_for(self.request.user)

    @verb()
    def close(self, actor: Actor, breaker: Breaker, order: dict[str, Any]) -> None:
        """Let automation act on a failure code again"""
        actions.close_breaker(actor, breaker.pk, order["reason"])


class RmaCases(Resource):
    noun, plural = "RMA case", "RMA cases"
    queryset = RmaCase.objects.none()
    serializer_class = RmaCaseSerializer
    detail_serializer_class = RmaCaseDetailSerializer
    filters = (
        IN_CLUSTER,
        OF_NODE,
        Exact("gpu", "gpu_id"),
        Exact("state", choices=CaseState),
        Times("opened_at"),
    )
    sorts = {"id": "pk", "opened_at": "opened_at"}

    def rows(self) -> QuerySet[RmaCase]:
        return selectors.rma_cases_for(self.request.user)

    @verb(takes=Sending)
    def send(self, actor: Actor, case: RmaCase, order: dict[str, Any]) -> None:
        """Note that the vendor has a card"""
        actions.send_case(actor, case.pk, order["vendor_reference"], order["reason"])

    @verb()
    def close(self, actor: Actor, case: RmaCase, order: dict[str, Any]) -> None:
        """End a case"""
        actions.close_case(actor, case.pk, order["reason"])
