"""The failure detector: silence, broken links, deadlines, malformed messages; and a coordinator that is restarted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from skippipe.runtime.coordinator.interfaces import CoordinatorState, Event
from skippipe.runtime.coordinator.membership import MemberState
from skippipe.runtime.coordinator.settings import Deadlines, RecoverySettings
from skippipe.runtime.messages import (
    Begin,
    ControlMessage,
    LinkDown,
    MicrobatchDone,
    Ready,
    Recovered,
    StateDigest,
    StateRequest,
    Stepped,
    Stop,
)
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.transport.message import Message, WeightsPiece
from tests.helpers.single_coordinator import (
    HELLO,
    CoordinatorHarness,
    RecordingEnv,
    assert_goes_on,
    coordinating,
    even_plan,
    is_now,
    new_coordinator,
    with_a_quick_one,
)
from tests.helpers.single_node import AT_ONCE, small_plan

# Silence


def test_a_silent_node_is_gone() -> None:
    harness = coordinating()
    harness.wait(5, 3)
    assert 3 in harness.coordinator.nodes
    harness.wait(1, 3)
    assert harness.env.events[0] == Event("lost", 0, "no heartbeat for 5 s", "n3")
    assert harness.coordinator.nodes == [0, 1, 2, 4, 5]
    harness.wait(20)
    assert harness.coordinator.nodes == [0, 1, 2, 4, 5]


def test_no_node_is_declared_dead_when_the_coordinator_itself_was_held_up() -> None:
    harness = coordinating()
    harness.wait(3)
    harness.env.now_s += 60
    harness.coordinator.tick()
    assert harness.coordinator.nodes == list(range(6))
    harness.wait(6, 3)
    assert harness.coordinator.nodes == [0, 1, 2, 4, 5], "but from then on they have to speak"


def building() -> CoordinatorHarness:
    """All nodes are there, and build their stages."""
    env = RecordingEnv()
    harness = CoordinatorHarness(new_coordinator(env, 1, recovery=AT_ONCE), env)
    for node in range(6):
        harness.send(node, HELLO)
    return harness


def test_a_silent_node_that_builds_its_stage_is_declared_dead_later() -> None:
    """What it imports may hold it up."""
    harness = building()
    harness.wait(20, 2)
    assert not harness.env.events
    harness.wait(1, 2)
    assert harness.env.events == [Event("lost", 0, "no heartbeat for 20 s", "n2")]


def test_a_node_that_is_back_while_others_build_builds_its_stage_again() -> None:
    harness = building()
    coordinator, env = harness.coordinator, harness.env
    for node in range(5):
        harness.send(node, Ready())
    coordinator.node_lost(2, "no heartbeat for 20 s")
    assert is_now(coordinator, CoordinatorState.PREPARING)
    harness.send(2, HELLO)
    assert env.logged("welcome")[6:] == [(2, coordinator.plan.stage_of[2], None)]
    assert env.event_kinds() == ["lost", "joined"]
    harness.send(5, Ready())
    assert is_now(coordinator, CoordinatorState.PREPARING), "it is waited for"
    harness.send(2, Ready())
    assert env.new_messages() == {node: [Begin(0, 1, False)] for node in range(6)}


def test_a_node_that_is_cut_off_while_it_builds_is_declared_dead() -> None:
    harness = coordinating(plan=replace(even_plan(), cluster=with_a_quick_one(7)))
    harness.send(6, HELLO)
    assert harness.coordinator.membership[6].state is MemberState.BUILDING
    harness.wait(21, 6)
    assert harness.env.events[-1] == Event("lost", 0, "no heartbeat for 20 s", "n6")


def test_a_node_that_sends_heartbeats_and_does_not_get_its_stage_built_is_given_up() -> None:
    plan = replace(even_plan(), cluster=with_a_quick_one(7))
    harness = coordinating(plan=plan, deadlines=Deadlines(ready=timedelta(seconds=30)))
    harness.send(6, HELLO)
    harness.wait(31)
    assert 6 in harness.coordinator.membership
    harness.wait(1)
    assert harness.env.events[-1] == Event("lost", 0, "it has been building its stage for 30 s", "n6")


def waited_for(*nodes: int) -> CoordinatorHarness:
    """All others have averaged."""
    plan = small_plan()
    harness = coordinating(plan=plan.promising(simulate(plan, Timing.FULL)))
    for node in set(range(6)) - set(nodes):
        harness.send(node, harness.averaged(node))
    return harness


def test_slow_but_alive_is_an_event_and_nothing_else() -> None:
    harness = waited_for(4, 5)
    harness.wait(60, busy=[4])
    assert harness.env.events == [Event("slow", 0, "is slow, but there: something", "n4")], "once, and not who waits"
    assert not harness.env.sent
    for node in (4, 5):
        harness.send(node, harness.averaged(node))
    assert harness.coordinator.iteration == 1


def test_if_all_wait_for_each_other_no_node_is_called_slow() -> None:
    harness = waited_for(4, 5)
    harness.wait(9)
    assert not harness.env.events, "a link that is cut is noticed before"
    harness.wait(60)
    text = "no node computes, n4, n5 wait for what others send: a link is slow"
    assert harness.env.events == [Event("slow", 0, text, "")], "once"


# Links


def test_a_broken_link_restarts_the_iteration_without_it() -> None:
    harness = coordinating()
    harness.send(2, LinkDown(3, 1))
    messages = harness.env.new_messages()
    assert all(begin == [Begin(0, 2, False)] for begin in messages.values())
    assert sorted(messages) == harness.coordinator.nodes
    pairs = {frozenset(pair) for lane in harness.coordinator.plan.lanes for pair in pairwise(lane.path)}
    assert frozenset({2, 3}) not in pairs
    assert harness.coordinator.plan.cluster.bandwidth_bytes_per_s[2, 3] == 0
    harness.send(3, LinkDown(2, 2))
    assert not harness.env.sent, "that is known"
    assert [event.kind for event in harness.env.events][:1] == ["link-down"]
    harness.iterate()
    assert harness.coordinator.iteration == 1


def test_a_silent_peer_is_no_broken_link() -> None:
    harness = coordinating()
    harness.wait(4, 3)
    harness.send(2, LinkDown(3, 1))
    harness.send(4, LinkDown(3, 1))
    assert not harness.env.events, "it has not been heard of here either"
    harness.wait(2, 3)
    assert harness.env.event_kinds()[0] == "lost"
    harness.wait(2)
    assert "link-down" not in harness.env.event_kinds()


def test_a_peer_that_sends_heartbeats_again_has_a_broken_link() -> None:
    harness = coordinating()
    harness.wait(4, 3)
    harness.send(2, LinkDown(3, 1))
    harness.wait(1)
    assert harness.env.events[0] == Event("link-down", 0, "cannot reach 'n3'", "n2")


def test_two_of_a_stage_that_cannot_reach_each_other_cannot_average() -> None:
    harness = coordinating()
    harness.send(3, LinkDown(4, 1))
    assert harness.env.logged("disconnect") == [(3,)], "a report is at the cost of the node that sends it"
    assert [type(each) for each in harness.env.new_messages()[3]] == [Stop]
    assert_goes_on(harness, 3)


def test_of_two_that_cannot_average_the_one_is_evicted_that_others_report_too() -> None:
    harness = coordinating()
    harness.send(1, LinkDown(4, 1)).send(5, LinkDown(4, 2))
    assert harness.env.logged("disconnect") == [(4,)]


# Deadlines


@pytest.mark.parametrize(
    "state",
    [CoordinatorState.JOINING, CoordinatorState.PREPARING, CoordinatorState.STEPPING, CoordinatorState.GATHERING],
)
def test_a_deadline_that_passes_names_the_awaited_nodes(state: CoordinatorState) -> None:
    env = RecordingEnv()
    deadlines = Deadlines(*(timedelta(seconds=7) for _ in range(5)))
    starting = (CoordinatorState.JOINING, CoordinatorState.PREPARING)
    recovery = RecoverySettings(fault_tolerant=state not in starting)
    coordinator = new_coordinator(env, 1, deadlines=deadlines, recovery=recovery)
    harness = CoordinatorHarness(coordinator, env)
    answers: list[Callable[[int], ControlMessage]] = [
        lambda node: HELLO,
        lambda node: Ready(),
        lambda node: harness.averaged(node),
        lambda node: Stepped(0),
    ]
    for what in answers:
        if is_now(coordinator, state):
            break
        for node in range(6):
            harness.send(node, what(node))
    assert is_now(coordinator, state)
    if state is not CoordinatorState.GATHERING:
        for node in (0, 1, 3, 5):
            harness.send(node, what(node))
    harness.wait(6.9)
    assert not coordinator.over
    harness.wait(0.1)
    names = "n0" if state is CoordinatorState.GATHERING else "n2, n4"
    assert coordinator.failure == f"waited 7 s for {names} {state.value}"


def test_an_iteration_that_times_out_starts_over_once_and_then_the_run_fails() -> None:
    harness = coordinating(deadlines=Deadlines(iteration=timedelta(seconds=7)))
    for node in (0, 1, 3, 5):
        harness.send(node, harness.averaged(node))
    harness.wait(6.9)
    assert not harness.env.sent
    harness.wait(0.1)
    assert harness.env.new_messages() == {node: [Begin(0, 2, False)] for node in range(6)}
    assert harness.env.events[-1] == Event("restarted", 0, "waited 7 s for n2, n4 to average gradients")
    for node in (0, 1, 3, 5):
        harness.send(node, harness.averaged(node, epoch=1))
    for node in (0, 2, 3, 4, 5):
        harness.send(node, harness.averaged(node))
    harness.wait(7)
    assert harness.coordinator.failure == "waited 7 s for n1 to average gradients"
    assert harness.env.new_messages() == {node: [Stop(harness.coordinator.failure)] for node in range(6)}


def test_the_next_iteration_may_start_over_again() -> None:
    harness = coordinating(5, deadlines=Deadlines(iteration=timedelta(seconds=7)))
    for _ in range(2):
        harness.wait(7)
        assert not harness.coordinator.over
        harness.iterate()
    assert harness.coordinator.iteration == 2


def test_training_begins_without_a_node_that_does_not_get_ready() -> None:
    harness = building()
    coordinator = harness.coordinator
    for node in (0, 1, 2, 4, 5):
        harness.send(node, Ready())
    harness.wait(300)
    assert is_now(coordinator, CoordinatorState.TRAINING)
    assert coordinator.nodes == [0, 1, 2, 4, 5]
    assert all(3 not in lane.path for lane in coordinator.plan.lanes)


# Malformed messages

MALFORMED: dict[str, Callable[[CoordinatorHarness], ControlMessage]] = {
    "a step out of place": lambda harness: Stepped(0),
    "ready again": lambda harness: Ready(),
    "an order": lambda harness: Begin(0, 9, False),
    "a stop": lambda harness: Stop("enough"),
    "recovered, though it never fetched a state": lambda harness: Recovered(0, 0),
    "averaged in the next iteration": lambda harness: harness.averaged(3, iteration=1),
    "averaged in another epoch": lambda harness: harness.averaged(3, epoch=0),
    "a contribution that was not requested": lambda harness: harness.contributed(3),
    "back on a lane that is not there": lambda harness: MicrobatchDone(0, 1, 9, 0, 1.0),
    "back on the lane of another": lambda harness: MicrobatchDone(0, 1, 0, 0, 1.0),
    "a broken link to no node": lambda harness: LinkDown(10**9),
    "state, though there is no checkpoint": lambda harness: StateRequest(0, 0, 10, 0),
    "a digest": lambda harness: StateDigest(0, "x", 0),
}


@pytest.mark.parametrize("report", MALFORMED)
def test_malformed_reports_change_nothing(report: str) -> None:
    harness = coordinating()
    harness.send(3, MALFORMED[report](harness))
    assert (harness.env.sent, harness.env.events, harness.coordinator.nodes) == ([], [], list(range(6)))
    harness.iterate()
    assert harness.coordinator.iteration == 1
    assert harness.env.reports[0].loss == 2.0


SENSELESS: dict[str, dict[str, Any]] = {
    "bytes to no node": {"sent_bytes": [[1]]},
    "bytes to one that is not there": {"sent_bytes": [[99, 1]]},
    "speeds of no kind": {"speeds": [[9, 1, 1], [1]]},
    "lags from nowhere": {"lags": [[99.0, 1.0], [1.0], [math.nan, math.nan]]},
    "no time at all": {"speeds": [[0, 1, 0]], "lags": [[2.0, math.inf], [0.0, -math.inf]]},
    "half a task": {"tasks": [[1, 2]]},
    "a norm that is no square": {"squared_norm": -100.0},
}


@pytest.mark.parametrize("senseless", SENSELESS)
def test_a_senseless_report_ends_nothing(senseless: str) -> None:
    harness = coordinating(recovery=replace(AT_ONCE, drift=0.5))
    for node in range(6):
        harness.send(node, harness.averaged(node, **SENSELESS[senseless] if node == 2 else {}))
    assert not harness.coordinator.over, harness.coordinator.failure
    for report in harness.env.reports:
        assert all(receiver < 7 for _, receiver in report.sent_bytes)
        assert all(len(row) == 6 for rows in report.tasks.values() for row in rows)


def test_norms_without_a_sum_end_nothing() -> None:
    harness = coordinating()
    harness.average(n2=math.inf, n3=-math.inf, n4=-math.inf, n5=-math.inf)
    for node in range(6):
        harness.send(node, harness.contributed(node))
    harness.average(n2=math.inf, n3=-math.inf, n4=-math.inf, n5=-math.inf)
    assert not harness.coordinator.over


def test_a_microbatch_that_is_not_there_does_not_come_back() -> None:
    harness = coordinating()
    harness.send(0, MicrobatchDone(0, 1, 0, 10**6, 1000.0))
    harness.iterate()
    assert harness.env.reports[0].loss == 2.0


def test_a_message_of_a_node_that_has_not_joined_is_dropped() -> None:
    harness = coordinating()
    harness.send(6, harness.averaged(3))
    assert harness.env.new_messages() == {6: [Stop("declared dead", again=True)]}
    assert not harness.env.events


def test_a_malformed_message_is_an_event() -> None:
    harness = coordinating()
    harness.coordinator.on_malformed(3, "no message of ours")
    (event,) = harness.env.events
    assert (event.kind, event.node) == ("refused", "n3")
    assert not harness.env.sent


def test_what_comes_after_the_end_changes_nothing() -> None:
    harness = coordinating()
    harness.coordinator.fail("enough")
    harness.env.new_messages()
    harness.send(3, harness.averaged(3), HELLO)
    harness.coordinator.node_lost(2, "late")
    harness.coordinator.fail("later")
    harness.coordinator.on_stop_requests(2)
    harness.coordinator.on_piece(3, Message(WeightsPiece(0, 0)))
    harness.wait(10_000)
    assert not harness.env.sent
    assert harness.coordinator.failure == "enough"
