"""Decoding with static shapes: the step that adds one token to each sequence, as one CUDA graph.

A step of a batch is hundreds of small kernels, and launching them one by one from Python takes longer than they run.
Here all tensors of the step keep their places: tokens and positions come in the same two tensors, keys and values stay
in the KV cache of the stages. So on a GPU the step is recorded once for each size of batch and
cache, and replayed; it may be compiled before. On a CPU it is the same function as it is.

Rows are slots 0, 1, 2 and so on, of unequal lengths, filled up to a power of two; rows without a sequence compute
something that nobody looks at. While the caller looks at the tokens of a step, the next step runs already, with tokens
that never left the device; if the batch changes meanwhile, it is repeated, which overwrites all it has written.

Decoder layers of this step have fewer and larger products, and static shapes. Projections of one input are one product:
queries, keys and values; gate and up. The layers' own weights become views of these, so nothing is held twice, and
prompts go through the layers as before. Keys and values are written to the KV cache (see `cached_stage`) where they
belong, and attention looks at all its room under a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from skippipe.inference.cached_stage import BatchRows, CachedStage, CacheFull, StageChain, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.engine import TokenByToken, rows_after
from skippipe.inference.request import Generation
from skippipe.inference.sampler import TokenReader, choose
from skippipe.jit import keep_compiled_forms
from skippipe.model.stage import StageModel
from skippipe.stage_subset import Hop, StageSubset

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Classes of layers that are attention and a gated feed-forward block, each after a norm and beside a residual."""
ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu"}
"""Class of a feed-forward block's activation → its name in torch.nn.functional."""
LEAST_ROOM = 256  # tokens of a slot: each other room is another graph
LEAST_TOKENS = 8192  # of all slots together: rooms and batches are rounded up
MOST_GRAPHS = 32  # of a stage; beyond them it is computed plainly
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
    """The layer's weights with its projections joined, as whose parts the layer keeps them; None: it is of another
    kind, or has adapters."""
    if type(layer).__name__ not in LAYERS:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    query, key, value, out = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    activation = ACTIVATIONS.get(type(mlp.act_fn).__name__)
    if activation is None or any(type(each) is not nn.Linear for each in (query, key, value, out, gate, up, down)):
        return None
    inner = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    qkv, qkv_bias = _joined([query, key, value])
    gate_up, gate_up_bias = _joined([gate, up])
    weights = FusedLayer(
        norm=first.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        query_norm=None if inner[0] is None else inner[0].weight,
        key_norm=None if inner[1] is None else inner[1].weight,
        out=out.weight,
        out_bias=out.bias,
        second_norm=second.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down.weight,
        down_bias=down.bias,
    )
    dim = attention.head_dim
    heads = query.out_features // dim, key.out_features // dim
    return weights, LayerSettings(*heads, dim, attention.scaling, first.variance_epsilon, activation)


