"""The torture command: its plan, its figures, its judgement, and one short run for real."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.torture.__main__ import figures_of, parse
from runtime.torture.faults import Fault, Settings, plan
from runtime.torture.injector import Injector, events_file, order_file
from runtime.torture.kinds import (
    ANY,
    KINDS,
    MOMENTS,
    RECALL,
    SHARED,
    TO_OBJECTS,
    WRITING,
    Order,
)
from runtime.torture.measure import Figures, measure
from runtime.torture.network import impossible
from runtime.torture.report import Report, Seen, judge
from runtime.torture.run import Hung, Run
from runtime.torture.run_record import Death, RunRecord
from runtime.torture.watch import Event, Watch
from tests.runtime.replicas import PATIENCE_S, ROOT, until

STEPS = 6
FIGURES = Figures(
    fault=1, kind="kill", phase="reduce", landed=["reduce"], ending="replaced", hasty=False,
    replicas=[1], step=2, detect_s=0.03, regroup_s=0.1, gap_s=0.15, rejoin_s=4.0,
    rejoin_gap_s=0.1, load_s=None, back_s=None, again=None, given_up=[], alarms={}, recovered=True,
)  # fmt: skip

made_up_settings = st.builds(
    Settings,
    seed=st.integers(0, 2**31),
    replicas=st.integers(3, 8),
    kinds=st.lists(st.sampled_from(tuple(KINDS)), min_size=1, unique=True).map(tuple),
    phases=st.lists(st.sampled_from(MOMENTS), unique=True).map(
        lambda given: tuple(
            {*given, ANY, SHARED, WRITING[0], RECALL}
        )  # for each kind one is possible
    ),
    at_once=st.integers(1, 9),
    network=st.just(True),
)


# --- the plan -------------------------------------------------------------------------------------


def first_faults(given: Settings, count: int = 30) -> list[Fault]:
    return list(itertools.islice(plan(given), count))


@given(made_up_settings)
def test_the_plan_is_a_function_of_its_settings(given: Settings) -> None:
    assert first_faults(given) == first_faults(given)


@given(made_up_settings)
def test_every_fault_leaves_a_survivor_and_is_one_that_was_asked_for(given: Settings) -> None:
    for fault in first_faults(given):
        assert len(fault.victims) < given.replicas or fault.restarts
        assert set(fault.victims) | set(fault.targets) <= set(range(given.replicas))
        assert fault.kind in given.kinds
        assert fault.phase in given.phases
        assert fault.phase in KINDS[fault.kind].phases
        assert fault.ending in KINDS[fault.kind].endings
        brought_about = ("regroup", "sync", "donor")
        if not fault.restarts:
            assert (fault.first is not None) == (fault.phase in brought_about)


@given(made_up_settings)
def test_a_hasty_fault_leaves_a_survivor_of_both(given: Settings) -> None:
    for before, fault in itertools.pairwise(first_faults(given)):
        harmed = [*fault.victims, *(before.victims * fault.hasty)]

        assert len(set(harmed)) == len(harmed)
        assert len(harmed) < given.replicas or fault.restarts
        assert not (fault.hasty and (fault.restarts or before.restarts))
        assert not (before.hasty and fault.hasty)


def test_every_kind_meets_every_phase() -> None:
    given = Settings(seed=1, replicas=4, network=True)

    met = {(fault.kind, fault.phase) for fault in first_faults(given, 900)}

    assert met == {(kind.name, phase) for kind in KINDS.values() for phase in kind.phases}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"replicas": 1}, "no survivors"),
        ({"replicas": 2, "phases": ("regroup",)}, "kill in regroup is impossible with 2"),
        ({"replicas": 2, "kinds": ("part",)}, "part in .* is impossible with 2.*one replica more"),
        ({"kinds": ("part",), "network": False}, "part: needs a network of the run's own"),
        ({"kinds": ("coordinator",), "phases": ("donor",)}, "coordinator in donor is impossible"),
        (
            {"kinds": ("flip",), "phases": ("any",)},
            "flip in any is impossible.*local, shared, both$",
        ),
    ],
)
def test_a_plan_without_survivors_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Settings(**{"seed": 1, "replicas": 4, "network": True, **wrong})


def test_two_that_are_parted_are_two() -> None:
    faults = first_faults(Settings(seed=1, replicas=4, kinds=("part",), network=True))

    assert all(fault.other not in (*fault.targets, fault.first, None) for fault in faults)
    assert all(fault.other in fault.victims for fault in faults)


def test_who_alone_saves_to_the_object_store_is_struck_there() -> None:
    given = Settings(seed=1, replicas=4, kinds=("writer", "crash"), phases=TO_OBJECTS)

    faults = first_faults(given)

    assert {fault.targets for fault in faults if fault.kind == "writer"} == {(0,)}
    assert {fault.first for fault in faults if fault.kind == "crash"} == {0}


def test_of_several_ranks_each_is_struck_at_some_time() -> None:
    faults = list(
        itertools.islice(plan(Settings(seed=1, replicas=3, kinds=("kill",), ranks=3)), 30)
    )

    assert {fault.rank for fault in faults} == {0, 1, 2}


def test_ranks_are_not_cut_off_from_each_other() -> None:
    with pytest.raises(ValueError, match="give other kinds for replicas of several ranks"):
        Settings(seed=1, replicas=3, ranks=2)


# --- the figures ----------------------------------------------------------------------------------


def test_a_fault_is_timed_by_what_its_survivors_wrote(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.events = {
        "plc_0": [
            commit(0, at=9.9),
            commit(1, at=10.0),
            event("lost", at=10.06, replica=1, whose="plc_1", how="reset"),
            event("granted", at=10.1, epoch=2, members={"0": "plc_0"}),
            commit(2, at=10.2),
            commit(3, at=10.3),
            commit(4, at=14.6),
            event("granted", at=14.7, epoch=3, members={"0": "plc_0", "1": "plc_2"}),
            commit(5, at=14.9),
        ],
        "plc_1": [
            commit(0, at=9.9, placement="plc_1"),
            commit(1, at=10.0, placement="plc_1"),
            event("struck", at=10.05, placement="plc_1", fault=1, step=2, phase="forward"),
            event("landed", at=10.07, placement="plc_1", fault=1, phase="backward"),
            event("struck", at=10.08, placement="plc_1", fault=2, step=2, phase="apply"),
        ],
        "plc_2": [
            event("phase", at=14.5, placement="plc_2", phase="sync", step=0),
            event("granted", at=14.7, placement="plc_2", epoch=3, members={"1": "plc_2"}),
            commit(5, at=14.9, placement="plc_2"),
        ],
    }
    fault = Fault(
        number=1, kind="kill", phase="any", first=None, targets=(1,), ending="replaced",
        delay_s=0.0, seconds=0.0, calm_steps=4, hasty=False,
    )  # fmt: skip
    made = RunRecord(
        fault, step=1, struck=[10.05], hurt={"plc_1"}, gone={"plc_1"},
        returning={"plc_2"}, back_at=15.0,
    )  # fmt: skip

    figures = measure(made, watch, {"plc_0": 1.0, "plc_1": 1.0, "plc_2": 10.3})

    assert figures.landed == ["backward", "forward"]
    assert figures.detect_s == pytest.approx(0.01)
    assert figures.regroup_s == pytest.approx(0.05)
    assert figures.gap_s == pytest.approx(0.2)
    assert figures.rejoin_s == pytest.approx(4.6)
    assert figures.rejoin_gap_s == pytest.approx(4.3)
    assert figures.given_up == []


@pytest.mark.parametrize(
    ("kind", "phase", "gone", "expected"),
    [
        ("slow", "forward", set(), [1]),
        ("frozen", "any", set(), [1]),
        ("slow", "regroup", {"plc_1"}, []),  # it was killed, so that there was a recovery
        ("part", "any", set(), []),  # one of the two is to go
        ("kill", "any", {"plc_1"}, []),
    ],
)
def test_who_is_lost_by_what_must_cost_nobody_was_given_up(
    tmp_path: Path, kind: str, phase: str, gone: set[str], expected: list[int]
) -> None:
    watch = Watch(tmp_path)
    lost = event("lost", at=12.1, replica=1, whose="plc_1", how="heartbeat")
    watch.events = {"plc_0": [commit(0, at=9.9), lost, commit(1, at=12.2)]}
    fault = Fault(
        number=1, kind=kind, phase=phase, first=None, targets=(1,), ending="stays",
        delay_s=0.0, seconds=3.0, calm_steps=4, hasty=False,
    )  # fmt: skip
    made = RunRecord(fault, step=1, struck=[10.0], hurt={"plc_1"}, gone=gone, back_at=15.0)

    assert measure(made, watch, {}).given_up == expected


def test_who_no_fault_touched_is_not_excused_by_another_s_death(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    dead = event("lost", at=10.1, replica=1, whose="plc_1", how="reset")
    healthy = event("lost", at=12.1, replica=2, whose="plc_2", how="heartbeat")
    watch.events = {"plc_0": [commit(0, at=9.9), dead, healthy, commit(1, at=12.2)]}
    fault = Fault(
        number=1, kind="kill", phase="any", first=None, targets=(1,), ending="replaced",
        delay_s=0.0, seconds=0.0, calm_steps=4, hasty=False,
    )  # fmt: skip
    made = RunRecord(fault, 1, struck=[10.0], hurt={"plc_1"}, gone={"plc_1"}, back_at=15.0)

    assert measure(made, watch, {}).given_up == [2]


def test_a_gap_counts_until_what_was_struck_is_well_again(tmp_path: Path) -> None:
    """A coordinator that is back needs a while until all have found it."""
    watch = Watch(tmp_path)
    watch.events = {"plc_0": [commit(step, at=at) for step, at in enumerate((9.9, 11.1, 13.1))]}
    fault = Fault(
        number=1, kind="coordinator", phase="any", first=None, targets=(1,), ending="replaced",
        delay_s=0.0, seconds=1.0, calm_steps=4, hasty=False,
    )  # fmt: skip
    made = RunRecord(fault, 1, struck=[10.0], over_at=12.0, back_at=15.0)

    assert measure(made, watch, {}).gap_s == pytest.approx(2.0)


def test_who_a_fault_struck_itself_is_not_excused_by_it(tmp_path: Path) -> None:
    run = SimpleNamespace(watch=Watch(tmp_path), fleet=SimpleNamespace(started=[]))
    lost = event("lost", at=12.1, replica=1, whose="plc_1", how="heartbeat")
    run.watch.events = {"plc_0": [commit(0, at=9.9), lost, commit(1, at=12.2)]}
    fault = Fault(
        number=1, kind="slow", phase="forward", first=None, targets=(1,), ending="stays",
        delay_s=0.0, seconds=3.0, calm_steps=4, hasty=False,
    )  # fmt: skip
    run.made = [RunRecord(fault, step=1, struck=[10.0], hurt={"plc_1"}, back_at=15.0)]

    assert figures_of(cast(Run, run), 0).given_up == [1]


# --- the blow -------------------------------------------------------------------------------------


@pytest.fixture
def told_to_strike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hand with an order for a phase, that strikes only by noting in which it does."""

    def make(phase: str, delay_s: float) -> tuple[Injector, list[str]]:
        hand, fell = Injector(tmp_path, "plc_0", 0), list[str]()
        noting = replace(KINDS["cut"], strike=lambda _order: fell.append(hand.phase))
        monkeypatch.setitem(KINDS, "cut", noting)
        order = Order(fault=3, kind="cut", phase=phase, delay_s=delay_s, seconds=0.0)
        order_file(tmp_path, "plc_0").write_text(json.dumps(asdict(order)))
        return hand, fell

    return make


