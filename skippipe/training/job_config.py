"""The job file: what to train, on what, how. `skippipe job` prints one with every field explained."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from skippipe.codecs import LOW_RANK, CodecId, GradientsId
from skippipe.collectives import COLLECTIVES, CollectiveId
from skippipe.errors import UserError
from skippipe.heartbeat import TIMEOUT_S
from skippipe.model.lora import LoraConfig
from skippipe.optim import OPTIMIZERS
from skippipe.optim.config import OptimConfig
from skippipe.skip_schedule import USUAL, SkipSchedule
from skippipe.toml_config import read_toml
from skippipe.value_ranges import (
    BELOW_ONE,
    BUDGET_S,
    HEARTBEAT_S,
    ITERATIONS,
    ITERATIONS_OR_NONE,
    LAYERS,
    MICROBATCHES,
    NATS,
    PORT,
    SAMPLES,
    SEED,
    SEQUENCE,
    SLOTS,
    STAGES,
    THREADS,
    VOCABULARY,
    Choices,
    Range,
    check_ranges,
)
from skippipe.workload import OFFLOADS

if TYPE_CHECKING:
    from skippipe.planner.codec_prices import CodecBudget

ADVISED = {"transport.wire": "int8", "averaging.dtype": "int8"}
"""Values that a new job should have; the defaults stay, for jobs that exist. int8 on hops and in averaging: no loss
that three seeds on 105M tokens could tell (−0.0006 ± 0.0008 nats), for half of the bytes of hops and a quarter of
averaging's."""
SHORT = {
    *("output", "iterations", "cluster", "model.config", "model.weights", "data.texts", "batch.sequence"),
    *("pipeline.stages", "recipe.skip", "learning.rate", "compute.device", "compute.dtype"),
}
"""Fields that most jobs set."""
FOR_STUDIES = {
    "recipe.grow",
    "recipe.grow_preserving",
    "recipe.exposure",
    "recipe.swaps",
    "recipe.adapters",
    "recipe.adapters_by_hop",
    "recipe.adapters_shared",
    "recipe.repeats",
}
"""Fields that training refuses."""
Strategies = Literal["best", "skippipe", "no-tc2", "dtfm-skip", "dtfm"]


@dataclass(frozen=True)
class ModelConfig:
    config: str = "llama-tiny"
    """A preset (llama-tiny, llama-30m, llama-46m, llama-300m, llama-500m, llama-1.5b, llama-8b), a Hugging Face
    config.json, or its folder."""
    layers: Annotated[int, Range(0, LAYERS.most)] = 0
    """So many layers instead of those in the configuration, as for a smaller model that is to grow, or a deeper one
    that begins with copies of the layers in model.weights; 0: as many as the configuration has."""
    weights: str = ""
    """A Hugging Face folder with weights (safetensors) to begin with, or its name on the hub; the configuration is then
    taken from it, and the tokenizer unless data.tokenizer names one; a model.config that is the same with more layers
    begins with copies of layers. Empty: random weights, by the seed."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


@dataclass(frozen=True)
class DataConfig:
    texts: list[str] = field(default_factory=lambda: ["classics"])
    """Files of text, JSON lines or Parquet, also compressed (.gz, .bz2, .xz, .zst); folders of them; datasets of the
    hub (hf:NAME[:CONFIG][:SPLIT]); "classics" is the text that comes with SkipPipe, Jane Austen's novels."""
    field: str = ""
    """The field of records (JSON lines, Parquet, datasets) that has the text; empty: "text", unless they are
    conversations (messages, prompt and completion, instruction and output)."""
    loss_on: Literal["", "answers", "all"] = ""
    """Of conversations: take the loss of the assistant's tokens only, or of all; empty: of answers."""
    packing: bool = True
    """Of conversations: as many in a sample as fit, none of which sees another; or each in a sample of its own."""
    tokenizer: str = ""
    """A Hugging Face tokenizer folder; empty: a byte-level BPE is trained on the texts."""
    vocabulary: Annotated[int, VOCABULARY] = 2048
    """Size of the vocabulary to train; not used with a tokenizer."""
    folder: str = ""
    """Where the tokens are kept; empty: in the cache."""


@dataclass(frozen=True)
class BatchConfig:
    sequence: Annotated[int, SEQUENCE] = 128
    """Tokens of a sample."""
    samples: Annotated[int, SAMPLES] = 4
    """Samples of a microbatch."""
    microbatches: Annotated[int, Range(0, MICROBATCHES.most)] = 0
    """Microbatches of an iteration, over all data nodes; 0: some six a data node."""


