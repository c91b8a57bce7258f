"""The cost model: what every task and every hop of a workload costs on a cluster, in whole nanoseconds.

Whole numbers make simulated time exact: sums do not depend on their order, two events at the same time are really at
the same time, and another program that follows docs/formats.md gets the very same figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from skippipe.cluster import Cluster, DeviceMode, Node
from skippipe.collectives import Collective, collective_named, topology, transfers
from skippipe.collectives.schedule import Averaging
from skippipe.jit import Flags, Floats, Ints
from skippipe.optim.interface import STORED_BYTES
from skippipe.workload import Workload, split_evenly

NEVER_NS = transfers.NEVER_NS
DEVICE_BYTES_PER_NS = 25  # between the devices of a node: PCIe of 16 lanes, or half of a processor's memory bandwidth
LINK_FIELDS = ("flight_ns", "transmit_ns", "upload_ns", "download_ns", "bandwidth_bytes_per_s", "upload_bytes_per_s",
               "download_bytes_per_s", "hop_bytes")  # fmt: skip


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def seconds(nanoseconds: int) -> float:
    """Nanoseconds in seconds: the nearest float; up to forty-eight days `ns` gives the same whole number back."""
    return int(nanoseconds) / 1e9


@dataclass(frozen=True, eq=False)
class CostModel:
    """Costs of every node on every stage. Rows of two-dimensional task arrays are stages."""

    layers: tuple[int, ...]
    forward_ns: Ints
    """[stage, node]: forward pass of one microbatch."""
    backward_ns: Ints
    """[stage, node]: backward pass of one microbatch, weight gradients included."""
    weight_ns: Ints
    """[stage, node]: the weight gradients of a split backward."""
    optimizer_ns: Ints
    """[stage, node]: one optimizer step; with several devices, also the sum of their gradients."""
    head_ns: Ints
    """[node]: head and loss, if the node is a data node."""
    slots: Ints
    """[stage, node]: microbatches the node can hold at once; 0 where it cannot hold the stage at all."""
    workers: Ints
    """[stage, node]: tasks that the node runs side by side; each worker has an equal part of the slots."""
    flight_ns: Ints
    """[from, to]: latency and overhead of a hop; other messages may follow at once."""
    transmit_ns: Ints
    """[pass, from, to]: time for which one hop's message keeps the link busy; it goes no faster than the nodes' own
    rates. Pass 0 is activations, 1 their gradients."""
    upload_ns: Ints
    """[pass, from, to]: time for which it keeps the sender's upload busy; 0: no limit."""
    download_ns: Ints
    """The same of the receiver's download."""
    bandwidth_bytes_per_s: Floats
    """[from, to]: what one message gets, alone: of the link, and of the nodes' own rates."""
    upload_bytes_per_s: Floats
    """[node]: infinite without a limit, as is the next."""
    download_bytes_per_s: Floats
    hop_bytes: Ints
    """[pass, from, to]: bytes of a hop's message."""
    gradient_rounds: tuple[tuple[int, ...], ...]
    """[stage][round]: bytes of the gradient that the nodes of a stage average, as its codec expects them."""
    collective: Collective
    """How the nodes of a stage average."""

    @property
    def nodes(self) -> int:
        return len(self.head_ns)

    @cached_property
    def gradient_bytes(self) -> tuple[int, ...]:
        """[stage]: those of all rounds."""
        return tuple(map(sum, self.gradient_rounds))

    @property
    def input_ns(self) -> Ints:
        """[stage, node]: backward pass without weight gradients, if it is split."""
        left: Ints = self.backward_ns - self.weight_ns
        return left.clip(min=1)

    @property
    def linked(self) -> Flags:
        """[node, node]: between which nodes there is a link there and back."""
        there_ns = self.transmit_ns[0]
        found: Flags = np.maximum(there_ns, there_ns.T) < NEVER_NS
        return found

    @cached_property
    def hop_ns(self) -> Ints:
        """[from, to]: nanoseconds of a hop over an idle link, in the pass in which it takes less."""
        least_ns: Ints = self.flight_ns + self.transmit_ns.min(axis=0)
        return least_ns

    def round_trip_ns(self, a: int, b: int) -> int:
        """Nanoseconds of an activation from a to b over idle links, and of its gradient back."""
        sent_ns = self.transmit_ns[0, a, b] + self.transmit_ns[1, b, a]
        return int(self.flight_ns[a, b] + self.flight_ns[b, a] + sent_ns)

    def averaging(self, stage: int, nodes: Sequence[int]) -> Averaging:
        """The fastest way to average for these nodes of a stage, if they are done at the same time."""
        return topology.fastest(self, stage, nodes, only_rings=self.collective.only_rings)

    def averaging_ns(self, stage: int, averaging: Averaging) -> int:
        """How long nodes average that are done at the same time."""
        return transfers.takes_ns(self, stage, averaging)


