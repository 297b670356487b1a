"""A small world for playbooks: a job of two replicas, some spares, and what happens to them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import msgspec
from django.utils import timezone

from controlplane.accounts.models import AuditEvent
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import Cluster, Command, Gpu, Lease, Node, RepairRecord
from controlplane.health.actions import record_events, record_signal
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.ids import new_id
from controlplane.incidents.choices import RunState
from controlplane.incidents.models import PlaybookRun, PlaybookStep
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Job, Placement
from node_agent import wire
from tests.factories import (
    CheckpointFactory,
    ClusterFactory,
    FailureFactory,
    GpuFactory,
    InterruptionFactory,
    JobFactory,
    NodeFactory,
    PlacementFactory,
    PlaybookStepFactory,
    ReplicaFactory,
)
from tests.workers.bmc import Bmc, bmc_of
from workers import engine

#: The card at this address fell off the bus.
XID_79 = "[ 12.3] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=python3, GPU has fallen off the bus."
HEALTHY: dict[str, Any] = {"tests": [{"name": "cards", "outcome": "passed"}]}


class World:
    """A job of two replicas and some spares, each node with a power switch."""

    def __init__(self, stack: ExitStack, spares: int) -> None:
        self.cluster: Cluster = ClusterFactory()
        self.job: Job = JobFactory(cluster=self.cluster, world_replicas=2, gpus_per_replica=1)
        self.job.coordinator_address = "127.0.0.1:4000"
        self.job.save()
        self.bmcs: dict[str, Bmc] = {}
        self.placements = [self._placement(stack, index) for index in range(2)]
        self.spares = [self.add_node(stack, f"spare-{n}", spare=True) for n in range(spares)]

    def add_node(self, stack: ExitStack, name: str, **fields: Any) -> Node:
        node = NodeFactory(cluster=self.cluster, name=name, boot_id="boot-1", **fields)
        self.bmcs[node.pk] = stack.enter_context(bmc_of(node))
        GpuFactory(node=node, index=0, pci_address="00000000:1B:00.0")
        return node

    def _placement(self, stack: ExitStack, index: int) -> Placement:
        node = self.add_node(stack, f"node-{index}", state=NodeState.ALLOCATED)
        replica = ReplicaFactory(job=self.job, index=index)
        return PlacementFactory(replica=replica, node=node)

    def kill(self, placement: Placement, *, requested: bool = False) -> None:
        """Its process is killed, and its agent says so."""
        self.exits(placement, signal=9, requested=requested)
        self.survivors_commit(placement)

    def exits(self, placement: Placement, **how: Any) -> None:
        """Its process ends, and its agent says how."""
        node = placement.node
        exit_data = {
            "kind": "rank",
            "job": self.job.pk,
            "replica": placement.replica.index,
            "placement": placement.pk,
            "pid": 1,
            **how,
        }
        event = wire.Event(
            id=new_id("evt"),
            kind="process_exited",
            at=time.time(),
            boot_id=node.boot_id,
            source="agent",
            data=exit_data,
        )

        record_events(node.pk, [event])

    def kernel_says(self, node: Node, *lines: str) -> None:
        """Its agent tells these lines of the kernel's log."""
        record_events(
            node.pk,
            [
                wire.Event(
                    id=new_id("evt"),
                    kind="kernel_line",
                    at=time.time(),
                    boot_id=node.boot_id,
                    source="kmsg",
                    raw=line,
                )
                for line in lines
            ],
        )

    def kernel_repeats(self, line: str, count: int, **told: object) -> None:
        """Its agent tells that a line which it told came so often by now, this moment at last; or
        what else is `told`."""
        signal = Signal.objects.get(raw=line)
        record_events(
            str(signal.node_id),
            [
                wire.Event(
                    id=signal.pk,
                    kind="kernel_line",
                    at=signal.observed_at.timestamp(),
                    boot_id=signal.boot_id,
                    source="kmsg",
                    raw=line,
                    data={"count": count, "last_at": time.time(), **told},
                )
            ],
        )

    def card_is_silent(self, node: Node, *, for_s: float, until: float | None = None) -> None:
        """Its agent tells that its card does not answer, and has not for so long by now, or by
        `until`."""
        until = time.time() if until is None else until
        event = wire.Event(
            id=new_id("evt"),
            kind="gpu_unreadable",
            at=until - for_s,
            boot_id=node.boot_id,
            source="hardware",
            gpu_uuid=self.card_of(node).uuid,
            data={"reason": "no answer"},
        )
        record_events(node.pk, [event])
        self._is_silent_still(event, count=2, until=until)

    def card_is_silent_still(self, node: Node) -> None:
        """Its agent tells that a silence which it told of goes on."""
        signal = Signal.objects.get(node=node, kind=SignalKind.GPU_UNREADABLE)
        event = wire.Event(
            id=signal.pk,
            kind="gpu_unreadable",
            at=signal.observed_at.timestamp(),
            boot_id=signal.boot_id,
            source="hardware",
            gpu_uuid=self.card_of(node).uuid,
        )
        self._is_silent_still(event, count=signal.count + 1, until=time.time())

    def _is_silent_still(self, event: wire.Event, *, count: int, until: float) -> None:
        told = {"reason": "no answer", "count": count, "last_at": until}
        node = Gpu.objects.get(pk=event.gpu_uuid).node_id
        record_events(str(node), [msgspec.structs.replace(event, data=told)])

    def shows(
        self, node: Node, reading: str, value: float = 1.0, *, card: Gpu | None = None
    ) -> None:
        """The keeper found that its card shows this flag; `card`: of several which."""
        self._reads(card or self.card_of(node), reading, value=value)

    def errors_accelerate(self, node: Node, errors: tuple[float, ...] = (4.0, 12.0, 40.0)) -> None:
        """The keeper found in its readings that its card's corrected errors grow like this."""
        self._reads(self.card_of(node), "ecc_corrected", errors=list(errors), window_s=3600.0)

    def _reads(self, card: Gpu, reading: str, **found: object) -> None:
        record_signal(
            new_id("sig"),
            SignalKind.READING,
            source="keeper",
            observed_at=timezone.now(),
            node=card.node,
            gpu=card,
            raw=f"{reading} of {card.uuid}: {found}",
            data={"reading": reading, **found},
        )

    def card_of(self, node: Node) -> Gpu:
        return Gpu.objects.get(node=node)

    def peers_lose(self, placement: Placement) -> None:
        record_signal(
            new_id("sig"),
            SignalKind.PEER_LOST,
            source="replica 0",
            observed_at=timezone.now(),
            job_id=self.job.pk,
            replica=placement.replica.index,
            placement_id=placement.pk,
            data={"how": "reset", "step": 5, "epoch": 1},
        )
        self.survivors_commit(placement)

    def survivors_commit(self, placement: Placement) -> None:
        """The other replica goes on without it."""
        InterruptionFactory(
            job=self.job, lost=[placement.replica.index], replicas=[], started_at=timezone.now()
        )

    def silence(self, node: Node) -> None:
        """Its lease has run out, and the keeper says so."""
        self.silence_together(node)

    def silence_together(self, *nodes: Node) -> None:
        """The leases of all of them have run out before the keeper says so of the first."""
        now = timezone.now()
        Lease.objects.filter(pk__in=[node.pk for node in nodes]).update(
            reachable=False, unreachable_since=now, last_beat_at=now - timedelta(seconds=60)
        )
        for node in nodes:
            self.lease_lost(node)

    def lease_lost(self, node: Node) -> None:
        """The keeper says so."""
        record_signal(
            new_id("sig"),
            SignalKind.LEASE_LOST,
            source="keeper",
            observed_at=timezone.now(),
            node=node,
        )

    def hear(self, node: Node) -> None:
        Lease.objects.filter(pk=node.pk).update(
            reachable=True, unreachable_since=None, last_beat_at=timezone.now()
        )

    def boot(self, node: Node) -> None:
        """Its agent is up again, under the boot id that its controller shows."""
        fleet.record_boot(node.pk, f"boot-{self.bmcs[node.pk].boots}", timezone.now())
        self.hear(node)

    def join(self, placement: Placement) -> None:
        """The replica trains."""
        Placement.objects.filter(pk=placement.pk).update(
            state=PlacementState.RUNNING, started_at=timezone.now(), joined_at=timezone.now()
        )

    def placement_of(self, index: int) -> Placement:
        return Placement.objects.get(
            replica__job=self.job, replica__index=index, state__in=["starting", "running"]
        )


