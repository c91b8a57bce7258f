"""Machines and the links between them.

A cluster is a list of nodes, each with its own compute speed and memory, and two directed matrices: one-way
latency and bandwidth from the node of the row to the node of the column. It is the first half of what a plan is
made for; the other half is the workload. The file format is described in docs/formats.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from skippipe.errors import UserError
from skippipe.json_fields import Fields, as_number, json_text, read_as, write_text
from skippipe.node_names import check_names
from skippipe.value_ranges import DEVICES, NODES, POSITIVE, Range, check_ranges, range_of

FORMAT = "skippipe-cluster"
VERSION = 3
WITHOUT_DEVICES = 2  # the version of files in which every node has one device; they are still written as such
WITHOUT_RATES = 1  # of those in which no node has rates of its own either
OPTIONAL = ("upload_bytes_per_s", "download_bytes_per_s", "devices", "device_mode")  # of a node
Matrix = NDArray[np.float64]


class DeviceMode(StrEnum):
    """How several devices of a node work on its stage."""

    REPLICAS = "replicas"
    """Each device holds the whole stage, and works on microbatches of its own."""
    SHARDED = "sharded"
    """Each device holds some layers of the stage; a microbatch goes through all of them, one task at a time."""


@dataclass(frozen=True)
class Node:
    """One machine, or some of its GPUs."""

    name: str
    """Unique in the cluster; files are named after it (`node_names`)."""
    location: str
    """Region, city or rack: for people, not for the arithmetic."""
    flops_per_s: Annotated[float, Range(1e-6, 1e30)]
    """Floating-point operations a second that a training step sustains on one device (not the data sheet's peak)."""
    memory_bytes: Annotated[int, POSITIVE]
    """What weights, gradients, optimizer state and activations may fill on one device."""
    upload_bytes_per_s: Annotated[float | None, Range(1, 10**18)] = None
    """What all its links together carry from it, such as an access line's upload; None: no limit but the links'."""
    download_bytes_per_s: Annotated[float | None, Range(1, 10**18)] = None
    """The same towards it."""
    devices: Annotated[int, DEVICES] = 1
    """Devices of the node, all alike."""
    device_mode: DeviceMode | None = None
    """How they work on a stage; None: as replicas if one of them can hold the stage, else sharded."""


@dataclass(frozen=True, eq=False)
class Cluster:
    """Nodes and directed links; frozen, and checked when it is made."""

    name: str
    nodes: tuple[Node, ...]
    latency_s: Annotated[Matrix, Range(0, 10**9)]
    """One-way latency from row to column. The diagonal is not used."""
    bandwidth_bytes_per_s: Annotated[Matrix, Range(0, 10**18)]
    """Bandwidth from row to column; 0: the row cannot reach the column. The diagonal is not used."""
    hop_overhead_s: Annotated[float, Range(0, 10**9)] = 0.0
    """Fixed software cost of every hop, added to the latency."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise UserError("nodes: the list is empty; a cluster needs at least one node")
        NODES.check(len(self.nodes), "nodes: their number")
        check_names({f"nodes[{index}].name": node.name for index, node in enumerate(self.nodes)})
        for index, node in enumerate(self.nodes):
            check_ranges(node, f"nodes[{index}]")
        range_of(Cluster, "hop_overhead_s").check(self.hop_overhead_s, "hop_overhead_s")
        for name in ("latency_s", "bandwidth_bytes_per_s"):
            matrix = np.array(getattr(self, name), dtype=np.float64)
            self._check_matrix(name, matrix)
            matrix.flags.writeable = False
            object.__setattr__(self, name, matrix)

    def _check_matrix(self, name: str, matrix: Matrix) -> None:
        n = len(self.nodes)
        if matrix.shape != (n, n):
            raise UserError(f"{name}: {n} nodes need a {n} × {n} matrix, found {' × '.join(map(str, matrix.shape))}")
        within = range_of(Cluster, name)
        bad = np.argwhere(~((matrix >= within.least) & (matrix <= within.most)))  # NaN is no more than anything
        if len(bad):
            i, j = bad[0]
            pair = f"from '{self.nodes[i].name}' to '{self.nodes[j].name}'"
            meaning = " (0 says: no link)" if name.startswith("bandwidth") else ""
            raise UserError(f"{name}[{i}][{j}] ({pair}): {matrix[i, j]:g} is out of range; give {within}{meaning}")

    @property
    def doubts(self) -> list[str]:
        """Figures that look as if they were given in another unit: a line for the first of each kind."""
        linked = (self.bandwidth_bytes_per_s > 0) & ~np.eye(len(self), dtype=bool)
        links = [
            ("latency_s", self.latency_s, linked & (self.latency_s > 5), "seconds", "milliseconds"),
            ("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, linked & (self.bandwidth_bytes_per_s < 1e4),
             "bytes a second", "Mbit/s"),
        ]  # fmt: skip
        names = [node.name for node in self.nodes]
        found = [
            f"{name}: {values[i, j]:g} {unit} from '{names[i]}' to '{names[j]}'; or are these {other}?"
            for name, values, odd, unit, other in links
            for i, j in np.argwhere(odd)[:1]
        ]
        slow = [node for node in self.nodes if node.flops_per_s < 1e6]
        small = [node for node in self.nodes if node.memory_bytes < 1e6]
        found += [f"flops_per_s: {node.flops_per_s:g} of '{node.name}'; or are these TFLOP/s?" for node in slow[:1]]
        found += [f"memory_bytes: {node.memory_bytes:g} of '{node.name}'; or are these GiB?" for node in small[:1]]
        return found

    def __len__(self) -> int:
        return len(self.nodes)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Cluster)
            and (self.name, self.hop_overhead_s, self.nodes) == (other.name, other.hop_overhead_s, other.nodes)
            and np.array_equal(self.latency_s, other.latency_s)
            and np.array_equal(self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s)
        )

    def __hash__(self) -> int:
        return hash((self.name, self.hop_overhead_s, self.nodes))  # matrices of a thousand nodes would take long

    @cached_property
    def number(self) -> dict[str, int]:
        """Node name → its row in the matrices."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @cached_property
    def fingerprint(self) -> str:
        """Hash that tells a plan for this cluster from a plan for another: same text, same cluster."""
        return sha256(json_text(self.to_json()).encode()).hexdigest()[:16]

    def only(self, nodes: Sequence[int]) -> Cluster:
        """The cluster of these nodes alone."""
        among = np.ix_(nodes, nodes)
        return replace(
            self,
            nodes=tuple(self.nodes[node] for node in nodes),
            latency_s=self.latency_s[among],
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s[among],
        )

    def hop(self, sender: str, receiver: str) -> tuple[float, float]:
        """Seconds of latency and overhead from one node to another, and the bytes a second that one message alone
        gets: those of the link, or of a node's own rate if that is less."""
        at = self.number[sender], self.number[receiver]
        rates = self.nodes[at[0]].upload_bytes_per_s, self.nodes[at[1]].download_bytes_per_s
        bandwidth = min(float(self.bandwidth_bytes_per_s[at]), *(rate for rate in rates if rate), inf)
        return float(self.latency_s[at]) + self.hop_overhead_s, bandwidth

    def to_json(self) -> dict[str, Any]:
        version = WITHOUT_RATES
        if any(node.upload_bytes_per_s or node.download_bytes_per_s for node in self.nodes):
            version = WITHOUT_DEVICES
        if any(node.devices > 1 or node.device_mode for node in self.nodes):
            version = VERSION
        return {
            "format": FORMAT,
            "version": version,
            "name": self.name,
            "hop_overhead_s": self.hop_overhead_s,
            "nodes": [_node_json(node) for node in self.nodes],
            "latency_s": self.latency_s.tolist(),
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s.tolist(),
        }

    @classmethod
    def from_json(cls, value: Any, place: str = "") -> Cluster:
        fields = Fields(value, place, of=cls)
        fields.header(FORMAT, WITHOUT_RATES, WITHOUT_DEVICES, VERSION)
        name = fields.text("name")
        overhead_s = fields.number("hop_overhead_s") if fields.mentions("hop_overhead_s") else 0.0
        nodes = []
        for entry in fields.objects("nodes", of=Node):
            nodes.append(Node(**entry.values(added=OPTIONAL)))
            entry.close()
        latency_s = _matrix(fields, "latency_s", len(nodes))
        bandwidth = _matrix(fields, "bandwidth_bytes_per_s", len(nodes))
        for other in filter(fields.mentions, OPTIONAL):
            raise UserError(f"{other}: is a field of nodes, each has its own: move it to nodes[0].{other}")
        fields.close()
        return cls(name, tuple(nodes), latency_s, bandwidth, overhead_s)

    @classmethod
    def load(cls, path: Path) -> Cluster:
        return read_as(cls.from_json, path)

    def save(self, path: Path) -> None:
        write_text(path, json_text(self.to_json()) + "\n")


def with_relay(
    cluster: Cluster, pairs: Collection[frozenset[int]], bytes_per_s: float, node_bytes_per_s: float = inf
) -> Cluster:
    """The cluster if these pairs of nodes reach each other through a relay alone, which carries so much of all together
    and of each.

    Every node counts on its max-min fair share: an equal one, and what those leave that cannot send as much. It holds
    whatever the others send, and is often less than a node gets. If a node has other links as well, its links through
    the relay divide its share in the same way; else the share is the rate of its upload.
    """
    among = sorted(set().union(*pairs))
    if not among:
        return cluster
    bandwidth, made = cluster.bandwidth_bytes_per_s.copy(), list(cluster.nodes)
    peers = [[peer for peer in among if peer != index and frozenset({index, peer}) in pairs] for index in among]
    uploads = [made[index].upload_bytes_per_s or inf for index in among]
    most = [min(bandwidth[index, to].sum(), upload) for index, to, upload in zip(among, peers, uploads, strict=True)]
    shares = _max_min_fair(np.minimum(most, node_bytes_per_s), bytes_per_s)
    for index, to, wanted, share in zip(among, peers, most, np.maximum(shares, 1.0), strict=True):
        if share >= wanted:
            continue  # the relay takes all that it can send
        if bandwidth[index, np.setdiff1d(np.arange(len(cluster)), [index, *to])].any():
            bandwidth[index, to] = _max_min_fair(bandwidth[index, to], share)
        else:
            bandwidth[index, to] = np.minimum(bandwidth[index, to], share)
            made[index] = replace(made[index], upload_bytes_per_s=float(share))
    return replace(cluster, nodes=tuple(made), bandwidth_bytes_per_s=bandwidth)


def _max_min_fair(wanted: Matrix, total: float) -> Matrix:
    """What each gets of a total: what it wants, or an equal part of what is left by those that want less."""
    if wanted.sum() <= total:
        return wanted
    rising = np.sort(wanted)
    levels = (total - np.concatenate([[0.0], np.cumsum(rising)[:-1]])) / np.arange(len(wanted), 0, -1)
    found: Matrix = np.minimum(wanted, levels[np.argmax(rising >= levels)])
    return found


def _node_json(node: Node) -> dict[str, Any]:
    """What earlier versions knew without being told is left out, so that they can read the file."""
    return {name: value for name, value in vars(node).items() if value is not None and (name, value) != ("devices", 1)}


def _matrix(fields: Fields, name: str, n: int) -> Matrix:
    rows = fields.items(name)
    place = fields.at(name)
    if len(rows) != n:
        raise UserError(f"{place}: {n} nodes need {n} rows, found {len(rows)}; add the missing node or row")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != n:
            size = len(row) if isinstance(row, list) else "no"
            raise UserError(f"{place}[{i}]: {n} nodes need {n} numbers in each row, found {size}")
        for j, entry in enumerate(row):
            if type(entry) is not float:  # the common case is left to the check of the whole matrix
                as_number(entry, f"{place}[{i}][{j}]")
    return np.array(rows, dtype=np.float64).reshape(n, n)
