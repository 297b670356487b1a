"""A DeepSpeed engine in a `WholeJob`: its ZeRO parts are saved and put back as any others.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with runtime.WholeJob(job, EngineState(engine), [], saver) as whole:
        for step in whole.steps(10_000):
            engine.backward(loss_of(engine, rows_of(step)))
            engine.step()

Each rank saves what it holds, so the job goes on with as many ranks and the same configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from runtime.adapters.refusals import refuse

#: What of an engine counts, by its attributes.
COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
WEIGHTS = 3  # the stage of ZeRO that divides the weights too
OWN = "attributes"  # the key under which what a loss scaler counts is saved


class EngineState:
    """What an engine needs to go on: weights, its optimizer's part, the loss scaler, the schedule,
    what it has counted. All stages of ZeRO, in any precision, also with the optimizer in the
    processor's memory.

    A step of the job is one of the engine's: with gradient accumulation, all its micro-batches.
    """

    def __init__(self, engine: Any) -> None:
        """`engine`: of `deepspeed.initialize`. Raises ValueError for what is no engine, and for
        settings whose state lies elsewhere, with the remedy."""
        if "DeepSpeedEngine" not in {kind.__name__ for kind in type(engine).__mro__}:
            raise ValueError(
                f"EngineState is given a {type(engine).__name__}: give it the engine, the first of "
                "what deepspeed.initialize returns"
            )
        self.engine = engine
        refuse(
            "EngineState",
            (
                (
                    any(
                        one is not None and one.device == "nvme"
                        for one in (engine.zero_offload_optimizer(), engine.zero_offload_param())
                    ),
                    "offload to nvme: that state is in files; offload to cpu, or not at all",
                ),
                (
                    engine.zero_elastic_checkpoint(),
                    "elastic_checkpoint: the job goes on with as many ranks; leave it out",
                ),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Raises ValueError in the middle of a step's micro-batches."""
        engine = self.engine
        if odd := engine.micro_steps % engine.gradient_accumulation_steps():
            raise ValueError(
                f"the step ends after {odd} of {engine.gradient_accumulation_steps()} "
                "micro-batches: make all of them, each with backward and step of the engine, in "
                "one turn of the loop"
            )
        schedule = engine.lr_scheduler
        return {
            "weights": self._weights(),
            "optimizer": expressed(engine.optimizer.state_dict()),
            "schedule": None if schedule is None else schedule.state_dict(),
            "counts": {name: getattr(engine, name) for name in COUNTS},
        }

    def load_state_dict(self, state: Any) -> None:
        """On all ranks at once. Raises RuntimeError, as torch does, for another model's."""
        engine = self.engine
        optimizer = engine.optimizer
        if divided := engine.zero_optimization_stage() >= WEIGHTS:
            optimizer.checkpoint_event_prologue()
            self._put_back_parts(state["weights"])
        else:
            engine.module.load_state_dict(state["weights"])
        own = filled(optimizer.state_dict(), state["optimizer"])
        if engine.zero_optimization():
            every = [own] * torch.distributed.get_world_size()  # it takes its own out of all ranks'
            optimizer.load_state_dict(every, load_from_fp32_weights=True)
        else:
            optimizer.load_state_dict(own)
        if divided:
            optimizer.checkpoint_event_epilogue()
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(state["schedule"])
        for name in COUNTS:
            setattr(engine, name, state["counts"][name])

    def _weights(self) -> dict[str, Any]:
        """Where they are divided only what the optimizer has no copy of."""
        module = self.engine.module
        if self.engine.zero_optimization_stage() < WEIGHTS:
            weights: dict[str, Any] = module.state_dict()
            return weights
        divided = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        whole = {name: one for name, one in module.state_dict().items() if name not in divided}
        return {**whole, **self._frozen_parts()}

    def _put_back_parts(self, saved: Mapping[str, torch.Tensor]) -> None:
        module = self.engine.module
        frozen = self._frozen_parts()
        here = {**frozen, **{n: b for n, b in module.named_buffers() if n in saved}}
        if here.keys() != saved.keys() or any(
            one.shape != saved[name].shape for name, one in here.items()
        ):
            raise RuntimeError(
                "Error(s) in loading\nits frozen weights and buffers are "
                f"{sorted(saved)}, not {sorted(here)}"
            )
        for name, one in here.items():
            one.data.copy_(saved[name])

    def _frozen_parts(self) -> dict[str, torch.Tensor]:
        named = self.engine.module.named_parameters()
        return {name: one.ds_tensor for name, one in named if not one.requires_grad}


def expressed(state: Mapping[str, Any]) -> dict[str, Any]:
    """What can be saved of an optimizer's state: of a loss scaler what it counts. What else is of
    a class of DeepSpeed's follows from the model."""
    return {
        key: value if _is_plain(value) else {OWN: _plain_attributes(value)}
        for key, value in state.items()
    }


def filled(here: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state as it is `here`, with what was saved in it. Raises RuntimeError if it
    is of another kind."""
    if here.keys() != saved.keys():
        raise RuntimeError(
            f"Error(s) in loading\nits optimizer has {sorted(saved)}, not {sorted(here)}: the "
            "configuration is another"
        )
    for key, value in here.items():
        if not _is_plain(value) and saved[key][OWN]:
            vars(value).update(saved[key][OWN])
    return {key: saved[key] if _is_plain(value) else value for key, value in here.items()}


def _plain_attributes(value: Any) -> dict[str, Any]:
    attributes = getattr(value, "__dict__", {})
    return {name: one for name, one in attributes.items() if _is_plain(one)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(one) for one in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)
