"""Small models of every family that is tested, in stages, and a whole transformers model with their weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig

from skippipe.inference.cached_stage import logits
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model.stage_step import StageStep
from skippipe.optim.config import OptimConfig

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
LAYERS = (2, 1, 2)
TOKENS = torch.arange(40).reshape(2, 20) * 7 % 97
LABELS = TOKENS.roll(-1, 1)


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
    if family == "gemma3":
        kinds = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")]
        return AutoConfig.for_model("gemma3_text", **sizes, sliding_window=6, layer_types=kinds)
    if family == "deepseek_v3":
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1}
        latent = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
        sizes |= {"num_key_value_heads": 4, "topk_group": 1, "first_k_dense_replace": 1, **experts, **latent}
        del sizes["head_dim"]
        return AutoConfig.for_model("deepseek_v3", **sizes)
    assert family == "qwen3_moe"
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.01}
    return Qwen3MoeConfig(**{**mixture, **sizes})


FAMILIES = ("llama", "llama-tied", "qwen3", "mistral", "qwen3_moe", "gemma3", "deepseek_v3")


def whole_model(config: Any, stages: Iterable[StageModel]) -> Any:
    """What transformers makes of the configuration, with the stages' weights; every weight must be there."""
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    weights = {name: each.detach().clone() for stage in stages for name, each in stage.named_weights()}
    expected = model.state_dict(keep_vars=True)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert set(weights) == set(expected) - tied
    with torch.no_grad():
        for name, each in weights.items():
            expected[name].copy_(each)
    return model


def stages_of(spec: ModelSpec, counts: tuple[int, ...] = LAYERS, **options: Any) -> list[StageModel]:
    return [StageModel(spec, layers, ends=index == 0, **options) for index, layers in enumerate(layer_ranges(counts))]


def tasks_of(spec: ModelSpec, **options: Any) -> list[StageStep]:
    return [
        StageStep(spec, layers, OptimConfig(), ends=index == 0, **options)
        for index, layers in enumerate(layer_ranges(LAYERS))
    ]


def train_once(
    tasks: list[StageStep],
    path: tuple[int, ...] = (0, 1, 2),
    split: bool = False,
    drive: float = 1.0,
    early: float = 0.0,
    again: bool = False,
) -> float:
    """One microbatch there and back over the stages of a path; `again`: stage 0 has lost it when its head comes."""
    key = (0, 0)
    hidden = tasks[path[0]].begin(key, TOKENS)
    for stage in path[1:]:
        hidden = tasks[stage].forward(key, hidden, drive)
    if again:
        tasks[0].drop(key)
    loss, gradient = tasks[0].head(key, hidden, LABELS, early=early)
    if again:
        tasks[0].begin(key, TOKENS)
    for stage in reversed(path):
        back = tasks[stage].backward(key, gradient)
        assert (back is None) == (stage == 0)
        gradient = gradient if back is None else back
    if split:
        for stage in path:
            tasks[stage].weight_gradients(key)
    return float(loss)


@torch.no_grad()
def logits_of(stages: Sequence[StageModel]) -> torch.Tensor:
    """What all stages, one after another, make of `TOKENS`."""
    hidden = stages[0].embed(TOKENS)
    for stage in stages:
        hidden = stage(hidden)
    return logits(stages[0], hidden)
