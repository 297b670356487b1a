"""Replicas of two ranks each, their model divided by fully_shard: one rank's death drops its
replica, the others train on; a replica that comes back takes its parts from theirs."""

from __future__ import annotations

import pytest

from tests.runtime.replicas import Fleet
from tests.runtime.test_replicas import MakeFleet, assert_every_sample_once


def test_two_by_two(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, divided=2)
    fleet.start()
    fleet.wait_for_step(20)

    fleet.kill_rank(1, 1)
    fleet.train_on()
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1])
    fleet.train_on()
    fleet.stop()

    assert len(fleet.digests()) == len(fleet.digests_of_rank(1)) == 1
