"""The API's jobs, replicas, checkpoints, and what schedulers hold for jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from django.db.models import Q, QuerySet
from django.http import QueryDict

from controlplane.accounts.models import Actor
from controlplane.fleet.api import IN_CLUSTER, OF_NODE, Nodes
from controlplane.fleet.models import Cluster, Node
from controlplane.fleet.selectors import nodes_for
from controlplane.jobs import actions, durability, selectors
from controlplane.jobs.choices import JobState, ReplicaState, Tier
from controlplane.jobs.models import (
    Checkpoint,
    Directive,
    Job,
    NodeExclusion,
    Replica,
    SpareReservation,
)
from controlplane.jobs.serializers import (
    CheckpointSerializer,
    DirectiveSerializer,
    ExclusionSerializer,
    JobDetailSerializer,
    JobSerializer,
    LedgerPage,
    LedgerRangeSerializer,
    NewDirective,
    NewExclusion,
    NewJob,
    Progress,
    ReplicaSerializer,
    SpareReservationSerializer,
    WarmSpares,
)
from controlplane.rest.filters import Exact, Flag, Parameter, Reference, Search, Times, Whole
from controlplane.rest.pagination import DEFAULT_LIMIT, MAX_LIMIT, page_of
from controlplane.rest.resource import ID_PATTERN, Resource, reading
from controlplane.rest.verbs import verb

OF_JOB = Reference("job", id_prefix="job_")


class Jobs(Resource):
    noun, plural = "job", "jobs"
    queryset = Job.objects.none()
    serializer_class = JobSerializer
    detail_serializer_class = JobDetailSerializer
    filters = (
        IN_CLUSTER,
        Exact("state", choices=JobState),
        Exact("name"),
        Exact("program"),
        Times("created_at"),
        Search(["name"]),
    )
    sorts = {"id": "pk", "name": "name", "created_at": "created_at", "step": "step"}
    volatile = (
        *("step", "step_at", "epoch", "loss", "samples_per_s", "ledger_step"),
        "failing_tiers",
    )

    def rows(self) -> QuerySet[Job]:
        return selectors.jobs_for(self.request.user)

    def detailed(self, rows: QuerySet[Job]) -> QuerySet[Job]:
        return selectors.with_placements(rows)

    def context_of(self, rows: Sequence[Job]) -> dict[str, Any]:
        return {"failing_tiers": durability.failing_tiers_of(rows)}

    @verb(detail=False, takes=NewJob, status=HTTPStatus.CREATED)
    def create(self, actor: Actor, cluster: Cluster, order: dict[str, Any]) -> Job:
        """Register a job

        It is known from then on, with its replicas pending; whoever schedules it starts it.
        """
        return actions.register(actor, cluster_id=cluster.pk, **order)

    @reading(
        LedgerPage,
        path="ledger",
        parameters=[
            Parameter(
                "limit",
                "How many ranges at most.",
                {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
            ),
            Parameter("cursor", "As found in next or previous.", {"type": "string"}),
        ],
    )
    def ledger(self, job: Job, _query: QueryDict) -> Mapping[str, Any]:
        """Tell a job's sample ledger, in the order of its steps

        Which replica computed which shards of each committed step, what was lost, duplicated or
        dropped, and the running proof: `python -m runtime.ledger` checks the answer.
        """
        sorts = {"step_from": "step_from"}
        page = page_of(self.request, selectors.ledger_of(job), sorts, "step_from")
        shown = LedgerRangeSerializer(page.rows, many=True).data
        return {"results": shown, "next": page.next, "previous": page.previous}

    @verb(takes=Progress)
    def progress(self, actor: Actor, job: Job, order: dict[str, Any]) -> None:
        """Tell how far a job is

        For jobs whose ranks do not report by themselves; where they do, this is a conflict. What is
        older than what is known changes nothing. It is an observation: the audit trail keeps only
        the change of state that it brings.
        """
        actions.record_progress(actor, job.pk, **order)

    @verb(takes=WarmSpares, path="warm-spares")
    def warm_spares(self, actor: Actor, job: Job, order: dict[str, Any]) -> None:
        """Say how many warm spares a job is to have

        Each is a process on a node of its own that holds the job's state, and takes the place of
        whichever replica dies within a step. What is too much is ended, what lacks is started once
        a node is free.
        """
        actions.set_warm_spares(actor, job.pk, order["count"], order["reason"])

    @verb(takes=NewDirective, answers=DirectiveSerializer, status=HTTPStatus.CREATED)
    def directives(self, actor: Actor, job: Job, order: dict[str, Any]) -> Directive:
        """Give an order to a job's ranks

        They obey it once, at a step's edge, if they hear of it before it expires. Of a job that
        does not run, or of which only its scheduler tells, nobody would: that is a conflict.
        """
        selectors.demand_ranks(job)
        return actions.direct(
            actor, job.pk, order["verb"], ttl_s=order["ttl_s"], reason=order["reason"]
        )

    @verb(takes=NewExclusion, answers=ExclusionSerializer, status=HTTPStatus.CREATED)
    def exclusions(self, actor: Actor, job: Job, order: dict[str, Any]) -> NodeExclusion:
        """Keep a job from a node

        It is not placed there from now on; what runs there already goes on.
        """
        node = self.referred(nodes_for(self.request.user), order["node"], "node")
        return actions.exclude_node(actor, job.pk, node.pk, order["reason"])

    @verb(method="delete", path=f"exclusions/(?P<node>{ID_PATTERN})")
    def include(self, actor: Actor, job: Job, order: dict[str, Any]) -> None:
        """Let a job use a node again"""
        actions.include_node(actor, job.pk, order["node"], order["reason"])


class Replicas(Resource):
    noun, plural = "replica", "replicas"
    queryset = Replica.objects.none()
    serializer_class = ReplicaSerializer
    filters = (
        Reference("cluster", "job__cluster", id_prefix="clu_"),
        OF_JOB,
        Exact("state", choices=ReplicaState),
        Whole("index"),
        Times("state_since"),
    )
    sorts = {"id": "pk", "index": "index", "state_since": "state_since"}
    cluster_path = "job.cluster_id"

    def rows(self) -> QuerySet[Replica]:
        return selectors.replicas_for(self.request.user)


class Checkpoints(Resource):
    noun, plural = "checkpoint", "checkpoints"
    queryset = Checkpoint.objects.none()
    serializer_class = CheckpointSerializer
    filters = (
        Reference("cluster", "job__cluster", id_prefix="clu_"),
        OF_JOB,
        Exact("tier", choices=Tier),
        Whole("step", most=2**53),
        Times("at"),
    )
    sorts = {"id": "pk", "at": "at", "step": "step"}
    cluster_path = "job.cluster_id"

    def rows(self) -> QuerySet[Checkpoint]:
        return selectors.checkpoints_for(self.request.user)


class Exclusions(Resource):
    noun, plural = "exclusion", "exclusions"
    queryset = NodeExclusion.objects.none()
    serializer_class = ExclusionSerializer
    filters = (Reference("cluster", "job__cluster", id_prefix="clu_"), OF_JOB, OF_NODE)
    sorts = {"id": "pk", "created_at": "created_at"}
    cluster_path = "job.cluster_id"

    def rows(self) -> QuerySet[NodeExclusion]:
        return selectors.exclusions_for(self.request.user)


class SpareReservations(Resource):
    noun, plural = "reservation of a spare", "reservations of spares"
    queryset = SpareReservation.objects.none()
    serializer_class = SpareReservationSerializer
    filters = (
        IN_CLUSTER,
        OF_NODE,
        OF_JOB,
        Exact("holder"),
        Flag("released", ~Q(released_at=None), "Only those that are over, or only the others."),
    )
    sorts = {"id": "pk", "expires_at": "expires_at"}

    def rows(self) -> QuerySet[SpareReservation]:
        return selectors.reservations_for(self.request.user)

    @verb()
    def release(self, actor: Actor, reservation: SpareReservation, order: dict[str, Any]) -> None:
        """Give a spare back before its time"""
        actions.release_spare(actor, reservation.pk, order["reason"])


class NodesToSpare(Nodes):
    @verb()
    def spare(self, actor: Actor, node: Node, order: dict[str, Any]) -> None:
        """Keep a node free as a spare

        A conflict unless it is available: for a node that is free and in service.
        """
        actions.make_spare(actor, node.pk, order["reason"])

    @verb()
    def unspare(self, actor: Actor, node: Node, order: dict[str, Any]) -> None:
        """Give a spare to the common pool

        A conflict while it is reserved: release that first.
        """
        actions.unmake_spare(actor, node.pk, order["reason"])
