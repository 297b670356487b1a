"""What a group cannot honour of a framework is refused by name, before anything is trained."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, LambdaCallback, ModelPruning
from lightning.pytorch.plugins import MixedPrecision
from transformers import TrainerCallback

import runtime
from runtime.adapters import huggingface, lightning
from runtime.job import Job
from tests.runtime.adapters.hf_models import Text, arguments, tiny_model
from tests.runtime.adapters.lightning_models import Sums, loader


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Of a coordinator that nobody will ask."""
    handler = signal.getsignal(signal.SIGTERM)
    yield joined(tmp_path)
    signal.signal(signal.SIGTERM, handler)


def joined(folder: Path, **more: str) -> Job:
    return runtime.join(
        {
            "DRYDOCK_JOB": "job_t",
            "DRYDOCK_REPLICA": "0",
            "DRYDOCK_WORLD_REPLICAS": "1",
            "DRYDOCK_COORDINATOR": "127.0.0.1:9",
            "DRYDOCK_TOKEN": "a-token-of-this-test",
            "DRYDOCK_STATE_DIR": str(folder / "state"),
            **more,
        }
    )


def hugging_face(
    job: Job, folder: Path, kind: type[Any] = huggingface.ReplicaTrainer, **settings: Any
) -> Any:
    callbacks = settings.pop("callbacks", None)
    return kind(
        tiny_model(),
        arguments(folder, **settings),
        train_dataset=Text(48, even=True),
        eval_dataset=Text(8, even=True),
        callbacks=callbacks,
        job=job,
    )


class Clips(TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None: ...


class OwnStep(huggingface.ReplicaTrainer):
    def training_step(self, *_: Any, **__: Any) -> None: ...


class OwnData(huggingface.ReplicaTrainer):
    def get_train_dataloader(self) -> Any: ...


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4: a step is a fixed"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy='sequential': the gr"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True: the global batch is fixed"),
        ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen: no replica see"),
        ({"optim": "schedule_free_adamw"}, "optim=schedule_free_adamw: it steps inside backward"),
        ({"torch_empty_cache_steps": 4}, "torch_empty_cache_steps=4: the group takes the step"),
        (
            {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"},
            "dataloader_multiprocessing_context='fork': a forked worker",
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
            "load_best_model_at_end=True: load state.best_model_checkpoint after train",
        ),
        ({"callbacks": [Clips()]}, "Clips.on_pre_optimizer_step: the group steps the optimizer"),
        ({"kind": OwnData}, "get_train_dataloader of OwnData: the group takes the backward"),
        ({"kind": OwnStep}, "training_step of OwnStep: the group takes the backward"),
    ],
)
def test_a_hugging_face_trainer_is_refused(
    job: Job, tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match="ReplicaTrainer cannot do") as refused:
        hugging_face(job, tmp_path, **settings)

    assert sentence in str(refused.value)


def test_a_callback_that_is_added_later_is_refused_too(job: Job, tmp_path: Path) -> None:
    trainer = hugging_face(job, tmp_path)
    trainer.add_callback(Clips())

    with pytest.raises(ValueError, match=r"Clips\.on_pre_optimizer_step: the group steps"):
        trainer.train()


def test_a_hugging_face_trainer_neither_resumes_nor_steps_by_a_metric(
    job: Job, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="the job resumes by itself from DRYDOCK_STATE_DIR"):
        hugging_face(job, tmp_path).train(resume_from_checkpoint=True)

    by_metric: dict[str, Any] = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_strategy": "steps",
    }
    trainer = hugging_face(job, tmp_path, **by_metric, metric_for_best_model="loss")
    with pytest.raises(ValueError, match="ReduceLROnPlateau: it steps by a metric"):
        trainer.train()


