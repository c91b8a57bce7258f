"""Small models of every family that is tested, and a whole transformers model with the weights of stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig

from skippipe.model.stage import StageModel

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny(family: str, **others: Any) -> Any:
    sizes = {**SIZES, **others}
    if family == "llama":
        return LlamaConfig(**sizes)
    if family == "llama-tied":
        return LlamaConfig(**sizes, tie_word_embeddings=True)
    if family == "qwen3":
        return Qwen3Config(**sizes)
    if family == "mistral":
        return MistralConfig(**sizes, sliding_window=6)
    assert family == "qwen3_moe"
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.01}
    return Qwen3MoeConfig(**{**mixture, **sizes})


FAMILIES = ("llama", "llama-tied", "qwen3", "mistral", "qwen3_moe")


def whole_model(config: Any, stages: Iterable[StageModel]) -> Any:
    """What transformers makes of the configuration, with the stages' weights; every weight must be there."""
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    weights = {name: each.detach().clone() for stage in stages for name, each in stage.named_weights()}
    expected = set(dict(model.named_parameters()))
    assert set(weights) == expected
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(weights[name])
    return model
