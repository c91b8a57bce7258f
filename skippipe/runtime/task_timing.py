"""What tasks and links really take, kept up to date as training goes on, against what the plan counts on.

Of a node, the mean time of its tasks over the planned one. Of a link, the least lag of a message in an iteration, so
that waiting behind others does not count. Two machines' clocks differ, so only there and back together can be
measured: both directions are taken to have changed by the same share.


How long the plan says that work takes: what virtual time uses, and what emulated nodes are held to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from skippipe import dispatch
from skippipe.cluster import Cluster
from skippipe.jit import python_version
from skippipe.plan import Plan
from skippipe.runtime.coordinator.membership import LinkReports
from skippipe.runtime.messages import Averaged
from skippipe.runtime.node.ops import Op, OptimizerStep, StageTask

FIRST_CUT_NS = 60 * 10**9
WEIGHT = 0.5  # of the newest iteration in the running mean


class ClusterEstimator:
    def __init__(self, plan: Plan, whole: Cluster, now_ns: int) -> None:
        """`whole` is the cluster with all its links; those that the plan has to do without are cut for a while."""
        self._cuts: dict[frozenset[int], tuple[int, int]] = {}
        """Two nodes → until when their link counts as cut, and for how long it did."""
        self.accusations = LinkReports()
        self._whole = whole
        self.planned(plan)
        for a, b in self._was_cut:
            self._cuts[frozenset({a, b})] = now_ns + FIRST_CUT_NS, FIRST_CUT_NS

    def planned(self, plan: Plan) -> None:
        """There is a new plan; what has been measured is in its figures."""
        self._plan = plan
        missing = (plan.cluster.bandwidth_bytes_per_s == 0) & (self._whole.bandwidth_bytes_per_s > 0)
        self._was_cut = [(int(a), int(b)) for a, b in np.argwhere(missing)]
        self._nodes: dict[int, float] = {}
        self._links: dict[tuple[int, int], float] = {}

    def cut(self, a: int, b: int, now_ns: int) -> None:
        """For a while; for longer each time that it breaks again."""
        _, span_ns = self._cuts.get(frozenset({a, b}), (0, FIRST_CUT_NS // 2))
        self._cuts[frozenset({a, b})] = now_ns + 2 * span_ns, 2 * span_ns

    def is_cut(self, a: int, b: int, now_ns: int) -> bool:
        return self._cuts.get(frozenset({a, b}), (0, 0))[0] > now_ns

    def cuts(self, now_ns: int) -> frozenset[frozenset[int]]:
        """Pairs of nodes whose link counts as cut."""
        return frozenset(pair for pair, (until_ns, _) in self._cuts.items() if until_ns > now_ns)

    def update(self, reports: Mapping[int, Averaged]) -> None:
        costs = self._plan.costs
        for node, report in reports.items():
            stage = self._plan.stage_of.get(node)
            if stage is None:
                continue
            backward = costs.input_ns if self._plan.split_backward else costs.backward_ns
            each_ns = (
                costs.forward_ns[stage, node],
                costs.head_ns[node],
                backward[stage, node],
                costs.weight_ns[stage, node],
            )
            rows = [row for row in report.speeds if len(row) == 3 and row[0] < len(each_ns)]
            planned_ns = sum(int(each_ns[kind]) * count for kind, count, _ in rows)
            if planned_ns:
                self._mean(self._nodes, node, sum(took for *_, took in rows) / planned_ns)
        lags = {
            (int(row[0]), node): row[1]
            for node, report in reports.items()
            for row in report.lags
            if len(row) == 2 and 0 <= row[0] < costs.nodes
        }
        for (a, b), lag_s in lags.items():
            if a < b and (b, a) in lags:
                planned_s = float(costs.hop_ns[a, b] + costs.hop_ns[b, a]) / 1e9
                self._mean(self._links, (a, b), max(0.0, lag_s + lags[b, a]) / max(planned_s, 1e-9))

    def drift(self, share: float) -> str:
        """What differs most from the plan, if it does so by more than a share; else nothing."""
        names = [node.name for node in self._plan.cluster.nodes]
        ratios = {f"the tasks of '{names[node]}' take": ratio for node, ratio in self._nodes.items()}
        ratios |= {f"'{names[a]}' and '{names[b]}' to each other take": r for (a, b), r in self._links.items()}
        off = {what: max(ratio, 1 / max(ratio, 1e-9)) for what, ratio in ratios.items()}
        if not off or off[worst := max(off, key=lambda what: off[what])] <= 1 + share:
            return ""
        return f"{worst} {ratios[worst]:.2f} times what was planned"

    def cluster(self, now_ns: int, *, speeds: bool) -> Cluster | None:
        """The cluster without links that are cut and, if asked for, as fast as measured; None: as the plan has it."""
        cut = [tuple(pair) for pair in self.cuts(now_ns)]
        if not cut and not self._was_cut and not (speeds and (self._nodes or self._links)):
            return None
        return self._without(cut, speeds=speeds)

    def as_found(self) -> Cluster:
        """The cluster as fast as measured, for whoever plans anew: also with links that are cut for a while."""
        return self._without([], speeds=True)

    def _without(self, cut: Sequence[tuple[int, ...]], *, speeds: bool) -> Cluster:
        cluster = self._plan.cluster
        nodes = tuple(
            replace(node, flops_per_s=node.flops_per_s / max(self._nodes.get(index, 1.0) if speeds else 1.0, 1e-6))
            for index, node in enumerate(cluster.nodes)
        )
        latency_s = cluster.latency_s.copy()
        bandwidth = cluster.bandwidth_bytes_per_s.copy()
        for (a, b), ratio in self._links.items() if speeds else ():
            for pair in ((a, b), (b, a)):
                latency_s[pair] = max(0.0, (latency_s[pair] + cluster.hop_overhead_s) * ratio - cluster.hop_overhead_s)
                bandwidth[pair] /= max(ratio, 1e-6)
        for a, b in self._was_cut:
            bandwidth[a, b] = self._whole.bandwidth_bytes_per_s[a, b]
        for a, b in cut:
            bandwidth[a, b] = bandwidth[b, a] = 0.0
        return replace(cluster, nodes=nodes, latency_s=latency_s, bandwidth_bytes_per_s=np.asarray(bandwidth))

    @staticmethod
    def _mean(means: dict, which: object, ratio: float) -> None:  # type: ignore[type-arg]
        means[which] = means[which] * (1 - WEIGHT) + ratio * WEIGHT if which in means else ratio


is_weights = python_version(dispatch.is_weights)


def planned_ns(plan: Plan, stage: int, node: int, work: Op) -> int:
    """What the plan does not speak of takes no time. The node may have come to the stage later than the plan."""
    costs = plan.costs
    if isinstance(work, OptimizerStep):
        return int(costs.optimizer_ns[stage, node])
    if not isinstance(work, StageTask):
        return 0
    length = work.length
    if work.step < length:
        return int(costs.forward_ns[stage, node])
    if work.step == length:
        return int(costs.head_ns[node])
    if is_weights(work.step, length):
        return int(costs.weight_ns[stage, node])
    return int((costs.input_ns if plan.split_backward else costs.backward_ns)[stage, node])
