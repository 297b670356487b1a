"""A job that is told to end is over in the end, whatever its processes do; and may be started anew
where its start came to nothing."""

from __future__ import annotations

import pytest

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet.choices import NodeState
from controlplane.incidents import actions as incidents
from controlplane.incidents.actions.ending import end_job
from controlplane.incidents.models import Incident
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JobState, PlacementState
from controlplane.jobs.models import Job, Placement
from node_agent import wire
from tests.workers.moving import PERSON, commands, state
from tests.workers.world import World, answer, drain, run_of

pytestmark = pytest.mark.django_db


def job_state() -> str:
    return Job.objects.get().state


@pytest.mark.parametrize("requested", [True, False])
def test_a_rank_that_dies_while_it_was_to_leave_has_left(world: World, requested: bool) -> None:
    end_job(PERSON, world.job.pk, "enough")
    for placement in world.placements:
        world.exits(placement, signal=9, requested=requested)
    drain()

    assert job_state() == JobState.STOPPED
    assert not Incident.objects.exists()
    assert state(world.placements[0].node)[0] == NodeState.AVAILABLE


def test_a_rank_that_never_trained_is_in_no_loop_to_leave(world: World) -> None:
    Placement.objects.update(state=PlacementState.STARTING, joined_at=None)
    end_job(PERSON, world.job.pk, "enough")

    assert incidents.finish_endings() == 2
    assert {one.placement for one in commands("stop_process")} == {  # type: ignore[union-attr]
        one.pk for one in world.placements
    }
    answer("stop_process", stopped=True)  # nothing had been started
    incidents.finish_endings()

    assert job_state() == JobState.STOPPED


def test_a_rank_that_had_died_before_has_left(world: World) -> None:
    world.exits(world.placements[1], signal=9)
    drain()
    end_job(PERSON, world.job.pk, "enough")
    jobs.end_placement(SYSTEM, world.placements[0].pk, "left", free_node=True)
    assert job_state() == JobState.STOPPING

    incidents.finish_endings()
    answer("stop_process", stopped=True)
    incidents.finish_endings()

    assert job_state() == JobState.STOPPED


def test_a_job_of_which_nothing_is_left_is_over_whoever_saw_it_first(world: World) -> None:
    end_job(PERSON, world.job.pk, "enough")
    Placement.objects.update(state=PlacementState.ENDED)  # two at once, and neither saw both

    incidents.finish_endings()

    assert job_state() == JobState.STOPPED


def test_the_coordinator_of_a_start_in_vain_ends(world: World) -> None:
    jobs.set_coordinator(SYSTEM, world.job.pk, world.spares[0].pk, "127.0.0.1:1", "plc_led")
    jobs.begin_start(SYSTEM, world.job.pk, "again")

    (stop,) = commands("stop_process")
    assert isinstance(stop, wire.StopProcess)
    assert stop.placement == "plc_led"


def test_its_coordinator_ends_with_it(world: World) -> None:
    jobs.set_coordinator(SYSTEM, world.job.pk, world.spares[0].pk, "127.0.0.1:1", "plc_led")
    end_job(PERSON, world.job.pk, "enough")
    assert commands("stop_process") == []
    for placement in world.placements:
        jobs.end_placement(SYSTEM, placement.pk, "left", free_node=True)

    (stop,) = commands("stop_process")
    assert isinstance(stop, wire.StopProcess)
    assert stop.placement == "plc_led"


def test_a_start_that_came_to_nothing_may_be_made_again(world: World) -> None:
    for placement in world.placements:
        jobs.end_placement(SYSTEM, placement.pk, "x", free_node=True)
    Job.objects.update(state=JobState.PENDING)
    incidents.start_registered(PERSON, world.job.pk, "once")
    assert not incidents.may_be_started(Job.objects.get())
    with pytest.raises(Conflict, match="is starting"):
        incidents.start_registered(PERSON, world.job.pk, "twice")

    incidents.cancel_run(PERSON, run_of("start-job").pk, "no node is free")
    incidents.start_registered(PERSON, world.job.pk, "again")

    assert run_of("start-job").context["reason"] == "again"
    assert job_state() == JobState.STARTING
