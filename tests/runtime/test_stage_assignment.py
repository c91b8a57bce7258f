"""The stage of each node when nodes join and leave: only what makes the plan better happens, and then no node moves."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from random import Random

import numpy as np
import pytest

from skippipe.cluster import Cluster, Node
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.repair.repair import repaired
from skippipe.planner.repair.stage_assignment import MOVE_GAIN, Reassignment, StageAssignment
from skippipe.runtime.coordinator.interfaces import Event
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.simulation.fault_injection import Fault, kill
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.workload import Workload
from tests.helpers.plans import TINY, uniform_cluster
from tests.helpers.quick import others_slow
from tests.helpers.single_coordinator import HELLO, CoordinatorHarness, coordinating, even_plan, with_a_quick_one
from tests.helpers.single_node import AT_ONCE, LEARNING

pytestmark = pytest.mark.usefixtures("quiet_nodes")
EXTERNAL = ("lost", "joined", "link-down")
NUMBERS = re.compile(r"(?P<after>[\d.e+-]+) s instead of (?P<before>[\d.e+-]+ s|for ever)")


# The decision by itself


def small_plan(sizes: Sequence[int], nodes: int | None = None, microbatches: int = 12) -> Plan:
    """Stages of these sizes, every path over all of them; more nodes in the cluster if asked for."""
    numbers = iter(range(sum(sizes)))
    members = [tuple(next(numbers) for _ in range(size)) for size in sizes]
    work = Workload(
        replace(TINY, layers=2 * len(sizes)), sequence_tokens=16, microbatches=microbatches, max_slots=8, head_ratio=0.1
    )
    layers = work.layer_split(len(sizes))
    return Plan(
        uniform_cluster(nodes or sum(sizes), latency_s=1e-6, bandwidth=1e9),  # averaging takes no time to speak of
        work,
        tuple(Stage(count, nodes, nodes) for count, nodes in zip(layers, members, strict=True)),
        (Lane(tuple(nodes[0] for nodes in members), microbatches),),
    )


def with_speed(plan: Plan, factor: float, *nodes: int) -> Plan:
    all_nodes = list(plan.cluster.nodes)
    for node in nodes:
        all_nodes[node] = replace(all_nodes[node], flops_per_s=all_nodes[node].flops_per_s * factor)
    return replace(plan, cluster=replace(plan.cluster, nodes=tuple(all_nodes)))


def with_links(plan: Plan, links: Collection[tuple[int, int]], factor: float) -> Plan:
    bandwidth = plan.cluster.bandwidth_bytes_per_s.copy()
    for a, b in links:
        bandwidth[a, b] *= factor
        bandwidth[b, a] *= factor
    return replace(plan, cluster=replace(plan.cluster, bandwidth_bytes_per_s=bandwidth))


def assigning(plan: Plan, *lost: int, able: Collection[int] | None = None) -> StageAssignment:
    members = [set(stage.nodes) - set(lost) for stage in plan.stages]
    there = set().union(*members)
    return StageAssignment(plan, len(plan.lanes[0].path), members, there if able is None else able, there)


def where(found: Reassignment | None) -> tuple[int, int] | None:
    return (found.node, found.stage) if found is not None else None


def test_a_spare_goes_where_nobody_is_and_to_stage_0_first() -> None:
    plan = small_plan((2, 2, 2), nodes=7)
    assert where(assigning(plan, 2, 3).filling([6])) == (6, 1)
    assert where(assigning(plan, 0, 1, 2, 3).filling([6])) == (6, 0)


def test_a_spare_that_is_very_slow_does_not_fill_a_stage_that_another_can_spare_a_node_for() -> None:
    plan = with_speed(small_plan((2, 4, 4), nodes=11), 0.01, 10)
    found = assigning(plan, *plan.stages[1].nodes).filling([10])
    assert found is not None
    assert found.node in plan.stages[2].nodes


def test_a_newcomer_goes_where_the_load_is_largest() -> None:
    plan = small_plan((4, 2, 1, 2), nodes=10)
    found = assigning(plan).using([9])
    assert found is not None
    assert where(found) == (9, 2)
    assert found.helps
    assert found.after_s < 0.8 * found.before_s
    slow = with_speed(plan, 0.1, *plan.stages[3].nodes)
    assert where(assigning(slow).using([9])) == (9, 3)


def test_a_newcomer_that_is_slow_or_would_slow_down_averaging_is_of_no_help() -> None:
    plan = small_plan((2, 2, 2), nodes=7)
    for bad in (with_speed(plan, 0.001, 6), with_links(plan, [(6, other) for other in range(6)], 1e-5)):
        found = assigning(bad).using([6])
        assert found is not None
        assert not found.helps
        assert found.after_s >= found.before_s


def test_without_a_plan_any_newcomer_helps_that_makes_one_possible() -> None:
    """No link leads from stage 0 to stage 1."""
    plan = small_plan((1, 1), nodes=3)
    plan = with_links(plan, [(0, 1)], 0.0)
    found = assigning(plan).using([2])
    assert found is not None
    assert found.before_s == inf
    assert found.after_s < inf
    assert found.helps


def test_a_newcomer_takes_a_stage_that_it_can_hold_and_whose_nodes_it_reaches() -> None:
    plan = small_plan((1, 2, 2), nodes=6)
    work, layers = replace(plan.workload, model=replace(plan.workload.model, vocab=1024)), plan.layers
    plan = replace(plan, workload=work)
    need = max(work.fixed_bytes(stage, layers[stage]) + work.held_bytes(layers[stage]) for stage in (1, 2))
    assert need < work.fixed_bytes(0, layers[0])
    nodes = (*plan.cluster.nodes[:5], replace(plan.cluster.nodes[5], memory_bytes=need))
    plan = replace(plan, cluster=replace(plan.cluster, nodes=nodes))
    staff = assigning(plan)
    assert staff.open_to(5) == [1, 2]
    staff.are_cut = lambda a, b: {a, b} == {5, 2}
    assert staff.open_to(5) == [2]
    nodes = (*plan.cluster.nodes[:5], replace(plan.cluster.nodes[5], memory_bytes=1))
    staff = assigning(replace(plan, cluster=replace(plan.cluster, nodes=nodes)))
    assert staff.using([5]) is None


def test_an_empty_stage_gets_a_node_from_where_it_is_missed_least() -> None:
    plan = small_plan((3, 2, 4, 2))
    found = assigning(plan, *plan.stages[1].nodes).filling([])
    assert found is not None
    assert (found.leaves, found.stage) == (2, 1)


def test_nobody_gives_the_last_able_node_but_to_stage_0() -> None:
    plan = small_plan((1, 1, 1, 1))
    assert assigning(plan, 2).filling([]) is None
    assert where(assigning(plan, 0).filling([])) == (1, 0)
    assert assigning(plan, 0).filling([], last=False) is None
    assert assigning(small_plan((1, 1)), 0).filling([]) is None  # nobody would be left to visit
    plan = small_plan((2, 2, 2))
    found = assigning(plan, 4, 5, able={1, 2, 3}).filling([])
    assert found is not None
    assert found.node in (0, 2, 3)  # not 1: who learns is no help yet
    assert where(assigning(plan, 4, 5, able={1}).filling([])) == (0, 2)


def test_one_that_builds_is_not_told_to_build_something_else() -> None:
    plan = small_plan((2, 1, 1))
    staff = assigning(plan, 3)
    staff.movable = [0, 2]
    assert where(staff.filling([])) == (0, 2)
    staff.movable = [2]
    assert staff.filling([]) is None


def test_one_that_has_just_been_moved_is_no_help_to_a_third_stage() -> None:
    staff = assigning(small_plan((2, 2, 1, 1)), 4, 5)
    first = staff.filling([])
    assert first is not None
    staff.carry_out(first)
    second = staff.filling([])
    assert second is not None
    assert (second.stage, second.leaves) == (3, 1 - first.leaves)
    staff.carry_out(second)
    assert staff.filling([]) is None


def test_a_stage_that_ran_short_gets_help_only_if_that_helps_clearly() -> None:
    for sizes in ((4, 1, 4), (5, 1, 3), (3, 2, 5)):
        found = assigning(small_plan(sizes)).moving(100)
        assert found is not None, sizes
        assert found.stage == 1
        assert found.after_s <= (1 - MOVE_GAIN) * found.before_s
    for sizes in ((3, 3, 3), (2, 1, 2)):
        assert assigning(small_plan(sizes)).moving(100) is None, sizes


def test_a_move_must_save_more_than_it_takes_to_fetch_the_state() -> None:
    plan = small_plan((4, 1, 4))
    plan = replace(plan, workload=replace(plan.workload, collective="ring"))  # a slow link counts more on a ring
    far = with_links(plan, [(5, 4), (6, 4), (7, 4), (8, 4), (0, 4), (1, 4), (2, 4), (3, 4)], 0.01)
    found = assigning(far).moving(10**6)
    assert found is not None
    assert assigning(far).moving(1) is None
    assert assigning(plan).moving(0) is None


def test_a_node_with_a_bad_link_leaves_a_ring_that_can_no_longer_go_around_it() -> None:
    """Four nodes average around a link that a ring of three cannot avoid."""
    bandwidth = uniform_cluster(8).bandwidth_bytes_per_s.copy()
    bandwidth[2, 3] = bandwidth[3, 2] = 10.0
    cluster = replace(uniform_cluster(8), bandwidth_bytes_per_s=bandwidth)
    stages = (Stage(2, (0, 1), (0, 1)), Stage(3, (2, 3, 4, 5), (2, 4, 3, 5)), Stage(3, (6, 7), (6, 7)))
    lanes = tuple(Lane((at % 2, 2 + at % 4, 6 + at % 2), 1) for at in range(4))
    plan = Plan(cluster, Workload(TINY, 16, 1, 4, max_slots=3, collective="ring"), stages, lanes)
    before = assigning(plan).moving(100)
    assert before is None or before.gain < 0.2
    found = assigning(plan, 4).moving(100)
    assert found is not None
    assert found.node in (2, 3)
    assert found.after_s < found.before_s / 2


# In a run


class Open(VirtualCluster):
    """Nodes that the plan does without may come too; until they get a stage they think of stage 0."""

    def _new_machine(self, node: int, plan: Plan) -> None:
        if node not in plan.stage_of:
            first, *others = plan.stages
            nodes = (*first.nodes, node)
            plan = replace(plan, stages=(replace(first, nodes=nodes, ring=nodes), *others), expected=None)
        super()._new_machine(node, plan)


def moves(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.node and event.kind == "replanned"]


def assert_rest(run: VirtualCluster, about: str) -> None:
    """Every move made the plan better, or safer and no slower; none came over two iterations after the last event."""
    events = [event for _, event in run.events]
    last = max((event.iteration for event in events if event.kind in EXTERNAL), default=0)
    for event in moves(events):
        assert event.iteration <= last + 2, f"{about}: {event} after the last event in iteration {last}"
        if "which no node holds" not in event.text:
            found = NUMBERS.search(event.text)
            assert found, event.text
            before_s = inf if found["before"] == "for ever" else float(found["before"].removesuffix(" s"))
            after_s, second = float(found["after"]), event.text.endswith(" a second time")
            assert after_s < before_s or (second and after_s == before_s), f"{about}: {event.text}"


def drawn_cluster(random: np.random.Generator, nodes: int) -> Cluster:
    """Unequal nodes and links, as in regions that are far apart."""
    machines = tuple(Node(f"n{index}", "", float(random.choice([2e6, 1e7, 4e7])), 2**30) for index in range(nodes))
    latency_s = random.choice([0.001, 0.01, 0.05], (nodes, nodes))
    bandwidth = random.choice([1e5, 1e6, 1e7], (nodes, nodes))
    return Cluster("drawn", machines, np.minimum(latency_s, latency_s.T), np.minimum(bandwidth, bandwidth.T))


def drawn_run(seed: int, iterations: int = 10) -> Open:
    """Six to eight nodes on three stages, some of them not in the plan; some are lost, come back, or come later."""
    random = Random(seed)
    count = random.randint(6, 8)
    used = list(range(random.choice([6, count])))
    stages = [set(used[at::3]) for at in range(3)]
    work = Workload(TINY, 16, 1, 6, max_slots=3)
    first = [min(nodes) for nodes in stages]
    bare = Plan(
        drawn_cluster(np.random.default_rng(seed), count),
        work,
        tuple(
            Stage(layers, tuple(sorted(nodes)), tuple(sorted(nodes)))
            for layers, nodes in zip(work.layer_split(3), stages, strict=True)
        ),
        (Lane((first[0], first[1]), 3), Lane((first[0], first[2]), 3)),
    )
    plan = repaired(bare, stages, used, budget_s=0)
    assert plan is not None
    assert plan.expected is not None
    faults: list[Fault] = []
    losses = random.sample(used, random.randint(1, 2))
    if stages[0] <= set(losses):  # then nobody has what only stage 0 holds, and the run cannot go on
        losses.pop()
    for node in losses:
        fault = kill(node).at(random.randint(1, 4), random.choice(["forward", "backward", "averaging"]))
        lasts_s = random.choice([None, 0.1, 2.0]) if faults else None
        faults.append(fault if lasts_s is None else fault.back_after(lasts_s))
    run = Open(plan, CoordinatorSettings(LEARNING, iterations, recovery=AT_ONCE), faults=faults)
    for node in range(len(used), count):
        at_ns = int(random.uniform(0.5, 4) * plan.expected.iteration_ns)
        run.after(at_ns, lambda node=node: run.start(node))  # type: ignore[misc]
    return run


@pytest.mark.parametrize("seed", others_slow(range(3), range(3, 24)))
def test_moves_come_to_rest_after_the_last_event(seed: int) -> None:
    run = drawn_run(seed)
    run.run()
    assert not run.coordinator.failure
    assert_rest(run, f"seed {seed}")


def with_speed_of_6(factor: float) -> Cluster:
    """Of seven nodes, the last one has this share of the others' speed."""
    cluster = with_a_quick_one(7)
    others = cluster.nodes[:6]
    return replace(cluster, nodes=(*others, replace(cluster.nodes[6], flops_per_s=factor * others[0].flops_per_s)))


