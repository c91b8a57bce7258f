"""Paths through every stage: of held-out samples, and of the teacher."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from skippipe.constraints import circle
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.whole_paths import Start, links_in_use, planned_teacher_paths, teacher_paths, whole_paths
from skippipe.workload import LinkDtypes
from tests.helpers.fault_scenarios import published, thin, wide


def taught(plan: Plan, teacher: str = "logits") -> Plan:
    return plan.edited(workload=replace(plan.workload, teacher=teacher))


@pytest.mark.parametrize("plan", [wide(False), thin(False), published()], ids=["wide", "thin", "published"])
def test_a_teachers_path_visits_every_stage_from_the_lanes_data_node(plan: Plan) -> None:
    assert planned_teacher_paths(plan) == {}, "nobody teaches"
    found = planned_teacher_paths(taught(plan))
    assert list(found) == [lane for lane, each in enumerate(plan.lanes) if len(each.path) < len(plan.stages)]
    for lane, path in found.items():
        assert path[0] == plan.lanes[lane].path[0]
        assert [plan.stage_of[node] for node in path] == list(range(len(plan.stages)))
    for lane, path in planned_teacher_paths(taught(plan, "hidden")).items():
        assert set(plan.lanes[lane].path) <= set(path), "the nodes of the lane compare their hidden states"


def test_paths_divide_the_work_and_keep_off_slow_links() -> None:
    plan = taught(wide(False))
    load: Counter[int] = Counter()
    for lane, path in planned_teacher_paths(plan).items():
        load.update(dict.fromkeys(path, plan.lanes[lane].microbatches))
    for stage in plan.stages:
        each = [load[node] for node in stage.nodes]
        assert max(each) - min(each) <= 2, "a lane has two microbatches"
    latency_s = plan.cluster.latency_s.copy()
    latency_s[:, 3] = 10.0
    far = plan.edited(cluster=replace(plan.cluster, latency_s=latency_s))
    assert all(3 not in path for path in planned_teacher_paths(far).values())


def test_a_link_counts_what_an_activation_takes_on_it() -> None:
    """Gradients come back another way, perhaps with fewer bits, and the teacher has none."""
    plan = taught(wide(False))
    names = [node.name for node in plan.cluster.nodes]

    def through_3(activations: str) -> int:
        rows = tuple(LinkDtypes(names[data_node], names[3], activations, "int4") for data_node in (0, 1, 2))
        work = replace(plan.workload, wire_dtype="int8", wire_dtypes=rows)
        return sum(3 in path for path in planned_teacher_paths(plan.edited(workload=work)).values())

    assert through_3("int8") > through_3("fp32")


def test_links_of_the_teachers_hops_are_in_use() -> None:
    plan = published()
    teacher = planned_teacher_paths(taught(plan))
    hops = {hop for path in teacher.values() for hop in circle(path)}
    untaught = links_in_use(plan, {})
    assert not hops <= untaught
    assert links_in_use(plan, teacher) == untaught | hops


def test_what_is_lost_is_on_no_path() -> None:
    plan, paths = taught(wide(False)), [lane.path for lane in wide(False).lanes]
    there = set(plan.stage_of)
    found = teacher_paths(plan, paths, there - {0, 3})
    assert found is not None and not {0, 3} & {node for path in found.values() for node in path}
    assert found.keys() == {lane for lane, path in enumerate(paths) if path[0] != 0}, "its lanes begin nowhere"
    assert teacher_paths(plan, paths, there - {3, 4}) is None, "stage 1 is lost"


def test_without_a_way_there_is_no_path_and_no_promise() -> None:
    plan = thin(False)
    bandwidth = plan.cluster.bandwidth_bytes_per_s.copy()
    bandwidth[2, 3] = 0  # the only node of stage 1, that of stage 2
    cut = plan.edited(cluster=replace(plan.cluster, bandwidth_bytes_per_s=bandwidth))
    stages = [stage.nodes for stage in plan.stages]
    assert whole_paths(cut, [Start(0), Start(1, through={3: 4})], stages) == [None, None]
    assert whole_paths(plan, [Start(0), Start(1, through={3: 4})], stages) == [(0, 2, 3, 4), (1, 2, 3, 4)]
    with pytest.raises(UserError, match=r"workload\.teacher: no path leads through every stage"):
        simulate(taught(cut), Timing.FULL)


def test_passes_that_take_centuries_are_refused() -> None:
    plan = taught(thin(False))
    slow = plan.cluster.bandwidth_bytes_per_s.copy()
    slow[4, :2] = slow[5, :2] = 1e-9  # back from the last stage, which no lane of this plan takes
    lanes = tuple(replace(lane, microbatches=20_000) for lane in plan.lanes if lane.path[-1] in (2, 3))
    others = tuple(replace(lane, path=(lane.path[0], 4, 2), microbatches=1) for lane in plan.lanes[:1])
    far = plan.edited(lanes=lanes + others, cluster=replace(plan.cluster, bandwidth_bytes_per_s=slow))
    with pytest.raises(UserError, match="may take over a century"):
        simulate(far, Timing.FULL)


def test_a_teacher_takes_time_and_bytes() -> None:
    plan = thin(False)
    without, found = simulate(plan, Timing.FULL), simulate(taught(plan), Timing.FULL)
    passes = planned_teacher_paths(taught(plan))
    microbatches = sum(plan.lanes[lane].microbatches for lane in passes)
    size = int(plan.costs.hop_bytes[0, 2, 3])
    assert found.bytes_moved - without.bytes_moved == microbatches * len(plan.stages) * size
    assert without.iteration_ns < found.iteration_ns < 2 * without.iteration_ns
    assert [(task.lane, task.microbatch, task.step) for task in sorted(found.tasks)] == [
        (task.lane, task.microbatch, task.step) for task in sorted(without.tasks)
    ]
    busy = {use.node: use.busy_ns for use in without.nodes}
    for use in found.nodes:
        steps = sum(plan.lanes[lane].microbatches for lane, path in passes.items() if use.node in path)
        assert use.busy_ns >= busy[use.node] + steps * use.forward_ns