def come_to(hand: Injector, *phases: str) -> None:
    for phase in phases:
        hand.enter(phase)
        hand.at(phase, 7)


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_a_phase_is_not_left_before_the_blow_that_is_aimed_at_it_has_fallen(
    told_to_strike: Any, delay_s: float
) -> None:
    hand, fell = told_to_strike("apply", delay_s)

    come_to(hand, "reduce", "apply", "optimizer")

    assert fell == ["apply"]
    told = [json.loads(one) for one in events_file(hand.folder, "plc_0").read_text().splitlines()]
    assert [(one["what"], one["data"]["phase"]) for one in told] == [
        ("struck", "apply"),
        ("landed", "apply"),
    ]


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_a_blow_aimed_at_a_sum_that_is_there_already_waits_for_the_next(
    told_to_strike: Any, delay_s: float
) -> None:
    hand, fell = told_to_strike("reduce", delay_s)

    hand.under_way = lambda: False
    come_to(hand, "reduce", "apply")
    before = [*fell]
    hand.under_way = lambda: True
    come_to(hand, "reduce", "apply")

    assert (before, fell) == ([], ["reduce"])


# --- the judgement --------------------------------------------------------------------------------


def event(what: str, at: float, placement: str = "plc_0", **data: Any) -> Event:
    return Event(what, at, int(placement[-1]), placement, data)


