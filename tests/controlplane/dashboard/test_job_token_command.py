"""`manage.py jobtoken`: ranks that a scheduler starts are given what lets them speak."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from controlplane.accounts.models import AuditEvent
from controlplane.crypto import job_token
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db


def say(*arguments: str) -> str:
    out = StringIO()
    call_command("jobtoken", *arguments, stdout=out)
    return out.getvalue()


def test_a_job_is_named_by_its_id_or_name_and_nothing_but_its_token_is_said() -> None:
    job = JobFactory(name="llm-7b")
    JobFactory(name="llm-8b")

    said = [say(text) for text in (job.pk, "llm-7b", f"{job.cluster.name}/llm-7b")]

    assert said == [f"{job_token(job.pk)}\n"] * 3


def test_that_it_was_told_is_on_record_and_the_token_is_not() -> None:
    job = JobFactory(name="llm-7b")

    said = say("llm-7b")

    event = AuditEvent.objects.get()
    assert (event.verb, event.object_id) == ("job.reveal_token", job.pk)
    assert event.cluster_id == job.cluster_id
    assert said.strip() not in f"{event.before} {event.after} {event.reason}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "There is no job 'nothing'; register it first"),
        ("nowhere/llm-7b", "There is no job 'nowhere/llm-7b'"),
        ("llm-7b", "There are 2 jobs 'llm-7b'; name one as CLUSTER/NAME"),
    ],
)
def test_a_job_that_is_not_the_only_one_is_not_guessed_at(text: str, words: str) -> None:
    for _ in range(2):
        JobFactory(name="llm-7b")

    with pytest.raises(CommandError, match=words):
        say(text)

    assert not AuditEvent.objects.exists()


def test_of_two_by_one_name_the_cluster_says_which() -> None:
    _, job = JobFactory(name="llm-7b"), JobFactory(name="llm-7b")

    assert say(f"{job.cluster.name}/llm-7b") == f"{job_token(job.pk)}\n"
