"""How products are cut into programs, and what happens where Triton's kernels cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skippipe.inference import decode_kernels
from skippipe.inference.cached_stage import BatchRows, embed
from skippipe.inference.decode_kernels import (
    ARRIVALS,
    PROCESSORS,
    SCRATCH,
    TUNED,
    Tiles,
    agree,
    attention_splits,
    default_tiles,
    fetched_lines,
    kernels_for,
    supports,
    tiles_for,
)
from skippipe.inference.fused_layer import fused_layers, layer_step, position_mask
from skippipe.inference.static_decoding import LayerRunner, StaticDecoder
from skippipe.model_shape import MODELS
from tests.helpers.staged_models import WHOLE, prompts, staged

BESIDE_S = 600.0  # in which the interpreter has run all of its tests
SHARED_BYTES = 227 * 1024  # that a program may have on an H200


def products() -> list[tuple[int, int, bool]]:
    """Those of the models that we know, whose sizes the kernels support."""
    found = set()
    for shape in MODELS.values():
        heads = shape.heads * shape.head_dim
        joined = heads + 2 * shape.kv_heads * shape.head_dim
        found |= {(joined, shape.hidden, False), (shape.hidden, heads, False), (shape.vocab, shape.hidden, False)}
        found |= {(shape.intermediate, shape.hidden, True), (shape.hidden, shape.intermediate, False)}
    return sorted(found)


@pytest.mark.parametrize(("outputs", "inputs", "gated"), products())
def test_tiles_cover_a_product_and_fit_a_processor(outputs: int, inputs: int, gated: bool) -> None:
    tiles = tiles_for(outputs, inputs, gated)
    assert tiles.steps(inputs) * tiles.inner * tiles.splits >= inputs
    assert (tiles.steps(inputs) - 1) * tiles.inner * tiles.splits < inputs, "no step more than it takes"
    buffers = tiles.stages * 2 * tiles.inner * (tiles.columns * (2 if gated else 1) + 16)
    assert buffers <= SHARED_BYTES
    blocks = -(-outputs // tiles.columns)
    if tiles.splits > 1:
        assert blocks <= ARRIVALS
        assert blocks * tiles.splits * 16 * (2 * tiles.columns + 1) <= SCRATCH
    lines = fetched_lines(tiles, inputs, gated)
    assert lines & (lines - 1) == 0
    assert lines >= 1


def test_grids_of_large_models_fill_the_processors() -> None:
    for outputs, inputs, gated in products():
        if outputs >= 1024:
            assert default_tiles(outputs, inputs, gated).programs(outputs) >= 0.9 * PROCESSORS


def test_measured_tiles_come_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Tiles(64, 64, 2, 3)
    monkeypatch.setitem(TUNED, (2048, 2048, False), mine)
    assert tiles_for(2048, 2048) == mine
    assert default_tiles(2048, 2048) == Tiles(16, 256, 1, 8), "128 programs, of which none waits for another"
    assert default_tiles(2048, 5632).splits > 1, "too many inputs for one program"


def test_tokens_are_split_only_where_processors_would_be_idle() -> None:
    assert attention_splits(8, 16, 4096) == 1
    assert attention_splits(1, 16, 4096) == 8
    assert attention_splits(1, 16, 256) == 2, "at least 128 tokens each"
    assert attention_splits(1, 16, 64) == 1


def test_results_agree_up_to_rounding_and_nothing_else() -> None:
    before, change = torch.ones(4, 64), torch.linspace(-1, 1, 256).view(4, 64)
    expected = before + change
    assert agree(expected.bfloat16().float(), expected, before)
    assert not agree(before, expected, before), "a layer that adds nothing"
    assert not agree(expected + torch.nan, expected, before)


def test_without_a_gpu_or_triton_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = fused_layers(StaticDecoder(staged(), WHOLE, 2000)._whole.stages[0])
    assert layers
    assert kernels_for(torch.device("cpu"), layers) is None
    assert not supports(layers), "heads of 8"
    monkeypatch.setattr(decode_kernels, "find_spec", lambda name: None)
    assert kernels_for(torch.device("cuda"), layers) is None


class Broken:
    """Kernels that do not compile."""

    def layer(self, *_given: Any) -> Tensor:
        raise RuntimeError("ptxas: no such instruction")


class Wrong:
    """Kernels that compile, and compute something else."""

    def layer(self, hidden: Tensor, *_given: Any) -> Tensor:
        return hidden


class Right:
    def layer(self, hidden: Tensor, weights: Any, settings: Any, stores: Any, slots: Tensor, *others: Any) -> Tensor:
        positions, (cosines, sines), window = others
        rotation = cosines[0, positions][:, None], sines[0, positions][:, None]
        mask = position_mask(positions, stores[0].shape[2], window, hidden.dtype)
        return layer_step(hidden, weights, settings, stores, slots, positions, rotation, mask)

    def product(self, *_given: Any, **_options: Any) -> Tensor:
        raise RuntimeError("out of shared memory")


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kernels", "message"),
    [(Broken(), "no such instruction"), (Wrong(), "not those of the layer"), (Right(), "out of shared memory")],
)
def test_a_step_whose_kernels_fail_is_as_without_them(kernels: Any, message: str) -> None:
    model, texts = staged(), prompts(3)
    found = []
    for each in (None, kernels):
        decoder = StaticDecoder(model, WHOLE, 2000)
        assert decoder._static is not None
        decoder._static._runner = runner = LayerRunner(each)
        chain, counts = decoder._whole, tuple(map(len, texts))
        chain.reserve(4, 32)
        chain.forward(embed(model.stages[0], texts), BatchRows((0, 1, 2), (0, 0, 0), counts))
        step = decoder._static.step(4)
        step.load([5, 6, 7], counts)
        if each is None:
            step.launch()
        else:
            with pytest.warns(UserWarning, match=message):
                step.launch()
            assert runner._kernels is None, "and not tried again"
        found.append(step.logits)
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is for all of a process, or for none."""
    file = Path(__file__).with_name("test_triton_kernels.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=BESIDE_S
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout or "100%" in done.stdout
    assert "skipped" not in done.stdout


POINTERS = {"scratch": "*fp32", "arrivals": "*i32", "slots": "*i64", "positions": "*i64"}
NUMBERS = {"rows": "i32", "room": "i32", "epsilon": "fp32", "scaling": "fp32"}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("model", ["llama-500m", "llama-1.5b"])
def test_kernels_compile_for_an_h200(model: str, early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To machine code, for which no GPU is needed, within the shared memory of a program."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from skippipe.inference import triton_kernels

    def check(kernel: Any, constants: dict[str, Any], warps: int) -> None:
        kinds, found, aligned = {}, {}, {}
        for place, each in enumerate(kernel.params):
            if each.is_constexpr:
                kinds[each.name], found[place,] = "constexpr", constants[each.name]
            else:
                kinds[each.name] = NUMBERS.get(each.name) or POINTERS.get(each.name, "*bf16")
                if each.name not in NUMBERS:
                    aligned[place,] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, kinds, found, aligned)
        made = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "launch_pdl": early}
        )
        assert made.metadata.shared <= SHARED_BYTES
        ptx = made.asm["ptx"]
        assert "cp.async" in ptx, "weights and caches are loaded ahead"
        assert "mma.sync" in ptx
        assert ("griddepcontrol.wait" in ptx) == early

    shape = MODELS[model]
    joined = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    forms = {
        (joined, shape.hidden): {"NORM": True, "GATED": False, "BIAS": True, "RESIDUAL": False},
        (shape.intermediate, shape.hidden): {"NORM": True, "GATED": True, "BIAS": False, "RESIDUAL": False},
        (shape.hidden, shape.intermediate): {"NORM": False, "GATED": False, "BIAS": False, "RESIDUAL": True},
    }
    for (outputs, inputs), form in forms.items():
        gated = form["GATED"]
        tiles = tiles_for(outputs, inputs, gated)
        sizes = {"OUTPUTS": outputs, "INPUTS": inputs, "COLUMNS": tiles.columns, "INNER": tiles.inner}
        loop = {"SLICES": tiles.warps, "SPLITS": tiles.splits, "STEPS": tiles.steps(inputs), "STAGES": tiles.stages}
        ahead = {"SQUARES": triton.language.bfloat16, "FETCHED": fetched_lines(tiles, inputs, gated), "EARLY": early}
        check(triton_kernels.product, form | sizes | loop | ahead, tiles.warps)
    heads = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "DIM": shape.head_dim, "WIDTH": shape.head_dim}
    for splits, window, norm in ((1, 0, False), (4, 100, True)):
        ways = {"WINDOW": window, "HEAD_NORM": norm, "SPLITS": splits, "BLOCK": 64, "STAGES": 3}
        check(triton_kernels.attention, heads | ways | {"FETCHED": 256, "EARLY": early}, 4)
