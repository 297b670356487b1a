"""`lightning.pytorch.Trainer` on a replica group: its modules, callbacks and loggers, our steps.

    job = runtime.join()
    trainer = ReplicaTrainer(job=job, max_epochs=10)
    trainer.fit(module, loader)

The group owns the step: shards, sum, clipping, optimizer, schedules, checkpoints. Nothing here may
change the state that members share, for a newcomer replays steps without any callback.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import call

from runtime.adapters.lightning_refusals import (
    unmet_of_interval,
    unmet_of_module,
    unmet_of_settings,
)
from runtime.adapters.refusals import refuse
from runtime.checkpoint import Checkpointer
from runtime.data import Batches, Shard
from runtime.job import Job
from runtime.replica.group import ReplicaGroup
from runtime.replica.reporting import Committed
from runtime.replica.state import Averages, Stateful, Steps
from runtime.replica.step import Mode


class ReplicaTrainer(Trainer):  # type: ignore[misc]  # untyped where it is not installed
    """A Trainer whose `fit` is one replica of a group. What Lightning calls a batch is a step: of
    `shards` shards, each as large as the DataLoader's batch size.

    All but the keywords below is the Trainer's own. `mode`, `saver`, `ema`, `extra`, `on_step`,
    `after_step`: see `ReplicaGroup`; `seed` puts the samples in order; `tokens_per_sample` is only
    told to the control plane.

    Every replica validates; only the lowest that lives logs and writes. `fit` returns once the job
    is done, or was told to stop.

    Raises ValueError naming each setting that a group cannot honour, with the remedy.
    """

    fit_loop: _ReplicaLoop

    def __init__(
        self,
        *,
        job: Job,
        shards: int = 12,
        seed: int = 0,
        mode: Mode = "cover",
        saver: Checkpointer | None = None,
        ema: Averages | None = None,
        extra: Mapping[str, Stateful] | None = None,
        on_step: Callable[[Committed], None] | None = None,
        after_step: Callable[[], object] | None = None,
        tokens_per_sample: int = 1,
        **settings: Any,
    ) -> None:
        refuse("ReplicaTrainer", unmet_of_settings(job, settings))
        self.job = job
        given = {"shards": shards, "seed": seed, "tokens_per_sample": tokens_per_sample}
        group = {
            "saver": saver or Checkpointer(job),
            "mode": mode,
            "ema": ema,
            "extra": extra,
            "after_step": after_step,
        }
        _speak(job)
        one_process = {"accelerator": "cpu", "devices": 1, "strategy": _OneReplica(job)}
        super().__init__(**{**settings, **one_process})
        for logger in self.loggers:
            if isinstance(logger, CSVLogger) and logger._version is None:
                # All would take the first free number, and who speaks next write over the others'.
                logger._version = f"replica-{job.replica}-{job.placement}"
        own = self.fit_loop
        loop = _ReplicaLoop(self, given, group, on_step, own.min_epochs, own.max_epochs)
        loop.epoch_loop = own.epoch_loop
        self.fit_loop = loop

    @property
    def replica(self) -> ReplicaGroup | None:
        """The group that `fit` trains in; None before."""
        return self.fit_loop.group

    @property
    def estimated_stepping_batches(self) -> int | float:
        """After so many steps the job ends: as epochs follow each other without a seam, fewer than
        if each had whole ones."""
        steps = self.fit_loop.steps()
        return math.inf if steps is None else steps


class _OneReplica(SingleDeviceStrategy):  # type: ignore[misc]
    """One process, which writes if it speaks for the job."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.cluster_environment = LightningEnvironment()  # whoever started us: a world of one
        self._job = job

    @property
    def is_global_zero(self) -> bool:
        return self._job.sender.speaks


