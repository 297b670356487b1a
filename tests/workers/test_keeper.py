"""The keeper: beats become leases, silence becomes a signal, but never while we could not hear."""

from __future__ import annotations

import json
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn
from unittest.mock import Mock, patch

import pytest
import redis
from django.conf import settings
from django.contrib.sessions.models import Session
from django.db import InterfaceError, OperationalError, connection, transaction
from django.utils import timezone
from pytest_django import Settings

from controlplane import redis_keys
from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import CommandState, NodeState
from controlplane.fleet.models import Command, Gpu, Lease, Node
from controlplane.health import actions as health
from controlplane.health.actions import record_signal
from controlplane.health.choices import SignalKind
from controlplane.health.models import NodeSample, Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RunState
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.jobs.models import Directive
from node_agent import wire
from tests.factories import (
    DirectiveFactory,
    GpuFactory,
    IncidentFactory,
    JobFactory,
    NodeFactory,
    PlaybookRunFactory,
    ProgressSampleFactory,
)
from workers import engine, intake, keeper, sensor_signals
from workers.keeper_http import Pulse
from workers.playbooks import node_steps, site_silent

pytestmark = pytest.mark.django_db


@pytest.fixture
def beats() -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(settings.REDIS_URL)
    ingest_says(client, at=time.time() + 3600.0)
    yield client
    client.delete(redis_keys.BEATS, redis_keys.INGEST_ALIVE)


@pytest.fixture
def memory() -> keeper.Memory:
    """A keeper that has been at work for long enough to declare nodes lost."""
    return keeper.Memory(heard={}, grace_until=time.monotonic() - 1.0)


def ingest_says(client: redis.Redis, at: float, since: float = 0.0) -> None:
    client.set(redis_keys.INGEST_ALIVE, json.dumps({"at": at, "since": since}))


def beat(client: redis.Redis, node: Node, received_at: float) -> None:
    content = {"boot_id": node.boot_id, "received_at": received_at, "seq": 1}
    client.hset(redis_keys.BEATS, node.pk, json.dumps(content))


def silent_node() -> Node:
    node: Node = NodeFactory()
    Lease.objects.filter(pk=node.pk).update(deadline=timezone.now() - timedelta(seconds=1))
    return node


def broken_deadlock(*_: object) -> NoReturn:
    """A statement fails, and its connection does not."""
    connection.ensure_connection()
    raise OperationalError("deadlock detected")


def lease_signals() -> int:
    return Signal.objects.filter(kind=SignalKind.LEASE_LOST).count()


def test_a_beat_extends_the_lease(beats: redis.Redis, memory: keeper.Memory) -> None:
    node = silent_node()
    beat(beats, node, time.time())
    keeper.keep(beats, memory)
    lease = Lease.objects.get(pk=node.pk)
    assert lease.reachable
    assert lease.deadline > timezone.now()


def test_a_node_without_beats_is_lost_once(beats: redis.Redis, memory: keeper.Memory) -> None:
    node = silent_node()
    keeper.keep(beats, memory)
    keeper.keep(beats, memory)
    assert not Lease.objects.get(pk=node.pk).reachable
    assert lease_signals() == 1


@pytest.fixture
def forgotten(beats: redis.Redis, memory: keeper.Memory) -> Node:
    """A node that fell silent while it was on hold, which led to nothing, and is not held now."""
    node = silent_node()
    fleet.set_hold(SYSTEM, node.pk, "mine")
    keeper.keep(beats, memory)
    intake.triage_signals()
    keeper.keep(beats, memory)
    assert not PlaybookRun.objects.exists()
    assert lease_signals() == 1
    fleet.set_hold(SYSTEM, node.pk, "")
    return node


def keep_on(beats: redis.Redis, memory: keeper.Memory) -> None:
    """Two passes, and what the workers make of each."""
    for _ in range(2):
        keeper.keep(beats, memory)
        intake.triage_signals()


def test_a_node_that_fell_silent_on_hold_is_looked_at_once_it_is_let_go(
    beats: redis.Redis, memory: keeper.Memory, forgotten: Node
) -> None:
    keeper.keep(beats, memory)
    keep_on(beats, memory)

    run = PlaybookRun.objects.get()
    assert (run.playbook, run.node, lease_signals()) == ("repair-node", forgotten, 2)