@torch.no_grad()
def _joined(maps: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of several linear maps in one tensor each; theirs are parts of it from now on."""
    weight = _shared([each.weight for each in maps])
    return weight, None if maps[0].bias is None else _shared([each.bias for each in maps])


def _shared(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0].detach()
    total, storage = sum(len(each) for each in tensors), first.untyped_storage()
    together = all(each.untyped_storage().data_ptr() == storage.data_ptr() for each in tensors)
    if together and storage.nbytes() == total * first[0].numel() * first.element_size():  # joined before
        return first.as_strided((total, *first.shape[1:]), first.stride(), 0)
    joined = torch.cat([each.detach() for each in tensors])
    start = 0
    for each in tensors:
        each.data = joined[start : start + len(each)]
        start += len(each)
    return joined


def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(values, weight.shape, weight, epsilon)


def rotated(values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = values.shape[-1] // 2
    turned = torch.cat((-values[..., half:], values[..., :half]), -1)
    return torch.addcmul(values * cosines, turned, sines)


def layer_step(
    hidden: Tensor,
    weights: FusedLayer,
    settings: LayerSettings,
    stores: tuple[Tensor, Tensor],
    rows: Tensor,
    positions: Tensor,
    rotation: tuple[Tensor, Tensor],
    mask: Tensor,
    gathered: bool = False,
) -> Tensor:
    """One layer for one token of each row [rows, d], whose keys and values are written to the stores, at the slots
    `rows`. These are 0, 1, 2 and so on, unless they are to be `gathered`."""
    count, (heads, kv_heads, dim, scaling, epsilon, activation) = len(hidden), settings
    normed = rms_norm(hidden, weights.norm, epsilon)
    joined = functional.linear(normed, weights.qkv, weights.qkv_bias).view(count, heads + 2 * kv_heads, dim)
    both, value = joined[:, : heads + kv_heads], joined[:, heads + kv_heads :]
    if weights.query_norm is not None and weights.key_norm is not None:
        normed_query = rms_norm(both[:, :heads], weights.query_norm, epsilon)
        both = torch.cat((normed_query, rms_norm(both[:, heads:], weights.key_norm, epsilon)), 1)
    both = rotated(both, *rotation)
    query, key = both[:, :heads], both[:, heads:]
    stores[0][rows, :, positions] = key
    stores[1][rows, :, positions] = value
    # the queries that share a head of keys are as several tokens to it: so nothing is repeated
    grouped = query.reshape(count, kv_heads, heads // kv_heads, dim)
    keys, values = (each[rows] if gathered else each[:count] for each in stores)
    attended = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    hidden = hidden + functional.linear(attended.reshape(count, heads * dim), weights.out, weights.out_bias)
    normed = rms_norm(hidden, weights.second_norm, epsilon)
    gate, up = functional.linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, -1)
    return hidden + functional.linear(getattr(functional, activation)(gate) * up, weights.down, weights.down_bias)


def fused_layers(stage: CachedStage) -> list[Layer] | None:
    """None if one of them is of another kind, or they are on several devices."""
    if len(stage.model.devices) > 1:
        return None
    found = [each for each in map(fuse, stage.model.layers) if each is not None]
    return found if len(found) == len(stage.model.layers) else None


def position_mask(positions: Tensor, room: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of the token at each position, [rows, 1, 1, room]: once for all layers, where a mask
    of truth values would be turned into this in each."""
    others, at = torch.arange(room, device=positions.device), positions[:, None]
    unseen = others > at
    if window is not None:
        unseen |= others <= at - window
    return torch.zeros(unseen.shape, dtype=dtype, device=positions.device).masked_fill(unseen, -torch.inf)[
        :, None, None
    ]


def recorded(run: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the function, and the tensor in which each replay leaves what it returns."""
    with torch.cuda.device(device):
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may copy meanwhile
            made = run()
    return graph, made


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
            self._graph, self.logits = recorded(self._run, self._tokens.device)
        if self._graph is not None:
            self._graph.replay()
        else:
            self.logits = self._run()

    def _run(self) -> Tensor:
        return self._decoding.run(self._tokens, self._positions, self._rows)


class StaticDecoding:
    """A chain of stages whose layers are all known to `fuse`, as a function of tokens and positions."""

    def __init__(self, staged: StagedModel, chain: StageChain, layers: list[list[Layer]], *, compiled: bool) -> None:
        self._staged = staged
        self._chain = chain
        self._layers = layers
        """Of each stage, weights and settings of each layer."""
        self.device = next(staged.stages[0].parameters()).device
        self._layer = layer_step
        if compiled:
            keep_compiled_forms()  # sizes of batch and cache
            self._layer = torch.compile(layer_step, dynamic=False, fullgraph=True)
        self._steps: dict[int, StaticStep] = {}
        self._shape = 0, 0
        self._rotations: list[tuple[Tensor, Tensor]] = []
        """Of each stage; kept, because graphs read them where they are."""

    @classmethod
    def of(cls, staged: StagedModel, chain: StageChain, *, compiled: bool) -> StaticDecoding | None:
        """None if a layer is of another kind."""
        layers = [each for each in map(fused_layers, chain.stages) if each is not None]
        return None if len(layers) < len(chain.stages) else cls(staged, chain, layers, compiled=compiled)

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
        masks = {window: position_mask(positions, self._shape[1], window, hidden.dtype) for window in windows}
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
    """On a GPU with static shapes, not compiled, which would take longer than most texts; else plainly."""
    static = torch.device(staged.device).type == "cuda"
    return StaticDecoder(staged, subset, max_tokens) if static else TokenByToken(staged, subset, max_tokens)


class StaticStage(CachedStage):
    """A stage and its KV cache, for a node that serves, that passes batches of single tokens as one CUDA graph.

    As when decoding, but from hidden states to hidden states, and rows may name any slots, whose keys and values are
    gathered for attention. Rows that fill a batch up to a power of two are copies of the first: they write the same
    values to the same places. Prompts, and stages whose layers `fused_layers` does not know, are computed plainly.
    """

    def __init__(self, model: StageModel, max_tokens: int) -> None:
        super().__init__(model, max_tokens)
        self._layers = fused_layers(self)
        self._steps: dict[Hashable, StageStaticStep] = {}
        self._shape = 0, 0

    @torch.inference_mode()
    def forward(self, hidden: Tensor, rows: BatchRows, residual_scale: float = 1.0, hop: Hop | None = None) -> Tensor:
        if self._layers is None or not rows.single or any(each is None for each in self.cache.stores):
            return super().forward(hidden, rows, residual_scale, hop)
        self.cache.reserve(max(rows.slots) + 1, rows.end)
        if self.cache.shape != self._shape:  # graphs of before write where the cache was
            self._shape = self.cache.shape
            self._steps.clear()
        batch = 1 << (len(rows.slots) - 1).bit_length()
        key = batch, residual_scale, hop
        if key not in self._steps:
            if len(self._steps) >= MOST_GRAPHS:
                return super().forward(hidden, rows, residual_scale, hop)
            self._steps[key] = StageStaticStep(self, self._layers, batch, hidden[:1, 0], residual_scale, hop)
        self.cache.extend(rows)
        return self._steps[key].run(hidden, rows)


class StageStaticStep:
    """The step of one size of batch."""

    def __init__(
        self, stage: CachedStage, layers: list[Layer], batch: int, like: Tensor, residual_scale: float, hop: Hop | None
    ) -> None:
        self._stage, self._layers = stage, layers
        self._way_on = residual_scale, hop
        self._room = stage.cache.shape[1]
        self._rotations = stage.rotations(self._room, like)  # kept, because a graph reads them where they are
        self._hidden = torch.zeros(batch, like.shape[-1], dtype=like.dtype, device=like.device)
        self._where = torch.zeros(2, batch, dtype=torch.long, device=like.device)
        """Slots and positions."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor

    def run(self, hidden: Tensor, rows: BatchRows) -> Tensor:
        count, missing = len(rows.slots), len(self._hidden) - len(rows.slots)
        slots, positions = rows.slots + rows.slots[:1] * missing, rows.starts + rows.starts[:1] * missing
        self._where.copy_(torch.tensor([slots, positions]))
        self._hidden[:count].copy_(hidden[:, 0])
        self._hidden[count:].copy_(hidden[:1, 0].expand(missing, -1))
        if self._hidden.is_cuda:
            if self._graph is None:
                self._graph, self._output = recorded(self._step, self._hidden.device)
            self._graph.replay()
        else:
            self._output = self._step()
        return self._output[:count, None].clone()

    def _step(self) -> Tensor:
        slots, positions = self._where
        cosines, sines = self._rotations
        rotation = cosines[0, positions][:, None], sines[0, positions][:, None]
        cache, output = self._stage.cache, self._hidden
        masks = {window: position_mask(positions, self._room, window, output.dtype) for window in set(cache.windows)}
        for (weights, settings), window, stores in zip(self._layers, cache.windows, cache.stores, strict=True):
            assert stores is not None
            output = layer_step(
                output, weights, settings, stores, slots, positions, rotation, masks[window], gathered=True
            )
        return self._stage.handed_on(self._hidden, output, *self._way_on)
