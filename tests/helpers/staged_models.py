"""Small models in stages, prompts for them, and what decoders write."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from skippipe.inference.cached_stage import BatchRows, embed, logits
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.engine import Decoder, GenerationEngine
from skippipe.inference.request import GenerationRequest, SamplingParams
from skippipe.inference.static_decoding import StaticDecoder, StaticStep
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.stage_subset import StageSubset
from tests.helpers.model_folders import TOKENIZER
from tests.helpers.models import tiny, whole_model

torch.set_num_threads(1)
LAYERS = (2, 1, 2)
WHOLE = StageSubset((0, 1, 2), 3)
GREEDY = SamplingParams(temperature=0)
_Tokenizer: Any = PreTrainedTokenizerFast  # untyped
TEXT = _Tokenizer(tokenizer_object=Tokenizer.from_str(TOKENIZER.text))


def staged(family: str = "llama", seed: int = 5, late: float = 1.0) -> StagedModel:
    """Weights so large that parts differ a lot, unless what the `late` stages add is made small."""
    spec = ModelSpec(tiny(family, vocab_size=TOKENIZER.size, initializer_range=0.2), seed)
    ranges = layer_ranges(LAYERS)
    stages = [StageModel(spec, each, ends=index == 0).eval() for index, each in enumerate(ranges)]
    with torch.no_grad():
        for stage in stages[1:]:
            for name, each in stage.named_weights():
                if "o_proj" in name or "down_proj" in name:
                    each.mul_(late)
    return StagedModel(stages, TEXT, 0, 64, "cpu")


staged_once = lru_cache(staged)


def theirs(model: StagedModel) -> Any:
    return whole_model(model.stages[0].spec.config, model.stages).eval()


def prompts(count: int = 5, seed: int = 0) -> list[tuple[int, ...]]:
    rate = random.Random(seed)
    return [tuple(rate.choices(range(TOKENIZER.size), k=rate.randint(1, 20))) for _ in range(count)]


def asked(sampling: SamplingParams = GREEDY, count: int = 5, seed: int = 0) -> list[GenerationRequest]:
    """Of all lengths."""
    return [GenerationRequest(each, 2 + 3 * index, sampling) for index, each in enumerate(prompts(count, seed))]


def step_after(decoder: StaticDecoder, model: StagedModel, texts: Sequence[Sequence[int]]) -> StaticStep:
    """The decoder's step of four rows, with the tokens 5, 6 and 7 after three texts that are in its caches."""
    assert decoder._static is not None
    chain, counts = decoder._whole, tuple(map(len, texts))
    chain.reserve(4, 32)
    chain.forward(embed(model.stages[0], texts), BatchRows((0, 1, 2), (0, 0, 0), counts))
    step = decoder._static.step(4)
    step.load([5, 6, 7], counts)
    return step


def plain_logits(decoder: StaticDecoder, model: StagedModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """Those of the tokens of `step_after`, without static shapes."""
    rows = BatchRows((0, 1, 2), tuple(map(len, texts)), (1, 1, 1))
    return logits(model.stages[0], decoder._whole.forward(embed(model.stages[0], [[5], [6], [7]]), rows))[:, 0]


def output_tokens(
    model: StagedModel, decoder: Decoder, requests: Sequence[GenerationRequest], max_sequences: int = 3
) -> list[list[int]]:
    generations = GenerationEngine(model, decoder, max_sequences, end_tokens=frozenset()).run(requests)
    return [generation.output_tokens for generation in generations]
