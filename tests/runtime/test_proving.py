"""Newcomers show that they make of a step what the members make of it, before they enter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from runtime.replica.proving import AGAIN_S
from tests.runtime.scene import Play, Scene, compare, phase_of


def test_who_is_level_enters_once_it_has_made_a_step_as_the_members_did(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.hand_over(newcomer, 10)
    newcomer.say("caught_up", step=12)
    scene.witness(13)
    scene.reach_edge(13)
    assert sorted(scene.members) == [0, 1]

    newcomer.say("caught_up", step=14)
    scene.witness(15)
    before = [member.heard("edge") for member in scene.replicas]
    newcomer.say_proved(15)
    scene.reach_edge(16)

    assert before == [[], []]
    assert scene.members == {0: "p0", 1: "p1", 2: "n"}


@contextlib.contextmanager
def full(scene: Scene) -> Iterator[None]:
    obstacle = scene.coordinator.file.next
    obstacle.mkdir()
    yield
    obstacle.rmdir()


@contextlib.contextmanager
def unmounted(scene: Scene) -> Iterator[None]:
    folder = scene.coordinator.file.path.parent
    mounted = folder.rename(folder.with_name("mounted"))
    folder.mkdir()  # what is beneath
    yield
    mounted.rename(folder)


@contextlib.contextmanager
def hanging(scene: Scene) -> Iterator[None]:
    scene.coordinator.folder_answers = lambda: False
    yield
    scene.coordinator.folder_answers = lambda: True


@pytest.mark.parametrize("folder", [full, unmounted, hanging])
def test_nobody_stops_for_a_newcomer_while_the_record_cannot_be_written(
    play: Play, folder: Callable[[Scene], AbstractContextManager[None]]
) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    with folder(scene):
        scene.bring_level(newcomer, 11)
        before = [member.heard("edge") for member in scene.replicas]

    scene.coordinator.tick()
    scene.reach_edge(12)

    assert before == [[], []]
    assert scene.members == {0: "p0", 1: "p1", 2: "n"}


def test_it_does_not_matter_who_of_the_two_says_first_what_it_held(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.hand_over(newcomer, 10)
    newcomer.say_proved(12)
    newcomer.say("caught_up", step=12)
    early = scene.replicas[1].heard("edge")

    scene.witness(12)

    assert early == []
    assert scene.replicas[1].heard("edge")


def test_a_witness_is_asked_while_the_copy_is_still_taken(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    for member in scene.replicas:
        member.say("staged", step=10, digest="d")

    scene.witness(12)
    newcomer.say_ready(10)
    newcomer.say_proved(12)
    newcomer.say("caught_up", step=12)

    assert scene.replicas[1].heard("edge")


def test_who_is_proven_hears_of_it_once(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.hand_over(newcomer, 10)
    newcomer.say("caught_up", step=12)
    before = newcomer.heard("proven")

    for step in (12, 14):
        scene.witness(step)
        newcomer.say_proved(step)

    assert before == []
    assert len(newcomer.heard("proven")) == 1


def test_what_it_held_earlier_may_be_said_later(play: Play) -> None:
    """What is hashed beside the training comes in any order."""
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.hand_over(newcomer, 10)
    for step in (16, 12):
        newcomer.say_proved(step)
    newcomer.say("caught_up", step=16)
    scene.witness(16)

    assert scene.replicas[1].heard("edge")


def test_what_it_held_before_it_took_another_copy_proves_nothing(play: Play) -> None:
    """Though another that follows keeps the witness's word alive."""
    scene = play(2)
    newcomer, other = scene.join(2, "n"), scene.join(3, "m")
    for member in scene.replicas:
        member.say("staged", step=10, digest="d")
    for one in (newcomer, other):
        one.say_ready(10)
    (first,) = newcomer.heard("sync")
    scene.witness(22)
    newcomer.say("again", epoch=0, order=first["order"])
    scene.pass_time(1.5, *scene.replicas, newcomer, other)
    scene.hand_over(newcomer, 20)
    newcomer.say_proved(22, "odd", order=first["order"])
    newcomer.say("caught_up", step=20)

    assert not newcomer.heard("differs")
    assert phase_of(newcomer) == ("ready", 1)
    assert not scene.replicas[1].heard("edge")


def test_one_witness_is_enough_for_all_who_come_to_its_step(play: Play) -> None:
    scene = play(2)
    newcomers = [scene.join(2, "n"), scene.join(3, "m")]
    for member in scene.replicas:
        member.say("staged", step=10, digest="d")
    for newcomer in newcomers:
        newcomer.say_ready(10)
    scene.witness(14)
    for newcomer in newcomers:
        newcomer.say_proved(14)
        newcomer.say("caught_up", step=14)
    scene.reach_edge(16)

    assert sorted(scene.members) == [0, 1, 2, 3]
    assert [len(member.heard("prove")) for member in scene.replicas] == [1, 0]