class _ReplicaLoop(_FitLoop):  # type: ignore[misc]
    """The Trainer's fit, over the group's shards."""

    def __init__(
        self,
        trainer: ReplicaTrainer,
        data: dict[str, Any],
        group: dict[str, Any],
        on_step: Callable[[Committed], None] | None,
        min_epochs: int | None,
        max_epochs: int | None,
    ) -> None:
        super().__init__(trainer, min_epochs, max_epochs)
        self.group: ReplicaGroup | None = None
        self._settings = data
        self._group_settings = group
        self._on_step = on_step
        self._batches: Batches | None = None
        self._begun = self._spoke = False
        self._stopped = False  # by a callback here
        self._end: int | None = None
        self._step = -1  # whose beginning was told
        self._last: Any = None  # batch of ours
        self._extra: dict[str, Any] = {}  # that its training_step returned beside the loss

    def run(self) -> None:
        trainer = self.trainer
        refuse("ReplicaTrainer", unmet_of_module(trainer, again=self.group is not None))
        self._end = self.steps()
        batches = self._batches
        assert batches is not None  # noqa: S101 - set up
        self.group = ReplicaGroup(
            trainer.job,
            trainer.lightning_module,
            trainer.optimizers,
            batches,
            schedule=[_paced(one, batches) for one in trainer.lr_scheduler_configs],
            max_grad_norm=trainer.gradient_clip_val or None,
            steps=self._end,
            on_step=self._committed,
            **self._group_settings,
        )
        with self.group as group:
            for shard in group:
                self._begin(shard.step)
                group.backward(self._loss(shard))
        _speak(trainer.job)  # who has left the others to train on speaks for nobody
        self._begin(group.pending)
        # Who only has to leave ends no epoch: others, or the job when it is started anew, train the
        # rest of it.
        ended = self._stopped or (self._step >= 0 and trainer.global_step == self._end)
        if ended and self.epoch_loop.batch_progress.current.ready:
            self.on_advance_end()
        self.on_run_end()

    def setup_data(self) -> None:
        """The samples of the Trainer's loader, in the group's order. May be called early, by a
        module that asks how many steps there will be."""
        if self._batches is not None:
            return
        trainer, loader = self.trainer, self._data_source.dataloader()
        several = f"train_dataloaders of type {type(loader).__name__}: give one DataLoader"
        refuse("ReplicaTrainer", [(not hasattr(loader, "collate_fn"), several)])
        self._batches = batches = Batches(loader, **self._settings)
        self.max_batches = math.ceil(batches.per_epoch / batches.global_batch)
        often = getattr(trainer, "val_check_interval", None)  # by time it has none, and is refused
        refuse("ReplicaTrainer", unmet_of_interval(trainer, often, batches))
        if often == 1.0 and isinstance(often, float):
            often = math.inf  # at an epoch's last step, which varies
        elif isinstance(often, float):
            often = max(1, int(self.max_batches * often))
        trainer.val_check_batch = often

    def steps(self) -> int | None:
        """After so many the job ends; None if it goes on until it is stopped."""
        self.setup_data()
        batches = self._batches
        assert batches is not None  # noqa: S101 - set up
        limits = [] if self.max_steps == -1 else [self.max_steps]
        if self.max_epochs is not None and self.max_epochs != -1:
            limits.append(math.ceil(self.max_epochs * batches.per_epoch / batches.global_batch))
        return min(limits, default=None)

    def _epoch_after(self, steps: int) -> int:
        assert self._batches is not None  # noqa: S101 - set up
        return steps * self._batches.global_batch // self._batches.per_epoch

    def _begin(self, steps: int) -> None:
        """This replica is in the job, in which so many steps were made."""
        if self._begun:
            return
        self._begun = True
        self._count_to(steps)
        self._speak_up()
        self.on_run_start()
        self._never_fork()
        self._begin_epoch()

    def _speak_up(self) -> None:
        """Let loggers through if we speak by now, and tell them what Lightning tells before anybody
        does."""
        _speak(self.trainer.job)
        if self.trainer.is_global_zero and not self._spoke:
            self._spoke = True
            _log_hyperparams(self.trainer)
            if self.trainer.global_step:
                _write_on(self.trainer)

    def _count_to(self, steps: int) -> None:
        """So many steps were made, whether here or without us."""
        assert self._batches is not None  # noqa: S101 - set up
        epochs = self._epoch_after(steps)
        before = math.ceil(epochs * self._batches.per_epoch / self._batches.global_batch)
        loop = self.epoch_loop
        stepped = loop.automatic_optimization.optim_progress.optimizer.step
        for progress, total, current in (
            (stepped, steps, steps - before),
            (loop.batch_progress, steps, steps - before),
            (self.epoch_progress, epochs, epochs),
        ):
            _count(progress.total, total)
            _count(progress.current, current)
        loop._batches_that_stepped = steps

    def _never_fork(self) -> None:
        """A worker of validation's loader that is forked would keep a dead replica's sockets."""
        combined = self.epoch_loop.val_loop._combined_loader
        for loader in combined.flattened if combined is not None else []:
            if getattr(loader, "num_workers", 0) and loader.multiprocessing_context is None:
                loader.multiprocessing_context = "forkserver"

    def _begin_epoch(self) -> None:
        self.epoch_progress.increment_ready()
        self._tell("on_train_epoch_start")
        self.epoch_progress.increment_started()

    # --- one step -------------------------------------------------------------------------------

    def _loss(self, shard: Shard) -> torch.Tensor:
        """The mean over a shard, by the module's training_step."""
        trainer = self.trainer
        assert self.group is not None  # noqa: S101 - it gave the shard
        self.group.state.seed(shard.index)  # callbacks may have drawn, and may again
        batch = self._moved(shard)
        if shard.step > self._step:
            self._begin_step(shard.step, batch)
        self.group.state.seed(shard.index)
        loop = self.epoch_loop
        given = loop._build_kwargs(OrderedDict(), batch, self.batch_idx)
        output = call._call_strategy_hook(trainer, "training_step", *given.values())
        loss: Any = output
        if isinstance(output, Mapping):
            loss = output["loss"]
            self._extra = {name: value for name, value in output.items() if name != "loss"}
        if not isinstance(loss, torch.Tensor):
            raise RuntimeError("training_step gave no loss, but no shard may be left out")
        return loss

    def _moved(self, shard: Shard) -> Any:
        """The samples of a shard, as the Trainer gives them to module and callbacks."""
        trainer = self.trainer
        batch = trainer.precision_plugin.convert_input(shard.data)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        self._last = batch
        trainer._logger_connector.on_batch_start(batch)
        return batch

    def _begin_step(self, step: int, batch: Any) -> None:
        if step > self.trainer.global_step:  # cut off, we took over what others did
            self._count_to(step)
            self._begin_epoch()
        self._step = step
        self._extra = {}
        progress = self.epoch_loop.batch_progress
        progress.is_last_batch = self._epoch_after(step + 1) > self._epoch_after(step)
        progress.increment_ready()
        self._tell("on_train_batch_start", batch, self.batch_idx)
        progress.increment_started()

    def _committed(self, step: Committed) -> None:
        """After each commit, also of steps in which no shard was ours."""
        self._begin(step.step)
        trainer, loop, batches = self.trainer, self.epoch_loop, self._batches
        assert batches is not None  # noqa: S101 - set up
        self._speak_up()
        if step.step > self._step:
            self._begin_step(step.step, self._moved(batches.shard(step.step, 0)))
        optimizer = loop.automatic_optimization.optim_progress.optimizer.step
        optimizer.increment_ready()
        optimizer.increment_completed()
        loop.batch_progress.increment_processed()
        output = {**self._extra, "loss": torch.tensor(step.loss)}
        self._tell("on_train_batch_end", output, self._last, self.batch_idx)
        trainer._logger_connector.on_batch_end()
        loop.batch_progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()
        self._validate()
        loop._batches_that_stepped += 1
        if loop.batch_progress.is_last_batch:
            self.on_advance_end()
            loop.batch_progress.reset_on_run()
            loop.val_loop.batch_progress.total.reset()
            if self.trainer.global_step != self._end:
                self._begin_epoch()
        if trainer.should_stop and self._can_stop_early:
            self._stopped = True
            trainer.job.stop.set()  # travels with the next step, after which all stop
        if self._on_step is not None:
            self._on_step(step)

    def _validate(self) -> None:
        """If it is due. The Trainer's own way to it would clear the gradients."""
        trainer, loop = self.trainer, self.epoch_loop
        if loop._should_check_val_fx(None):
            trainer.validating = True
            first = trainer._logger_connector._first_loop_iter
            loop.val_loop.run()
            trainer.training = True
            trainer._logger_connector._first_loop_iter = first

    def _tell(self, event: str, *given: Any) -> None:
        call._call_callback_hooks(self.trainer, event, *given)
        if call._call_lightning_module_hook(self.trainer, event, *given) == -1:
            raise RuntimeError(f"{event} asked to skip the epoch, but no sample may be left out")


