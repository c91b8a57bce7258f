"""From a job to all that a run needs: text, model, plans, settings. What can be wrong is found here, before any node is
started."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path

from skippipe.checkpoint.format import Checkpoints
from skippipe.checkpoint.grown_state import GrownState
from skippipe.checkpoint.hf_export import JOB_FILE
from skippipe.checkpoint.storage import WriteFailures, check_room
from skippipe.collectives import COLLECTIVES, Collective
from skippipe.data.batch_sampler import BatchSampler
from skippipe.data.prepare import PrepareProgress, prepare
from skippipe.data.token_file import TokenFile
from skippipe.errors import Infeasible, UserError
from skippipe.json_fields import json_text, write_text
from skippipe.model.model_spec import ModelSpec, config_named, parse_devices
from skippipe.optim.interface import STORED_BYTES
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest
from skippipe.planner.problem_spec import cluster_named
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
from skippipe.skip_schedule import PathLength
from skippipe.training.depth_growth import depth_reached, grown_job, young_jobs
from skippipe.training.held_out import held_out_samples, held_out_text
from skippipe.training.job_config import JobConfig
from skippipe.training.job_plan import (
    check_settled,
    checked_plan,
    job_lengths,
    make_job_plan,
    most_frequent,
    plan_file,
    plan_of_earlier_run,
    plans_by_length,
    without_sharding,
)
from skippipe.training.pretrained import (
    check_healed_stages,
    check_vocabulary,
    with_pretrained,
    write_first_checkpoint,
)
from skippipe.training.run import Run, RunOptions, check_resumable
from skippipe.training.run_folder import make_folder
from skippipe.training.trackers import check_trackers
from skippipe.transport.addresses import free_port

log = logging.getLogger(__name__)
UNCOUNTED = 1.02  # times the parameters that plans count
ITERATION_TIMEOUT_FACTOR = 5  # times the promised seconds
CHECKPOINT_ADVICE = "set checkpoint.every"


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
    given_job: JobConfig | None = None
    """The job of the whole run, if its model grows: `job` is of one depth."""
    grows_into: RunSetup | None = None
    """What follows when the model grows after the last iteration of `job`."""
    nodes_are_there: bool = False
    """The model has grown just now: nodes begin anew."""

    @cached_property
    def grown(self) -> RunSetup:
        """What follows, which goes on from the last checkpoint."""
        assert self.grows_into is not None
        return replace(self.grows_into, resumed=True, nodes_are_there=True)

    @property
    def whole_job(self) -> JobConfig:
        """The job as it was given."""
        return self.given_job or self.job

    @property
    def depths(self) -> Iterator[RunSetup]:
        """This setup and those that follow when the model grows."""
        setup: RunSetup | None = self
        while setup is not None:
            yield setup
            setup = setup.grows_into

    @property
    def reached(self) -> RunSetup:
        """The setup of the depth that the run has come to."""
        return self.grown.reached if "grown" in vars(self) else self

    @property
    def node_names(self) -> list[str]:
        """Names of the nodes that the plan of any depth uses."""
        used = {number for setup in self.depths for number in setup.plan.stage_of}
        return [self.plan.cluster.nodes[number].name for number in sorted(used)]

    def deeper_runs(self) -> Iterator[Run]:
        """Runs of deeper models, each made when the one before it has ended."""
        setup = self
        while setup.grows_into is not None:
            setup = setup.grown
            yield setup.run

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
        failures, job, path = WriteFailures(), self.whole_job, Path(self.job.output) / JOB_FILE
        with failures.tolerated(path, "it stays as it was") if self.resumed else nullcontext():
            write_text(path, json_text(asdict(replace(job, recipe=job.followed))) + "\n")
        for setup in self.depths:
            for length, plan in setup.plans.items():
                young_stages = len(plan.stages) if setup.grows_into else 0
                path = plan_file(job, None if plan is setup.plan else length, young_stages)
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
            grows=self.grows_into is not None,
            nodes_are_there=self.nodes_are_there,
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
                join=Deadlines.rejoin if self.nodes_are_there else timedelta(seconds=survive.join_s),
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
            later_plans=tuple(setup.plan for setup in self.depths if setup is not self),
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
        *_, largest = self.depths
        job, plan, work = self.whole_job, largest.plan, largest.plan.workload
        stages = list(enumerate(plan.layers))
        model_bytes = STORED_BYTES * work.model.parameters
        checkpoint_bytes = sum(work.checkpoint_bytes(stage, layers) for stage, layers in stages)
        if self.spec.frozen and not self.resumed:
            model_bytes *= 2  # what adapters are for is kept beside the checkpoints
        if self.spec.heals:  # and these beside the model
            model_bytes += STORED_BYTES * sum(work.trained_parameters(stage, layers) for stage, layers in stages)
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

    A resumed run keeps the plan that it had, if that still fits the job's model and cluster. If the model grows, all of
    it is prepared beforehand, from the depth that the run has come to.
    """
    if nodes_here:
        parse_devices(job.compute.device)
    if options.resumed and not job.transport.peers:  # nodes that joined may have gone on after the checkpoint
        check_resumable(Checkpoints(Path(job.output) / "checkpoints", run_id=options.run_id), job.iterations)
    if not job.recipe.grow:
        run_setup = _build_depth(job, reading, request, options, plan_file(job))
    else:
        run_setup = _build_growing(job, reading, request, options)
    _ = run_setup.sampler  # is the text long enough?
    if options.resumed:
        _ = run_setup.run.origin  # UserError if there is no checkpoint to continue from
    return run_setup


