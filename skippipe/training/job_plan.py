"""The plan of a job: made for it, from a file, or of the run that is resumed; and plans beside it for other lengths of
paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from skippipe.cluster import Cluster, DeviceMode
from skippipe.errors import Infeasible, UserError
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stand_ins import is_bridge
from skippipe.model_shape import model_named
from skippipe.plan import Plan
from skippipe.planner.codec_choice import choose_beside, with_codecs_of, with_smallest_elsewhere
from skippipe.planner.problem import PlanRequest, Strategy, check_feasible, for_all_lengths, shared_lane_unit
from skippipe.planner.problem_spec import PlanSpec, cluster_named, problem_of, stages_of
from skippipe.planner.published import Example
from skippipe.planner.strategies import has_lengths, make_plan_for, plans_lengths, with_paths_of
from skippipe.presets import emulated_cluster
from skippipe.simulator import simulate
from skippipe.skip_schedule import PathLength, mean_repeats, parse_share, parts_of, path_length_text, visited_of
from skippipe.timeline import Timing
from skippipe.training.job_config import JobConfig
from skippipe.validate import validate
from skippipe.workload import Workload, split_evenly

EMULATED_BATCH = {"sequence_tokens": 4096, "samples_per_microbatch": 2, "wire_dtype": "bf16"}


def make_job_plan(
    job: JobConfig,
    cluster: Cluster,
    example: Example | None,
    spec: ModelSpec,
    request: PlanRequest,
    first: int = 0,
) -> Plan:
    """A plan for paths of the length that most iterations have, from the `first` one on."""
    pipeline = job.pipeline
    plan_spec = PlanSpec(
        stages=pipeline.stages or None,
        skip=pipeline.skip or None,
        layers=pipeline.layers or None,
        microbatches=job.batch.microbatches or None,
        split_backward=pipeline.split_backward,
    )
    stages, budget = stages_of(cluster, plan_spec, example), job.codec_budget
    wire, gradients = budget.usual if budget else (job.transport.wire, job.averaging.dtype)
    workload = _as_job_trains(
        Workload(
            spec.shape,
            sequence_tokens=job.batch.sequence,
            samples_per_microbatch=job.batch.samples,
            wire_dtype=wire,
            gradient_dtype=gradients,
            compute_dtype=job.compute.dtype,
            activation_checkpointing=job.model.checkpointing,
            max_slots=pipeline.max_slots,
        ),
        job,
        spec,
        stages,
        {visited_of(parse_share(pipeline.skip or "0", "pipeline.skip"), stages): 1},
    )
    cluster = _emulated(job, cluster, workload)
    if job.followed.phases:
        lengths = job_lengths(job, stages, stages, first=first)
        single = job.followed.lengths(job.iterations, stages, stages, first)
        plan_spec = replace(plan_spec, visit=max(single, key=lambda each: (single[each], each)), also=tuple(lengths))
    with _naming_shared_unit(plan_spec, stages):
        problem = replace(problem_of(cluster, workload, plan_spec, example), codec_budget=budget)
    for length in plan_spec.also:
        with _explain_infeasible(length, problem.stages):  # what is infeasible is found before a long search
            check_feasible(problem, length, plan_spec.also)
    usual = most_frequent(lengths) if job.followed.phases else problem.visited
    if job.followed.phases:
        planned = usual if plans_lengths(problem, usual, Strategy(pipeline.strategy)) else problem.visited
        request = _numbered(request, 1, len({*lengths, planned}), planned, problem.stages)
    with _explain_infeasible(usual, problem.stages) if isinstance(usual, tuple) else nullcontext():
        return make_plan_for(problem, usual, Strategy(pipeline.strategy), request)


def _as_job_trains(
    workload: Workload, job: JobConfig, spec: ModelSpec, stages: int, paths: Mapping[int, int]
) -> Workload:
    """The workload with all that the job says about training: optimizer, averaging, adapters, bridges. So many `paths`
    have each length, unless the recipe says otherwise."""
    layers = split_evenly(spec.layers, stages)
    slots = [slot for each in range(stages) for slot in layout_of_stage(spec, layers, each)] if spec.frozen else []
    adapters = sum(slot.size for slot in slots if not is_bridge(slot.name))
    shares: Mapping[int, Fraction | int] = paths
    if job.followed.phases:
        shares = job.followed.path_shares(job.iterations, stages, stages)
    return replace(
        workload,
        early_exit=job.recipe.early_exit > 0,
        teacher=job.recipe.teacher,
        optimizer=job.learning.optimizer,
        collective=job.averaging.engine,
        offload=job.compute.offload,
        adapter_parameters=-(-adapters // spec.layers),  # of a layer, on average
        bridge_parameters=spec.shape.bridge_parameters(spec.bridges, stages),
        bridge_rank=spec.bridges,
        repeats=spec.repeats,
        mean_repeats=mean_repeats(stages, shares, spec.repeats),
    )


def job_lengths(
    job: JobConfig, stages: int, default: int, plan: Plan | None = None, first: int = 0
) -> Counter[PathLength]:
    """Length of paths → how many iterations of the job, from the `first` one on, have such paths. Where the recipe does
    not say it, paths are those of the plan, of which the longest is the `default`."""
    found = job.followed.path_lengths(job.iterations, stages, default, first)
    shortest = min(found, key=lambda length: min(parts_of(length)))
    least = min(parts_of(shortest))
    if least < 2 <= stages:
        raise UserError(
            f"recipe.skip: '{job.followed.skip}' leaves {least} of {stages} stages in {found[shortest]} "
            f"iterations; a path has at least 2: skip {Fraction(stages - 2, stages)} at most"
        )
    shorter = plan is not None and not job.followed.phases and _paths_of(plan).keys() != {stages}
    if (job.recipe.bridges or job.recipe.distill) and found.keys() == {stages} and not shorter:
        name = "heal" if job.recipe.heal else "bridges" if job.recipe.bridges else "distill"
        raise UserError(f"recipe.{name}: would have no effect: no path leaves a stage out; set recipe.skip")
    return found


def _paths_of(plan: Plan) -> Counter[int]:
    """Length of paths → how many microbatches have such paths."""
    found: Counter[int] = Counter()
    for lane in plan.lanes:
        found[len(lane.path)] += lane.microbatches
    return found


def most_frequent(lengths: Counter[PathLength]) -> PathLength:
    """The length of paths that most iterations have."""
    return max(lengths, key=lambda length: (lengths[length], parts_of(length)))


def plans_by_length(
    job: JobConfig, plan: Plan, lengths: Iterable[PathLength], request: PlanRequest, *, resumed: bool
) -> dict[PathLength, Plan]:
    """Plans for all lengths that paths have in the run, on the stages of the given plan. They share a workload: a link
    has the same codecs in all."""
    if not job.followed.phases:
        return {plan.visited: plan}
    budget, settled = job.codec_budget, [plan]
    found: dict[PathLength, Plan] = {}
    others = [length for length in lengths if not has_lengths(plan, length)]
    for length in sorted(lengths, key=parts_of):
        same = plan if has_lengths(plan, length) else _saved_plan(job, plan, length) if resumed else None
        if same is None:
            with _explain_infeasible(length, len(plan.stages)):
                given = with_smallest_elsewhere(plan) if budget else plan
                number = 2 + sorted(others, key=parts_of).index(length)
                asked = _numbered(request, number, 1 + len(others), length, len(plan.stages))
                same = with_paths_of(given, length, Strategy(job.pipeline.strategy), asked)
            if budget:
                same = choose_beside(same, settled, budget)
                settled.append(same)
        else:
            settled.insert(0, same)
        found[length] = same
    return with_codecs_of(settled[-1], found) if budget else found


def _numbered(request: PlanRequest, number: int, of: int, length: PathLength, stages: int) -> PlanRequest:
    """The request, whose progress says which of the job's plans it is, and for which paths."""
    if of == 1:
        return request
    which = f"plan {number} of {of} ({path_length_text(length)} of {stages} stages)"

    def progress(what: str, share: float, best_s: float | None) -> None:
        request.progress(f"{which}: {what}", share, best_s)

    return replace(request, progress=progress)


