"""Every action that writes leaves an audit row, by itself or through another action.

Read from the source: an action that is added without its audit row fails here, and so does one
that says who, but not what or why.
"""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass
from pathlib import Path

import pytest

CONTROLPLANE = Path(__file__).resolve().parents[2] / "controlplane"

#: Writes that leave no audit row, each for its reason. Whatever is not told here must be audited.
UNAUDITED = {
    # The trail itself.
    "accounts.chain_audit": "gives rows that are audit rows their place in the chain",
    # Beats: thousands a second, replaceable, never a decision.
    "fleet.extend_leases": "our own start; nothing is believed of any node that was not before",
    "fleet.renew_leases": "a beat; a lease that comes back rings, and what follows is audited",
    "fleet.lose_leases": "the keeper records a signal in the same transaction",
    # Deliveries of what is audited where it was ordered or where it ends.
    "fleet.take_commands": "the order was audited; a poll only carries it",
    "fleet.record_command_result": "the command's row is the record: output, error, time",
    "fleet.call_back_commands": "the step that calls back says so; its command rows say when",
    "fleet.expire_commands": "a deadline that the order had named",
    "fleet.forget_commands": "orders that had their end a month ago; that they were given stays",
    "jobs.forget_directives": "orders to jobs that expired a day ago; that they were given stays",
    # Observations: kept verbatim as rows of their own, never changed.
    "health.record_signal": "a signal is its own record",
    "health.record_failure": "a failure is its own record, with the signals it was made of",
    "health.repeat_failure": "the same failure once more: counted on its own row",
    "health.restate_failure": "the same failure, as all of its signals together say it",
    "health.join_failures": "failures that are one fault: their signals, which stay, say so",
    "health.record_baselines": "the most that a card was seen to do: a reading, never a decision",
    "health.record_samples": "readings for charts, one a minute and node",
    "health.forget_samples": "readings of more than a week ago",
    "jobs.thin_progress": "what a job told of its progress days ago: one sample for each minute",
    # The incident's own record, which names who and when; what is decided is audited beside it.
    "incidents.add_timeline_entry": "a line of the timeline: appended once, never changed",
    "incidents.set_mitigated": "a moment that was measured, told in the timeline",
    "incidents.set_restored": "a moment that was measured, told in the timeline",
    "incidents.publish_playbooks": "a copy of the workers' code, for pages; decides nothing",
}

#: Calls by which Django writes.
WRITES = {"create", "update", "save", "delete", "bulk_create", "bulk_update", "set"} | {
    "get_or_create",
    "update_or_create",
    "create_user",
    "execute",
}


@dataclass(frozen=True)
class Function:
    """A function of an actions module: what it calls, by bare name."""

    app: str
    name: str
    calls: frozenset[str]
    node: ast.FunctionDef
    public: bool  # called from outside its shelf, not only by other actions


def _shelves() -> list[Path]:
    return sorted([*CONTROLPLANE.glob("*/actions.py"), *CONTROLPLANE.glob("*/actions/*.py")])


def _functions() -> dict[str, Function]:
    """All functions of all actions modules, as `app.name`."""
    found = {}
    for path in _shelves():
        app = path.relative_to(CONTROLPLANE).parts[0]
        shelf = importlib.import_module(f"controlplane.{app}.actions")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                public = hasattr(shelf, node.name) and not node.name.startswith("_")
                found[f"{app}.{node.name}"] = Function(app, node.name, _calls(node), node, public)
    return found


def _calls(node: ast.AST) -> frozenset[str]:
    called = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return frozenset(
        func.attr if isinstance(func, ast.Attribute) else func.id
        for func in called
        if isinstance(func, ast.Attribute | ast.Name)
    )


FUNCTIONS = _functions()
BY_NAME: dict[str, list[Function]] = {}
for _function in FUNCTIONS.values():
    BY_NAME.setdefault(_function.name, []).append(_function)


def _reaches(function: Function, names: frozenset[str], seen: frozenset[str] = frozenset()) -> bool:
    """Whether a call of one of these names is reached from a function, through any other."""
    if function.calls & names:
        return True
    onward = function.calls - seen
    return any(
        _reaches(other, names, seen | function.calls)
        for name in onward
        for other in BY_NAME.get(name, [])
    )


WRITERS = {
    key: function
    for key, function in FUNCTIONS.items()
    if function.public and function.name != "audit" and _reaches(function, frozenset(WRITES))
}
AUDITED = frozenset({"audit"})


def test_there_are_writers_in_every_app() -> None:
    assert {f.app for f in WRITERS.values()} == {
        p.relative_to(CONTROLPLANE).parts[0] for p in _shelves()
    }
    assert len(WRITERS) > 40


@pytest.mark.parametrize("key", sorted(WRITERS))
def test_each_action_that_writes_is_audited_or_told_why_not(key: str) -> None:
    assert _reaches(WRITERS[key], AUDITED) != (key in UNAUDITED)


def test_nothing_is_excused_that_does_not_exist() -> None:
    assert set(UNAUDITED) <= set(WRITERS)


def _audit_calls() -> list[tuple[str, ast.Call]]:
    return [
        (f"{key}:{call.lineno}", call)
        for key, function in FUNCTIONS.items()
        for call in ast.walk(function.node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "audit"
    ]


@pytest.mark.parametrize(("where", "call"), [pytest.param(w, c, id=w) for w, c in _audit_calls()])
def test_each_audit_row_says_what_changed_or_why(where: str, call: ast.Call) -> None:
    assert {"before", "after", "reason"} & {keyword.arg for keyword in call.keywords}
