"""Decoding with static shapes: the step that adds one token to each sequence, as one CUDA graph.

A step of a batch is hundreds of small kernels, and launching them one by one from Python takes longer than they run.
Here all tensors of the step keep their places: tokens and positions come in the same two tensors, keys and values stay
in the KV cache of the stages (see `cached_stage`), attention looks at all its room under a mask. So on a GPU the step
is compiled, recorded once for each size of batch and cache, and replayed. On a CPU it is the same function as it is.

Projections of one input are one product: queries, keys and values; gate and up. The layers' own weights become views of
these, so nothing is held twice, and prompts go through the layers as before.

Rows are slots 0, 1, 2 and so on, of unequal lengths, filled up to a power of two; rows without a sequence compute
something that nobody looks at. While the caller looks at the tokens of a step, the next step runs already, with tokens
that never left the device; if the batch changes meanwhile, it is repeated, which overwrites all it has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from skippipe.inference.cached_stage import CachedStage, CacheFull, StageChain, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.engine import TokenByToken, rows_after
from skippipe.inference.request import Generation
from skippipe.inference.sampler import TokenReader, choose
from skippipe.stage_subset import StageSubset

LEAST_ROOM = 256  # tokens of a slot: each other room is another graph
ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu"}
"""Class of a feed-forward block's activation → its name in torch.nn.functional."""
LEAST_TOKENS = 8192  # of all slots together: rooms and batches are rounded up
WARM_UP = 3  # runs before a graph is recorded: kernels are compiled and chosen in them


class FusedLayer(NamedTuple):
    """The weights of a decoder layer as the step needs them."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    second_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class LayerSettings(NamedTuple):
    """The numbers of a decoder layer, all layers' alike."""

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    epsilon: float
    activation: str
    """Its name in torch.nn.functional."""


Layer = tuple[FusedLayer, LayerSettings]


def fuse(layer: Any) -> Layer | None:
    """The layer's weights with its projections joined, as whose parts the layer keeps them; None: it is no layer of
    attention and a gated feed-forward block, each after a norm, as in Llama, Mistral and Qwen3."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    parts = {
        "attention": [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")],
        "mlp": [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")],
    }
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    linear = all(type(each) is nn.Linear for part in parts.values() for each in part)
    children = {name for name, _ in layer.named_children()}
    known = children == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    activation = ACTIVATIONS.get(type(getattr(mlp, "act_fn", None)).__name__)
    if not linear or not known or not activation or not all(hasattr(each, "variance_epsilon") for each in norms):
        return None
    query, key, value, out = parts["attention"]
    gate, up, down = parts["mlp"]
    inner = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    dim = attention.head_dim
    if any(each is not None and tuple(each.weight.shape) != (dim,) for each in inner):
        return None
    qkv, qkv_bias = _joined([query, key, value])
    gate_up, gate_up_bias = _joined([gate, up])
    weights = FusedLayer(
        norms[0].weight,
        qkv,
        qkv_bias,
        *(None if each is None else each.weight for each in inner),
        out.weight,
        out.bias,
        norms[1].weight,
        gate_up,
        gate_up_bias,
        down.weight,
        down.bias,
    )
    heads = query.out_features // dim, key.out_features // dim
    return weights, LayerSettings(*heads, dim, attention.scaling, norms[0].variance_epsilon, activation)


@torch.no_grad()
def _joined(maps: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of several linear maps in one tensor each; theirs are parts of it from now on."""
    weight = _shared([each.weight for each in maps])
    return weight, None if maps[0].bias is None else _shared([each.bias for each in maps])


