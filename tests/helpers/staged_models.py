"""Small models in stages, prompts for them, and what decoders write."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.engine import Decoder, GenerationEngine
from skippipe.inference.request import GenerationRequest, SamplingParams
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


def output_tokens(
    model: StagedModel, decoder: Decoder, requests: Sequence[GenerationRequest], max_sequences: int = 3
) -> list[list[int]]:
    generations = GenerationEngine(model, decoder, max_sequences, end_tokens=frozenset()).run(requests)
    return [generation.output_tokens for generation in generations]