class _PerEpoch:
    """A schedule that steps at the end of each epoch, found from the number of steps alone."""

    def __init__(self, schedule: Any, batches: Batches) -> None:
        self._schedule = schedule
        self._batches = batches
        self._steps = 0

    def step(self) -> None:
        batch, epoch = self._batches.global_batch, self._batches.per_epoch
        ended = self._steps * batch // epoch
        self._steps += 1
        if self._steps * batch // epoch > ended:
            self._schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        self._schedule.load_state_dict(state["schedule"])


def _paced(config: Any, batches: Batches) -> Steps:
    """What the group is to step after each of its steps."""
    schedule: Steps = config.scheduler
    return schedule if config.interval == "step" else _PerEpoch(schedule, batches)


def _write_on(trainer: Trainer) -> None:
    """Who wrote before us wrote to files that have one name: we go on with them, for the Trainer
    would write beside them."""
    for saver in trainer.checkpoint_callbacks:
        if not isinstance(saver, ModelCheckpoint) or not saver._enable_version_counter:
            continue
        if saver.save_last:
            last = _newest(saver, saver.CHECKPOINT_NAME_LAST)
            saver.last_model_path = last or saver.last_model_path
        if saver.filename and saver.monitor is None:
            saver.best_model_path = _newest(saver, saver.filename) or saver.best_model_path


def _newest(saver: Any, name: str) -> str:
    """The file of this name that was begun last, beside those of jobs before; "" if there is
    none, or if the name is another each time."""
    newest, version = "", saver.STARTING_VERSION
    path = saver.format_checkpoint_name({}, name)
    while "{" not in name and saver._fs.exists(path):
        newest, path = path, saver.format_checkpoint_name({}, name, ver=version)
        version += 1
    return newest


def _count(tracker: Any, number: int) -> None:
    """So many are begun and completed."""
    for stage in vars(tracker):
        setattr(tracker, stage, number)


def _speak(job: Job) -> None:
    """Let Lightning's loggers and messages through on the replica that speaks for the job."""
    rank_zero_only.rank = 0 if job.sender.speaks else 1