def commit(step: int, at: float = 0.0, placement: str = "plc_0", **changed: Any) -> Event:
    data = {"step": step, "epoch": 1, "coverage": [1] * 4, "samples": 8, "loss": 2.5 - step / 10,
            "grad_norm": 0.5, "members": [0, 1]}  # fmt: skip
    return event("commit", at, placement, **{**data, **changed})


def ended(placement: str, digest: str = "d1", **changed: Any) -> Event:
    ledger = [{"step_from": 0, "step_to": STEPS - 1, "lost": [], "duplicated": []}]
    data = {"step": STEPS - 1, "digest": digest, "ledger": ledger}
    return event("ended", 1.0, placement, **{**data, **changed})


def good(**changed: Any) -> Seen:
    """Two replicas that made all their steps."""
    events = {
        placement: [*(commit(step, placement=placement) for step in range(STEPS)), ended(placement)]
        for placement in ("plc_0", "plc_1")
    }
    return replace(Seen(events=events, present=["plc_0", "plc_1"], steps=STEPS), **changed)


def judged(
    disturbed: Seen, undisturbed: Seen | None = None, mode: str = "reproducible", **changed: Any
) -> Report:
    figures = [replace(FIGURES, **changed)]
    alone = undisturbed or good()
    return judge(disturbed, alone, figures, mode=mode, seed=1, replicas=2)


