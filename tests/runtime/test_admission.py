"""How newcomers and standbys come in, message by message: the real coordinator, no sockets."""

from __future__ import annotations

import pytest

from runtime.replica.coordinator import Asked, Coordinator
from runtime.replica.epochs import GATHER_S, HUNG_S, LAG_S, UNWRITTEN_S
from runtime.replica.roster import LEASE_S, PEER_SILENT_S
from runtime.replica.succession import Superseded
from tests.runtime.scene import Play, Replica, compare, phase_of

# --- the coordinator is cut off ---------------------------------------------------------------


def test_who_is_not_heard_because_nobody_is_stays_a_member(play: Play) -> None:
    """Members train on without the coordinator, for as long as their lease lasts, and hold then."""
    scene = play(3)
    scene.pass_time(2 * LEASE_S)
    assert scene.coordinator.alive == scene.members

    scene.replicas[0].say("pong", n=0, step=30)
    scene.pass_time(0.1)
    assert scene.coordinator.alive == scene.members  # the others' words are on their way


def test_what_is_said_while_a_group_is_built_decides_nothing(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many members say it so often that each word must cost next to nothing."""
    scene = play(3)
    settled: list[int] = []
    monkeypatch.setattr(scene.coordinator, "settle", lambda: settled.append(1))

    for replica in scene.replicas:
        replica.say("set", epoch=1, key=f"0:{replica.placement}", value="here")
        replica.say("get", epoch=1, key="0:p0", id=1)
        replica.say("pong", n=0, step=0)

    assert [len(replica.heard("value")) for replica in scene.replicas] == [1, 1, 1]
    assert not settled


def test_who_was_lost_meanwhile_is_found_soon(play: Play) -> None:
    scene = play(3)
    scene.pass_time(3.0)
    scene.pass_time(3.5 + PEER_SILENT_S, *scene.replicas[:2])

    assert sorted(scene.coordinator.alive) == [0, 1]
    assert scene.replicas[0].heard("lost")[-1]["replica"] == 2


def test_a_member_that_speaks_but_answers_nothing_is_lost_as_soon_as_a_silent_one(
    play: Play,
) -> None:
    """It hears nobody, so that its collective fails, which it still can tell."""
    scene = play(3)
    scene.pass_time(1.5, *scene.replicas[:2])
    told = {"epoch": 1, "step": 9, "held": [], "planned": False, "leaving": False, "silent": True}
    scene.replicas[2].say("report", **told)
    scene.pass_time(PEER_SILENT_S - 1.0, *scene.replicas[:2])

    assert sorted(scene.coordinator.alive) == [0, 1]


def test_a_member_that_may_be_silent_for_longer_is_waited_for(play: Play) -> None:
    """By one call its interpreter is held, and no thread of it can answer."""
    scene = play(3)
    scene.coordinator.silent_s = 5 * PEER_SILENT_S
    scene.pass_time(4 * PEER_SILENT_S, *scene.replicas[:2])
    awaited = sorted(scene.coordinator.alive)
    scene.pass_time(2 * PEER_SILENT_S, *scene.replicas[:2])

    assert awaited == [0, 1, 2]
    assert sorted(scene.coordinator.alive) == [0, 1]


def test_it_has_as_long_to_come_back_to_a_coordinator_that_was_started_anew(play: Play) -> None:
    scene = play(3)
    scene.coordinator = Coordinator(
        scene.coordinator.file, "t", 3, 1, silent_s=5 * PEER_SILENT_S, clock=lambda: scene.now
    )
    back = [scene.join(number, f"p{number}", epoch=1, step=9) for number in range(2)]
    scene.pass_time(4 * PEER_SILENT_S, *back)
    awaited = sorted(scene.coordinator.alive)
    scene.pass_time(2 * PEER_SILENT_S, *back)

    assert awaited == [0, 1, 2]
    assert sorted(scene.coordinator.alive) == [0, 1]


@pytest.mark.parametrize("silent_s", [0.0, 3.0, 8.0, 60.0])
def test_one_that_is_gone_makes_way_for_its_next_start_as_soon(play: Play, silent_s: float) -> None:
    """However long nobody was heard before that came."""
    scene = play(2)
    scene.pass_time(silent_s)
    first = {
        "token": "t", "op": "join", "job": "j", "replica": 0, "placement": "n", "standby": "",
        "epoch": 0, "step": -1, "world": 2, "shards": 12, "members": {}, "addresses": [],
        "gloo": [],
    }  # fmt: skip
    waiting = scene.coordinator.place_of(first, None)
    for _ in range(round(PEER_SILENT_S * 10) + 3):
        assert isinstance(waiting, Asked)
        scene.pass_time(0.1)
        waiting = scene.coordinator.place_of(first, waiting) or Asked(None, 0, 0.0)

    assert waiting == Asked(None, 0, 0.0)


@pytest.mark.parametrize("silent_s", [0.0, 3.0, 60.0])
def test_a_member_that_does_not_come_back_makes_way_for_its_next_start_as_soon(
    play: Play, silent_s: float
) -> None:
    """To a coordinator that was started anew, and hears nobody but those who wait. Who waits for
    one place gives up none of the others."""
    scene = play(2)
    scene.coordinator = Coordinator(scene.coordinator.file, "t", 2, 1, clock=lambda: scene.now)
    scene.pass_time(silent_s)
    first = {**scene.replicas[0].first, "placement": "n"}
    waiting = scene.coordinator.place_of(first, None)
    for _ in range(round(PEER_SILENT_S / 0.3)):  # the last is the first after it
        assert isinstance(waiting, Asked)
        scene.pass_time(0.3)
        waiting = scene.coordinator.place_of(first, waiting)

    assert waiting == ""
    assert scene.coordinator.alive == {1: "p1"}


def test_a_dead_member_is_lost_though_the_last_one_answers_slowly(play: Play) -> None:
    scene = play(2)
    for _ in range(4):
        scene.pass_time(1.4)
        scene.replicas[0].say("pong", n=0, step=12)
    scene.replicas[1].hang_up()
    for _ in range(4):
        scene.pass_time(1.4)
        scene.replicas[0].say("pong", n=0, step=12)

    assert sorted(scene.coordinator.alive) == [0]


def test_a_connection_that_ends_meanwhile_is_no_member_s_end(play: Play) -> None:
    scene = play(3)
    scene.pass_time(3.0)
    scene.replicas[1].hang_up()
    assert scene.coordinator.alive == scene.members

    back = scene.join(1, "p1", epoch=1, step=30)
    assert back.peer is not None
    assert back.peer.phase == "member"


def test_members_that_are_not_heard_are_gone_once_somebody_else_is(play: Play) -> None:
    scene = play(3)
    scene.pass_time(LEASE_S)
    newcomer = scene.join(3, "p3")
    scene.pass_time(0.5 + PEER_SILENT_S, newcomer)

    assert scene.coordinator.alive == {}


def test_members_that_lost_their_epoch_wait_for_no_other_than_themselves(play: Play) -> None:
    """They hold the newest state there is: nobody who was started anew has a newer one."""
    scene = play(3)
    scene.replicas[2].hang_up()
    for survivor in scene.replicas[:2]:
        survivor.say("again", epoch=1, order=0)
    assert scene.coordinator.alive == {}
    scene.pass_time(2.0, *scene.replicas[:2])
    for survivor in scene.replicas[:2]:
        survivor.say_ready(11)
    scene.pass_time(2.0, *scene.replicas[:2])

    assert scene.epoch == 2
    assert sorted(scene.members) == [0, 1]


def test_who_was_started_anew_waits_for_one_that_may_have_a_newer_state(play: Play) -> None:
    scene = play(3)
    for replica in scene.replicas:
        replica.hang_up()
    started = [scene.join(number, f"n{number}") for number in (0, 1)]
    scene.pass_time(2.0, *started)
    for replica in started:
        replica.say_ready(11)
    scene.pass_time(LEASE_S + 5.0, *started)
    assert scene.epoch == 1

    scene.pass_time(GATHER_S, *started)
    assert scene.epoch == 2


def test_a_job_that_grew_waits_for_as_many_as_it_had(play: Play) -> None:
    scene = play(2)
    grown = scene.join(2, "p2")
    scene.bring_level(grown, 10)
    scene.reach_edge(12)
    assert sorted(scene.members) == [0, 1, 2]
    for replica in (*scene.replicas, grown):
        scene.end(replica, 0)

    started = [scene.join(number, f"n{number}") for number in (0, 1)]
    for replica in started:
        replica.say_ready(11)
    scene.pass_time(2.0, *started)
    assert scene.epoch == 2

    scene.join(2, "n2").say_ready(11)
    assert scene.epoch == 3


# --- newcomers --------------------------------------------------------------------------------


def test_what_members_hold_for_newcomers_is_freed_when_the_last_has_entered(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.bring_level(newcomer, 10)
    scene.reach_edge(12)

    scene.pass_time(1.0, *scene.replicas, newcomer)

    assert scene.members[2] == "n"
    assert scene.replicas[0].heard("release")[-1]["log"] is True


def test_what_members_hold_is_freed_when_the_newcomer_has_died(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.replicas[0].say("staged", step=10, digest="d")

    newcomer.hang_up()
    scene.replicas[1].say("staged", step=10, digest="d")
    scene.pass_time(1.0, *scene.replicas)

    assert scene.replicas[0].heard("release")[-1]["log"] is True
    assert scene.coordinator.admission.staging is None


def test_who_connects_again_hears_anew_that_nobody_takes_its_copy(play: Play) -> None:
    """What it was told last may have been lost with its connection."""
    scene = play(2)
    newcomer = scene.join(2, "n")
    newcomer.hang_up()
    scene.pass_time(1.0, *scene.replicas)
    assert scene.replicas[1].heard("release")

    back = scene.join(1, "p1", epoch=1, step=10)
    scene.pass_time(1.0, scene.replicas[0], back)

    assert [one["log"] for one in back.heard("release")] == [True]


def test_a_state_with_another_digest_does_not_enter(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    for member in scene.replicas:
        member.say("staged", step=10, digest="d")

    newcomer.say_ready(10, "another")
    newcomer.say("caught_up", step=10)
    scene.reach_edge(12)

    assert 2 not in scene.members
    assert newcomer.peer is not None
    assert (newcomer.peer.phase, newcomer.peer.refusals) == ("fresh", 1)
    scene.pass_time(1.5, *scene.replicas, newcomer)
    for member in scene.replicas:
        member.say("staged", step=12, digest="d")
    assert newcomer.heard("sync")[-1]["why"] == "its state was not the members' once it was loaded"


def test_a_copy_that_could_not_be_made_is_asked_for_anew(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    for member in scene.replicas:
        member.say("staged", step=10, digest="")
    assert not newcomer.heard("sync")
    at_once = [len(member.heard("stage")) for member in scene.replicas]

    scene.pass_time(1.5, *scene.replicas, newcomer)
    for member in scene.replicas:
        member.say("staged", step=11, digest="d")

    assert at_once == [1, 1]
    assert [len(member.heard("stage")) for member in scene.replicas] == [2, 2]
    assert [sync["step"] for sync in newcomer.heard("sync")] == [11]
    assert not scene.replicas[0].heard("diverged")


def test_members_that_differ_are_told_and_the_newcomer_takes_what_most_hold(play: Play) -> None:
    scene = play(3)
    newcomer = scene.join(3, "n")
    for member, digest in zip(scene.replicas[:2], ["odd", "d"], strict=True):
        member.say("staged", step=10, digest=digest)
    assert not newcomer.heard("sync")
    for member, digest in zip(scene.replicas, ["odd", "d", "d"], strict=True):
        member.say("staged", step=12, digest=digest)

    (sync,) = newcomer.heard("sync")
    asked = [[one["holders"] for one in member.heard("stage")] for member in scene.replicas]

    assert asked == [[2, 3], [2, 3], [3]]
    assert (sync["digest"], sync["donors"]) == ("d", [["p1:1"], ["p2:1"]])
    assert scene.replicas[0].heard("diverged")[0]["states"] == {"0": "odd", "1": "d", "2": "d"}


def test_a_newcomer_is_told_of_all_members_for_it_must_reach_them_all(play: Play) -> None:
    scene = play(3)
    newcomer = scene.join(3, "n")
    for member in scene.replicas[:2]:
        member.say("staged", step=10, digest="d")

    (sync,) = newcomer.heard("sync")

    assert sync["donors"] == [["p0:1"], ["p1:1"]]
    assert sync["members"] == [["p0:1"], ["p1:1"], ["p2:1"]]


def test_who_was_put_off_is_put_off_for_longer_until_it_has_made_a_step(play: Play) -> None:
    """An epoch that never stands is no reason to let it in as soon the next time."""
    scene = play(2)
    newcomer = scene.join(2, "n")
    for member in scene.replicas:
        member.say("staged", step=10, digest="d")
    newcomer.say("again", epoch=0, order=newcomer.heard("sync")[-1]["order"])
    scene.pass_time(1.5, *scene.replicas, newcomer)
    scene.bring_level(newcomer, 12)
    scene.reach_edge(13)

    entered = phase_of(newcomer)
    newcomer.say("pong", n=0, step=14)

    assert (entered, phase_of(newcomer)) == (("member", 1), ("member", 0))


def test_no_epoch_has_the_number_of_one_of_which_only_a_disk_knows(play: Play) -> None:
    """The record was lost, and with it which epochs there were."""
    scene = play(2)
    for number, replica in enumerate(scene.replicas):
        scene.end(replica, number)
    back = [scene.join(number, f"again{number}") for number in range(2)]
    for replica, seen in zip(back, [4, 9], strict=True):
        order = replica.heard("load")[-1]["order"]
        replica.say("ready", order=order, step=20, trained_in=4, seen=seen, digest="d")
    scene.pass_time(1.0, *back)

    assert scene.epoch == 10


# --- members that differ --------------------------------------------------------------------------


def test_the_odd_one_of_the_members_is_named_to_all(play: Play) -> None:
    scene = play(3)

    compare(scene, "d", "odd", "d")

    told = [member.heard("diverged") for member in scene.replicas]
    assert told[0] == told[1] == told[2]
    assert [(one["step"], one["odd"], one["states"]) for one in told[0]] == [
        (9, [1], {"0": "d", "1": "odd", "2": "d"})
    ]


def test_of_two_that_differ_none_is_blamed(play: Play) -> None:
    scene = play(2)

    compare(scene, "d", "odd")

    assert scene.replicas[1].heard("diverged")[0]["odd"] == []


def test_members_that_hold_the_same_hear_nothing(play: Play) -> None:
    scene = play(3)

    compare(scene, "d", "d", "d")

    assert not any(member.heard("diverged") for member in scene.replicas)


def test_a_comparison_waits_for_all_and_never_mixes_steps(play: Play) -> None:
    scene = play(3)

    compare(scene, "d", "odd", step=9)
    compare(scene, "e", "e", "e", step=19)
    scene.replicas[2].say("compared", epoch=scene.epoch, step=9, digest="d")

    assert not any(member.heard("diverged") for member in scene.replicas)


def test_what_was_hashed_in_another_epoch_is_not_compared(play: Play) -> None:
    scene = play(3)

    compare(scene, "d", "d")
    old = scene.epoch - 1
    scene.replicas[2].say("compared", epoch=old, step=9, digest="odd")

    assert not any(member.heard("diverged") for member in scene.replicas)


def test_who_says_ready_to_an_older_order_is_not_believed(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    for member in scene.replicas:
        member.say("staged", step=10, digest="d")
    (old,) = newcomer.heard("sync")

    newcomer.say("again", epoch=0, order=old["order"])
    newcomer.say("ready", order=old["order"], step=10, digest="d")

    assert newcomer.peer is not None
    assert newcomer.peer.phase == "fresh"


def test_a_mover_takes_the_place_of_a_living_member_at_a_planned_edge(play: Play) -> None:
    scene = play(2)
    mover = scene.join(1, "new", standby="migrate")
    scene.bring_level(mover, 10)

    scene.reach_edge(12)

    assert scene.members == {0: "p0", 1: "new"}
    assert scene.replicas[1].heard("replaced") == [{"op": "replaced", "by": "new"}]
    (grant,) = mover.heard("epoch")
    assert (grant["joined"], grant["lost"], grant["behind"]) == ([1], [], [1])
    assert scene.join(1, "p1", epoch=1, step=12).refused.startswith("new, which stood by")


def test_a_move_of_the_only_replica_hands_the_last_step_on_first(play: Play) -> None:
    scene = play(1)
    mover = scene.join(0, "new", standby="migrate")
    scene.bring_level(mover, 10)
    scene.reach_edge(12)
    (asked,) = mover.heard("catch_up")
    waiting = scene.epoch

    mover.say("caught_up", step=12)

    assert (asked["step"], asked["donors"], waiting) == (12, [["p0:1"]], 1)
    assert scene.members == {0: "new"}
    assert mover.heard("epoch")[0]["begins"] is False


def test_of_two_movers_to_one_place_the_newest_start_counts(play: Play) -> None:
    scene = play(2)
    first = scene.join(1, "first", standby="migrate")
    second = scene.join(1, "second", standby="migrate")
    scene.bring_level(second, 10)

    scene.reach_edge(12)

    assert "second stands by for replica 1 in its place" in first.heard("refused")[0]["error"]
    assert scene.members == {0: "p0", 1: "second"}


def test_a_spare_enters_in_the_epoch_that_drops_the_dead(play: Play) -> None:
    scene = play(3)
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)

    scene.replicas.pop().hang_up()
    scene.reach_edge(11, planned=False)

    assert (scene.epoch, scene.members) == (2, {0: "p0", 1: "p1", 2: "spare"})


def test_members_compare_their_states_as_soon_as_a_standby_is_one_of_them(play: Play) -> None:
    scene = play(3)
    compare(scene, "d", "d", "d")
    asked_before = [len(member.heard("compare")) for member in scene.replicas]
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)
    scene.replicas.pop().hang_up()
    scene.reach_edge(10, planned=False)

    assert asked_before == [1, 1, 1]  # as the job began
    assert [len(member.heard("compare")) for member in scene.replicas] == [2, 2]
    assert len(spare.heard("compare")) == 1


def test_who_was_proven_just_now_is_compared_with_the_others_in_their_time(play: Play) -> None:
    scene = play(3)
    compare(scene, "d", "d", "d")
    scene.replicas.pop().hang_up()
    scene.reach_edge(9, planned=False)
    newcomer = scene.join(2, "new")
    scene.bring_level(newcomer, 11)
    scene.reach_edge(11)

    assert scene.members[2] == "new"
    assert newcomer.heard("compare") == []


def test_a_restart_does_not_take_the_place_back_from_a_spare(play: Play) -> None:
    scene = play(2)
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)
    scene.replicas.pop().hang_up()
    scene.reach_edge(11, planned=False)

    restarted = scene.join(1, "restarted")

    assert restarted.refused.startswith("spare, which stood by, has taken the place of replica 1")
    assert scene.coordinator.alive == {0: "p0", 1: "spare"}


def test_a_spare_that_missed_its_place_may_be_given_another(play: Play) -> None:
    scene = play(3)
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)
    scene.replicas.pop().hang_up()
    scene.reach_edge(11, planned=False)
    assert scene.members == {0: "p0", 1: "p1", 2: "spare"}
    scene.pass_time(PEER_SILENT_S + 0.5, *scene.replicas)
    scene.reach_edge(11, planned=False)

    back = scene.join(0, "spare", standby="spare")
    scene.join(2, "restarted").hang_up()
    scene.bring_level(back, 20)
    scene.replicas.pop().hang_up()
    scene.reach_edge(21, planned=False)

    assert scene.members == {0: "p0", 1: "spare"}
    assert scene.join(1, "spare", epoch=scene.epoch, step=21).refused == ""


def test_an_agents_word_about_a_spare_counts_by_its_placement(play: Play) -> None:
    scene = play(2)
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)
    scene.replicas.pop().hang_up()
    scene.reach_edge(11, planned=False)

    scene.end(spare, 0)

    assert scene.coordinator.alive == {0: "p0"}


def test_a_spare_takes_over_when_the_last_replica_has_surely_ended(play: Play) -> None:
    scene = play(1)
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)

    scene.end(scene.replicas[0], 0)
    spare.say_ready(10)

    assert scene.members == {0: "spare"}


def test_a_mover_does_not_take_the_place_of_one_that_was_cut_off_for_a_moment(
    play: Play,
) -> None:
    scene = play(1)
    scene.join(0, "new", standby="migrate")

    scene.replicas[0].hang_up()
    back = scene.join(0, "p0", epoch=1, step=500)
    back.say_ready(500)
    scene.pass_time(GATHER_S + 1.5, back)

    assert not back.refused
    assert scene.members == {0: "p0"}
    assert back.heard("epoch")[-1]["step"] == 500


def test_a_spare_waits_for_those_who_are_started_again_after_all_have_died(play: Play) -> None:
    scene = play(2)
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)
    for number, replica in enumerate(scene.replicas):
        scene.end(replica, number)
    scene.pass_time(1.0, spare)

    back = [scene.join(number, f"again{number}") for number in range(2)]
    scene.pass_time(1.0, spare, *back)
    for one in (spare, *back):
        one.say_ready(10)
    scene.pass_time(3.0, spare, *back)

    assert [one.refused for one in back] == ["", ""]
    assert scene.members == {0: "again0", 1: "again1"}


def test_a_spare_that_is_given_a_number_while_its_copy_is_awaited_is_asked_anew(play: Play) -> None:
    scene = play(2)
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)
    for number, replica in enumerate(scene.replicas):
        scene.end(replica, number)
    back, dies = (scene.join(number, f"again{number}") for number in range(2))
    spare.say_ready(10)
    for one in (back, dies):
        one.say_ready(5, "older")
    scene.pass_time(1.0, spare, back, dies)
    asked = len(spare.heard("stage"))

    dies.hang_up()
    scene.pass_time(GATHER_S + 1.0, spare, back)  # nobody comes in its place
    spare.say("staged", step=10, digest="d")
    scene.pass_time(1.0, spare, back)

    assert asked == 1
    assert spare.peer is not None
    assert spare.peer.replica == 1
    assert back.heard("sync")[-1]["step"] == 10
    back.say_ready(10)
    assert scene.members == {0: "again0", 1: "spare"}


@pytest.mark.parametrize(("made", "members"), [(1000, {0: "p0", 1: "spare"}), (10, {0: "p0"})])
def test_one_that_was_level_and_makes_no_step_any_more_does_not_enter(
    play: Play, made: int, members: dict[int, str]
) -> None:
    scene = play(2)
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)
    for replica in scene.replicas:
        replica.say("pong", n=0, step=1000)
    for _ in range(round(LAG_S) + 1):
        spare.say("pong", n=0, step=made)  # what hangs still answers
        scene.pass_time(1.0, *scene.replicas)

    scene.end(scene.replicas[1], 1)
    scene.replicas.pop()
    scene.reach_edge(1000, planned=False)

    assert scene.members == members


@pytest.mark.parametrize("step_s", [1.0, LAG_S + 2.0, 6 * LAG_S])
def test_however_long_a_step_takes_who_follows_enters_at_its_edge(
    play: Play, step_s: float
) -> None:
    """It makes a step once the next is there, and is two behind for the moment that this takes."""
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.bring_level(newcomer, 10)
    scene.pass_time(step_s, newcomer, *scene.replicas)

    scene.reach_edge(12)

    assert scene.members == {0: "p0", 1: "p1", 2: "n"}


def test_who_fell_behind_once_and_made_all_steps_since_enters(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.bring_level(newcomer, 10)
    for made, ahead in ((11, 13), (12, 14), (13, 15)):
        newcomer.say("caught_up", step=made)
        for replica in scene.replicas:
            replica.say("pong", n=0, step=ahead)
        scene.pass_time(LAG_S - 1.0, newcomer, *scene.replicas)

    scene.reach_edge(15)

    assert scene.members == {0: "p0", 1: "p1", 2: "n"}


@pytest.mark.parametrize(
    ("number", "standby", "called"),
    [(2, "", "replica 0"), (0, "migrate", "replica 0"), (1, "spare", "replica 0")],
)
def test_two_that_are_called_alike_are_not_taken_for_one(
    play: Play, number: int, standby: str, called: str
) -> None:
    scene = play(2)

    twin = scene.join(number, "p0", standby=standby, port=2)

    assert twin.refused == (
        f"{called} is called p0 too: give each start a DRYDOCK_PLACEMENT of its own, or none"
    )
    assert scene.coordinator.alive == {0: "p0", 1: "p1"}


def test_a_second_start_by_the_same_name_ends_itself_and_not_the_first(play: Play) -> None:
    scene = play(2)
    first = scene.replicas[0]
    second = {**first.first, "addresses": ["p0:2"]}

    waits = scene.coordinator.place_of(second, None)
    assert isinstance(waits, Asked)
    first.say("pong", n=waits.ping, step=-1)

    assert scene.coordinator.place_of(second, waits) == Superseded(
        "replica 0 of j lives, as p0: give each start a DRYDOCK_PLACEMENT of its own, or none"
    )
    assert scene.coordinator.place_of(first.first, None) == ""


def test_a_standby_that_leaves_breaks_nothing(play: Play) -> None:
    scene = play(2)
    standby = scene.join(1, "new", standby="migrate")

    standby.say("goodbye")

    assert not scene.replicas[0].heard("broken")


def test_who_cannot_follow_an_older_epoch_stays_in_the_one_it_was_just_granted(
    play: Play,
) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.bring_level(newcomer, 10)
    scene.reach_edge(12)

    newcomer.say("again", epoch=0, order=1)

    assert scene.coordinator.alive[2] == "n"


def test_followers_hear_who_the_members_are_now(play: Play) -> None:
    scene = play(3)
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)
    newcomer = scene.join(3, "n")
    scene.bring_level(newcomer, 20)

    scene.reach_edge(22)

    assert scene.members[3] == "n"
    assert spare.heard("donors")[-1]["donors"] == [["p0:1"], ["p1:1"], ["p2:1"]]


def test_a_death_at_the_last_edge_does_not_undo_the_wish_to_stop(play: Play) -> None:
    scene = play(3)
    for member in scene.replicas[:2]:
        member.say("report", epoch=1, step=40, held=[], planned=True, leaving=True)

    scene.replicas[2].hang_up()

    assert scene.replicas[0].heard("dismissed")


def say_report(member: Replica, step: int, **told: bool) -> None:
    member.say("report", epoch=1, step=step, held=[], planned=True, **{"leaving": False} | told)


def test_who_leaves_alone_goes_at_the_edge_and_the_others_begin_an_epoch_without_it(
    play: Play,
) -> None:
    scene = play(3)
    leaver, *others = scene.replicas
    say_report(leaver, 40, leaving=True)

    waiting = leaver.heard("dismissed")
    for member in others:
        say_report(member, 40)

    assert (waiting, len(leaver.heard("dismissed"))) == ([], 1)
    assert scene.members == {1: "p1", 2: "p2"}
    assert others[0].heard("epoch")[-1]["left"] == [0]
    assert others[0].heard("lost") == others[0].heard("broken") == []


def test_an_answer_written_before_a_report_and_heard_after_it_takes_no_step_back(
    play: Play,
) -> None:
    scene = play(2)
    first, other = scene.replicas
    say_report(first, 41, leaving=True, over=True)
    first.say("pong", n=0, step=40)
    say_report(other, 41, leaving=True, over=True)

    assert len(first.heard("dismissed")) == len(other.heard("dismissed")) == 1


def test_a_number_below_0_is_that_of_no_replica(play: Play) -> None:
    assert play(2).join(-1, "p").refused == (
        "replica -1: replicas count from 0; give it another DRYDOCK_REPLICA"
    )


def test_who_alone_holds_the_last_step_stays_to_hand_it_on(play: Play) -> None:
    scene = play(2)
    leaver, other = scene.replicas
    say_report(leaver, 41, leaving=True)
    say_report(other, 40)

    assert leaver.heard("dismissed") == []
    assert scene.members == {0: "p0", 1: "p1"}


def test_of_a_job_that_is_over_nobody_goes_before_all_do(play: Play) -> None:
    scene = play(2)
    first, other = scene.replicas
    say_report(first, 40, leaving=True, over=True)
    say_report(other, 40)

    assert first.heard("dismissed") == []
    assert scene.members == {0: "p0", 1: "p1"}


@pytest.mark.parametrize("over", [True, False])
def test_a_newcomer_goes_with_a_job_that_is_over_and_else_waits_for_others(
    play: Play, over: bool
) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    for member in scene.replicas:
        say_report(member, 40, leaving=True, over=over)

    assert [told["over"] for told in scene.replicas[0].heard("dismissed")] == [over]
    assert bool(newcomer.heard("dismissed")) == over


def test_refused_newcomers_of_a_beginning_are_not_retried_at_once(play: Play) -> None:
    scene = play(2)
    for replica in scene.replicas:
        scene.end(replica, 0)
    there = [scene.join(number, f"n{number}") for number in range(2)]
    there[0].say_ready(50, "good")
    there[1].say_ready(-1, "old")
    there[0].say("staged", step=50, digest="good")

    there[1].say_ready(50, "other")
    orders = len(there[1].heard("load")) + len(there[1].heard("sync"))
    scene.pass_time(0.5, *there)

    assert len(there[1].heard("load")) + len(there[1].heard("sync")) == orders


def test_a_copy_that_cannot_be_made_before_the_job_begins_is_not_asked_for_without_end(
    play: Play,
) -> None:
    scene = play(2)
    for replica in scene.replicas:
        scene.end(replica, 0)
    newest, other = (scene.join(number, f"n{number}") for number in range(2))
    newest.say_ready(50, "good")
    other.say_ready(-1, "old")
    newest.say("staged", step=50, digest="")
    scene.pass_time(1.0, newest, other)
    at_once = len(newest.heard("stage"))
    scene.pass_time(1.5, newest, other)

    assert (at_once, len(newest.heard("stage"))) == (1, 2)


def test_that_the_record_cannot_be_written_is_logged_once_a_minute(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried with each tick."""
    scene = play(2)
    survivor = scene.replicas[0]
    scene.coordinator.file.next.mkdir()  # in the way of the next
    scene.end(scene.replicas[1], 1)
    survivor.say("report", epoch=1, step=9, held=[], planned=False, leaving=False)
    scene.pass_time(UNWRITTEN_S / 2, survivor)
    first = caplog.text.count("record_not_written")
    scene.pass_time(UNWRITTEN_S, survivor)
    second = caplog.text.count("record_not_written")
    scene.coordinator.file.next.rmdir()
    scene.pass_time(0.1, survivor)

    assert (first, second) == (1, 2)
    assert scene.epoch == 2


def test_who_may_train_unseen_holds_to_the_lease_that_it_was_granted(play: Play) -> None:
    scene = play(2)
    scene.coordinator.lease_s = 1.0  # by which it was started anew
    scene.now += LEASE_S / 2

    assert scene.coordinator.may_train_unseen()


def test_while_somebody_waits_for_a_place_no_other_is_thought_dead_that_nobody_can_hear(
    play: Play,
) -> None:
    scene = play(3)
    second = {
        "op": "join", "token": "t", "job": "j", "replica": 1, "placement": "second", "standby": "",
        "epoch": 0, "step": -1, "members": {}, "world": 3, "addresses": [], "gloo": [],
        "shards": 12, "shape": {},
    }  # fmt: skip
    asked = scene.coordinator.place_of(second, None)
    for _ in range(40):
        scene.now += 0.1
        asked = scene.coordinator.place_of(second, asked if isinstance(asked, Asked) else None)
        scene.coordinator.tick()

    assert {0, 2} <= scene.coordinator.alive.keys()


def test_a_job_begins_again_without_one_that_came_and_cannot_take_the_state(play: Play) -> None:
    scene = play(3)
    for replica in scene.replicas:
        scene.end(replica, 0)
    there = [scene.join(number, f"n{number}") for number in range(3)]
    *able, unable = there
    for replica in able:
        replica.say_ready(50, "good")
    for put_off_s in (1.2, 2.2, 4.2, 8.2, 14.0):
        unable.say_ready(-1, "old")
        for replica in able:
            replica.say("staged", step=50, digest="good")
        unable.say_ready(50, "other")
        scene.pass_time(put_off_s, *there)
    assert scene.epoch == 1

    scene.pass_time(1.0, *there)
    assert (scene.epoch, sorted(scene.members)) == (2, [0, 1])

    scene.pass_time(2.0, *there)
    for replica in able:
        replica.say("staged", step=60, digest="later")
    assert unable.heard("sync")[-1]["step"] == 60


def test_one_that_hangs_as_it_takes_a_state_keeps_no_later_newcomer_from_it(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    scene = play(2)
    hangs = scene.join(2, "hangs")
    for member in scene.replicas:
        member.say("staged", step=9, digest="d")
    later = scene.join(3, "later")
    scene.pass_time(HUNG_S - 1.0, hangs, later, *scene.replicas)
    waiting, freed = later.heard("sync"), len(scene.replicas[0].heard("release"))

    scene.pass_time(2.0, hangs, later, *scene.replicas)
    scene.bring_level(later, 50)
    scene.reach_edge(52)

    assert waiting == []
    assert len(scene.replicas[0].heard("release")) > freed
    assert scene.members == {0: "p0", 1: "p1", 3: "later"}
    assert caplog.text.count("hangs replica=2 placement=hangs") == 1


def test_one_that_was_only_slow_enters_later_and_has_longer_the_next_time(play: Play) -> None:
    scene = play(2)
    slow = scene.join(2, "slow")
    for member in scene.replicas:
        member.say("staged", step=9, digest="d")
    scene.pass_time(HUNG_S + 1.0, slow, *scene.replicas)

    slow.say("again", epoch=0, order=slow.heard("sync")[-1]["order"])
    scene.pass_time(2.0, slow, *scene.replicas)
    for member in scene.replicas:
        member.say("staged", step=50, digest="d")
    later = scene.join(3, "later")
    scene.pass_time(HUNG_S + 1.0, slow, later, *scene.replicas)
    waiting = later.heard("sync")
    slow.say_ready(50)
    scene.witness(51)
    slow.say_proved(51)
    slow.say("caught_up", step=51)
    scene.reach_edge(52)

    assert waiting == []
    assert scene.members == {0: "p0", 1: "p1", 2: "slow"}


def test_a_job_begins_again_without_one_that_hangs_as_it_takes_the_newest_state(
    play: Play,
) -> None:
    scene = play(3)
    for replica in scene.replicas:
        scene.end(replica, 0)
    newest, other, hangs = there = [scene.join(number, f"n{number}") for number in range(3)]
    for replica, step in ((newest, 50), (other, 50), (hangs, 40)):
        replica.say_ready(step)
    for replica in (newest, other):
        replica.say("staged", step=50, digest="d")
    scene.pass_time(HUNG_S - 1.0, *there)
    before = scene.epoch

    scene.pass_time(2.0, *there)

    assert before == 1
    assert scene.members == {0: "n0", 1: "n1"}


def test_one_that_may_hold_the_newest_state_is_waited_for_and_a_person_is_told(
    play: Play,
) -> None:
    scene = play(3)
    for replica in scene.replicas:
        scene.end(replica, 0)
    able, other, hangs = there = [scene.join(number, f"n{number}") for number in range(3)]
    for replica in (able, other):
        replica.say_ready(50)

    scene.pass_time(HUNG_S + 1.0, *there)
    waiting = scene.epoch
    hangs.say_ready(60)
    for replica in (hangs, able, other):
        replica.say("staged", step=60, digest="d")
    for replica in (able, other):
        replica.say_ready(60)

    assert waiting == 1
    assert [told["text"] for told in able.heard("undecided")] == [
        "all wait for replica 2 (n2), which has loaded its state for long and may hold the "
        "newest: end its process if it hangs"
    ]
    assert scene.members == {0: "n0", 1: "n1", 2: "n2"}


def test_members_of_the_last_epoch_wait_for_no_successor_that_hangs(play: Play) -> None:
    """Whoever was started anew has nothing that they lack."""
    scene = play(3)
    scene.end(scene.replicas[2], 2)
    hangs = scene.join(2, "hangs")
    back = []
    for number in range(2):
        scene.end(scene.replicas[number], number)
        back.append(scene.join(number, f"p{number}", epoch=1, step=50))
    for replica in back:
        replica.say_ready(50)

    scene.pass_time(HUNG_S + 1.0, hangs, *back)

    assert scene.members == {0: "p0", 1: "p1"}
