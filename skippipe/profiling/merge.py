"""Several surveys as one cluster, and what is doubtful about it.

Of whom it has, and who can reach whom, the newest word counts. Figures are medians over the surveys: of those whose
repeats agree, if there are any. How fast a node is depends on what it computes, so only surveys with the same work as
the newest are put together there.
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

Figures = TypeVar("Figures", LinkEstimate, NodeEstimate)


def merge_results(surveys: Sequence[ProfileResult], name: str) -> Cluster:
    """The oldest first."""
    names = _present(surveys)
    if not names:
        raise UserError("no node has been measured: there is nothing to write")
    latency_s = np.zeros((len(names), len(names)))
    bandwidth = np.zeros((len(names), len(names)))
    for i, sender in enumerate(names):
        for j, receiver in enumerate(names):
            found = _of_link(surveys, (sender, receiver))
            if found:
                latency_s[i, j] = _typical(found, lambda link: link.latency_s)
                bandwidth[i, j] = _typical(found, lambda link: link.bandwidth_bytes_per_s)
    return Cluster(name, tuple(_node(surveys, each) for each in names), latency_s, bandwidth)


def outliers(surveys: Sequence[ProfileResult]) -> list[str]:
    """Outliers of the newest survey: figures whose repeats disagree, or that are far from those of before."""
    *before, newest = surveys
    found = []
    for name, node in newest.nodes.items():
        if not node.is_steady:
            found.append(f"'{name}': its passes lie {node.spread:.0%} apart; is it busy with something else?")
        was = _same_work([survey for survey in [*before, newest] if name in survey.nodes], name)[:-1]
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


def unreachable(surveys: Sequence[ProfileResult]) -> list[Ends]:
    """Nodes of the cluster that have no way to each other, as far as anybody tried."""
    names = set(_present(surveys))
    told = dict.fromkeys(ends for survey in surveys for ends in survey.links if set(ends) <= names)
    return [ends for ends in told if not _of_link(surveys, ends)]


def _present(surveys: Sequence[ProfileResult]) -> list[str]:
    """Nodes that were there when they were last looked for."""
    there: dict[str, bool] = {}
    for survey in surveys:
        there |= dict.fromkeys(survey.missing, False) | dict.fromkeys(survey.nodes, True)
    return [name for name, here in there.items() if here]


def _node(surveys: Sequence[ProfileResult], name: str) -> Node:
    known = [survey for survey in surveys if name in survey.nodes]
    newest = known[-1].nodes[name]
    flops_per_s = _typical(_same_work(known, name), lambda each: each.flops_per_s)
    return Node(name, newest.location, flops_per_s, newest.memory_bytes)


def _same_work(known: Sequence[ProfileResult], name: str) -> list[NodeEstimate]:
    return [survey.nodes[name] for survey in known if survey.work == known[-1].work]


def _of_link(surveys: Iterable[ProfileResult], ends: Ends) -> list[LinkEstimate]:
    """None, if it could not be used when it was last tried."""
    told = [survey.links[ends] for survey in surveys if ends in survey.links]
    return [link for link in told if link] if told and told[-1] else []


def _typical(figures: Sequence[Figures], of: Callable[[Figures], float]) -> float:
    steady = [each for each in figures if each.is_steady]
    return median(of(each) for each in steady or figures)


def _far(now: float, before: float) -> bool:
    return max(now, before) > FAR * min(now, before)