def with_events(change: Callable[[list[Event]], list[Event]], *placements: str) -> Seen:
    seen = good()
    return replace(
        seen, events={**seen.events, **{p: change([*seen.events[p]]) for p in placements}}
    )


def covering(coverage: list[int], samples: int, members: Sequence[int] = (0, 1)) -> Seen:
    """All replicas saw step 3 with this coverage."""
    seen = {"coverage": coverage, "samples": samples, "members": members}

    def change(own: list[Event]) -> list[Event]:
        changed = commit(3, 0.0, own[0].placement, **seen)
        return [*own[:3], changed, *own[4:]]

    return with_events(change, "plc_0", "plc_1")


def test_a_run_in_which_all_held_is_ok() -> None:
    report = judged(good())

    assert report.problems == []
    assert report.ok
    assert report.digest_equal is True
    assert report.ledger == {"lost": 0, "duplicated": 0, "dropped": 0}
    assert [(f["kind"], f["phase"], f["gap_s"]) for f in report.failures] == [
        ("kill", "reduce", 0.15)
    ]


def test_a_replica_that_was_given_up_without_need_is_a_problem() -> None:
    report = judged(good(), kind="slow", given_up=[1])

    assert not report.ok
    assert "replicas [1] were given up" in report.problems[0]


def test_a_lost_shard_is_counted_in_samples() -> None:
    report = judged(covering([1, 0, 1, 1], 6))

    assert not report.ok
    assert report.ledger == {"lost": 2, "duplicated": 0, "dropped": 0}


def test_a_shard_given_up_by_policy_is_not_lost() -> None:
    report = judged(covering([1, 1, 0, 0], 4, members=[0]), mode="drop")

    assert report.ok
    assert report.digest_equal is None
    assert report.ledger == {"lost": 0, "duplicated": 0, "dropped": 4}


@pytest.mark.parametrize(
    ("coverage", "members", "dropped"), [([1, 0, 1, 1], [0, 1], 0), ([0, 1, 0, 0], [0], 4)]
)
def test_a_shard_of_a_member_is_given_up_by_no_policy(
    coverage: list[int], members: list[int], dropped: int
) -> None:
    report = judged(covering(coverage, 2 * sum(coverage), members), mode="drop")

    assert not report.ok
    assert report.problems == [f"step 3 summed its shards {coverage} times"]
    assert report.ledger == {"lost": 2, "duplicated": 0, "dropped": dropped}


def test_whoever_loaded_another_state_than_was_saved_is_named() -> None:
    told = event("trouble", 0.2, kind="checkpoint_not_restored", text="the optimizer's")

    report = judged(with_events(lambda own: [told, *own], "plc_0"))

    assert not report.ok
    assert report.problems == ["['plc_0'] loaded a state that is not the one that was saved"]


def test_a_shard_summed_twice_is_a_duplicate() -> None:
    report = judged(covering([1, 2, 1, 1], 10))

    assert not report.ok
    assert report.ledger == {"lost": 0, "duplicated": 2, "dropped": 0}


def test_a_step_that_nobody_committed_is_lost() -> None:
    report = judged(with_events(lambda own: [*own[:3], *own[4:]], "plc_0", "plc_1"))

    assert not report.ok
    assert report.ledger["lost"] >= 8


