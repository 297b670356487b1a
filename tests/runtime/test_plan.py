"""Whatever members there are, every shard is summed exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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


@given(reports(), st.data())
def test_who_was_added_and_lacks_steps_computes_nothing_of_the_first(
    survivors: list[Report], data: st.DataObject
) -> None:
    added = data.draw(st.sets(st.sampled_from([r.replica for r in survivors])))

    plan = take_over(survivors, 12, added=added)

    shards = [s for replica in plan.held for s in (*plan.held[replica], *plan.assign[replica])]
    assert sorted(shards) == list(range(12))
    assert all(not plan.assign[replica] for replica in added & set(plan.behind))
    level = set(plan.assign) - (added & set(plan.behind))
    loads = [len(plan.held[m]) + len(plan.assign[m]) for m in level if plan.assign[m]]
    assert max(loads, default=0) - min(loads, default=0) <= 1


def test_of_two_who_claim_a_shard_the_later_discards_all_it_holds() -> None:
    plan = take_over(
        [Report(replica=0, step=3, held=(1,)), Report(replica=4, step=3, held=(1, 2))], 4
    )

    assert plan.held == {0: [1], 4: []}
    assert sorted(plan.assign[0] + plan.assign[4]) == [0, 2, 3]


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
