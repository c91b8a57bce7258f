"""The planning problem: a cluster, a workload, and how many stages there are and a microbatch visits.

Also what every strategy shares: how many nodes a stage needs, how many lanes there can be, which problem nearby is
feasible where this one is not; and what is asked of one planning run: its strategy, budget and options.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import gcd, lcm
from typing import Any

import numpy as np

from skippipe.cluster import Cluster
from skippipe.collectives.schedule import Averaging
from skippipe.constraints import MAX_SWAPS
from skippipe.cost_model import CostModel, device_bytes, room_of, shared_cost_model
from skippipe.dispatch import Dispatch
from skippipe.errors import Infeasible
from skippipe.optim import DEFAULT
from skippipe.plan import Plan
from skippipe.planner.codec_prices import CodecBudget
from skippipe.skip_schedule import PathLength, deal_lengths, parts_of
from skippipe.timeline import Timing
from skippipe.workload import Workload, split_evenly

LESS_STATE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"optimizer": "adamw8bit"}, "8-bit optimizer state (optimizer adamw8bit)"),
    ({"offload": "averaging"}, "sums of gradients in host memory (offload averaging)"),
    (
        {"optimizer": "adamw8bit", "offload": "averaging"},
        "8-bit optimizer state (optimizer adamw8bit) and sums of gradients in host memory (offload averaging)",
    ),
    ({"offload": "optimizer"}, "optimizer state in host memory (offload optimizer)"),
)
"""Ways to hold less than AdamW does, in the order of what they cost."""
JOB_FIELDS = {
    "--samples": "batch.samples",
    "--max-slots": "pipeline.max_slots",
    "--checkpointing": "model.checkpointing",
    "--skip": "recipe.skip",
}
"""Option of `skippipe plan` → the field of a job that says the same."""
Placement = tuple[tuple[int, ...], ...]
"""For each stage, the nodes that hold it."""


@dataclass(frozen=True)
class DecisionVariables:
    """Decision variables of the strategy `best`; other strategies take the problem as it is."""

    sizes: bool = True
    layers: bool = True
    """Layers of stages 1 and up, if nodes differ in speed."""
    dispatch: bool = True
    split_backward: bool = True
    checkpointing: bool = False
    """Activation checkpointing, if memory holds fewer lanes without it; only from none to all nodes."""


ALL_FIXED = DecisionVariables(sizes=False, layers=False, dispatch=False, split_backward=False)


@dataclass(frozen=True)
class Problem:
    cluster: Cluster
    workload: Workload
    stages: int
    visited: int
    """Stages on a path, stage 0 included."""
    sizes: tuple[int, ...] = ()
    """Nodes of each stage; empty: chosen to match the demand."""
    swaps: int = MAX_SWAPS
    """Swaps of neighbours that a path may have (CC2); with bridges, none."""
    timing: Timing = Timing.FULL
    dispatch: Dispatch = Dispatch.FIRST_COME
    split_backward: bool = False
    """Weight gradients become tasks of their own, which fill idle time."""
    layers: tuple[int, ...] = field(default=(), repr=False)
    """Layers of each stage; empty: as even as can be."""
    decision_variables: DecisionVariables = DecisionVariables()
    codec_budget: CodecBudget | None = None
    """What codecs may cost that are chosen for each link and stage; None: the workload has them."""

    def __post_init__(self) -> None:
        nodes = len(self.cluster)
        if self.workload.bridge_parameters:
            object.__setattr__(self, "swaps", 0)
        if self.stages < 2:
            raise Infeasible(f"{self.stages} stages make no pipeline: use 2 or more")
        if nodes < self.stages:
            raise Infeasible(
                f"{self.stages} stages need at least {self.stages} nodes and '{self.cluster.name}' has {nodes}: "
                f"use at most {nodes} stages or add {self.stages - nodes} nodes"
            )
        if not 2 <= self.visited <= self.stages:
            most = 1 - 2 / self.stages
            raise Infeasible(
                f"visiting {self.visited} of {self.stages} stages: a path has at least 2 stages and at most all; "
                f"with {self.stages} stages at most {most:.0%} can be skipped"
            )
        if not self.layers:
            object.__setattr__(self, "layers", self.workload.layer_split(self.stages))
        model = self.workload.model
        if len(self.layers) != self.stages or min(self.layers) < 1 or sum(self.layers) != model.layers:
            raise Infeasible(
                f"layers {','.join(map(str, self.layers))}: {self.stages} stages need {self.stages} numbers of 1 or "
                f"more that add up to the {model.layers} layers of {model.name}"
            )
        if not self.sizes:
            able = int((self.costs.slots[0] > 0).sum())  # only these can be data nodes
            object.__setattr__(self, "sizes", stage_sizes(nodes, self.stages, self.visited, max(1, able)))
        if len(self.sizes) != self.stages or min(self.sizes) < 1 or sum(self.sizes) > nodes:
            raise Infeasible(
                f"stage sizes {','.join(map(str, self.sizes))}: {self.stages} stages need {self.stages} sizes of 1 or "
                f"more that add up to at most {nodes} nodes; for example "
                + ",".join(map(str, stage_sizes(nodes, self.stages, self.visited)))
            )
        unit = self.lane_unit
        if self.workload.microbatches % unit:
            lower = self.workload.microbatches // unit * unit
            nearest = f"{lower} or {lower + unit}" if lower else f"{unit}"
            raise Infeasible(
                f"{self.workload.microbatches} microbatches over {self.visited - 1} of {self.stages - 1} stages cannot "
                f"visit each equally often (CC3): use a multiple of {unit}, such as {nearest}"
            )
        self._check_memory()

    def _check_memory(self) -> None:
        """Check that enough nodes can hold each stage; which ones is for the allocation to say."""
        for stage, size in enumerate(self.sizes):
            able = int((self.costs.slots[stage] > 0).sum())
            if able >= size:
                continue
            layers, nodes = self.layers[stage], self.cluster.nodes
            need = min(device_bytes(node, self.workload, stage, layers, 1) for node in nodes)
            have = max(node.memory_bytes for node in nodes)
            where = "each device of a node" if any(node.devices > 1 for node in nodes) else "a node"
            raise Infeasible(
                f"stage {stage} needs {need / 2**30:.1f} GiB on {where} for {layers} layers and one "
                f"microbatch; {able} nodes have that ({size} needed, the largest has {have / 2**30:.1f} GiB): "
                + self._less_state()
                + self._less_memory()
            )

    def _fits(self, workload: Workload, each_layers: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether enough nodes could hold each stage, of these layers and sizes, if it were computed in this way."""
        return all(
            sum(room_of(node, workload, stage, layers).slots > 0 for node in self.cluster.nodes) >= size
            for stage, (layers, size) in enumerate(zip(each_layers, sizes, strict=True))
        )

    def _less_state(self) -> str:
        """The way to hold less of optimizer state and sums that makes the stages fit and costs least, in words."""
        work = self.workload
        if (work.optimizer, work.offload) != (DEFAULT, "none"):
            return ""
        for recomputed in dict.fromkeys((work.activation_checkpointing, True)):
            also = "" if recomputed == work.activation_checkpointing else " and activation checkpointing"
            for change, said in LESS_STATE:
                changed = replace(work, activation_checkpointing=recomputed, **change)
                if self._fits(changed, self.layers, self.sizes):
                    return f"it fits with {said}{also}; or "
        return ""

    def _less_memory(self) -> str:
        for stages in range(self.stages + 1, min(self.workload.model.layers, len(self.cluster)) + 1):
            layers = self.workload.layer_split(stages)
            sizes = stage_sizes(len(self.cluster), stages, min(self.visited, stages))
            if self._fits(self.workload, layers, sizes):
                return f"use {stages} stages, a smaller microbatch, or activation checkpointing"
        return "use a smaller microbatch, activation checkpointing, or nodes with more memory"

    @cached_property
    def costs(self) -> CostModel:
        return shared_cost_model(self.cluster, self.workload, self.layers)

    @property
    def lane_unit(self) -> int:
        return lane_unit(self.stages, self.visited)

    @property
    def lanes_in_memory(self) -> int:
        """Lanes that there can be at most, whichever node is on which stage."""
        microbatches = self.workload.microbatches
        slots = self.costs.slots.max(axis=0).clip(max=microbatches)
        return min(microbatches, int(slots.sum()) // self.visited)

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """The workload; if that is open, also with activations that are recomputed."""
        if not self.decision_variables.checkpointing:
            return (self.workload,)
        return self.workload, replace(self.workload, activation_checkpointing=True)

    def has_more_slots_than(self, other: Problem) -> bool:
        """Whether some node can hold more lanes on some stage than in the other problem, of as many microbatches."""
        most = self.workload.microbatches
        return bool((self.costs.slots.clip(max=most) > other.costs.slots.clip(max=most)).any())

    def lane_limit(self, placement: Placement) -> int:
        """The most lanes that the memory of this placement can carry, as a multiple of the unit; 0: none."""
        capacity = [sum(int(self.costs.slots[stage, node]) for node in nodes) for stage, nodes in enumerate(placement)]
        others, visits = self.stages - 1, self.visited - 1
        most = min([capacity[0], *(room * others // visits for room in capacity[1:])])
        most = min(most, self.workload.microbatches)
        return most // self.lane_unit * self.lane_unit

    def lanes_of(self, placement: Placement, most: int | None = None) -> list[tuple[int, int]]:
        """(data node, microbatches) of every lane, so many at most; fast data nodes get more lanes, no two lanes differ
        by over 1."""
        count = self.lane_limit(placement) if most is None else min(most, self.lane_limit(placement))
        if count == 0:
            self.check_slots(placement)
            raise AssertionError("there is room for lanes")
        slots = {node: int(self.costs.slots[0, node]) for node in placement[0]}
        work_ns = {
            node: int(self.costs.forward_ns[0, node] + self.costs.backward_ns[0, node] + self.costs.head_ns[node])
            // int(self.costs.workers[0, node])
            for node in placement[0]
        }
        lanes = dict.fromkeys(placement[0], 0)
        least_loaded = [(work_ns[node], node) for node in placement[0] if slots[node]]
        heapify(least_loaded)
        for _ in range(count):
            load_ns, node = heappop(least_loaded)
            lanes[node] += 1
            if lanes[node] < slots[node]:
                heappush(least_loaded, (load_ns + work_ns[node], node))
        each, extra = divmod(self.workload.microbatches, count)
        order = [(node, nth) for node in placement[0] for nth in range(lanes[node])]
        first = set(sorted(order, key=lambda lane: (lane[1], work_ns[lane[0]]))[:extra])
        return [(node, each + ((node, nth) in first)) for node, nth in order]

    def check_slots(self, placement: Placement | None = None) -> None:
        """Infeasible if a stage has too few slots for the lanes that it takes to visit stages equally often; without a
        placement: whichever nodes it gets."""
        found = self._short_stage(placement)
        if found is None:
            return
        stage, nodes, room, needed = found
        ways = self._more_slots(placement, -(-needed // nodes))
        fields = ", ".join(JOB_FIELDS[way.split()[0]] for way in ways)
        raise Infeasible(
            f"stage {stage} is on {nodes} node{'s' * (nodes > 1)} with room for {room} microbatch{'es' * (room != 1)} "
            f"at a time, and paths through {self.visited} of {self.stages} stages need room for {needed} there, so "
            f"that each stage is visited equally often: add nodes, or give {' or '.join(ways)} (in a job: {fields})"
        )

    def _short_stage(self, placement: Placement | None) -> tuple[int, int, int, int] | None:
        """A stage with too few slots, its nodes, the microbatches that these hold, and those that they have to hold."""
        unit, visits, others = self.lane_unit, self.visited - 1, self.stages - 1
        for stage, size in enumerate(self.sizes):
            slots = self.costs.slots[stage]
            nodes = list(placement[stage]) if placement else np.argsort(slots)[-size:].tolist()
            needed, room = unit * visits // others if stage else unit, int(slots[nodes].sum())
            if room < needed:
                return stage, len(nodes), room, needed
        return None

    def _more_slots(self, placement: Placement | None, each: int) -> list[str]:
        """Options that give all stages enough slots, one of them alone; nodes then hold so many microbatches each."""
        work, samples = self.workload, [self.workload.samples_per_microbatch]
        while samples[-1] > 1:
            samples.append(samples[-1] // 2)
        changes: list[tuple[str, dict[str, Any]]] = [
            (f"--samples {fewer}", {"samples_per_microbatch": fewer}) for fewer in samples[1:]
        ]
        if work.max_slots is not None:
            changes.append((f"--max-slots {each}", {"max_slots": each}))
        if not work.activation_checkpointing:
            changes.append(("--checkpointing", {"activation_checkpointing": True}))
        found: dict[str, str] = {}
        for option, change in changes:
            enough = replace(self, workload=replace(work, **change))._short_stage(placement) is None
            if enough:
                found.setdefault(option.split()[0], option)
        return [*found.values(), "--skip 0"]


def full_pipeline(problem: Problem) -> Problem:
    """The same workload without skips and swaps, on stages of equal size; nodes that make no whole pipeline stay
    idle."""
    size = len(problem.cluster) // problem.stages
    return replace(problem, visited=problem.stages, swaps=0, sizes=(size,) * problem.stages)


def problem_on_stages(plan: Plan, visited: int, timing: Timing = Timing.FULL, swaps: int = MAX_SWAPS) -> Problem:
    """The problem of finding paths of this length over the stages of a plan; all else stays as it is there."""
    return Problem(
        plan.cluster,
        plan.workload,
        len(plan.stages),
        visited,
        sizes=tuple(map(len, plan.placement)),
        swaps=swaps,
        timing=timing,
        dispatch=plan.dispatch,
        split_backward=plan.split_backward,
        layers=plan.layers,
        decision_variables=ALL_FIXED,
    )


def check_feasible(problem: Problem, length: PathLength, lengths: Iterable[PathLength] = ()) -> None:
    """Infeasible if there is no plan with paths of this length, as far as can be told without making one. `lengths` are
    all that the run has: the number of microbatches has to be right for each."""
    try:
        _check_length(problem, length)
    except Infeasible as error:
        raise for_all_lengths(error, problem.stages, length, lengths) from None


def for_all_lengths(error: Infeasible, stages: int, length: PathLength, lengths: Iterable[PathLength]) -> Infeasible:
    """The error of paths of one length; it also says which microbatches suit all lengths of the run, if they are other
    ones."""
    unit = shared_lane_unit(stages, {length, *lengths})
    if unit == lane_unit(stages, length):
        return error
    return Infeasible(f"{error}; for all paths of the run a multiple of {unit}")


def _check_length(problem: Problem, length: PathLength) -> None:
    if not isinstance(length, tuple):
        replace(problem, visited=length)
        return
    microbatches, others = problem.workload.microbatches, problem.stages - 1
    visits = sum(deal_lengths(length, microbatches)) - microbatches
    if visits % others:
        raise Infeasible(
            f"{microbatches} microbatches cannot visit each stage equally often (CC3): use a multiple of "
            f"{lane_unit(problem.stages, length)}"
        )


def lane_unit(stages: int, visited: PathLength) -> int:
    """Lanes, and so microbatches, that visit L−1 of S−1 stages equally often come in multiples of this; with paths of
    several lengths, microbatches that are divided into equal parts and do so together."""
    parts = parts_of(visited)
    return len(parts) * (stages - 1) // gcd(stages - 1, sum(parts) - len(parts)) if stages > 1 else len(parts)


def shared_lane_unit(stages: int, lengths: Iterable[PathLength]) -> int:
    """Microbatches that are right for paths of each of these lengths come in multiples of this."""
    return lcm(*(lane_unit(stages, each) for each in lengths))


def stage_sizes(nodes: int, stages: int, visited: int, most_data_nodes: int | None = None) -> tuple[int, ...]:
    """Sizes that match the demand: |stage 0| : |any other| near (S−1) : (L−1), with every node in use.

    Stage 0 sees every microbatch, another stage (L−1)/(S−1) of them; the busiest node should be as idle as can be.
    """
    others = stages - 1
    share = (visited - 1) / others

    def busiest(data_nodes: int) -> float:
        return max(1 / data_nodes, share / ((nodes - data_nodes) // others))

    most = min(nodes - others, most_data_nodes or nodes)
    data_nodes = min(range(1, most + 1), key=busiest)
    return (data_nodes, *split_evenly(nodes - data_nodes, others))


def averagings(problem: Problem, placement: Placement) -> tuple[Averaging, ...]:
    """How the nodes of every stage best average gradients."""
    return tuple(problem.costs.averaging(stage, nodes) for stage, nodes in enumerate(placement))


CHECK_EVERY = 4  # steps between two looks at the clock


class Budget:
    """Budget of a search: a number of steps, which makes it repeatable, and seconds, which make it end."""

    def __init__(
        self,
        steps: int,
        seconds: float,
        clock: Callable[[], float],
        stopped: Callable[[], bool] = lambda: False,
        on_step: Callable[[int, int], None] = lambda spent, steps: None,
    ) -> None:
        self.steps = steps
        self.spent = 0
        self._over = False
        self._deadline = clock() + seconds
        self._clock = clock
        self._stopped = stopped
        self._on_step = on_step

    def spend(self) -> bool:
        """Take one step of the budget; False: it is spent."""
        if self._over or self.spent >= self.steps:
            return False
        if self.spent % CHECK_EVERY == 0:
            self._on_step(self.spent, self.steps)
            self._over = self._stopped() or self._clock() >= self._deadline
            if self._over:
                return False
        self.spent += 1
        return True


class Strategy(StrEnum):
    BEST = "best"
    SKIPPIPE = "skippipe"
    NO_TC2 = "no-tc2"
    DTFM_SKIP = "dtfm-skip"
    DTFM = "dtfm"


PlanProgress = Callable[[str, float, float | None], None]
"""Called with what is being done, which share of it is done, and the best iteration so far, in seconds."""


@dataclass(frozen=True)
class PlanRequest:
    """Budget and options of one planning run. Steps are counted, so the same seed gives the same plan; seconds only cut
    the search short."""

    seed: int = 0
    budget_s: float = 60.0
    placement: Placement | None = None
    """Keep these nodes on these stages, and search paths only; None: search both."""
    progress: PlanProgress = lambda what, share, best_s: None
    clock: Callable[[], float] = time.monotonic
    stopped: Callable[[], bool] = lambda: False
    """Called between steps; once it returns True, the best plan so far is the result."""
    changes: float = math.inf
    """Changes that `best` may try: a limit like seconds, but one that can be repeated exactly."""
    bound_s: float = 0.0
    """Seconds for a proven lower bound, once there is a plan; 0: no bound."""
    start: Plan | None = None
    """The plan that `best` begins with; None: one that it makes in a moment."""
    robust: float = 0.0
    """Jitter under which `best` chooses its plan, by the 95th percentile; 0: by the promised iteration."""


def iteration_ns(plan: Plan) -> int:
    return plan.promise.iteration_ns
