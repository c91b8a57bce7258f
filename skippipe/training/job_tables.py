"""The tables of a job file, and what each of their fields is for. `job_config` has the job that they make up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from skippipe.codecs import CodecId, GradientsId
from skippipe.collectives import CollectiveId
from skippipe.heartbeat import TIMEOUT_S
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
    SEQUENCE,
    SLOTS,
    STAGES,
    THREADS,
    VOCABULARY,
    Choices,
    Range,
)
from skippipe.workload import OFFLOADS

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