def _build_growing(
    job: JobConfig, reading: PrepareProgress, request: PlanRequest | None, options: RunOptions
) -> RunSetup:
    """The setup of the depth that the run begins with, or has come to, with those of all that follow."""
    later = replace(options, has_grown=True)
    first = math.ceil(job.recipe.grown_at * job.iterations)
    whole = _build_depth(grown_job(job), reading, request, later, plan_file(job), first)
    young = young_jobs(job, whole.spec.layers, len(whole.plan.stages), whole.plan.microbatches)
    reached = depth_reached([*young, job], whole.spec.layers, options.run_id) if options.resumed else 0
    found = replace(whole, given_job=job)
    for number in reversed(range(reached, len(young))):
        stages = young[number].pipeline.stages
        file = plan_file(job, young_stages=stages)
        first = young[number - 1].iterations if number else 0
        try:
            setup = _build_depth(young[number], reading, request, later if number else options, file, first)
        except Infeasible as error:
            raise Infeasible(f"recipe.grow: the model of {stages} stages that is trained first: {error}") from None
        GrownState(setup.spec, setup.plan.layers, found.spec, found.plan.layers)  # or it would fail when it grows
        found = replace(setup, given_job=job, grows_into=found)
    return found


def _build_depth(
    job: JobConfig,
    reading: PrepareProgress,
    request: PlanRequest | None,
    options: RunOptions,
    file: Path,
    first: int = 0,
) -> RunSetup:
    """The setup for a model of one depth, which the run has from the `first` iteration on; `file` is where an earlier
    run has saved its plan."""
    job = with_pretrained(job)
    make_folder(Path(job.output))
    check_trackers(job.report)
    given = Plan.load(Path(job.pipeline.plan)) if job.pipeline.plan else None
    if given is not None:
        check_settled(job, given)
    if given is not None and job.recipe.heal:
        given = given.edited(cluster=without_sharding(given.cluster))
    cluster, example = cluster_named(job.cluster) if given is None else (given.cluster, None)
    if job.recipe.heal:
        cluster = without_sharding(cluster)
    config_named(job.model.config, layers=job.model.layers)  # cheap, and says what is wrong before text is read
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
    vocabulary = None if job.model.weights else tokens.vocabulary
    config = config_named(job.model.config, vocabulary, job.model.layers)
    spec = ModelSpec(config, job.seed, job.lora, job.recipe.bridges, job.recipe.adapters, job.recipe.repeats)
    warn_uncounted(spec)
    if job.model.weights:
        check_vocabulary(job, spec.config.vocab_size, tokens.vocabulary)
    if given and spec.heals:
        check_healed_stages(job.pipeline.plan, Path(job.model.weights), given.layers)
    plan = checked_plan(given, job, spec) if given else None
    if plan is None and options.resumed:
        plan = plan_of_earlier_run(job, spec, file)
    request = request or PlanRequest(seed=job.seed, budget_s=job.pipeline.budget_s)
    if plan is None:
        plan = make_job_plan(job, cluster, example, spec, request, first)
    check_sharding(plan, spec)
    lengths = job_lengths(job, len(plan.stages), plan.visited, plan, first)
    plans = plans_by_length(job, plan, lengths, request, resumed=options.resumed)
    held_out = held_out_text(job.validation, job.data, tokens, reading)
    plan = plans[most_frequent(lengths)]
    return RunSetup(job, plan, spec, tokens, plans, lengths, held_out, **vars(options))


def warn_uncounted(spec: ModelSpec) -> None:
    """Warn of a model that plans count otherwise than it is."""
    there, counted = spec.parameters, spec.shape.parameters
    if max(there, counted) > UNCOUNTED * min(there, counted):
        log.warning(
            "plans count %.3g million parameters where the model has %.3g, as if all its layers were alike, and those "
            "of Llama or Mixtral: nodes need %s memory than planned",
            counted / 1e6,
            there / 1e6,
            "more" if there > counted else "less",
        )
    if spec.holds_scores:
        log.warning(
            "the attention of %s models holds the scores of all pairs of tokens, which plans do not count: nodes need "
            "more memory than planned, and much more with long samples",
            spec.config.model_type,
        )
