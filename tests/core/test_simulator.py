"""Properties of simulated time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe import event_loop
from skippipe.collectives.ring import RING, averaged_ns
from skippipe.plan import Lane, Plan
from skippipe.planner.published import published20, published_plan
from skippipe.simulator import NO_RECORD, NO_SLACK, PlacementCosts, path_arrays, simulate
from skippipe.timeline import Task, Timeline, Timing
from tests.helpers.plans import clusters, plans, simulated

timings = st.sampled_from(list(Timing))


@pytest.mark.parametrize(
    ("paths", "microbatches", "seconds"),
    [
        ("skippipe", None, 32.70),
        ("skippipe_no_tc2", None, 34.82),
        ("dtfm_skip", None, 48.21),
        ("full_pipeline", None, 78.85),
        ("full_pipeline", 30, 101.3),
    ],
)
def test_published_paths_take_the_published_time(paths: str, microbatches: int | None, seconds: float) -> None:
    plan = published_plan(published20(), paths, microbatches)
    assert simulate(plan, Timing.CONTENTION_ONLY).iteration_s == pytest.approx(seconds, abs=0.05)


def alone_ns(plan: Plan, lane: Lane) -> int:
    """A round trip with nobody else there: every task on the way once, every hop there and back."""
    costs = plan.costs
    backward_ns = costs.input_ns if plan.split_backward else costs.backward_ns
    around = [*lane.path, lane.path[0]]
    hops = sum(int(costs.hop_ns[a, b] + costs.hop_ns[b, a]) for a, b in pairwise(around))
    tasks = sum(int((costs.forward_ns + backward_ns)[plan.stage_of[node], node]) for node in lane.path)
    return hops + tasks + int(costs.head_ns[lane.path[0]])


@settings(max_examples=200, deadline=None)
@given(plans(), timings)
def test_never_faster_than_the_longest_lane_alone(plan: Plan, timing: Timing) -> None:
    timeline = simulated(plan, timing)
    weight_ns = {use.node: use.weight_ns for use in timeline.nodes}
    least_ns = [lane.microbatches * alone_ns(plan, lane) + weight_ns[lane.path[0]] for lane in plan.lanes]
    assert timeline.last_backward_ns >= max(least_ns)
    assert timeline.iteration_ns >= timeline.last_backward_ns


@settings(max_examples=100, deadline=None)
@given(plans(), timings)
def test_a_single_lane_takes_the_sum_of_its_parts(plan: Plan, timing: Timing) -> None:
    plan = replace(plan, lanes=plan.lanes[:1], split_backward=False)
    timeline = simulated(plan, timing)
    lane = plan.lanes[0]
    assert timeline.last_backward_ns == lane.microbatches * alone_ns(plan, lane)
    assert timeline.collision_s == 0


@settings(max_examples=100, deadline=None)
@given(plans(), timings)
def test_weight_gradients_of_a_single_microbatch_start_at_once(plan: Plan, timing: Timing) -> None:
    lane = replace(plan.lanes[0], microbatches=1)
    plan = replace(plan, lanes=(lane,), split_backward=True)
    tasks = {task.step: task for task in simulated(plan, timing).tasks}
    length = len(lane.path)
    assert tasks[2 * length].end_ns == alone_ns(plan, lane)
    for place, node in enumerate(lane.path):
        weights, backward = tasks[2 * length + 1 + place], tasks[2 * length - place]
        assert weights.node == backward.node == node
        assert weights.ready_ns == weights.start_ns == backward.end_ns
        stage = plan.stage_of[node]
        took_ns = weights.end_ns - backward.start_ns
        assert took_ns == plan.costs.weight_ns[stage, node] + plan.costs.input_ns[stage, node]


@settings(max_examples=200, deadline=None)
@given(plans(), timings)
def test_weight_gradients_run_when_nothing_else_can(plan: Plan, timing: Timing) -> None:
    plan = replace(plan, split_backward=True)
    timeline = simulated(plan, timing)
    for node, slots in plan.slots.items():
        mine = [task for task in timeline.tasks if task.node == node]
        kinds = {task: steps_in_words(plan, task) for task in mine}
        busy = {task.start_ns: task.end_ns for task in mine}
        for task in (task for task in mine if kinds[task] == "weights"):
            time = task.ready_ns
            while time < task.start_ns:
                time = busy[time]  # no gap: somebody else runs
            held = sum(
                (kinds[each] == "forward" and each.start_ns < task.start_ns)
                - (kinds[each] == "weights" and each.end_ns <= task.start_ns)
                for each in mine
            )
            passed_over = [each for each in mine if each.ready_ns <= task.start_ns < each.start_ns]
            for each in passed_over:
                if kinds[each] == "weights":
                    assert each.ready_ns > task.ready_ns
                else:
                    assert kinds[each] == "forward" and held == slots


def steps_in_words(plan: Plan, task: Task) -> str:
    length = len(plan.lanes[task.lane].path)
    return ["forward", "head", "backward", "weights"][
        (task.step >= length) + (task.step > length) + (task.step > 2 * length)
    ]


@settings(max_examples=100, deadline=None)
@given(plans())
def test_nobody_averages_longer_than_if_all_had_been_done_together(plan: Plan) -> None:
    timeline = simulated(plan, Timing.FULL)
    for index, ((start_ns, end_ns), stage) in enumerate(zip(timeline.averaging_ns, plan.stages, strict=True)):
        done = {node: max((t.end_ns for t in timeline.tasks if t.node == node), default=0) for node in stage.nodes}
        last = max(stage.nodes, key=lambda node: done[node])
        assert start_ns == done[last]
        took_ns = end_ns - start_ns
        assert (
            RING.after_ns(plan.costs, index, stage.ring, last)
            <= took_ns
            <= RING.takes_ns(plan.costs, index, stage.ring)
        )


def test_a_ring_by_hand() -> None:
    """The first node is late by 5; over every edge 10 of transmission, then 1, 2 and 3 of flight."""
    done, transmit, flight = (np.array(times) for times in ([5, 0, 0], [10, 10, 10], [1, 2, 3]))
    # arrivals of the four steps at nodes 0, 1, 2: (13, 16, 12), (25, 26, 28), (41, 36, 38), (51, 52, 48)
    assert averaged_ns(done, transmit, flight) == 52
    assert averaged_ns(np.array([7]), np.array([10]), np.array([1])) == 7


@settings(max_examples=200, deadline=None)
@given(plans(), timings)
def test_one_task_at_a_time_and_no_more_microbatches_than_slots(plan: Plan, timing: Timing) -> None:
    timeline = simulated(plan, timing)
    for node, slots in plan.slots.items():
        mine = sorted((task for task in timeline.tasks if task.node == node), key=lambda task: task.start_ns)
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(mine))
        changes = []
        for task in mine:
            length = len(plan.lanes[task.lane].path)
            if task.step < length:
                changes.append((task.start_ns, 1))
            elif task.step > (2 * length if plan.split_backward else length):
                changes.append((task.end_ns, -1))
        held = np.cumsum([change for _, change in sorted(changes)])
        assert held.size == 0 or (held.max() <= slots and held[-1] == 0)


def on_the_way(plan: Plan, timeline: Timeline) -> list[Task]:
    """All tasks but weight gradients, lane by lane."""
    tasks = [task for task in timeline.tasks if steps_in_words(plan, task) != "weights"]
    return sorted(tasks, key=lambda task: (task.lane, task.microbatch, task.step))


@settings(max_examples=200, deadline=None)
@given(plans(), timings)
def test_every_microbatch_takes_every_step_once_and_in_order(plan: Plan, timing: Timing) -> None:
    timeline = simulated(plan, timing)
    expected = {
        (lane, microbatch, step)
        for lane, each in enumerate(plan.lanes)
        for microbatch in range(each.microbatches)
        for step in range((3 if plan.split_backward else 2) * len(each.path) + 1)
    }
    assert sorted((task.lane, task.microbatch, task.step) for task in timeline.tasks) == sorted(expected)
    assert all(task.ready_ns <= task.start_ns < task.end_ns for task in timeline.tasks)
    for before, after in pairwise(on_the_way(plan, timeline)):
        if before.lane == after.lane:
            assert before.end_ns <= after.ready_ns


@settings(max_examples=100, deadline=None)
@given(plans())
def test_messages_on_a_link_queue_only_under_full_timing(plan: Plan) -> None:
    """Arrivals over one directed link are at least a transmit time apart."""
    timeline = simulated(plan, Timing.FULL)
    arrivals: dict[tuple[int, int], list[int]] = {}
    before = None
    for task in on_the_way(plan, timeline):
        if before and before.lane == task.lane and before.microbatch == task.microbatch and before.node != task.node:
            arrivals.setdefault((before.node, task.node), []).append(task.ready_ns)
        before = task
    for (a, b), times in arrivals.items():
        gap = int(plan.costs.transmit_ns[a, b])
        assert all(second - first >= gap for first, second in pairwise(sorted(times)))


@settings(max_examples=30, deadline=None)
@given(plans(), timings)
def test_compiled_and_plain_python_agree(plan: Plan, timing: Timing) -> None:
    rings = [stage.ring for stage in plan.stages]
    costs = PlacementCosts.of(plan.costs, rings, plan.dispatch, timing, plan.split_backward)
    paths, lengths = path_arrays([lane.path for lane in plan.lanes])
    microbatches = np.array([lane.microbatches for lane in plan.lanes])

    def outcome(run_iteration: object) -> tuple[object, list[int]]:
        done = np.zeros(len(plan.cluster), np.int64)
        assert callable(run_iteration)
        result = run_iteration(
            paths, lengths, microbatches, costs.forward_ns, costs.backward_ns, costs.weight_ns, costs.head_ns,
            costs.slots, costs.flight_ns, costs.transmit_ns, timing is Timing.FULL, costs.order,
            plan.split_backward, NO_SLACK, done, NO_RECORD,
        )  # fmt: skip
        return tuple(map(int, result)), done.tolist()

    assert outcome(event_loop.run_iteration) == outcome(event_loop.run_iteration.py_func)  # type: ignore[attr-defined]


@settings(max_examples=40, deadline=None)
@given(clusters(least=4, most=7))
def test_the_ring_is_the_best_there_is(cluster: object) -> None:
    from itertools import permutations

    from skippipe.cluster import Cluster
    from skippipe.cost_model import cost_model_of
    from skippipe.workload import Workload
    from tests.helpers.plans import TINY

    assert isinstance(cluster, Cluster)
    costs = cost_model_of(cluster, Workload(TINY, sequence_tokens=16), (4, 4))
    members = tuple(range(len(cluster)))
    fastest = min(RING.takes_ns(costs, 1, (0, *rest)) for rest in permutations(members[1:]))
    assert RING.takes_ns(costs, 1, RING.order(costs, 1, members)) == fastest


def test_large_rings_are_better_than_the_order_they_come_in() -> None:
    from skippipe.cost_model import cost_model_of
    from skippipe.presets import regions
    from skippipe.workload import MODELS, Workload

    costs = cost_model_of(regions(24), Workload(MODELS["llama-1.5b"]), (12, 12))
    ring = RING.order(costs, 1, range(24))
    assert sorted(ring) == list(range(24))
    assert RING.takes_ns(costs, 1, ring) < 0.8 * RING.takes_ns(costs, 1, range(24))
