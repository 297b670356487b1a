"""A DeepSpeed engine in a `WholeJob`: its ZeRO parts are saved and put back as any others.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    part = (job.rank, job.ranks)
    with runtime.WholeJob(
        job, EngineState(engine), [], saver, batches=batches, data_part=part
    ) as whole:
        for step in whole.steps(10_000):
            for shard in whole.shards():
                engine.backward(loss_of(engine, shard.data))
                engine.step()

Each rank saves what it holds, so the job goes on with as many ranks and the same configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from runtime.adapters.refusals import refuse
from runtime.replica.state import in_kinds_of

#: What of an engine counts, by its attributes.
COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
WEIGHTS = 3  # the stage of ZeRO that divides the weights too
SCALER = "loss_scaler"  # the key of an optimizer's state that has one; of it these count
SCALER_COUNTS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
COMPRESSED = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")  # optimizers that send fewer bits
DERIVED = ("param_slice_mappings",)  # follow from the model


class EngineState:
    """What an engine needs to go on: weights, its optimizer's part, loss scalers, the schedule,
    what it has counted. All stages of ZeRO, also with the optimizer in the processor's memory.

    A step of the job is one of the engine's: with gradient accumulation, all its micro-batches.
    """

    def __init__(self, engine: Any) -> None:
        """`engine`: of `deepspeed.initialize`. Raises ValueError for what is no engine, and for
        each setting with which some state is where it is not seen, with the remedy."""
        if "DeepSpeedEngine" not in {kind.__name__ for kind in type(engine).__mro__}:
            raise ValueError(
                f"EngineState is given a {type(engine).__name__}: give it the engine, the first of "
                "what deepspeed.initialize returns"
            )
        refuse("EngineState", unmet(engine))
        self.engine = engine
        self._divided = engine.zero_optimization_stage() >= WEIGHTS

    def state_dict(self) -> dict[str, Any]:
        """Raises ValueError in the middle of a step's micro-batches."""
        engine = self.engine
        size = engine.gradient_accumulation_steps()
        # A script that says itself where a step ends may count otherwise.
        if engine._is_gradient_accumulation_boundary is None and engine.micro_steps % size:
            raise ValueError(
                f"the step ends after {engine.micro_steps % size} of {size} micro-batches: make "
                "all of them, each with backward and step of the engine, in one turn of the loop"
            )
        schedule, scaler = engine.lr_scheduler, self._autocast_scaler()
        return {
            "made_of": self._made_of(),
            "weights": self._unseen_weights() if self._divided else engine.module.state_dict(),
            "extra_states": self._extra_states(),
            "optimizer": expressed(engine.optimizer.state_dict()),
            "scaler": None if scaler is None else scaler.state_dict(),
            "schedule": None if schedule is None else schedule.state_dict(),
            "counts": {name: getattr(engine, name) for name in COUNTS},
        }

    def load_state_dict(self, state: Any) -> None:
        """On all ranks at once. Raises ValueError for the state of another configuration or model,
        and RuntimeError as torch does."""
        engine, optimizer = self.engine, self.engine.optimizer
        if "made_of" not in state:
            raise ValueError(
                "the state is of a plain module, and this script's of an EngineState: go on with "
                "the script that saved it, or start a new job"
            )
        for key, ours in self._made_of().items():
            if (theirs := state["made_of"].get(key)) != ours:
                raise ValueError(
                    f"the state is of an engine whose {key} is {theirs}, this script's is {ours}: "
                    "go on with the model and configuration that saved it, or start a new job"
                )
        if self._divided:
            optimizer.checkpoint_event_prologue()
            for name, one in self._unseen_weights().items():
                one.data.copy_(state["weights"][name])
            for name, module in self._with_extra_state():
                module.set_extra_state(state["extra_states"][name])
        else:
            engine.module.load_state_dict(state["weights"])
        own = filled(optimizer.state_dict(), state["optimizer"])
        if "ZeROOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
            every = [own] * torch.distributed.get_world_size()  # it takes its own out of all ranks'
            optimizer.load_state_dict(every, load_from_fp32_weights=True)
        else:
            optimizer.load_state_dict(own)
        if self._divided:
            optimizer.checkpoint_event_epilogue()
        if (scaler := self._autocast_scaler()) is not None:
            scaler.load_state_dict(state["scaler"])
        if engine.lr_scheduler is not None:
            given = in_kinds_of(engine.lr_scheduler, state["schedule"])
            engine.lr_scheduler.load_state_dict(given)
        for name in COUNTS:
            setattr(engine, name, state["counts"][name])

    def _made_of(self) -> dict[str, Any]:
        """What must be the same for a state to fit, by what it is called."""
        engine = self.engine
        named = engine.module.named_parameters()
        shapes = [(name, [*getattr(one, "ds_shape", one.shape)]) for name, one in named]
        buffers = sorted(name for name, _ in self._buffers())
        return {
            "stage of ZeRO": int(engine.zero_optimization_stage()),
            "optimizer": [type(one).__name__ for one in (engine.optimizer, engine.basic_optimizer)],
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "gradient_clipping": engine.gradient_clipping(),
            "schedule": type(engine.lr_scheduler).__name__,
            "set of weights": [
                len(shapes),
                xxhash.xxh3_128_hexdigest(repr((shapes, buffers)).encode()),
            ],
        }

    def _autocast_scaler(self) -> Any:
        """Of torch_autocast in float16; None if there is none."""
        own = getattr(self.engine.optimizer, "torch_autocast_gradscaler", None)
        return self.engine.torch_autocast_z0_gradscaler if own is None else own

    def _unseen_weights(self) -> dict[str, torch.Tensor]:
        """Where the weights are divided: our parts of those that the optimizer has no copy of, and
        the buffers."""
        seen = {id(one) for group in self.engine.optimizer.fp16_groups for one in group}
        named = self.engine.module.named_parameters()
        parts = {name: one.ds_tensor for name, one in named if id(one) not in seen}
        return {**parts, **dict(self._buffers())}

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are saved."""
        for prefix, module in self.engine.module.named_modules():
            for name, one in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}", one

    def _with_extra_state(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Modules with more than tensors to save, where no state_dict of the whole asks for it."""
        for name, module in self.engine.module.named_modules() if self._divided else ():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                yield name, module

    def _extra_states(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self._with_extra_state()}


