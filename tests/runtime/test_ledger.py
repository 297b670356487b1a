"""The ledger says what was trained, and its command believes none of its sums."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.checkpoint import draft
from runtime.client import Ledger
from runtime.data import Batches
from runtime.ledger import SampleLedger, Summed, runs
from runtime.ledger import record as recording
from runtime.ledger.__main__ import main
from runtime.ledger.check import Report, check
from runtime.replica.state import TrainingState
from runtime.snapshot import stage

SHARDS = 4
HEALTHY = [0, 0, 1, 1]  # who computes which shard
ALONE = [0, 0, 0, 0]
GIVEN_UP = [0, 0, -1, -1]

Entries = list[dict[str, Any]]


def batches(**options: Any) -> Batches:
    return Batches(**{"samples": 22, "shards": SHARDS, "shard_size": 2, "seed": 3, **options})


def summed(data: Batches, step: int, who: list[int]) -> Summed:
    """What travels with a step whose shards these replicas computed."""
    coverage = [int(replica >= 0) for replica in who]
    pairs = zip(coverage, data.checksums(step), strict=True)
    return Summed(
        coverage=coverage,
        checksums=[count * checksum for count, checksum in pairs],
        who=[replica + 1 for replica in who],
    )


def trained(data: Batches, *steps: list[int], drops: bool = False) -> SampleLedger:
    ledger = SampleLedger(data.state_dict())
    for step, who in enumerate(steps):
        epoch = 1 + (who != steps[0])
        ledger.record(step, epoch, summed(data, step, who), data.shard_size, drops=drops)
    return ledger


def entries(ledger: SampleLedger, known: int = -1, epoch: int = 1) -> Entries:
    told = ledger.since(known, epoch)
    found: Entries = json.loads(json.dumps([asdict(entry) for entry in told]))
    return found


def checked(ledger: SampleLedger) -> Report:
    return check(entries(ledger))


# --- what is entered ------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 2), min_size=3, max_size=3))),
    st.integers(-1, 30),
)
def test_the_ledger_tells_each_step_once_whatever_was_known(
    steps: list[tuple[int, list[int]]], known: int
) -> None:
    ledger = SampleLedger({})
    epoch = 0
    epochs = {}
    for step, (advance, coverage) in enumerate(steps):
        epoch = epochs[step] = epoch + advance // 3
        travelled = Summed(coverage=coverage, checksums=[7] * 3, who=coverage)
        ledger.record(step, epoch, travelled, 2)

    told = ledger.since(known, epochs.get(known, epoch))

    told_steps = [s for entry in told for s in range(entry.step_from, entry.step_to + 1)]
    assert told_steps == list(range(known + 1, len(steps)))
    assert sum(e.samples for e in told) == sum(
        2 * sum(coverage) for _, coverage in steps[known + 1 :]
    )
    assert [pair for e in told for pair in e.lost] == [
        [step, k]
        for step, (_, coverage) in enumerate(steps)
        for k, count in enumerate(coverage)
        if step > known and count == 0
    ]


def test_steps_alike_stand_in_one_range_with_who_computed_what() -> None:
    told = trained(batches(), *[HEALTHY] * 5, ALONE, ALONE).since()

    assert [(e.step_from, e.step_to, e.computed, e.samples) for e in told] == [
        (0, 4, [[0, 0, 2], [1, 2, 4]], 40),
        (5, 6, [[0, 0, 4]], 16),
    ]


def test_dropped_shards_stand_in_the_ledger_once_for_all_steps_alike() -> None:
    steps = [HEALTHY if step < 10 or step >= 990 else GIVEN_UP for step in range(1000)]

    told = trained(batches(), *steps, drops=True).since()

    assert [(e.step_from, e.step_to, e.dropped, e.samples) for e in told] == [
        (0, 9, [], 80),
        (10, 989, [2, 3], 3920),
        (990, 999, [], 80),
    ]
    assert all(e.lost == [] for e in told)


@given(st.lists(st.integers(-1, 3), max_size=12))
def test_runs_say_of_each_shard_whose_it_was(computed: list[int]) -> None:
    again = [-1] * len(computed)
    for replica, first, end in runs(computed):
        again[first:end] = [replica] * (end - first)

    assert again == computed


def test_a_step_out_of_turn_is_refused() -> None:
    ledger = trained(batches(), HEALTHY)

    with pytest.raises(ValueError, match="step 2 does not follow 0; the ledger has no gaps"):
        ledger.record(2, 1, summed(batches(), 2, HEALTHY), 2)


@pytest.fixture
def few_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_RANGES", 3)


@pytest.mark.usefixtures("few_ranges")
def test_the_oldest_ranges_are_added_up_and_nothing_is_forgotten() -> None:
    ledger = trained(batches(), *[HEALTHY, ALONE] * 4)

    told = ledger.since()

    assert [(e.step_from, e.step_to, e.samples, e.merged) for e in told] == [
        (0, 4, 40, [0, 0, 0]),
        (5, 5, 8, []),
        (6, 6, 8, []),
        (7, 7, 8, []),
    ]
    report = checked(ledger)
    assert report.whole
    assert "steps 0 to 4 are added up" in report.notes[0]
    assert sum(one.trained_once for one in report.epochs) == 64


@pytest.mark.usefixtures("few_ranges")
def test_what_was_lost_is_still_counted_when_it_is_added_up() -> None:
    ledger = trained(batches(), GIVEN_UP, *[HEALTHY, ALONE] * 3)

    report = checked(ledger)

    assert ledger.since()[0].merged == [2, 0, 0]
    assert "step 0 and after: 2 shards lost" in report.problems[0]
    assert report.epochs[0].unknown > 0


@pytest.mark.usefixtures("few_ranges")
@settings(max_examples=30)
@given(st.lists(st.sampled_from([HEALTHY, ALONE, GIVEN_UP]), max_size=20))
def test_a_ledger_survives_its_state(steps: list[list[int]]) -> None:
    ledger = trained(batches(), *steps)
    copy = SampleLedger(batches().state_dict())

    copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))

    assert copy.since() == ledger.since(-1, 0)
    assert copy.state_dict() == ledger.state_dict()
    assert copy.step == ledger.step == len(steps) - 1


def test_the_layout_before_this_one_is_read_and_has_no_proof() -> None:
    ledger = SampleLedger(batches().state_dict())

    ledger.load_state_dict([[0, 1, 1, 8, [], [], []], [2, 2, 1, 6, [], [], [3]]])
    ledger.record(3, 2, summed(batches(), 3, HEALTHY), 2)

    assert [e.samples for e in ledger.since()] == [16, 6, 8]
    assert checked(ledger).problems == [
        "step 0: no proof up to step 1, from an older version",
        "step 2: no proof up to step 2, from an older version",
    ]


# --- what is proven -------------------------------------------------------------------------------


def test_a_whole_ledger_is_counted_sample_by_sample() -> None:
    """22 samples in steps of 8: the third step has 6 of the first pass and 2 of the second."""
    report = checked(trained(batches(), *[HEALTHY] * 4, ALONE))

    assert report.whole
    assert (report.step_from, report.step_to) == (0, 4)
    first, second = report.epochs
    assert (first.trained_once, first.to_come, first.computed) == (22, 0, {0: 12, 1: 10})
    assert (second.trained_once, second.to_come, second.computed) == (18, 4, {0: 12, 1: 6})


def test_what_drop_last_leaves_out_is_named() -> None:
    report = checked(trained(batches(drop_last=True), *[HEALTHY] * 3))

    assert report.whole
    assert [(e.trained_once, e.left_out, e.to_come) for e in report.epochs] == [
        (16, 6, 0),
        (8, 6, 8),
    ]


def test_what_policy_gave_up_is_listed_and_the_ledger_is_whole() -> None:
    report = checked(trained(batches(), HEALTHY, GIVEN_UP, HEALTHY, drops=True))

    assert report.whole
    assert sum(one.dropped for one in report.epochs) == 4
    assert [(e.lost, e.duplicated, e.unknown) for e in report.epochs] == [(0, 0, 0), (0, 0, 0)]


def test_a_lost_shard_is_named_with_its_step() -> None:
    report = checked(trained(batches(), HEALTHY, [0, 0, 1, -1], HEALTHY))

    assert report.problems == ["step 1: shard 3 was lost"]
    assert report.epochs[0].lost == 2


def test_a_shard_summed_twice_is_named_with_its_step() -> None:
    ledger = trained(batches(), HEALTHY)
    ledger.record(1, 1, Summed(coverage=[1, 1, 1, 2], checksums=[0] * 4, who=[1, 1, 2, 4]), 2)

    report = checked(ledger)

    assert "step 1: shard 3 was duplicated" in report.problems
    assert report.epochs[0].duplicated == 2


def test_a_ledger_told_in_parts_has_the_same_proof() -> None:
    data = batches()
    parts: Entries = []
    for end in range(1, 8):
        parts += entries(trained(data, *[HEALTHY] * end), known=end - 2)

    report = check(parts)

    assert len(parts) == 7
    assert report.whole


def test_a_range_that_was_cut_at_a_roll_back_is_proven_by_the_next() -> None:
    data = batches()
    before = entries(trained(data, *[HEALTHY] * 6))[0]
    cut = {**before, "step_to": 3, "samples": 32, "proof": ""}
    after = entries(trained(data, *[HEALTHY] * 4, ALONE, ALONE), known=3)

    assert check([cut, *after]).whole
    assert check([{**cut, "computed": [[0, 0, 4]]}, *after]).problems[0].startswith("step 4: the p")


Tamper = Callable[[Entries], Any]


@pytest.mark.parametrize(
    ("tamper", "told"),
    [
        (lambda e: e.pop(1), "step 2: the ledger has no steps from here to 3"),
        (lambda e: e.pop(0), "step 0: the ledger has no steps from here to 1"),
        (lambda e: e.append(e[1]), "step 2: the ledger tells this step twice"),
        (lambda e: e[1].update(computed=[[2, 0, 4]]), "step 2: the proof up to step 3 is"),
        (lambda e: e[1].update(computed=[[0, 0, 3]]), "step 2: nothing is told of shard 3"),
        (lambda e: e[1].update(computed=[[0, 0, 5]]), "step 2: shard 4 is told of twice, or the"),
        (lambda e: e[1].update(samples=15), "step 2: 15 samples are told, its shards have 16"),
        (lambda e: e[2].update(proof="0" * 16), "step 4: the proof up to step 5 is 0000"),
        (lambda e: e[2].update(proof=""), "step 4: no proof up to the end"),
        (lambda e: e[2].update(order={**e[2]["order"], "seed": 8}), "step 4: the samples come in"),
        (lambda e: [one["order"].update(seed=8) for one in e], "step 0: the proof up to step 1 is"),
        (lambda e: e[2].update(step_to=9), "step 4: 16 samples are told, its shards have 48"),
    ],
)
def test_a_ledger_that_was_changed_is_named_with_its_step(tamper: Tamper, told: str) -> None:
    changed = entries(trained(batches(), HEALTHY, HEALTHY, ALONE, ALONE, HEALTHY, HEALTHY))
    assert check(changed).whole

    tamper(changed)

    assert told in check(changed).problems[0]


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """What the REST API answers."""
    path = tmp_path / "ledger.json"
    found = entries(trained(batches(), *[HEALTHY] * 3, ALONE))
    path.write_text(json.dumps({"results": found, "next": None, "previous": None}))
    return path


def test_the_command_says_that_a_ledger_is_whole(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(page)]) == 0

    told = capsys.readouterr().out
    assert "data epoch 0, 22 samples: 22 trained once, 0 lost, 0 duplicated" in told
    assert "computed by replica 0: 12, 1: 10" in told
    assert told.endswith("whole\n")


def test_the_command_fails_for_one_that_was_changed(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page.write_text(page.read_text().replace("[[0, 0, 4]]", "[[1, 0, 4]]"))

    assert main([str(page), "--json"]) == 1

    found = json.loads(capsys.readouterr().out)
    assert found["whole"] is False
    assert found["problems"][0].startswith("step 3: the proof")
    assert found["epochs"][0]["trained_once"] == 22


def test_the_command_prints_the_shards_of_a_step(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(page), "--step", "1"]) == 0

    ids = batches().shard(1, 2).ids
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"shard 2: computed by replica 1: {ids[0]} {ids[1]}"
    assert main([str(page), "--step", "9"]) == 2
    assert "the ledger does not have step 9" in capsys.readouterr().err


def test_the_command_says_of_pages_without_the_last_that_there_are_more(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads(page.read_text())
    first, last = tmp_path / "1.json", tmp_path / "2.json"
    first.write_text(json.dumps({"results": told["results"][:1], "next": "/ledger?cursor=2"}))
    last.write_text(json.dumps({"results": told["results"][1:], "next": None}))

    assert main([str(first), str(last)]) == main([str(last), str(first)]) == 0
    assert main([str(first)]) == 2
    assert (
        "there are more pages: give them too, from /ledger?cursor=2 on" in capsys.readouterr().err
    )


def test_the_command_reads_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState(model, [optimizer], batches())
    model(torch.randn(4, 3)).square().mean().backward()
    state.advance(1, summed(batches(), 0, HEALTHY))
    path = draft.write(tmp_path / "checkpoints", state.copy())

    assert [main([str(one)]) for one in (tmp_path, path.parent, path)] == [0, 0, 0]

    assert capsys.readouterr().out.count("steps 0 to 0") == 3


def saved(folder: Path, step: int, **more: Any) -> str:
    """A checkpoint of this step whose ledger ends with step 3."""
    ledger = trained(batches(), *[HEALTHY] * 4)
    state = {"step": step, "batches": ledger.order, "ledger": ledger.state_dict(), **more}
    return str(draft.write(folder / "checkpoints", stage(state, step)))


def test_the_command_names_a_step_that_is_in_the_weights_and_not_in_the_ledger_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([saved(tmp_path, 4, taken=[0, 1])]) == 0

    told = capsys.readouterr().out
    assert "steps 0 to 3" in told
    assert "step 4 is in the weights and not in the ledger yet" in told
    assert "10 trained once, 4 to come, 0 lost, 0 duplicated, 8 unknown" in told


@pytest.mark.parametrize(
    ("step", "more", "told"),
    [
        (4, {}, "step 4 and after: the weights are of step 4, and the ledger ends with step 3"),
        (5, {"taken": []}, "step 4 and after: the weights are of step 5"),
        (1, {"taken": []}, "step 2 and after: the weights are of step 1"),
    ],
)
def test_the_command_fails_for_a_ledger_that_ends_elsewhere_than_its_weights(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    step: int,
    more: dict[str, list[int]],
    told: str,
) -> None:
    assert main([saved(tmp_path, step, **more)]) == 1
    assert told in capsys.readouterr().out


def test_a_ledger_that_has_the_step_of_its_weights_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([saved(tmp_path, 3, taken=[])]) == 0
    assert "yet" not in capsys.readouterr().out


RANGE = Ledger(step_from=0, step_to=1, epoch=1, samples=2)
ORDER = {"order": 2, "samples": 4, "shards": 2, "shard_size": 1, "seed": 0, "drop_last": 0}
HUGE = 1 << 62


def page_of(entry: dict[str, int], **order: int) -> str:
    """One that nobody wrote."""
    made = {**asdict(RANGE), "computed": [[0, 0, 2]], **entry, "order": {**ORDER, **order}}
    return json.dumps([made])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{}", "'results'"),
        ("[]", "the ledger is empty"),
        ("nonsense", "Expecting value"),
        ("[" * 100_000, "no ledger: RecursionError"),
        (json.dumps([{**asdict(RANGE), "order": 5}]), "no ledger: "),
        (json.dumps([asdict(RANGE)]), "kept no proof"),
        (page_of({}, samples=HUGE), "no ledger: RuntimeError("),
        (page_of({}, samples=HUGE, shards=HUGE), "no ledger: MemoryError("),
        (page_of({"step_from": 2 * HUGE, "step_to": 2 * HUGE}), "no ledger: error("),
    ],
)
def test_what_is_no_ledger_is_told_with_status_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, told: str
) -> None:
    path = tmp_path / "given"
    path.write_text(content)

    assert main([str(path)]) == 2
    assert told in capsys.readouterr().err
    assert main([str(path), "--json"]) == 2
    assert told in json.loads(capsys.readouterr().out)["error"]


def test_an_empty_folder_has_no_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
