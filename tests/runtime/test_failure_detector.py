"""What a coordinator makes of silence, broken links, deadlines, nonsense, and of being started again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs

from skippipe.runtime.coordinator.membership import MemberState
from skippipe.runtime.coordinator.state_machine import Coordinator, CoordinatorState, Deadlines, Event, RecoverySettings
from skippipe.runtime.messages import (
    Begin,
    Commit,
    ControlMessage,
    GatherState,
    Heartbeat,
    Hello,
    LinkDown,
    MicrobatchDone,
    Ready,
    Recover,
    Recovered,
    StateDigest,
    StateRequest,
    Stepped,
    Stop,
)
from skippipe.runtime.node.interfaces import NodePhase
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.transport.message import Message, WeightsPiece
from tests.helpers.single_coordinator import (
    ASKED,
    HELLO,
    Course,
    Room,
    assert_goes_on,
    coordinating,
    even_plan,
    is_now,
    learning_late,
    with_a_quick_one,
)
from tests.helpers.single_node import AT_ONCE, LEARNING, small_plan

# Silence


def test_a_silent_node_is_gone() -> None:
    course = coordinating()
    course.wait(5, 3)
    assert 3 in course.coordinator.nodes
    course.wait(1, 3)
    assert course.room.events[0] == Event("gone", 0, "no sign of life for 5 s", "n3")
    assert course.coordinator.nodes == [0, 1, 2, 4, 5]
    course.wait(20)
    assert course.coordinator.nodes == [0, 1, 2, 4, 5]


def test_nobody_is_gone_when_the_coordinator_itself_was_held_up() -> None:
    course = coordinating()
    course.wait(3)
    course.room.now_s += 60
    course.coordinator.tick()
    assert course.coordinator.nodes == list(range(6))
    course.wait(6, 3)
    assert course.coordinator.nodes == [0, 1, 2, 4, 5], "but from then on they have to speak"


def test_one_that_builds_its_stage_is_noticed_like_any_other() -> None:
    room = Room()
    coordinator = Coordinator(small_plan(), LEARNING, room, room, 1, survival=AT_ONCE)
    course = Course(coordinator, room)
    for node in range(6):
        course.hear(node, HELLO)
    course.wait(5, 2)
    assert not room.events
    course.wait(1, 2)
    assert room.events == [Event("gone", 0, "no sign of life for 5 s", "n2")]


def test_one_that_is_told_to_build_while_it_is_cut_off_is_noticed_like_any_other() -> None:
    course = coordinating(plan=replace(even_plan(), cluster=with_a_quick_one(7)))
    course.hear(6, HELLO)
    assert course.coordinator.membership[6].standing is MemberState.BUILDING
    course.wait(6, 6)
    assert course.room.events[-1] == Event("gone", 0, "no sign of life for 5 s", "n6")


def test_one_that_speaks_and_does_not_get_its_stage_built_is_given_up() -> None:
    plan = replace(even_plan(), cluster=with_a_quick_one(7))
    course = coordinating(plan=plan, deadlines=Deadlines(ready=timedelta(seconds=30)))
    course.hear(6, HELLO)
    course.wait(31)
    assert 6 in course.coordinator.membership
    course.wait(1)
    assert course.room.events[-1] == Event("gone", 0, "it has been building its stage for 30 s", "n6")


def waited_for(*nodes: int) -> Course:
    """All others have averaged."""
    plan = small_plan()
    course = coordinating(plan=plan.promising(simulate(plan, Timing.FULL)))
    for node in set(range(6)) - set(nodes):
        course.hear(node, course.averaged(node))
    return course


def test_slow_but_alive_is_an_event_and_nothing_else() -> None:
    course = waited_for(4, 5)
    course.wait(60, busy=[4])
    assert course.room.events == [Event("slow", 0, "is slow, but there: something", "n4")], "once, and not who waits"
    assert not course.room.told
    for node in (4, 5):
        course.hear(node, course.averaged(node))
    assert course.coordinator.iteration == 1


def test_if_all_wait_for_each_other_nobody_is_called_slow() -> None:
    course = waited_for(4, 5)
    course.wait(9)
    assert not course.room.events, "a link that is cut is noticed before"
    course.wait(60)
    text = "no node computes, n4, n5 wait for what others send: a link is slow"
    assert course.room.events == [Event("slow", 0, text, "")], "once"


# Links


def test_a_broken_link_means_another_beginning_without_it() -> None:
    course = coordinating()
    course.hear(2, LinkDown(3, 1))
    told = course.room.news()
    assert all(begin == [Begin(0, 2, False)] for begin in told.values())
    assert sorted(told) == course.coordinator.nodes
    pairs = {frozenset(pair) for lane in course.coordinator.plan.lanes for pair in pairwise(lane.path)}
    assert frozenset({2, 3}) not in pairs
    assert course.coordinator.plan.cluster.bandwidth_bytes_per_s[2, 3] == 0
    course.hear(3, LinkDown(2, 2))
    assert not course.room.told, "that is known"
    assert [event.kind for event in course.room.events][:1] == ["cut"]
    course.iterate()
    assert course.coordinator.iteration == 1


def test_one_that_is_gone_is_no_broken_link() -> None:
    course = coordinating()
    course.wait(4, 3)
    course.hear(2, LinkDown(3, 1))
    course.hear(4, LinkDown(3, 1))
    assert not course.room.events, "it has not been heard of here either"
    course.wait(2, 3)
    assert course.room.happenings()[0] == "gone"
    course.wait(2)
    assert "cut" not in course.room.happenings()


def test_one_that_is_heard_of_again_has_a_broken_link() -> None:
    course = coordinating()
    course.wait(4, 3)
    course.hear(2, LinkDown(3, 1))
    course.wait(1)
    assert course.room.events[0] == Event("cut", 0, "cannot reach 'n3'", "n2")


def test_two_of_a_stage_that_cannot_reach_each_other_cannot_average() -> None:
    course = coordinating()
    course.hear(3, LinkDown(4, 1))
    assert course.room.logged("part") == [(3,)], "a complaint is at the cost of whoever has it"
    assert [type(each) for each in course.room.news()[3]] == [Stop]
    assert_goes_on(course, 3)


def test_of_two_that_cannot_average_the_one_leaves_of_whom_others_complain_too() -> None:
    course = coordinating()
    course.hear(1, LinkDown(4, 1)).hear(5, LinkDown(4, 2))
    assert course.room.logged("part") == [(4,)]


# Deadlines


@pytest.mark.parametrize(
    "state",
    [CoordinatorState.JOINING, CoordinatorState.PREPARING, CoordinatorState.STEPPING, CoordinatorState.COLLECTING],
)
def test_a_deadline_that_passes_names_those_who_are_missing(state: CoordinatorState) -> None:
    room = Room()
    deadlines = Deadlines(*(timedelta(seconds=7) for _ in range(4)))
    survival = RecoverySettings(survives=state is not CoordinatorState.PREPARING)
    coordinator = Coordinator(small_plan(), LEARNING, room, room, 1, deadlines=deadlines, survival=survival)
    course = Course(coordinator, room)
    said: list[Callable[[int], ControlMessage]] = [
        lambda node: HELLO,
        lambda node: Ready(),
        lambda node: course.averaged(node),
        lambda node: Stepped(0),
    ]
    for what in said:
        if is_now(coordinator, state):
            break
        for node in range(6):
            course.hear(node, what(node))
    assert is_now(coordinator, state)
    if state is not CoordinatorState.COLLECTING:
        for node in (0, 1, 3, 5):
            course.hear(node, what(node))
    course.wait(6.9)
    assert not coordinator.over
    course.wait(0.1)
    names = "n0" if state is CoordinatorState.COLLECTING else "n2, n4"
    assert coordinator.failure == f"waited 7 s for {names} {state.value}"


def test_an_iteration_that_does_not_end_is_begun_again_and_then_it_is_the_end() -> None:
    course = coordinating(deadlines=Deadlines(iteration=timedelta(seconds=7)))
    for node in (0, 1, 3, 5):
        course.hear(node, course.averaged(node))
    course.wait(6.9)
    assert not course.room.told
    course.wait(0.1)
    assert course.room.news() == {node: [Begin(0, 2, False)] for node in range(6)}
    assert course.room.events[-1] == Event("restarted", 0, "waited 7 s for n2, n4 to average gradients")
    for node in (0, 1, 3, 5):
        course.hear(node, course.averaged(node, epoch=1))
    for node in (0, 2, 3, 4, 5):
        course.hear(node, course.averaged(node))
    course.wait(7)
    assert course.coordinator.failure == "waited 7 s for n1 to average gradients"
    assert course.room.news() == {node: [Stop(course.coordinator.failure)] for node in range(6)}


def test_an_iteration_that_goes_well_gives_the_next_another_chance() -> None:
    course = coordinating(5, deadlines=Deadlines(iteration=timedelta(seconds=7)))
    for _ in range(2):
        course.wait(7)
        assert not course.coordinator.over
        course.iterate()
    assert course.coordinator.iteration == 2


def test_one_that_does_not_get_ready_is_left_behind() -> None:
    room = Room()
    coordinator = Coordinator(small_plan(), LEARNING, room, room, 1, survival=AT_ONCE)
    course = Course(coordinator, room)
    for node in range(6):
        course.hear(node, HELLO)
    for node in (0, 1, 2, 4, 5):
        course.hear(node, Ready())
    course.wait(300)
    assert is_now(coordinator, CoordinatorState.TRAINING)
    assert coordinator.nodes == [0, 1, 2, 4, 5]
    assert all(3 not in lane.path for lane in coordinator.plan.lanes)


# Nonsense

NONSENSE: dict[str, Callable[[Course], ControlMessage]] = {
    "a step out of place": lambda course: Stepped(0),
    "ready again": lambda course: Ready(),
    "an order": lambda course: Begin(0, 9, False),
    "a stop": lambda course: Stop("enough"),
    "learned, though it never learned": lambda course: Recovered(0, 0),
    "averaged in the next iteration": lambda course: course.averaged(3, iteration=1),
    "averaged in another epoch": lambda course: course.averaged(3, epoch=0),
    "an account that nobody asked for": lambda course: course.contributed(3),
    "back on a lane that is not there": lambda course: MicrobatchDone(0, 1, 9, 0, 1.0),
    "back on the lane of another": lambda course: MicrobatchDone(0, 1, 0, 0, 1.0),
    "a broken link to nobody": lambda course: LinkDown(10**9),
    "state, though there is no checkpoint": lambda course: StateRequest(0, 0, 10, 0),
    "a seal": lambda course: StateDigest(0, "x", 0),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_changes_nothing(nonsense: str) -> None:
    course = coordinating()
    course.hear(3, NONSENSE[nonsense](course))
    assert (course.room.told, course.room.events, course.coordinator.nodes) == ([], [], list(range(6)))
    course.iterate()
    assert course.coordinator.iteration == 1
    assert course.room.reports[0].loss == 2.0


SENSELESS: dict[str, dict[str, Any]] = {
    "bytes to nobody in particular": {"sent_bytes": [[1]]},
    "bytes to one that is not there": {"sent_bytes": [[99, 1]]},
    "speeds of no kind": {"speeds": [[9, 1, 1], [1]]},
    "lags from nowhere": {"lags": [[99.0, 1.0], [1.0], [math.nan, math.nan]]},
    "no time at all": {"speeds": [[0, 1, 0]], "lags": [[2.0, math.inf], [0.0, -math.inf]]},
    "half a task": {"tasks": [[1, 2]]},
    "a norm that is no square": {"squared_norm": -100.0},
}


@pytest.mark.parametrize("senseless", SENSELESS)
def test_a_senseless_report_ends_nothing(senseless: str) -> None:
    course = coordinating(survival=replace(AT_ONCE, drift=0.5))
    for node in range(6):
        course.hear(node, course.averaged(node, **SENSELESS[senseless] if node == 2 else {}))
    assert not course.coordinator.over, course.coordinator.failure
    for report in course.room.reports:
        assert all(receiver < 7 for _, receiver in report.sent_bytes)
        assert all(len(row) == 6 for rows in report.tasks.values() for row in rows)


def test_norms_without_a_sum_end_nothing() -> None:
    course = coordinating()
    course.average(n2=math.inf, n3=-math.inf, n4=-math.inf, n5=-math.inf)
    for node in range(6):
        course.hear(node, course.contributed(node))
    course.average(n2=math.inf, n3=-math.inf, n4=-math.inf, n5=-math.inf)
    assert not course.coordinator.over


def test_a_microbatch_that_is_not_there_does_not_come_back() -> None:
    course = coordinating()
    course.hear(0, MicrobatchDone(0, 1, 0, 10**6, 1000.0))
    course.iterate()
    assert course.room.reports[0].loss == 2.0


def test_what_a_stranger_says_is_not_heard() -> None:
    course = coordinating()
    course.hear(6, course.averaged(3))
    assert course.room.news() == {6: [Stop("you were taken for dead", again=True)]}
    assert not course.room.events


def test_what_nobody_understands_is_an_event() -> None:
    course = coordinating()
    course.coordinator.complain(3, "no message of ours")
    (event,) = course.room.events
    assert (event.kind, event.node) == ("refused", "n3")
    assert not course.room.told


def test_what_comes_after_the_end_changes_nothing() -> None:
    course = coordinating()
    course.coordinator.fail("enough")
    course.room.news()
    course.hear(3, course.averaged(3), HELLO)
    course.coordinator.lost(2, "late")
    course.coordinator.fail("later")
    course.coordinator.finish_early()
    course.coordinator.receive(3, Message(WeightsPiece(0, 0)))
    course.wait(10_000)
    assert not course.room.told
    assert course.coordinator.failure == "enough"


# A coordinator that is started again


def at(iteration: int, phase: NodePhase, epoch: int = 1) -> Hello:
    return structs.replace(HELLO, epoch=epoch, iteration=iteration, phase=phase.name)


def started_again(iterations: int = 5, done: int = 2, **others: Any) -> Course:
    """With the notes of one that had done so many iterations."""
    before = coordinating(iterations, even_plan())
    before.iterate(done)
    return coordinating(iterations, wal=before.room.notes, **others)


def test_a_coordinator_that_is_started_again_waits_for_all_and_begins_with_a_higher_epoch() -> None:
    course = started_again()
    assert is_now(course.coordinator, CoordinatorState.REUNITING)
    assert course.coordinator.iteration == 2
    course.hear(2, course.averaged(2), Heartbeat("a step"))
    assert not course.room.told, "they have to say hello first, but are not sent away for it"
    for node in range(5):
        course.hear(node, at(2, NodePhase.RUNNING, epoch=3))
    assert not course.room.told
    course.hear(5, at(2, NodePhase.WAITING))
    assert is_now(course.coordinator, CoordinatorState.TRAINING)
    begins = {node: controls[-1] for node, controls in course.room.news().items()}
    assert list(begins) == list(range(6))
    epochs = {begin.epoch for begin in begins.values() if isinstance(begin, Begin)}
    assert len(epochs) == 1
    assert min(epochs) > 3
    assert "recovered" in course.room.happenings()
    course.iterate()
    assert course.coordinator.iteration == 3
    assert course.room.notes[-1]["commit"] == 2
    assert course.room.notes[-1]["steps"] == [3, 3, 3]


def test_those_who_have_not_heard_of_the_last_step_are_told_again() -> None:
    course = started_again()
    for node in range(6):
        course.hear(node, at(1, NodePhase.AVERAGED) if node == 4 else at(2, NodePhase.RUNNING))
    told = course.room.news()
    proceed, begin = told[4]
    assert proceed == Commit(1, LEARNING.rate_at(1), LEARNING.clipping([4.0] * 3)[1], True, False, False)
    assert isinstance(begin, Begin)
    assert [type(each) for each in told[3]] == [Begin]


def test_who_does_not_come_back_is_not_waited_for() -> None:
    course = started_again()
    for node in (0, 1, 2, 3, 4):
        course.hear(node, at(2, NodePhase.RUNNING))
    course.wait(19.9)
    assert is_now(course.coordinator, CoordinatorState.REUNITING)
    course.wait(0.1)
    assert is_now(course.coordinator, CoordinatorState.TRAINING)
    assert course.coordinator.nodes == [0, 1, 2, 3, 4]


def test_who_is_lost_again_before_all_are_back_is_not_counted_in() -> None:
    course = started_again()
    for node in (0, 1, 2, 3, 4):
        course.hear(node, at(2, NodePhase.RUNNING))
    course.coordinator.lost(3, "its process ended")
    course.hear(5, at(2, NodePhase.RUNNING))
    course.wait(20)
    assert is_now(course.coordinator, CoordinatorState.TRAINING)
    assert course.coordinator.nodes == [0, 1, 2, 4, 5]


def test_newcomers_are_placed_and_those_who_are_elsewhere_start_over() -> None:
    course = started_again()
    for node in (0, 1, 2, 3):
        course.hear(node, at(2, NodePhase.RUNNING))
    course.hear(4, HELLO)
    course.hear(5, at(0, NodePhase.RUNNING))
    assert is_now(course.coordinator, CoordinatorState.TRAINING)
    assert course.coordinator.nodes == [0, 1, 2, 3]
    assert course.room.logged("welcome")[-1][0] == 4
    (stop,) = course.room.news()[5]
    assert isinstance(stop, Stop)
    assert stop.again
    course.hear(5, HELLO)
    assert course.room.logged("welcome")[-1][0] == 5


def test_a_coordinator_started_again_after_the_last_iteration_collects() -> None:
    course = started_again(2, 2)
    for node in range(6):
        course.hear(node, at(1, NodePhase.AVERAGED) if node == 4 else at(2, NodePhase.WAITING))
    assert is_now(course.coordinator, CoordinatorState.STEPPING)
    assert [type(each) for each in course.room.news()[4]] == [Commit]
    course.hear(4, Stepped(1))
    assert is_now(course.coordinator, CoordinatorState.COLLECTING)
    assert course.room.news() == {0: [GatherState(0, False, ASKED)]}


def test_one_that_was_learning_is_still_learning() -> None:
    before, _ = learning_late()
    course = coordinating(5, wal=before.room.notes)
    for node in range(7):
        course.hear(node, at(1, NodePhase.RUNNING))
    assert [type(each) for each in course.room.news()[6]] == [Begin, Recover]
    assert all(6 not in lane.path for lane in course.coordinator.plan.lanes)
