"""What stands in for stages that a path leaves out: bridges and adapters.

A bridge stands in for the stages that a hop skips. A stage holds one for each later stage that a hop may
skip to, and one for the head. It adds to the activations a small map of its own: a gain for every channel, and a matrix
of low rank,

    h + gain · n + up(down(n)),  n = h / rms(h)

Gain and `up` are zero at the start, so an untrained bridge changes nothing. Both are linear in n: what layers add on
average is close to that, and it costs a few thousandths of a stage's work.

Adapters are the other stand-in: matrices of low rank beside every linear map of a stage's layers, as in
LoRA. Their part is the larger the more stages a microbatch skips, and nothing for one that visits them all: so the
whole model does not depend on them.

With adapters, a stage can also take the place of stages that are missing after it (repeats): its layers run again on
their own output, with adapters of their own for each of these turns, as in a recursive transformer (Bae et al.,
"Relaxed Recursive Transformers", 2024).

Bridges are trained with all weights of the model, or with adapters alone, while the model's own weights stay as they
are (healing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import sqrt
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from skippipe.model.model_spec import ModelSpec
from skippipe.optim import OPTIMIZERS
from skippipe.stage_subset import StageHop

BRIDGE, ADAPTER = "bridges.", "adapters."  # how the names of their weights begin
STATES = {each.name for optimizer in OPTIMIZERS.values() for each in optimizer.state_tensors}
GATE = 0.5  # of repeats, at the start
EPSILON = 1e-6  # added to the mean square; what torch adds by itself depends on the precision and is large in bfloat16

Repeated = Callable[[Tensor, int], Tensor]
"""Called with hidden states and a turn of `StageAdapters`: the output of the stage's layers."""


class StageLayers(Protocol):
    """What adapters need to know of their stage (see `StageModel`)."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def numbers(self) -> range:
        """The layers, as the whole model counts them."""

    def linear_maps(self) -> Iterator[tuple[str, nn.Linear]]:
        """Those that get adapters, under the names that they have in the whole model."""


class StagePlace(NamedTuple):
    """Which stage it is, and of how many."""

    stage: int
    stages: int


class Bridges(nn.Module):
    """All bridges that begin at one stage."""

    def __init__(self, stage: int, stages: int, width: int, rank: int, seed: int) -> None:
        """A model of so many `stages`, which is also the number by which the head is a target, and `width` channels."""
        super().__init__()
        self.stage = stage
        targets = torch.arange(stage + 2, stages + 1)
        self.targets: Tensor
        self.register_buffer("targets", targets, persistent=False)
        count = len(targets)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + stage)
        self.down = nn.Parameter(_drawn((count, width * rank), generator) / sqrt(width))
        self.up = nn.Parameter(torch.zeros(count, rank * width))
        self.gain = nn.Parameter(torch.zeros(count * width))  # flat, as what is no matrix does not decay
        self.width = width

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """`hidden` is [samples, sequence, width]; `targets` are the stages that the samples go to, and those for the
        next stage pass unchanged.

        The bridge of a sample is data, not shape: all samples go through one product of matrices, each with its own.
        """
        chosen = (targets[:, None] == self.targets).to(self.down.dtype)
        samples = len(hidden)
        down = (chosen @ self.down).view(samples, self.width, -1)
        up = (chosen @ self.up).view(samples, -1, self.width)
        gain = (chosen @ self.gain.view(-1, self.width)).unsqueeze(1)
        normed = functional.rms_norm(hidden, (self.width,), eps=EPSILON)
        return (hidden + (normed @ down @ up + normed * gain)).to(hidden.dtype)

    def past(self, hidden: Tensor, left_out: int) -> Tensor:
        """What `forward` makes of samples that all go past so many stages."""
        at, width = left_out - 1, self.width
        normed = functional.rms_norm(hidden, (width,), eps=EPSILON)
        low = normed @ self.down[at].view(width, -1) @ self.up[at].view(-1, width)
        return (hidden + (low + normed * self.gain.view(-1, width)[at])).to(hidden.dtype)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Under the names that they have among all weights that are trained."""
        yield from ((f"{BRIDGE}{self.stage}.{part}", each) for part, each in self.named_parameters())


