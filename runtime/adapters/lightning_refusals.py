"""What a replica group cannot honour of a Lightning Trainer's settings, module and callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.plugins import Precision

from runtime.adapters.refusals import overridden
from runtime.data import Batches
from runtime.job import Job

#: Hooks around what the group does, of modules and callbacks alike.
_NEVER_TOLD = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
#: Methods of a module whose work the group does.
_REPLACED = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "configure_gradient_clipping",
    *_NEVER_TOLD,
)
#: Callbacks that change batches, weights or the optimizer behind the group's back.
_MEDDLING = (
    "BaseFinetuning",
    "BatchSizeFinder",
    "EMAWeightAveraging",
    "GradientAccumulationScheduler",
    "LearningRateFinder",
    "ModelPruning",
    "StochasticWeightAveraging",
    "WeightAveraging",
)
_PRECISIONS = ("None", "32", "32-true", "bf16-mixed")
_NO_FEWER = "the group trains every sample; give a smaller dataset"


def unmet_of_settings(job: Job, settings: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Of what the Trainer is made with."""

    def differs(name: str, *allowed: Any) -> bool:
        return settings.get(name, allowed[0]) not in allowed

    def said(name: str) -> str:
        return f"{name}={settings.get(name)!r}"

    yield (
        differs("strategy", "auto", None),
        f"{said('strategy')}: each replica is one process and the group sums; leave it out",
    )
    one = "start each replica as a process of its own, with DRYDOCK_* in its environment"
    yield differs("devices", "auto", 1, "1"), f"{said('devices')}: {one}"
    yield differs("num_nodes", 1), f"{said('num_nodes')}: {one}"
    on_card = settings.get("accelerator", "auto") == "auto" and torch.cuda.is_available()
    yield (
        on_card or differs("accelerator", "auto", "cpu"),
        f"accelerator={settings.get('accelerator', 'auto')!r}: a ReplicaTrainer trains in the "
        "processor's memory yet, also where there is a card; say 'cpu'",
    )
    yield (
        job.ranks > 1,
        f"a replica of {job.ranks} ranks: divide the model by fully_shard and use ReplicaGroup",
    )
    yield (
        differs("sync_batchnorm", False),
        f"{said('sync_batchnorm')}: the group sums running statistics; leave it out",
    )
    yield (
        differs("accumulate_grad_batches", 1),
        f"{said('accumulate_grad_batches')}: a step is a fixed number of shards; say shards=… of "
        "as many samples, and leave it out",
    )
    yield (
        differs("gradient_clip_algorithm", None, "norm"),
        f"{said('gradient_clip_algorithm')}: the group clips by the global norm",
    )
    plugins = settings.get("plugins") or []
    given = plugins if isinstance(plugins, list | tuple) else [plugins]
    precisions = [one.precision for one in given if isinstance(one, Precision)]
    for precision in (settings.get("precision"), *precisions):
        yield (
            str(precision) not in _PRECISIONS,
            f"precision={precision!r}: a scaler would decide on each replica for itself, and "
            "parameters must be float32; use 'bf16-mixed'",
        )
    yield differs("fast_dev_run", False), f"{said('fast_dev_run')}: say max_steps"
    yield differs("overfit_batches", 0.0), f"{said('overfit_batches')}: {_NO_FEWER}"
    yield differs("limit_train_batches", None, 1.0), f"{said('limit_train_batches')}: {_NO_FEWER}"
    yield (
        differs("reload_dataloaders_every_n_epochs", 0),
        f"{said('reload_dataloaders_every_n_epochs')}: the order is one for the whole job; leave "
        "it out",
    )


def unmet_of_module(trainer: Any, *, again: bool) -> Iterator[tuple[bool, str]]:
    """Of the module, its optimizer and the callbacks. `again`: this trainer has trained before."""
    module = trainer.lightning_module
    yield again, "a second fit: the job has ended, start another"
    yield (
        not module.automatic_optimization,
        "automatic_optimization=False: the group takes the backward and steps the optimizer; use "
        "ReplicaGroup itself",
    )
    names = overridden(module, LightningModule, _REPLACED)
    yield (
        bool(names),
        f"{', '.join(names)} of {type(module).__name__}: the group takes the backward, clips, and "
        "steps optimizer and schedules; leave them out",
    )
    hooks = ("on_save_checkpoint", "on_load_checkpoint")
    keeping: list[tuple[object, type, tuple[str, str]]] = [(module, LightningModule, hooks)]
    if isinstance(data := trainer.datamodule, LightningDataModule):
        keeping.append((data, LightningDataModule, hooks))
        keeping.append((data, LightningDataModule, ("state_dict", "load_state_dict")))
    for one, base, methods in keeping:
        names = overridden(one, base, methods)
        yield (
            len(names) == len(methods),  # who gives, and takes back
            f"{', '.join(names)} of {type(one).__name__}: the job's checkpoints keep nothing of "
            "what it gives Lightning's, and it would begin anew after a restart; give that to "
            "ReplicaTrainer(extra=…), and leave this out",
        )
    yield (
        trainer._val_check_time_interval is not None,
        "val_check_interval by time: replicas would validate at different steps; say after how "
        "many",
    )
    for one in trainer.callbacks:
        names = overridden(one, Callback, _NEVER_TOLD)
        yield (
            bool(names),
            f"{type(one).__name__}.{', '.join(names)}: the group steps the optimizer, also when it "
            "replays steps for a newcomer; use optimizer.register_step_pre_hook of torch",
        )
        meddles = any(kind.__name__ in _MEDDLING for kind in type(one).__mro__)
        yield meddles, f"{type(one).__name__}: it changes what the group keeps; leave it out"
    for config in trainer.lr_scheduler_configs:
        name = type(config.scheduler).__name__
        yield (
            config.reduce_on_plateau,
            f"{name}: it steps by a metric, which a newcomer that replays steps does not have; use "
            "a schedule of steps or epochs",
        )
        yield (
            config.frequency != 1,
            f"{name} with frequency={config.frequency}: let it step each time, and count within",
        )
    resumed = trainer.ckpt_path
    yield (
        resumed is not None,
        f"ckpt_path={resumed!r}: the job resumes by itself from DRYDOCK_STATE_DIR; to begin with "
        "other weights load them into the module",
    )


def unmet_of_interval(trainer: Any, often: Any, batches: Batches) -> Iterator[tuple[bool, str]]:
    """Of how often it validates within an epoch, which is counted in steps."""
    fewest = batches.per_epoch // batches.global_batch
    counts = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0
    yield (
        counts and isinstance(often, int) and often > fewest,
        f"val_check_interval={often}: a step is {batches.shards} of the loader's batches, so an "
        f"epoch may have only {fewest} steps and be over before; say after how many steps, or "
        "check_val_every_n_epoch=None to count on over its end",
    )
