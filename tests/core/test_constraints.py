"""Each rule against its plain definition."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe import constraints
from skippipe.plan import Lane, Plan, Stage
from skippipe.simulator import Deadlock, simulate
from skippipe.timeline import Timing
from skippipe.workload import Workload
from tests.helpers import oracle
from tests.helpers.plans import TINY, plans, uniform_cluster


def swapped_pairs(visits: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in combinations(visits, 2) if b < a]


def test_cc2_against_its_definition_for_every_path_over_six_stages() -> None:
    allowed = 0
    for length in range(1, 6):
        for rest in permutations(range(1, 6), length):
            visits = (0, *rest)
            pairs = swapped_pairs(visits)
            holds = all(a - b == 1 for a, b in pairs) and len(pairs) <= constraints.MAX_SWAPS
            assert (constraints.cc2_broken_at(visits) is None) == holds, visits
            allowed += holds
    assert allowed == 69  # of 325


def test_cc2_names_the_hop() -> None:
    assert constraints.cc2_broken_at((0, 2, 1, 4, 3)) is None
    assert constraints.cc2_broken_at((0, 1, 4, 2)) == 3
    assert constraints.cc2_broken_at((0, 3, 2, 1)) == 3
    assert constraints.cc2_broken_at((0, 2, 1, 4, 3, 6, 5)) == 6  # a third swap
    assert constraints.cc2_broken_at((0, 1, 1)) == 2


def test_cc1_names_the_hop() -> None:
    assert constraints.cc1_broken_at((0, 1, 2)) is None
    assert constraints.cc1_broken_at((1, 0, 2)) == 0
    assert constraints.cc1_broken_at((0, 1, 0)) == 2


def test_cc3_counts_microbatches_not_lanes() -> None:
    counts = constraints.exposure([(0, 1), (0, 2)], [2, 1], 3)
    assert counts == [3, 2, 1]
    assert constraints.cc3_uneven(counts) == {1: 2, 2: 1}
    assert constraints.cc3_uneven(constraints.exposure([(0, 1), (0, 2), (0, 2)], [2, 1, 1], 3)) == {}


def test_tc1_counts_lanes() -> None:
    paths = [(0, 1), (0, 2), (3, 1)]
    assert constraints.tc1_overfull(paths, {0: 1, 1: 2, 2: 1, 3: 1}) == {0: [0, 1]}


def test_deadlock_needs_a_circle_of_overfull_nodes() -> None:
    slots = dict.fromkeys(range(4), 1)
    crossing = [(0, 2, 3), (1, 3, 2)]
    assert constraints.deadlock_cycle(crossing, slots) == [2, 3, 2]
    assert constraints.deadlock_cycle(crossing, {**slots, 3: 2}) is None
    assert constraints.deadlock_cycle([(0, 2, 3), (1, 2, 3)], slots) is None
    assert constraints.deadlock_cycle([(0, 1)], {0: 1, 1: 0}) == [1, 1]  # no slot at all
    row = [tuple(range(1500)), tuple(range(1500))]
    assert constraints.deadlock_cycle(row, dict.fromkeys(range(1500), 1)) is None


@given(st.lists(st.permutations(range(4)).flatmap(lambda p: st.integers(1, 4).map(lambda n: tuple(p[:n]))), max_size=4))
def test_a_deadlock_circle_is_one(paths: list[tuple[int, ...]]) -> None:
    """Every step of it is taken by some path, between nodes that are overfull."""
    slots = dict.fromkeys(range(4), 1)
    circle = constraints.deadlock_cycle(paths, slots)
    overfull = set(constraints.tc1_overfull(paths, slots))
    steps = {step for path in paths for step in combinations(path, 2) if overfull.issuperset(step)}
    assert (circle is not None) == oracle.has_circle({(str(a), str(b)) for a, b in steps})
    if circle:
        assert circle[0] == circle[-1]
        assert set(pairwise(circle)) <= steps


def locks_up(plan: Plan, timing: Timing) -> bool:
    try:
        simulate(plan, timing)
    except Deadlock:
        return True
    return False


def test_what_the_deadlock_rule_passes_never_locks_up() -> None:
    """And the rule is not so cautious that it says little: of the plans with a circle, some do lock up."""
    found = Counter[tuple[bool, bool]]()

    @settings(max_examples=100, deadline=None)
    @given(plans(), st.sampled_from(list(Timing)))
    def lock_up(plan: Plan, timing: Timing) -> None:
        circle = constraints.deadlock_cycle([lane.path for lane in plan.lanes], plan.slots)
        locked = locks_up(plan, timing)
        assert circle is not None or not locked
        found[circle is not None, locked] += 1

    lock_up()
    assert found[False, False] > 25
    assert found[True, True] > 1, found


@settings(max_examples=30, deadline=None)
@given(plans(), st.sampled_from(list(Timing)), st.data())
def test_a_node_without_a_slot_lets_nothing_through(plan: Plan, timing: Timing, data: st.DataObject) -> None:
    full = data.draw(st.sampled_from(sorted({node for lane in plan.lanes for node in lane.path})))
    nodes = tuple(
        replace(node, memory_bytes=1) if number == full else node for number, node in enumerate(plan.cluster.nodes)
    )
    plan = replace(plan, cluster=replace(plan.cluster, nodes=nodes))
    assert plan.slots[full] == 0
    circle = constraints.deadlock_cycle([lane.path for lane in plan.lanes], plan.slots)
    assert circle is not None
    assert locks_up(plan, timing)


def test_crossing_lanes_do_lock_up() -> None:
    """The rule is not only cautious: on this plan the simulator really runs into it."""
    work = Workload(TINY, sequence_tokens=16, microbatches=2, max_slots=1)
    stages = tuple(Stage(k, (n,), (n,)) for n, k in enumerate(work.layer_split(2)))
    plan = Plan(uniform_cluster(2), work, stages, (Lane((0, 1), 1), Lane((1, 0), 1)))
    assert constraints.deadlock_cycle([lane.path for lane in plan.lanes], plan.slots) == [0, 1, 0]
    with pytest.raises(Deadlock, match="0 of 2"):
        simulate(plan)
