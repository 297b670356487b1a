"""Moves of replicas in the small world: ordering one, and what its processes tell."""

from __future__ import annotations

import time
from datetime import timedelta

import msgspec
from django.utils import timezone

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import Actor
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.models import Signal
from controlplane.incidents import actions as incidents
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job, Placement, Replica
from node_agent import wire
from runtime import client
from tests.factories import (
    ProgressSampleFactory,
)
from tests.workers.world import World, answer, drain

PERSON = Actor(ActorKind.USER, "1")
XID_79 = "[ 12.3] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=python3, GPU has fallen off the bus."


def trains(world: World) -> None:
    """Both replicas have told of their steps."""
    ProgressSampleFactory(job=world.job, step=9, epoch=1, replicas=[0, 1])
    Job.objects.filter(pk=world.job.pk).update(epoch=1)


def move(world: World, node_id: str = "") -> Placement:
    """Order the move of replica 1, whose second process then runs. Returns that."""
    incidents.move_replica(PERSON, world.job.pk, 1, node_id=node_id, reason="it is warm there")
    drain()
    answer("start_rank", pid=7)
    standby = Placement.objects.get(standby=True)
    told_by(standby, client.Hello(pid=7, at=time.time()))
    drain()
    return standby


def told_by(placement: Placement, *messages: client.Message) -> None:
    batch = client.Batch(
        job=placement.replica.job_id,
        replica=placement.replica.index,
        rank=0,
        placement=placement.pk,
        sent_at=time.time(),
        messages=[],
    )
    jobs.record_runtime_batch(placement.replica.job_id, batch, list(messages))


def regrouped(**fields: object) -> client.Regrouped:
    now = time.time()
    message = client.Regrouped(
        epoch=2,
        replicas=[0, 1],
        lost=[],
        joined=[1],
        started_at=now,
        committed_at=now,
        step=20,
        gap_s=0.05,
    )
    return client.Regrouped(**(message.__dict__ | fields))


def left(standby: Placement) -> client.Stopped:
    return client.Stopped(step=19, reason=f"replaced by {standby.pk}", at=time.time())


def heard_long_ago() -> None:
    Signal.objects.update(recorded_at=timezone.now() - timedelta(minutes=1))


def state(node: Node) -> tuple[str, bool]:
    node.refresh_from_db()
    return node.state, node.spare


def replica() -> Replica:
    return Replica.objects.get(index=1)


def commands(verb: str) -> list[wire.Verb]:
    payloads = Command.objects.filter(verb=verb).values_list("payload", flat=True)
    return [msgspec.json.decode(one, type=wire.Command).action for one in payloads]


def told_by_peers(world: World, standby: Placement) -> None:
    told_by(world.placements[0], regrouped(entered=[standby.pk]))


def told_by_the_one_that_left(world: World, standby: Placement) -> None:
    told_by(world.placements[1], left(standby))


def committed(**fields: object) -> client.Progress:
    message = client.Progress(
        step=21,
        steps=1,
        epoch=2,
        at=time.time(),
        loss=1.0,
        grad_norm=1.0,
        step_s=0.1,
        max_gap_s=0.1,
        samples=48,
        tokens=48,
        replicas=[0, 1],
    )
    return client.Progress(**(message.__dict__ | fields))


def told_by_itself(world: World, standby: Placement) -> None:
    told_by(standby, committed())


def left_its_node(world: World, standby: Placement) -> None:
    world.exits(world.placements[1], exit_code=0)


TELLINGS = (told_by_peers, told_by_the_one_that_left, told_by_itself, left_its_node)


def no_spare(world: World) -> None:
    """No node is free."""
    Node.objects.filter(state=NodeState.AVAILABLE).update(hold_reason="mine")
