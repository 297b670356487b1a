"""Whatever members there are, every shard is summed exactly once."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from runtime.client import Ledger
from runtime.data import Batches, SampleLedger, checksum
from runtime.replica.plan import Report, divide, fixed_shares, take_over

MEMBERS = st.sets(st.integers(0, 20), min_size=1, max_size=8)


@st.composite
def reports(draw: st.DrawFn) -> list[Report]:
    """Survivors after deaths: at step 6 or 7, holding whatever shards they got to."""
    members = sorted(draw(MEMBERS))
    owner = {shard: draw(st.sampled_from([*members, None])) for shard in range(12)}
    return [
        Report(
            replica=m,
            step=draw(st.sampled_from([6, 7])),
            held=tuple(s for s, who in owner.items() if who == m),
        )
        for m in members
    ]


@given(MEMBERS, st.integers(1, 40))
def test_every_shard_goes_to_exactly_one_member_and_loads_differ_by_one(
    members: set[int], shards: int
) -> None:
    given_out = divide(range(shards), sorted(members))

    assert sorted(s for mine in given_out.values() for s in mine) == list(range(shards))
    loads = [len(mine) for mine in given_out.values()]
    assert max(loads) - min(loads) <= 1


@given(reports())
def test_after_a_takeover_every_shard_is_held_or_assigned_exactly_once(
    survivors: list[Report],
) -> None:
    plan = take_over(survivors, 12)

    shards = [s for replica in plan.held for s in (*plan.held[replica], *plan.assign[replica])]
    assert sorted(shards) == list(range(12))
    assert plan.step == max(r.step for r in survivors)
    assert set(plan.behind) == {r.replica for r in survivors if r.step < plan.step}
    assert all(not plan.held[replica] for replica in plan.behind)


def test_of_two_who_claim_a_shard_the_later_discards_all_it_holds() -> None:
    plan = take_over(
        [Report(replica=0, step=3, held=(1,)), Report(replica=4, step=3, held=(1, 2))], 4
    )

    assert plan.held == {0: [1], 4: []}
    assert sorted(plan.assign[0] + plan.assign[4]) == [0, 2, 3]


@given(st.integers(24, 200), st.integers(0, 5))
def test_an_epoch_visits_no_sample_twice(samples: int, epoch: int) -> None:
    batches = Batches(samples=samples, shards=12, shard_size=2, seed=1)
    first = epoch * batches.steps_per_epoch

    ids = [
        sample
        for step in range(first, first + batches.steps_per_epoch)
        for index in range(12)
        for sample in batches.shard(step, index).ids
    ]

    assert len(ids) == len(set(ids)) == batches.steps_per_epoch * 24


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=32))
def test_checksums_are_exact_in_float32(ids: list[int]) -> None:
    assert 0 <= checksum(ids) < 1 << 24


@given(
    st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 2), min_size=3, max_size=3))),
    st.integers(-1, 30),
)
def test_the_ledger_tells_each_step_once_whatever_was_known(
    steps: list[tuple[int, list[int]]], known: int
) -> None:
    ledger = SampleLedger()
    epoch = 0
    for step, (advance, coverage) in enumerate(steps):
        epoch += advance // 3
        ledger.record(step, epoch, coverage, 2)

    told = ledger.since(known)

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


@given(reports(), st.integers(21, 30))
def test_with_fixed_shares_nobody_computes_what_is_another_s(
    survivors: list[Report], replicas: int
) -> None:
    shares = fixed_shares(12, replicas)

    plan = take_over(survivors, 12, shares)

    summed = [s for replica in plan.held for s in (*plan.held[replica], *plan.assign[replica])]
    assert sorted([*summed, *plan.dropped]) == list(range(12))
    assert all(set(plan.assign[replica]) <= set(shares[replica]) for replica in plan.assign)
    assert plan.taken_over == ()


def test_dropped_shards_stand_in_the_ledger_once_for_all_steps_alike() -> None:
    ledger = SampleLedger()
    for step in range(1000):
        ledger.record(step, 1, [1, 0, 1, 0] if 10 <= step < 990 else [1] * 4, 2, drops=True)

    told = ledger.since(-1)

    assert [(e.step_from, e.step_to, e.dropped, e.samples) for e in told] == [
        (0, 9, [], 80),
        (10, 989, [1, 3], 3920),
        (990, 999, [], 80),
    ]
    assert all(e.lost == [] for e in told)


def test_a_ledger_survives_its_state() -> None:
    ledger = SampleLedger()
    for step, coverage in enumerate([[1, 1], [1, 0], [2, 1], [1, 1]]):
        ledger.record(step, 1, coverage, 4, drops=step == 1)
    copy = SampleLedger()

    copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))

    assert copy.since(-1) == ledger.since(-1)
    assert copy.since(0)[0] == Ledger(step_from=1, step_to=1, epoch=1, samples=4, dropped=[1])
