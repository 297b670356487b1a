"""Which rank of which replica a process is, by what its launcher says."""

from __future__ import annotations

import pytest

from runtime.job import place_of

TORCHRUN = {"TORCHELASTIC_RUN_ID": "r", "RANK": "1", "WORLD_SIZE": "2", "DRYDOCK_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1)),
        ({"DRYDOCK_RANK": "1", "DRYDOCK_RANKS": "4"}, (1, 4)),
        (TORCHRUN, (1, 2)),
        ({**TORCHRUN, "DRYDOCK_RANKS": "3"}, (0, 3)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, (0, 1)),  # of something else
    ],
)
def test_a_rank_s_place_in_its_replica(environment: dict[str, str], place: tuple[int, int]) -> None:
    assert place_of(environment) == place


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_a_rank_beyond_its_replica_is_refused(rank: str) -> None:
    with pytest.raises(RuntimeError, match=f"DRYDOCK_RANK is {rank} and DRYDOCK_RANKS is 2"):
        place_of({"DRYDOCK_RANK": rank, "DRYDOCK_RANKS": "2"})
