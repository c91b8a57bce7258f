"""The paper's settings, ready to plan: `published18`, `published20`, `published42`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from skippipe.cluster import Cluster
from skippipe.cost_model import cost_model_of
from skippipe.errors import UserError
from skippipe.model_shape import MODELS
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.problem import Placement
from skippipe.presets import GIB, at_sites, data
from skippipe.timeline import Timing
from skippipe.workload import Workload


@dataclass(frozen=True)
class Example:
    """A cluster with the workload and the pipeline that the paper ran on it."""

    cluster: Cluster
    workload: Workload
    stages: int
    visited: int
    sizes: tuple[int, ...]
    timing: Timing = Timing.CONTENTION_ONLY
    """The paper's timing, so that its figures can be compared."""
    placement: Placement | None = None
    """The published placement; None: it was not published."""
    paths: dict[str, tuple[Lane, ...]] = field(default_factory=dict)
    """Published sets of paths over that placement."""


def _published_cluster(name: str, locations: list[str], hop_overhead_s: float, slip: bool) -> Cluster:
    table = data("regions12.json")
    latency_s, bandwidth = np.array(table["latency_s"]), np.array(table["bandwidth_bytes_per_s"])
    if slip:  # the paper's table gives this pair 1/1024 of its true bandwidth, and its plans were made with that
        nl, london = table["locations"].index("NL"), table["locations"].index("London")
        bandwidth[[nl, london], [london, nl]] /= 1024
    site_of = [table["locations"].index(place) for place in locations]
    memory_bytes = 80 * GIB  # never the limit: the paper gives every node three slots, whatever the microbatch
    return at_sites(name, table["locations"], site_of, latency_s, bandwidth, hop_overhead_s, memory_bytes)


def _published_workload(samples: int, microbatches: int) -> Workload:
    return Workload(
        MODELS["llama-1.5b"],
        samples_per_microbatch=samples,
        microbatches=microbatches,
        backward_ratio=1.5,
        head_ratio=0.25,
        header_bytes=216,
        max_slots=3,
    )


def published20() -> Example:
    """20 nodes in 12 regions, 6 stages, a third skipped, with the paths that the paper published for it."""
    found = data("published20.json")
    paths = {name: [tuple(path) for path in each] for name, each in found["paths"].items()}
    lanes = {name: tuple(Lane(path, 2) for path in each) for name, each in paths.items()}
    lanes["skippipe"] = tuple(Lane(path, 2) for path in paths["skippipe"] for _ in range(3))
    # as published: 27 microbatches, three waves of three lanes over three pipelines
    lanes["full_pipeline"] = tuple(Lane(path, 3) for path in paths["full_pipeline"] for _ in range(3))
    return Example(
        _published_cluster("published20", found["locations"], 0.35, slip=True),
        _published_workload(samples=2, microbatches=30),
        stages=6,
        visited=4,
        sizes=(5, 3, 3, 3, 3, 3),
        placement=tuple(tuple(nodes) for nodes in found["stages"]),
        paths=lanes,
    )


def _round_robin_locations(nodes: int, regions: int) -> list[str]:
    places = data("regions12.json")["locations"]
    return [places[(index % regions + 1) % len(places)] for index in range(nodes)]


def published18(samples: int = 2) -> Example:
    """18 nodes in 11 regions, 4 stages, a quarter skipped; 1, 2 or 4 samples of 4096 tokens a microbatch."""
    return Example(
        _published_cluster("published18", _round_robin_locations(18, 11), 0.0, slip=False),
        _published_workload(samples, microbatches=36),
        stages=4,
        visited=3,
        sizes=(6, 4, 4, 4),
    )


def published42() -> Example:
    """42 nodes in 12 regions, 8 stages, a quarter skipped."""
    return Example(
        _published_cluster("published42", _round_robin_locations(42, 12), 0.35, slip=False),
        _published_workload(samples=2, microbatches=42),
        stages=8,
        visited=6,
        sizes=(7, 5, 5, 5, 5, 5, 5, 5),
    )


EXAMPLES: dict[str, Callable[[], Example]] = {
    "published18": published18,
    "published20": published20,
    "published42": published42,
}


def published_plan(example: Example, name: str, microbatches: int | None = None) -> Plan:
    """A published set of paths as a plan; another number of microbatches is distributed over its lanes."""
    if name not in example.paths or example.placement is None:
        known = ", ".join(example.paths) or "none"
        raise UserError(f"paths '{name}': '{example.cluster.name}' has {known}")
    lanes = example.paths[name]
    if microbatches is not None:
        each, extra = divmod(microbatches, len(lanes))
        if each < 1:
            raise UserError(f"{microbatches} microbatches over {len(lanes)} lanes: use {len(lanes)} or more")
        starts = [lane.path[0] for lane in lanes]
        nth = [starts[:lane].count(start) for lane, start in enumerate(starts)]
        first = set(sorted(range(len(lanes)), key=lambda lane: nth[lane])[:extra])  # spread over the data nodes
        lanes = tuple(Lane(lane.path, each + (number in first)) for number, lane in enumerate(lanes))
    workload = replace(example.workload, microbatches=sum(lane.microbatches for lane in lanes))
    layers = workload.layer_split(example.stages)
    costs = cost_model_of(example.cluster, workload, layers)
    return Plan(
        example.cluster,
        workload,
        tuple(Stage.of(layers[s], costs.averaging(s, nodes)) for s, nodes in enumerate(example.placement)),
        lanes,
        strategy=f"published {name}",
    )
