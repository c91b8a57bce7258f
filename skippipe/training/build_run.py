"""From a job to all that a run needs: text, model, plans, settings. What can be wrong is found here, before any node is
started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from skippipe.checkpoint.hf_export import JOB_FILE
from skippipe.checkpoint.storage import WriteFailures, check_room
from skippipe.cluster import Cluster
from skippipe.collectives import COLLECTIVES, Collective
from skippipe.data.batch_sampler import BatchSampler
from skippipe.data.prepare import PrepareProgress, prepare
from skippipe.data.token_file import TokenFile
from skippipe.errors import Infeasible, UserError
from skippipe.json_fields import json_text, write_text
from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_spec import ModelSpec, config_named, parse_devices
from skippipe.model_shape import model_named
from skippipe.optim.interface import STORED_BYTES
from skippipe.plan import Plan
from skippipe.planner.codec_choice import choose_beside, with_codecs_of, with_smallest_elsewhere
from skippipe.planner.problem import PlanRequest, Strategy, check_feasible
from skippipe.planner.problem_spec import PlanSpec, cluster_named, problem_of, stages_of
from skippipe.planner.published import Example
from skippipe.planner.strategies import has_lengths, make_plan_for, with_paths_of
from skippipe.presets import emulated_cluster
from skippipe.runtime.coordinator.recovery import BACKED_UP, best_pair
from skippipe.runtime.coordinator.settings import (
    CoordinatorSettings,
    Deadlines,
    RecordedIterations,
    RecoverySettings,
    ValidationSettings,
)
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.train_role import check_sharding
from skippipe.simulator import simulate
from skippipe.skip_schedule import PathLength, parse_share, parts_of, path_length_text, visited_of
from skippipe.timeline import Timing
from skippipe.training.held_out import held_out_samples, held_out_text
from skippipe.training.job_config import JobConfig
from skippipe.training.pretrained import check_vocabulary, with_pretrained, write_first_checkpoint
from skippipe.training.run import Run, RunOptions
from skippipe.training.run_folder import make_folder
from skippipe.training.trackers import check_trackers
from skippipe.transport.addresses import free_port
from skippipe.validate import validate
from skippipe.workload import Workload

ITERATION_TIMEOUT_FACTOR = 5  # times the promised seconds
CHECKPOINT_ADVICE = "set checkpoint.every"
EMULATED_BATCH = {"sequence_tokens": 4096, "samples_per_microbatch": 2, "wire_dtype": "bf16"}


@dataclass(frozen=True)
class RunSetup(RunOptions):
    """A job with all that was made for it, ready to run."""

    job: JobConfig
    plan: Plan
    """The plan with its promise, under full timing; if paths change their length, the one that most iterations use."""
    spec: ModelSpec
    tokens: TokenFile
    plans: Mapping[PathLength, Plan]
    """Length of paths → the plan for it, on the same stages; the plan is one of them."""
    lengths: Mapping[PathLength, int]
    """Length of paths → how many iterations of the run have such paths."""
    held_out_tokens: TokenFile | None = None
    """The text of validation.texts."""

    @cached_property
    def sampler(self) -> BatchSampler:
        """The text as nodes get it."""
        return self.node_config.sampler()

    @property
    def read_while_training(self) -> list[Path]:
        """Files and folders that must stay in place during the run."""
        named = (self.job.pipeline.plan, self.job.transport.peers, self.job.transport.key)
        return [self.tokens.folder, *(Path(each) for each in named if each)]

    def save_plans(self) -> None:
        """Write the job, with all defaults and the recipe that it follows, and the plans to the output folder.

        A resumed run has them, and goes on if they cannot be written again.
        """
        failures, path = WriteFailures(), Path(self.job.output) / JOB_FILE
        with failures.tolerated(path, "it stays as it was") if self.resumed else nullcontext():
            write_text(path, json_text(asdict(replace(self.job, recipe=self.job.followed))) + "\n")
        for length, plan in self.plans.items():
            path = _plan_file(self.job, None if plan is self.plan else length)
            with failures.tolerated(path, "it stays as it was") if self.resumed else nullcontext():
                plan.save(path)

    @cached_property
    def node_config(self) -> NodeConfig:
        job = self.job
        node_config = NodeConfig(
            plan=self.plan,
            config=self.spec.config.to_dict(),
            seed=job.seed,
            learning=job.schedule,
            data_folder=str(self.tokens.folder.absolute()),
            data_fingerprint=self.tokens.fingerprint,
            device=job.compute.device,
            compiled=job.compute.compiled,
            threads=job.compute.threads,
            emulated=job.emulation.enabled,
            heartbeat_s=job.survive.heartbeat_s,
            rendezvous=None if self.collective.in_messages else f"127.0.0.1:{free_port('127.0.0.1')}",
            recipe=job.followed,
            packing=job.data.packing,
            lora=self.spec.lora,
        )
        return replace(node_config, held_out=held_out_samples(job.validation, node_config, self.held_out_tokens))

    @property
    def collective(self) -> Collective:
        return COLLECTIVES[self.job.averaging.engine]

    @property
    def coordinator_settings(self) -> CoordinatorSettings:
        """All that the coordinator is told. A plan for slow links may promise long iterations, so the deadline of an
        iteration depends on the promise."""
        job, survive = self.job, self.job.survive
        held_out = self.node_config.held_out
        promised = timedelta(seconds=max(plan.expected.iteration_s for plan in self.plans.values() if plan.expected))
        return CoordinatorSettings(
            optim=job.schedule,
            iterations=job.iterations,
            skip_schedule=job.followed,
            plans=self.plans,
            recorded=RecordedIterations(job.report.recorded, job.iterations),
            checkpoint_every=job.checkpoint.every,
            validation=ValidationSettings(
                every=job.validation.every if held_out else 0,
                microbatches=held_out.microbatches if held_out else 1,
                patience=job.validation.patience,
            ),
            deadlines=Deadlines(
                iteration=max(Deadlines.iteration, ITERATION_TIMEOUT_FACTOR * promised),
                heartbeat=timedelta(seconds=survive.heartbeat_s),
            ),
            recovery=RecoverySettings(
                lost_stage=survive.lost_stage,
                drift=survive.drift,
                planning=timedelta(seconds=survive.planning_s),
                backup_every=survive.backup_every,
                fault_tolerant=self.collective.elastic,
            ),
        )

    @property
    def backup(self) -> tuple[int, int] | None:
        """The data node that sends a backup of what only stage 0 holds, and the node that keeps it first; or None."""
        kept = self.job.survive.backup_every and self.collective.elastic
        return best_pair(self.plan, self.plan.stage_of) if kept else None

    @property
    def risk(self) -> str:
        """What the loss of a single node would cost; empty: nothing that recovery does not restore."""
        data_nodes, survive = self.plan.stages[0].nodes, self.job.survive
        if self.job.checkpoint.every or len(data_nodes) > 1:
            return ""
        alone = f"'{self.plan.cluster.nodes[data_nodes[0]].name}' alone holds stage 0, and no checkpoints are made"
        if self.plan.workload.adapter_parameters:
            return f"{alone}: if it is lost, its adapters begin anew; {CHECKPOINT_ADVICE}, or plan two data nodes"
        if self.backup is not None:
            cost = (
                f"if it is lost, {BACKED_UP} go back some {survive.backup_every} iterations, its layers are made anew"
            )
            return f"{alone}: {cost} from another stage's; {CHECKPOINT_ADVICE}, or plan two data nodes"
        copies = "survive.backup_every = 10" if not survive.backup_every else "a node with memory for a copy of them"
        return f"{alone}: if it is lost, so is the model; {CHECKPOINT_ADVICE}, {copies}, or plan two data nodes"

    @cached_property
    def run(self) -> Run:
        """The run; made once, since it reads and checks the checkpoint that it continues from."""
        job = self.job
        return Run(
            node_config=self.node_config,
            spec=self.spec,
            tokenizer=self.tokens.tokenizer(),
            output=Path(job.output),
            settings=self.coordinator_settings,
            kept=job.checkpoint.keep,
            security=job.transport.security,
            listen=job.transport.listen,
            nodes_join=bool(job.transport.peers),
            restarts=job.survive.restarts,
            **{option.name: getattr(self, option.name) for option in fields(RunOptions)},
        )

    def with_first_checkpoint(self) -> RunSetup:
        """The setup of a run that goes on from a checkpoint with the weights that the job begins with."""
        write_first_checkpoint(self.run, Path(self.job.model.weights), self.job.lora.weights)
        return replace(self, resumed=True)

    def check_room(self, rescue: Path | None = None) -> None:
        """UserError unless there is room for the model and for all checkpoints that there will be at one time. A run
        that is resumed with a rescue folder may have been resumed because the output folder has no room."""
        job, work = self.job, self.plan.workload
        model_bytes = STORED_BYTES * work.model.parameters
        checkpoint_bytes = sum(work.checkpoint_bytes(stage, layers) for stage, layers in enumerate(self.plan.layers))
        if self.spec.lora.rank and not self.resumed:
            model_bytes *= 2  # what adapters are for is kept beside the checkpoints
        made = (job.iterations - self.run.first) // job.checkpoint.every + 1 if job.checkpoint.every else 0
        there = len(self.run.checkpoints.complete())
        more = min(made, max(1, job.checkpoint.keep + 1 + job.validation.enabled - there)) if made else 0
        more += bool(job.model.weights) and not self.resumed
        if rescue is None or not self.resumed:
            check_room(Path(job.output), "output", model_bytes, checkpoint_bytes, more)
        if rescue is not None:
            check_room(rescue, "--rescue", model_bytes, checkpoint_bytes, min(made, 1))


def build_run(
    job: JobConfig,
    *,
    reading: PrepareProgress = lambda what, share: None,
    request: PlanRequest | None = None,
    nodes_here: bool = True,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> RunSetup:
    """Prepare text, model and plans of a job.

    `request` is the budget of planning; none: the job's. Without `nodes_here`, nodes check their device themselves.

    A resumed run keeps the plan that it had, if that still fits the job's model and cluster.
    """
    if nodes_here:
        parse_devices(job.compute.device)
    job = with_pretrained(job)
    make_folder(Path(job.output))
    check_trackers(job.report)
    given = Plan.load(Path(job.pipeline.plan)) if job.pipeline.plan else None
    if given is not None:
        _check_settled(job, given)
    cluster, example = cluster_named(job.cluster) if given is None else (given.cluster, None)
    config_named(job.model.config)  # cheap, and says what is wrong before text is read
    tokens = prepare(
        job.data.texts,
        job.data.tokenizer or job.data.vocabulary,
        Path(job.data.folder) if job.data.folder else None,
        reading,
        field=job.data.field,
        loss_on=job.data.loss_on,
    )
    if tokens.marks is None and not job.data.packing:
        raise UserError("data.packing: is for conversations, and the texts hold none; leave it out")
    config = config_named(job.model.config, None if job.model.weights else tokens.vocabulary)
    spec = ModelSpec(config, job.seed, job.lora, job.recipe.bridges)
    if job.model.weights:
        check_vocabulary(job, spec.config.vocab_size, tokens.vocabulary)
    plan = _checked_plan(given, job, spec) if given else None
    if plan is None and options.resumed:
        plan = _plan_of_earlier_run(job, spec)
    request = request or PlanRequest(seed=job.seed, budget_s=job.pipeline.budget_s)
    if plan is None:
        plan = _make_job_plan(job, cluster, example, spec, request)
    check_sharding(plan, spec)
    lengths = _lengths(job, len(plan.stages), plan.visited)
    plans = plans_by_length(job, plan, lengths, request, resumed=options.resumed)
    held_out = held_out_text(job.validation, job.data, tokens, reading)
    plan = plans[_most_frequent(lengths)]
    run_setup = RunSetup(job, plan, spec, tokens, plans, lengths, held_out, **vars(options))
    _ = run_setup.sampler  # is the text long enough?
    if options.resumed:
        _ = run_setup.run.origin  # UserError if there is no checkpoint to continue from
    return run_setup


def _make_job_plan(
    job: JobConfig, cluster: Cluster, example: Example | None, spec: ModelSpec, request: PlanRequest
) -> Plan:
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
    )
    cluster = _emulated(job, cluster, workload)
    if job.followed.phases:
        lengths = _lengths(job, stages, stages)
        single = job.followed.lengths(job.iterations, stages, stages)
        plan_spec = replace(plan_spec, visit=max(single, key=lambda each: (single[each], each)), also=tuple(lengths))
    problem = replace(problem_of(cluster, workload, plan_spec, example), codec_budget=budget)
    for length in plan_spec.also:
        with _explain_infeasible(length, problem.stages):  # what is infeasible is found before a long search
            check_feasible(problem, length, plan_spec.also)
    usual = _most_frequent(lengths) if job.followed.phases else problem.visited
    with _explain_infeasible(usual, problem.stages) if isinstance(usual, tuple) else nullcontext():
        return make_plan_for(problem, usual, Strategy(pipeline.strategy), request)


def _as_job_trains(workload: Workload, job: JobConfig, spec: ModelSpec, stages: int) -> Workload:
    """The workload with all that the job says about training: optimizer, averaging, adapters, bridges."""
    adapters = layout_of_stage(spec, (spec.layers,), 0) if spec.lora.rank else ()
    return replace(
        workload,
        early_exit=job.recipe.early_exit > 0,
        optimizer=job.learning.optimizer,
        collective=job.averaging.engine,
        offload=job.compute.offload,
        adapter_parameters=-(-sum(slot.size for slot in adapters) // spec.layers),  # of a layer, on average
        bridge_parameters=spec.shape.bridge_parameters(spec.bridges, stages),
        bridge_rank=spec.bridges,
    )


def _lengths(job: JobConfig, stages: int, default: int) -> Counter[PathLength]:
    """Length of paths → how many iterations of the job have such paths."""
    found = job.followed.path_lengths(job.iterations, stages, default)
    shortest = min(found, key=lambda length: min(parts_of(length)))
    least = min(parts_of(shortest))
    if least < 2 <= stages:
        raise UserError(
            f"recipe.skip: '{job.followed.skip}' leaves {least} of {stages} stages in {found[shortest]} "
            f"iterations; a path has at least 2: skip {Fraction(stages - 2, stages)} at most"
        )
    if job.recipe.bridges and found.keys() == {stages}:
        raise UserError("recipe.bridges: would have no effect: no path leaves a stage out; set recipe.skip")
    return found


def _most_frequent(lengths: Counter[PathLength]) -> PathLength:
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
    for length in sorted(lengths, key=parts_of):
        same = plan if has_lengths(plan, length) else _saved_plan(job, plan, length) if resumed else None
        if same is None:
            with _explain_infeasible(length, len(plan.stages)):
                given = with_smallest_elsewhere(plan) if budget else plan
                same = with_paths_of(given, length, Strategy(job.pipeline.strategy), request)
            if budget:
                same = choose_beside(same, settled, budget)
                settled.append(same)
        else:
            settled.insert(0, same)
        found[length] = same
    return with_codecs_of(settled[-1], found) if budget else found


@contextmanager
def _explain_infeasible(length: PathLength, stages: int) -> Iterator[None]:
    try:
        yield
    except Infeasible as error:
        raise Infeasible(f"recipe.skip: paths through {path_length_text(length)} of {stages} stages: {error}") from None


def _plan_file(job: JobConfig, length: PathLength | None = None) -> Path:
    """A plan's file in the output folder; with a length: for paths that are not of the most frequent length."""
    which = "" if length is None else "-" + path_length_text(length).replace(" & ", "-").replace(" ", "")
    return Path(job.output) / f"plan{which}.json"