def test_a_step_applied_twice_by_one_process_is_a_duplicate() -> None:
    report = judged(with_events(lambda own: [*own[:3], own[2], *own[3:]], "plc_0"))

    assert not report.ok
    assert report.ledger["duplicated"] == 8


def test_a_replica_that_took_the_state_anew_may_jump_ahead() -> None:
    synced = event("phase", 0.0, "plc_1", phase="sync", step=2)

    report = judged(with_events(lambda own: [*own[:2], synced, *own[4:]], "plc_1"))

    assert report.ok


def made_anew(*later: Event) -> Seen:
    """The others made step 3 in epoch 2, which plc_2 had made before; what came of that one."""
    seen = with_events(
        lambda own: [
            *own[:3], *(commit(step, 0.0, own[0].placement, epoch=2) for step in range(3, STEPS)),
            own[-1],
        ],
        "plc_0", "plc_1",
    )  # fmt: skip
    alone = [commit(step, placement="plc_2") for step in range(3)]
    alone.append(commit(3, 0.0, "plc_2", loss=9.0))
    return replace(seen, events={"plc_2": [*alone, *later], **seen.events})


def taken_anew() -> list[Event]:
    later = [commit(step, 0.0, "plc_2", epoch=2) for step in range(4, STEPS)]
    return [event("phase", 0.0, "plc_2", phase="sync", step=3), *later, ended("plc_2")]


@pytest.mark.parametrize("later", [[], taken_anew()], ids=["died", "took the state anew"])
def test_a_step_that_one_made_alone_and_did_not_hand_on_may_be_made_anew(
    later: list[Event],
) -> None:
    assert judged(made_anew(*later)).problems == []


def with_loss(first: float) -> dict[str, list[Event]]:
    """A run in which the first step has this one."""
    return {
        placement: [commit(0, 0.0, placement, loss=first), *own[1:]]
        for placement, own in good().events.items()
    }


def broken() -> dict[str, tuple[Report, str]]:
    """Each claim broken alone, and a word of what the report says of it."""
    death = Death(replica=1, placement="plc_1", code=-11, targeted=False)
    other_sum = with_events(lambda own: [commit(0, 0.0, "plc_1", loss=9.0), *own[1:]], "plc_1")
    other_end = with_events(lambda own: [*own[:-1], ended("plc_1", "d2")], "plc_1")
    part = event("part", 1.0, "plc_1", rank=1, digest="of the other rank")
    other_part = with_events(lambda own: [*own, part], "plc_1")
    late = event("trouble", 99.0, "plc_1", kind="diverged", subject="", text="of its card")
    gone = event("lost", 0.5, "plc_1", replica=0, whose="plc_0", how="heartbeat")
    differed = with_events(lambda own: [*own, late], "plc_1")
    other_ledger = with_events(lambda own: [*own[:-1], ended("plc_1", ledger=[])], "plc_1")
    other_run = {p: [*own[:-1], ended(p, "d3")] for p, own in good().events.items()}
    return {
        "losses far apart": (
            judged(good(), good(events=with_loss(2.55)), mode="cover"),
            "step 0: loss 2.5, undisturbed 2.55",
        ),
        "a survivor died": (judged(good(deaths=[death])), "untouched, died with -11"),
        "a wait had no end": (judged(good(problems=["not within 60 s"])), "not within 60 s"),
        "never came back": (judged(good(), recovered=False), "did not come back"),
        "no end": (judged(good(steps=None)), "did not reach its end"),
        "one did not end": (judged(with_events(lambda own: own[:-1], "plc_1")), "not come to"),
        "sums differ": (judged(other_sum), "plc_1 has loss 9.0"),
        "a step was made anew, and who made it first went on": (
            judged(made_anew(commit(4, 0.0, "plc_2"))),
            "step 3: plc_2 has loss 9.0, another replica 2.2",
        ),
        "states differ": (judged(other_end), "end with different states"),
        "states differed": (judged(differed), "hold different states were told of 1 times"),
        "parts differ": (judged(other_part), "end with different states"),
        "ledgers differ": (judged(other_ledger), "differs from the others'"),
        "another trajectory": (judged(good(), good(events=other_run)), "not that of the undist"),
        "somebody was lost, undisturbed": (
            judged(good(), with_events(lambda own: [*own, gone], "plc_1")),
            "undisturbed run: ['plc_1'] gave replicas up",
        ),
        "states differed, undisturbed": (
            judged(good(), differed),
            "undisturbed run: replicas that",
        ),
        "undisturbed run hung": (judged(good(), good(problems=["hung"])), "undisturbed run: hung"),
        "no undisturbed run": (
            judge(good(), None, [], mode="reproducible", seed=1, replicas=2),
            "no undisturbed run",
        ),
    }