def is_bridge(name: str) -> bool:
    """Whether a weight of this name, or the optimizer's state for it, is a bridge's."""
    return _weight_name(name).startswith(BRIDGE)


def is_stand_in(name: str) -> bool:
    """Whether a weight of this name, or the optimizer's state for it, is of a bridge or of `StageAdapters`."""
    return _weight_name(name).startswith((BRIDGE, ADAPTER))


def _weight_name(name: str) -> str:
    """The weight's, by its own name or that of the optimizer's state for it."""
    state, _, of = name.partition(".")
    return of if state in STATES else name


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """From the normal distribution; on the meta device, nothing is."""
    made = torch.empty(shape)
    return made if made.is_meta else made.normal_(generator=generator)


def trained_bridges(spec: ModelSpec, stage: int, stages: int) -> Bridges | None:
    """The bridges that are trained with a stage, as they are at the start; None: there are none."""
    if not spec.bridges or stage >= stages - 1:
        return None
    return Bridges(stage, stages, spec.config.hidden_size, spec.bridges, spec.seed)


def bridges_of(stages: int, width: int, rank: int, seed: int) -> list[Bridges]:
    """The bridges of every stage but the last, after which there is none to skip; none at all with rank 0."""
    return [Bridges(stage, stages, width, rank, seed) for stage in range(stages - 1)] if rank else []


class AdaptedLinear(nn.Linear):
    """A linear map of a layer with an adapter beside it; its weights and their names are as before."""

    adapter: LinearAdapter

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        stage = self.adapter.stage
        if stage.scale is None:
            return made
        down, up = self.adapter.of_turn(stage.turn) if stage.repeats else (self.adapter.down, self.adapter.up)
        low = functional.linear(input, down) * stage.scale.to(input.device)
        return made + functional.linear(low.to(input.dtype), up)


def adapted_maps(layer: nn.Module) -> list[AdaptedLinear]:
    """The linear maps of a layer that have adapters, which are no submodules of it."""
    return [module for module in layer.modules() if isinstance(module, AdaptedLinear)]