def drain(times: int = 4) -> None:
    """Let the workers do all they can now, timers included: so many times, or until another time
    changed nothing."""
    before = None
    for _ in range(times):
        # Whoever is heard goes on beating, however long the test takes.
        Lease.objects.filter(reachable=True).update(last_beat_at=timezone.now())
        PlaybookStep.objects.filter(state__in=["ready", "waiting"]).update(wake_at=timezone.now())
        engine.drain("", owner="test")
        after = as_it_stands()
        if after == before:
            return
        before = after


def as_it_stands() -> list[tuple[Any, ...]]:
    """All that steps and runs know and say, and how much was done to anything."""
    return [
        (Command.objects.count(), AuditEvent.objects.count(), Signal.objects.count()),
        *PlaybookStep.objects.order_by("pk").values_list(
            "pk", "state", "attempts", "started_at", "outcome", "evidence"
        ),
        *PlaybookRun.objects.order_by("pk").values_list("pk", "state", "state_reason", "context"),
    ]


def answer(verb: str, state: str = "done", **output: Any) -> None:
    """The nodes answer every unfinished order of this verb."""
    for command in Command.objects.filter(verb=verb, state__in=["queued", "delivered"]):
        result = wire.CommandResult(
            id=command.pk,
            state=state,  # type: ignore[arg-type]
            at=time.time(),
            output=output,
            error="" if state == "done" else "no",
        )
        fleet.record_command_result(command.node_id, result)


