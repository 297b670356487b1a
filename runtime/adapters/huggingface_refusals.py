"""What a replica group cannot honour of a `transformers.Trainer`: settings, methods, callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback
from transformers.optimization import GreedyLR
from transformers.training_args import ParallelMode

from runtime.adapters.refusals import overridden

#: Methods of a Trainer whose work the group does.
_REPLACED = (
    "training_step", "get_batch_samples", "_get_train_sampler", "get_train_dataloader",
)  # fmt: skip
#: Events of the optimizer's step, which a newcomer makes before its callbacks hear of anything.
_NEVER_TOLD = ("on_pre_optimizer_step", "on_optimizer_step")
#: Optimizers that step inside backward, or whose weights are others while they are evaluated.
_OWN_STEP = ("lomo", "adalomo", "layerwise", "schedule_free")


def unmet_of_settings(trainer: Any) -> Iterator[tuple[bool, str]]:
    """What the group cannot honour of a Trainer's settings."""
    args = trainer.args
    yield from _unmet_of_processes(trainer)
    yield (
        args.gradient_accumulation_steps != 1,
        f"gradient_accumulation_steps={args.gradient_accumulation_steps}: a step is a fixed number "
        "of shards; say shards=… of as many samples, and leave it at 1",
    )
    yield (
        args.fp16,
        "fp16=True: accelerate's scaler would decide on each replica for itself; use bf16=True",
    )
    yield (
        any(word in args.optim for word in _OWN_STEP),
        f"optim={args.optim.value}: it steps inside backward, or evaluates with other "
        "weights; use an optimizer that only steps",
    )
    yield args.torch_compile, "torch_compile=True: compile the model's parts yourself"
    yield (
        args.torch_empty_cache_steps is not None,
        f"torch_empty_cache_steps={args.torch_empty_cache_steps}: the group takes the step; call "
        "torch.cuda.empty_cache in a callback's on_step_end",
    )
    yield (
        args.auto_find_batch_size,
        "auto_find_batch_size=True: the global batch is fixed, so a shard must fit; give a smaller "
        "per_device_train_batch_size and more shards",
    )
    yield (
        args.train_sampling_strategy != "random",
        f"train_sampling_strategy={args.train_sampling_strategy!r}: the group keeps the order, "
        "shuffled by data_seed",
    )
    yield (
        args.dataloader_multiprocessing_context == "fork",
        "dataloader_multiprocessing_context='fork': a forked worker keeps a dead replica's sockets "
        "open; leave it out, or say 'spawn'",
    )
    yield (
        args.load_best_model_at_end,
        "load_best_model_at_end=True: load state.best_model_checkpoint after train, where you "
        "need it",
    )
    yield (
        args.enable_jit_checkpoint,
        "enable_jit_checkpoint=True: the group saves at SIGTERM; leave it out",
    )
    yield args.push_to_hub, "push_to_hub=True: push the model once train has returned"
    yield (
        args.include_num_input_tokens_seen not in (False, "no"),
        "include_num_input_tokens_seen: no replica sees all tokens; leave it out",
    )
    names = overridden(trainer, Trainer, _REPLACED)
    yield (
        bool(names),
        f"{', '.join(names)} of {type(trainer).__name__}: the group takes the backward and keeps "
        "the order; put your loss into compute_loss, your data into the dataset",
    )
    for one in trainer.callback_handler.callbacks:
        names = overridden(one, TrainerCallback, _NEVER_TOLD)
        yield (
            bool(names),
            f"{type(one).__name__}.{', '.join(names)}: the group steps the optimizer, also when it "
            "replays steps for a newcomer; use optimizer.register_step_pre_hook of torch",
        )


def unmet_of_call(resume: Any, trial: Any, *, again: bool) -> Iterator[tuple[bool, str]]:
    """Of a call of `train`."""
    yield (
        bool(resume),
        f"resume_from_checkpoint={resume!r}: the job resumes by itself from DRYDOCK_STATE_DIR; to "
        "begin with other weights load them into the model",
    )
    yield trial is not None, "trial: start a job of its own for each"
    yield again, "a second train: the job has ended, start another"


def _unmet_of_processes(trainer: Any) -> Iterator[tuple[bool, str]]:
    """Of who computes: each replica is one process that knows of no other."""
    args = trainer.args
    yield (
        args.parallel_mode == ParallelMode.DISTRIBUTED or args.world_size > 1,
        f"a world of {args.world_size} processes by torchrun or accelerate launch: start each "
        "replica as a plain process, with DRYDOCK_* in its environment",
    )
    yield (
        args.n_gpu > 1,
        f"{args.n_gpu} GPUs in one process: show it one, by CUDA_VISIBLE_DEVICES",
    )
    yield (
        trainer.job.ranks > 1,
        f"a replica of {trainer.job.ranks} ranks: divide the model by fully_shard and use "
        "ReplicaGroup itself",
    )
    yield (
        trainer.is_deepspeed_enabled,
        "deepspeed: the group keeps gradients and optimizer whole; leave it out",
    )
    yield (
        trainer.is_fsdp_enabled or bool(args.fsdp),
        "fsdp: divide the model by fully_shard and use ReplicaGroup itself",
    )
    yield (
        args.parallelism_config is not None or trainer.get_tp_size() > 1,
        "parallelism_config, or a model of tensor parallel parts: such a job is recovered by a "
        "restart from its checkpoint",
    )


def unmet_of_optimizer(optimizer: Any, schedule: Any) -> Iterator[tuple[bool, str]]:
    """Yield what a Trainer's optimizer or schedule asks for and a replica group cannot give.

    Each pair says whether the check fails, and the sentence with the remedy; see `refuse`.
    """
    yield (
        isinstance(optimizer, AcceleratedOptimizer),
        "an optimizer prepared by accelerate: give the Trainer the bare one",
    )
    yield (
        all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")),
        f"{type(optimizer).__name__}: it evaluates with other weights than it trains; use an "
        "optimizer that only steps",
    )
    yield (
        isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR),
        f"{type(schedule).__name__}: it steps by a metric, which a newcomer that replays steps "
        "does not have; use a schedule of steps",
    )