def test_who_makes_something_else_of_a_step_is_not_let_in_and_all_are_compared(play: Play) -> None:
    scene = play(2)
    compare(scene, "d", "d")
    newcomer = scene.join(2, "n")
    scene.hand_over(newcomer, 10)
    scene.witness(14)
    newcomer.say_proved(14, "odd")
    newcomer.say("caught_up", step=14)
    asked = [len(member.heard("compare")) for member in scene.replicas]
    scene.reach_edge(16, planned=False)
    again = [len(member.heard("compare")) for member in scene.replicas]
    compare(scene, "d", "d", step=20)
    scene.reach_edge(22, planned=False)

    (told,) = newcomer.heard("differs")
    assert (told["step"], told["witness"]) == (14, 0)
    assert (told["held"], told["said"]) == ("d", "odd")
    assert phase_of(newcomer) == ("fresh", 1)
    assert sorted(scene.members) == [0, 1]
    assert (asked, again) == ([2, 2], [3, 3])  # the first as the job began
    assert [len(member.heard("compare")) for member in scene.replicas] == again
    assert not scene.replicas[0].heard("diverged")


def test_another_member_bears_witness_once_a_state_differed(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.hand_over(newcomer, 10)
    scene.witness(14)
    newcomer.say_proved(14, "odd")
    scene.pass_time(1.5, *scene.replicas, newcomer)
    scene.hand_over(newcomer, 20)
    scene.witness(24, "e", by=1)
    newcomer.say_proved(24, "e")
    newcomer.say("caught_up", step=24)
    scene.reach_edge(26)

    assert sorted(scene.members) == [0, 1, 2]


def test_two_that_differ_from_one_witness_are_both_compared_with_another(play: Play) -> None:
    scene = play(2)
    newcomers = [scene.join(2, "n"), scene.join(3, "m")]
    for step, by in ((10, 0), (20, 1)):
        for member in scene.replicas:
            member.say("staged", step=step, digest="d")
        for newcomer in newcomers:
            newcomer.say_ready(step)
        scene.witness(step + 4, by=by)
        for newcomer in newcomers:
            newcomer.say_proved(step + 4, "odd")
        scene.pass_time(1.5, *scene.replicas, *newcomers)

    assert [len(member.heard("prove")) for member in scene.replicas] == [1, 1]


def test_a_witness_that_was_cut_off_is_asked_anew(play: Play) -> None:
    """Its word was lost with its connection."""
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.hand_over(newcomer, 10)
    assert scene.replicas[0].heard("prove")
    scene.now += 3.0  # the coordinator did not run
    scene.replicas[0].hang_up()
    scene.replicas[0] = scene.join(0, "p0", epoch=1, step=11)
    scene.pass_time(0.1, *scene.replicas, newcomer)

    assert scene.replicas[0].heard("prove")


def test_who_stands_by_for_long_is_asked_again_and_found_to_differ(play: Play) -> None:
    scene = play(2)
    spare = scene.join(0, "spare", standby="spare")
    scene.bring_level(spare, 10)
    scene.pass_time(AGAIN_S - 1.0, *scene.replicas, spare)
    early = len(scene.replicas[0].heard("prove"))
    scene.pass_time(2.0, *scene.replicas, spare)
    spare.say_proved(2000, "odd")
    scene.witness(2000)
    scene.replicas.pop().hang_up()
    scene.reach_edge(2001, planned=False)

    assert [early, len(scene.replicas[0].heard("prove"))] == [1, 2]
    assert spare.heard("differs")
    assert scene.members == {0: "p0"}


def test_a_newcomer_that_can_make_no_copy_of_what_it_holds_is_not_blamed(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.hand_over(newcomer, 10)
    newcomer.say_proved(14, "")
    scene.witness(14)

    assert phase_of(newcomer) == ("fresh", 1)
    assert not newcomer.heard("differs")
    assert len(scene.replicas[0].heard("compare")) == 1  # as the job began


def test_a_witness_that_cannot_say_what_it_held_is_not_asked_again_at_once(play: Play) -> None:
    scene = play(2)
    newcomer = scene.join(2, "n")
    scene.hand_over(newcomer, 10)
    scene.witness(14, "")

    assert phase_of(newcomer) == ("fresh", 1)
    assert len(scene.replicas[0].heard("prove")) == 1


def test_a_witness_of_another_epoch_proves_nothing(play: Play) -> None:
    """Its step may have been made anew."""
    scene = play(3)
    newcomer = scene.join(3, "n")
    scene.hand_over(newcomer, 10)
    scene.replicas.pop().hang_up()
    scene.reach_edge(11, planned=False)
    asked = len(scene.replicas[0].heard("prove"))
    scene.pass_time(0.1, *scene.replicas, newcomer)
    scene.witness(12, epoch=scene.epoch - 1)
    newcomer.say_proved(12, "odd")
    newcomer.say("caught_up", step=12)

    assert not newcomer.heard("differs")
    assert not scene.replicas[0].heard("edge")
    assert [asked, len(scene.replicas[0].heard("prove"))] == [1, 2]


def test_where_nobody_trains_a_copy_of_where_they_stand_is_the_proof(play: Play) -> None:
    scene = play(2)
    scene.coordinator.min_replicas = 2
    newcomer = scene.join(2, "n")
    scene.hand_over(newcomer, 10)
    scene.replicas.pop().hang_up()
    scene.reach_edge(11, planned=False)
    newcomer.say("caught_up", step=10)
    unproven = sorted(scene.members)
    scene.hand_over(newcomer, 11)
    newcomer.say("caught_up", step=11)

    assert unproven == [0, 1]
    assert scene.members == {0: "p0", 2: "n"}