def _shared(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    total, start = sum(len(each) for each in tensors), first.storage_offset()
    whole = first.untyped_storage().nbytes() == total * first[0].numel() * first.element_size()
    if whole and all(each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for each in tensors):
        assert start == 0
        return torch.empty(0, dtype=first.dtype, device=first.device).set_(
            first.untyped_storage(), 0, (total, *first.shape[1:])
        )
    joined = torch.cat([each.detach() for each in tensors])
    start = 0
    for each in tensors:
        each.data = joined[start : start + len(each)]
        start += len(each)
    return joined


def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    exact = values.float()
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    return weight * exact.to(values.dtype)


def rotated(values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = values.shape[-1] // 2
    turned = torch.cat((-values[..., half:], values[..., :half]), -1)
    return values * cosines + turned * sines


def layer_step(
    hidden: Tensor,
    weights: FusedLayer,
    settings: LayerSettings,
    stores: tuple[Tensor, Tensor],
    rows: Tensor,
    positions: Tensor,
    rotation: tuple[Tensor, Tensor],
    mask: Tensor,
) -> Tensor:
    """One layer for one token of each row [rows, d], whose keys and values are written to the stores."""
    count, (heads, kv_heads, dim, scaling, epsilon, activation) = len(hidden), settings
    normed = rms_norm(hidden, weights.norm, epsilon)
    joined = functional.linear(normed, weights.qkv, weights.qkv_bias).view(count, heads + 2 * kv_heads, dim)
    query, key, value = joined.split((heads, kv_heads, kv_heads), 1)
    if weights.query_norm is not None and weights.key_norm is not None:
        query, key = rms_norm(query, weights.query_norm, epsilon), rms_norm(key, weights.key_norm, epsilon)
    query, key = rotated(query, *rotation), rotated(key, *rotation)
    stores[0][rows, :, positions] = key
    stores[1][rows, :, positions] = value
    # the queries that share a head of keys are as several tokens to it: so nothing is repeated
    grouped = query.reshape(count, kv_heads, heads // kv_heads, dim)
    attended = functional.scaled_dot_product_attention(
        grouped, stores[0][:count], stores[1][:count], attn_mask=mask, scale=scaling
    )
    hidden = hidden + functional.linear(attended.reshape(count, heads * dim), weights.out, weights.out_bias)
    normed = rms_norm(hidden, weights.second_norm, epsilon)
    gate, up = functional.linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, -1)
    return hidden + functional.linear(getattr(functional, activation)(gate) * up, weights.down, weights.down_bias)


class StaticStep:
    """The step of one size of batch, on caches of one size: from tokens and positions to logits, all in place.

    To run it twice is to run it once, as it writes the same keys and values.
    """

    def __init__(self, decoding: StaticDecoding, batch: int) -> None:
        self.logits: Tensor
        self._decoding = decoding
        self._tokens = torch.zeros(batch, dtype=torch.long, device=decoding.device)
        self._positions = torch.zeros_like(self._tokens)
        self._rows = torch.arange(batch, device=decoding.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def load(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Rows without a sequence get a token at position 0 of their slots, which are free."""
        unused = [0] * (len(self._tokens) - len(tokens))
        both = torch.tensor([[*tokens, *unused], [*positions, *unused]])
        if self._tokens.is_cuda:
            both = both.pin_memory().to(self._tokens.device, non_blocking=True)
        self._tokens.copy_(both[0])
        self._positions.copy_(both[1])

    def feed(self, chosen: Tensor) -> None:
        """The tokens that were just chosen are the next ones."""
        self._tokens[: len(chosen)].copy_(chosen)
        self._positions[: len(chosen)].add_(1)

    def launch(self) -> None:
        """On a GPU it is recorded the first time."""
        if self._graph is None and self._tokens.is_cuda:
            self._record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self.logits = self._run()

    def _run(self) -> Tensor:
        return self._decoding.run(self._tokens, self._positions, self._rows)

    def _record(self) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.logits = self._run()


class StaticDecoding:
    """A chain of stages whose layers are all known to `fuse`, as a function of tokens and positions."""

    def __init__(self, staged: StagedModel, chain: StageChain, layers: list[list[Layer]], *, compiled: bool) -> None:
        self._staged = staged
        self._chain = chain
        self._layers = layers
        """Of each stage, weights and settings of each layer."""
        self.device = next(staged.stages[0].parameters()).device
        self._layer = torch.compile(layer_step, dynamic=False, fullgraph=True) if compiled else layer_step
        self._steps: dict[int, StaticStep] = {}
        self._shape = 0, 0
        self._rotations: list[tuple[Tensor, Tensor]] = []
        """Of each stage; kept, because graphs read them where they are."""

    @classmethod
    def of(cls, staged: StagedModel, chain: StageChain, *, compiled: bool) -> StaticDecoding | None:
        """None if a layer is of another kind."""
        layers: list[list[Layer]] = []
        for stage in chain.stages:
            fused = [each for each in map(fuse, stage.model.layers) if each is not None]
            if len(fused) < len(stage.model.layers):
                return None
            layers.append(fused)
        return cls(staged, chain, layers, compiled=compiled)

    def step(self, batch: int) -> StaticStep:
        """The step of a batch. Other caches than before make all steps of before useless."""
        shape = self._chain.stages[0].cache.shape
        if shape != self._shape:
            self._steps.clear()
            self._shape = shape
            like = next(self._staged.stages[0].parameters())
            self._rotations = [stage.rotations(shape[1], like) for stage in self._chain.stages]
        if batch not in self._steps:
            self._steps[batch] = StaticStep(self, batch)
        return self._steps[batch]

    def run(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Logits of the tokens that follow, [rows, vocabulary]."""
        chain, ends = self._chain, self._staged.stages[0]
        hidden = ends.embed(tokens)
        windows = {window for stage in chain.stages for window in stage.cache.windows}
        masks = {window: _mask(positions, self._shape[1], window) for window in windows}
        tables = zip(chain.visits, chain.stages, self._layers, self._rotations, strict=True)
        for number, stage, layers, (cosines, sines) in tables:
            rotation = cosines[0, positions][:, None], sines[0, positions][:, None]
            hidden = self._stage(number, stage, layers, hidden, positions, rows, rotation, masks)
        return logits(ends, hidden)

    def _stage(
        self,
        number: int,
        stage: CachedStage,
        layers: list[Layer],
        hidden: Tensor,
        positions: Tensor,
        rows: Tensor,
        rotation: tuple[Tensor, Tensor],
        masks: dict[int | None, Tensor],
    ) -> Tensor:
        output = hidden
        for (weights, settings), window, stores in zip(layers, stage.cache.windows, stage.cache.stores, strict=True):
            assert stores is not None, "a step before a prompt"
            output = self._layer(output, weights, settings, stores, rows, positions, rotation, masks[window])
        return stage.handed_on(hidden, output, *self._chain.way_on(number))


def _mask(positions: Tensor, room: int, window: int | None) -> Tensor:
    """What the token at each position attends to, [rows, 1, 1, room]."""
    others, at = torch.arange(room, device=positions.device), positions[:, None]
    seen = others <= at
    if window is not None:
        seen &= others > at - window
    return seen[:, None, None]


class Ahead(NamedTuple):
    """A step that was launched before it was asked for."""

    step: StaticStep
    expects: tuple[tuple[Generation, int], ...]
    """Of each row, its sequence, and how many tokens it has then."""


class StaticDecoder(TokenByToken):
    """All stages of the subset for every token, with static shapes wherever a batch allows it."""

    def __init__(self, staged: StagedModel, subset: StageSubset, max_tokens: int, *, compiled: bool = False) -> None:
        super().__init__(staged, subset, max(max_tokens, LEAST_TOKENS))
        self._static = StaticDecoding.of(staged, self._whole, compiled=compiled)
        self._ahead: Ahead | None = None

    def begin(self, generations: Sequence[Generation]) -> list[list[int]]:
        if self._static is not None:
            self._reserve(max(each.slot for each in generations) + 1, generations)
        return super().begin(generations)

    @torch.inference_mode()
    def advance(self, generations: Sequence[Generation]) -> list[list[int]]:
        step = self._prepared(generations)
        if step is None:
            return super().advance(generations)
        sampling = [each.request.sampling for each in generations]
        values = step.logits[: len(generations)]
        changed = any(each.changes_logits for each in sampling)
        if changed:
            values = self._changed(values, generations, [])
        highest, chosen = choose(values, sampling, [len(each.tokens) for each in generations])
        reader = TokenReader(highest, chosen)
        if not changed:
            self._launch_ahead(step, chosen, generations)
        return [[token] for token in reader.tokens()]

    def _prepared(self, generations: Sequence[Generation]) -> StaticStep | None:
        """The step of these sequences, launched; None: the batch is not for static shapes."""
        ahead, self._ahead = self._ahead, None
        count = len(generations)
        rows = rows_after(generations, [1] * count)
        if self._static is None or rows.slots != tuple(range(count)):
            return None
        batch = 1 << (count - 1).bit_length()
        if not self._reserve(batch, generations):
            return None
        self._whole.extend(rows)
        step = self._static.step(batch)
        expected = tuple((each, len(each.tokens)) for each in generations)
        if ahead is None or ahead.step is not step or ahead.expects != expected:
            step.load([each.tokens[-1] for each in generations], rows.starts)
            step.launch()
        return step

    def _launch_ahead(self, step: StaticStep, chosen: Tensor, generations: Sequence[Generation]) -> None:
        if max(len(each.tokens) for each in generations) >= self._whole.stages[0].cache.shape[1]:
            return
        step.feed(chosen)
        step.launch()
        self._ahead = Ahead(step, tuple((each, len(each.tokens) + 1) for each in generations))

    def _reserve(self, slots: int, generations: Sequence[Generation]) -> bool:
        """Make room for these sequences to their end; False if there is not enough for slots of equal size."""
        longest = max(each.max_length for each in generations)
        try:
            self._whole.reserve(slots, max(LEAST_ROOM, 1 << (longest - 1).bit_length()))
        except CacheFull:
            return False
        return True


def decoder_for(staged: StagedModel, subset: StageSubset, max_tokens: int) -> TokenByToken:
    """On a GPU with static shapes, compiled; else plainly."""
    if torch.device(staged.device).type != "cuda":
        return TokenByToken(staged, subset, max_tokens)
    return StaticDecoder(staged, subset, max_tokens, compiled=True)
