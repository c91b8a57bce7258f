"""A model and a batch, as far as a plan needs them: operations, bytes and memory.

`Workload` adds to the shape of a model (`model_shape`) the batch and how it is run, and answers for any number of
layers: how many floating-point operations, how many bytes over a hop, how many bytes to average, how many bytes a node
must hold. Seconds come in `cost_model`, where the workload meets the cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from skippipe.codecs import CODECS, GRADIENTS, LOW_RANK, gradient_codec
from skippipe.codecs.low_rank import decoder_matrices
from skippipe.errors import UserError
from skippipe.json_fields import Fields
from skippipe.model_shape import ModelShape
from skippipe.optim import DEFAULT, OPTIMIZERS
from skippipe.optim.interface import HOST_BUFFERS, HOST_PIECE, STORED_BYTES
from skippipe.value_ranges import (
    COUNT,
    MICROBATCHES,
    SAMPLES,
    SEQUENCE,
    SLOTS,
    Choices,
    Range,
    check_ranges,
)

COMPUTE_BYTES = {"fp32": 4, "bf16": 2}

OFFLOADS = ("none", "averaging", "optimizer")
"""What is held in host memory: nothing; sums of gradients, with what encoding took away; these, and the optimizer's
state."""
TEACHERS = ("", "logits", "hidden")
"""Nothing; what it says; its hidden states as well."""
OFFLOAD_FLOPS = 4_000  # operations that fit into the time in which a byte comes from host memory
UNSAID: dict[str, Any] = {
    **{"optimizer": DEFAULT, "collective": "ring", "offload": "none", "adapter_parameters": 0},
    **{"bridge_parameters": 0, "bridge_rank": 0, "repeats": 0, "mean_repeats": 0.0, "teacher": ""},
    **{"wire_dtypes": (), "gradient_dtypes": ()},
}
"""What a workload has in files of versions that did not write it."""
LOGIT_BYTES = 12  # log-probabilities, their gradient and that of the logits, each fp32
TAUGHT_BYTES = 8  # beside these what a teacher holds for how probable, and its product with the logits
LOGIT_VALUES = 2**27  # logits that the head makes at a time: of a larger microbatch, it takes the tokens in pieces


def head_pieces(tokens: int, vocab: int) -> int:
    """Pieces that the head takes a microbatch in."""
    return max(1, -(-tokens * vocab // LOGIT_VALUES))


def split_evenly(whole: int, parts: int) -> tuple[int, ...]:
    """The sizes of so many parts, as even as can be: the later ones take what is left over."""
    each, extra = divmod(whole, parts)
    return tuple(each + (part >= parts - extra) for part in range(parts))


class LinkDtypes(NamedTuple):
    """Codecs on one directed link between two nodes, which are known by their names."""

    sender: str
    receiver: str
    forward: str
    """Of activations."""
    backward: str
    """Of their gradients."""


@dataclass(frozen=True)
class Workload:
    """What one iteration computes."""

    model: ModelShape
    sequence_tokens: Annotated[int, SEQUENCE] = 4096
    samples_per_microbatch: Annotated[int, SAMPLES] = 2
    microbatches: Annotated[int, MICROBATCHES] = 30
    """Microbatches of one iteration, over all data nodes."""
    wire_dtype: str = "bf16"
    """Codec of activations and their gradients on a hop."""
    gradient_dtype: str = "fp32"
    """Codec of weight gradients while they are averaged; or `rank-16`, and so on: factors of matrices."""
    compute_dtype: str = "bf16"
    """Type of the activations a node keeps for the backward pass."""
    activation_checkpointing: bool = False
    backward_ratio: Annotated[float, Range(0, 1_000, above=True)] = 2.0
    """Backward seconds for each forward second of a stage."""
    weight_share: Annotated[float, Range(0, 1, above=True, below=True)] = 0.5
    """Share of a backward that computes weight gradients: a task of its own if it is split."""
    head_ratio: Annotated[float | None, Range(0, 10**6)] = None
    """Head and loss as a share of stage 0's forward seconds; None: from the operations of head and loss."""
    header_bytes: Annotated[int, COUNT] = 0
    """Bytes of a hop's message beside the tensor."""
    max_slots: Annotated[int | None, SLOTS] = None
    """Most microbatches in flight on a node, or on each device of one, however much memory it has."""
    early_exit: bool = False
    """The head runs twice: also on what stage 0 alone has made of a microbatch."""
    optimizer: Annotated[str, Choices(OPTIMIZERS)] = DEFAULT
    """What takes the step: it says how much memory its state fills, and how long a step is."""
    collective: str = "auto"
    """The collective by which weight gradients are averaged."""
    offload: str = "none"
    """What is held in host memory instead of the node's own, that of its GPU: one of `OFFLOADS`."""
    adapter_parameters: Annotated[int, COUNT] = 0
    """Parameters of adapters in a layer (LoRA's, or those of healing). With them, only they and bridges are trained; 0:
    all parameters are trained."""
    wire_dtypes: tuple[LinkDtypes, ...] = ()
    """Links on which hops have other codecs than `wire_dtype`."""
    gradient_dtypes: tuple[str, ...] = ()
    """Codec of the weight gradients of each stage; empty: `gradient_dtype` for all."""
    bridge_parameters: Annotated[int, COUNT] = 0
    """Parameters of the bridges that begin at stage 0, which every stage counts, although later ones have fewer; 0:
    there are no bridges. With bridges, no path has a swap."""
    bridge_rank: Annotated[int, COUNT] = 0
    """Rank of a bridge. Every visit counts the operations of one, although hops to the next stage go over none."""
    repeats: Annotated[int, COUNT] = 0
    """How often the layers of a stage run again at most, in the place of stages that the hop from it leaves out. A
    microbatch in flight counts the memory of all these turns. They share the rank of the adapters."""
    mean_repeats: Annotated[float, Range(0, 1_000)] = 0.0
    """How often they do in a visit, in the mean over paths. Every visit takes that time, although a hop to the next
    stage repeats nothing: a task's time does not depend on where the path goes on."""

    teacher: str = ""
    """What microbatches that leave stages out learn from the whole model, which they also pass, forward only: one of
    `TEACHERS`."""

    def __post_init__(self) -> None:
        check_ranges(self, "workload")
        said: list[tuple[str, str, Collection[str]]] = [
            ("wire_dtype", self.wire_dtype, CODECS),
            ("gradient_dtype", self.gradient_dtype, GRADIENTS),
            ("compute_dtype", self.compute_dtype, COMPUTE_BYTES),
            ("offload", self.offload, OFFLOADS),
            ("teacher", self.teacher, TEACHERS),
            *(("wire_dtypes", codec, CODECS) for each in self.wire_dtypes for codec in each[2:]),
            *(("gradient_dtypes", codec, GRADIENTS) for codec in self.gradient_dtypes),
        ]
        for name, value, choices in said:
            Choices(choices).check(value, f"workload.{name}")
        if self.offload == "optimizer" and not OPTIMIZERS[self.optimizer].offloads:
            raise UserError(
                f"offload: the state of the optimizer '{self.optimizer}' stays on the device; choose 'averaging', or "
                f"one of {', '.join(name for name, each in OPTIMIZERS.items() if each.offloads)}"
            )
        if self.adapter_parameters and not LOW_RANK.keys().isdisjoint((self.gradient_dtype, *self.gradient_dtypes)):
            raise UserError("workload.gradient_dtype: adapters are of low rank already; choose another codec for them")
        if len(self._dtypes_of_link) < len(self.wire_dtypes):
            raise UserError("workload.wire_dtypes: a link is named twice")

    @cached_property
    def _dtypes_of_link(self) -> dict[tuple[str, str], tuple[str, str]]:
        return {(each.sender, each.receiver): (each.forward, each.backward) for each in self.wire_dtypes}

    def hop_dtype(self, sender: str, receiver: str, *, backward: bool) -> str:
        """Codec of activations on a link; with `backward`, of their gradients."""
        both = self._dtypes_of_link.get((sender, receiver))
        if both is None:
            return gradient_codec(self.wire_dtype) if backward else self.wire_dtype
        return both[backward]

    @cached_property
    def hop_dtypes(self) -> frozenset[str]:
        """All codecs that a hop may have."""
        return frozenset(
            [
                self.wire_dtype,
                gradient_codec(self.wire_dtype),
                *(codec for each in self.wire_dtypes for codec in each[2:]),
            ]
        )

    def stage_gradient_dtype(self, stage: int) -> str:
        """Codec of the weight gradients of a stage."""
        return self.gradient_dtypes[stage] if self.gradient_dtypes else self.gradient_dtype

    def layer_split(self, stages: int) -> tuple[int, ...]:
        """Layers of each stage, as even as can be; the later stages take what is left over, stage 0 has the head."""
        if stages > self.model.layers:
            raise UserError(
                f"{self.model.name} has {self.model.layers} layers: at most {self.model.layers} stages, not {stages}"
            )
        return split_evenly(self.model.layers, stages)

    def forward_flops(self, layers: int) -> int:
        once = layers * self.samples_per_microbatch * self.model.layer_flops(self.sequence_tokens)
        return once + round(self.mean_repeats * once) + self._added_flops(layers)

    def backward_flops(self, layers: int, *, recomputing: bool = True) -> float:
        """With the forward pass again, where activations are recomputed; `recomputing` False: without it. Weights that
        are not trained have no weight gradients."""
        forward, added = self.forward_flops(layers), self._added_flops(layers)
        if self.adapter_parameters:
            again = forward if recomputing and self.activation_checkpointing else 0
            return self._backward_ratio * (forward - added) + 2 * added + again
        ratio = self.backward_ratio + (recomputing and self.activation_checkpointing)
        return ratio * forward

    @property
    def trained_share(self) -> float:
        """Share of a backward, without what is recomputed, that is gradients of trained weights."""
        if not self.adapter_parameters:
            return self.weight_share
        return self._added_flops(1) / self.backward_flops(1, recomputing=False)

    def _added_flops(self, layers: int) -> int:
        """Forward operations of adapters, where every turn uses its part, and of a bridge: two a weight and token."""
        adapters = layers * self.adapter_parameters
        if self.repeats:
            adapters = round(adapters * (1 + self.mean_repeats) / (1 + self.repeats))
        return 2 * self._tokens * (adapters + 2 * self.model.hidden * self.bridge_rank)

    @property
    def _backward_ratio(self) -> float:
        """Of the model itself, whose weight gradients are not computed if only adapters are trained."""
        return self.backward_ratio * (1 - self.weight_share if self.adapter_parameters else 1)

    def head_flops(self, layers_of_stage_0: int) -> float:
        """Final norm, head and loss, forward and backward: one task at the data node."""
        if self.head_ratio is not None:
            once = self.head_ratio * replace(self, mean_repeats=0.0).forward_flops(layers_of_stage_0)
        else:
            samples = self.samples_per_microbatch
            once = (1 + self._backward_ratio) * samples * self.model.head_flops(self.sequence_tokens)
        of_teacher = once / (1 + self._backward_ratio) if self.teacher else 0.0  # what it says is a forward pass more
        return (2 * once if self.early_exit else once) + of_teacher

    @property
    def activation_bytes(self) -> int:
        """Bytes of one hop of one microbatch over a link with the usual codec."""
        return self.hop_bytes(self.wire_dtype)

    def hop_bytes(self, codec: str) -> int:
        """Bytes of one hop of one microbatch, as this codec expects them."""
        shape = (self.samples_per_microbatch, self.sequence_tokens, self.model.hidden)
        return CODECS[codec].tensor_bytes(shape) + self.header_bytes

    def stage_parameters(self, stage: int, layers: int) -> int:
        """Parameters of a stage, without adapters."""
        return layers * self.model.layer_parameters + (self.model.end_parameters if stage == 0 else 0)

    def trained_parameters(self, stage: int, layers: int) -> int:
        """Parameters of a stage that are trained: those of its adapters, or all if it has none, with its bridges."""
        own = layers * self.adapter_parameters if self.adapter_parameters else self.stage_parameters(stage, layers)
        return own + self.bridge_parameters

    def on_device(self, bridges: bool) -> Workload:
        """The workload of one device of a node that shards its stage, with the bridges or without."""
        return self if bridges or not (self.bridge_parameters or self.bridge_rank) else self._without_bridges

    @cached_property
    def _without_bridges(self) -> Workload:
        return replace(self, bridge_parameters=0, bridge_rank=0)

    def _trained_ends(self, stage: int) -> int:
        """Those of them that belong to no layer."""
        return 0 if stage or self.adapter_parameters else self.model.end_parameters

    def frozen_bytes(self, stage: int, layers: int) -> int:
        """Bytes that a node holds of weights that are not trained: in the type of computing, but for norms, routers and
        experts, which are fp32."""
        if not self.adapter_parameters:
            return 0
        each = COMPUTE_BYTES[self.compute_dtype]
        matrices = layers * self.model.linear_parameters + (self.model.end_parameters if stage == 0 else 0)
        return STORED_BYTES * self.stage_parameters(stage, layers) - (STORED_BYTES - each) * matrices

    def gradient_rounds(self, stage: int, layers: int) -> tuple[int, ...]:
        """Bytes of the gradient that the nodes of a stage average: in one round, or of low rank in two."""
        codec, values = GRADIENTS[self.stage_gradient_dtype(stage)], self.trained_parameters(stage, layers)
        return codec.round_bytes(values, decoder_matrices(self.model, layers, ends=stage == 0))

    def gradient_bytes(self, stage: int, layers: int) -> int:
        return sum(self.gradient_rounds(stage, layers))

    def optimizer_flops(self, stage: int, layers: int) -> int:
        """Operations of a stage's optimizer step."""
        trained, ends = self.trained_parameters(stage, layers), self._trained_ends(stage)
        optimizer = OPTIMIZERS[self.optimizer]
        moved = STORED_BYTES * trained if self.offload != "none" else 0
        if self.offload == "optimizer":
            moved += optimizer.held_bytes(trained, ends)
        return optimizer.step_flops(trained, ends, self.model.hidden) + OFFLOAD_FLOPS * moved

    def checkpoint_bytes(self, stage: int, layers: int) -> int:
        """Weights that are trained and optimizer state of a stage, as a checkpoint has them."""
        trained = self.trained_parameters(stage, layers)
        return OPTIMIZERS[self.optimizer].stored_bytes(trained, self._trained_ends(stage))

    def state_bytes(self, stage: int, layers: int) -> int:
        """Weights and optimizer state of a stage, as they are sent to another node."""
        trained = self.checkpoint_bytes(stage, layers)
        return trained + (STORED_BYTES * self.stage_parameters(stage, layers) if self.adapter_parameters else 0)

    def fixed_bytes(self, stage: int, layers: int) -> int:
        """Bytes that a node of the stage needs beside what microbatches keep: what it holds whether or not there are
        any, and what a task takes while it runs."""
        trained = self.trained_parameters(stage, layers)
        held = 2 * STORED_BYTES * trained  # weights and gradients
        if self.offload == "none":
            held += (2 if GRADIENTS[self.stage_gradient_dtype(stage)].error_feedback else 1) * STORED_BYTES * trained
        if self.stage_gradient_dtype(stage) in LOW_RANK:  # factors: a node's own, their sums, and what is made of these
            held += 3 * self.gradient_bytes(stage, layers)
        optimizer = OPTIMIZERS[self.optimizer]
        if self.offload == "optimizer":  # a piece comes or goes while another is stepped along
            pieces = HOST_BUFFERS * min(HOST_PIECE, trained)
            held += STORED_BYTES * pieces + optimizer.held_bytes(pieces)
        else:
            held += optimizer.held_bytes(trained, self._trained_ends(stage))
        copies = self.frozen_bytes(stage, layers) + self._copied_bytes(stage, layers)
        return held + copies + self.working_bytes(stage, layers)

    def _copied_bytes(self, stage: int, layers: int) -> int:
        """Bytes of the weights of linear maps in bf16, if that is computed in: of the layers, unless these are
        recomputed, and of a head of its own."""
        if self.compute_dtype != "bf16":
            return 0
        of_layer = self.adapter_parameters or self.model.linear_parameters
        copied = 0 if self.activation_checkpointing else layers * of_layer
        if stage == 0 and not self.model.tied_embeddings and not self.adapter_parameters:
            copied += self.model.vocab * self.model.hidden
        return COMPUTE_BYTES["bf16"] * copied

    def working_bytes(self, stage: int, layers: int) -> int:
        """Bytes that a task needs while it runs, beside what is held: the backward pass of a layer, with what those of
        repeats leave until that of the stage's own turn, or the head, whichever takes more."""
        backward = self._layer_work_bytes() + self._repeats_work_bytes(layers)
        return max(backward, self._head_work_bytes() if stage == 0 else 0)

    def _layer_work_bytes(self) -> int:
        model, again, each = self.model, self.activation_checkpointing, COMPUTE_BYTES[self.compute_dtype]
        wide = model.feed_forward_matrices * model.linear_intermediate + model.hidden
        work = each * self._tokens * wide + STORED_BYTES * self._tokens * model.expert_work_per_token
        work += self._layer_bytes() if again else 0
        # for a layer that is recomputed in bf16, weights are rounded, and gradients come in both types
        rounded = again and self.compute_dtype == "bf16"
        trained, matrix = model.linear_parameters, model.hidden * model.linear_intermediate
        experts = model.largest_expert_gradient
        if self.adapter_parameters:
            trained, matrix, experts = self.adapter_parameters, model.largest_adapter_matrix(self._adapter_rank), 0
        gradient = max((each + STORED_BYTES if rounded else each) * matrix, STORED_BYTES * experts)
        return work + (each * trained if rounded else 0) + gradient

    def _repeats_work_bytes(self, layers: int) -> int:
        """Gradients of all adapters of a stage: every turn has a part of each, and autograd adds up whole ones, from
        the last turn on."""
        each = STORED_BYTES if self.activation_checkpointing else COMPUTE_BYTES[self.compute_dtype]
        return each * layers * self.adapter_parameters if self.repeats else 0

    @property
    def _adapter_rank(self) -> int:
        """Of adapters beside all linear maps that have so many parameters."""
        return -(-self.adapter_parameters // self.model.adapter_parameters(1))

    def _head_work_bytes(self) -> int:
        model, each = self.model, COMPUTE_BYTES[self.compute_dtype]
        tokens = -(-self._tokens // head_pieces(self._tokens, model.vocab))
        logits, matrix = tokens * model.vocab, model.vocab * model.hidden
        copied, made = 0, 0 if self.adapter_parameters else each * matrix
        if made and self.compute_dtype == "bf16" and model.tied_embeddings:  # rounded for this task, with its gradient
            copied, made = made, 2 * made + STORED_BYTES * matrix
        made_at_once = LOGIT_BYTES + (TAUGHT_BYTES if self.teacher else 0)
        return max(made_at_once * logits + copied, each * logits + made) + 2 * STORED_BYTES * tokens * model.hidden

    def held_bytes(self, layers: int) -> int:
        """Bytes that one microbatch in flight keeps on a node, from its forward to the end of its last task there."""
        ends, turns = self._tokens * self.model.hidden, 1 + self.repeats
        taught = 2 * STORED_BYTES * ends if self.teacher else 0  # for this microbatch and the next of its lane
        each = COMPUTE_BYTES[self.compute_dtype]
        if self.activation_checkpointing:  # with a bridge also its input; behind experts inputs are fp32
            kept = each * (turns * (layers + 1) + (self.bridge_rank > 0))
            behind = turns * max(0, layers - 1) if self.model.experts > 1 else 0
            return (kept + (STORED_BYTES - each) * behind) * ends + taught
        kept = turns * layers * self._layer_bytes() + self._bridge_bytes() + taught
        kept += each * self.repeats * ends  # what gates scale
        return kept + STORED_BYTES * ends  # the output; in bf16 also the input

    def _layer_bytes(self) -> int:
        """Bytes that a layer keeps of a microbatch in one turn."""
        frozen, parts = self.adapter_parameters > 0, self.model.adapter_parameters(1) * (1 + self.repeats)
        values = self.model.layer_values_per_token(rounded=self.compute_dtype == "bf16", frozen=frozen)
        values += -(-self.model.linear_maps * self.adapter_parameters // parts)  # between the two matrices of adapters
        of_experts = STORED_BYTES * self.model.expert_values_per_token
        return self._tokens * (COMPUTE_BYTES[self.compute_dtype] * values + of_experts)

    def _bridge_bytes(self) -> int:
        """Bytes that a bridge keeps: its output, what is normed and what is between its matrices; in bf16 also the
        input as fp32, of which what is normed is one more value, and the matrices."""
        if not self.bridge_rank:
            return 0
        hidden, rounded = self.model.hidden, self.compute_dtype == "bf16"
        matrices = 2 * hidden * self.bridge_rank if rounded else 0
        values = self._tokens * ((4 if rounded else 2) * hidden + self.bridge_rank)
        return COMPUTE_BYTES[self.compute_dtype] * (values + matrices)

    @property
    def _tokens(self) -> int:
        return self.samples_per_microbatch * self.sequence_tokens

    def slots(self, memory_bytes: int, stage: int, layers: int) -> int:
        """Microbatches that a device of this memory can hold at once; 0: it cannot work on this stage."""
        free = memory_bytes - self.fixed_bytes(stage, layers)
        slots = max(0, free // max(1, self.held_bytes(layers)))
        return slots if self.max_slots is None else min(slots, self.max_slots)

    @property
    def backup_bytes(self) -> int:
        """A copy of what only stage 0 holds, which a node of another stage keeps: fp32 weights, without the optimizer's
        state."""
        return STORED_BYTES * (self.model.end_parameters + self.bridge_parameters)

    def spare_bytes(self, memory_bytes: int, stage: int, layers: int, microbatches: int) -> int:
        """Bytes left beside the stage and as many microbatches as a node of this memory has slots for, of so many."""
        held = min(self.slots(memory_bytes, stage, layers), microbatches) * self.held_bytes(layers)
        return memory_bytes - self.fixed_bytes(stage, layers) - held

    def to_json(self) -> dict[str, Any]:
        """What earlier versions knew without being told is left out, so that they can read the file."""
        said = {name: value for name, value in asdict(self).items() if name not in UNSAID or UNSAID[name] != value}
        return said | {"model": self.model.to_json()}

    @classmethod
    def from_json(cls, value: Any, place: str = "workload") -> Workload:
        entry = Fields(value, place, of=cls)
        model = ModelShape.from_json(entry.take("model"), entry.at("model"))
        links = tuple(_link_dtypes(entry))
        gradients = tuple(entry.items("gradient_dtypes")) if entry.mentions("gradient_dtypes") else ()
        plain = UNSAID | entry.values(added=(*UNSAID, "weight_share", "early_exit"))
        entry.close()
        return cls(**{**plain, "model": model, "wire_dtypes": links, "gradient_dtypes": gradients})


def _link_dtypes(entry: Fields) -> Iterator[LinkDtypes]:
    for index, row in enumerate(entry.items("wire_dtypes") if entry.mentions("wire_dtypes") else ()):
        if not isinstance(row, list) or len(row) != 4 or not all(isinstance(each, str) for each in row):
            where = f"{entry.at('wire_dtypes')}[{index}]"
            raise UserError(f"{where}: must be [sender, receiver, codec of activations, codec of their gradients]")
        yield LinkDtypes(*row)