@lru_cache(maxsize=4)
def shared_cost_model(cluster: Cluster, workload: Workload, layers: tuple[int, ...]) -> CostModel:
    """The same for all plans and problems that are compared; it is not to be changed."""
    return cost_model_of(cluster, workload, layers)


def cost_model_of(
    cluster: Cluster, workload: Workload, layers: tuple[int, ...], same_links: CostModel | None = None
) -> CostModel:
    """The cost model of a workload, split into stages of these layers, on a cluster; `same_links` is another one of the
    same cluster and workload."""
    speed = np.array([node.flops_per_s for node in cluster.nodes], dtype=np.float64)

    def stage_by_node(flops_of_stage: Sequence[float]) -> Ints:
        task_ns = np.array(flops_of_stage, dtype=np.float64)[:, None] / speed * 1e9
        found: Ints = np.rint(np.clip(task_ns, 1, NEVER_NS)).astype(np.int64)  # not 0: a task ends after it starts
        return found

    forward = [workload.forward_flops(k) for k in layers]
    step = [workload.optimizer_flops(stage, k) for stage, k in enumerate(layers)]
    gradients_ns = stage_by_node([workload.backward_flops(k, recomputing=False) for k in layers])
    kinds = [(node.memory_bytes, node.devices, node.device_mode) for node in cluster.nodes]
    alike = dict(zip(kinds, cluster.nodes, strict=True))  # most clusters have many nodes of few kinds
    room_by_kind = [
        {kind: room_of(node, workload, stage, k) for kind, node in alike.items()} for stage, k in enumerate(layers)
    ]
    rooms = np.array([[rooms[kind] for kind in kinds] for rooms in room_by_kind], dtype=np.int64)
    links = {name: getattr(same_links, name) for name in LINK_FIELDS} if same_links else _links(cluster, workload)
    return CostModel(
        layers=layers,
        forward_ns=stage_by_node(forward),
        backward_ns=stage_by_node([workload.backward_flops(k) for k in layers]),
        weight_ns=np.maximum(1, np.rint(workload.trained_share * gradients_ns).astype(np.int64)),
        optimizer_ns=stage_by_node(step) + _device_sum_ns(cluster, workload, layers, rooms[..., 1]),
        head_ns=stage_by_node([workload.head_flops(layers[0])])[0],
        slots=rooms[..., 0].copy(),
        workers=rooms[..., 1].copy(),
        gradient_rounds=tuple(workload.gradient_rounds(stage, k) for stage, k in enumerate(layers)),
        collective=collective_named(workload.collective),
        **links,
    )


def _device_sum_ns(cluster: Cluster, workload: Workload, layers: tuple[int, ...], workers: Ints) -> Ints:
    """[stage, node]: what gradients take from the devices of a node to the first one, or to host memory if the stage is
    sharded, and what their sum takes back."""
    devices = np.array([node.devices for node in cluster.nodes])
    copies = np.where(workers > 1, workers - 1, devices > 1)
    trained = np.array([workload.trained_parameters(stage, k) for stage, k in enumerate(layers)])
    moved = 2 * STORED_BYTES * copies * trained[:, None]
    found: Ints = np.rint(moved / DEVICE_BYTES_PER_NS).astype(np.int64)
    return found


class Room(NamedTuple):
    """What a node has for microbatches on a stage."""

    slots: int
    """Microbatches that it can hold at once; 0: it cannot work on the stage."""
    workers: int
    """Tasks that it runs side by side: as many as it has devices, if these are replicas of each other."""