def test_a_node_is_looked_at_once_each_time_that_it_is_let_go(
    beats: redis.Redis, memory: keeper.Memory, forgotten: Node
) -> None:
    keep_on(beats, memory)
    incidents.cancel_run(SYSTEM, PlaybookRun.objects.get().pk, "let it be")
    incidents.resolve_by_hand(SYSTEM, Incident.objects.get().pk, "let it be")
    keep_on(beats, memory)
    once = lease_signals()
    fleet.set_hold(SYSTEM, forgotten.pk, "mine again")
    keep_on(beats, memory)
    held = lease_signals()
    fleet.set_hold(SYSTEM, forgotten.pk, "")
    keep_on(beats, memory)

    assert (once, held, lease_signals()) == (2, 2, 3)


def test_a_node_that_fell_silent_while_it_drained_is_looked_at_once_that_is_called_off(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = silent_node()
    person = Actor(ActorKind.USER, "1")
    drain = incidents.order_node(person, node.pk, "drain", "new cables")
    engine.create_steps()
    engine.take_step("test")
    keep_on(beats, memory)
    told = lease_signals()
    incidents.call_off(person, drain.pk, "the cables did not come")
    keep_on(beats, memory)

    repair = PlaybookRun.objects.get(playbook="repair-node")
    assert (told, repair.node, lease_signals()) == (1, node, 2)


def heard_again(node: Node) -> None:
    Lease.objects.filter(pk=node.pk).update(reachable=True, unreachable_since=None)


def taken_out(node: Node) -> None:
    fleet.transition(SYSTEM, node.pk, NodeState.QUARANTINED, reason="by hand")


def in_the_hands_of_a_run(node: Node) -> None:
    PlaybookRunFactory(node=node, cluster=node.cluster)


def watched_with_its_site(node: Node) -> None:
    PlaybookRunFactory(playbook="site-silent", cluster=node.cluster)


def with_an_open_incident(node: Node) -> None:
    IncidentFactory(node=node, cluster=node.cluster)


def handed_over_a_moment_ago(node: Node) -> None:
    record_signal(
        "sig_alone",
        SignalKind.LEASE_LOST,
        source="site-silent",
        observed_at=timezone.now(),
        node=node,
    )


@pytest.mark.parametrize(
    ("meanwhile", "signals"),
    [
        (heard_again, 1),
        (taken_out, 1),
        (in_the_hands_of_a_run, 1),
        (watched_with_its_site, 1),
        (with_an_open_incident, 1),
        (handed_over_a_moment_ago, 2),
    ],
)
def test_a_node_that_is_let_go_and_seen_to_is_left_to_whoever_does(
    beats: redis.Redis,
    memory: keeper.Memory,
    forgotten: Node,
    meanwhile: Callable[[Node], None],
    signals: int,
) -> None:
    Lease.objects.update(deadline=timezone.now() + timedelta(hours=1))
    meanwhile(forgotten)
    keeper.keep(beats, memory)

    assert lease_signals() == signals


def test_a_node_that_is_let_go_is_not_missed_before_ingest_hears(
    beats: redis.Redis, memory: keeper.Memory, forgotten: Node
) -> None:
    beats.delete(redis_keys.INGEST_ALIVE)
    keeper.keep(beats, memory)

    assert lease_signals() == 1


def test_a_hold_that_was_lifted_before_its_node_fell_silent_tells_of_nothing(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = silent_node()
    fleet.set_hold(SYSTEM, node.pk, "mine")
    fleet.set_hold(SYSTEM, node.pk, "")
    keeper.keep(beats, memory)
    keeper.keep(beats, memory)

    assert lease_signals() == 1


def test_nobody_is_missed_after_the_last_word_of_ingest(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    silent_node()
    ingest_says(beats, at=time.time() - 3.0)
    keeper.keep(beats, memory)
    assert lease_signals() == 0


def test_an_ingest_that_began_anew_has_to_hear_the_nodes_before_any_is_missed(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    keeper.keep(beats, memory)
    silent_node()
    ingest_says(beats, at=time.time() + 3600.0, since=time.time())
    keeper.keep(beats, memory)
    assert lease_signals() == 0


def test_a_beat_from_before_is_not_heard_again(beats: redis.Redis, memory: keeper.Memory) -> None:
    node = NodeFactory()
    beat(beats, node, time.time())
    keeper.keep(beats, memory)
    Lease.objects.filter(pk=node.pk).update(deadline=timezone.now() - timedelta(seconds=1))
    keeper.keep(beats, memory)
    assert lease_signals() == 1


def test_a_keeper_that_begins_to_lead_takes_no_old_beat_for_news(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = NodeFactory()
    beat(beats, node, time.time())
    keeper.keep(beats, memory)
    ran_out = timezone.now() - timedelta(seconds=1)
    Lease.objects.filter(pk=node.pk).update(deadline=ran_out)
    keeper.keep(beats, memory)

    keeper.keep(beats, keeper.Memory(heard={}, grace_until=keeper._grace()))

    lease = Lease.objects.get(pk=node.pk)
    assert (lease.reachable, lease.deadline) == (False, ran_out)


def test_a_beat_of_the_future_holds_up_none_once_the_clock_is_right(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = NodeFactory()
    Lease.objects.filter(pk=node.pk).update(
        last_beat_at=timezone.now() + timedelta(hours=1),
        deadline=timezone.now() + timedelta(hours=1),
    )
    beat(beats, node, time.time())

    keeper.keep(beats, memory)

    assert Lease.objects.get(pk=node.pk).deadline < timezone.now() + timedelta(minutes=30)


def test_what_a_node_said_while_no_keeper_led_is_heard(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = silent_node()
    keeper.keep(beats, memory)
    beat(beats, node, time.time())

    keeper.keep(beats, keeper.Memory(heard={}, grace_until=keeper._grace()))

    assert Lease.objects.get(pk=node.pk).reachable


def test_a_lost_node_that_beats_again_is_reachable(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = silent_node()
    keeper.keep(beats, memory)
    beat(beats, node, time.time())
    keeper.keep(beats, memory)
    assert Lease.objects.get(pk=node.pk).reachable


def test_nobody_is_lost_while_ingest_is_away(beats: redis.Redis, memory: keeper.Memory) -> None:
    silent_node()
    beats.delete(redis_keys.INGEST_ALIVE)
    keeper.keep(beats, memory)
    assert lease_signals() == 0
    assert memory.grace_until > time.monotonic()


def test_nobody_is_lost_while_redis_is_away(memory: keeper.Memory) -> None:
    silent_node()
    keeper.keep(redis.Redis(host="127.0.0.1", port=1, socket_timeout=0.2), memory)
    assert lease_signals() == 0


def test_a_keeper_that_just_started_declares_nobody_lost(beats: redis.Redis) -> None:
    silent_node()
    keeper.keep(beats, keeper.Memory(heard={}, grace_until=keeper._grace()))
    assert lease_signals() == 0


def overdue_order() -> Command:
    order = fleet.queue_command(SYSTEM, NodeFactory().pk, wire.Diagnose(), requester="stp_1")
    Command.objects.update(expires_at=timezone.now() - timedelta(hours=1))
    return order


def test_an_order_that_is_overdue_expires(beats: redis.Redis, memory: keeper.Memory) -> None:
    order = overdue_order()
    keeper.keep(beats, memory)
    order.refresh_from_db()
    assert order.state == CommandState.EXPIRED


def test_an_order_does_not_expire_before_its_answer_could_arrive(beats: redis.Redis) -> None:
    order = overdue_order()
    keeper.keep(beats, keeper.Memory(heard={}, grace_until=keeper._grace()))
    order.refresh_from_db()
    assert order.state == CommandState.QUEUED


def test_no_order_expires_while_ingest_is_away(beats: redis.Redis, memory: keeper.Memory) -> None:
    order = overdue_order()
    beats.delete(redis_keys.INGEST_ALIVE)
    keeper.keep(beats, memory)
    order.refresh_from_db()
    assert order.state == CommandState.QUEUED


def test_progress_of_long_ago_is_thinned(beats: redis.Redis, memory: keeper.Memory) -> None:
    job = JobFactory()
    for second in (1, 2):
        at = timezone.now().replace(second=second) - timedelta(days=30)
        ProgressSampleFactory(job=job, at=at)

    keeper.keep(beats, memory)

    assert job.progress.get().steps == 20


def test_a_clock_that_is_set_back_lengthens_no_grace(
    beats: redis.Redis, settings: Settings
) -> None:
    settings.LEASE_S = 0
    with patch.object(timezone, "now", return_value=timezone.now() + timedelta(hours=1)):
        memory = keeper.Memory(heard={}, grace_until=keeper._grace())
    silent_node()

    keeper.keep(beats, memory)

    assert lease_signals() == 1


def test_a_watch_that_asked_for_a_person_looks_again_once_its_site_is_heard(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    run = PlaybookRunFactory(
        playbook="site-silent",
        state=RunState.NEEDS_OPERATOR,
        state_reason=f"{site_silent.SILENT}node-1",
    )
    keeper.keep(beats, memory)

    run.refresh_from_db()
    assert run.state == RunState.PENDING


def test_a_repair_that_asked_over_silence_looks_again_once_its_node_is_heard(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = silent_node()
    run = PlaybookRunFactory(
        node=node,
        cluster=node.cluster,
        state=RunState.NEEDS_OPERATOR,
        state_reason=f"{node_steps.NOT_HEARD}, and it has no BMC on record",
    )
    keeper.keep(beats, memory)
    run.refresh_from_db()
    silent = run.state
    beat(beats, node, time.time())
    keeper.keep(beats, memory)
    run.refresh_from_db()

    assert (silent, run.state) == (RunState.NEEDS_OPERATOR, RunState.PENDING)


def test_a_beat_of_a_node_that_nobody_knows_is_ignored(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    content = {"boot_id": "b", "received_at": time.time(), "seq": 1}
    beats.hset(redis_keys.BEATS, "nod_stranger", json.dumps(content))
    keeper.keep(beats, memory)
    assert not Lease.objects.filter(pk="nod_stranger").exists()


def read(client: redis.Redis, node: Node, at: float, card: dict[str, object]) -> None:
    content = {"boot_id": node.boot_id, "received_at": at, "seq": 1, "readings": [card]}
    client.hset(redis_keys.BEATS, node.pk, json.dumps(content))


def read_ports(
    client: redis.Redis, node: Node, at: float, ports: Sequence[Mapping[str, object]]
) -> None:
    content = {"boot_id": node.boot_id, "received_at": at, "seq": 1, "ports": ports}
    client.hset(redis_keys.BEATS, node.pk, json.dumps(content))


def test_a_card_whose_corrected_errors_accelerate_is_a_signal_once(
    beats: redis.Redis, memory: keeper.Memory, settings: Settings
) -> None:
    settings.ECC_DRIFT_WINDOW_S = 12.0
    node = NodeFactory()
    card = GpuFactory(node=node)
    now = time.time()
    for second in range(24):
        count = int(4 * (2 ** (second / 3) - 1))
        read(beats, node, now + second, {"uuid": card.uuid, "ecc_corrected": count})
        keeper.keep(beats, memory)
    signal = Signal.objects.get(kind=SignalKind.READING)
    assert (signal.node, signal.gpu) == (node, card)
    assert signal.data["reading"] == "ecc_corrected"
    assert f"ecc_corrected of {card.uuid}" in signal.raw


def flags_told() -> list[tuple[str, float]]:
    signals = Signal.objects.filter(kind=SignalKind.READING).order_by("observed_at")
    return [(signal.data["reading"], signal.data["value"]) for signal in signals]


def test_a_flag_of_a_card_is_a_signal_once_while_it_stays(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = NodeFactory()
    uuid = GpuFactory(node=node).uuid
    now = time.time()
    values: list[float | None] = [0, 1, 1, None, 1, 0, 1]
    for second, value in enumerate(values):
        read(beats, node, now + second, {"uuid": uuid, "remap_pending": value})
        keeper.keep(beats, memory)

    assert flags_told() == [("remap_pending", 1.0)] * 2  # at first, and after it was gone


def test_a_keeper_that_was_started_anew_tells_of_no_flag_again(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = NodeFactory()
    uuid = GpuFactory(node=node).uuid
    read(beats, node, time.time(), {"uuid": uuid, "remap_failed": 1, "recovery_action": 4})
    keeper.keep(beats, memory)
    fresh = keeper.Memory(heard={}, grace_until=keeper._grace())
    later = {"uuid": uuid, "remap_failed": 1, "recovery_action": 2}
    read(beats, node, time.time() + 5, later)
    keeper.keep(beats, fresh)

    assert sorted(flags_told()) == [
        ("recovery_action", 2.0), ("recovery_action", 4.0), ("remap_failed", 1.0)
    ]  # fmt: skip


def test_a_card_is_measured_against_what_it_did_before_the_keeper_was_started(
    beats: redis.Redis, memory: keeper.Memory, settings: Settings
) -> None:
    settings.READING_HOLD_S = 3.0
    node = NodeFactory()
    uuid = GpuFactory(node=node).uuid
    now = time.time()
    read(beats, node, now, {"uuid": uuid, "nvlink_mb_s": 480_000})
    keeper.keep(beats, memory)
    fresh = keeper.Memory(heard={}, grace_until=keeper._grace())
    for second in range(1, 6):
        read(beats, node, now + second, {"uuid": uuid, "nvlink_mb_s": 300_000})
        keeper.keep(beats, fresh)

    signal = Signal.objects.get(kind=SignalKind.READING)
    assert (signal.gpu_id, signal.data["baseline"]) == (uuid, 480_000)


def test_a_port_that_stays_down_is_a_signal_of_its_node(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = NodeFactory()
    now = time.time()
    for second in range(0, 300, 10):
        ports = [{"name": "mlx5_0/1", "up": second == 0}, {"name": "mlx5_1/1", "up": 1}]
        read_ports(beats, node, now + second, ports)
        keeper.keep(beats, memory)

    signal = Signal.objects.get(kind=SignalKind.READING)
    assert (signal.node, signal.gpu) == (node, None)
    assert (signal.data["reading"], signal.data["port"]) == ("port_drop", "mlx5_0/1")


def test_a_port_of_which_a_beat_says_nothing_is_not_forgotten(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = NodeFactory()
    now = time.time()
    for second in range(0, 300, 10):
        port = {"name": "mlx5_0/1", "up": second == 0}
        ports = [] if second == 10 else [port]
        read_ports(beats, node, now + second, ports)
        keeper.keep(beats, memory)

    assert Signal.objects.get(kind=SignalKind.READING).data["reading"] == "port_drop"


def test_a_keeper_that_was_started_anew_tells_of_no_reading_again(
    beats: redis.Redis, memory: keeper.Memory, settings: Settings
) -> None:
    settings.READING_HOLD_S = 3.0
    node = NodeFactory()
    uuid = GpuFactory(node=node).uuid
    now = time.time()
    for started in (0, 100):
        for second in range(6):
            card = {"uuid": uuid, "pcie_lanes": 8, "pcie_lanes_max": 16}
            read(beats, node, now + started + second, card)
            keeper.keep(beats, memory)
        memory = keeper.Memory(heard={}, grace_until=keeper._grace())

    assert Signal.objects.filter(kind=SignalKind.READING).count() == 1


def test_a_finding_that_cannot_be_written_keeps_no_other_from_it(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    first, second = NodeFactory(), NodeFactory()
    cards = [GpuFactory(node=node).uuid for node in (first, second)]
    sick = {"uuid": cards[0], "remap_failed": 1}
    read(beats, first, time.time(), sick)
    ports = [{"name": "nul\0/1", "up": 1, "symbol_errors": 0}]
    for at, errors in ((0, 0), (1, 500)):
        ports[0]["symbol_errors"] = errors
        read_ports(beats, second, time.time() + at, ports)
        keeper.keep(beats, memory)

    assert flags_told() == [("remap_failed", 1.0)]


def test_what_a_card_says_of_itself_is_told_of_each_node_that_it_sits_in(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    before, after = NodeFactory(), NodeFactory()
    card = GpuFactory(node=before)
    now = time.time()
    read(beats, before, now, {"uuid": card.uuid, "remap_failed": 1})
    keeper.keep(beats, memory)
    beats.delete(redis_keys.BEATS)
    Gpu.objects.filter(pk=card.pk).update(node=after)
    for second in (1, 2):
        read(beats, after, now + second, {"uuid": card.uuid, "remap_failed": 1})
        keeper.keep(beats, memory)

    told = Signal.objects.filter(kind=SignalKind.READING).order_by("observed_at")
    assert [signal.node for signal in told] == [before, after]


def test_a_card_s_best_in_another_chassis_says_nothing(
    beats: redis.Redis, memory: keeper.Memory, settings: Settings
) -> None:
    settings.READING_HOLD_S = 3.0
    before, after = NodeFactory(), NodeFactory()
    card = GpuFactory(node=before)
    now = time.time()
    read(beats, before, now, {"uuid": card.uuid, "nvlink_mb_s": 480_000})
    keeper.keep(beats, memory)
    beats.delete(redis_keys.BEATS)
    Gpu.objects.filter(pk=card.pk).update(node=after)
    for second in range(1, 9):
        read(beats, after, now + second, {"uuid": card.uuid, "nvlink_mb_s": 240_000})
        keeper.keep(beats, memory)

    assert not Signal.objects.filter(kind=SignalKind.READING).exists()
    assert (card.baseline.node, card.baseline.nvlink_mb_s) == (after, 240_000)


@pytest.mark.parametrize(
    "card", [{"uuid": "GPU-unknown"}, {"uuid": "GPU-none", "ecc_corrected": None}]
)
def test_a_card_without_a_counter_says_nothing(
    beats: redis.Redis, memory: keeper.Memory, card: dict[str, object]
) -> None:
    node = NodeFactory()
    for second in range(3):
        read(beats, node, time.time() + second, card)
        keeper.keep(beats, memory)
    assert not memory.sensors.counters
    assert not Signal.objects.filter(kind=SignalKind.READING).exists()


# --- what is kept for the charts ------------------------------------------------------------------


def samples() -> list[tuple[str, float]]:
    """The node and the temperature in each sample."""
    return sorted(
        (sample.node_id, card["temperature_c"])
        for sample in NodeSample.objects.all()
        for card in sample.gpus
    )


def test_each_node_s_newest_reading_is_kept_whichever_pass_heard_it(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    first, second = NodeFactory(), NodeFactory()
    now = time.time()
    memory.sampled_at = time.monotonic()
    for beaten, node in enumerate((first, second, first, second)):
        card = {"uuid": "GPU-1", "temperature_c": 40.0 + beaten}
        read(beats, node, now + beaten, card)
        keeper.keep(beats, memory)
    memory.sampled_at -= settings.SAMPLE_INTERVAL_S
    keeper.keep(beats, memory)  # which hears nobody

    assert samples() == sorted([(first.pk, 42.0), (second.pk, 43.0)])


def test_a_node_that_fell_silent_is_not_kept_again(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    read(beats, NodeFactory(), time.time(), {"uuid": "GPU-1", "temperature_c": 40.0})
    keeper.keep(beats, memory)
    memory.sampled_at = time.monotonic() - settings.SAMPLE_INTERVAL_S
    keeper.keep(beats, memory)

    assert len(samples()) == 1


def test_a_clock_that_is_set_back_keeps_no_reading_from_the_charts(
    beats: redis.Redis, memory: keeper.Memory, settings: Settings
) -> None:
    settings.SAMPLE_INTERVAL_S = 0
    with patch.object(timezone, "now", return_value=timezone.now() + timedelta(hours=1)):
        keeper.keep(beats, memory)
    node = NodeFactory()
    read(beats, node, time.time(), {"uuid": "GPU-1", "temperature_c": 40.0})

    keeper.keep(beats, memory)

    assert samples() == [(node.pk, 40.0)]


# --- what fails -----------------------------------------------------------------------------------


def test_a_deadlock_in_one_chore_keeps_no_other_from_being_done(
    beats: redis.Redis, memory: keeper.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_spares = Mock()
    monkeypatch.setattr(incidents, "admit_enrolled", broken_deadlock)
    monkeypatch.setattr(incidents, "keep_warm_spares", warm_spares)

    keeper.keep(beats, memory)

    warm_spares.assert_called_once()


def test_a_beat_whose_lease_could_not_be_written_is_heard_again(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = silent_node()
    beat(beats, node, time.time())
    with (
        patch.object(fleet, "renew_leases", broken_deadlock),
        pytest.raises(OperationalError, match="deadlock"),
    ):
        keeper.keep(beats, memory)

    keeper.keep(beats, memory)

    assert Lease.objects.get(pk=node.pk).deadline > timezone.now()
    assert lease_signals() == 0


def test_a_flag_that_a_card_shows_before_its_node_s_report_is_taken_is_told_after_it(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = NodeFactory()
    sick = {"uuid": "GPU-just-fitted", "remap_failed": 1}
    now = time.time()
    read(beats, node, now, sick)
    keeper.keep(beats, memory)
    GpuFactory(node=node, uuid=sick["uuid"])
    read(beats, node, now + 1, sick)

    keeper.keep(beats, memory)

    assert flags_told() == [("remap_failed", 1.0)]


def test_a_card_of_which_nothing_could_be_looked_up_is_met_in_the_next_pass(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = NodeFactory()
    sick = {"uuid": GpuFactory(node=node).uuid, "remap_failed": 1}
    now = time.time()
    read(beats, node, now, sick)
    with patch.object(sensor_signals, "_told_before", broken_deadlock):
        keeper.keep(beats, memory)
    read(beats, node, now + 1, sick)

    keeper.keep(beats, memory)

    assert flags_told() == [("remap_failed", 1.0)]


@pytest.mark.django_db(transaction=True)
def test_a_deadlock_does_not_cost_the_keeper_its_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    memories: list[keeper.Memory] = []
    passes = iter([broken_deadlock, stop.set])

    def keep(_: redis.Redis, memory: keeper.Memory) -> None:
        memories.append(memory)
        next(passes)()

    monkeypatch.setattr(keeper, "keep", keep)
    monkeypatch.setattr(keeper, "PASS_S", 0.0)
    take_lead = Mock(side_effect=keeper._take_lead)
    monkeypatch.setattr(keeper, "_take_lead", take_lead)

    keeper.run(stop, Pulse())

    take_lead.assert_called_once()
    assert memories[0] is memories[1]


def stands_still(*_: object, **__: object) -> None:
    """A process that is stopped within a transaction, for longer than the server waits for it."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 1")
        select.select([connection.connection], [], [])
        cursor.execute("SELECT 1")


def holds_the_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_locks"
            " WHERE locktype = 'advisory' AND pid = pg_backend_pid())"
        )
        return bool(cursor.fetchone()[0])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("module", "action"),
    [(incidents, "admit_enrolled"), (health, "record_samples")],
    ids=["in a chore", "between them"],
)
def test_a_keeper_whose_session_the_server_ended_leads_on_only_with_its_lock(
    monkeypatch: pytest.MonkeyPatch, module: object, action: str
) -> None:
    stop = threading.Event()
    held: list[bool] = []

    def looks(*_: object) -> None:
        held.append(holds_the_lock())
        stop.set()

    turns: Iterator[Callable[..., None]] = iter([stands_still, looks])
    monkeypatch.setattr(module, action, lambda *args: next(turns)(*args))
    monkeypatch.setattr(keeper, "PASS_S", 0.0)

    keeper.run(stop, Pulse())

    assert held == [True]


@pytest.mark.django_db(transaction=True)
def test_a_session_that_is_lost_over_a_finding_ends_the_pass(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    node = NodeFactory()
    sick = {"uuid": GpuFactory(node=node).uuid, "remap_failed": 1}
    read(beats, node, time.time(), sick)

    with (
        patch.object(sensor_signals, "record_signal", stands_still),
        pytest.raises(InterfaceError, match="session was lost"),
    ):
        keeper.keep(beats, memory)


def test_orders_to_jobs_and_sessions_that_expired_are_forgotten(
    beats: redis.Redis, memory: keeper.Memory
) -> None:
    now = timezone.now()
    for days in (2, 0.5, -1):
        DirectiveFactory(expires_at=now - timedelta(days=days))
    for days in (1, -1):
        Session.objects.create(session_key=f"{days}", expire_date=now - timedelta(days=days))

    keeper.keep(beats, memory)

    left = Directive.objects.order_by("expires_at").values_list("expires_at", flat=True)
    assert [round((now - at) / timedelta(days=1), 1) for at in left] == [0.5, -1.0]
    assert [one.session_key for one in Session.objects.all()] == ["-1"]