class LinearAdapter(nn.Module):
    """up(down(x)); zero at the start."""

    stage: StageAdapters

    def __init__(self, of: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.down = nn.Parameter(_drawn((rank, of.in_features), generator) / sqrt(of.in_features))
        self.up = nn.Parameter(torch.zeros(of.out_features, rank))

    def of_turn(self, turn: int) -> tuple[Tensor, Tensor]:
        """The part of the rank that is for this turn of the stage."""
        each = self.stage.rank // (self.stage.repeats + 1)
        here = slice(turn * each, (turn + 1) * each)
        return self.down[here], self.up[:, here]


class StageAdapters(nn.Module):
    """The adapters of a stage, kept beside its weights."""

    def __init__(self, stage: StageLayers, rank: int, seed: int, repeats: int = 0) -> None:
        """Every linear map of the stage's layers becomes an `AdaptedLinear`."""
        super().__init__()
        self.repeats = repeats
        """Of the stages that are missing after it, how many it takes the place of. All turns share the rank."""
        self.turn = 0
        """Of the next forward pass: 0 for the stage itself, 1, 2, … where it takes the place of those after it."""
        if repeats:  # flat, as what is no matrix does not decay
            self.gates = nn.Parameter(torch.full((repeats * stage.spec.config.hidden_size,), GATE))
            """How much of what the layers add in each turn but the first counts, for each channel."""
        self.unscaled: Tensor
        self.register_buffer("unscaled", torch.ones(1, 1, 1), persistent=False)
        self.scale: Tensor | None = None
        """How strong adapters are for each sample of the next forward pass, [samples, 1, 1], or each of their ranks,
        [samples, 1, rank]; None: not at all."""
        self.rank = rank
        self._first_layer = stage.numbers.start
        self.names: list[str] = []
        """Of the linear maps that have adapters, in the whole model."""
        self.parts = nn.ModuleList()
        generator = torch.Generator().manual_seed(seed * 1_000_003 + stage.numbers.start)
        for name, module in list(stage.linear_maps()):
            adapter = LinearAdapter(module, rank, generator)
            module.__class__ = AdaptedLinear  # not a module around it, which would rename its weights
            object.__setattr__(adapter, "stage", self)  # references, not submodules
            object.__setattr__(module, "adapter", adapter)
            self.names.append(name)
            self.parts.append(adapter)

    def repeat(self, turn: int, hidden: Tensor, layers: Repeated) -> Tensor:
        """What the stage makes of its own output in the place of the stage so many after it."""
        with self._set_to(turn, self.unscaled):
            added = layers(hidden, turn) - hidden
        gate = self.gates.view(self.repeats, -1)[turn - 1].to(hidden.device)
        return hidden + (added * gate).to(hidden.dtype)

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `checkpoint`: contexts of the forward pass that comes now, and of its recomputation, before which passes
        of other microbatches have set turn and scale."""
        return nullcontext(), self._set_to(self.turn, self.scale)

    @contextmanager
    def _set_to(self, turn: int, scale: Tensor | None) -> Iterator[None]:
        before = self.turn, self.scale
        self.turn, self.scale = turn, scale
        try:
            yield
        finally:
            self.turn, self.scale = before

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Under the names that they have among all weights that are trained."""
        for name, part in zip(self.names, self.parts, strict=True):
            yield from ((f"{ADAPTER}{name}.{which}", each) for which, each in part.named_parameters())
        if self.repeats:
            yield f"{ADAPTER}{self._first_layer}.gates", self.gates


def adapter_scale(missing: Tensor, left_out: Tensor, stages: int, rank: int, hop_rank: int) -> Tensor:
    """`StageAdapters.scale` of samples that leave out so many of the stages each, and so many of these by the hop from
    the stage. Of the rank, the last `hop_rank` are divided equally among hops that leave out 0, 1, … up to half of the
    stages; those before are the same for all hops.
    """
    scale = (missing * (2 / stages)).view(-1, 1, 1)
    if not hop_rank:
        return scale
    hops, here = stages // 2 + 1, left_out.view(-1, 1, 1)
    hop_of = torch.arange(hop_rank, device=missing.device) * hops // hop_rank
    by_hop = torch.where(here > 0, 1.0, scale) * (hop_of == here.clamp(max=hops - 1))
    return torch.cat([scale.expand(-1, 1, rank - hop_rank), by_hop], -1)


class StandIns(nn.Module):
    """Bridges and adapters of a stage, for samples that all take the same path."""

    def __init__(self, stages: int, bridges: Bridges | None, adapters: StageAdapters | None, hop_rank: int) -> None:
        super().__init__()
        self.bridges = bridges
        self.adapters = adapters
        self._stages, self._hop_rank = stages, hop_rank
        self._scales: dict[StageHop | None, Tensor | None] = {None: None}

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        for each in (self.bridges, self.adapters):
            if each is not None:
                yield from each.named_weights()

    def set_hop(self, hop: StageHop | None) -> None:
        if self.adapters is None:
            return
        if hop not in self._scales:
            assert hop is not None
            device = next(self.adapters.parameters()).device
            missing, left_out = (torch.tensor([each], device=device) for each in (hop.missing, hop.left_out))
            self._scales[hop] = adapter_scale(missing, left_out, self._stages, self.adapters.rank, self._hop_rank)
        self.adapters.scale = self._scales[hop]

    def cross(self, hidden: Tensor, hop: StageHop, repeated: Repeated, *, recompute: bool = False) -> Tensor:
        if self.adapters is not None:
            for turn in range(1, min(self.adapters.repeats, hop.left_out) + 1):
                hidden = self.adapters.repeat(turn, hidden, repeated)
        if self.bridges is None or not hop.left_out:
            return hidden
        if recompute:  # it would keep as much as several layers
            bridged: Tensor = checkpoint(self.bridges.past, hidden, hop.left_out, use_reentrant=False)
            return bridged
        return self.bridges.past(hidden, hop.left_out)


def trained_stand_ins(stage: StageLayers, place: StagePlace) -> StandIns | None:
    """The bridges and adapters that are trained with a stage, as they are at the start; None: there are none."""
    spec = stage.spec
    bridges = trained_bridges(spec, *place)
    adapters = StageAdapters(stage, spec.adapters, spec.seed, spec.repeats) if spec.heals else None
    return StandIns(place.stages, bridges, adapters, 0) if bridges or adapters else None
