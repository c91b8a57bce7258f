"""The job file: what to train, on what, how. `skippipe job` prints one with every field explained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from skippipe.codecs import LOW_RANK
from skippipe.collectives import COLLECTIVES
from skippipe.errors import UserError
from skippipe.model.lora import LoraConfig
from skippipe.optim import OPTIMIZERS
from skippipe.optim.config import OptimConfig
from skippipe.skip_schedule import USUAL, SkipSchedule
from skippipe.toml_config import read_toml
from skippipe.training.job_tables import (
    AveragingConfig,
    BatchConfig,
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    EmulationConfig,
    ModelConfig,
    PipelineConfig,
    RecoveryConfig,
    ReportConfig,
    TransportConfig,
    ValidationConfig,
)
from skippipe.value_ranges import ITERATIONS, SEED, check_ranges

if TYPE_CHECKING:
    from skippipe.planner.codec_prices import CodecBudget

ADVISED = {"transport.wire": "int8", "averaging.dtype": "int8"}
"""Values that a new job should have; the defaults stay, for jobs that exist. int8 on hops and in averaging: no loss
that three seeds on 105M tokens could tell (−0.0006 ± 0.0008 nats), for half of the bytes of hops and a quarter of
averaging's."""
SHORT = {
    *("output", "iterations", "cluster", "model.config", "model.weights", "data.texts", "batch.sequence"),
    *("pipeline.stages", "recipe.skip", "recipe.grow", "learning.rate", "compute.device", "compute.dtype"),
}
"""Fields that most jobs set."""
FOR_STUDIES = {
    "recipe.grow_preserving",
    "recipe.exposure",
    "recipe.swaps",
    "recipe.adapters",
    "recipe.adapters_by_hop",
    "recipe.adapters_shared",
    "recipe.repeats",
}
"""Fields that training refuses."""


