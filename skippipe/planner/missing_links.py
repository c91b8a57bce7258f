"""Plans for clusters in which links are missing, such as those between nodes that can only call out.

A search whose paths have to keep to the links that are there gets stuck where slots are scarce: nearly every change of
one path leads over a link that is missing. So it begins on a cluster that has a detour in the place of every such link,
by way of a third node. Detours take longer and longer, until the paths do without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from skippipe.cluster import Cluster
from skippipe.jit import Flags
from skippipe.plan import Plan, Stage
from skippipe.planner.problem import Problem, averagings
from skippipe.simulator import simulate
from skippipe.validate import validate

DETOURS = (1.0, 3.0, 10.0)  # times what a message takes by way of a third node
MOST_DETOURS = 0.5  # of the seconds or changes, for plans over detours
LEAST_DETOURS = 0.02
FindPlan = Callable[[Problem, Plan | None, float], Plan]
"""From a problem, a plan to begin with, and the share of the budget that is to be left afterwards to a plan."""


def missing_links(cluster: Cluster) -> Flags:
    found: Flags = cluster.bandwidth_bytes_per_s == 0
    np.fill_diagonal(found, val=False)
    return found


def detours_share(cluster: Cluster) -> float:
    """Share of the seconds or changes for plans over detours: that of the links that are missing. Half of them for any
    made plans 1% to 5% slower on published20, and took up to three times as long for as many changes (docs/results.md).
    """
    missing = missing_links(cluster)
    return min(MOST_DETOURS, max(LEAST_DETOURS, float(missing.sum()) / max(1, missing.size - len(missing))))


def with_detours(cluster: Cluster, message_bytes: float, times: float) -> Cluster:
    """The cluster with a way over a third node in the place of every missing link, the fastest for a message of this
    size, and so many times as slow. Links that no third node makes up for stay missing."""
    latency_s, bandwidth = cluster.latency_s, cluster.bandwidth_bytes_per_s.copy()
    np.fill_diagonal(bandwidth, val=0.0)  # no node is on the way to itself
    with_latency_s, with_bandwidth = latency_s.copy(), cluster.bandwidth_bytes_per_s.copy()
    for a, b in np.argwhere(missing_links(cluster)):
        carried = np.minimum(bandwidth[a], bandwidth[:, b])
        ways = np.flatnonzero(carried)
        if len(ways):
            takes_s = latency_s[a, ways] + latency_s[ways, b] + message_bytes / carried[ways]
            third = ways[takes_s.argmin()]
            with_latency_s[a, b] = times * (latency_s[a, third] + latency_s[third, b])
            with_bandwidth[a, b] = carried[third] / times
    return replace(cluster, latency_s=with_latency_s, bandwidth_bytes_per_s=with_bandwidth)


def plan_over_detours(problem: Problem, find_plan: FindPlan) -> list[Plan]:
    """Plans over links that are there, found by way of detours; none if the search did not get rid of them."""
    found: list[Plan] = []
    start = None
    for number, times in enumerate(DETOURS, 1):
        cluster = with_detours(problem.cluster, problem.workload.activation_bytes, times)
        if missing_links(cluster).any():
            break
        start = find_plan(replace(problem, cluster=cluster), start, number / len(DETOURS))
        plan = _over_links(problem, start)
        if not validate(plan):
            found.append(plan.promising(simulate(plan, problem.timing)))
    return found


def _over_links(problem: Problem, plan: Plan) -> Plan:
    """The plan on the cluster as it is."""
    same = replace(problem, layers=plan.layers)
    nodes = tuple(stage.nodes for stage in plan.stages)
    stages = tuple(map(Stage.of, plan.layers, averagings(same, nodes)))
    return replace(plan, cluster=problem.cluster, stages=stages, expected=None, lower_bound_ns=None)
