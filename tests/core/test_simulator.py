"""Properties of simulated time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe.cluster import Cluster, Node
from skippipe.collectives import rings, topology, transfers
from skippipe.collectives.schedule import Averaging
from skippipe.collectives.transfers import free_links, run_schedule
from skippipe.cost_model import CostModel, cost_model_of
from skippipe.event_loop import run_iteration
from skippipe.model_shape import MODELS
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.published import published20, published_plan
from skippipe.presets import regions
from skippipe.simulator import NO_RECORD, NO_SLACK, PlacementCosts, lane_arrays, simulate
from skippipe.timeline import Task, Timeline, Timing
from skippipe.workload import Workload
from tests.helpers import oracle
from tests.helpers.plans import TINY, clusters, plans, simulated, uniform_cluster, without_rates

timings = st.sampled_from(list(Timing))


@settings(max_examples=20, deadline=None)
@given(plans(), timings)
def test_the_simulator_written_from_the_page_agrees_to_the_nanosecond(plan: Plan, timing: Timing) -> None:
    """Nodes of these plans have rates, and stages pieces, trees and relays; many events are at the same time."""
    names = [node.name for node in plan.cluster.nodes]
    assert simulated(plan, timing).to_json(names) == oracle.simulate(plan.to_json(), timing.value)


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
    hops = sum(costs.round_trip_ns(a, b) for a, b in pairwise(around))
    tasks = sum(int((costs.forward_ns + backward_ns)[plan.stage_of[node], node]) for node in lane.path)
    return hops + tasks + int(costs.head_ns[lane.path[0]])


@settings(max_examples=30, deadline=None)
@given(plans(), timings)
def test_never_faster_than_the_longest_lane_alone(plan: Plan, timing: Timing) -> None:
    timeline = simulated(plan, timing)
    weight_ns = {use.node: use.weight_ns for use in timeline.nodes}
    least_ns = [lane.microbatches * alone_ns(plan, lane) + weight_ns[lane.path[0]] for lane in plan.lanes]
    assert timeline.last_backward_ns >= max(least_ns)
    assert timeline.iteration_ns >= timeline.last_backward_ns


@settings(max_examples=20, deadline=None)
@given(plans(), timings)
def test_a_single_lane_takes_the_sum_of_its_parts(plan: Plan, timing: Timing) -> None:
    plan = replace(plan, lanes=plan.lanes[:1], split_backward=False)
    timeline = simulated(plan, timing)
    lane = plan.lanes[0]
    assert timeline.last_backward_ns == lane.microbatches * alone_ns(plan, lane)
    assert timeline.collision_s == 0


@settings(max_examples=20, deadline=None)
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


@settings(max_examples=30, deadline=None)
@given(plans(), timings)
def test_weight_gradients_run_when_nothing_else_can(plan: Plan, timing: Timing) -> None:
    plan = replace(plan, split_backward=True)
    timeline = simulated(plan, timing)
    workers = [
        (each.node, device, each.slots // each.workers) for each in timeline.nodes for device in range(each.workers)
    ]
    for node, device, slots in workers:
        mine = [task for task in timeline.tasks if (task.node, task.device) == (node, device)]
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


@settings(max_examples=20, deadline=None)
@given(plans())
def test_rings_average_no_longer_than_if_all_nodes_had_been_done_together(plan: Plan) -> None:
    """Rings share no links with each other, nor with hops; what shares them can be slower."""
    stages = tuple(replace(stage, pieces=()) for stage in plan.stages)
    plan = replace(plan, stages=stages, cluster=without_rates(plan.cluster))
    timeline = simulated(plan, Timing.FULL)
    for index, ((start_ns, end_ns), stage) in enumerate(zip(timeline.averaging_ns, plan.stages, strict=True)):
        done = {node: max((t.end_ns for t in timeline.tasks if t.node == node), default=0) for node in stage.nodes}
        last = max(stage.nodes, key=lambda node: done[node])
        assert start_ns == done[last]
        took_ns = end_ns - start_ns
        least_ns = transfers.after_ns(plan.costs, index, stage.averaging, last)
        assert least_ns <= took_ns <= transfers.takes_ns(plan.costs, index, stage.averaging)


def test_a_ring_by_hand() -> None:
    """The first node is late by 5; over every edge 10 of transmission, then 1, 2 and 3 of flight."""
    done, transmit, flight = (np.array(times) for times in ([5, 0, 0], [10, 10, 10], [1, 2, 3]))
    # arrivals of the four steps at nodes 0, 1, 2: (13, 16, 12), (25, 26, 28), (41, 36, 38), (51, 52, 48)
    assert rings.ring_ns(done, transmit, flight) == 52
    assert rings.ring_ns(np.array([7]), np.array([10]), np.array([1])) == 7


def costs_of(cluster: Cluster) -> CostModel:
    return cost_model_of(cluster, Workload(TINY, sequence_tokens=16, collective="auto"), (4, 4))


@settings(max_examples=25, deadline=None)
@given(clusters(most=7, rates=False), st.data())
def test_the_compiled_ring_is_the_schedule_of_a_ring(cluster: Cluster, data: st.DataObject) -> None:
    costs = costs_of(cluster)
    order = tuple(data.draw(st.permutations(range(len(cluster)))))
    done_ns = np.array([data.draw(st.integers(0, 10**8)) for _ in order], np.int64)
    links = list(order), [*order[1:], order[0]]
    size_bytes = np.array(-(-costs.gradient_bytes[1] // len(order)), np.int64)
    transmit_ns = transfers.transmit_ns(size_bytes, costs.bandwidth_bytes_per_s[links])
    quick_ns = rings.ring_ns(done_ns[list(order)], transmit_ns, costs.flight_ns[links])
    assert quick_ns == transfers.averaged_ns(costs, 1, Averaging(order), done_ns)


ESTIMATE_OF_REGIONS = 1.75  # times as long, or as short
ESTIMATE_OF_ANYTHING = 6.0  # links and rates at random, a hundred times apart


@pytest.mark.parametrize("seed", range(8))
def test_the_estimate_of_an_exchange_is_about_what_it_takes(seed: int) -> None:
    random = np.random.default_rng(seed)

    def rate() -> float | None:
        return float(random.choice([0, 5e6, 2e7, 1e8])) or None

    def drawn(count: int) -> Cluster:
        nodes = tuple(Node(f"n{index}", "somewhere", 1e13, 2**36, rate(), rate()) for index in range(count))
        shape = (count, count)
        return Cluster("drawn", nodes, random.choice([0.001, 0.01, 0.05], shape), random.choice([1e6, 1e7, 1e8], shape))

    for cluster, factor in ((regions(12), ESTIMATE_OF_REGIONS), (drawn(12), ESTIMATE_OF_ANYTHING)):
        costs = cost_model_of(cluster, Workload(MODELS["llama-1.5b"], collective="auto"), (8, 8, 8))
        members = np.sort(random.choice(12, int(random.integers(2, 8)), replace=False)).astype(np.int64)
        averaging = topology.exchange(costs, 1, tuple(members.tolist()), free_links(12), range(12))
        estimated_ns = np.empty((3, len(members), len(members)), np.int64)
        topology.estimate_exchange(
            members,
            costs.gradient_bytes[1],
            np.ascontiguousarray(costs.bandwidth_bytes_per_s),
            costs.flight_ns,
            topology.relay_rates(costs),
            topology.all_relays(topology.relay_rates(costs)),
            np.array([], np.int64),
            costs.upload_bytes_per_s,
            costs.download_bytes_per_s,
            *estimated_ns,
        )
        estimate_ns = topology.exchange_ns(np.zeros(len(members), np.int64), *estimated_ns)
        assert 1 / factor < transfers.takes_ns(costs, 1, averaging) / estimate_ns < factor


def limited(upload: float | None, download: float | None, *lanes: tuple[int, int]) -> tuple[Plan, dict[int, Task]]:
    """Nodes 0 and 1 hold stage 0, nodes 2 and 3 stage 1, all with these rates, and a path for each lane. Also the first
    task on stage 1 of every lane."""
    cluster = uniform_cluster(4)
    nodes = [replace(node, upload_bytes_per_s=upload, download_bytes_per_s=download) for node in cluster.nodes]
    stages = (Stage(4, (0, 1), (0, 1)), Stage(4, (2, 3), (2, 3)))
    workload = Workload(TINY, 16, 1, len(lanes))
    plan = Plan(replace(cluster, nodes=tuple(nodes)), workload, stages, tuple(Lane(path, 1) for path in lanes))
    return plan, {task.lane: task for task in simulate(plan, Timing.FULL).tasks if task.step == 1}


def test_two_messages_to_different_nodes_share_the_upload() -> None:
    plan, second = limited(1e5, None, (0, 2), (0, 3))
    forward_ns, busy_ns = int(plan.costs.forward_ns[0, 0]), int(plan.costs.upload_ns[0, 0, 2])
    assert forward_ns < busy_ns  # the second message leaves while the first is on its way
    hop_ns = int(plan.costs.hop_ns[0, 2])
    assert second[0].ready_ns == forward_ns + hop_ns
    assert second[1].ready_ns == forward_ns + busy_ns + hop_ns


def test_two_messages_of_different_nodes_share_the_download() -> None:
    plan, second = limited(None, 1e5, (0, 2), (1, 2))
    forward_ns, busy_ns = int(plan.costs.forward_ns[0, 0]), int(plan.costs.download_ns[0, 0, 2])
    hop_ns = int(plan.costs.hop_ns[0, 2])
    assert second[0].ready_ns == forward_ns + hop_ns
    assert second[1].ready_ns == forward_ns + busy_ns + hop_ns


@settings(max_examples=30, deadline=None)
@given(plans(), timings)
def test_one_task_at_a_time_and_no_more_microbatches_than_slots(plan: Plan, timing: Timing) -> None:
    """On every worker of a node; a microbatch stays on the one that has its activations."""
    timeline = simulated(plan, timing)
    on_worker: dict[tuple[int, int], list[Task]] = {}
    for task in timeline.tasks:
        on_worker.setdefault((task.node, task.device), []).append(task)
    visits = {(task.lane, task.microbatch, task.node, task.device) for task in timeline.tasks}
    assert len(visits) == sum(lane.microbatches * len(lane.path) for lane in plan.lanes)
    for (node, device), mine in on_worker.items():
        slots = plan.slots[node] // plan.workers[node]
        assert device < plan.workers[node]
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


@settings(max_examples=30, deadline=None)
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


@settings(max_examples=20, deadline=None)
@given(plans())
def test_messages_on_a_link_queue_only_under_full_timing(plan: Plan) -> None:
    """Arrivals over one directed link are at least a transmit time apart, where no download holds up the first."""
    timeline = simulated(plan, Timing.FULL)
    arrivals: dict[tuple[int, int], list[int]] = {}
    before = None
    for task in on_the_way(plan, timeline):
        if before and before.lane == task.lane and before.microbatch == task.microbatch and before.node != task.node:
            arrivals.setdefault((before.node, task.node), []).append(task.ready_ns)
        before = task
    for (a, b), times in arrivals.items():
        if plan.cluster.nodes[b].download_bytes_per_s:
            continue
        gap = int(plan.costs.transmit_ns[:, a, b].min())
        assert all(second - first >= gap for first, second in pairwise(sorted(times)))


@settings(max_examples=20, deadline=None)
@given(plans(), timings)
def test_compiled_and_plain_python_agree(plan: Plan, timing: Timing) -> None:
    averagings = [stage.averaging for stage in plan.stages]
    costs = PlacementCosts.of_plan(plan, timing)
    schedule = transfers.merged(plan.costs, averagings)
    times = transfers.transfer_times(plan.costs, averagings, range(len(averagings)))

    def outcome(iteration: Callable[..., tuple[int, int]], averaging: Callable[..., None]) -> list[object]:
        done_ns, free_ns = np.zeros(len(plan.cluster), np.int64), free_links(len(plan.cluster))
        result = iteration(
            *lane_arrays(plan), costs.forward_ns, costs.backward_ns, costs.weight_ns, costs.head_ns,
            costs.worker_slots, costs.workers, costs.flight_ns, costs.transmit_ns, costs.upload_ns,
            costs.download_ns, timing is Timing.FULL, costs.order, plan.split_backward, NO_SLACK, done_ns, *free_ns,
            NO_RECORD, None,
        )  # fmt: skip
        ends_ns, record = np.zeros(len(averagings), np.int64), np.zeros((len(schedule.stages), 4), np.int64)
        averaging(
            done_ns, schedule.stages, schedule.senders, schedule.receivers, schedule.missing, schedule.first_after,
            schedule.after, *times, *free_ns, ends_ns, record,
        )  # fmt: skip
        return [tuple(map(int, result)), *(array.tolist() for array in (done_ns, *free_ns, ends_ns, record))]

    plain = [function.py_func for function in (run_iteration, run_schedule)]  # type: ignore[union-attr]
    assert outcome(run_iteration, run_schedule) == outcome(*plain)


@settings(max_examples=20, deadline=None)
@given(clusters(least=4, most=6, rates=False))
def test_the_ring_is_the_best_there_is(cluster: Cluster) -> None:
    costs, members = costs_of(cluster), tuple(range(len(cluster)))

    def takes_ns(order: tuple[int, ...]) -> int:
        return transfers.takes_ns(costs, 1, Averaging(order))

    fastest = min(takes_ns((0, *rest)) for rest in permutations(members[1:]))
    assert takes_ns(rings.ring_order(costs, 1, members)) == fastest


def test_large_rings_are_better_than_the_order_they_come_in() -> None:
    costs = cost_model_of(regions(24), Workload(MODELS["llama-1.5b"]), (12, 12))
    ring = rings.ring_order(costs, 1, range(24))
    assert sorted(ring) == list(range(24))
    given_ns = transfers.takes_ns(costs, 1, Averaging(tuple(range(24))))
    assert transfers.takes_ns(costs, 1, Averaging(ring)) < 0.8 * given_ns
