"""Problems from what users specify: a cluster by its name, and defaults for everything left open."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from skippipe.cluster import Cluster
from skippipe.codecs import CODECS, GRADIENTS, smallest
from skippipe.dispatch import Dispatch
from skippipe.errors import Infeasible, UserError
from skippipe.json_fields import exists
from skippipe.planner.problem import DecisionVariables, Problem, shared_lane_unit, stage_sizes
from skippipe.planner.published import EXAMPLES, Example
from skippipe.presets import PRESETS, preset
from skippipe.skip_schedule import PathLength, parse_share
from skippipe.stage_subset import whole_numbers
from skippipe.timeline import Timing
from skippipe.value_ranges import Choices
from skippipe.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """What a user specifies of a plan; None: left open."""

    stages: int | None = None
    visit: int | None = None
    """Stages on a path; or `skip`, the share to leave out: 0.33, 33%, 1/3."""
    skip: str | None = None
    also: tuple[PathLength, ...] = ()
    """Other lengths of paths that the same number of microbatches must suit."""
    sizes: str | None = None
    """Nodes of each stage, as in 5,3,3,3,3,3."""
    layers: str | None = None
    """Layers of each stage, likewise."""
    microbatches: int | None = None
    dispatch: Dispatch | None = None
    split_backward: bool | None = None
    checkpointing: bool | None = False
    timing: Timing = Timing.FULL


def cluster_named(name: str) -> tuple[Cluster, Example | None]:
    if name in EXAMPLES:
        example = EXAMPLES[name]()
        return example.cluster, example
    if name.split(":")[0] in PRESETS and not exists(Path(name)):
        return preset(name), None
    if not exists(Path(name)):
        known = [*EXAMPLES, *(f"{each}:N" for each in PRESETS)]
        raise UserError(f"cluster '{name}': no such file, and not one of {', '.join(known)}")
    return Cluster.load(Path(name)), None


def problem_of(cluster: Cluster, workload: Workload, plan_spec: PlanSpec, example: Example | None = None) -> Problem:
    """The problem: the example's values or the defaults, with what the spec gives on top."""
    given_sizes = _parse_numbers(plan_spec.sizes, "sizes")
    given_layers = _parse_numbers(plan_spec.layers, "layers")
    count = stages_of(cluster, plan_spec, example)
    as_example = example is not None and count == example.stages
    visited = _visited(count, plan_spec.visit, plan_spec.skip, example.visited if example and as_example else None)
    if not given_sizes and example and as_example and visited == example.visited:
        given_sizes = example.sizes
    microbatches = plan_spec.microbatches
    if microbatches is None and not (example and as_example):
        data_nodes = (given_sizes or stage_sizes(len(cluster), count, visited))[0] if 2 <= count <= len(cluster) else 1
        unit = shared_lane_unit(count, {visited, *plan_spec.also})
        devices = max(1, sum(node.devices for node in cluster.nodes) // len(cluster))
        microbatches = -(-6 * data_nodes * devices // unit) * unit
    if microbatches is not None:
        workload = replace(workload, microbatches=microbatches)
    problem = partial(
        Problem,
        cluster,
        stages=count,
        visited=visited,
        sizes=given_sizes,
        timing=plan_spec.timing,
        dispatch=plan_spec.dispatch or Dispatch.FIRST_COME,
        split_backward=bool(plan_spec.split_backward),
        layers=given_layers,
        decision_variables=DecisionVariables(
            sizes=plan_spec.sizes is None,
            layers=plan_spec.layers is None,
            dispatch=plan_spec.dispatch is None,
            split_backward=plan_spec.split_backward is None,
            checkpointing=plan_spec.checkpointing is None,
        ),
    )
    try:
        return problem(workload)
    except Infeasible:
        if plan_spec.checkpointing is None:
            with suppress(Infeasible):  # too little memory without
                return problem(replace(workload, activation_checkpointing=True))
        raise


def fastest_of(types: str | None, name: str) -> str | None:
    """Of the accepted codecs, the one with the fewest bytes."""
    accepted = codecs_of(types, name)
    return smallest(accepted) if accepted else None


def codecs_of(types: str | None, name: str) -> list[str]:
    """Codecs of a list such as bf16,int8."""
    accepted = [each.strip() for each in types.split(",")] if types is not None else []
    known = GRADIENTS if name == "--gradients" else CODECS
    for each in accepted:
        Choices(known).check(each, name)
    return accepted


def stages_of(cluster: Cluster, plan_spec: PlanSpec, example: Example | None = None) -> int:
    """Number of stages: as specified, or by default."""
    if plan_spec.stages is not None:
        return plan_spec.stages
    given = len(_parse_numbers(plan_spec.sizes, "sizes")) or len(_parse_numbers(plan_spec.layers, "layers"))
    default = 6 if len(cluster) >= 12 else min(4, len(cluster))
    return given or (example.stages if example else default)


def _visited(stages: int, visit: int | None, skip: str | None, of_example: int | None) -> int:
    if visit is not None and skip is not None:
        raise UserError("visit and skip say the same thing: give one of them")
    if visit is not None:
        return visit
    if skip is None:
        return of_example or max(2, stages - max(1, stages // 3))
    return stages - round(parse_share(skip, "skip") * stages)


def _parse_numbers(text: str | None, name: str) -> tuple[int, ...]:
    return () if text is None else whole_numbers(text, name)