@pytest.mark.parametrize("claim", list(broken()))
def test_one_broken_claim_is_enough(claim: str) -> None:
    report, told = broken()[claim]

    assert not report.ok
    assert told in "\n".join(report.problems)


def test_only_the_deaths_of_survivors_count_as_theirs() -> None:
    struck = Death(replica=1, placement="plc_1", code=1, targeted=True)
    untouched = Death(replica=0, placement="plc_0", code=1, targeted=False)

    assert judged(good(deaths=[struck])).survivor_deaths == 0
    assert not judged(good(deaths=[struck])).ok
    assert judged(good(deaths=[struck, untouched])).survivor_deaths == 1


def test_where_equality_is_no_claim_closeness_is() -> None:
    report = judged(good(), good(events=with_loss(2.501)), mode="cover")

    assert report.ok
    assert report.digest_equal is None
    assert report.final_loss == [2.0, 2.0]


# --- for real -------------------------------------------------------------------------------------


def torture(folder: Path, *words: str, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "runtime.torture", *words],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def well_ended(run: subprocess.Popen[str]) -> dict[str, Any]:
    """The report of a run in which every claim held, once it has ended."""
    told, _ = run.communicate(timeout=300)
    report: dict[str, Any] = json.loads(told)
    assert report["problems"] == []
    assert report["digest_equal"] is True
    assert run.returncode == 0
    return report


def test_three_replicas_survive_and_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    run = torture(
        tmp_path, "--json", "--seed", "4", "--replicas", "3", "--faults", "2",
        "--kinds", "kill", "--phases", "reduce,regroup",
    )  # fmt: skip

    told, _ = run.communicate(timeout=300)
    report = json.loads(told)

    assert report["problems"] == []
    assert report["ok"]
    assert report["digest_equal"] is True
    assert report["ledger"] == {"lost": 0, "duplicated": 0, "dropped": 0}
    assert report["survivor_deaths"] == 0
    assert {f["phase"] for f in report["failures"]} == {"reduce", "regroup"}
    assert all(f["landed"] == [f["phase"]] for f in report["failures"])
    assert all(f["detect_s"] < f["regroup_s"] for f in report["failures"])
    assert run.returncode == 0
    assert [*tmp_path.iterdir()] == []


def test_replicas_that_are_sent_away_cost_no_step_and_nobody_dies(tmp_path: Path) -> None:
    run = torture(
        tmp_path, "--json", "--seed", "5", "--replicas", "3", "--faults", "2",
        "--kinds", "leave", "--phases", "reduce,away",
    )  # fmt: skip

    report = well_ended(run)

    assert [failure["detect_s"] for failure in report["failures"]] == [None, None]


def test_any_script_is_broken_as_it_is(tmp_path: Path) -> None:
    script, folder = ROOT / "tests" / "runtime" / "tiny.py", tmp_path / "script"
    folder.mkdir()
    run = torture(
        tmp_path, "--json", "--seed", "4", "--replicas", "2", "--faults", "1",
        "--kinds", "kill", "--phases", "forward",
        "--script", str(script), "--options", json.dumps({"folder": str(folder)}),
    )  # fmt: skip

    well_ended(run)

    assert (folder / "digest.0").exists()


ERRING = """
import os

from runtime.torture import script

step = script.AdamW.step

def erring(self, *args, **settings):
    step(self, *args, **settings)
    self.parameters[0].data.add_(os.getpid() * 1e-9)

script.AdamW.step = erring
script.main()
"""


