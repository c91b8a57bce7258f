"""Decoding with static shapes, held to the plain decoder: the same tokens, whatever is in the batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from skippipe.inference import static_decoding
from skippipe.inference.cached_stage import BatchRows, embed, logits
from skippipe.inference.engine import TokenByToken
from skippipe.inference.request import SamplingParams
from skippipe.inference.static_decoding import StaticDecoder, StaticStep
from skippipe.stage_subset import StageSubset
from tests.helpers.models import FAMILIES
from tests.helpers.staged_models import GREEDY, WHOLE, asked, output_tokens, prompts, staged, staged_once

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_decoding, "LEAST_ROOM", 8)  # so that caches grow while sequences are in them


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("subset", [WHOLE, StageSubset((0, 2), 3, 1.5)])
def test_texts_are_those_of_the_plain_decoder(family: str, subset: StageSubset) -> None:
    """More sequences than fit at once, of unequal lengths: they begin, end, and move to other slots all the time."""
    model = staged(family)
    for sampling in (GREEDY, SamplingParams(0.9, top_k=20, seed=3), SamplingParams(0, repetition_penalty=1.3)):
        requests = asked(sampling, 7)
        expected = output_tokens(model, TokenByToken(model, subset, 2000), requests, 5)
        decoder = StaticDecoder(model, subset, 2000)
        assert output_tokens(model, decoder, requests, 5) == expected
        assert (decoder._static is None) == (family == "qwen3_moe"), "layers with experts are computed plainly"


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_logits_are_those_of_the_plain_step(family: str) -> None:
    model = staged(family)
    texts = prompts(3)
    decoder = StaticDecoder(model, WHOLE, 2000)
    assert decoder._static is not None
    chain, counts = decoder._whole, tuple(map(len, texts))
    chain.reserve(4, 32)
    chain.forward(embed(model.stages[0], texts), BatchRows((0, 1, 2), (0, 0, 0), counts))
    step = decoder._static.step(4)
    step.load([5, 6, 7], counts)
    step.launch()
    found = step.logits[:3]
    rows = BatchRows((0, 1, 2), counts, (1, 1, 1))
    plain = logits(model.stages[0], chain.forward(embed(model.stages[0], [[5], [6], [7]]), rows))[:, 0]
    assert torch.allclose(found, plain, atol=1e-4)


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
        attention = model.stages[0].layers[0].self_attn
        joined = decoder._static._layers[0][0][0].qkv
        assert joined.untyped_storage().data_ptr() == attention.q_proj.weight.untyped_storage().data_ptr()
        assert torch.equal(
            joined, torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        )
    assert all(torch.equal(before[name], each) for stage in model.stages for name, each in stage.named_weights())
