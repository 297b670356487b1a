"""Which trained tensors are said to have stayed as they were."""

from __future__ import annotations

from itertools import pairwise

import torch

from runtime.checkpoint.manifest import Part, layout_of
from runtime.checkpoint.staleness import Staleness, unchanged
from runtime.image import CHUNK_BYTES
from runtime.snapshot import Copying, When

LARGE = 3 * CHUNK_BYTES // 4  # elements of float32: 3 MiB
SMALL = 1000


def due(name: str, _tensor: torch.Tensor) -> When:
    return "whenever" if "frozen" in name else "now" if "extra" in name else "soon"


def part_of(step: int, state: dict[str, object]) -> Part:
    staged = Copying(state, step, None, due).finish()
    return Part(
        step=step, save="s", rank=1, table=staged.table, hashes=staged.hashes,
        files=layout_of(staged.table, 1),
    )  # fmt: skip


def part_at(step: int, **values: float) -> Part:
    """A state of which each tensor has one value: large ones, and two small ones beside."""
    sizes = {"frozen": LARGE, "head": LARGE, "body": LARGE, "bias": SMALL, "norm": SMALL}
    filled = {name: torch.full((size,), values.get(name, 0.0)) for name, size in sizes.items()}
    return part_of(step, {"model": filled})


def names(part: Part, before: Part) -> set[str]:
    return {piece.name for piece in unchanged(part, before)}


def test_a_large_weight_that_stays_among_others_is_named_with_its_rank_and_file() -> None:
    finding = Staleness().news(part_at(9, body=1.0, bias=1.0), part_at(3))

    assert finding is not None
    assert str(finding).startswith("rank-1-0001.bin (rank 1), tensors model.head: step 9 holds")
    assert "what step 3 held, and the rest of what is trained has changed" in finding.what


def test_small_ones_show_if_nothing_beside_them_changed() -> None:
    assert names(part_at(2, head=1.0), part_at(1)) >= {".model.bias", ".model.norm"}
    assert names(part_at(2, head=1.0, norm=1.0), part_at(1)) == {".model.body"}


def test_one_of_which_few_chunks_are_its_own_is_judged_by_all_of_them() -> None:
    def part(step: int, first: float) -> Part:
        """The second lies in half a chunk, a whole one and more than half a third."""
        second = torch.zeros(CHUNK_BYTES // 4 * 21 // 10)
        second[0] = first
        return part_of(step, {"model": {"a": torch.ones(CHUNK_BYTES // 8), "b": second}})

    assert names(part(2, 1.0), part(1, 0.0)) == set()


def test_a_state_that_stays_as_it_is_is_told_once_until_it_changes() -> None:
    staleness = Staleness()
    values = {"head": 1.0, "body": 1.0, "bias": 1.0, "norm": 1.0}
    states = [{}, {}, {}, values, values]
    parts = [part_at(step, **state) for step, state in enumerate(states)]

    told = [staleness.news(now, before) for before, now in pairwise(parts)]

    assert [one is not None for one in told] == [True, False, False, True]
    assert [one.tensors for one in told if one] == [
        (".model.head", ".model.body", ".model.bias", ".model.norm")
    ] * 2
    assert all("step" in one.what and "of all that is trained" in one.what for one in told if one)


def test_a_weight_is_told_once_until_all_change() -> None:
    staleness = Staleness()
    states = [{"body": 1.0}, {"body": 2.0}, {"body": 3.0, "head": 1.0}, {"body": 4.0, "head": 2.0}]
    states.append({"body": 5.0, "head": 2.0})
    parts = [part_at(step, norm=step, **values) for step, values in enumerate(states)]

    told = [staleness.news(now, before) for before, now in pairwise(parts)]

    assert [one and one.tensors for one in told] == [
        (".model.head",), None, None, (".model.head",),
    ]  # fmt: skip


def test_what_is_frozen_is_no_finding() -> None:
    assert Staleness().news(part_at(2, head=1, body=1, bias=1, norm=1), part_at(1)) is None


def test_what_an_optimizer_or_a_helper_keeps_may_stay() -> None:
    def part(step: int) -> Part:
        kept = {"optimizers": {"0": torch.ones(LARGE)}, "helpers": {"ema": torch.ones(LARGE)}}
        return part_of(step, {"model": {"w": torch.full((LARGE,), float(step))}, **kept})

    assert Staleness().news(part(2), part(1)) is None


def test_what_changes_at_any_time_may_get_longer() -> None:
    def part(step: int) -> Part:
        """Its extra is laid behind what is trained."""
        model = {"w": torch.ones(LARGE), "v": torch.full((LARGE,), float(step))}
        return part_of(step, {"model": model, "extra": torch.ones(step * SMALL)})

    assert names(part(2), part(1)) == {".model.w"}


def test_saves_of_one_step_or_of_other_weights_are_not_compared() -> None:
    other = part_of(1, {"model": {"head": torch.zeros(LARGE)}})

    assert Staleness().news(part_at(2, body=1.0), part_at(2)) is None
    assert Staleness().news(part_at(2, body=1.0), other) is None
    assert Staleness().news(part_at(2), None) is None


def test_where_the_weights_are_not_known_what_an_optimizer_keeps_may_stay() -> None:
    """As a learning rate that is a tensor."""
    parts = [part_of(step, {"optimizers": {"lr": torch.ones(1)}}) for step in (1, 2)]

    assert Staleness().news(parts[1], parts[0]) is None
