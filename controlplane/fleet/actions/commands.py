"""Signed orders to nodes, and what came of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from django.db.models import CharField, Func, Q, QuerySet, Value
from django.utils import timezone

from controlplane import crypto, doorbell
from controlplane.accounts.actions import audit
from controlplane.accounts.models import Actor
from controlplane.errors import Refused
from controlplane.fleet.changes import change, touch
from controlplane.fleet.choices import COMMAND_PENDING, CommandState
from controlplane.fleet.models import ENDING, Command, Node
from controlplane.ids import new_id
from node_agent import wire

#: An order taken in its last second may still be running; its result is awaited this much longer.
RESULT_GRACE_S = 30
#: The error of an order that nobody wants any more.
CALLED_BACK = "called back"
#: An order that has its end is kept for so long, and so many are forgotten at a time.
COMMAND_RETENTION, DELETE_BATCH = timedelta(days=30), 1000


@change()
def queue_command(
    actor: Actor, node_id: str, action: wire.Verb, *, requester: str, ttl_s: float = 60
) -> Command:
    """Sign an order and keep it for the node's next poll.

    One command per requester and verb: asking again returns the one there is, so a step that is
    tried again cannot send a second. The order expires `ttl_s` seconds from now.
    """
    verb = msgspec.to_builtins(action)["verb"]
    there = Command.objects.filter(requester=requester, verb=verb).first()
    if there is not None:
        return there
    now = timezone.now()
    expires_at = now + timedelta(seconds=ttl_s)
    command = wire.Command(
        id=new_id("cmd"),
        node_id=node_id,
        issued_at=now.timestamp(),
        expires_at=expires_at.timestamp(),
        action=action,
    )
    payload = msgspec.json.encode(command).decode()
    row = Command.objects.create(
        id=command.id,
        node_id=node_id,
        verb=verb,
        payload=payload,
        signature=crypto.sign_command(payload),
        requester=requester,
        expires_at=expires_at,
    )
    audit(
        actor,
        f"command.{verb}",
        "node",
        node_id,
        cluster_id=Node.objects.values_list("cluster_id", flat=True).get(pk=node_id),
        after={"command": row.pk, "requester": requester},
    )
    doorbell.announce_command_after_commit(node_id)
    return row


@change()
def take_commands(node_ids: list[str]) -> dict[str, list[Command]]:
    """The orders that these nodes have not finished, oldest first; marks them as delivered.

    None for a node whose key is revoked, whatever poll it holds still.

    A delivered order is handed out again until its result is known: the agent's journal, not this
    row, is what keeps it from being executed twice.
    """
    now = timezone.now()
    rows = list(
        Command.objects.filter(
            node_id__in=node_ids,
            node__key_revoked_at=None,
            state__in=COMMAND_PENDING,
            expires_at__gt=now,
        ).order_by("created_at")
    )
    Command.objects.filter(pk__in=[row.pk for row in rows], state=CommandState.QUEUED).update(
        state=CommandState.DELIVERED, delivered_at=now
    )
    # One that was called back meanwhile is not handed out.
    handed_out = Command.objects.filter(
        pk__in=[row.pk for row in rows], state=CommandState.DELIVERED
    )
    taken: dict[str, list[Command]] = {}
    for row in handed_out.order_by("created_at"):
        taken.setdefault(row.node_id, []).append(row)
    return taken


@change()
def record_command_result(node_id: str, result: wire.CommandResult) -> None:
    """Store what an agent says of a command; the same result again changes nothing.

    One that comes late stands too, unless the order was called back. But that a process was started
    is then noted only: who gave up waiting has it ended, or started again, and must not be told in
    the midst of that that it runs.

    Raises Refused for a command that does not exist or was given to another node.
    """
    row = Command.objects.select_related("node").filter(pk=result.id).first()
    if row is None:
        raise Refused(404, "unknown_command", "id", f"there is no command {result.id}")
    if row.node_id != node_id:
        raise Refused(403, "command_of_other_node", "id", "this command was given to another node")
    order = Command.objects.filter(pk=row.pk)
    awaited = Q(state__in=COMMAND_PENDING)
    if not (row.verb.startswith("start_") and result.state == "done"):
        awaited |= Q(state=CommandState.EXPIRED) & ~Q(error=CALLED_BACK)
    if order.filter(awaited).update(
        state=CommandState(result.state),
        finished_at=_moment(result.at),
        output=result.output,
        error=result.error,
    ):
        touch(row.node.cluster_id)
        doorbell.ring_after_commit(f"step/{row.requester}")
    else:
        order.filter(state=CommandState.EXPIRED).update(output=result.output)


@change()
def call_back_commands(requester: str) -> int:
    """Expire the orders of this asker that no node has finished. Returns how many.

    One that a node has taken already may still be executed.
    """
    unfinished = Command.objects.filter(
        requester__startswith=f"{requester}.", state__in=COMMAND_PENDING
    )
    return unfinished.update(
        state=CommandState.EXPIRED, finished_at=timezone.now(), error=CALLED_BACK
    )


@change()
def expire_commands(now: datetime) -> int:
    """Give up on orders that no agent answered in time. Returns how many."""
    overdue = Command.objects.filter(
        state__in=COMMAND_PENDING, expires_at__lt=now - timedelta(seconds=RESULT_GRACE_S)
    )
    count = 0
    for row in overdue:
        count += Command.objects.filter(pk=row.pk, state=row.state).update(
            state=CommandState.EXPIRED, finished_at=now, error="the agent did not answer in time"
        )
        doorbell.ring_after_commit(f"step/{row.requester}")
    return count


def forget_commands(now: datetime, at_work: QuerySet[Any, str]) -> int:
    """Delete orders that have had their end for long; some at a time. Returns how many.

    Not those of steps that are `at_work` still, by their ids: a step looks up what it has asked
    for. Nor those to end what hangs, which are counted.
    """
    asker = Func("requester", Value("."), 1, function="split_part", output_field=CharField())
    old = Command.objects.alias(asker=asker).filter(finished_at__lt=now - COMMAND_RETENTION)
    over = old.exclude(asker__in=at_work).exclude(requester__startswith=ENDING)
    some = over.order_by("finished_at").values("pk")[:DELETE_BATCH]
    return Command.objects.filter(pk__in=some).delete()[0]


def _moment(unix_time: float) -> datetime:
    return datetime.fromtimestamp(unix_time, UTC)
