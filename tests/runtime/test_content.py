"""What a dataset holds in memory tells it from another of its class and length; what may differ
between nodes does not."""

from __future__ import annotations

import array
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

from runtime import content
from runtime.content import content_of
from runtime.data import Batches
from runtime.replica.shape import describe, difference


class Rows(Dataset[Any]):
    """Whatever it is given; no sample can be had."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 96

    def __getitem__(self, sample: int) -> Any:
        raise AssertionError("nobody may ask for a sample")


def rows(changed: int | None = None, samples: int = 96) -> torch.Tensor:
    """The same ones each time, but for one number."""
    made = torch.arange(samples * 4.0).view(samples, 4)
    if changed is not None:
        made.view(-1)[changed] += 1
    return made


def half(data: torch.Tensor, seed: int = 1) -> Dataset[Any]:
    return random_split(TensorDataset(data), [0.5, 0.5], torch.Generator().manual_seed(seed))[0]


WRAPPED: dict[str, Callable[[torch.Tensor], Dataset[Any]]] = {
    "tensors": TensorDataset,
    "attribute": lambda data: Rows(data=data),
    "list": lambda data: Rows(data=[*data]),
    "dict": lambda data: Rows(data={"x": data}),
    "subset": lambda data: Subset(TensorDataset(data), range(96)),
    "split": half,
    "joined": lambda data: ConcatDataset([TensorDataset(data[:40]), TensorDataset(data[40:])]),
    "stacked": lambda data: StackDataset(x=Rows(data=data), y=TensorDataset(data)),
    "within": lambda data: Rows(base=Rows(base=TensorDataset(data))),
    "half": lambda data: TensorDataset(data.bfloat16()),
    "columns": lambda data: TensorDataset(data.T.contiguous().T),
    "complex": lambda data: TensorDataset(data.to(torch.complex64).conj()),
    "array": lambda data: Rows(data=array.array("f", data.view(-1).tolist())),
    "bytes": lambda data: Rows(data=bytearray(data.view(-1).to(torch.uint8).tolist())),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_another_number_anywhere_is_another_content(wrap: Any) -> None:
    same, again, other = (content_of(wrap(rows(changed))) for changed in (None, None, 0))

    assert same == again != other
    assert same.split()[1] == "bytes"


@settings(max_examples=50)
@given(st.integers(0, 383), st.integers(0, 383))
def test_every_number_of_a_small_one_counts(one: int, other: int) -> None:
    told = [content_of(TensorDataset(rows(changed))) for changed in (one, other)]

    assert (told[0] == told[1]) == (one == other)


@settings(max_examples=50)
@given(st.permutations(range(8)), st.permutations(range(8)))
def test_which_samples_a_subset_has_and_in_which_order_counts(
    one: list[int], other: list[int]
) -> None:
    data = TensorDataset(rows())
    told = [content_of(Subset(data, chosen)) for chosen in (one, other)]

    assert (told[0] == told[1]) == (one == other)


def test_a_split_by_another_seed_is_another_content() -> None:
    assert content_of(half(rows(), 1)) != content_of(half(rows(), 2))


def test_how_numbers_lie_in_memory_tells_nobody_apart() -> None:
    assert content_of(TensorDataset(rows().T.contiguous().T)) == content_of(TensorDataset(rows()))


def test_what_may_differ_between_nodes_tells_nobody_apart() -> None:
    def told(node: int) -> str:
        return content_of(
            Rows(
                rank=node,
                device=torch.tensor(node),
                root=Path(f"/mnt/{node}"),
                files=[f"/mnt/{node}/a", f"/mnt/{node}/b"],
                key=b"%d" % node,
                model=torch.nn.Linear(3, 3),
                opened=(Path(__file__).open if node else None),
                data={f"/mnt/{node}/a": rows(), f"/mnt/{node}/b": rows(3)},
            )
        )

    assert told(0) == told(1)


@pytest.mark.parametrize("kind", [int, float, str, Path])
def test_in_which_order_a_folder_s_files_were_found_tells_nobody_apart(kind: Any) -> None:
    files = {kind(str(number)): rows(number) for number in (3, 10, 2)}
    elsewhere = {name: files[name] for name in reversed(files)}

    assert content_of(Rows(data=files)) == content_of(Rows(data=elsewhere))


def test_a_dataset_without_arrays_has_no_content() -> None:
    assert content_of(Rows(root="/mnt/data", length=96)) == ""
    assert content_of(list(range(96))) == ""


class Lazy:
    """Says that it is another, which it would first have to load."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise AssertionError("it was loaded")