def joined(harness: CoordinatorHarness, node: int) -> str:
    """The event of a node that joins."""
    harness.env.events.clear()
    harness.send(node, HELLO)
    (event,) = (event for event in harness.env.events if event.kind != "joined")
    assert event.node == f"n{node}"
    return f"{event.kind}: {event.text}"


def test_a_newcomer_that_helps_gets_a_stage_and_it_is_said_what_that_brings() -> None:
    harness = coordinating(5, replace(even_plan(), cluster=with_a_quick_one(7)))
    text = joined(harness, 6)
    assert re.fullmatch(r"replanned: takes stage \d: [\d.]+ s instead of [\d.]+ s", text), text
    assert harness.env.logged("welcome")[-1][0] == 6


def test_a_newcomer_that_is_too_slow_stays_a_spare_until_others_are_lost() -> None:
    harness = coordinating(9, replace(even_plan(), cluster=with_speed_of_6(1 / 50)))
    text = joined(harness, 6)
    numbers = re.fullmatch(r"refused: stays a spare: with it an iteration takes ([\d.]+) s, without ([\d.]+) s", text)
    assert numbers, text
    assert float(numbers[1]) >= float(numbers[2])
    harness.env.events.clear()
    harness.iterate(2)
    assert not harness.env.events, "it is reported once, and nothing is planned for it again"
    for node in (1, 2, 3, 4):
        harness.coordinator.node_lost(node, "its process ended")
    finish_without(harness)
    assert [(event.node, event.text) for event in moves(harness.env.events)] == [
        ("n6", "takes stage 1, which no node holds")
    ]
    assert (6, 1, None) in harness.env.logged("welcome")


def finish_without(harness: CoordinatorHarness) -> None:
    """The iteration in which nodes were lost."""
    harness.return_microbatches()
    for answer in (harness.contributed, harness.averaged):
        for node in list(harness.coordinator.nodes):
            harness.send(node, answer(node))


def test_one_that_was_left_out_is_used_when_a_loss_makes_it_useful() -> None:
    harness = coordinating(9, replace(even_plan(), cluster=with_speed_of_6(1)))
    assert joined(harness, 6).startswith("refused: stays a spare: ")
    harness.coordinator.node_lost(1, "its process ended")
    finish_without(harness)
    (event,) = moves(harness.env.events)
    assert event.node == "n6"
    assert event.text.startswith("takes stage 0: ")


def test_spares_that_were_there_before_the_first_iteration_are_looked_at_once() -> None:
    run = Open(
        replace(even_plan(), cluster=with_speed_of_6(1 / 50)), CoordinatorSettings(LEARNING, 6, recovery=AT_ONCE)
    )
    run.after(0, lambda: run.start(6))
    run.run()
    text = [event.text for _, event in run.events if event.node == "n6"]
    assert text[0] == "is here"
    assert len(text) == 2 and text[1].startswith("stays a spare: with it "), text
    assert len(run.reports) == 6
