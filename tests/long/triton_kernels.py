"""Kernels of decoding against plain torch, in Triton's interpreter on a CPU, which TRITON_INTERPRET=1 asks for.

make test-triton
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from skippipe.inference.decode_kernels import AttentionTiles, DecodeKernels, Tiles
from skippipe.inference.fused_layer import FusedLayer, LayerSettings, layer_step, position_mask
from skippipe.inference.static_decoding import LayerRunner, StaticDecoder
from skippipe.stage_subset import StageSubset
from tests.helpers.staged_models import WHOLE, plain_logits, prompts, staged, step_after

assert os.environ.get("TRITON_INTERPRET") == "1", "the interpreter is for all of a process, or for none"
CPU = torch.device("cpu")
ROUNDING = {torch.float16: 4e-3, torch.float32: 1e-4}  # the interpreter's products take bf16 for whole numbers


def random(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Within what rounding to the type does to values of the size of the largest."""
    return bool((found.float() - expected.float()).abs().max() <= ROUNDING[dtype] * expected.float().abs().max())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tiles"),
    [
        (8, 64, 128, Tiles(32, 64, 1, 3)),
        (1, 50, 80, Tiles(16, 32, 1, 3)),  # neither outputs nor inputs fill their tiles
        (3, 48, 256, Tiles(16, 32, 4, 3)),
        (16, 40, 176, Tiles(16, 32, 2, 3)),  # an uneven split
        (5, 32, 64, Tiles(16, 64, 4, 3)),  # splits without any inputs
    ],
)
@pytest.mark.parametrize("form", ["plain", "norm", "gated", "residual"])
def test_products(form: str, rows: int, outputs: int, inputs: int, tiles: Tiles, dtype: torch.dtype) -> None:
    kernels = DecodeKernels(CPU)
    gated = form == "gated"
    x = random(rows, inputs, seed=1, dtype=dtype, scale=3.0)
    weight = random(outputs * (2 if gated else 1), inputs, seed=2, dtype=dtype, scale=inputs**-0.5)
    gain = random(inputs, seed=3, dtype=dtype) if form in ("norm", "gated") else None
    bias = random(len(weight), seed=4, dtype=dtype) if form != "plain" else None
    residual = random(rows, outputs, seed=5, dtype=dtype) if form == "residual" else None
    wanted = x.float()
    if gain is not None:
        wanted = functional.rms_norm(wanted, (inputs,), gain.float(), 1e-5)
    wanted = functional.linear(wanted, weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = wanted.chunk(2, -1)
        wanted = functional.silu(gate) * up
    if residual is not None:
        wanted = wanted + residual.float()
    options: dict[str, Any] = {"gain": gain, "bias": bias, "residual": residual, "tiles": tiles}
    options |= {"gated": gated, "epsilon": 1e-5}
    found = kernels.product(x, weight, **options)
    assert found.dtype == dtype
    assert close(found, wanted, dtype)
    assert torch.equal(kernels.product(x, weight, **options), found), "arrivals are counted from 0 again"
    exact = kernels.product(x, weight, **options, dtype=torch.float32)
    assert torch.equal(exact, found.float()), "rounded to the type of the input"


def test_a_matrix_of_too_many_values_is_refused() -> None:
    x, weight = torch.empty(1, 2**16, device="meta"), torch.empty(2**15, 2**16, device="meta")
    with pytest.raises(AssertionError, match="32 bits"):
        DecodeKernels(CPU).product(x, weight)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_is_prepared_by_the_product_before(gated: bool, splits: int, dtype: torch.dtype) -> None:
    """Neither product's outputs fill its blocks, of which there are three, and not a power of two."""
    kernels, rows, hidden, outputs = DecodeKernels(CPU), 5, 80, 48
    x, residual = random(rows, 64, seed=1, dtype=dtype), random(rows, hidden, seed=2, dtype=dtype, scale=3.0)
    first = random(hidden, 64, seed=3, dtype=dtype, scale=0.1)
    second = random(outputs * (2 if gated else 1), hidden, seed=4, dtype=dtype, scale=0.1)
    gain, tiles = random(hidden, seed=5, dtype=dtype), Tiles(32, 32, splits, 3)
    ready = kernels.room_for(x, first, tiles)
    assert len(ready.sums) == 3
    between = kernels.product(x, first, residual=residual, tiles=tiles, following=gain, prepare=ready)
    assert torch.equal(between, kernels.product(x, first, residual=residual, tiles=tiles))
    options: dict[str, Any] = {"gain": gain, "gated": gated, "epsilon": 1e-5, "tiles": tiles}
    found = kernels.product(between, second, **options, prepared=ready)
    assert close(found, kernels.product(between, second, **options), dtype)
    assert torch.equal(found, kernels.product(between, second, **options, prepared=ready))


def layer(settings: LayerSettings, hidden: int, inner: int, dtype: torch.dtype, *, norms: bool) -> FusedLayer:
    heads, kv_heads, dim = settings.heads, settings.kv_heads, settings.head_dim
    total = (heads + 2 * kv_heads) * dim

    def matrix(outputs: int, inputs: int, seed: int) -> Tensor:
        return random(outputs, inputs, seed=seed, dtype=dtype, scale=inputs**-0.5)

    return FusedLayer(
        norm=random(hidden, seed=10, dtype=dtype),
        qkv=matrix(total, hidden, 11),
        qkv_bias=random(total, seed=12, dtype=dtype) if norms else None,
        query_norm=random(dim, seed=13, dtype=dtype) if norms else None,
        key_norm=random(dim, seed=14, dtype=dtype) if norms else None,
        out=matrix(hidden, heads * dim, 15),
        out_bias=None,
        second_norm=random(hidden, seed=16, dtype=dtype),
        gate_up=matrix(2 * inner, hidden, 17),
        gate_up_bias=None,
        down=matrix(hidden, inner, 18),
        down_bias=None,
    )


def rotations(room: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.arange(room)[:, None] * 100.0 ** (-torch.arange(dim // 2) / (dim // 2))
    both = torch.cat((angles, angles), -1)[None]
    return both.cos().to(dtype), both.sin().to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "norms"),
    [(4, 4, 16, None, False), (4, 1, 32, 20, True), (6, 3, 48, None, True)],
)
@pytest.mark.parametrize("splits", [1, 4])
def test_layers(
    heads: int, kv_heads: int, dim: int, window: int | None, norms: bool, splits: int, dtype: torch.dtype
) -> None:
    """Positions at both ends of the room, slots in any order; outputs and caches are those of `layer_step`."""
    settings, room = LayerSettings(heads, kv_heads, dim, dim**-0.5, 1e-5, "silu"), 80
    weights = layer(settings, 64, 96, dtype, norms=norms)
    slots, positions = torch.tensor([4, 0, 2, 1, 3]), torch.tensor([0, 69, 1, 32, 47])
    stores = tuple(random(6, kv_heads, room, dim, seed=seed, dtype=dtype) for seed in (20, 21))
    for store in stores:
        for slot, position in zip(slots, positions, strict=True):
            store[slot, :, position + 1 :] = 7.0  # of a token that was there before: nothing may look at it
    hidden, tables = random(5, 64, seed=22, dtype=dtype), rotations(room, dim, dtype)
    own = stores[0].clone(), stores[1].clone()
    kernels = DecodeKernels(CPU)
    attend = kernels.attend
    kernels.attend = lambda *given: attend(*given, tiles=AttentionTiles(16, 2), splits=splits)  # type: ignore[method-assign]
    found, _ = kernels.layer(hidden, weights, settings, own, slots, positions, tables, window)
    rotation = tables[0][0, positions][:, None], tables[1][0, positions][:, None]
    mask = position_mask(positions, room, window, dtype)
    theirs = stores[0].clone(), stores[1].clone()
    expected = layer_step(hidden, weights, settings, theirs, slots, positions, rotation, mask, gathered=True)
    assert close(found, expected, dtype)
    for mine, other, before in zip(own, theirs, stores, strict=True):
        assert torch.equal((mine != before).any(-1), (other != before).any(-1)), "written where they belong"
        assert close(mine, other, dtype)


@torch.inference_mode()
@pytest.mark.filterwarnings("error")  # that the kernels are not used after all
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_logits_are_those_of_the_plain_step(family: str, ahead: bool) -> None:
    model, texts = staged(family), prompts(3)
    decoder = StaticDecoder(model, WHOLE, 2000)
    assert decoder._static is not None
    decoder._static._runner = runner = LayerRunner(DecodeKernels(CPU, ahead=ahead))
    step = step_after(decoder, model, texts)
    step.launch()
    assert torch.allclose(step.logits[:3], plain_logits(decoder, model, texts), atol=1e-4)
    assert not runner._unchecked


@torch.inference_mode()
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("subset", "alone"),
    [(WHOLE, 1), (StageSubset((0, 2), WHOLE.total), 1), (StageSubset((0, 2), WHOLE.total, 0.5), 2)],
)
def test_norms_are_prepared_from_stage_to_stage_and_to_the_head(
    subset: StageSubset, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the first, and those behind a stage that adds less than all of its output."""
    model, texts, unprepared = staged("llama"), prompts(3), []
    decoder = StaticDecoder(model, subset, 2000)
    assert decoder._static is not None
    decoder._static._runner = LayerRunner(DecodeKernels(CPU))
    step = step_after(decoder, model, texts)
    product = DecodeKernels.product

    def counted(*given: Any, **options: Any) -> Tensor:
        if options.get("gain") is not None and options.get("prepared") is None:
            unprepared.append(given)
        return product(*given, **options)

    monkeypatch.setattr(DecodeKernels, "product", counted)
    step.launch()
    assert torch.allclose(step.logits[:3], plain_logits(decoder, model, texts), atol=1e-4)
    assert len(unprepared) == alone
