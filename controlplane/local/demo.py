"""What the control plane is told of the simulated fleet: users, clusters, nodes, the demo job.

Talks to the database only, through the same actions that people and agents use.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from django.db.models import Q
from django.utils import timezone

from controlplane.accounts import actions as accounts
from controlplane.accounts.models import SYSTEM, User
from controlplane.fleet import actions as fleet_actions
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Node
from controlplane.incidents import actions as incidents
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JOB_ACTIVE, JobState
from controlplane.jobs.models import Job
from controlplane.local import fleet, runfile
from controlplane.local.fleet import MAIN_CLUSTER, NodePlan
from controlplane.local.up import CHANGED
from node_agent.bmc import USER as BMC_USER

ADMIN = "admin"
JOB_NAME = "gpt-demo"
REPLICAS = 4
#: Ranks give way to the product, once they train: a replacement starts at full speed.
RANK_NICE = 10
JOIN_TOKEN_S = 3600.0
NOT_STARTED = "not started: `make up` was given fewer nodes"
ENROL_DEADLINE_S = 60.0
ADMISSION_DEADLINE_S = 120.0
FIRST_STEPS_DEADLINE_S = 180.0
#: For how long after our own start no node is declared dead, in seconds: they start after us.
BOOT_GRACE_S = 60.0

Say = Callable[[str], None]

UNTESTED = (NodeState.ENROLLED, NodeState.VALIDATING)
#: What a person keeps out of service, and what nothing need be waited for.
TAKEN_OUT = Q(state=NodeState.RETIRED) | Q(key_revoked_at__isnull=False) | ~Q(hold_reason="")


class DemoError(Exception):
    """The demo did not get where it should; the message says what to look at."""


def ensure_admin(home: Path) -> None:
    """Make the first user, with a password that only the home's owner can read. Notes whether that
    password lets anyone in by now: it may have been set anew, or the user switched off."""
    password_file = home / "admin-password"
    if not password_file.exists():
        runfile.write_private(password_file, secrets.token_urlsafe(12))
    password = password_file.read_text()
    admin = User.objects.filter(username=ADMIN).first()
    if admin is None:
        admin = accounts.create_user(SYSTEM, ADMIN, password, superuser=True)
    if admin.is_active and admin.check_password(password):
        (home / CHANGED).unlink(missing_ok=True)
    else:
        (home / CHANGED).touch()


def believe_all_alive() -> None:
    """The nodes of this machine were stopped with us: their silence says nothing of them."""
    fleet_actions.extend_leases(BOOT_GRACE_S)


def choose_nodes(home: Path, plans: list[NodePlan]) -> None:
    """Let the simulated fleet be this run's nodes: those that stay off are held, so nobody misses
    them. A person's hold stays as it is, and a node that this home does not simulate as well."""
    wanted = {plan.name for plan in plans}
    for plan, node in _rows(fleet.made(home)):
        if plan.name not in wanted and not node.hold_reason:
            fleet_actions.set_hold(SYSTEM, node.pk, NOT_STARTED)
        elif plan.name in wanted and node.hold_reason == NOT_STARTED:
            fleet_actions.set_hold(SYSTEM, node.pk, "")


def resume() -> None:
    """Take up what the last run of the product left, before anything is started.

    The fleet went down with it: no rank is alive, and no node's silence means anything yet. Jobs
    that our agents ran are started anew as a whole, from their newest checkpoint, once their nodes
    are heard again; what nobody had started stays so.
    """
    fleet_actions.extend_leases(ENROL_DEADLINE_S)
    going_on = Q(state=JobState.STARTING) | Q(state=JobState.RUNNING)
    # One without a coordinator is still to be started by a person, or is another scheduler's.
    ours = Q(state=JobState.STARTING) | ~Q(coordinator_address="")
    for job in Job.objects.filter(going_on & ours):
        incidents.restart_job(SYSTEM, job.pk, reason="the machine was stopped")


def ensure_clusters(nodes: list[NodePlan]) -> None:
    """Make the clusters, and a join token for the nodes that have not enrolled yet."""
    for name in sorted({node.cluster for node in nodes}):
        cluster = Cluster.objects.filter(name=name).first()
        if cluster is None:
            cluster = fleet_actions.create_cluster(SYSTEM, name)
        known = set(cluster.nodes.values_list("name", flat=True))
        strangers = [node for node in nodes if node.cluster == name and node.name not in known]
        if strangers:
            token = fleet_actions.create_join_token(
                SYSTEM, cluster.pk, max_uses=len(strangers), ttl_s=JOIN_TOKEN_S
            )
            for node in strangers:
                runfile.write_private(node.join_token, token)


