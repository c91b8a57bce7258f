"""What a coordinator makes of nodes that come, report, and are lost; and control on the wire."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from msgspec import structs

from skippipe.runtime.coordinator.state_machine import Coordinator, CoordinatorState, Event, RecoverySettings
from skippipe.runtime.messages import (
    COORDINATOR,
    Average,
    Averaged,
    Backup,
    BackupRequest,
    BackupStored,
    Begin,
    Commit,
    ControlMessage,
    Drain,
    DrainAck,
    Failed,
    GatherState,
    Heartbeat,
    Hello,
    LinkDown,
    MicrobatchDone,
    NewPlan,
    PeerUpdate,
    Ready,
    Recover,
    Recovered,
    Reroute,
    Snapshot,
    StateDigest,
    StateRequest,
    Stepped,
    Stop,
    Welcome,
    from_json,
    to_json,
)
from skippipe.runtime.node.ops import StateSource
from tests.helpers.single_coordinator import (
    HELLO,
    Course,
    Room,
    Safe,
    assert_goes_on,
    coordinating,
    even_plan,
    is_now,
    learning_late,
    with_a_quick_one,
)
from tests.helpers.single_node import LEARNING, plan_of, small_plan


def test_nodes_join_build_and_begin_together() -> None:
    room = Room()
    coordinator = Coordinator(small_plan(), LEARNING, room, room, 2, recorded=frozenset({0}))
    for node in (3, 1, 2, 5, 0):
        coordinator.hear(node, HELLO)
    assert is_now(coordinator, CoordinatorState.JOINING)
    assert [each[0] for each in room.log] == ["meet"] * 5
    coordinator.hear(4, HELLO)
    assert is_now(coordinator, CoordinatorState.PREPARING)
    assert [each[0] for each in room.log[6:]] == ["note", *["welcome"] * 6], "noted before anybody is told"
    assert sorted(room.logged("welcome")) == [(node, coordinator.plan.stage_of[node], None) for node in range(6)]
    course = Course(coordinator, room)
    for node in (3, 1, 2, 5, 0):
        course.hear(node, Ready())
    assert not room.told
    course.hear(4, Ready())
    assert room.news() == {node: [Begin(0, 1, True)] for node in range(6)}
    assert is_now(coordinator, CoordinatorState.TRAINING)


def test_one_version_for_all() -> None:
    room = Room()
    coordinator = Coordinator(small_plan(), LEARNING, room, room, 1)
    coordinator.hear(2, HELLO)
    coordinator.hear(4, Hello("127.0.0.1:1", "0.0.0"))
    assert is_now(coordinator, CoordinatorState.FAILED)
    assert "node 'n4' runs skippipe 0.0.0" in coordinator.failure
    assert room.news() == {2: [Stop(coordinator.failure)]}
    course = coordinating()
    course.hear(6, Hello("127.0.0.1:1", "0.0.0"))
    assert is_now(course.coordinator, CoordinatorState.TRAINING), "later it is told to leave, and that is all"
    (stop,) = course.room.news()[6]
    assert isinstance(stop, Stop)
    assert not stop.again
    assert course.room.happenings() == ["refused"]


def test_what_is_decided_is_noted_before_anybody_is_told() -> None:
    course = coordinating()
    course.room.log.clear()
    course.iterate()
    (note,) = course.room.notes[1:]
    assert (note["commit"], note["visits"], note["steps"]) == (0, [4, 4, 4], [1, 1, 1])
    assert [each[0] for each in course.room.log] == ["note", *["tell"] * 6]
    rate, scale = LEARNING.rate_at(0), LEARNING.clipping([4.0] * 3)[1]
    assert course.room.news() == {node: [Commit(0, rate, scale, False, False, False)] for node in range(6)}
    (report,) = course.room.reports
    assert (report.iteration, report.loss, report.norm) == (0, 2.0, math.sqrt(12))
    course.iterate()
    assert course.room.news()[3] == [Commit(1, LEARNING.rate_at(1), scale, True, False, False)], "the last waits"
    assert is_now(course.coordinator, CoordinatorState.STEPPING)


@pytest.mark.parametrize(
    ("visits", "complaint"),
    [
        ([[0, 0], [0, 0]], "counts a microbatch twice"),
        ([[1, 0]], "counts a microbatch that node 'n4' counts too"),
        ([[0, 0], [0]], "not in the plan"),
        ([[0, 2]], "not in the plan"),
        ([[9, 0]], "not in the plan"),
    ],
)
def test_an_account_that_cannot_be_true_ends_the_nodes_part_and_not_the_run(
    visits: list[list[int]], complaint: str
) -> None:
    course = coordinating()
    course.hear(4, course.averaged(4))
    course.hear(3, course.averaged(3, visits=visits))
    assert course.room.logged("part") == [(3,)]
    assert complaint in course.room.events[0].text
    assert_goes_on(course, 3)


def test_norms_that_differ_a_little_are_the_same_gradient() -> None:
    course = coordinating()
    course.average(n4=4.0001)
    assert course.coordinator.iteration == 1


@pytest.mark.parametrize(("norms", "leaves"), [({"n3": 5.0}, 3), ({"n5": 5.0}, 5), ({"n1": 5.0}, 1), ({"n0": 5.0}, 1)])
def test_of_norms_that_disagree_the_most_are_right_or_the_first(norms: dict[str, float], leaves: int) -> None:
    course = coordinating()
    course.average(**norms)
    told = course.room.news()
    assert isinstance(stop := told[leaves][0], Stop)
    assert stop.again
    assert "its gradient is not that of" in course.room.events[0].text
    assert course.room.logged("part") == [(leaves,)]
    assert all(isinstance(told[node][0], Reroute) for node in course.coordinator.nodes)
    assert_goes_on(course, leaves)


def test_a_gradient_that_is_not_finite_is_inspected_once() -> None:
    course = coordinating()
    course.come_back()
    course.average(n2=math.nan)
    assert course.room.news() == course.everybody(Drain(0, 2, True))
    for node in range(6):
        course.hear(node, course.contributed(node, [] if node == 2 else None))
    assert course.room.news() == course.everybody(Average(0, 2, [4, 0, 4]))
    for node in range(6):
        course.hear(node, course.averaged(node, **{"visits": []} if node == 2 else {}))
    (proceed,) = course.room.news()[0]
    assert isinstance(proceed, Commit)
    assert proceed.scale > 0
    assert course.room.notes[-1]["steps"] == [1, 0, 1], "a stage without a gradient takes no step"


def test_a_gradient_that_is_of_no_use_even_so_is_not_followed() -> None:
    course = coordinating()
    course.come_back()
    course.average(n2=math.inf)
    for node in range(6):
        course.hear(node, course.contributed(node))
    course.room.news()
    course.average(n2=math.nan)
    assert course.room.news() == course.everybody(Commit(0, LEARNING.rate_at(0), 0.0, False, False, False))
    assert course.room.notes[-1]["steps"] == [0, 0, 0]
    assert course.room.happenings() == ["not-finite"] * 2
    assert math.isnan(course.room.reports[0].norm)


def test_replicas_that_disagree_whether_it_is_finite_are_asked() -> None:
    course = coordinating()
    course.come_back()
    course.average(n4=math.nan)
    assert course.room.news() == course.everybody(Drain(0, 2, True))


def test_a_lost_node_and_how_the_iteration_ends_without_it() -> None:
    course = coordinating()
    coordinator, room = course.coordinator, course.room
    course.come_back(1)
    course.hear(0, MicrobatchDone(0, 1, 0, 0, 1.0))
    for node in (3, 4):
        course.hear(node, course.averaged(node))
    coordinator.lost(3, "its process ended")
    change = Reroute(0, 2, [3], [[0, 1, 0, 2, 5]], [])
    assert room.news() == {node: [change] for node in (0, 1, 2, 4, 5)}, "all others, and not itself"
    assert room.logged("part") == [(3,)]
    assert room.happenings() == ["gone", "rerouted"]
    course.hear(4, course.averaged(4), course.contributed(4))
    assert not room.told, "averages of before are of no use, and nobody has asked for an account"
    course.hear(0, MicrobatchDone(0, 1, 0, 1, 3.0))
    assert room.news() == course.everybody(Drain(0, 2, False))
    accounts = {0: None, 1: None, 2: None, 4: None, 5: [[0, 1]]}
    for node, visits in accounts.items():
        assert not room.told
        course.hear(node, course.contributed(node, visits))
    assert room.news() == course.everybody(Average(0, 2, [4, 4, 3])), "what the lost node had added up is lost"
    room.log.clear()
    for node, visits in accounts.items():
        course.hear(node, course.averaged(node, visits=course.visits(node) if visits is None else visits))
    told = room.news()
    assert all([type(each) for each in told[node]] == [Commit] for node in accounts)
    assert [each[0] for each in room.log] == ["note", "note", *["replan", "tell"] * 5]
    assert coordinator.iteration == 1
    assert 3 not in coordinator.plan.stage_of
    assert room.reports[0].visits == (4, 4, 3)
    assert room.reports[0].loss == (2 + 2 + 1 + 3) / 4


def test_a_lost_data_node_gets_an_heir_that_is_told_what_is_on_its_way() -> None:
    course = coordinating()
    course.hear(0, MicrobatchDone(0, 1, 0, 0, 1.0))
    course.coordinator.lost(0, "its process ended")
    assert course.room.news() == course.everybody(Reroute(0, 2, [0], [[0, 1, 1, 2, 3]], []))
    course.hear(0, MicrobatchDone(0, 1, 0, 1, 1.0))
    assert [type(each) for each in course.room.news()[0]] == [Stop], "it is not heard any more"
    course.come_back(1)
    course.hear(1, MicrobatchDone(0, 1, 0, 1, 1.0))
    assert course.room.news() == course.everybody(Drain(0, 2, False))


def test_a_lost_stage_is_skipped() -> None:
    course = coordinating()
    course.come_back(1)
    course.coordinator.lost(2, "its process ended")
    assert course.room.news() == course.everybody(Reroute(0, 2, [2], [[0, 0, 0, 2, 3]], [[0, 1]]))
    assert "1 times a stage is left out" in course.room.events[-1].text
    assert_goes_on(course, 2)


def test_a_lane_of_two_has_no_place_to_skip() -> None:
    course = coordinating(plan=plan_of(4, ((0, 1), (2,), (3,)), ((0, 2), (1, 3))))
    course.coordinator.lost(2, "its process ended")
    told = course.room.news()
    assert sorted(told) == course.coordinator.nodes
    assert all(controls == [Begin(0, 2, False)] for controls in told.values())
    assert "there is no way around 'n2'" in [event.text for event in course.room.events]
    assert all(2 not in lane.path for lane in course.coordinator.plan.lanes)
    course.iterate()
    assert course.coordinator.iteration == 1


def test_nobody_averages_or_accounts_before_it_is_asked() -> None:
    course = coordinating()
    course.coordinator.lost(3, "its process ended")
    course.room.news()
    for answer in (course.contributed, course.averaged):
        for node in course.coordinator.nodes:
            course.hear(node, answer(node))
    assert not course.room.told
    course.come_back()
    assert course.room.news() == course.everybody(Drain(0, 2, False))
    for node in course.coordinator.nodes:
        course.hear(node, course.averaged(node))
    assert not course.room.told


def test_two_lost_one_after_the_other() -> None:
    course = coordinating()
    course.coordinator.lost(3, "its process ended")
    course.coordinator.lost(5, "its process ended")
    changes = [control for control in course.room.news()[4] if isinstance(control, Reroute)]
    assert [change.epoch for change in changes] == [2, 3]
    assert changes[1].gone == [5]
    assert changes[1].lanes == [[0, 0, 0, 2, 4]]


def test_all_microbatches_were_back_when_a_node_was_lost() -> None:
    course = coordinating()
    course.come_back()
    course.coordinator.lost(5, "its process ended")
    assert course.room.news()[0] == [Reroute(0, 2, [5], [], []), Drain(0, 2, False)]


def test_a_node_lost_while_accounts_are_given_has_all_asked_again() -> None:
    course = coordinating()
    course.come_back()
    course.coordinator.lost(5, "its process ended")
    for node in (0, 1, 2, 3):
        course.hear(node, course.contributed(node))
    course.room.news()
    course.coordinator.lost(4, "its process ended")
    assert course.room.news()[0] == [Reroute(0, 3, [4], [], []), Drain(0, 3, False)]
    for node in range(4):
        course.hear(node, course.contributed(node))
    assert course.room.news() == course.everybody(Average(0, 3, [4, 4, 2]))


def test_without_survival_a_lost_node_ends_the_run() -> None:
    course = coordinating(survival=RecoverySettings(survives=False))
    course.coordinator.lost(3, "its process ended")
    assert is_now(course.coordinator, CoordinatorState.FAILED)
    assert "node 'n3' is gone (its process ended)" in course.coordinator.failure
    assert course.room.news() == {node: [Stop(course.coordinator.failure)] for node in range(6)}


def test_a_node_that_cannot_go_on_says_why_and_is_lost() -> None:
    course = coordinating()
    course.hear(3, Failed("out of memory"))
    assert course.room.events[0] == Event("gone", 0, "out of memory", "n3")
    assert_goes_on(course, 3)
    room = Room()
    coordinator = Coordinator(small_plan(), LEARNING, room, room, 1)
    for node in range(6):
        coordinator.hear(node, HELLO)
    coordinator.hear(3, Failed("no such folder"))
    assert coordinator.failure == "node 'n3': no such folder", "before training starts, somebody has to see to it"


def test_nobody_left_to_go_on_with_means_a_pause() -> None:
    course = coordinating()
    course.coordinator.lost(0, "its process ended")
    course.coordinator.lost(1, "its process ended")
    assert is_now(course.coordinator, CoordinatorState.PAUSED)
    assert course.room.happenings()[-1] == "paused"
    course.room.news()
    course.wait(599)
    assert is_now(course.coordinator, CoordinatorState.PAUSED)
    course.wait(1)
    assert is_now(course.coordinator, CoordinatorState.FAILED)
    assert "waited 600 s for nodes to take the places of those who are gone: stage 0" in course.coordinator.failure


# Coming late


def test_a_newcomer_averages_and_steps_and_learns_and_then_gets_microbatches() -> None:
    course, _ = learning_late()
    course.iterate()
    assert course.coordinator.iteration == 2
    assert any(isinstance(each, Commit) for each in course.room.news()[6])
    course.hear(6, Recovered(2, 0))
    assert course.room.happenings()[-1] == "able"
    assert [note["learning"] for note in course.room.notes if "plan" in note][-1] == [6]
    course.iterate()
    assert [note["learning"] for note in course.room.notes if "plan" in note][-1] == []


def test_an_iteration_waits_for_a_learner_and_not_for_a_lost_one() -> None:
    course, _ = learning_late()
    course.come_back()
    for node in range(6):
        course.hear(node, course.averaged(node))
    assert course.coordinator.iteration == 1
    course.room.news()
    course.coordinator.lost(6, "its process ended")
    assert course.room.news() == course.everybody(Reroute(1, 2, [6], [], [])) | {
        node: [Reroute(1, 2, [6], [], []), Drain(1, 2, False)] for node in range(6)
    }
    for answer in (course.contributed, course.averaged):
        for node in range(6):
            course.hear(node, answer(node))
    assert course.coordinator.iteration == 2


def test_who_loses_its_teacher_gets_another() -> None:
    course, teacher = learning_late()
    course.coordinator.lost(teacher, "its process ended")
    reroute, learn = course.room.news()[6]
    assert isinstance(reroute, Reroute)
    assert isinstance(learn, Recover)
    (other,) = learn.origin.sources
    stage = even_plan().stage_of[teacher]
    assert learn.origin.kind == "replica"
    assert {teacher, other} == set(even_plan().stages[stage].nodes)
    course.coordinator.lost(other, "its process ended")
    *_, learn = course.room.news()[6]
    assert isinstance(learn, Recover)
    assert learn.origin.kind == "neighbours", "nobody is left who holds the stage"
    assert stage not in learn.origin.stages
    assert sum(learn.origin.shares) == pytest.approx(1)


def test_a_stage_that_nobody_holds_comes_from_a_checkpoint_if_there_is_one() -> None:
    course, teacher = learning_late()
    course.room.keeper = Safe(made=1)
    stage = even_plan().stage_of[teacher]
    for node in even_plan().stages[stage].nodes:
        course.coordinator.lost(node, "its process ended")
    *_, learn = course.room.news()[6]
    assert isinstance(learn, Recover)
    assert learn.origin == StateSource("checkpoint", (COORDINATOR,), (stage,), (1.0,), 7 + stage)
    course.hear(6, StateRequest(0, 5, 10, learn.assignment - 1), StateRequest(0, 5, 10, learn.assignment))
    assert course.room.logged("give") == [(6, stage, 5, 10)]


def test_who_loses_its_teacher_when_nothing_goes_on_without_it_gets_another_too() -> None:
    """Of two stages with one node each, one is lost, while a newcomer is learning it."""
    plan = replace(plan_of(3, ((0,), (1,)), ((0, 1),)), cluster=with_a_quick_one(3))
    course = coordinating(5, plan)
    course.hear(2, HELLO)
    course.hear(2, Ready())
    course.iterate()
    (_, stage, _) = course.room.logged("welcome")[2]
    teacher = stage  # nodes 0 and 1 hold stages 0 and 1
    course.room.news()
    course.hear(1 - teacher, BackupStored(1))  # of what only stage 0 holds, if that is lost
    course.coordinator.lost(teacher, "its process ended")
    assert is_now(course.coordinator, CoordinatorState.PAUSED)
    learns = [control for control in course.room.news()[2] if isinstance(control, Recover)]
    assert [learn.origin.kind for learn in learns] == ["neighbours"]
    course.hear(2, Recovered(1, 0))
    assert is_now(course.coordinator, CoordinatorState.TRAINING)


def test_a_teacher_that_is_lost_in_a_pause_is_replaced_too() -> None:
    """Stage 0 is lost, so all wait for one that moves there and learns it from its neighbours; one of them is lost."""
    course = coordinating(5, plan_of(5, ((0,), (1, 2), (3, 4)), ((0, 1, 3),)))
    course.coordinator.lost(0, "its process ended")
    assert is_now(course.coordinator, CoordinatorState.PAUSED)
    moved, stage, _ = course.room.logged("welcome")[-1]
    assert stage == 0
    course.hear(moved, Ready())
    (learn,) = (control for control in course.room.news()[moved] if isinstance(control, Recover))
    course.coordinator.lost(learn.origin.sources[0], "its process ended")
    course.wait(7)
    assert is_now(course.coordinator, CoordinatorState.PAUSED)
    (again,) = (control for control in course.room.news()[moved] if isinstance(control, Recover))
    assert again.origin.sources != learn.origin.sources


def test_a_node_that_is_started_again_is_lost_and_new() -> None:
    course = coordinating()
    course.hear(3, HELLO)
    assert course.room.happenings() == ["gone", "rerouted", "joined", "replanned"]
    assert course.room.events[-1].text.endswith(", and its state is held a second time")
    assert course.room.logged("welcome")[-1][0] == 3
    assert 3 not in course.coordinator.nodes


# On the wire


@pytest.mark.parametrize(
    "control",
    [
        Hello("[::1]:5", "1.0"),
        Hello("[::1]:5", "1.0", 3, 4, "RUNNING"),
        Welcome({"plan": {"deep": [1]}}, {"n0": ["127.0.0.1:1", None]}, StateSource("replica", (3,), (1,), (1.0,), 4)),
        PeerUpdate({"n0": ["127.0.0.1:1", None]}),
        Ready(),
        Heartbeat("averaging", 1.5),
        Begin(3, 2, True),
        MicrobatchDone(2, 1, 0, 1, float("nan")),
        DrainAck(2, 5, [[0, 1], [1, 0]]),
        Averaged(2, 1, float("inf"), [[0, 1]], [[0, 1, 2, 3, 4, 5]], [[1, 10**12]], [[0, 2, 99]], [[1.0, -0.5]]),
        Recover(StateSource("checkpoint", (COORDINATOR,), (1,), (1.0,), 4), 6),
        Recovered(2, 0),
        LinkDown(4),
        StateRequest(0, 2**40, 5, 6),
        StateDigest(2**40, "ab12", 6),
        BackupRequest(4, 2**40, 5, 6),
        Snapshot(4),
        BackupStored(4),
        Backup(0, 4),
        Reroute(2, 3, [4], [[0, 1, 0, 2, 5]], [[0, 1]]),
        Drain(2, 3, True),
        Average(2, 3, [4, 4, 3]),
        NewPlan({"lanes": []}),
        Commit(3, 1e-4, 0.5, True, True, False),
        GatherState(0, kept=False, collection=6),
        Stepped(4),
        Stop(""),
        Stop("the run was ended", again=True),
        Failed("über 5 GB"),
    ],
    ids=lambda control: type(control).__name__,
)
def test_control_there_and_back(control: ControlMessage) -> None:
    assert repr(from_json(to_json(control))) == repr(control)  # a NaN is no other's equal


def test_reasons_of_many_lines_arrive_in_one() -> None:
    assert from_json(to_json(Failed("one\ntwo\x1b[2J"))) == Failed("one two [2J")


def test_a_checkpoint_of_the_end_is_not_trained_past() -> None:
    course = coordinating(2)
    course.iterate(2)
    again = coordinating(2, keeper=Safe(made=2), wal=list(course.room.notes))
    for said in (HELLO, Ready()):
        for node in range(6):
            again.hear(node, said)
    assert again.coordinator.state is CoordinatorState.COLLECTING
    assert again.coordinator.iteration == 2


def test_a_run_that_failed_at_the_reunion_stays_so() -> None:
    course = coordinating(3)
    course.iterate(1)
    again = coordinating(3, wal=list(course.room.notes), survival=RecoverySettings(survives=False))
    for node in range(6):
        again.hear(node, structs.replace(HELLO, epoch=1, iteration=1 if node else 7, phase="RUNNING"))
    assert again.coordinator.state is CoordinatorState.FAILED
    assert again.coordinator.failure
