"""Who asks for which run: one function for each reason."""

from __future__ import annotations

from controlplane.accounts.models import Actor
from controlplane.fleet.changes import change
from controlplane.fleet.models import Node
from controlplane.incidents.actions.incidents import resolve
from controlplane.incidents.actions.runs import cancel_run, request_run
from controlplane.incidents.choices import (
    INCIDENT_UNRESOLVED,
    RUN_UNFINISHED,
)
from controlplane.incidents.models import (
    Incident,
    PlaybookRun,
)
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job


def admit_node(actor: Actor, node_id: str) -> PlaybookRun:
    """Have a newly enrolled node validated and, if it passes, made available."""
    node = Node.objects.get(pk=node_id)
    return request_run(
        actor,
        "admit-node",
        node_id,
        cluster_id=node.cluster_id,
        title=f"Admit {node.name}",
        node_id=node_id,
    )


def repair_node(
    actor: Actor,
    node_id: str,
    incident: Incident,
    reason: str,
    *,
    only_if_silent: bool = False,
    lost_placement: str = "",
) -> PlaybookRun:
    """Have a node taken out, repaired, validated and returned as a spare.

    `only_if_silent`: silence is all that speaks against it, so a word from it ends the repair.
    `lost_placement` is the one that may be ended with it; another on it is a reason to stop.
    """
    node = Node.objects.get(pk=node_id)
    return request_run(
        actor,
        "repair-node",
        node_id,
        cluster_id=node.cluster_id,
        title=f"Repair {node.name}",
        incident=incident,
        node_id=node_id,
        context={
            "reason": reason,
            "only_if_silent": only_if_silent,
            "lost_placement": lost_placement,
        },
    )


def restore_coordinator(actor: Actor, job: Job, incident: Incident) -> PlaybookRun:
    """Have a job's coordinator started again where it was, once its node is back."""
    return request_run(
        actor,
        "restore-coordinator",
        job.pk,
        cluster_id=job.cluster_id,
        title=f"Restore the coordinator of {job.name}",
        incident=incident,
        job_id=job.pk,
        node_id=job.coordinator_node_id,
    )


@change()
def start_job(actor: Actor, job_id: str, reason: str = "requested") -> PlaybookRun:
    """Have a job's coordinator and ranks started, from its newest checkpoint if it has one."""
    job = jobs.begin_start(actor, job_id, reason)
    return request_run(
        actor,
        "start-job",
        job_id,
        cluster_id=job.cluster_id,
        title=f"Start {job.name}",
        job_id=job_id,
        context={"reason": reason},
    )


@change()
def restart_job(actor: Actor, job_id: str, reason: str) -> PlaybookRun:
    """Start a job anew as a whole: what was under way for single replicas of it is moot."""
    job = Job.objects.get(pk=job_id)
    moot = PlaybookRun.objects.filter(
        job=job,
        playbook__in=["replica-lost", "start-job", "restore-coordinator"],
        state__in=RUN_UNFINISHED,
    )
    for run in list(moot):
        cancel_run(actor, run.pk, f"the whole job is started anew: {reason}")
    for incident in Incident.objects.filter(job=job, state__in=INCIDENT_UNRESOLVED):
        resolve(actor, incident.pk, f"the whole job is started anew: {reason}")
    return start_job(actor, job_id, reason)
