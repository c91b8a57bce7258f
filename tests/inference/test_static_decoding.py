"""Decoding with static shapes, held to the plain decoder: the same tokens, whatever is in the batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from skippipe.inference import cached_stage, static_decoding
from skippipe.inference.cached_stage import BatchRows, CachedStage
from skippipe.inference.engine import TokenByToken
from skippipe.inference.request import SamplingParams
from skippipe.inference.static_decoding import StaticDecoder, StaticStage, StaticStep
from skippipe.stage_subset import StageHop, StageSubset
from tests.helpers.models import FAMILIES
from tests.helpers.quick import others_slow
from tests.helpers.staged_models import (
    GREEDY,
    WHOLE,
    asked,
    output_tokens,
    plain_logits,
    prompts,
    staged,
    staged_once,
    step_after,
)

torch.set_num_threads(1)
PART = StageSubset((0, 2), 3, 1.5)
COMPUTED_PLAINLY = ("qwen3_moe", "gemma3", "deepseek_v3")  # their layers are not those of the fused step


@pytest.fixture(autouse=True)
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_decoding, "LEAST_ROOM", 8)  # so that caches grow while sequences are in them


@pytest.mark.parametrize(
    ("family", "subset"),
    others_slow(
        [("llama", PART), ("mistral", WHOLE)],
        [*((family, WHOLE) for family in FAMILIES if family != "mistral"), ("qwen3_moe", PART)],
    ),
)
def test_texts_are_those_of_the_plain_decoder(family: str, subset: StageSubset) -> None:
    """More sequences than fit at once, of unequal lengths: they begin, end, and move to other slots all the time."""
    model = staged(family)
    for sampling in (GREEDY, SamplingParams(0.9, top_k=20, seed=3), SamplingParams(0, repetition_penalty=1.3)):
        requests = asked(sampling, 7)
        expected = output_tokens(model, TokenByToken(model, subset, 2000), requests, 5)
        decoder = StaticDecoder(model, subset, 2000)
        assert output_tokens(model, decoder, requests, 5) == expected
        assert (decoder._static is None) == (family in COMPUTED_PLAINLY)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_logits_are_those_of_the_plain_step(family: str) -> None:
    model = staged(family)
    texts = prompts(3)
    decoder = StaticDecoder(model, WHOLE, 2000)
    step = step_after(decoder, model, texts)
    step.launch()
    assert torch.allclose(step.logits[:3], plain_logits(decoder, model, texts), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_by_itself_hands_on_what_the_plain_one_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any slots in any order, in batches of any size; the caches grow meanwhile."""
    monkeypatch.setattr(cached_stage, "MIN_ROOM", 4)
    model, rate = staged(family).stages[1], random.Random(family)
    plain, static = CachedStage(model, 2000), StaticStage(model, 2000)
    noise = torch.Generator().manual_seed(0)
    lengths = dict.fromkeys(range(5), 0)
    for turn in range(24):
        slots = tuple(rate.sample(range(5), rate.randint(1, 5)))
        counts = tuple(rate.randint(2, 4) if turn % 6 == 0 else 1 for _ in slots)
        rows = BatchRows(slots, tuple(lengths[slot] for slot in slots), counts)
        hidden = torch.randn(len(slots), rows.width, 32, generator=noise)
        hop = StageHop(1, 3, 1) if turn % 2 else None
        expected, found = (stage.forward(hidden, rows, 1.5, hop) for stage in (plain, static))
        for row, count in enumerate(counts):
            assert torch.allclose(found[row, :count], expected[row, :count], atol=1e-4)
            lengths[slots[row]] += count
    assert bool(static._steps) == (family not in COMPUTED_PLAINLY)


def test_steps_run_ahead_until_the_batch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Sequence[int]] = []
    load = StaticStep.load

    def counted(self: StaticStep, tokens: Sequence[int], positions: Sequence[int]) -> None:
        loads.append(positions)
        load(self, tokens, positions)

    monkeypatch.setattr(StaticStep, "load", counted)
    model, requests = staged_once(), asked(GREEDY, 3)  # 2, 5 and 8 tokens, the first from the prompts
    lengths = [len(each.prompt) for each in requests]
    output_tokens(model, StaticDecoder(model, WHOLE, 2000), requests, 3)
    assert [len(each) for each in loads] == [3, 2, 1], "from the host only where a sequence has ended"
    assert loads[0] == tuple(lengths)


def test_weights_are_held_once() -> None:
    model = staged()
    before = {name: each.clone() for stage in model.stages for name, each in stage.named_weights()}
    for _ in range(2):  # a second decoder joins nothing again
        decoder = StaticDecoder(model, WHOLE, 2000)
        assert decoder._static is not None
        attention: Any = model.stages[0].layers[0].self_attn
        joined = decoder._static._layers[0][0][0].qkv
        assert joined.untyped_storage().data_ptr() == attention.q_proj.weight.untyped_storage().data_ptr()
        assert torch.equal(
            joined, torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        )
    assert all(torch.equal(before[name], each) for stage in model.stages for name, each in stage.named_weights())