def admit_fleet(plans: list[NodePlan], say: Say) -> None:
    """Wait until all nodes have enrolled, introduce each once, and await that they are admitted.

    Those that a person took out are waited for nowhere. Raises DemoError when one comes too late;
    the others have been introduced by then.
    """
    try:
        _await_enrolment(plans, say)
    finally:
        _introduce(plans)
    _await_admission([node.pk for _, node in _rows(plans) if node.state in UNTESTED], say)


def start_job(say: Say) -> Job:
    """Start the demo job, unless it is being resumed already; return once it trains.

    One that was ended is somebody's decision, and is left alone.
    """
    job = Job.objects.filter(name=JOB_NAME, cluster__name=MAIN_CLUSTER).first()
    if job is None:
        cluster = Cluster.objects.get(name=MAIN_CLUSTER)
        job = jobs.register(
            SYSTEM,
            cluster_id=cluster.pk,
            name=JOB_NAME,
            program="train-gpt",
            world_replicas=REPLICAS,
            options={"nice": RANK_NICE},
        )
    if job.state == JobState.PENDING:
        incidents.start_job(SYSTEM, job.pk)
    elif job.state not in JOB_ACTIVE:
        say(
            f"{job.name} is {job.get_state_display().lower()}: it is left alone (`make reset` "
            "begins anew, without what was recorded)"
        )
        return job
    return _await_first_steps(job, say)


def _on_record(plans: list[NodePlan]) -> Q:
    """Of a node: that it is one of these. Another cluster may have a namesake."""
    clusters = {plan.cluster for plan in plans}
    return Q(cluster__name__in=clusters, name__in=[plan.name for plan in plans])


def _rows(plans: list[NodePlan]) -> list[tuple[NodePlan, Node]]:
    """Those of the plans that are on record and have not retired."""
    nodes = Node.objects.filter(_on_record(plans)).exclude(state=NodeState.RETIRED)
    known = {node.name: node for node in nodes}
    return [(plan, known[plan.name]) for plan in plans if plan.name in known]


def _introduce(plans: list[NodePlan]) -> None:
    """Tell of each node which is a spare, and where its management controller answers."""
    for plan, node in _rows(plans):
        if plan.spare and not node.bmc_url:
            fleet_actions.set_spare(SYSTEM, node.pk, True)
        url = f"http://127.0.0.1:{plan.bmc_port}"
        if (node.bmc_url, node.bmc_username) != (url, BMC_USER):
            fleet_actions.set_bmc(SYSTEM, node.pk, url, BMC_USER, plan.bmc_password)


def _await_enrolment(plans: list[NodePlan], say: Say) -> None:
    since = timezone.now()  # a lease of the run before says nothing

    def enrolled() -> tuple[int, int]:
        nodes = Node.objects.filter(_on_record(plans))
        awaited = nodes.exclude(TAKEN_OUT)
        heard = awaited.filter(lease__last_beat_at__gte=since, lease__reachable=True)
        return heard.count(), len(plans) - nodes.filter(TAKEN_OUT).count()

    _await_count(enrolled, "nodes enrolled", ENROL_DEADLINE_S, say)


def _await_admission(node_ids: list[str], say: Say) -> None:
    def tested() -> tuple[int, int]:
        awaited = Node.objects.filter(pk__in=node_ids).exclude(TAKEN_OUT)
        return awaited.exclude(state__in=UNTESTED).count(), awaited.count()

    _await_count(tested, "nodes went through diagnostics", ADMISSION_DEADLINE_S, say)
    failed = Node.objects.filter(pk__in=node_ids, state=NodeState.VALIDATION_FAILED)
    for name in failed.values_list("name", flat=True):
        say(f"{name} failed its diagnostics; see its page")


def _await_first_steps(job: Job, say: Say) -> Job:
    since = timezone.now()

    def running() -> tuple[int, int]:
        job.refresh_from_db()
        fresh = job.step_at is not None and job.step_at >= since
        return int(job.state == JobState.RUNNING and fresh), 1

    _await_count(running, "job training", FIRST_STEPS_DEADLINE_S, say)
    return job


def _await_count(
    count: Callable[[], tuple[int, int]], what: str, deadline_s: float, say: Say
) -> None:
    """Poll until what `count` finds is all that it wants, telling each change.

    Raises DemoError when that is too late.
    """
    deadline = time.monotonic() + deadline_s
    pause = threading.Event()
    told = (-1, -1)
    while True:
        now, wanted = count()
        if wanted and (now, wanted) != told:
            say(f"{now} of {wanted} {what}")
            told = (now, wanted)
        if now >= wanted:
            return
        if time.monotonic() > deadline:
            raise DemoError(f"Only {now} of {wanted} {what} within {deadline_s:.0f} s.")
        pause.wait(0.25)
