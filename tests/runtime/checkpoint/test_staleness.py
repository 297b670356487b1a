"""Which trained tensors are said to have stayed as they were."""

from __future__ import annotations

import torch

from runtime.checkpoint.manifest import Part, layout_of
from runtime.checkpoint.staleness import findings, unchanged
from runtime.image import CHUNK_BYTES
from runtime.snapshot import Copying, When

LARGE = 3 * CHUNK_BYTES // 4  # elements of float32: 3 MiB
SMALL = 1000


def due(name: str, _tensor: torch.Tensor) -> When:
    return "whenever" if "frozen" in name else "soon"


def part_at(step: int, **values: float) -> Part:
    """A state of which each tensor has one value: large ones, and two small ones beside."""
    sizes = {"frozen": LARGE, "head": LARGE, "body": LARGE, "bias": SMALL, "norm": SMALL}
    filled = {name: torch.full((size,), values.get(name, 0.0)) for name, size in sizes.items()}
    staged = Copying({"model": filled}, step, None, due).finish()
    return Part(
        step=step, save="s", rank=1, table=staged.table, hashes=staged.hashes,
        files=layout_of(staged.table, 1),
    )  # fmt: skip


def test_a_large_tensor_that_stays_among_others_is_named_with_its_rank_and_file() -> None:
    before, now = part_at(3), part_at(9, body=1.0, bias=1.0)

    names = unchanged(now, before)

    assert names == {".model.head"}
    (finding,) = findings(now, before, names)
    assert (finding.file, finding.rank, finding.tensors) == (
        "rank-1-0001.bin", 1, (".model.head",),
    )  # fmt: skip
    assert str(finding).startswith("rank-1-0001.bin (rank 1), tensors model.head: step 9 holds")
    assert "the rest of what is trained has changed" in finding.what


def test_small_ones_show_if_nothing_beside_them_changed() -> None:
    assert unchanged(part_at(2, head=1.0), part_at(1)) >= {".model.bias", ".model.norm"}
    assert unchanged(part_at(2, head=1.0, norm=1.0), part_at(1)) == {".model.body"}


def test_where_all_stays_that_is_said() -> None:
    before, now = part_at(1), part_at(2)

    (finding,) = findings(now, before, unchanged(now, before))

    assert finding.tensors == (".model.head", ".model.body", ".model.bias", ".model.norm")
    assert "step 2 holds what step 1 held of all that is trained" in finding.what


def test_what_is_frozen_is_no_finding() -> None:
    assert unchanged(part_at(2, head=1, body=1, bias=1, norm=1), part_at(1)) == frozenset()


def test_saves_of_one_step_or_of_other_tables_are_not_compared() -> None:
    assert unchanged(part_at(2), part_at(2)) == frozenset()
    other = Copying({"model": {"head": torch.zeros(LARGE)}}, 1, None, due).finish()
    table = other.table
    former = Part(
        step=1, save="s", rank=1, table=table, hashes=other.hashes, files=layout_of(table, 1)
    )
    assert unchanged(part_at(2), former) == frozenset()


def test_what_a_helper_keeps_may_stay() -> None:
    def part(step: int) -> Part:
        state = {"model": torch.full((LARGE,), float(step)), "helpers": {"0": torch.ones(LARGE)}}
        staged = Copying(state, step, None, due).finish()
        files = layout_of(staged.table, 0)
        return Part(
            step=step, save="s", rank=0, table=staged.table, hashes=staged.hashes, files=files
        )

    assert unchanged(part(2), part(1)) == frozenset()