def _saved_plan(job: JobConfig, plan: Plan, length: PathLength) -> Plan | None:
    """The plan for paths of this length that an earlier run has saved, if it is for the same stages."""
    try:
        found = Plan.load(_plan_file(job, length))
    except UserError:  # or there is none
        return None
    alike = (found.stages, found.cluster, found.workload) == (plan.stages, plan.cluster, plan.workload)
    return found if alike and has_lengths(found, length) and not validate(found) else None


def _plan_of_earlier_run(job: JobConfig, spec: ModelSpec) -> Plan | None:
    """The plan that an earlier run has saved in the output folder, if it fits."""
    path = _plan_file(job)
    try:
        found = Plan.load(path)
        settled = _settled_by(found)
        if job.pipeline.nats is not None:
            del settled["transport.wire"], settled["averaging.dtype"]
        elif found.workload.wire_dtypes or found.workload.gradient_dtypes:
            return None
        if any(value != job.value(name) for name, value in settled.items() if job.value(name)):
            return None
        return _checked_plan(found, job, spec, path)
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


def _check_settled(job: JobConfig, plan: Plan) -> None:
    """UserError if the job sets a field that its plan file settles, and to something else."""
    pipeline = job.pipeline
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


def _emulated(job: JobConfig, cluster: Cluster, workload: Workload) -> Cluster:
    if not job.emulation.enabled:
        return cluster
    like = replace(Workload(model_named(job.emulation.like)), **EMULATED_BATCH)  # type: ignore[arg-type]
    same = replace(workload, wire_dtype=like.wire_dtype)  # a smaller codec is to be as much faster as on real links
    return emulated_cluster(cluster, like, same, job.emulation.time)


