"""What tasks and links really take is noticed, and the plan follows it; links that are cut come back after a while."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import combinations, permutations
from math import inf

import pytest

from skippipe.cluster import with_relay
from skippipe.constraints import lanes_through
from skippipe.optim.config import OptimConfig
from skippipe.plan import Plan
from skippipe.runtime.coordinator.cluster_estimator import FIRST_DOWN_NS, ClusterEstimator
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.messages import Averaged, Begin, LinkDown, Ready
from skippipe.runtime.relay_pool import RelayInfo
from skippipe.runtime.simulation.fault_injection import Fault, slow_link, slow_node
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from tests.helpers.plans import wide_plan
from tests.helpers.single_coordinator import HELLO, CoordinatorHarness, RecordingEnv, is_now, new_coordinator
from tests.helpers.single_node import AT_ONCE, plan_of

LEARNING = OptimConfig(warmup=1, iterations=10)


def run(fault: Fault, drift: float, iterations: int = 6) -> VirtualCluster:
    recovery = RecoverySettings(drift=drift, planning=timedelta(seconds=0.2))
    cluster = VirtualCluster(wide_plan(), CoordinatorSettings(LEARNING, iterations, recovery=recovery), faults=[fault])
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    return cluster


@pytest.mark.parametrize(
    ("fault", "what"), [(slow_node(3, 200.0), "the tasks of 'n3'"), (slow_link(3, 6), "'n3' and 'n6'")]
)
def test_a_plan_is_renewed_when_things_take_longer(fault: Fault, what: str) -> None:
    cluster = run(fault.at(iteration=1), drift=0.5)
    slow = [event for _, event in cluster.events if event.kind == "slow" and "times what was planned" in event.text]
    assert slow[0].text.startswith(what), slow
    assert slow[0].iteration in (1, 2)
    assert any(event.kind == "replanned" for _, event in cluster.events)
    undisturbed_s, while_slow_s, after_s = (cluster.reports[at].seconds for at in (0, 1, 5))
    assert while_slow_s > 1.5 * undisturbed_s, "the fault is felt"
    assert after_s < 0.8 * while_slow_s, "and avoided"


def test_a_slow_node_gets_fewer_lanes() -> None:
    plan = run(slow_node(3, 200.0).at(iteration=1), drift=0.5).coordinator.plan
    load = {node: sum(plan.lanes[lane].microbatches for lane in lanes)
            for node, lanes in lanes_through([lane.path for lane in plan.lanes]).items()}  # fmt: skip
    assert load.get(3, 0) < min(load[2], load[4])
    assert plan.cluster.nodes[3].flops_per_s < plan.cluster.nodes[2].flops_per_s / 5


def test_without_drift_nothing_changes() -> None:
    cluster = run(slow_node(3).at(iteration=1), drift=0.0)
    assert not any(event.kind == "replanned" for _, event in cluster.events)
    assert cluster.coordinator.plan.lanes == wide_plan().lanes


def test_what_is_as_planned_does_not_drift() -> None:
    cluster = VirtualCluster(wide_plan(), CoordinatorSettings(LEARNING, 4, recovery=RecoverySettings(drift=0.05)))
    cluster.run()
    assert not cluster.events


def test_a_cut_is_forgotten_after_a_while_and_later_each_time() -> None:
    plan = wide_plan()
    measured = ClusterEstimator(plan, plan.cluster, 0)
    assert measured.cluster(0, speeds=False) is None
    measured.exclude(3, 6, 0)
    assert measured.is_down(6, 3, FIRST_DOWN_NS - 1)
    without = measured.cluster(1, speeds=False)
    assert without is not None
    assert without.bandwidth_bytes_per_s[3, 6] == without.bandwidth_bytes_per_s[6, 3] == 0
    measured.replanned(replace(plan, cluster=without, expected=None))
    assert not measured.is_down(3, 6, FIRST_DOWN_NS)
    again = measured.cluster(FIRST_DOWN_NS, speeds=False)
    assert again is not None
    assert (again.bandwidth_bytes_per_s == plan.cluster.bandwidth_bytes_per_s).all()
    measured.exclude(3, 6, FIRST_DOWN_NS)
    assert measured.is_down(3, 6, 3 * FIRST_DOWN_NS - 1)


def test_a_plan_from_before_a_restart_says_which_links_were_cut() -> None:
    plan = wide_plan()
    before = ClusterEstimator(plan, plan.cluster, 0)
    before.exclude(0, 2, 0)
    cut = before.cluster(0, speeds=False)
    assert cut is not None
    after = ClusterEstimator(replace(plan, cluster=cut, expected=None), plan.cluster, 5)
    assert after.is_down(0, 2, 6)
    assert not after.is_down(0, 3, 6)
    assert not after.is_down(0, 2, FIRST_DOWN_NS + 5)


def lags(plan: Plan, slower: dict[frozenset[int], float]) -> dict[int, Averaged]:
    """Reports of an iteration in which messages between these nodes take so many times as long as planned."""
    found: dict[int, list[list[float]]] = {}
    for pair, ratio in slower.items():
        for sender, receiver in permutations(pair):
            lag_s = ratio * float(plan.costs.hop_ns[sender, receiver]) / 1e9
            found.setdefault(receiver, []).append([float(sender), lag_s])
    return {node: Averaged(0, 0, 0.0, [], [], [], [], rows) for node, rows in found.items()}


@pytest.mark.parametrize(
    ("slower", "rates"),
    [
        ({(0, 2): 2.0, (0, 3): 3.0, (1, 2): 1.0, (1, 3): 1.0}, [1 / 2, 1, 1, 1]),
        ({(0, 2): 0.5, (0, 3): 0.4, (1, 2): 1.0, (1, 3): 1.0}, [2, 1, 1, 1]),
        ({(0, 2): 2.0}, [1, 1, 1, 1]),
    ],
)
def test_rates_of_a_node_follow_what_all_its_links_have_in_common(
    slower: dict[tuple[int, int], float], rates: list[float]
) -> None:
    plan = wide_plan()
    lines = (replace(node, upload_bytes_per_s=1e4, download_bytes_per_s=2e4) for node in plan.cluster.nodes)
    plan = replace(plan, cluster=replace(plan.cluster, nodes=tuple(lines)), expected=None)
    estimator = ClusterEstimator(plan, plan.cluster, 0)
    estimator.update(lags(plan, {frozenset(pair): ratio for pair, ratio in slower.items()}))
    found = estimator.measured_cluster()
    assert [node.upload_bytes_per_s for node in found.nodes[:4]] == pytest.approx([1e4 * rate for rate in rates])
    assert [node.download_bytes_per_s for node in found.nodes[:4]] == pytest.approx([2e4 * rate for rate in rates])
    names = [node.name for node in found.nodes]
    for (sender, receiver), ratio in slower.items():
        if ratio > 1:
            before, now = (each.hop(names[sender], names[receiver])[1] for each in (plan.cluster, found))
            assert now == pytest.approx(before / ratio), "a link is slower than the line that it shares"


# Nodes that cannot be called


def out_only(plan: Plan, *nodes: int, may_relay: bool = False) -> CoordinatorHarness:
    """All nodes have joined; some cannot be called."""
    env = RecordingEnv()
    harness = CoordinatorHarness(new_coordinator(env, 2, plan, recovery=AT_ONCE), env)
    harness.coordinator.membership.may_relay = may_relay
    for node in sorted(plan.stage_of):
        if node in nodes:
            harness.coordinator.on_reach(node, "")
        harness.send(node, HELLO)
    return harness


def test_nodes_that_cannot_meet_are_kept_apart_or_named() -> None:
    """Paths avoid their link, and gradients of one stage go over others; where that cannot be, the run ends before it
    begins."""
    plan = plan_of(4, ((0, 1), (2, 3)), ((0, 2), (1, 3)))
    harness = out_only(plan, 0, 2)
    assert is_now(harness.coordinator, CoordinatorState.PREPARING)
    paths = {frozenset(lane.path) for lane in harness.coordinator.plan.lanes}
    assert not any({0, 2} <= path for path in paths) and len(paths) > 1
    assert harness.env.event_kinds() == ["joined", "joined", "replanned"]
    harness = out_only(plan, 2, 3)
    assert is_now(harness.coordinator, CoordinatorState.PREPARING)
    assert not {(2, 3), (3, 2)} & set(harness.coordinator.plan.stages[1].averaging.links)
    harness = out_only(plan, 0, 1, 2, 3)
    assert is_now(harness.coordinator, CoordinatorState.FAILED)
    assert harness.coordinator.failure.startswith("nodes 'n0' and 'n1' can only call out, so they cannot reach each")


def test_nodes_behind_one_router_meet_there_without_a_relay() -> None:
    """Those of another site, or of none that is known, do not."""
    plan = plan_of(4, ((0, 1), (2, 3)), ((0, 2), (1, 3)))
    coordinator = out_only(plan).coordinator
    for node, site in enumerate(("198.51.100.7", "203.0.113.1", "198.51.100.7", "")):
        coordinator.on_reach(node, f"192.168.1.{node}:5556", site)
    found = coordinator._replanner.estimator.unreachable_pairs()
    assert found == {frozenset(pair) for pair in combinations(range(4), 2)} - {frozenset({0, 2})}


def test_nodes_that_only_call_out_wait_for_a_relay_and_for_its_return() -> None:
    """Nobody is evicted when it is gone: the iteration begins again when it is back, and the plan stays as it is."""
    plan = plan_of(4, ((0, 1), (2, 3)), ((0, 2), (1, 3)))
    harness = out_only(plan, 0, 1, 2, 3, may_relay=True)
    coordinator, unlimited = harness.coordinator, RelayInfo("10.0.0.1:5560", inf, inf, 0)
    assert is_now(coordinator, CoordinatorState.JOINING) and harness.env.event_kinds()[-1] == "paused"
    coordinator.on_relay("hub", unlimited)
    assert is_now(coordinator, CoordinatorState.PREPARING) and coordinator.plan.lanes == plan.lanes
    for node in range(4):
        harness.send(node, Ready())
    harness.iterate()
    coordinator.on_relay("hub", None)
    harness.env.new_messages()
    harness.send(0, LinkDown(2, 1)).send(2, LinkDown(0, 1)).send(2, LinkDown(3, 1))
    assert is_now(coordinator, CoordinatorState.PAUSED) and not harness.env.logged("disconnect")
    coordinator.on_relay("hub", unlimited)
    harness.send(0, LinkDown(2, 1))  # they have not met again yet
    harness.wait(6)
    assert is_now(coordinator, CoordinatorState.TRAINING), harness.env.events
    assert any(isinstance(each, Begin) for each in harness.env.new_messages()[0])
    assert {lane.path for lane in coordinator.plan.lanes} == {lane.path for lane in plan.lanes}
    coordinator.on_relay("hub", None)
    coordinator.on_relay("hub", unlimited)
    cuts = harness.env.event_kinds().count("link-down")
    epoch = coordinator._commits.epoch
    harness.send(0, LinkDown(1, epoch)).send(0, LinkDown(2, epoch))
    assert harness.env.event_kinds().count("link-down") == cuts, "it was back before anybody noticed"
    harness.iterate()
    assert coordinator.failure == "" and not harness.env.logged("disconnect")


def test_two_that_cannot_call_each_other_meet_at_a_relay_and_are_not_to_blame_without_one() -> None:
    """Both can be called from the coordinator. Without a relay their link is down for a while, like any other."""
    plan = plan_of(4, ((0, 1), (2, 3)), ((0, 2), (1, 3)))
    harness = out_only(plan)
    coordinator = harness.coordinator
    for node in range(4):
        harness.send(node, Ready())
    coordinator.on_relay_only(0, 2, relay_only=True)
    harness.send(0, LinkDown(2, 1))
    assert coordinator._replanner.estimator.link_reports.add_costly(0, 3, 0) == [3], "the first that counts"
    assert not coordinator.plan.cluster.bandwidth_bytes_per_s[[0, 2], [2, 0]].any()
    coordinator.on_relay("hub", RelayInfo("10.0.0.1:5560", 1e4, inf, 0))
    harness.iterate()
    assert coordinator.plan.cluster == with_relay(plan.cluster, {frozenset({0, 2})}, 1e4)
    assert harness.env.event_kinds()[0] == "link-down" and not harness.env.logged("disconnect")


def test_a_relay_that_never_comes_is_named() -> None:
    harness = out_only(plan_of(4, ((0, 1), (2, 3)), ((0, 2), (1, 3))), 0, 1, 2, 3, may_relay=True)
    harness.wait(601)
    assert harness.coordinator.failure == "waited 600 s for a relay to join"


def test_plans_count_on_what_a_relay_carries() -> None:
    plan = wide_plan()
    nodes = range(len(plan.cluster))
    pairs = {frozenset(pair) for pair in combinations(nodes, 2)}
    rates = {"hub": RelayInfo("10.0.0.1:5560", 1e4, inf, 0), "spare": RelayInfo("10.0.0.2:5560", 2e4, inf, 0)}
    estimator = ClusterEstimator(plan, plan.cluster, 0, dict.fromkeys(nodes, ""), rates)
    found = estimator.cluster(0, speeds=False)
    assert found == with_relay(plan.cluster, pairs, 3e4) != plan.cluster
    assert (
        ClusterEstimator(replace(plan, cluster=found), found, 0, dict.fromkeys(nodes, ""), rates).cluster(
            0, speeds=False
        )
        is None
    )
    rates["hub"] = RelayInfo("10.0.0.1:5560", inf, inf, 0)
    assert estimator.cluster(0, speeds=False) is None
    rates["hub"] = RelayInfo("10.0.0.1:5560", inf, 5e3, 0)
    rates["spare"] = RelayInfo("10.0.0.2:5560", inf, 4e3, 0)
    assert estimator.cluster(0, speeds=False) == with_relay(plan.cluster, pairs, inf, 5e3) != plan.cluster
