"""The plan: which node holds which stage, and which path every microbatch takes.

Frozen data. A plan that can be made is well formed (every node known, on one stage at most, every path over nodes that
hold a stage); whether it keeps the rules is for `validate` to say. It carries the cluster and the workload it was made
for and the timeline it promises, so a plan file needs no other file beside it. docs/formats.md describes the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from skippipe import constraints
from skippipe.cluster import Cluster
from skippipe.collectives.schedule import Averaging, Piece
from skippipe.cost_model import CostModel, ns, seconds, shared_cost_model
from skippipe.dispatch import Dispatch
from skippipe.errors import UserError
from skippipe.json_fields import Fields, json_text, read_as, write_text
from skippipe.timeline import Timeline
from skippipe.value_ranges import CENTURY_S, LAYERS, MICROBATCHES, Range
from skippipe.workload import Workload

FORMAT = "skippipe-plan"
VERSION = 1
SHARE = Range(1, 2**31)
LONGEST_NS = 48 * 86_400 * 10**9  # from 2²² seconds on, not every nanosecond comes back from its double


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of the model, and the nodes that hold them."""

    layers: int
    nodes: tuple[int, ...]
    """Nodes that hold it. Empty once all of them are lost: training goes on without it, although `validate` refuses
    it."""
    ring: tuple[int, ...]
    """The same nodes in the order in which they average gradients."""
    pieces: tuple[Piece, ...] = ()
    """How they average, if not round that ring: pieces of the gradient, each along a tree of its own."""

    @classmethod
    def of(cls, layers: int, averaging: Averaging) -> Stage:
        return cls(layers, tuple(sorted(averaging.order)), averaging.order, averaging.pieces)

    @cached_property
    def averaging(self) -> Averaging:
        return Averaging(self.ring, self.pieces)


@dataclass(frozen=True)
class Lane:
    """A path with one microbatch in flight: when one is back, the next sets out."""

    path: tuple[int, ...]
    """Starts at a data node; the head runs there too, after the last hop back."""
    microbatches: int
    """Microbatches of an iteration that take this path, one after another."""


