"""A job is to end: what automation had under way for it ends with it."""

from __future__ import annotations

from controlplane.accounts.models import Actor
from controlplane.fleet.changes import change
from controlplane.incidents.actions.incidents import resolve
from controlplane.incidents.actions.requests import FOR_THE_JOB
from controlplane.incidents.actions.runs import cancel_run
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, RUN_UNFINISHED
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job


@change()
def end_job(actor: Actor, job_id: str, reason: str) -> Job:
    """Have a job's ranks stop; nothing brings them back. Raises Conflict if it has ended."""
    job = jobs.request_stop(actor, job_id, reason)
    why = f"the job is ended: {reason}"
    runs = PlaybookRun.objects.filter(
        job_id=job_id, playbook__in=FOR_THE_JOB, state__in=RUN_UNFINISHED
    )
    for run in list(runs):
        cancel_run(actor, run.pk, why)
    for incident in Incident.objects.filter(job_id=job_id, state__in=INCIDENT_UNRESOLVED):
        resolve(actor, incident.pk, why)
    return job
