"""A checkpoint that the control plane asks for: to which tiers it is saved, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime.replicas import Fleet, until
from tests.runtime.test_client import Door

#: Whoever saves, by what it tells of: each replica keeps its own in the first two tiers.
ALL = {("peer", 0), ("peer", 1), ("local", 0), ("local", 1), ("shared", -1), ("object", -1)}


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def test_what_is_asked_for_is_saved_to_each_tier_once(
    make_fleet: Callable[..., Fleet], door: Door, tmp_path: Path
) -> None:
    """However many hear of it, and nothing is due by itself within this time."""
    objects = f"file://{tmp_path / 'objects'}"
    fleet = make_fleet(
        2, divided=2, url=door.url, holders=True, own_disks=True, object_store=objects
    )
    fleet.start()
    fleet.wait_for_step(20)
    unasked = saved(door)

    door.reply["directives"] = [{"id": "dir_1", "verb": "checkpoint", "args": {}}]
    until(lambda: {*saved(door)} == ALL, "each tier was saved to")
    fleet.train_on()  # each replica has heard the order by now, in the answer to what it told
    asked = fleet.newest()
    fleet.stop()  # with which all save once more

    assert unasked == {}
    steps = {who: [step for step in made if step <= asked] for who, made in saved(door).items()}
    assert {who: len(made) for who, made in steps.items()} == dict.fromkeys(ALL, 1)


def saved(door: Door) -> dict[tuple[str, int], list[int]]:
    """The steps that were told to be saved, by the tier and the replica that it is of, if of one
    alone."""
    found: dict[tuple[str, int], list[int]] = {}
    for batch in list(door.batches):
        for told in (one for one in batch["messages"] if one["type"] == "checkpoint"):
            whose = batch["replica"] if told["tier"] in ("peer", "local") else -1
            found.setdefault((told["tier"], whose), []).append(told["step"])
    return found
