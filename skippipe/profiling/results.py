"""The result of one profiling, and the file beside a cluster file that keeps several of them, for merging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skippipe.cluster import Cluster, Node
from skippipe.errors import UserError
from skippipe.json_fields import Fields, as_number, exists, json_text, read_as, write_text
from skippipe.profiling.estimators import LinkEstimate, NodeEstimate
from skippipe.value_ranges import COUNT, WAIT_S, range_of

FORMAT = "skippipe-profile"
VERSION = 1
KEPT = 9  # results in a file: the newest

Ends = tuple[str, str]
"""Names of sender and receiver of a link."""


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
    missing: tuple[str, ...] = field(default=())
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
        nodes = {node.name: NodeEstimate(node.location, node.memory_bytes, node.flops_per_s) for node in cluster.nodes}
        return cls("", "", nodes, links)

    def to_json(self) -> dict[str, Any]:
        return {
            "when": self.when,
            "work": self.work,
            "missing": list(self.missing),
            "nodes": [{"name": name, **asdict(node)} for name, node in self.nodes.items()],
            "links": [[*ends, *asdict(link).values()] for ends, link in self.links.items() if link],
            "unreachable": [list(ends) for ends, link in self.links.items() if not link],
        }

    @classmethod
    def from_json(cls, fields: Fields) -> ProfileResult:
        when, work = (_text(fields.take(name), fields.at(name)) for name in ("when", "work"))
        missing = tuple(_text(each, fields.at("missing")) for each in fields.items("missing"))
        nodes = {}
        for entry in fields.objects("nodes"):
            nodes[entry.text("name")] = NodeEstimate(
                location=entry.text("location"),
                memory_bytes=entry.integer("memory_bytes", range_of(Node, "memory_bytes")),
                flops_per_s=entry.number("flops_per_s", range_of(Node, "flops_per_s")),
                forward_s=entry.number("forward_s", WAIT_S),
                backward_s=entry.number("backward_s", WAIT_S),
                spread=entry.number("spread", COUNT),
            )
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
