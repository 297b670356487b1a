"""What other tools wrote is read, and they read what is written for them: with those tools."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runtime.checkpoint.draft import write
from runtime.checkpoint.interchange import foreign_state, to_dcp, to_safetensors, whole_state
from runtime.data import Batches
from runtime.replica.state import TrainingState
from runtime.snapshot import stage
from tests.runtime.replicas import PATIENCE_S

pytest.importorskip("numpy")  # without which torch saves no tensor of several ranks
transformers: Any = pytest.importorskip("transformers")

RANKS = 2


def gpt() -> Any:
    torch.manual_seed(1)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))  # its head is tied


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, one in expected.items() if not torch.equal(found[name], one)]
    assert different == []


def save_divided(rank: int, meeting: str, out: str) -> None:
    """One rank of a job that divides its model and has torch save it.

    They meet in a file, so that nobody else can have taken the port on which they would.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    model = gpt()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    save({"model": model.state_dict()}, checkpoint_id=out)
    dist.destroy_process_group()
    # A thread of torch's that wants the interpreter while it shuts down takes the process with it.
    os._exit(0)


def test_what_several_ranks_saved_with_torch_is_read_whole(tmp_path: Path) -> None:
    meeting, out = str(tmp_path / "meeting"), str(tmp_path / "theirs")
    start = multiprocessing.get_context("spawn")
    ranks = [
        start.Process(target=save_divided, args=(rank, meeting, out), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENCE_S)

    assert [rank.exitcode for rank in ranks] == [0] * RANKS
    assert_equal(foreign_state(tmp_path / "theirs")["model"], weights(gpt()))


def test_torch_loads_what_is_exported_for_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    model = gpt()
    state = TrainingState(model, [torch.optim.AdamW(model.parameters())], Batches(samples=24))
    state.committed = 0  # what no step has trained nobody saves
    path = write(tmp_path / "job" / "checkpoints", state.copy())
    to_dcp(whole_state(path), tmp_path / "dcp")
    into = {"model": {name: torch.zeros_like(one) for name, one in weights(model).items()}}
    load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)

    assert_equal(into["model"], weights(model))


def test_a_folder_of_hugging_face_s_is_read_with_one_file_and_with_several(tmp_path: Path) -> None:
    model = gpt()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="8KB")
    assert len([*(tmp_path / "several").glob("*.safetensors")]) > 1

    one, several = (foreign_state(tmp_path / name)["model"] for name in ("one", "several"))
    expected = weights(model)
    del expected["lm_head.weight"]  # tied: they write it once
    assert_equal(one, expected)
    assert_equal(several, expected)


def test_hugging_face_loads_what_is_exported_for_it(tmp_path: Path) -> None:
    model = gpt()
    path = write(tmp_path / "job" / "checkpoints", stage({"model": weights(model)}, 3))
    to_safetensors(whole_state(path), tmp_path / "out", shard_bytes=4096)
    model.config.save_pretrained(tmp_path / "out")

    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert_equal(weights(loaded), weights(model))
