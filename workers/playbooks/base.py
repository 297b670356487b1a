"""What a playbook is made of: steps, what a step may answer, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from controlplane.incidents.choices import Effect
from controlplane.incidents.models import Incident, PlaybookRun, PlaybookStep
from controlplane.incidents.models import Playbook as PlaybookRow

Apply = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a step. `apply` runs in the engine's guarded transaction, or not at all."""

    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    #: Merged into the run's context, for later steps.
    context: Mapping[str, Any] = field(default_factory=dict)
    apply: Apply | None = None
    #: What comes instead when `apply` finds that the world does not allow it any more; without
    #: it the step waits and looks again.
    on_conflict: Outcome | None = None


@dataclass(frozen=True, kw_only=True)
class Done(Outcome):
    """The step is finished; the next may begin."""


@dataclass(frozen=True, kw_only=True)
class Skip(Outcome):
    """The step is not needed here."""


@dataclass(frozen=True, kw_only=True)
class Wait(Outcome):
    """Look again when something is heard of the run's job, node or command, or after `wake_s`."""

    wake_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GoTo(Outcome):
    """The world changed: the run continues from an earlier step."""

    to: str
    #: The node for whose sake: a run asks for a person once it went back too often, but the first
    #: time for each node does not count.
    node_id: str = ""


@dataclass(frozen=True, kw_only=True)
class End(Outcome):
    """Nothing is left to do: the steps to come are skipped and the run has succeeded."""


@dataclass(frozen=True, kw_only=True)
class Fail(End):
    """What the run is there for will not happen, and everything is as it was before: it has failed,
    and asks nobody for anything."""


@dataclass(frozen=True, kw_only=True)
class NeedsOperator(Outcome):
    """Automation must not continue alone: a person decides."""


@dataclass(frozen=True)
class StepContext:
    """What a step is given: rows as they were when it was claimed."""

    step: PlaybookStep

    @property
    def run(self) -> PlaybookRun:
        return self.step.run

    @property
    def values(self) -> dict[str, Any]:
        """The run's context."""
        values: dict[str, Any] = self.run.context
        return values

    @cached_property
    def incident(self) -> Incident:
        if self.run.incident is None:
            raise ValueError(f"{self.run.playbook} runs within an incident")
        return self.run.incident

    @property
    def round(self) -> int:
        """How often this run went back: keeps the commands of each round apart."""
        return int(self.values.get("round", 0))

    def requester(self, part: str = "") -> str:
        """Names this step as the asker of a command, the same however often it is tried.

        Another round, or a person's word to try again, makes it another asker.
        """
        turn = f"{self.round}-{self.values.get('retry', 0)}"
        return ".".join(filter(None, [self.step.pk, turn, part]))

    def placement_id(self, part: str = "") -> str:
        """The id of the placement that goes with `requester`."""
        return "plc_" + self.requester(part).removeprefix("stp_").replace(".", "_")


@dataclass(frozen=True, kw_only=True)
class StepDefinition:
    """One step of a playbook: what it does, and what pages and plans say of it."""

    key: str
    title: str
    act: Callable[[StepContext], Outcome]
    effect: Effect
    #: How a person does the same by hand.
    prose: str
    undo: str = ""
    #: Asks the guards before it acts on the run's node.
    disruptive: bool = False
    #: Why a disruptive step that has not passed the guards yet is not wanted any more, which ends
    #: its run; "" while it is wanted.
    obsolete_reason: Callable[[StepContext], str] = lambda _ctx: ""
    #: The exact words of what a disruptive step does, from the run's context; "{node}" names it.
    does: Callable[[Mapping[str, Any]], Sequence[str]] = lambda _context: ()
    #: A step that still waits after this many seconds asks for a person.
    timeout_s: float = 300


@dataclass(frozen=True, kw_only=True)
class Playbook:
    """A named sequence of steps, taken one after the other by the engine."""

    name: str
    version: int
    #: What it is for, in a sentence.
    summary: str
    deadline_s: float
    steps: tuple[StepDefinition, ...]

    @property
    def disruptive(self) -> bool:
        return any(step.disruptive for step in self.steps)

    def step(self, key: str) -> StepDefinition | None:
        return next((step for step in self.steps if step.key == key), None)

    def as_row(self) -> PlaybookRow:
        """The playbook as pages and dry runs show it."""
        return PlaybookRow(
            name=self.name,
            version=self.version,
            summary=self.summary,
            deadline_s=self.deadline_s,
            steps=[
                {
                    "key": step.key,
                    "title": step.title,
                    "prose": step.prose,
                    "undo": step.undo,
                    "effect": step.effect.label,
                    "disruptive": step.disruptive,
                    "does": list(step.does({})),
                }
                for step in self.steps
            ],
        )

    def does(self, context: Mapping[str, Any]) -> dict[str, Iterable[str]]:
        """What each disruptive step would do, by its key."""
        return {step.key: step.does(context) for step in self.steps if step.disruptive}
