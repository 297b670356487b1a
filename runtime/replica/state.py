"""Everything that must be equal on all members at a step's edge: gathered, copied, put back.

The order of calls is the training loop's; nothing here talks to anyone.
"""

from __future__ import annotations

import random
from typing import Any, Protocol

import torch

from runtime.data import Batches, SampleLedger
from runtime.snapshot import Staged, stage


class Stateful(Protocol):
    """What an optimizer or a schedule must offer."""

    def step(self) -> Any: ...
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class TrainingState:
    """Model, optimizer, schedule, data order, ledger, random numbers and the step itself."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Stateful,
        batches: Batches,
        schedule: Stateful | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.batches = batches
        self.schedule = schedule
        self.ledger = SampleLedger()
        self.committed = -1

    def advance(self, epoch: int, coverage: list[int]) -> None:
        """Apply the gradients that the parameters hold, and enter the step in the ledger."""
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.committed += 1
        self.ledger.record(self.committed, epoch, coverage, self.batches.shard_size)
        self.seed(-1)

    def seed(self, shard: int) -> None:
        """Make random numbers depend on the step and the shard, never on who draws them.

        `shard` -1 is the edge after the committed step.
        """
        mixed = hash((self.batches.seed, self.committed + 1, shard + 1)) & 0x7FFF_FFFF_FFFF_FFFF
        torch.default_generator.manual_seed(mixed)
        random.seed(mixed)

    def copy(self) -> Staged:
        """A copy of the state at the last edge."""
        self.seed(-1)
        version, internal, gauss = random.getstate()
        state = {
            "step": self.committed,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "batches": self.batches.state_dict(),
            "ledger": self.ledger.state_dict(),
            "rng": {
                "torch": torch.get_rng_state(),
                "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
            },
        }
        return stage(state, self.committed)

    def load(self, staged: Staged) -> None:
        """Put a copy back. Raises ValueError if it belongs to other data or another model."""
        state = staged.state()
        self.batches.load_state_dict(state["batches"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.ledger.load_state_dict(state["ledger"])
        self.committed = int(state["step"])
        version, internal, gauss = state["rng"]["python"]
        random.setstate((version, tuple(internal.tolist()), gauss))
        torch.set_rng_state(state["rng"]["torch"].clone())