@dataclass(frozen=True)
class PipelineConfig:
    plan: str = ""
    """A plan file. It brings its cluster, batch and stages, and the types on the wire and in computing: leave out
    [pipeline], [batch], transport.wire, averaging.dtype, compute.dtype and model.checkpointing, or say what the plan
    says. recipe.skip is followed on the plan's stages; without one every iteration is as the plan has it. Empty: a plan
    is made before training starts."""
    strategy: Strategies = "best"
    """How to plan: everything at once (best); by the method of the SkipPipe paper (skippipe); the same without avoiding
    collisions (no-tc2); round robin, whatever the network (dtfm-skip); the full pipeline (dtfm)."""
    stages: Annotated[int, Range(0, STAGES.most)] = 0
    """Stages of the pipeline; 0: 6, or 4 under 12 nodes."""
    skip: str = ""
    """The share of stages that a microbatch leaves out, all along: "1/3", "25%". Where it changes over the run,
    recipe.skip says it instead; if neither says anything: a third until 65% of the run, then nothing; with
    model.weights, nothing all along."""
    layers: str = ""
    """Layers of each stage, as in "3,5,4"; empty: as even as can be."""
    max_slots: Annotated[int, SLOTS] = 3
    """Microbatches in flight on a node at most."""
    split_backward: bool = False
    """Compute weight gradients when a node has nothing more urgent to do."""
    budget_s: Annotated[float, BUDGET_S] = 10.0
    """Seconds of planning at most; again for every other length of paths that recipe.skip asks for, and a tenth, but at
    least some two seconds, to compare iterations of several lengths with turns."""
    nats: Annotated[float | None, NATS] = None
    """Loss that codecs may add, in nats: every link, in either pass, and every stage that averages gets the codec that
    makes iterations shortest for it, in place of transport.wire and averaging.dtype. They are kept when the plan is
    repaired. Not given: no choice, those two everywhere."""
    prices: str = ""
    """A TOML file of what codecs cost your model, in nats; empty: what we have measured."""


@dataclass(frozen=True)
class AveragingConfig:
    engine: CollectiveId = "auto"
    """'auto' and 'ring' use the nodes' own encrypted connections: for each stage what is fastest on its links (a ring,
    or a direct exchange, also by way of third nodes), or always a ring; 'torch' is torch.distributed (gloo, NCCL), for
    machines that trust each other's network."""
    dtype: GradientsId = "fp32"
    """Codec of gradients on the wire; below fp32 the rounding errors are carried over to the next iteration. rank-4 to
    rank-64: factors of this rank in place of matrices (PowerSGD); what they leave out is carried over, too."""


@dataclass(frozen=True)
class TransportConfig:
    wire: CodecId = "bf16"
    """Codec of activations and their gradients on the wire."""
    security: Literal["curve", "none"] = "curve"
    """Encrypt and authenticate every connection; "none" only works on loopback."""
    listen: str = "127.0.0.1:0"
    """Where the coordinator listens; port 0: any that is free. Nodes on other machines need an address of yours;
    [::] is every one, IPv4 and IPv6."""
    peers: str = ""
    """The list of nodes and their public keys (see `skippipe keys`), for nodes that join by themselves; empty: all
    nodes are started here, with keys made for this run."""
    key: str = ""
    """The coordinator's key file; needed with peers."""


@dataclass(frozen=True)
class ComputeConfig:
    device: str = "cpu"
    """cpu, cuda or cuda:N; several that work side by side in each node: cuda:N-M, cpu:K for K workers. Without a
    number, a node that this machine starts has as many as the cluster file says, and one that joins all of its GPUs."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """What layers compute in; weights and optimizer stay fp32."""
    compiled: bool = False
    """torch.compile the layers of each stage."""
    threads: Annotated[int, THREADS] = 1
    """Threads of each node, on a CPU."""
    offload: Annotated[str, Choices(OFFLOADS)] = "none"
    """What nodes with a GPU keep in host memory, for those that have little memory of their own: the sums of gradients
    (averaging), or these and the optimizer's state (optimizer)."""


@dataclass(frozen=True)
class EmulationConfig:
    """One machine as many: links and nodes take the time that the cluster file gives them."""

    enabled: bool = False
    """Delay every message as its link would, and end no task before the time the plan gives it."""
    like: str = "llama-1.5b"
    """Make links and nodes as slow as they would be for this model (at 4096 tokens, 2 samples)."""
    time: Annotated[float, Range(1e-6, 1_000)] = 0.1
    """Factor of emulated time: 0.1 turns ten seconds into one."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: Annotated[int, ITERATIONS_OR_NONE] = 50
    """Iterations from one checkpoint to the next; there is one at the end too. 0: none are made."""
    keep: Annotated[int, Range(1, 10**6)] = 2
    """How many stay on disk, the newest; and, with [validation], the one with the lowest held-out loss, of which one
    is made whenever the loss is the lowest so far."""


@dataclass(frozen=True)
class RecoveryConfig:
    heartbeat_s: Annotated[float, HEARTBEAT_S] = TIMEOUT_S
    """Seconds without a heartbeat after which a node is declared dead."""
    join_s: Annotated[float, Range(0, 31_536_000)] = 600.0
    """Seconds to wait for all nodes of the plan; then training begins with those that are there, if they are as many as
    there are stages, and the others may come later."""
    restarts: Annotated[int, Range(0, 10**6)] = 3
    """How often the launcher restarts a node of this machine that ends too early."""
    lost_stage: Literal["checkpoint", "neighbours"] = "checkpoint"
    """Where the state of a stage comes from when all its nodes are gone: the newest checkpoint, or the mean of the
    stages before and after it, weighted by their gradients' squared norms. Without a checkpoint, always the latter."""
    backup_every: Annotated[int, ITERATIONS_OR_NONE] = 10
    """Every so many iterations, a node of another stage gets a copy of what only stage 0 holds: embedding, final norm
    and head. If all data nodes are lost and there is no checkpoint, training goes on with that copy; 0: none is made.
    """
    drift: Annotated[float, Range(0, 1_000)] = 0.0
    """Make a new plan when a node's tasks or a link take longer or shorter than planned by this share (0.5: half as
    long again); 0: never. For machines that are what the cluster file says they are."""
    planning_s: Annotated[float, Range(0, 3_600)] = 0.5
    """Seconds to look for a better plan whenever one has to be repaired, for every 20 nodes."""


