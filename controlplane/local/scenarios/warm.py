"""A node loses its power while its job has a warm spare: how soon are all replicas back?"""

from __future__ import annotations

from controlplane.accounts.models import SYSTEM
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job
from controlplane.local.scenarios.base import READY_S, Result, Say, await_rows
from controlplane.local.scenarios.replicas import Fault, play_out, power_off, ready_job

NAME = "warm-spare"
FAULT = Fault("power off", power_off, ("node-lost",), node_out=True, boots=1)
WHY = f"the scenario {NAME}"


def play(say: Say) -> Result:
    """Ask for a warm spare, then cut the power of a node that trains. Raises ScenarioError."""
    job = ready_job(needs_spare=True)
    before = job.warm_spares

    def ask_for_no_more() -> None:
        """Else the node is the next warm spare as soon as it is back."""
        jobs.set_warm_spares(SYSTEM, job.pk, before, WHY)

    jobs.set_warm_spares(SYSTEM, job.pk, before + 1, WHY)
    try:
        await_rows(lambda: _all_follow(job), READY_S, "no warm spare came to hold the state")
        return play_out(NAME, FAULT, say, ask_for_no_more)
    finally:
        ask_for_no_more()


def _all_follow(job: Job) -> bool:
    job.refresh_from_db()
    holding = job.held_warm_spares.exclude(follows_since=None)
    return holding.count() == job.warm_spares