@pytest.fixture(scope="module")
def erring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Runs, by the kind of their fault, in which each process comes to other weights than the
    others. They begin together, for one of them takes long: who was killed is not let in, for
    which that run waits as long as it may. It leaves the processor to the other tests."""
    script = tmp_path_factory.mktemp("erring") / "erring.py"
    script.write_text(ERRING)
    runs = {
        kind: torture(
            tmp_path_factory.mktemp(kind), "--json", "--seed", "4", "--replicas", "2",
            "--faults", "1", "--kinds", kind, "--patience", patience_s, "--phases", "forward",
            "--script", str(script), "--pace", "0.01",
        )
        for kind, patience_s in (("slow", "300"), ("kill", "90"))
    }  # fmt: skip
    yield runs
    for run in runs.values():
        with run:
            run.kill()


def assert_claim_is_broken(
    run: subprocess.Popen[str], digest_equal: bool | None, problem: str
) -> None:
    """That is told, and is the exit status."""
    told, _ = run.communicate(timeout=300)
    report = json.loads(told)

    assert (report["ok"], report["digest_equal"], run.returncode) == (False, digest_equal, 1)
    assert any(problem in one for one in report["problems"])


def test_replicas_that_end_with_different_states_break_a_claim(
    erring: dict[str, subprocess.Popen[str]],
) -> None:
    assert_claim_is_broken(erring["slow"], False, "the replicas end with different states")


@pytest.mark.skipif(bool(impossible()), reason=f"no network of its own here: {impossible()}")
def test_on_a_network_of_its_own_silent_and_parted_replicas_are_done_without(
    tmp_path: Path,
) -> None:
    run = torture(
        tmp_path, "--json", "--seed", "3", "--replicas", "3", "--each", "--network", "own",
        "--kinds", "blackhole,part", "--phases", "reduce",
    )  # fmt: skip

    report = well_ended(run)

    assert report["ledger"] == {"lost": 0, "duplicated": 0, "dropped": 0}
    assert [f["kind"] for f in report["failures"]] == ["blackhole", "part"]
    assert [f["landed"] for f in report["failures"]] == [["reduce"], ["reduce"]]
    assert all(f["detect_s"] is not None for f in report["failures"])
    assert [*tmp_path.iterdir()] == []


def test_where_no_network_can_be_made_a_replica_drops_what_reaches_it(tmp_path: Path) -> None:
    run = torture(
        tmp_path, "--json", "--seed", "3", "--replicas", "3", "--each", "--network", "shared",
        "--kinds", "blackhole", "--phases", "reduce",
    )  # fmt: skip

    report = well_ended(run)

    assert report["mode"] == "reproducible"
    assert [f["gap_s"] is not None for f in report["failures"]] == [True]
    assert [f["landed"] for f in report["failures"]] == [["reduce"]]


@pytest.mark.skipif(bool(impossible()), reason=f"no network of its own here: {impossible()}")
def test_a_network_is_gone_with_its_runner_however_that_ends(tmp_path: Path) -> None:
    made = "import pathlib, sys, runtime.torture.network as n\n"
    made += "print(n.Network(pathlib.Path(sys.argv[1]), 2).name, flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", made, str(tmp_path / "socket")]
    runner = subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert runner.stdout is not None
    name = runner.stdout.readline().strip()
    links = Path("/sys/class/net")
    assert (links / f"dd{name}").exists()

    runner.kill()
    runner.communicate(timeout=PATIENCE_S)

    until(lambda: not any(name in link.name for link in links.iterdir()), "its links are gone")
    until(lambda: not [*Path("/run/netns").glob(f"dd{name}-*")], "its machines are gone")


def test_what_needs_a_network_of_its_own_says_so(tmp_path: Path) -> None:
    run = torture(tmp_path, "--kinds", "part", "--network", "shared", stderr=subprocess.PIPE)

    _, told = run.communicate(timeout=60)

    assert run.returncode == 2
    assert "a network of the run's own cannot be had: --network shared" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--faults", "-1"), "--faults is -1: give 0 or more"),
        (("--at-once", "0"), "--at-once is 0: give 1 or more"),
        (("--minutes", "nan"), "--minutes is nan"),
        (("--pace", "inf"), "--pace is inf"),
        (("--patience", "0"), "--patience is 0.0: give seconds, more than 0"),
        (("--ranks", "0"), "--ranks is 0: give 1 or more"),
        (("--options", "[1]"), "--options: '[1]' is no JSON object"),
        (("--options", "{"), "--options: '{' is no JSON: "),
        (("--disk", __file__), "test_torture.py is no folder"),
        (("--phases", "put"), "--phases put: give the job an object store, --objects"),
        (("--objects", "s3://ours/now"), "s3://ours/now: give a folder's, file:///"),
        (("--replicas", "1"), "nothing can strike 1 replicas"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(words)

    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--replicas", "2"), ("--phases", "reduce,copy")])
def test_who_names_no_kinds_is_given_those_that_are_possible(words: tuple[str, ...]) -> None:
    settings = parse(words).settings

    assert {"kill", "leave"} <= set(settings.kinds) < set(KINDS)
    assert all(settings.phases_of(kind) for kind in settings.kinds)


@pytest.mark.skipif(bool(impossible()), reason=f"no network of its own here: {impossible()}")
def test_a_network_that_has_no_room_for_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(("--replicas", "251"))

    assert "a network of the run's own has room for 250" in capsys.readouterr().err


def test_what_needs_an_object_store_is_done_where_one_is_given(tmp_path: Path) -> None:
    with_one = parse(("--objects", f"file://{tmp_path}"))

    assert not {*TO_OBJECTS} & {*parse(()).phases}
    assert {*TO_OBJECTS} < {*with_one.phases} == {*MOMENTS}
    assert parse(()).objects == ""


def test_an_object_store_that_a_run_left_is_named_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job_torture").mkdir()

    with pytest.raises(SystemExit):
        parse(("--objects", f"file://{tmp_path}"))

    assert "remove it if a run left it" in capsys.readouterr().err


def test_a_disk_behind_a_link_is_named_as_open_files_name_it(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")

    assert parse(("--disk", str(tmp_path / "link"))).disk == tmp_path / "disk"


def test_what_a_run_left_on_a_disk_is_named_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir()

    with pytest.raises(SystemExit):
        parse(("--disk", str(tmp_path)))

    assert "remove it if a run left it" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_end_leaves_nothing(tmp_path: Path, number: int) -> None:
    scratch, disk = tmp_path / "scratch", tmp_path / "disk"
    scratch.mkdir()
    disk.mkdir()
    run = torture(scratch, "--replicas", "2", "--kinds", "kill", "--disk", str(disk))
    until((disk / "state").exists, "it has begun")

    run.send_signal(number)
    run.communicate(timeout=PATIENCE_S)

    assert run.returncode == 128 + number
    assert [*scratch.iterdir(), *disk.iterdir()] == []


def test_who_is_told_to_end_while_it_starts_a_process_ends(tmp_path: Path) -> None:
    """What a handler raises then is dropped, for Python calls what is registered for a fork."""
    at_a_fork = "os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGTERM))"
    words = "sys.argv += ['--replicas', '2', '--faults', '0']"

    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os, signal, sys; from runtime.torture.__main__ import main; {words}; "
            f"{at_a_fork}; main()",
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=PATIENCE_S,
    )

    assert run.returncode == 128 + signal.SIGTERM, run.stderr
    assert "Exception ignored" in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_coordinator_that_ends_by_itself_is_told(tmp_path: Path) -> None:
    run = torture(
        tmp_path, "--json", "--seed", "1", "--replicas", "2", "--faults", "1",
        "--kinds", "slow", "--phases", "forward",
    )  # fmt: skip
    coordinator: list[psutil.Process] = until(
        lambda: [one for one in psutil.Process(run.pid).children() if is_coordinator(one)],
        "there is one",
    )
    until(lambda: len(psutil.Process(run.pid).children()) == 3, "its replicas are started")

    coordinator[0].kill()
    told, _ = run.communicate(timeout=300)

    assert "the coordinator, untouched, ended with -9" in "\n".join(json.loads(told)["problems"])


def test_a_coordinator_that_ends_before_its_job_is_told_also_at_the_end(tmp_path: Path) -> None:
    process = SimpleNamespace(poll=lambda: 1)
    fleet = SimpleNamespace(folder=tmp_path, coordinator=process, replicas=1, ended=list)

    with pytest.raises(Hung, match="the coordinator, untouched, ended with 1"):
        Run(cast(Any, fleet), patience_s=0.0).finish()


def is_coordinator(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it has ended, as what looks for a network does
        return "runtime.replica.coordinator" in process.cmdline()
    return False


def test_a_killed_runner_leaves_no_process_behind(tmp_path: Path) -> None:
    run = torture(
        tmp_path, "--json", "--seed", "1", "--replicas", "2", "--faults", "1",
        "--kinds", "outage", "--phases", "any",
    )  # fmt: skip
    started: list[psutil.Process] = until(
        lambda: [c for c in [psutil.Process(run.pid).children()] if len(c) == 5], "all started"
    )[0]

    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=PATIENCE_S)

    until(lambda: not any(process.is_running() for process in started), "all have ended")
    assert run.returncode == -signal.SIGKILL


def test_replicas_that_hold_different_states_break_a_claim(
    erring: dict[str, subprocess.Popen[str]],
) -> None:
    problem = "replicas that hold different states were told of"
    assert_claim_is_broken(erring["kill"], None, problem)
