"""Several profiling results merged into one cluster, and what is doubtful about it.

Which nodes there are, and which reach each other, is as in the newest result. Figures are medians over the results: of
those whose repeats agree, if there are any. How fast a node is depends on what it computes, so its speed is merged only
from results with the same work as the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeVar

import numpy as np

from skippipe.cluster import Cluster, Node
from skippipe.errors import UserError
from skippipe.profiling.estimators import LinkEstimate, NodeEstimate
from skippipe.profiling.results import Ends, ProfileResult

FAR = 1.5  # times what it was before
NEAR_S = 0.001  # latencies that differ by less are alike

Estimate = TypeVar("Estimate", LinkEstimate, NodeEstimate)


def merge_results(results: Sequence[ProfileResult], name: str) -> Cluster:
    """A cluster from results, the oldest first."""
    names = _present(results)
    if not names:
        raise UserError("no node has been measured: there is nothing to write")
    latency_s = np.zeros((len(names), len(names)))
    bandwidth = np.zeros((len(names), len(names)))
    for i, sender in enumerate(names):
        for j, receiver in enumerate(names):
            found = _of_link(results, (sender, receiver))
            if found:
                latency_s[i, j] = _typical(found, lambda link: link.latency_s)
                bandwidth[i, j] = _typical(found, lambda link: link.bandwidth_bytes_per_s)
    return Cluster(name, tuple(_node(results, each) for each in names), latency_s, bandwidth)


def outliers(results: Sequence[ProfileResult]) -> list[str]:
    """What is odd in the newest result: figures whose repeats disagree, or that are far from earlier ones."""
    *before, newest = results
    found = []
    for name, node in newest.nodes.items():
        if not node.is_steady:
            found.append(f"'{name}': its passes lie {node.spread:.0%} apart; is it busy with something else?")
        was = _same_work([result for result in [*before, newest] if name in result.nodes], name)[:-1]
        if was and _far(node.flops_per_s, earlier := _typical(was, lambda each: each.flops_per_s)):
            found.append(f"'{name}' computes {node.flops_per_s:.3g} operations a second, {earlier:.3g} before")
    for (sender, receiver), link in newest.links.items():
        if link is None:
            continue
        way = f"'{sender}' to '{receiver}'"
        if not link.is_steady:
            found.append(f"{way}: the bandwidth of its transfers lies {link.spread:.0%} apart")
        known = _of_link(before, (sender, receiver))
        if not known:
            continue
        carried = _typical(known, lambda each: each.bandwidth_bytes_per_s)
        if _far(link.bandwidth_bytes_per_s, carried):
            found.append(f"{way}: {link.bandwidth_bytes_per_s / 1e6:.3g} MB/s, {carried / 1e6:.3g} MB/s before")
        lasted_s = _typical(known, lambda each: each.latency_s)
        if abs(link.latency_s - lasted_s) > NEAR_S and _far(link.latency_s, lasted_s):
            found.append(f"{way}: latency {1000 * link.latency_s:.3g} ms, {1000 * lasted_s:.3g} ms before")
    return found


def unreachable(results: Sequence[ProfileResult]) -> list[Ends]:
    """Pairs of nodes that have no link, as far as it was measured."""
    names = set(_present(results))
    tried = dict.fromkeys(ends for result in results for ends in result.links if set(ends) <= names)
    return [ends for ends in tried if not _of_link(results, ends)]


def _present(results: Sequence[ProfileResult]) -> list[str]:
    """Nodes that the newest result that expected them has found."""
    there: dict[str, bool] = {}
    for result in results:
        there |= dict.fromkeys(result.missing, False) | dict.fromkeys(result.nodes, True)
    return [name for name, here in there.items() if here]


def _node(results: Sequence[ProfileResult], name: str) -> Node:
    known = [result for result in results if name in result.nodes]
    newest = known[-1].nodes[name]
    flops_per_s = _typical(_same_work(known, name), lambda each: each.flops_per_s)
    return Node(name, newest.location, flops_per_s, newest.memory_bytes)


def _same_work(known: Sequence[ProfileResult], name: str) -> list[NodeEstimate]:
    return [result.nodes[name] for result in known if result.work == known[-1].work]


def _of_link(results: Iterable[ProfileResult], ends: Ends) -> list[LinkEstimate]:
    """Estimates of a link; none, if it could not be used when it was last measured."""
    tried = [result.links[ends] for result in results if ends in result.links]
    return [link for link in tried if link] if tried and tried[-1] else []


def _typical(estimates: Sequence[Estimate], of: Callable[[Estimate], float]) -> float:
    steady = [each for each in estimates if each.is_steady]
    return median(of(each) for each in steady or estimates)


def _far(now: float, before: float) -> bool:
    return max(now, before) > FAR * min(now, before)