@contextmanager
def _naming_shared_unit(plan_spec: PlanSpec, stages: int) -> Iterator[None]:
    """What suits paths of one length alone is of no use where a run has others, too."""
    try:
        yield
    except Infeasible as error:
        visit = plan_spec.visit or stages
        unit = shared_lane_unit(stages, {visit, *plan_spec.also})
        if not plan_spec.also or not plan_spec.microbatches or plan_spec.microbatches % unit == 0:
            raise
        raise for_all_lengths(error, stages, visit, plan_spec.also) from None


@contextmanager
def _explain_infeasible(length: PathLength, stages: int) -> Iterator[None]:
    try:
        yield
    except Infeasible as error:
        raise Infeasible(f"recipe.skip: paths through {path_length_text(length)} of {stages} stages: {error}") from None


def plan_file(job: JobConfig, length: PathLength | None = None, young_stages: int = 0) -> Path:
    """A plan's file in the output folder. With a length: for paths that are not of the most frequent length; or of a
    model of so many stages that is still to grow."""
    which = "" if length is None else "-" + path_length_text(length).replace(" & ", "-").replace(" ", "")
    which = f"-of-{young_stages}" if young_stages else which
    return Path(job.output) / f"plan{which}.json"


def _saved_plan(job: JobConfig, plan: Plan, length: PathLength) -> Plan | None:
    """The plan for paths of this length that an earlier run has saved, if it is for the same stages."""
    try:
        found = Plan.load(plan_file(job, length))
    except UserError:  # or there is none
        return None
    alike = (found.stages, found.cluster, found.workload) == (plan.stages, plan.cluster, plan.workload)
    return found if alike and has_lengths(found, length) and not validate(found) else None