@dataclass(frozen=True)
class JobConfig:
    output: str = "run"
    """Folder for plan, metrics, traces and the trained model."""
    iterations: Annotated[int, ITERATIONS] = 100
    """How long to train."""
    seed: Annotated[int, SEED] = 0
    """Of weights, data and plan: the same seed gives the same run."""
    cluster: str = "regions:9"
    """A cluster file, a built-in example (published20) or a preset with a number of nodes (regions:9)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters of low rank (LoRA), which are trained in place of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """How much of it an iteration sees."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """How the model is cut into stages, and how paths are planned."""
    recipe: SkipSchedule = field(default_factory=SkipSchedule)
    """How much of the model microbatches see, and what makes up for the rest."""
    learning: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer, and its rate over the run."""
    averaging: AveragingConfig = field(default_factory=AveragingConfig)
    """How the nodes of a stage average their gradients."""
    transport: TransportConfig = field(default_factory=TransportConfig)
    """Connections between nodes."""
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """Devices of a node, and the precision that they compute in."""
    emulation: EmulationConfig = field(default_factory=EmulationConfig)
    """Links and speeds of the cluster, emulated on one machine."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Weights and optimizer state on disk while training goes on; `skippipe train --resume` goes on from there."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """The loss on text that is not trained on."""
    survive: RecoveryConfig = field(default_factory=RecoveryConfig)
    """When nodes are lost, come back, or slow down."""
    report: ReportConfig = field(default_factory=ReportConfig)
    """What is written down while training."""

    def __post_init__(self) -> None:
        check_ranges(self)
        self._check_recipe()
        self._check_unused()
        self._check_lora()
        self._check_healing()
        if self.emulation.enabled and self.transport.peers:
            raise UserError("emulation.enabled: nodes that join from other machines cannot be emulated on this one")
        engine, codec = self.averaging.engine, self.averaging.dtype
        if not COLLECTIVES[engine].elastic and self.transport.peers:
            raise UserError(
                f"averaging.engine: '{engine}' is for nodes that are started here; those that join need 'ring'"
            )
        if not COLLECTIVES[engine].in_messages and codec != "fp32":
            raise UserError(f"averaging.dtype: {engine} averages in fp32, not {codec}; choose fp32 or engine 'ring'")
        if codec in LOW_RANK and self.trains_adapters:
            raise UserError(f"averaging.dtype: {codec}: adapters are of low rank already; choose a codec that is not")
        if COLLECTIVES[engine].elastic and not OPTIMIZERS[self.learning.optimizer].elementwise:
            raise UserError(
                f"learning.optimizer: a step of '{self.learning.optimizer}' mixes the numbers of a tensor, so nodes "
                "cannot join while others step; choose averaging.engine 'torch', which replaces no lost node"
            )
        if bool(self.transport.peers) != bool(self.transport.key):
            raise UserError("transport.peers and transport.key go together: 'skippipe keys' makes both")
        if self.transport.security == "none" and self.transport.peers:
            raise UserError("transport.peers: a list of keys is of no use with security 'none'; choose 'curve'")

        if self.validation.texts and self.validation.share:
            raise UserError("validation.share: is for a job without validation.texts; leave out one of them")
        if not self.validation.enabled and self.validation != ValidationConfig():
            raise UserError("validation: nothing is held out; name validation.texts, or a validation.share")

    def _check_recipe(self) -> None:
        recipe = self.recipe
        for name, set_here in (("exposure", recipe.exposure is not None), ("swaps", recipe.swaps > 0)):
            if set_here:
                raise UserError(
                    f"recipe.{name}: only studies draw paths by it; in training the plan decides: leave it out"
                )
        studied = {
            "adapters_by_hop": recipe.adapters_by_hop,
            "adapters": recipe.adapters > 0 and not recipe.heal,  # else they are those beside model.weights
        }
        for name, set_here in studied.items():
            if set_here:
                raise UserError(f"recipe.{name}: only studies have it yet, not training: leave it out")
        if recipe.grow_preserving:
            raise UserError("recipe.grow_preserving: only studies have it yet, not training: leave it out")
        if recipe.grow:
            self._check_growth()
        if recipe.phases and self.pipeline.skip:
            raise UserError("pipeline.skip and recipe.skip say the same thing: leave out pipeline.skip")
        if (recipe.phases or self.pipeline.skip) and self.pipeline.strategy == "dtfm":
            skip = "recipe.skip" if recipe.phases else "pipeline.skip"
            raise UserError(f"pipeline.strategy: 'dtfm' skips nothing, whatever {skip} says; choose 'skippipe'")

    def _check_growth(self) -> None:
        """UserError if the model cannot grow in the run of this job."""
        for name, set_here, why in (
            ("model.weights", self.model.weights, "these are of the whole model, and a smaller one is trained first"),
            ("lora", self.lora != LoraConfig(), "a model that grows is trained whole"),
            ("pipeline.plan", self.pipeline.plan, "a plan is for one model; plans are made before training starts"),
            ("checkpoint.every", not self.checkpoint.every, "a model grows from a checkpoint: set it"),
            ("averaging.engine", not COLLECTIVES[self.averaging.engine].elastic, "nodes begin anew; choose 'auto'"),
        ):
            if set_here:
                raise UserError(f"{name}: with recipe.grow {why}; leave one of them out")
        ends = [math.ceil(step * self.iterations) for step in self.recipe.growth]
        if len({0, *ends, self.iterations}) != len(ends) + 2:
            raise UserError(
                f"recipe.grow: of {self.iterations} iterations, {self.recipe.grow} leaves none before or after it; "
                "set more iterations"
            )

    def _check_unused(self) -> None:
        """UserError if a field is set that another one leaves without effect."""
        tokenizer = "data.tokenizer" if self.data.tokenizer else "model.weights"
        engine = self.averaging.engine
        lost = f"averaging.engine '{engine}' ends the run when a node is lost"
        chosen = self.pipeline.nats is not None
        for name, unused, why in (
            ("data.vocabulary", self.data.tokenizer or self.model.weights, f"the tokenizer of {tokenizer} has its own"),
            ("emulation.like", not self.emulation.enabled, "nothing is emulated unless emulation.enabled is true"),
            ("emulation.time", not self.emulation.enabled, "nothing is emulated unless emulation.enabled is true"),
            ("transport.wire", chosen, "with pipeline.nats the codecs of hops are chosen"),
            ("averaging.dtype", chosen, "with pipeline.nats the codecs of gradients are chosen"),
            ("pipeline.prices", not chosen, "codecs are chosen by prices only with pipeline.nats"),
            ("checkpoint.keep", not self.checkpoint.every, "with checkpoint.every = 0 none are made"),
            ("survive.restarts", self.transport.peers, "nodes of transport.peers are not started here"),
            (
                "compute.offload",
                not COLLECTIVES[engine].in_messages and self.compute.offload == "averaging",
                f"averaging.engine '{engine}' keeps no sums beside the gradients",
            ),
            ("survive.lost_stage", not COLLECTIVES[engine].elastic, lost),
            ("survive.backup_every", not COLLECTIVES[engine].elastic, lost),
        ):
            if unused and self.sets(name) and self.value(name) != 0:
                raise UserError(f"{name}: would have no effect: {why}; leave one of them out")

    def value(self, name: str) -> Any:
        """The value of a field, as in `value("batch.samples")`."""
        table, _, field_name = name.rpartition(".")
        return getattr(getattr(self, table) if table else self, field_name)

    def sets(self, name: str) -> bool:
        """Whether a field has another value than its default."""
        table, _, field_name = name.rpartition(".")
        defaults = type(getattr(self, table) if table else self)()
        return bool(self.value(name) != getattr(defaults, field_name))

    def _check_lora(self) -> None:
        lora = self.lora
        if not lora.rank and not lora.weights:
            if lora != LoraConfig():
                raise UserError("lora.rank: without one there are no adapters, and the rest of [lora] is of no use")
            return
        if not self.model.weights:
            raise UserError("lora: adapters are for a model that exists; name its folder: model.weights")
        if self.recipe.bridges:
            raise UserError("recipe.bridges: with [lora] only adapters are trained: leave one of them out")
        self._check_lost_stage()

    def _check_healing(self) -> None:
        recipe = self.recipe
        if not recipe.heal:
            return
        if recipe.heal_at:
            raise UserError(
                f'recipe.heal: {recipe.heal}: a run heals all along, or not at all; set "0%", or leave it out'
            )
        if not self.model.weights:
            raise UserError(
                "recipe.heal: is for a finished model; name a folder that 'skippipe heal' has made: model.weights"
            )
        if self.lora != LoraConfig():
            raise UserError("lora: with recipe.heal other adapters are trained: leave one of them out")
        if recipe.early_exit or recipe.residual != "plain":
            name = "early_exit" if recipe.early_exit else "residual"
            raise UserError(f"recipe.{name}: is for a model that is trained itself; with recipe.heal leave it out")
        if self.pipeline.split_backward:
            raise UserError(
                "pipeline.split_backward: with recipe.heal the only weight gradients are of adapters and bridges, and "
                "these are not put off; leave it out"
            )
        if self.validation.enabled:
            raise UserError(
                "validation: measures the whole model, which recipe.heal leaves as it is; leave it out, and measure "
                "parts afterwards: 'skippipe eval --keep 1/2'"
            )
        self._check_lost_stage()

    def _check_lost_stage(self) -> None:
        if self.survive.lost_stage == "neighbours":
            raise UserError(
                "survive.lost_stage: the adapters of a lost stage come from the newest checkpoint, which there always "
                "is: leave it out"
            )

    @property
    def trains_adapters(self) -> bool:
        """Whether the model's own weights stay as they are."""
        return bool(self.lora.rank or self.lora.weights or self.recipe.heal)

    @property
    def followed(self) -> SkipSchedule:
        """The recipe, with the default schedule if the job has none: a model that exists may never have been trained
        with stages missing."""
        default = "0" if self.model.weights else USUAL
        return self.recipe if self.sets_paths else replace(self.recipe, skip=default)

    @property
    def sets_paths(self) -> bool:
        """Does the job say how many stages paths have?"""
        pipeline = self.pipeline
        return bool(self.recipe.phases or pipeline.skip or pipeline.plan or pipeline.strategy == "dtfm")

    @property
    def codec_budget(self) -> CodecBudget | None:
        """What codecs may cost that are chosen for each link and stage; None: they are not chosen."""
        from skippipe.planner.codec_prices import DEFAULT_PRICES, CodecBudget, priced_gradients, read_prices

        pipeline = self.pipeline
        if pipeline.nats is None:
            return None
        prices = read_prices(Path(pipeline.prices)) if pipeline.prices else DEFAULT_PRICES
        gradients = ["fp32"]
        if COLLECTIVES[self.averaging.engine].in_messages:
            gradients = priced_gradients(prices, low_rank=not self.trains_adapters)  # adapters are of low rank already
        return CodecBudget.of(pipeline.nats, prices, gradients=gradients)

    @property
    def schedule(self) -> OptimConfig:
        """The optimizer's settings, with a rate schedule over this run unless the job has another length."""
        length = self.learning.iterations or max(self.iterations, self.learning.warmup + 1)
        return replace(self.learning, iterations=length)


def load_job(path: Path) -> JobConfig:
    return read_toml(JobConfig, path)
