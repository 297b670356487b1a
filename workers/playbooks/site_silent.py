"""A large share of a cluster or rack went quiet together: wait, touch nothing, tell a person.

A switch, a link or our own intake is the likelier cause than many nodes that died at once. What
they are is unknown, so nothing disruptive is done. Whoever stays silent when most are heard again
is looked at alone.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.fleet.choices import IN_SERVICE
from controlplane.fleet.models import Node
from controlplane.health.actions import record_signal
from controlplane.health.choices import SignalKind
from controlplane.incidents import limits
from controlplane.incidents.actions.runs import look_again
from controlplane.incidents.choices import Effect, RunState
from controlplane.incidents.models import PlaybookRun
from workers.playbooks.base import (
    Done,
    NeedsOperator,
    Outcome,
    Playbook,
    StepContext,
    StepDefinition,
    Wait,
)

#: Whose lease ran out so long before a watch began, or later, fell silent with its site.
SAME_SILENCE = timedelta(minutes=10)
#: How a watch begins to say that the site is silent, also when it asks for a person.
SILENT = "silent, their state unknown: "


def watch(ctx: StepContext) -> Outcome:
    """Wait until most nodes of the silent rack or cluster are heard again, and do nothing to them.

    Asks for a person after SILENCE_ASK_S. Nodes that stay silent once the others are back are then
    reported lost one by one.
    """
    silent = _silent_nodes(ctx.run)
    names = ", ".join(sorted(node.name for node in silent))
    if any(limits.silence_around(node) for node in silent):
        waited = timezone.now() - (ctx.step.started_at or timezone.now())
        text = f"{SILENT}{names}. Nothing is done to them"
        if waited > timedelta(seconds=settings.SILENCE_ASK_S):
            return NeedsOperator(
                text=f"{text}. This lasts {waited.total_seconds():.0f} s: look at their switch, "
                "their uplink, and whether our own intake is reachable from there"
            )
        return Wait(text=text, wake_s=1.0)

    def hand_over() -> None:
        for node in silent:
            record_signal(
                f"lease:{node.pk}:{node.lease.deadline.timestamp():.3f}:alone",
                SignalKind.LEASE_LOST,
                source="site-silent",
                observed_at=timezone.now(),
                node=node,
                data={"last_beat_at": node.lease.last_beat_at.isoformat()},
            )

    if silent:
        return Done(
            text=f"most are heard again; still silent, and looked at alone: {names}",
            apply=hand_over,
        )
    return Done(text="all are heard again")


def look_again_once_heard() -> None:
    """Let the watches that asked for a person look again whose sites are heard by now: nothing else
    wakes them. One that asked for another reason is left to people; so is one of whose nodes a
    person took some out or put them on hold, which are as silent as before."""
    asking = PlaybookRun.objects.filter(
        playbook=PLAYBOOK.name, state=RunState.NEEDS_OPERATOR, state_reason__startswith=SILENT
    )
    for run in asking:
        silent = _silent_nodes(run)
        out = _silent_with_site(run).exclude(pk__in=[node.pk for node in silent])
        if not out.exists() and not any(limits.silence_around(node) for node in silent):
            look_again(run.pk, "the silence is over", afresh=False)


def _silent_nodes(run: PlaybookRun) -> list[Node]:
    """Who is silent with the watched site, and in nobody's hands."""
    silent = _silent_with_site(run).select_related("lease", "cluster", "rack")
    return list(silent.filter(state__in=sorted(IN_SERVICE), hold_reason=""))


def _silent_with_site(run: PlaybookRun) -> QuerySet[Node]:
    """Whoever fell silent with the watched site and is not heard: of who was silent long before it
    people know. By when their leases ran out, for we may have been away before."""
    return Node.objects.filter(
        cluster_id=run.cluster_id,
        lease__reachable=False,
        lease__unreachable_since__gte=run.created_at - SAME_SILENCE,
    )


PLAYBOOK = Playbook(
    name="site-silent",
    version=1,
    summary="Watches a site that went quiet as a whole; touches nothing.",
    deadline_s=7 * 86_400,
    steps=(
        StepDefinition(
            key="watch",
            title="Wait until it is heard again",
            act=watch,
            effect=Effect.NONE,
            timeout_s=7 * 86_400,
            prose="Nodes that go quiet together have a cause in common: look at the switch, the "
            "uplink, the proxy before ingest, and ingest itself. Jobs train on without us. Do not "
            "power-cycle nodes on silence alone.",
        ),
    ),
)