@dataclass(frozen=True)
class ValidationConfig:
    """Held-out loss while training: every so many iterations nodes pass held-out samples forward through all stages,
    with the weights as they are then. It needs `texts` or a `share`."""

    texts: list[str] = field(default_factory=list)
    """Text that is not trained on, as in data.texts ("classics-val" comes with SkipPipe); it gets the tokenizer of the
    training text."""
    share: Annotated[float, BELOW_ONE] = 0.0
    """Instead of texts: this share of the training text, its end, is held out."""
    every: Annotated[int, ITERATIONS] = 50
    """Iterations from one evaluation to the next; there is one at the end too."""
    samples: Annotated[int, SAMPLES] = 64
    """Samples that are evaluated, always the same ones; up to whole microbatches, and as many as there are."""
    patience: Annotated[int, ITERATIONS_OR_NONE] = 0
    """The run ends when the held-out loss has not become lower in so many evaluations; 0: never."""

    @property
    def enabled(self) -> bool:
        return bool(self.texts) or self.share > 0


@dataclass(frozen=True)
class ReportConfig:
    recorded: Annotated[int, ITERATIONS_OR_NONE] = 50
    """Every so many iterations, and in the second and the last, record what every node does when, as a Chrome trace;
    0: never."""
    tensorboard: bool = False
    """Write TensorBoard files too (needs the extra skippipe[tensorboard])."""
    prometheus: Annotated[int, PORT] = 0
    """Serve metrics on this port of 127.0.0.1 (needs the extra skippipe[prometheus]); 0: not."""
    wandb: str = ""
    """A W&B project that gets the metrics (needs the extra skippipe[wandb]); WANDB_MODE=offline keeps them in the
    output folder. Empty: none."""
    mlflow: str = ""
    """An MLflow experiment that gets the metrics (needs the extra skippipe[mlflow]), on MLFLOW_TRACKING_URI or else in
    the output folder. Empty: none."""


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
    model: ModelConfig = ModelConfig()
    """The model."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters of low rank (LoRA), which are trained in place of the model."""
    data: DataConfig = DataConfig()
    """The text."""
    batch: BatchConfig = BatchConfig()
    """How much of it an iteration sees."""
    pipeline: PipelineConfig = PipelineConfig()
    """How the model is cut into stages, and how paths are planned."""
    recipe: SkipSchedule = field(default_factory=SkipSchedule)
    """How much of the model microbatches see, and what makes up for the rest."""
    learning: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer, and its rate over the run."""
    averaging: AveragingConfig = AveragingConfig()
    """How the nodes of a stage average their gradients."""
    transport: TransportConfig = TransportConfig()
    """Connections between nodes."""
    compute: ComputeConfig = ComputeConfig()
    """Devices of a node, and the precision that they compute in."""
    emulation: EmulationConfig = EmulationConfig()
    """Links and speeds of the cluster, emulated on one machine."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Weights and optimizer state on disk while training goes on; `skippipe train --resume` goes on from there."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """The loss on text that is not trained on."""
    survive: RecoveryConfig = RecoveryConfig()
    """When nodes are lost, come back, or slow down."""
    report: ReportConfig = ReportConfig()
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
        if recipe.grow:
            raise UserError(
                "recipe.grow: a run keeps its model; train the smaller one by itself, then 'skippipe grow' makes the "
                "start of the larger one from it"
            )
        if recipe.phases and self.pipeline.skip:
            raise UserError("pipeline.skip and recipe.skip say the same thing: leave out pipeline.skip")
        if (recipe.phases or self.pipeline.skip) and self.pipeline.strategy == "dtfm":
            skip = "recipe.skip" if recipe.phases else "pipeline.skip"
            raise UserError(f"pipeline.strategy: 'dtfm' skips nothing, whatever {skip} says; choose 'skippipe'")

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