class Properties(Rows):
    @property
    def values(self) -> Any:
        raise AssertionError("a property was asked")

    @property
    def fingerprint(self) -> str:
        raise OSError("the file is not there")


def test_nothing_of_the_script_s_own_is_run() -> None:
    told = content_of(Properties(lazy=Lazy(), data=rows()))

    assert told == content_of(Rows(data=rows()))
    assert Batches(Properties(data=rows())).content == told


def test_what_cannot_be_read_is_told_by_what_it_is() -> None:
    closed = mmap.mmap(-1, 4096)
    closed.close()
    loop: list[Any] = []
    odd = Rows(sparse=rows().to_sparse(), meta=rows().to("meta"), closed=closed, me=loop, x=rows())
    loop.append(odd)

    assert content_of(odd) == content_of(odd) != content_of(Rows(data=rows()))


def test_of_a_large_one_the_ends_and_pieces_between_are_looked_at() -> None:
    size = 64 << 20
    data = torch.zeros(size, dtype=torch.uint8)
    told = {content_of(TensorDataset(data))}
    for changed in (0, content.END_BYTES, size - content.END_BYTES - 1, size - 1):
        data[changed] = 1
        told.add(content_of(TensorDataset(data)))

    assert len(told) == 4  # the one before the end is in no piece
    assert len({content_of(TensorDataset(data[:-n])) for n in (1, 2, 3)}) == 3


def test_terabytes_of_a_file_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    began = time.process_time()

    told = content_of(Rows(tokens=mapped))

    assert time.process_time() - began < 5.0  # the whole takes minutes
    assert told.startswith(f"{1 << 40:,} bytes (")


def test_many_arrays_and_entries_cost_no_more() -> None:
    many = Rows(labels=[*range(2_000_000)], data=[torch.zeros(3 << 20)] * 2, rest=[[0] * 900] * 900)
    began = time.process_time()

    told = content_of(many)

    assert time.process_time() - began < 1.0
    assert told


def shape(data: Any) -> dict[str, str]:
    return describe(torch.nn.Linear(2, 2), [], Batches(data, shards=12), "cover", 1.0, "torch")


def test_a_replica_with_other_data_is_told_what_to_do() -> None:
    other = DataLoader(TensorDataset(rows(7)), batch_size=1, shuffle=True)

    told = difference(shape(other), shape(TensorDataset(rows())))

    assert told.startswith("this replica's dataset's content is 1,536 bytes (")
    assert "), the job's is 1,536 bytes (" in told
    assert told.endswith("say which it is by a text in the dataset's attribute fingerprint")
    assert difference(shape(TensorDataset(rows())), shape(TensorDataset(rows()))) == ""


def test_a_fingerprint_counts_alone() -> None:
    def told(changed: int, fingerprint: str, wrap: Any = lambda data: data) -> str:
        ours, theirs = (
            shape(wrap(Rows(data=rows(changed), fingerprint=said))) for said in ("v1", fingerprint)
        )
        theirs_changed = shape(wrap(Rows(data=rows(), fingerprint=fingerprint)))
        assert theirs == theirs_changed
        return difference(ours, theirs)

    assert told(5, "v1") == ""
    assert "dataset is Rows v1, the job's is Rows v2" in told(5, "v2")
    assert told(5, "v1", lambda data: Subset(data, range(48))) == ""
    assert "content is 384 bytes (" in told(5, "v2", lambda data: Subset(data, range(48)))


def test_a_replica_of_a_version_that_did_not_look_is_to_be_of_ours() -> None:
    ours = shape(TensorDataset(rows()))
    before = {key: value for key, value in ours.items() if key != "content"}

    assert "content is not told, the job's is" in difference(before, ours)
    assert difference(before, ours).endswith("run all replicas with one version of Drydock")
