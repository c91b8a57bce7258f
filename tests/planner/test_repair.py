"""A plan after nodes were lost, came back or slowed down: it holds, at once, and is no worse than it need be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, count, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe import constraints
from skippipe.cluster import Cluster
from skippipe.errors import Infeasible
from skippipe.model_shape import MODELS
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest, Problem, Strategy, lane_unit
from skippipe.planner.published import published20, published_plan
from skippipe.planner.repair.exposure_milp import even_exposure, visit_sets
from skippipe.planner.repair.repair import repaired
from skippipe.planner.strategies import has_lengths, make_plan
from skippipe.presets import five_sites
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.validate import validate
from skippipe.workload import Workload
from tests.helpers.plans import may_skip, problems
from tests.helpers.quick import others_slow

Members = list[set[int]]


def ticks() -> Callable[[], float]:
    """A clock that moves on by a second at every look: budgets become counts, on any machine."""
    return count().__next__


def repair(
    plan: Plan, members: Members, able: Collection[int], cluster: Cluster | None = None, looks: int = 6
) -> Plan | None:
    return repaired(plan, members, able, cluster=cluster, budget_s=looks, clock=ticks())


def surely(plan: Plan | None) -> Plan:
    assert plan is not None
    return plan


def iteration_s(plan: Plan) -> float:
    assert plan.promise.timing is Timing.FULL
    return plan.promise.iteration_s


def without(plan: Plan, *lost: int) -> tuple[Members, set[int]]:
    members = [set(stage.nodes) - set(lost) for stage in plan.stages]
    return members, set().union(*members)


def broken(plan: Plan) -> set[str]:
    return {violation.rule for violation in validate(plan)}


def spread(plan: Plan, able: Collection[int]) -> int:
    """Of the exposures of stages that lanes can visit."""
    counts = [
        plan.exposure[index]
        for index, stage in enumerate(plan.stages)
        if index and not set(stage.nodes).isdisjoint(able)
    ]
    return max(counts) - min(counts)


def assert_sound(old: Plan, new: Plan, members: Sequence[Collection[int]], able: Collection[int]) -> None:
    """Everything but CC3, and what was to stay has stayed."""
    assert broken(new) <= {"CC3", "stages"}
    assert new.microbatches == new.workload.microbatches == old.workload.microbatches
    assert [set(stage.nodes) for stage in new.stages] == [set(nodes) for nodes in members]
    assert new.layers == old.layers
    assert (new.dispatch, new.split_backward, new.workload) == (old.dispatch, old.split_backward, old.workload)
    assert {node for lane in new.lanes for node in lane.path} <= set(able)
    assert Plan.from_json(new.to_json()) == new


@pytest.fixture(scope="module")
def published() -> Plan:
    plan = published_plan(published20(), "skippipe")
    return plan.promising(simulate(plan, Timing.FULL))


@pytest.fixture(scope="module")
def sites() -> Plan:
    """A plan of which averaging is not the larger part."""
    work = Workload(MODELS["llama-1.5b"], microbatches=24, max_slots=4)
    cluster = five_sites(16)
    roomy = tuple(replace(node, memory_bytes=2 * node.memory_bytes) for node in cluster.nodes)
    problem = Problem(replace(cluster, nodes=roomy), work, 4, 3)
    return make_plan(problem, Strategy.SKIPPIPE, PlanRequest(budget_s=60, clock=ticks()))


# losses


def test_the_loss_of_any_single_node(published: Plan) -> None:
    for node in list(published.stage_of)[::3]:
        members, able = without(published, node)
        plan = surely(repair(published, members, able, looks=3))
        assert validate(plan) == []
        assert_sound(published, plan, members, able)
        assert {len(lane.path) for lane in plan.lanes} == {4}


def test_the_loss_of_a_whole_stage(published: Plan) -> None:
    for stage in range(1, 6):
        members, able = without(published, *published.stages[stage].nodes)
        plan = surely(repair(published, members, able))
        assert_sound(published, plan, members, able)
        assert "stages" in broken(plan)
        assert spread(plan, able) == 1  # 90 visits over 4 stages
        assert {len(lane.path) for lane in plan.lanes} == {4}


def test_a_full_pipeline_that_loses_a_stage_visits_all_others_in_order() -> None:
    plan = published_plan(published20(), "full_pipeline")
    members, able = without(plan, *plan.stages[2].nodes)
    shorter = surely(repair(plan, members, able))
    assert_sound(plan, shorter, members, able)
    assert {shorter.visits(lane) for lane in shorter.lanes} == {(0, 1, 3, 4, 5)}
    again = surely(repair(shorter, members, able, looks=10))
    assert {again.visits(lane) for lane in again.lanes} == {(0, 1, 3, 4, 5)}
    members, able = without(plan)
    whole = surely(repaired(shorter, members, able, visited=6, budget_s=6, clock=ticks()))
    assert {len(lane.path) for lane in whole.lanes} == {6}


@settings(max_examples=6, deadline=None)
@given(st.sets(st.integers(0, 19), min_size=2, max_size=3))
def test_losses_of_several_nodes_at_once(lost: set[int]) -> None:
    published = published_plan(published20(), "skippipe_no_tc2")
    members, able = without(published, *lost)
    plan = surely(repair(published, members, able, looks=3))
    assert_sound(published, plan, members, able)
    assert spread(plan, able) == (0 if all(members) else 1)  # hypothesis likes to take the three nodes of one stage


def test_no_data_node_or_nobody_else_leaves_no_lane(published: Plan) -> None:
    members, able = without(published, *published.stages[0].nodes)
    assert repair(published, members, able) is None
    members, able = without(published, *(node for node, stage in published.stage_of.items() if stage))
    assert repair(published, members, able) is None
    members, able = without(published)
    assert repair(published, members, able - set(published.stages[0].nodes)) is None
    assert repair(published, [set() for _ in members], set()) is None, "all are gone"


def test_without_any_time_there_is_a_plan_all_the_same(published: Plan) -> None:
    members, able = without(published, 1)
    assert validate(surely(repaired(published, members, able, budget_s=0))) == []


def test_untouched_lanes_are_where_it_begins(published: Plan) -> None:
    """Nothing lost and no time: the same lanes. One node lost: most of them."""
    members, able = without(published)
    assert surely(repaired(published, members, able, budget_s=0)).lanes == published.lanes
    members, able = without(published, 8)
    kept = {lane.path for lane in published.lanes if 8 not in lane.path}
    assert kept <= {lane.path for lane in surely(repaired(published, members, able, budget_s=0)).lanes}


def test_paths_of_several_lengths_stay_as_many_of_each(published: Plan) -> None:
    """A third of the microbatches visits all stages, the others half of them; also when nodes or a stage are lost."""
    plan, mix = published, (6, 3, 3)
    for lost in ((), (7,), (7, 0), (7, 0, *published.stages[4].nodes)):
        members, able = without(published, *lost)
        plan = surely(repaired(plan, members, able, visited=mix, budget_s=6, clock=ticks()))
        assert_sound(published, plan, members, able)
        assert has_lengths(plan, mix if all(members) else (5, 3, 3))
        assert spread(plan, able) == 0
        again = surely(repair(plan, members, able, looks=0))
        assert has_lengths(again, mix if all(members) else (5, 3, 3)), "without a word, the mix stays"
    assert [lane_unit(6, each) for each in (mix, (6, 3), 3, 6)] == [15, 10, 5, 1]


# returns and newcomers


@pytest.mark.parametrize("node", others_slow([0, 10], [8, 14]))
def test_a_node_that_has_learned_its_weights_is_put_to_work(published: Plan, node: int) -> None:
    members, able = without(published)
    before = surely(repair(published, members, able - {node}, looks=24))
    after = surely(repair(before, members, able, looks=24))
    assert validate(before) == validate(after) == []
    assert node not in {each for lane in before.lanes for each in lane.path}
    assert iteration_s(after) <= iteration_s(before) * 1.002  # less travel may cost a trifle


@pytest.mark.slow
def test_a_returned_node_makes_iterations_shorter(sites: Plan) -> None:
    """With rings: by way of relays, averaging without the node may be quicker by chance."""
    sites = replace(sites, workload=replace(sites.workload, collective="ring"), expected=None)
    sites = replace(sites, stages=tuple(replace(stage, pieces=()) for stage in sites.stages))
    members, able = without(sites)
    for node in (sites.stages[0].nodes[0], sites.stages[1].nodes[0]):
        before = surely(repair(sites, members, able - {node}, looks=10))
        after = surely(repair(before, members, able, looks=10))
        assert node in {each for lane in after.lanes for each in lane.path}
        assert iteration_s(after) < iteration_s(before)


# changed figures


def with_speed(plan: Plan, node: int, factor: float) -> Cluster:
    nodes = list(plan.cluster.nodes)
    nodes[node] = replace(nodes[node], flops_per_s=nodes[node].flops_per_s * factor)
    return replace(plan.cluster, nodes=tuple(nodes))


def with_links(plan: Plan, links: Collection[tuple[int, int]], factor: float) -> Cluster:
    bandwidth = plan.cluster.bandwidth_bytes_per_s.copy()
    for a, b in links:
        bandwidth[a, b] *= factor
        bandwidth[b, a] *= factor
    return replace(plan.cluster, bandwidth_bytes_per_s=bandwidth)


def microbatches_on(plan: Plan, node: int) -> int:
    return sum(lane.microbatches for lane in plan.lanes if node in lane.path)


def test_a_lost_device_is_a_node_with_fewer_slots_and_not_a_lost_node(published: Plan) -> None:
    pairs = replace(published.cluster, nodes=tuple(replace(node, devices=2) for node in published.cluster.nodes))
    plan = replace(published, cluster=pairs, workload=replace(published.workload, max_slots=2), expected=None)
    members, able = without(plan)
    node = max(plan.stages[1].nodes, key=lambda each: microbatches_on(plan, each))
    nodes = tuple(replace(each, devices=1 + (at != node)) for at, each in enumerate(pairs.nodes))
    fewer = replace(pairs, nodes=nodes)
    assert validate(plan) == []
    assert {each.rule for each in validate(replace(plan, cluster=fewer))} == {"TC1"}
    after = surely(repair(plan, members, able, fewer, looks=24))
    assert validate(after) == []
    assert after.cluster == fewer
    assert sum(node in lane.path for lane in after.lanes) == after.slots[node] == 2
    assert iteration_s(after) < iteration_s(surely(repair(plan, *without(plan, node), looks=24)))


def test_a_slow_node_is_avoided(sites: Plan) -> None:
    node = max(sites.stages[1].nodes, key=lambda each: microbatches_on(sites, each))
    cluster = with_speed(sites, node, 0.1)
    suffered = simulate(replace(sites, cluster=cluster), Timing.FULL).iteration_s
    members, able = without(sites)
    plan = surely(repair(sites, members, able, cluster, looks=24))
    assert validate(plan) == []
    assert plan.cluster == cluster
    assert microbatches_on(plan, node) < microbatches_on(sites, node) / 2
    assert iteration_s(plan) < 0.7 * suffered


def test_a_slow_link_is_avoided(sites: Plan) -> None:
    """The first hop of the busiest lane, where it is no edge of a ring."""
    edges = {frozenset(edge) for stage in sites.stages for edge in constraints.circle(stage.ring)}
    hops = [hop for lane in sites.lanes for hop in constraints.circle(lane.path) if frozenset(hop) not in edges]
    cluster = with_links(sites, [hops[0]], 0.02)
    suffered = simulate(replace(sites, cluster=cluster), Timing.FULL).iteration_s
    members, able = without(sites)
    plan = surely(repair(sites, members, able, cluster, looks=24))
    assert validate(plan) == []
    used = {frozenset(hop) for lane in plan.lanes for hop in constraints.circle(lane.path)}
    assert frozenset(hops[0]) not in used
    assert iteration_s(plan) < suffered


def test_the_same_question_has_the_same_answer(published: Plan) -> None:
    members, able = without(published, 3, 7)
    assert repair(published, members, able, looks=10) == repair(published, members, able, looks=10)


def test_more_time_makes_no_worse_plan(published: Plan) -> None:
    members, able = without(published, 0)
    seconds = [iteration_s(surely(repair(published, members, able, looks=looks))) for looks in (3, 8, 40)]
    assert seconds[2] < seconds[0]
    assert seconds == sorted(seconds, reverse=True)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Plan, Members, set[int]]:
    """A made plan; some nodes lost, some learning, some that had no stage on one."""
    while True:
        problem = draw(problems())
        strategy = draw(st.sampled_from(list(Strategy)))
        try:
            plan = make_plan(problem, strategy, PlanRequest(budget_s=8, clock=ticks()))
            break
        except Infeasible:
            continue
    nodes = range(len(plan.cluster))
    lost = draw(st.sets(st.sampled_from(nodes), max_size=len(nodes) // 2))
    members, able = without(plan, *lost)
    for node in sorted(set(nodes) - set(plan.stage_of) - lost):
        members[draw(st.integers(0, len(members) - 1))].add(node)
        able.add(node)
    return plan, members, able - draw(st.sets(st.sampled_from(nodes), max_size=2))


def usable(plan: Plan, members: Members, able: Collection[int]) -> list[list[int]]:
    return [
        [node for node in sorted(nodes) if node in able and plan.costs.slots[stage, node] > 0]
        for stage, nodes in enumerate(members)
    ]


class NoPlan(Exception):
    """There can be none: as it should be, and nothing more to check."""


@pytest.mark.slow
@may_skip(NoPlan)
@settings(max_examples=30, deadline=None)
@given(changes())
def test_always_a_sound_plan_or_none_where_there_can_be_none(change: tuple[Plan, Members, set[int]]) -> None:
    old, members, able = change
    plan = repair(old, members, able, looks=3)
    there = usable(old, members, able)
    held = sum(map(bool, there[1:]))
    if plan is None:
        assert not there[0] or not held
        raise NoPlan
    assert there[0] and held
    assert_sound(old, plan, members, able)
    length = min(len(old.lanes[0].path), 1 + held)
    assert {len(lane.path) for lane in plan.lanes} == {length}
    # as many equal lanes as visit the stages evenly, if there is room for them
    unit = lane_unit(held + 1, length)
    room = [sum(int(old.costs.slots[stage, node]) for node in nodes) for stage, nodes in enumerate(there)]
    needed = unit * (length - 1) // held
    if room[0] >= unit and all(each >= needed for each in room[1:] if each) and plan.microbatches >= unit:
        counts = [plan.exposure[stage] for stage in range(1, len(there)) if there[stage]]
        assert max(counts) - min(counts) == (1 if plan.microbatches % unit else 0)


@may_skip(NoPlan)
@settings(max_examples=15, deadline=None)
@given(changes(), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.3, 0.7]))
def test_links_that_are_not_there_are_not_used(
    change: tuple[Plan, Members, set[int]], seed: int, missing: float
) -> None:
    old, members, able = change
    gone = np.random.default_rng(seed).random((len(old.cluster), len(old.cluster))) < missing
    bandwidth = np.where(gone, 0, old.cluster.bandwidth_bytes_per_s)
    cluster = replace(old.cluster, bandwidth_bytes_per_s=bandwidth)
    plan = repair(old, members, able, cluster, looks=3)
    there = usable(old, members, able)
    linked = (bandwidth > 0) & (bandwidth.T > 0)
    if plan is None:
        assert not any(linked[a, b] for a, b in product(there[0], [node for nodes in there[1:] for node in nodes]))
        raise NoPlan
    lanes = [violation for violation in validate(plan) if violation.where.startswith("lane")]
    assert lanes == []  # a ring may need a link that is not there
    assert broken(plan) <= {"CC3", "stages", "link"}
    assert {node for lane in plan.lanes for node in lane.path} <= able


# shares


def test_four_uneven_lanes_can_visit_evenly_what_three_cannot() -> None:
    stages = [1, 2, 3, 4, 5]
    for lanes, even in ((4, True), (3, False)):
        shares = even_exposure(visit_sets(stages, 3), stages, {3: 30}, dict.fromkeys(range(6), 9) | {0: lanes}, {})
        counts = {sum(share.microbatches for share in shares if stage in share.visits) for stage in stages}
        assert (counts == {18}) is even
        assert sum(share.microbatches for share in shares) == 30
        assert sum(share.lanes for share in shares) <= lanes


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(1, 6), st.integers(1, 3), st.data())
def test_shares_are_as_even_as_can_be(held: int, microbatches: int, lanes: int, data: st.DataObject) -> None:
    stages = list(range(1, held + 1))
    length = data.draw(st.integers(1, held))
    room = {stage: data.draw(st.integers(1, 3)) for stage in stages} | {0: lanes}
    sets = visit_sets(stages, length)
    shares = even_exposure(sets, stages, {length: microbatches}, room, {})
    found = [sum(share.microbatches for share in shares if stage in share.visits) for stage in stages]
    least = microbatches + 1
    for chosen in (each for n in range(1, lanes + 1) for each in combinations_with_replacement(sets, n)):
        if any(sum(stage in visits for visits in chosen) > room[stage] for stage in stages):
            continue
        for ends in combinations(range(1, microbatches), len(chosen) - 1):
            sizes = np.diff([0, *ends, microbatches])
            counts = [sum(n for n, visits in zip(sizes, chosen, strict=True) if stage in visits) for stage in stages]
            least = min(least, int(max(counts) - min(counts)))
    assert max(found) - min(found) == least