def unanswered() -> None:
    """No node answers any order in time, and the playbooks go on."""
    fleet.expire_commands(timezone.now() + timedelta(hours=1))
    drain()


def run_of(playbook: str) -> PlaybookRun:
    return PlaybookRun.objects.filter(playbook=playbook).latest("created_at")


def step_of(playbook: str, key: str) -> PlaybookStep:
    return run_of(playbook).steps.get(key=key)


def mend(world: World, index: int) -> None:
    drain()
    answer("start_rank", pid=2)
    world.join(world.placement_of(index))
    drain()


def soaked() -> None:
    """The time of being watched is over."""
    long_ago = timezone.now() - timedelta(hours=1)
    PlaybookStep.objects.filter(key="soak").update(started_at=long_ago, timeout_s=1e6)


def reset_and_watched(world: World, node: Node) -> None:
    """Its cards are reset, it passes its diagnostic, and is watched long enough."""
    answer("reset_gpus", reset=[world.card_of(node).uuid])
    drain()
    answer("diagnose", **HEALTHY)
    drain()
    soaked()
    drain()


def quarantine(world: World, node: Node) -> None:
    """The agent kills what it was told to, and the playbooks go on."""
    drain()
    answer("stop_process", stopped=True)
    drain()
    node.refresh_from_db()


def pass_validation() -> None:
    """The node that is validated passes its diagnostic, and is watched long enough."""
    answer("diagnose", **HEALTHY)
    drain()
    soaked()
    drain()


def come_back(world: World, node: Node) -> None:
    """The node boots, passes its diagnostic, and is watched long enough."""
    world.boot(node)
    drain()
    pass_validation()
    node.refresh_from_db()


def rejoin(world: World, index: int) -> None:
    answer("start_rank", pid=2)
    world.join(world.placement_of(index))
    drain()


def failed_before(node: Node, gpu: Gpu) -> None:
    """The card had an XID 79 yesterday, was rebooted for it, and worked since."""
    yesterday = timezone.now() - timedelta(days=1, hours=2)
    FailureFactory(node=node, gpu=gpu, code="xid-79", observed_at=yesterday, last_seen_at=yesterday)
    step = PlaybookStepFactory(
        run__incident=None,
        run__cluster=node.cluster,
        run__state=RunState.SUCCEEDED,
        run__context={"gpu": gpu.pk, "code": "xid-79", "action": "reboot"},
    )
    fleet.record_repair(node.pk, Rung.REBOOT, step.pk, gpu_uuid=gpu.pk)
    RepairRecord.objects.update(at=yesterday + timedelta(minutes=5))


def silent(card: Gpu) -> dict[str, Any]:
    """What a diagnostic says of a card that does not answer."""
    detail = f"no readings from {card.uuid}"
    return {"tests": [{"name": "cards", "outcome": "failed", "detail": detail}]}


def saves_checkpoint(world: World, tier: str = "local") -> None:
    """The job says that it has saved one, as it was told to."""
    assert world.job.directives.filter(verb="checkpoint").count() == 1
    CheckpointFactory(job=world.job, tier=tier, at=timezone.now())


def comes_back_twice(world: World, node: Node, **diagnosis: Any) -> None:
    """After the reboot and after the power cycle the node boots, and its diagnostic says this."""
    for _ in range(2):
        drain()
        world.boot(node)
        drain()
        answer("diagnose", **diagnosis)
    drain()


def never_comes_back(node: Node) -> None:
    """Neither after the reboot nor after the power cycle."""
    for _ in range(2):
        drain()
        Lease.objects.filter(node=node).update(reachable=False)
        Node.objects.filter(pk=node.pk, state=NodeState.REPAIRING).update(
            state=NodeState.REPAIR_FAILED, state_deadline=None
        )
    drain()