def _checked_plan(plan: Plan, job: JobConfig, spec: ModelSpec, file: Path | None = None) -> Plan:
    """A plan from a file, or else the job's, with its promise; UserError unless it is for this model and cluster."""
    path = file or job.pipeline.plan
    shape = replace(spec.shape, name=plan.workload.model.name)
    if shape != plan.workload.model:
        differ = [
            f"{name} {theirs} in the plan, {ours} here"
            for (name, theirs), ours in zip(vars(plan.workload.model).items(), vars(shape).values(), strict=True)
            if theirs != ours
        ]
        raise UserError(f"{path}: this plan is for another model than {job.model.config}: {'; '.join(differ)}")
    if job.cluster != JobConfig().cluster:
        cluster = _emulated(job, cluster_named(job.cluster)[0], plan.workload)
        if cluster.fingerprint != plan.cluster.fingerprint:
            raise UserError(
                f"{path}: this plan is for the cluster '{plan.cluster.name}', the job names '{cluster.name}'"
            )
    broken = validate(plan)
    if broken:
        raise UserError(f"{path}: the plan breaks a rule: {broken[0]}; 'skippipe check' names all")
    workload = _as_job_trains(plan.workload, job, spec, len(plan.stages))
    plan = plan.edited(workload=workload)
    if broken := validate(plan):
        raise UserError(f"{path}: with this job's recipe and optimizer the plan breaks a rule: {broken[0]}")
    return plan.promising(simulate(plan, Timing.FULL))
