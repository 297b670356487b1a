"""A job of DeepSpeed's engine: what is saved of it is what it goes on with, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from runtime.adapters.deepspeed import EngineState, expressed, filled
from runtime.ledger.__main__ import read
from runtime.ledger.check import check
from tests.runtime.replicas import PATIENCE_S, ROOT, TOKEN

SCRIPT = Path(__file__).with_name("deepspeed_script.py")
STEPS = 12
KILLED_IN = 7


@dataclass
class Engines:
    """Two ranks of one engine under torchrun, and what they left in their folder."""

    folder: Path

    def run(self, *, restarts: int = 0, **options: object) -> tuple[int, str]:
        """Until it ends: its exit status, and all that it wrote."""
        self.folder.mkdir(exist_ok=True)
        environment = {
            "DRYDOCK_JOB": "job_t",
            "DRYDOCK_REPLICA": "0",
            "DRYDOCK_WORLD_REPLICAS": "1",
            "DRYDOCK_COORDINATOR": "none",
            "DRYDOCK_TOKEN": TOKEN,
            "DRYDOCK_STATE_DIR": str(self.folder / "state"),
            "DRYDOCK_OPTIONS": json.dumps({"folder": str(self.folder), "steps": STEPS, **options}),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1"),
                *("--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", str(SCRIPT)),
            ],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * PATIENCE_S,
        )
        return ended.returncode, ended.stdout

    def left(self, what: str) -> list[str]:
        return [(self.folder / f"{what}.{rank}").read_text() for rank in range(2)]

    def epochs(self) -> set[str]:
        return {line.split()[0] for line in self.left("steps")[0].splitlines()}


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 1}, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, **BF16},
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}, **BF16},
    ],
    ids=["whole", "optimizer", "accumulated", "gradients", "weights"],
)
def test_a_rank_dies_and_the_job_ends_as_if_nothing_had_happened(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    calm, killed = Engines(tmp_path / "calm"), Engines(tmp_path / "killed")
    ended, words = calm.run(config=config)
    status, said = killed.run(config=config, killed_in=KILLED_IN, restarts=1)

    assert (ended, status) == (0, 0), words + said
    assert (killed.folder / "died").exists()
    assert len(killed.epochs()) == 2
    assert killed.left("digest") == calm.left("digest")
    assert killed.left("engine") == calm.left("engine")
    assert check(*read([killed.folder / "state"])).whole
    assert "checkpoint_not_restored" not in said


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    engines = Engines(tmp_path)
    engines.run(config={"zero_optimization": {"stage": 1}})
    status, said = engines.run(config={"zero_optimization": {"stage": 3}}, steps=STEPS + 1)

    assert status != 0
    assert "an engine whose stage of ZeRO is 1, this script's is 3: go on with" in said


def test_what_is_no_engine_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="give it the engine, the first of what deepspeed"):
        EngineState(SimpleNamespace())


class DeepSpeedEngine:
    """What is asked of an engine before anything is saved: each setting a method, or a value."""

    def __init__(self, **changed: Any) -> None:
        self.micro_steps = 7
        self._is_gradient_accumulation_boundary = None
        self.optimizer = self.basic_optimizer = torch.optim.SGD([torch.zeros(1)])
        self.zenflow = changed.pop("zenflow", False)
        self.basic_optimizer = changed.pop("basic_optimizer", self.optimizer)
        self.module = changed.pop("module", torch.nn.Linear(1, 1))
        self.training_dataloader = None
        settings = {
            "zero_optimization_stage": 3,
            "zero_offload_optimizer": None,
            "zero_offload_param": None,
            "super_offload": False,
            "zero_cpu_offload": True,
            "zero_partial_offload": 1.0,
            "zero_elastic_checkpoint": False,
            "zero_quantized_nontrainable_weights": False,
            "fp16_master_weights_and_gradients": False,
            "bf16_master_weights_and_gradients": False,
            "is_deepcompile_enabled": False,
            "random_ltd_enabled": False,
            "gradient_accumulation_steps": 4,
            **changed,
        }
        for name, value in settings.items():
            setattr(self, name, Setting(value))


@dataclass
class Setting:
    value: Any

    def __call__(self) -> Any:
        return self.value


#: As they are named there.
LinearLayer_Compress = type(
    "LinearLayer_Compress",
    (torch.nn.Module,),
    {"__module__": "deepspeed.compression.basic_layer"},
)
OnebitAdam = type("OnebitAdam", (), {})


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"zero_offload_param": SimpleNamespace(device="nvme")}, "offload to cpu, or not at all"),
        ({"super_offload": True}, "another process has the moments; leave it out"),
        ({"zero_partial_offload": 0.5}, "a second optimizer has the rest; offload all of it"),
        ({"zenflow": True}, "what it selects is saved nowhere; leave it out"),
        ({"zero_elastic_checkpoint": True}, "the job goes on with as many ranks; leave it out"),
        ({"fp16_master_weights_and_gradients": True}, "would be rounded; let them have 32"),
        ({"random_ltd_enabled": True}, "how far its schedule has come is saved nowhere"),
        ({"module": LinearLayer_Compress()}, "compression_training: how far its schedule has come"),
        ({"basic_optimizer": OnebitAdam()}, "OnebitAdam: when it is put back it forgets"),
        ({"is_deepcompile_enabled": True}, "DeepCompile: it cannot begin at a later step"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_settings_whose_state_is_not_seen_are_refused(changed: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        EngineState(DeepSpeedEngine(**changed))


def test_an_engine_without_an_optimizer_is_refused() -> None:
    engine = DeepSpeedEngine()
    engine.optimizer = None  # type: ignore[assignment]

    with pytest.raises(ValueError, match=r"give deepspeed\.initialize one"):
        EngineState(engine)


def test_the_state_of_a_plain_module_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="is of a plain module, and this script's of an Engine"):
        EngineState(DeepSpeedEngine()).load_state_dict(torch.nn.Linear(1, 1).state_dict())


def test_a_step_that_ends_among_its_micro_batches_is_told() -> None:
    with pytest.raises(ValueError, match="the step ends after 3 of 4 micro-batches: make all"):
        EngineState(DeepSpeedEngine()).state_dict()


def test_what_an_optimizer_keeps_besides_is_not_left_out() -> None:
    odd = {"base_optimizer_state": {"state": {0: {"projector": object()}}}}

    assert expressed(odd) == odd  # and then it is refused by name, as in any other state


def test_a_loss_scaler_goes_on_with_what_it_has_counted() -> None:
    scalers = [DynamicLossScaler(2**16, 3, 1, 2, False) for _ in range(2)]
    vars(scalers[0]).update(cur_scale=512.0, cur_iter=9, last_overflow_iter=4)
    counted = {**vars(scalers[0])}

    saved = expressed({"loss_scaler": scalers[0], "overflow": False})
    given = filled({"loss_scaler": scalers[1], "overflow": True}, saved)

    assert given == {"loss_scaler": scalers[1], "overflow": False}
    assert vars(scalers[1]) == counted
