"""States that verify and yet do not train: NaN soon after a load. They are not loaded again.

`checkpoints/suspects.json` in the shared folder names them, by the epoch and step that made them:
whoever is started next begins from an older one. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from pathlib import Path

from runtime.checkpoint.disk import read_small
from runtime.checkpoint.draft import make_folder, sync

TRIAL_STEPS = 20  # after a load: so long a state is on trial, and none is saved
#: While all losses are numbers none is saved for so long at most: with long steps a job that died
#: again and again before the trial is over would come nowhere.
HELD_BACK_S = 300.0
TOO_MANY = 3  # losses in a row that are no numbers: a single one may be a bad batch
FILE = "suspects.json"

State = tuple[int, int]  # epoch and step


class DoesNotTrain(RuntimeError):
    """The state that the job began from leads to NaN."""


class Losses:
    """Of a job, as they come. While the last one is no number nothing is saved: a state that leads
    nowhere verifies too, and would take the place of the last good one."""

    def __init__(self) -> None:
        self.odd = 0  # so many of the last ones were no numbers

    @property
    def lost(self) -> bool:
        """The state leads nowhere: not even what ends saves it."""
        return self.odd >= TOO_MANY

    def note(self, loss: float) -> tuple[str, str] | None:
        """The loss of the next step; kind and text of what an engineer is to be told."""
        before, self.odd = self.odd, 0 if math.isfinite(loss) else self.odd + 1
        if self.odd == TOO_MANY:
            return "loss_not_finite", (
                f"the last {TOO_MANY} losses were no numbers, or the weights are none: no more is "
                "saved until they are, not at its end either, so that what was saved before stays. "
                "Kill all its processes, and it goes on from that; to end the job is final"
            )
        if before >= TOO_MANY and not self.odd:
            return "loss_finite_again", f"after {before} losses that were none it is a number again"
        return None


class Trial:
    """One state, from the load on."""

    def __init__(self, state: State, left: int = TRIAL_STEPS) -> None:
        """`left`: so many steps are still to come."""
        self.state = state
        self._left = left
        self._bad = 0

    @property
    def over(self) -> bool:
        """It trains."""
        return not self._left and not self._bad

    def note(self, loss: float) -> None:
        """The loss of the next step. Raises DoesNotTrain."""
        if self.over:
            return
        self._left = max(0, self._left - 1)
        self._bad = 0 if math.isfinite(loss) else self._bad + 1
        if self._bad == TOO_MANY:
            epoch, step = self.state
            raise DoesNotTrain(
                f"{TOO_MANY} losses in a row, or weights, were {loss} within {TRIAL_STEPS} steps "
                f"after the state of step {step} (epoch {epoch}) was loaded: it is not loaded again"
            )


def suspects(folder: Path) -> set[State]:
    """Of the checkpoints in this folder. Raises OSError, ValueError if that cannot be read."""
    try:
        found = json.loads(read_small(folder / FILE))
        return {(int(one["epoch"]), int(one["step"])) for one in found}
    except FileNotFoundError:
        return set()
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{folder / FILE} is damaged ({error!r}): remove it") from error


def suspect(folder: Path, state: State) -> None:
    """Add one; all replicas add the same. Durable. Raises OSError."""
    known = set()
    with contextlib.suppress(ValueError):
        known = suspects(folder)
    data = [{"epoch": epoch, "step": step} for epoch, step in sorted(known | {state})]
    make_folder(folder)  # a job that goes on from elsewhere has saved nothing here yet
    draft = folder / f".{FILE}-{uuid.uuid4().hex}"
    with draft.open("x") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / FILE)
    sync(folder)
