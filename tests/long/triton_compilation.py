"""Kernels of decoding, compiled for an H200 by Triton, for which no GPU is needed.

make test-triton
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from skippipe.inference import triton_kernels
from skippipe.inference.decode_kernels import SHARED_BYTES, fetched_lines, tiles_for
from skippipe.model_shape import MODELS

POINTERS = {
    "scratch": "*fp32",
    "given": "*fp32",
    "sums": "*fp32",
    "arrivals": "*i32",
    "slots": "*i64",
    "positions": "*i64",
}
NUMBERS = {"rows": "i32", "room": "i32", "epsilon": "fp32", "scaling": "fp32"}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("model", ["llama-500m", "llama-1.5b"])
def test_kernels_compile_for_an_h200(
    model: str, early: bool, ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To machine code, for which no GPU is needed, within the shared memory of a program."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

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
        others = {"SQUARES": triton.language.bfloat16, "FETCHED": fetched_lines(tiles, inputs, gated), "EARLY": early}
        blocks = 128 if ahead and form["NORM"] else 0
        chain = {"AHEAD": ahead and form["RESIDUAL"], "GIVEN": blocks, "GIVEN_SIZE": max(blocks, 1)}
        check(triton_kernels.product, form | sizes | loop | others | chain, tiles.warps)
    heads = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "DIM": shape.head_dim, "WIDTH": shape.head_dim}
    for splits, window, norm in ((1, 0, False), (4, 100, True)):
        ways = {"WINDOW": window, "HEAD_NORM": norm, "SPLITS": splits, "BLOCK": 64, "STAGES": 3}
        check(triton_kernels.attention, heads | ways | {"EARLY": early}, 4)