class Switches(torch.optim.SGD):
    """As the schedule-free optimizers do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_a_hugging_face_optimizer_that_evaluates_with_other_weights_is_refused(
    job: Job, tmp_path: Path
) -> None:
    trainer = hugging_face(job, tmp_path)
    trainer.optimizer = Switches(trainer.model.parameters())

    with pytest.raises(ValueError, match="Switches: it evaluates with other weights"):
        trainer.train()


def test_a_replica_of_several_ranks_is_refused_by_both(tmp_path: Path, job: Job) -> None:
    divided = joined(tmp_path, DRYDOCK_RANK="0", DRYDOCK_RANKS="2")

    with pytest.raises(ValueError, match="a replica of 2 ranks: divide the model by fully_shard"):
        hugging_face(divided, tmp_path)
    with pytest.raises(ValueError, match="a replica of 2 ranks: divide the model by fully_shard"):
        lightning.ReplicaTrainer(job=divided)


class Watches(Callback):  # type: ignore[misc]
    def on_before_zero_grad(self, *_: Any) -> None: ...


class Thaws(BaseFinetuning):  # type: ignore[misc]
    def freeze_before_training(self, *_: Any) -> None: ...

    def finetune_function(self, *_: Any) -> None: ...


class Manual(Sums):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Steps(Sums):
    def optimizer_step(self, *_: Any, **__: Any) -> None: ...


class Queue(Sums):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...


class ByMetric(Sums):
    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters())
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"strategy": "ddp"}, "strategy='ddp': each replica is one process"),
        ({"devices": 2}, "devices=2: start each replica as a process of its own"),
        ({"accumulate_grad_batches": 4}, "accumulate_grad_batches=4: a step is a fixed number"),
        ({"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='value': the group clips"),
        ({"precision": "16-mixed"}, "precision='16-mixed': a scaler would decide"),
        ({"plugins": [MixedPrecision("16-mixed", "cpu")]}, "precision='16-mixed': a scaler would"),
        ({"limit_train_batches": 5}, "limit_train_batches=5: the group trains every sample"),
        ({"sync_batchnorm": True}, "sync_batchnorm=True: the group sums running statistics"),
    ],
)
def test_a_lightning_trainer_is_refused(job: Job, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="ReplicaTrainer cannot do") as refused:
        lightning.ReplicaTrainer(job=job, **settings)

    assert sentence in str(refused.value)


@pytest.mark.parametrize("settings", [{}, {"accelerator": "auto"}])
def test_a_lightning_trainer_that_would_leave_a_card_idle_is_refused(
    job: Job, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    with pytest.raises(ValueError, match="accelerator='auto': a ReplicaTrainer trains in the"):
        lightning.ReplicaTrainer(job=job, **settings)


@pytest.mark.parametrize(
    ("module", "settings", "sentence"),
    [
        (Manual, {}, "automatic_optimization=False: the group takes the backward"),
        (Steps, {}, "optimizer_step of Steps: the group takes the backward"),
        (ByMetric, {}, "ReduceLROnPlateau: it steps by a metric"),
        (Queue, {}, "on_save_checkpoint, on_load_checkpoint of Queue: the job's checkpoints"),
        (Sums, {"callbacks": [Watches()]}, "Watches.on_before_zero_grad: the group steps"),
        (
            Sums,
            {"callbacks": [LambdaCallback(on_after_backward=print)]},
            "LambdaCallback.on_after_backward: the group steps",
        ),
        (Sums, {"callbacks": [ModelPruning("l1_unstructured")]}, "ModelPruning: it changes what"),
        (Sums, {"callbacks": [Thaws()]}, "Thaws: it changes what"),
        (Sums, {"val_check_interval": "00:00:10:00"}, "val_check_interval by time: replicas"),
        (Sums, {"val_check_interval": 3}, "so an epoch may have only 2 steps and be over before"),
    ],
)
def test_a_lightning_module_is_refused(
    job: Job, tmp_path: Path, module: type[Sums], settings: dict[str, Any], sentence: str
) -> None:
    trainer = lightning.ReplicaTrainer(
        job=job, max_epochs=1, logger=False, default_root_dir=tmp_path, **settings
    )

    with pytest.raises(ValueError, match="ReplicaTrainer cannot do") as refused:
        trainer.fit(module(), loader(48), loader(8, shuffle=False))

    assert sentence in str(refused.value)
