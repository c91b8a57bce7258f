"""A decoder layer as decoding runs it: one token of each row, with fewer and larger products, and static shapes.

Projections of one input are one product: queries, keys and values; gate and up. The layers' own weights become views of
these, so nothing is held twice, and prompts go through the layers as before. Keys and values are written to the KV
cache (see `cached_stage`) where they belong, and attention looks at all its room under a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from skippipe.inference.cached_stage import CachedStage

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Classes of layers that are attention and a gated feed-forward block, each after a norm and beside a residual."""
ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu"}
"""Class of a feed-forward block's activation → its name in torch.nn.functional."""


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
