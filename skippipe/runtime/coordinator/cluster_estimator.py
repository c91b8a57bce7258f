"""How long tasks and hops take, measured while training.

The estimator has for each node the mean time of its tasks over the planned one, and for each link the least lag of a
message in an iteration, so that queueing behind others does not count. Two machines' clocks differ, so only there and
back together can be measured: both directions are taken to have changed by the same ratio. If all links of a node that
are measured have become slower, or all faster, its own upload and download have, by what is common to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import combinations
from math import isinf

import numpy as np

from skippipe.cluster import Cluster, Node, with_relay
from skippipe.plan import Plan
from skippipe.runtime.coordinator.membership import LinkReports
from skippipe.runtime.messages import Averaged
from skippipe.runtime.relay_pool import RelayInfo

FIRST_DOWN_NS = 60 * 10**9
NEWEST_WEIGHT = 0.5  # of the newest iteration in the running mean


class ClusterEstimator:
    """Measured speeds of nodes and links against the plan, and links that are down."""

    def __init__(
        self,
        plan: Plan,
        full: Cluster,
        now_ns: int,
        out_only: Mapping[int, str] | None = None,
        relays: Mapping[str, RelayInfo] | None = None,
        relay_only: Set[frozenset[int]] = frozenset(),
    ) -> None:
        """`full` is the cluster with all its links; those that the plan does without are down for a while. `out_only`
        has at any time the nodes that cannot be called, and their sites: two of them cannot meet, unless they are of
        one site or there are `relays`. `relay_only` has other pairs that meet at relays; without one, their links are
        down like any that fail."""
        self._out_only = out_only if out_only is not None else {}
        self._relay_only = relay_only
        self._relays = relays if relays is not None else {}
        self._down: dict[frozenset[int], tuple[int, int]] = {}
        """Two nodes → until when their link counts as down, and for how long it did."""
        self.link_reports = LinkReports()
        self._full = full
        self.devices: dict[int, int] = {}
        """Node → how many of its devices work, if not as many as its file says."""
        self.replanned(plan)
        for a, b in self._excluded:
            self._down[frozenset({a, b})] = now_ns + FIRST_DOWN_NS, FIRST_DOWN_NS

    def replanned(self, plan: Plan) -> None:
        """There is a new plan, which counts on what has been measured so far."""
        self._plan = plan
        missing = (plan.cluster.bandwidth_bytes_per_s == 0) & (self._full.bandwidth_bytes_per_s > 0)
        self._excluded = [(int(a), int(b)) for a, b in np.argwhere(missing)]
        self._nodes: dict[int, float] = {}
        self._links: dict[tuple[int, int], float] = {}

    def exclude(self, a: int, b: int, now_ns: int) -> None:
        """Count a link as down for a while; for longer each time that it breaks again."""
        _, span_ns = self._down.get(frozenset({a, b}), (0, FIRST_DOWN_NS // 2))
        self._down[frozenset({a, b})] = now_ns + 2 * span_ns, 2 * span_ns

    def is_down(self, a: int, b: int, now_ns: int) -> bool:
        return self._down.get(frozenset({a, b}), (0, 0))[0] > now_ns or frozenset({a, b}) in self.unreachable_pairs()

    def unreachable_pairs(self) -> frozenset[frozenset[int]]:
        """Pairs of nodes of which neither can call the other, and that have no relay to meet at."""
        return frozenset() if self._relays else self._out_only_pairs()

    def _out_only_pairs(self) -> frozenset[frozenset[int]]:
        sites = self._out_only
        pairs = combinations(sorted(sites), 2)
        return frozenset(frozenset((a, b)) for a, b in pairs if not sites[a] or sites[a] != sites[b])

    def relayed_pairs(self) -> frozenset[frozenset[int]]:
        """Pairs that meet at relays, if there are any."""
        return self._out_only_pairs() | self._relay_only

    def relay_came(self) -> bool:
        """Links that were down for want of a relay are not any more; does the plan do without such a link?"""
        pairs = self.relayed_pairs()
        for pair in pairs & self._down.keys():
            del self._down[pair]
        return any(frozenset(pair) in pairs for pair in self._excluded)

    def down_links(self, now_ns: int) -> frozenset[frozenset[int]]:
        """Pairs of nodes whose link counts as down."""
        return self.unreachable_pairs() | {pair for pair, (until_ns, _) in self._down.items() if until_ns > now_ns}

    def update(self, reports: Mapping[int, Averaged]) -> None:
        """Take in the measurements of an iteration."""
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
                self._average(self._nodes, node, sum(took for *_, took in rows) / planned_ns)
        lags = {
            (int(row[0]), node): row[1]
            for node, report in reports.items()
            for row in report.lags
            if len(row) == 2 and 0 <= row[0] < costs.nodes
        }
        for (a, b), lag_s in lags.items():
            if a < b and (b, a) in lags:
                planned_s = float(costs.hop_ns[a, b] + costs.hop_ns[b, a]) / 1e9
                self._average(self._links, (a, b), max(0.0, lag_s + lags[b, a]) / max(planned_s, 1e-9))

    def drift(self, share: float) -> str:
        """The node or link that differs most from the plan, if by more than a share; empty if none does."""
        names = [node.name for node in self._plan.cluster.nodes]
        ratios = {f"the tasks of '{names[node]}' take": ratio for node, ratio in self._nodes.items()}
        ratios |= {f"'{names[a]}' and '{names[b]}' to each other take": r for (a, b), r in self._links.items()}
        off = {what: max(ratio, 1 / max(ratio, 1e-9)) for what, ratio in ratios.items()}
        if not off or off[worst := max(off, key=lambda what: off[what])] <= 1 + share:
            return ""
        return f"{worst} {ratios[worst]:.2f} times what was planned"

    def cluster(self, now_ns: int, *, speeds: bool) -> Cluster | None:
        """The cluster without links that are down and, if asked for, as fast as measured; None: as the plan has it."""
        down = [tuple(pair) for pair in self.down_links(now_ns)]
        relayed = self._within_relays(self._plan.cluster) != self._plan.cluster
        measured = speeds and (self._nodes or self._links)
        if not (down or self._excluded or relayed or self.devices or measured):
            return None
        return self._estimate(down, speeds=speeds)

    def measured_cluster(self) -> Cluster:
        """The cluster as fast as measured, for later plans: also with links that are down for a while."""
        return self._estimate([tuple(pair) for pair in self.unreachable_pairs()], speeds=True)

    def _estimate(self, down: Sequence[tuple[int, ...]], *, speeds: bool) -> Cluster:
        cluster = self._plan.cluster
        nodes = tuple(self._estimate_node(index) if speeds else node for index, node in enumerate(cluster.nodes))
        nodes = tuple(replace(node, devices=self.devices.get(at, node.devices)) for at, node in enumerate(nodes))
        latency_s = cluster.latency_s.copy()
        bandwidth = cluster.bandwidth_bytes_per_s.copy()
        for (a, b), ratio in self._links.items() if speeds else ():
            for pair in ((a, b), (b, a)):
                latency_s[pair] = max(0.0, (latency_s[pair] + cluster.hop_overhead_s) * ratio - cluster.hop_overhead_s)
                if ratio > 1:  # a link that a node's own rate slows down is slower than that now
                    bandwidth[pair] = min(bandwidth[pair], self._plan.costs.bandwidth_bytes_per_s[pair])
                bandwidth[pair] /= max(ratio, 1e-6)
        for a, b in self._excluded:
            bandwidth[a, b] = self._full.bandwidth_bytes_per_s[a, b]
        for a, b in down:
            bandwidth[a, b] = bandwidth[b, a] = 0.0
        return self._within_relays(
            replace(cluster, nodes=nodes, latency_s=latency_s, bandwidth_bytes_per_s=np.asarray(bandwidth))
        )

    def _within_relays(self, cluster: Cluster) -> Cluster:
        """What pairs that meet at relays have of each other, through those that there are."""
        if not self._relays:
            return cluster
        total = sum(each.bytes_per_s for each in self._relays.values())
        of_node = max(each.node_bytes_per_s for each in self._relays.values())
        return cluster if isinf(min(total, of_node)) else with_relay(cluster, self.relayed_pairs(), total, of_node)

    def _estimate_node(self, index: int) -> Node:
        node = self._plan.cluster.nodes[index]
        ratios = [ratio for pair, ratio in self._links.items() if index in pair]
        common = 1.0
        if len(ratios) > 1:  # of one link alone, it may be the other end
            common = max(1.0, min(ratios)) * min(1.0, max(ratios))
        rates = node.upload_bytes_per_s, node.download_bytes_per_s
        upload, download = (max(1.0, rate / max(common, 1e-6)) if rate else None for rate in rates)
        flops_per_s = node.flops_per_s / max(self._nodes.get(index, 1.0), 1e-6)
        return replace(node, flops_per_s=flops_per_s, upload_bytes_per_s=upload, download_bytes_per_s=download)

    @staticmethod
    def _average(means: dict, which: object, ratio: float) -> None:  # type: ignore[type-arg]
        means[which] = means[which] * (1 - NEWEST_WEIGHT) + ratio * NEWEST_WEIGHT if which in means else ratio
