"""`manage.py jobtoken JOB`: tell the token of a job's ranks, for whoever starts them."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import Q

from controlplane.accounts.models import SYSTEM
from controlplane.jobs import actions
from controlplane.jobs.models import Job


class Command(BaseCommand):
    help = (
        "Tell the DRYDOCK_TOKEN of a job, with which ranks that its own scheduler starts tell of"
        " themselves and hear. The ranks that Drydock starts have it. It stands in the audit trail"
        " that it was told."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "job", metavar="JOB", help="its id or name, or CLUSTER/NAME where two clusters share it"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        self.stdout.write(actions.reveal_token(SYSTEM, self._job(options["job"]).pk))

    def _job(self, text: str) -> Job:
        cluster, _, name = text.rpartition("/")
        jobs = Job.objects.filter(Q(pk=name) | Q(name=name))
        found = list(jobs.filter(cluster__name=cluster) if cluster else jobs)
        if not found:
            raise CommandError(f"There is no job {text!r}; register it first.")
        if len(found) > 1:
            raise CommandError(f"There are {len(found)} jobs {text!r}; name one as CLUSTER/NAME.")
        return found[0]