def room_of(node: Node, workload: Workload, stage: int, layers: int) -> Room:
    slots = workload.slots(node.memory_bytes, stage, layers)
    if node.devices == 1 or device_mode(node, workload, stage, layers) is DeviceMode.REPLICAS:
        return Room(node.devices * slots, node.devices)
    parts = _parts(stage, device_layers(workload, stage, layers, node.devices))
    return Room(min(workload.on_device(part.bridges).slots(node.memory_bytes, *part[:2]) for part in parts), 1)


def device_mode(node: Node, workload: Workload, stage: int, layers: int) -> DeviceMode:
    """How the node's devices work on a stage of so many layers."""
    if node.device_mode is not None:
        return node.device_mode
    fits = workload.slots(node.memory_bytes, stage, layers) > 0
    return DeviceMode.REPLICAS if fits else DeviceMode.SHARDED


def device_layers(workload: Workload, stage: int, layers: int, devices: int) -> tuple[int, ...]:
    """Layers of each device of a node that shards the stage, as even as can be, where later ones take what is left
    over. What stage 0 has beside its layers is on the first device: that has fewer layers, if that takes less memory
    on the fullest device."""
    even = split_evenly(layers, devices)
    if stage > 0 or devices == 1:
        return even
    choices = [(first, *split_evenly(layers - first, devices - 1)) for first in range(even[0], -1, -1)]
    return min(choices, key=lambda each: _needed_bytes(workload, _parts(stage, each), 1))


def device_bytes(node: Node, workload: Workload, stage: int, layers: int, slots: int) -> int:
    """Memory of each device with which each of the node's workers has so many slots."""
    parts = _parts(stage, (layers,))
    if node.devices > 1 and device_mode(node, workload, stage, layers) is DeviceMode.SHARDED:
        parts = _parts(stage, device_layers(workload, stage, layers, node.devices))
    return _needed_bytes(workload, parts, slots)


class DevicePart(NamedTuple):
    """What a device holds of a stage, as a stage with its layers."""

    stage: int
    layers: int
    bridges: bool


def _parts(stage: int, layers: tuple[int, ...]) -> set[DevicePart]:
    """What devices with so many layers of a stage hold: those after the first have layers alone, as stages other than 0
    do, and bridges are on the last."""
    held = [(max(stage, min(at, 1)), each) for at, each in enumerate(layers) if each or not at]
    return {DevicePart(*each, bridges=at == len(held) - 1) for at, each in enumerate(held)}


def _needed_bytes(workload: Workload, parts: Iterable[DevicePart], slots: int) -> int:
    """Memory of a device that could hold any of the parts, with so many slots."""
    each = ((workload.on_device(part.bridges), part) for part in parts)
    return max(held.fixed_bytes(*part[:2]) + slots * held.held_bytes(part.layers) for held, part in each)


def _links(cluster: Cluster, workload: Workload) -> dict[str, Any]:
    """What a cost model has of links."""
    upload = np.array([node.upload_bytes_per_s or np.inf for node in cluster.nodes])
    download = np.array([node.download_bytes_per_s or np.inf for node in cluster.nodes])
    bandwidth = np.minimum(cluster.bandwidth_bytes_per_s, np.minimum(upload[:, None], download[None, :]))
    hop_bytes = _hop_bytes(cluster, workload)
    with np.errstate(over="ignore"):
        flight = np.rint((cluster.latency_s + cluster.hop_overhead_s) * 1e9)
    sent_ns = [transfers.transmit_ns(hop_bytes, rate, least_ns=0) for rate in (bandwidth, upload[:, None], download)]
    values = (_without_diagonal(flight), _without_diagonal(sent_ns[0]), *sent_ns[1:])
    return dict(zip(LINK_FIELDS, (*values, bandwidth, upload, download, hop_bytes), strict=True))


def _hop_bytes(cluster: Cluster, workload: Workload) -> Ints:
    found = np.full((2, len(cluster), len(cluster)), workload.activation_bytes, np.int64)
    for sender, receiver, *both in workload.wire_dtypes:
        if sender in cluster.number and receiver in cluster.number:
            sizes = [workload.hop_bytes(codec) for codec in both]
            found[:, cluster.number[sender], cluster.number[receiver]] = sizes
    return found


def _without_diagonal(values: Floats | Ints) -> Ints:
    """[…, from, to] with nothing to take from a node to itself."""
    whole: Ints = np.minimum(values, NEVER_NS).astype(np.int64)
    each = np.arange(whole.shape[-1])
    whole[..., each, each] = 0
    return whole