@dataclass(frozen=True)
class Plan:
    cluster: Cluster
    workload: Workload
    stages: tuple[Stage, ...]
    lanes: tuple[Lane, ...]
    dispatch: Dispatch = Dispatch.FIRST_COME
    """Which task a node runs next."""
    split_backward: bool = False
    """Weight gradients are tasks of their own, which fill idle time."""
    strategy: str = "by hand"
    """What found the plan, for display."""
    expected: Timeline | None = None
    """The promised timeline of an iteration; None: not simulated yet."""
    lower_bound_ns: int | None = None
    """Proven lower bound: no plan for this problem has a shorter iteration. None: not computed."""

    def __post_init__(self) -> None:
        names = [node.name for node in self.cluster.nodes]
        if len(self.stages) < 2:
            raise UserError(f"stages: found {len(self.stages)}; a pipeline has at least 2")
        if not self.lanes:
            raise UserError("lanes: the list is empty; a plan needs at least one lane")
        held: dict[int, int] = {}
        for index, stage in enumerate(self.stages):
            if stage.layers < 1:
                raise UserError(f"stages[{index}].layers: {stage.layers} must be 1 or more")
            for node in stage.nodes:
                if node in held:
                    raise UserError(
                        f"stages[{index}].nodes: '{names[node]}' already holds stage {held[node]}; a node holds one"
                    )
                held[node] = index
            if sorted(stage.ring) != sorted(stage.nodes):
                raise UserError(f"stages[{index}].ring: must hold the same nodes as stages[{index}].nodes, each once")
            if fault := stage.averaging.fault():
                raise UserError(f"stages[{index}].averaging: {fault}")
        for index, stage in enumerate(self.stages):
            for node in stage.averaging.nodes:
                if node not in held:
                    raise UserError(f"stages[{index}].averaging: the relay '{names[node]}' holds no stage")
        layers = sum(stage.layers for stage in self.stages)
        if layers != self.workload.model.layers:
            model = self.workload.model
            raise UserError(f"stages: they hold {layers} layers, but {model.name} has {model.layers}")
        for index, lane in enumerate(self.lanes):
            if len(lane.path) < 2:
                raise UserError(f"lanes[{index}].path: a path visits at least 2 nodes, found {len(lane.path)}")
            if lane.microbatches < 1:
                raise UserError(f"lanes[{index}].microbatches: {lane.microbatches} must be 1 or more; or drop the lane")
            for hop, node in enumerate(lane.path):
                if node not in held:
                    raise UserError(f"lanes[{index}].path[{hop}]: '{names[node]}' holds no stage")
                if node in lane.path[:hop]:
                    raise UserError(f"lanes[{index}].path[{hop}]: '{names[node]}' is on this path already")
        if len(self.workload.gradient_dtypes) not in (0, len(self.stages)):
            count = len(self.workload.gradient_dtypes)
            raise UserError(f"workload.gradient_dtypes: {count} codecs for {len(self.stages)} stages; give each one")
        if self.expected and self.expected.iteration_ns > LONGEST_NS:
            raise UserError("expected: an iteration of over forty-eight days cannot be promised exactly")

    @cached_property
    def stage_of(self) -> dict[int, int]:
        return {node: index for index, stage in enumerate(self.stages) for node in stage.nodes}

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the nodes that hold it."""
        return tuple(stage.nodes for stage in self.stages)

    @cached_property
    def costs(self) -> CostModel:
        return shared_cost_model(self.cluster, self.workload, self.layers)

    @cached_property
    def averagings(self) -> tuple[Averaging, ...]:
        """How the nodes of each stage average, with as many rounds as its gradients need."""
        return tuple(
            stage.averaging.in_rounds(len(self.workload.gradient_rounds(index, stage.layers)))
            for index, stage in enumerate(self.stages)
        )

    @cached_property
    def slots(self) -> dict[int, int]:
        """Node → microbatches it can hold at once, on the stage it has."""
        return {node: int(self.costs.slots[stage, node]) for node, stage in self.stage_of.items()}

    @cached_property
    def workers(self) -> dict[int, int]:
        """Node → tasks that it runs side by side, on the stage it has; each worker has an equal part of the slots."""
        return {node: int(self.costs.workers[stage, node]) for node, stage in self.stage_of.items()}

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(stage.layers for stage in self.stages)

    @cached_property
    def exposure(self) -> list[int]:
        """Microbatches of an iteration that visit each stage."""
        visits = [self.visits(lane) for lane in self.lanes]
        return constraints.exposure(visits, [lane.microbatches for lane in self.lanes], len(self.stages))

    def visits(self, lane: Lane) -> tuple[int, ...]:
        """The stages along a lane's path."""
        return tuple(self.stage_of[node] for node in lane.path)

    def microbatch(self, lane: int, number: int) -> int:
        """The number of a lane's microbatch among all of the iteration, which determines its data."""
        return sum(each.microbatches for each in self.lanes[:lane]) + number

    def hop_dtype(self, sender: int, receiver: int, *, backward: bool) -> str:
        """Codec of activations from node to node; with `backward`, of their gradients."""
        nodes = self.cluster.nodes
        return self.workload.hop_dtype(nodes[sender].name, nodes[receiver].name, backward=backward)

    @property
    def promise(self) -> Timeline:
        """The promised timeline, of a plan that has one."""
        assert self.expected is not None, "nothing is promised"
        return self.expected

    @property
    def samples_per_s(self) -> float:
        return self.microbatches * self.workload.samples_per_microbatch / self.promise.iteration_s

    @property
    def gap(self) -> float | None:
        """The optimality gap: by what share the promised iteration is longer than the lower bound."""
        if self.expected is None or not self.lower_bound_ns:
            return None
        return self.expected.iteration_ns / self.lower_bound_ns - 1

    @property
    def microbatches(self) -> int:
        return sum(lane.microbatches for lane in self.lanes)

    @property
    def visited(self) -> int:
        """Stages on a path; where paths are not equally long, on the longest."""
        return max(len(lane.path) for lane in self.lanes)

    @property
    def skipped(self) -> float:
        """The share of stages that a microbatch leaves out, on average."""
        visited = sum(len(lane.path) * lane.microbatches for lane in self.lanes)
        return 1 - visited / (self.microbatches * len(self.stages))

    def promising(self, timeline: Timeline) -> Plan:
        return replace(self, expected=timeline)

    def edited(self, **changes: Any) -> Plan:
        """The plan with other values in these fields: what was promised and proven no longer holds."""
        return replace(self, **changes, expected=None, lower_bound_ns=None)

    def to_json(self) -> dict[str, Any]:
        names = [node.name for node in self.cluster.nodes]
        return {
            "format": FORMAT,
            "version": VERSION,
            "strategy": self.strategy,
            "dispatch": str(self.dispatch),
            "split_backward": self.split_backward,
            "stages": [
                {
                    "layers": stage.layers,
                    "nodes": [names[node] for node in stage.nodes],
                    "ring": [names[node] for node in stage.ring],
                    **({"averaging": [_piece_json(piece, names) for piece in stage.pieces]} if stage.pieces else {}),
                }
                for stage in self.stages
            ],
            "lanes": [
                {"path": [names[node] for node in lane.path], "microbatches": lane.microbatches} for lane in self.lanes
            ],
            "workload": self.workload.to_json(),
            "cluster": self.cluster.to_json(),
            "expected": self.expected.to_json(names) if self.expected else None,
            **({} if self.lower_bound_ns is None else {"lower_bound_s": seconds(self.lower_bound_ns)}),
        }

    @classmethod
    def from_json(cls, value: Any) -> Plan:
        fields = Fields(value, "")
        fields.header(FORMAT, VERSION)
        cluster = Cluster.from_json(fields.take("cluster"), "cluster")

        def number_of(node: Any, where: str) -> int:
            if not isinstance(node, str) or node not in cluster.number:
                raise UserError(f"{where}: the cluster has no node {node!r}")
            return cluster.number[node]

        def nodes(entry: Fields, name: str) -> tuple[int, ...]:
            return tuple(number_of(node, f"{entry.at(name)}[{index}]") for index, node in enumerate(entry.items(name)))

        def pieces(entry: Fields) -> Iterator[Piece]:
            for piece in entry.objects("averaging") if entry.mentions("averaging") else ():
                root = number_of(piece.take("root"), piece.at("root"))
                yield Piece(root, piece.integer("share", SHARE), pairs(piece, "via"), pairs(piece, "relays"))
                piece.close()

        def pairs(piece: Fields, name: str) -> tuple[tuple[int, int], ...]:
            found, where = piece.take(name) if piece.mentions(name) else {}, piece.at(name)
            if not isinstance(found, dict):
                raise UserError(f"{where}: must be an object of node names")
            return tuple((number_of(node, where), number_of(to, where)) for node, to in found.items())

        stages = []
        for entry in fields.objects("stages"):
            layers, held, ring = entry.integer("layers", LAYERS), nodes(entry, "nodes"), nodes(entry, "ring")
            stages.append(Stage(layers, held, ring, tuple(pieces(entry))))
            entry.close()
        lanes = []
        for entry in fields.objects("lanes"):
            lanes.append(Lane(nodes(entry, "path"), entry.integer("microbatches", MICROBATCHES)))
            entry.close()
        expected = fields.take("expected")
        workload = Workload.from_json(fields.take("workload"))
        for index, link in enumerate(workload.wire_dtypes):
            for node in link[:2]:
                number_of(node, f"workload.wire_dtypes[{index}]")
        plan = cls(
            cluster=cluster,
            workload=workload,
            stages=tuple(stages),
            lanes=tuple(lanes),
            dispatch=Dispatch(fields.text("dispatch", tuple(Dispatch))),
            split_backward=fields.flag("split_backward") if fields.mentions("split_backward") else False,
            strategy=fields.text("strategy"),
            expected=None if expected is None else Timeline.from_json(expected, cluster.number),
            lower_bound_ns=ns(fields.number("lower_bound_s", CENTURY_S)) if fields.mentions("lower_bound_s") else None,
        )
        fields.close()
        return plan

    @classmethod
    def load(cls, path: Path) -> Plan:
        return read_as(cls.from_json, path)

    def save(self, path: Path) -> None:
        write_text(path, json_text(self.to_json()) + "\n")


def _piece_json(piece: Piece, names: list[str]) -> dict[str, Any]:
    ways = {name: {names[node]: names[by] for node, by in getattr(piece, name)} for name in ("via", "relays")}
    return {"root": names[piece.root], "share": piece.share} | {name: way for name, way in ways.items() if way}
