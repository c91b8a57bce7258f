"""The results of profiling, the file beside a cluster file that keeps several of them, and one cluster out of them all.

Which nodes there are, and which reach each other, is as in the newest result. Figures are medians over the results: of
those whose repeats agree, if there are any. How fast a node is depends on what it computes, so its speed is merged only
from results with the same work as the newest. Rates that all links of a node share are merged from those that have
measured them; "no limit" is more than any figure, and of two the lower one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median, median_low
from typing import Any, TypeVar

import numpy as np

from skippipe.cluster import Cluster, Node
from skippipe.errors import UserError
from skippipe.json_fields import Fields, as_number, exists, json_text, read_as, write_text
from skippipe.profiling.estimators import STEADY, LinkEstimate, NodeEstimate
from skippipe.value_ranges import COUNT, range_of

FORMAT = "skippipe-profile"
VERSION = 1
KEPT = 9  # results in a file: the newest

Ends = tuple[str, str]
"""Names of sender and receiver of a link."""
FAR = 1.5  # times what it was before
NEAR_S = 0.001  # latencies that differ by less are alike
Estimate = TypeVar("Estimate", LinkEstimate, NodeEstimate)
RATES = {"upload_bytes_per_s": "sends", "download_bytes_per_s": "receives"}
"""Figures of a node that all its links share, and what it then does."""


@dataclass(frozen=True)
class ProfileResult:
    """What one profiling has measured."""

    when: str
    """Time in UTC, as ISO 8601."""
    work: str
    """What nodes computed, in words: their speed depends on it. Empty: not known."""
    nodes: Mapping[str, NodeEstimate]
    links: Mapping[Ends, LinkEstimate | None]
    """None: the sender does not reach the receiver. A link that is not here has not been measured."""
    missing: tuple[str, ...] = ()
    """Nodes that did not join, or were lost."""

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> ProfileResult:
        """From a cluster file alone: figures, but not what they were made of."""
        names = [node.name for node in cluster.nodes]
        links: dict[Ends, LinkEstimate | None] = {
            (sender, receiver): LinkEstimate(
                float(cluster.latency_s[i, j]) + cluster.hop_overhead_s, float(cluster.bandwidth_bytes_per_s[i, j])
            )
            for i, sender in enumerate(names)
            for j, receiver in enumerate(names)
            if i != j and cluster.bandwidth_bytes_per_s[i, j] > 0
        }
        nodes = {
            node.name: NodeEstimate(
                node.location,
                node.memory_bytes,
                node.flops_per_s,
                upload_bytes_per_s=node.upload_bytes_per_s,
                download_bytes_per_s=node.download_bytes_per_s,
                devices=node.devices,
            )
            for node in cluster.nodes
        }
        return cls("", "", nodes, links)

    def to_json(self) -> dict[str, Any]:
        return {
            "when": self.when,
            "work": self.work,
            "missing": list(self.missing),
            "nodes": [{"name": name, **_node_json(node)} for name, node in self.nodes.items()],
            "links": [[*ends, *asdict(link).values()] for ends, link in self.links.items() if link],
            "unreachable": [list(ends) for ends, link in self.links.items() if not link],
        }

    @classmethod
    def from_json(cls, fields: Fields) -> ProfileResult:
        when, work = (_text(fields.take(name), fields.at(name)) for name in ("when", "work"))
        missing = tuple(_text(each, fields.at("missing")) for each in fields.items("missing"))
        nodes = {}
        for entry in fields.objects("nodes", of=NodeEstimate):
            name, rates = entry.text("name"), {each: _rate(entry, each) for each in RATES}
            nodes[name] = NodeEstimate(**rates | entry.values(added=("devices", *RATES)))
            entry.close()
        links: dict[Ends, LinkEstimate | None] = {}
        for index, row in enumerate(fields.items("links")):
            at = f"{fields.at('links')}[{index}]"
            ends, figures = _ends(row, at, 5)
            within = (range_of(Cluster, "latency_s"), range_of(Cluster, "bandwidth_bytes_per_s"), COUNT)
            latency_s, bandwidth, spread = (as_number(each, at, its) for each, its in zip(figures, within, strict=True))
            links[ends] = LinkEstimate(latency_s, bandwidth, spread)
        for index, row in enumerate(fields.items("unreachable")):
            links[_ends(row, f"{fields.at('unreachable')}[{index}]", 2)[0]] = None
        fields.close()
        return cls(when, work, nodes, links, missing)


def _node_json(node: NodeEstimate) -> dict[str, Any]:
    """Rates that were not measured are left out, and a single device; null: no limit was found."""
    plain = (("devices", 1), *((name, None) for name in RATES))
    known = {name: value for name, value in asdict(node).items() if (name, value) not in plain}
    return {name: None if value == inf else value for name, value in known.items()}


def _rate(entry: Fields, name: str) -> float | None:
    if not entry.mentions(name):
        return None
    value = entry.take(name)
    return inf if value is None else as_number(value, entry.at(name), range_of(Node, name))


def results_file(cluster_file: Path) -> Path:
    """The file with the results for a cluster file: cluster.json has cluster.profile.json."""
    return cluster_file.with_suffix(".profile.json")


def load_results(cluster_file: Path) -> list[ProfileResult]:
    """Earlier results for a cluster file, the oldest first; none if there is no file."""
    path = results_file(cluster_file)
    return read_as(_parse, path) if exists(path) else []


def save_results(cluster_file: Path, results: Sequence[ProfileResult]) -> None:
    kept = [result.to_json() for result in results[-KEPT:]]
    write_text(results_file(cluster_file), json_text({"format": FORMAT, "version": VERSION, "surveys": kept}) + "\n")


def _parse(value: Any) -> list[ProfileResult]:
    fields = Fields(value, "")
    fields.header(FORMAT, VERSION)
    found = [ProfileResult.from_json(entry) for entry in fields.objects("surveys")]
    fields.close()
    return found


def _ends(row: Any, at: str, length: int) -> tuple[Ends, list[Any]]:
    if not isinstance(row, list) or len(row) != length:
        raise UserError(f"{at}: expected a list of {length}: two names{' and three numbers' if length > 2 else ''}")
    return (_text(row[0], at), _text(row[1], at)), row[2:]


def _text(value: Any, at: str) -> str:
    """A text, perhaps an empty one."""
    if not isinstance(value, str):
        raise UserError(f"{at}: expected a text")
    return value


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
        if node.spread > STEADY:
            found.append(f"'{name}': its passes lie {node.spread:.0%} apart; is it busy with something else?")
        was = _same_work([result for result in [*before, newest] if name in result.nodes], name)[:-1]
        if was and _far(node.flops_per_s, earlier := _typical(was, lambda each: each.flops_per_s)):
            found.append(f"'{name}' computes {node.flops_per_s:.3g} operations a second, {earlier:.3g} before")
        for which, does in RATES.items():
            rate, known_rate = getattr(node, which), _typical_rate(before, name, which)
            if rate is not None and known_rate is not None and _far(rate, known_rate):
                found.append(f"'{name}' {does} {_at_once(rate)} at once, {_at_once(known_rate)} before")
    for (sender, receiver), link in newest.links.items():
        if link is None:
            continue
        way = f"'{sender}' to '{receiver}'"
        if link.spread > STEADY:
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
    rates = {which: _typical_rate(known, name, which) for which in RATES}
    limits: dict[str, Any] = {which: None if rate == inf else rate for which, rate in rates.items()}
    return Node(name, newest.location, flops_per_s, newest.memory_bytes, devices=newest.devices, **limits)


def _typical_rate(results: Iterable[ProfileResult], name: str, which: str) -> float | None:
    measured = [getattr(result.nodes[name], which) for result in results if name in result.nodes]
    return median_low(found) if (found := [rate for rate in measured if rate is not None]) else None


def _same_work(known: Sequence[ProfileResult], name: str) -> list[NodeEstimate]:
    return [result.nodes[name] for result in known if result.work == known[-1].work]


def _of_link(results: Iterable[ProfileResult], ends: Ends) -> list[LinkEstimate]:
    """Estimates of a link; none, if it could not be used when it was last measured."""
    tried = [result.links[ends] for result in results if ends in result.links]
    return [link for link in tried if link] if tried and tried[-1] else []


def _typical(estimates: Sequence[Estimate], of: Callable[[Estimate], float]) -> float:
    steady = [each for each in estimates if each.spread <= STEADY]
    return median(of(each) for each in steady or estimates)


def _at_once(bytes_per_s: float) -> str:
    return "whatever its links carry" if bytes_per_s == inf else f"{bytes_per_s / 1e6:.3g} MB/s"


def _far(now: float, before: float) -> bool:
    return max(now, before) > FAR * min(now, before)
