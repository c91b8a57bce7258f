"""How products are cut into programs, and what happens where Triton's kernels cannot run."""

from __future__ import annotations

import sys
import warnings
import weakref
from math import ceil
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from skippipe.inference import decode_kernels
from skippipe.inference.decode_kernels import (
    ARRIVALS,
    PROCESSORS,
    SCRATCH,
    SHARED_BYTES,
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
from tests.helpers.staged_models import WHOLE, prompts, staged, step_after


@pytest.fixture(autouse=True)
def no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernels, "failures", [])


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
            tiles = default_tiles(outputs, inputs, gated)
            assert ceil(outputs / tiles.columns) * tiles.splits >= 0.9 * PROCESSORS


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


def test_a_triton_that_does_not_load_is_as_none_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = fused_layers(StaticDecoder(staged(), WHOLE, 2000)._whole.stages[0])
    assert layers
    monkeypatch.setattr(decode_kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(decode_kernels, "supports", lambda layers: True)
    monkeypatch.setattr(decode_kernels, "SUPPORTED", (torch.float32,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    with pytest.warns(UserWarning, match="without its Triton kernels"):
        assert kernels_for(torch.device("cuda"), layers) is None
    with warnings.catch_warnings(action="error"):
        assert kernels_for(torch.device("cuda"), layers) is None, "for another route"


class Broken:
    """Kernels that do not compile."""

    def layer(self, *_given: Any, **_options: Any) -> tuple[Tensor, None]:
        raise RuntimeError("ptxas: no such instruction")


class Wrong:
    """Kernels that compile, and compute something else."""

    def layer(self, hidden: Tensor, *_given: Any, **_options: Any) -> tuple[Tensor, None]:
        return hidden, None


class Full:
    """Kernels that would run if there were memory for what they return."""

    def layer(self, *_given: Any, **_options: Any) -> tuple[Tensor, None]:
        raise torch.OutOfMemoryError


class Right:
    def layer(
        self, hidden: Tensor, weights: Any, settings: Any, stores: Any, slots: Tensor, *others: Any, **_options: Any
    ) -> tuple[Tensor, None]:
        positions, (cosines, sines), window = others
        rotation = cosines[0, positions][:, None], sines[0, positions][:, None]
        mask = position_mask(positions, stores[0].shape[2], window, hidden.dtype)
        return layer_step(hidden, weights, settings, stores, slots, positions, rotation, mask), None

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
        step = step_after(decoder, model, texts)
        if each is None:
            step.launch()
        else:
            with pytest.warns(UserWarning, match=message):
                step.launch()
            assert runner._kernels is None and decode_kernels.failures, "and not tried again"
        found.append(step.logits)
    assert torch.equal(*found)


def test_kernels_that_fail_stay_for_the_steps_that_were_recorded_with_them() -> None:
    """Graphs of other sizes of batch write to their scratch tensor."""
    runner = LayerRunner(Broken())  # type: ignore[arg-type]
    held = weakref.ref(runner._kernels)
    with pytest.warns(UserWarning, match="of another size"):
        runner._without_kernels(RuntimeError("does not compile for a batch of another size"))
    assert runner._kernels is None and held() is not None


@torch.inference_mode()
def test_kernels_do_not_fail_where_memory_is_full() -> None:
    model = staged()
    decoder = StaticDecoder(model, WHOLE, 2000)
    assert decoder._static is not None
    decoder._static._runner = runner = LayerRunner(Full())  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError):
        step_after(decoder, model, prompts(3)).launch()
    assert runner._kernels is not None and not decode_kernels.failures