def unmet(engine: Any) -> Iterator[tuple[bool, str]]:
    """With which settings some state is not seen, and what to do."""
    if not hasattr(engine.optimizer, "state_dict"):
        yield True, "an engine without an optimizer: give deepspeed.initialize one"
        return
    offloads = [engine.zero_offload_optimizer(), engine.zero_offload_param()]
    divided = engine.zero_optimization_stage() >= WEIGHTS
    muon = "Muon" in type(engine.basic_optimizer).__name__
    yield (
        any(one is not None and one.device == "nvme" for one in offloads),
        "offload to nvme: that state is in files; offload to cpu, or not at all",
    )
    yield engine.super_offload(), "super_offload: another process has the moments; leave it out"
    yield (
        divided and engine.zero_cpu_offload() and engine.zero_partial_offload() != 1.0,
        "offload_optimizer.ratio below 1: a second optimizer has the rest; offload all of it",
    )
    yield bool(engine.zenflow), "zenflow: what it selects is saved nowhere; leave it out"
    yield (
        engine.zero_elastic_checkpoint(),
        "elastic_checkpoint: the job goes on with as many ranks; leave it out",
    )
    yield (
        engine.zero_quantized_nontrainable_weights(),
        "zero_quantized_nontrainable_weights: their scales are not seen; leave it out",
    )
    yield (
        engine.fp16_master_weights_and_gradients() or engine.bf16_master_weights_and_gradients(),
        "master weights of 16 bits: what is put back would be rounded; let them have 32",
    )
    yield divided and muon, "Muon where the weights are divided too: use stage 2, or AdamW"
    yield (
        type(engine.basic_optimizer).__name__ in COMPRESSED,
        f"{type(engine.basic_optimizer).__name__}: when it is put back it forgets the errors of "
        "what it sent; use AdamW or Lamb",
    )
    yield (
        any(_is_compressed(one) for one in engine.module.modules()),
        "compression_training: how far its schedule has come is saved nowhere; leave it out",
    )
    yield (
        engine.random_ltd_enabled(),
        "random_ltd: how far its schedule has come is saved nowhere; leave it out",
    )
    yield engine.is_deepcompile_enabled(), "DeepCompile: it cannot begin at a later step"
    yield (
        engine.training_dataloader is not None and engine.curriculum_learning_enabled(),
        "curriculum learning: what its sampler has drawn is not seen; leave it out",
    )


def _is_compressed(module: Any) -> bool:
    return type(module).__module__.startswith("deepspeed.compression")


def expressed(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is saved of the state that an engine's optimizer gives."""
    saved = {key: value for key, value in state.items() if key not in DERIVED}
    if SCALER in saved:
        scaler = vars(saved[SCALER])
        saved[SCALER] = {name: scaler[name] for name in SCALER_COUNTS if name in scaler}
    return saved


def filled(here: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an engine's optimizer as it is `here`, with what was saved in it. Raises
    ValueError if it has another form."""
    if expressed(here).keys() != saved.keys():
        raise ValueError(
            f"the state's optimizer has {sorted(saved)}, this script's {sorted(expressed(here))}: "
            "go on with the version of DeepSpeed that saved it"
        )
    state = {**here, **saved}
    if SCALER in saved:
        state[SCALER] = here[SCALER]
        vars(here[SCALER]).update(saved[SCALER])
    return state