def plan_of_earlier_run(job: JobConfig, spec: ModelSpec, path: Path) -> Plan | None:
    """The plan that an earlier run has saved, if it fits."""
    try:
        found = Plan.load(path)
        settled = _settled_by(found)
        if job.pipeline.nats is not None:
            del settled["transport.wire"], settled["averaging.dtype"]
        elif found.workload.wire_dtypes or found.workload.gradient_dtypes:
            return None
        if any(value != job.value(name) for name, value in settled.items() if job.value(name)):
            return None
        return checked_plan(found, job, spec, path)
    except UserError:  # or there is none
        return None


def _settled_by(plan: Plan) -> dict[str, Any]:
    """Fields of a job that a plan settles, and what it has for them."""
    work = plan.workload
    return {
        "batch.sequence": work.sequence_tokens,
        "batch.samples": work.samples_per_microbatch,
        "batch.microbatches": plan.microbatches,
        "transport.wire": work.wire_dtype,
        "averaging.dtype": work.gradient_dtype,
        "compute.dtype": work.compute_dtype,
        "model.checkpointing": work.activation_checkpointing,
        "pipeline.stages": len(plan.stages),
        "pipeline.max_slots": work.max_slots,
        "pipeline.split_backward": plan.split_backward,
    }


def check_settled(job: JobConfig, plan: Plan) -> None:
    """UserError if the job sets a field that its plan file settles, and to something else."""
    pipeline = job.pipeline
    if job.recipe.heal and plan.split_backward:
        raise UserError(
            f"pipeline.plan: {pipeline.plan} splits the backward pass, and with recipe.heal nothing is put off: make a "
            "plan without that, or leave pipeline.plan out"
        )
    settled = _settled_by(plan)
    if pipeline.layers:
        settled["pipeline.layers"] = ",".join(map(str, plan.layers))
    if pipeline.skip and visited_of(parse_share(pipeline.skip, "pipeline.skip"), len(plan.stages)) != plan.visited:
        settled["pipeline.skip"] = f"{plan.skipped:.0%}"
    for name, value in settled.items():
        if job.sets(name) and job.value(name) != value:
            raise UserError(
                f"{name}: {job.value(name)}, and pipeline.plan settles that: {pipeline.plan} has {value}; leave one of "
                "them out"
            )
    unused: tuple[str, ...] = ()
    if not job.recipe.phases:
        unused += "pipeline.strategy", "pipeline.budget_s", "pipeline.nats", "pipeline.prices"
    unused += () if job.sets("cluster") else ("emulation.like", "emulation.time")
    for name in filter(job.sets, unused):
        raise UserError(f"{name}: would have no effect: pipeline.plan names a plan that is made; leave one of them out")


def without_sharding(cluster: Cluster) -> Cluster:
    """The cluster for a job that heals: nodes with several devices that may shard a stage work as replicas, so that
    neither planner nor repair gives them a stage that one device cannot hold."""
    nodes = (
        replace(node, device_mode=DeviceMode.REPLICAS) if node.devices > 1 and node.device_mode is None else node
        for node in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))


def _emulated(job: JobConfig, cluster: Cluster, workload: Workload) -> Cluster:
    if not job.emulation.enabled:
        return cluster
    like = replace(Workload(model_named(job.emulation.like)), **EMULATED_BATCH)  # type: ignore[arg-type]
    same = replace(workload, wire_dtype=like.wire_dtype)  # a smaller codec is to be as much faster as on real links
    return emulated_cluster(cluster, like, same, job.emulation.time)


def checked_plan(plan: Plan, job: JobConfig, spec: ModelSpec, file: Path | None = None) -> Plan:
    """A plan from a file, or else the job's, with its promise; UserError unless it is for this model and cluster."""
    path = file or job.pipeline.plan
    shape = replace(spec.shape, name=plan.workload.model.name)
    if shape != plan.workload.model:
        differ = [
            f"{name} {theirs} in the plan, {ours} here"
            for (name, theirs), ours in zip(vars(plan.workload.model).items(), vars(shape).values(), strict=True)
            if theirs != ours
        ]
        raise UserError(
            f"{path}: this plan is for another model than {job.model.config}: {'; '.join(differ)}; without "
            "pipeline.plan, 'skippipe train' plans for this one"
        )
    if job.cluster != JobConfig().cluster:
        cluster = cluster_named(job.cluster)[0]
        cluster = _emulated(job, without_sharding(cluster) if job.recipe.heal else cluster, plan.workload)
        if cluster.fingerprint != plan.cluster.fingerprint:
            raise UserError(
                f"{path}: this plan is for the cluster '{plan.cluster.name}', the job names '{cluster.name}'"
            )
    broken = validate(plan)
    if broken:
        raise UserError(f"{path}: the plan breaks a rule: {broken[0]}; 'skippipe check' names all")
    workload = _as_job_trains(plan.workload, job, spec, len(plan.stages), _paths_of(plan))
    plan = plan.edited(workload=workload)
    if broken := validate(plan):
        raise UserError(f"{path}: with this job's recipe and optimizer the plan breaks a rule: {broken[0]}")
    return plan.promising(simulate(plan, Timing.FULL))
