"""`transformers.Trainer` on a replica group: its losses, optimizer, callbacks and logs, our steps.

    job = runtime.join()
    trainer = ReplicaTrainer(model=model, args=args, train_dataset=data, job=job)
    trainer.train()

The group owns the step: shards, sum, clipping, optimizer, schedule, checkpoints. Nothing here may
change the state that members share, for a newcomer replays steps without any callback.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from runtime.adapters.huggingface_refusals import (
    unmet_of_call,
    unmet_of_optimizer,
    unmet_of_settings,
)
from runtime.adapters.refusals import refuse
from runtime.checkpoint import Checkpointer
from runtime.data import Batches
from runtime.job import Job
from runtime.replica.group import ReplicaGroup
from runtime.replica.reporting import Committed
from runtime.replica.state import Averages, Stateful
from runtime.replica.step import Mode

PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"  # of the Trainer's own folders; the step follows


class ReplicaTrainer(Trainer):  # type: ignore[misc]  # untyped where it is not installed
    """A Trainer whose `train` is one replica of a group. A shard is what one device would take:
    `per_device_train_batch_size` samples; the global batch is `shards` times that.

    All but the keywords below is the Trainer's own. `mode`, `saver`, `ema`, `extra`, `on_step`,
    `after_step`: see `ReplicaGroup`; `tokens_per_sample` is only told to the control plane.

    Every replica evaluates; only the lowest that lives logs, prints and writes. `train` returns
    once the job is done, or was told to stop: then `state.global_step` is below `state.max_steps`.

    Raises ValueError naming each setting that a group cannot honour, with the remedy.
    """

    def __init__(
        self,
        *given: Any,
        job: Job,
        shards: int = 12,
        mode: Mode = "cover",
        saver: Checkpointer | None = None,
        ema: Averages | None = None,
        extra: Mapping[str, Stateful] | None = None,
        on_step: Callable[[Committed], None] | None = None,
        after_step: Callable[[], object] | None = None,
        tokens_per_sample: int = 1,
        **settings: Any,
    ) -> None:
        self.job = job
        self.replica: ReplicaGroup | None = None  # once training has begun
        self._shards = shards
        self._tokens_per_sample = tokens_per_sample
        self._group: dict[str, Any] = {
            "saver": saver or Checkpointer(job),
            "mode": mode,
            "ema": ema,
            "extra": extra,
            "on_step": self._committed,
            "after_step": after_step,
        }
        self._on_step = on_step
        self._begun = self._computing = self._spoke = False
        self._step = -1  # whose beginning was told
        self._rate = math.nan  # of the last step that was applied
        self._norm = math.nan  # of its gradient
        self._within_epoch = False  # that step ended none
        self._labels: float | None = None  # in each shard
        super().__init__(*given, **settings)
        refuse("ReplicaTrainer", unmet_of_settings(self))
        if self.args.dataloader_num_workers and not self.args.dataloader_multiprocessing_context:
            self.args.dataloader_multiprocessing_context = "forkserver"  # evaluation's would fork
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(PrinterCallback)  # a bar cannot be handed over

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train until the job ends or is told to stop. Raises ValueError if asked to resume: the
        job does so by itself."""
        refuse(
            "train", unmet_of_call(resume_from_checkpoint, trial, again=self.replica is not None)
        )
        refuse("ReplicaTrainer", unmet_of_settings(self))  # callbacks may have been added since
        return super().train(ignore_keys_for_eval=ignore_keys_for_eval)

    def is_world_process_zero(self) -> bool:
        """Whether this is the lowest replica that lives, which speaks for the job."""
        return self.job.sender.speaks

    def is_local_process_zero(self) -> bool:
        return self.is_world_process_zero()

    def save_model(self, *given: Any, **more: Any) -> None:
        """Write the model, on the replica that speaks."""
        if self.is_world_process_zero():
            super().save_model(*given, **more)

    def evaluation_loop(self, *given: Any, **more: Any) -> Any:
        if self._computing:
            raise RuntimeError(
                "evaluation in the middle of a step would change the random numbers of its shards: "
                "let eval_strategy or a callback's on_step_end ask for it"
            )
        return super().evaluation_loop(*given, **more)

    # --- the loop -------------------------------------------------------------------------------

    def _inner_training_loop(
        self, *_given: Any, ignore_keys_for_eval: list[str] | None = None, **_more: Any
    ) -> TrainOutput:
        """Called by the Trainer's own `train`, once the model is ready."""
        self._ignored = ignore_keys_for_eval
        batches = self._batches()
        self._prepare(batches)
        steps = self.state.max_steps
        norm = self.args.max_grad_norm
        self.replica = ReplicaGroup(
            self.job,
            self.model,
            self.optimizer,
            batches,
            schedule=self.lr_scheduler,
            max_grad_norm=norm if norm and norm > 0 else None,
            steps=steps,
            **self._group,
        )
        with self.replica as replica:
            for shard in replica:
                self._begin(shard.step)
                if shard.step > self._step:
                    self._begin_step(shard.step)
                    replica.state.seed(shard.index)  # callbacks may have drawn
                replica.backward(self._loss(shard.data))
        self._begin(self.replica.pending)
        # A callback ended it. Who only has to leave ends no epoch: others, or the job when it is
        # started anew, train the rest of it.
        stopped = self.control.should_training_stop and self.state.global_step < steps
        if stopped and self._within_epoch:
            self._end_epoch()
        self._speak_up()  # who has left the others to train on speaks for nobody
        # The Trainer now clears its folder of all but the best: so may only who speaks, and nobody
        # whose best one another removed that spoke in between.
        best = self.state.best_model_checkpoint
        if best is not None and not (self.is_world_process_zero() and Path(best).exists()):
            self.state.best_model_checkpoint = None
        output: TrainOutput = self._finalize_training(None, steps * batches.global_batch, self._at)
        return output

    def _batches(self) -> Batches:
        """The data of the Trainer's own loader, in the group's order."""
        loader, args = self.get_train_dataloader(), self.args
        return Batches(
            loader.dataset,
            shards=self._shards,
            shard_size=self._train_batch_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            tokens_per_sample=self._tokens_per_sample,
            workers=args.dataloader_num_workers,
            collate=loader.collate_fn,
            start=args.dataloader_multiprocessing_context,
        )

    def _prepare(self, batches: Batches) -> None:
        """What the Trainer makes before its loop."""
        args = self.args
        self._per_epoch, self._global_batch = batches.per_epoch, batches.global_batch
        per_epoch = batches.per_epoch / batches.global_batch  # steps
        steps = (
            args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        )
        self._init_training_state(
            steps, math.ceil(per_epoch), math.ceil(steps / per_epoch), None, None
        )
        self.create_optimizer()
        self.create_scheduler(num_training_steps=steps)
        refuse("ReplicaTrainer", unmet_of_optimizer(self.optimizer, self.lr_scheduler))
        self.optimizer.register_step_pre_hook(self._note_rate)
        # Mixed precision; evaluation would do so later, on those alone that have evaluated.
        self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        handler = self.callback_handler
        handler.optimizer, handler.lr_scheduler = self.optimizer, self.lr_scheduler
        handler.model = self.model
        self._at = time.time()
        self._tr_loss = torch.zeros(())
        self._total_loss_scalar = 0.0
        self._initial_num_input_tokens_seen = 0
        self._initial_global_step = 0
        self._count_from(0)

    def _count_from(self, steps: int) -> None:
        """So many steps were made, without us."""
        self.state.global_step = self._globalstep_last_logged = steps
        self.state.epoch = steps * self._global_batch / self._per_epoch
        self._tr_loss.zero_()

    def _begin(self, steps: int) -> None:
        """This replica is in the job, in which so many steps were made."""
        if self._begun:
            return
        self._begun = True
        self._initial_global_step = steps
        self._count_from(steps)
        self._at = time.time()
        self.control = self._tell("on_train_begin")
        if self.args.eval_on_start and not self.state.global_step:
            self._evaluate(None, self._ignored, skip_scheduler=True)
        self.control = self._tell("on_epoch_begin")

    # --- one step -------------------------------------------------------------------------------

    def _begin_step(self, step: int) -> None:
        if step > self.state.global_step:  # we were cut off, and took over what others did
            self._count_from(step)
        self._step = step
        self.control = self._tell("on_step_begin")

    def _loss(self, inputs: Any) -> torch.Tensor:
        """The mean over a shard, as the Trainer computes it for one device."""
        labels = self._labels_in(inputs)
        self._computing = True
        self.model_wrapped.train()
        with self.compute_loss_context_manager():
            loss: torch.Tensor = self.compute_loss(
                self.model_wrapped, self._prepare_inputs(inputs), num_items_in_batch=labels
            )
        self._computing = False
        return loss

    def _labels_in(self, inputs: Any) -> Any:
        """How many labels a shard has, if the Trainer would count them. Shards weigh alike; where
        it would weigh them by their labels, they must have equally many."""
        count = self._get_num_items_in_batch([inputs], self.args.device)
        if count is None or not self.args.average_tokens_across_devices:
            return count
        if self._labels is None:
            self._labels = float(count)
        if float(count) != self._labels:
            raise ValueError(
                f"a shard has {float(count):g} labels, another {self._labels:g}, and "
                "average_tokens_across_devices is on: the mean over all tokens would not be the "
                "mean over shards, which is what a group trains. Pack samples to one length, or "
                "set average_tokens_across_devices=False: then each shard weighs alike, as each "
                "device does"
            )
        return count

    def _note_rate(self, *_: Any) -> None:
        self._rate = self._get_learning_rate()

    def _committed(self, step: Committed) -> None:
        """After each commit, also of steps in which no shard was ours."""
        self._begin(step.step)
        if step.step > self._step:
            self._begin_step(step.step)
        self._add(step.loss)
        epoch = self.state.global_step * self._global_batch // self._per_epoch
        self.state.global_step = step.step + 1
        trained = self.state.global_step * self._global_batch
        self.state.epoch = trained / self._per_epoch
        self._norm = step.grad_norm
        self._within_epoch = trained // self._per_epoch == epoch
        self.control = self._tell("on_step_end")
        self._log_evaluate_save()
        done = self.state.global_step >= self.state.max_steps
        if done or not self._within_epoch:
            self._end_epoch()
            if not done:
                self.control = self._tell("on_epoch_begin")
        if self.control.should_epoch_stop:
            raise RuntimeError(
                "a callback set should_epoch_stop, but epochs follow each other without a seam: "
                "set should_training_stop, or train fewer samples"
            )
        if self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            self.job.stop.set()  # travels with the next step, after which all stop
        if self._on_step is not None:
            self._on_step(step)

    def _add(self, loss: float) -> None:
        if math.isfinite(loss) or not self.args.logging_nan_inf_filter:
            self._tr_loss += loss
        else:
            self._tr_loss += self._tr_loss / (
                1 + self.state.global_step - self._globalstep_last_logged
            )

    def _end_epoch(self) -> None:
        self.control = self._tell("on_epoch_end")
        self._log_evaluate_save()

    def _log_evaluate_save(self) -> None:
        self._maybe_log_save_evaluate(
            self._tr_loss,
            self._norm,
            self.model,
            None,
            self.state.epoch,
            self._ignored,
            self._at,
            learning_rate=self._rate,
        )

    def _save_checkpoint(self, *given: Any, **more: Any) -> None:
        """The Trainer's own folder, for `from_pretrained`; the job resumes from the group's."""
        if self.is_world_process_zero():
            super()._save_checkpoint(*given, **more)

    def _tell(self, event: str) -> Any:
        self._speak_up()
        return getattr(self.callback_handler, event)(self.args, self.state, self.control)

    def _speak_up(self) -> None:
        """Let callbacks know whether we speak by now."""
        first = self.is_world_process_zero()
        self.state.is_world_process_zero = self.state.is_local_process_zero = first
        if first and not self._spoke:
            self._spoke = True
            for one in self.callback_handler.callbacks:
                if getattr(one, "_initialized", False):
                    one._initialized = False  # for who does not speak wandb and others begin no run
            if self.state.global_step and self.args.metric_for_best_model is not None:
                self._recall_best()

    def _recall_best(self) -> None:
        """Who wrote before us knew what was best; else the first that we evaluate would be, and the
        folder of what is better be removed."""
        state, output = self.state, Path(self._get_output_dir(None))
        if (found := best_in(output, state.global_step)) is None:
            return
        better = max if self.args.greater_is_better else min
        if state.best_metric is None or better(found[0], state.best_metric) == found[0]:
            state.best_metric, state.best_global_step = found
            state.best_model_checkpoint = str(_folder(output, found[1]))


def best_in(output: Path, step: int) -> tuple[float, int] | None:
    """What was best, and after how many steps, as the newest says that can be read of the Trainer's
    own folders, of no later step than this; None if none says so, or if the best one is gone."""
    numbers = (path.name.removeprefix(PREFIX) for path in output.glob(f"{PREFIX}*"))
    steps = (int(number) for number in numbers if number.isdecimal())
    for one in sorted((one for one in steps if one <= step), reverse=True):
        with contextlib.suppress(OSError, ValueError):  # whoever wrote it died meanwhile
            said = json.loads((_folder(output, one) / TRAINER_STATE_NAME).read_bytes())
            best = said.get("best_global_step")
            there = best is not None and _folder(output, best).exists()
            return (float(said["best_metric"]), best) if there else None
    return None


def _folder(output: Path, step: int) -> Path:
    return output / f"{PREFIX}{step}"
