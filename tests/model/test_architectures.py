"""Stages of every kind of model that is said to be tested compute what transformers computes."""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.errors import UserError
from skippipe.inference.cached_stage import BatchRows, StageChain, embed, logits
from skippipe.inference.checkpoint_loader import load, load_stage, read_outline
from skippipe.model.flat_params import FlatParams, layout_of_stage
from skippipe.model.model_spec import ROUTER_BIAS, TESTED, ModelSpec, config_named, warn_untested
from skippipe.model_shape import TIED
from skippipe.optim.config import OptimConfig
from tests.helpers.model_folders import TOKENIZER
from tests.helpers.models import (
    FAMILIES,
    LABELS,
    LAYERS,
    SIZES,
    TOKENS,
    logits_of,
    stages_of,
    tasks_of,
    tiny,
    train_once,
    whole_model,
)
from tests.helpers.quick import others_slow

COMMON = {
    **SIZES,
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},  # some kinds want numbers
    **{
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    **{"moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "router_aux_loss_coef": 0.0,  # transformers adds none unless it is asked to
}
BETWEEN = {
    **{"embedding_multiplier": 3.0, "logits_scaling": 2.5, "logit_scale": 0.4, "mup_enabled": True},
    **{"final_logit_softcapping": 1.5, "sliding_window": 6, "use_sliding_window": True},
    **{"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1},
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
}
"""What a model does between its layers, where it can."""
LATENT = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
WITH_LATENT_KEYS = ("deepseek_v3", "glm4_moe_lite", "youtu")


def config_of(kind: str) -> Any:
    """Dense kinds get no fields of mixtures: what they do not know they would keep."""
    known = {*SIZES, *AutoConfig.for_model(kind).to_dict()}
    sizes = {name: value for name, value in {**COMMON, **BETWEEN}.items() if name in known}
    if kind in WITH_LATENT_KEYS:
        del sizes["head_dim"]
        sizes |= {**LATENT, "num_key_value_heads": 4}
    return AutoConfig.for_model(kind, **sizes)


every_kind = partial(pytest.mark.parametrize, "kind")(
    others_slow(["mixtral", "gemma3_text"], sorted(TESTED - {"mixtral", "gemma3_text"}))
)


@every_kind
def test_stages_give_the_logits_of_transformers_at_once_and_with_a_cache(kind: str) -> None:
    config = config_of(kind)
    stages = stages_of(ModelSpec(config, seed=3))
    chain = StageChain(stages, (0, 1, 2), 1.0, 100)
    with torch.no_grad():
        expected = whole_model(config, stages).eval()(input_ids=TOKENS, use_cache=False).logits
        pieces = [
            logits(stages[0], chain.forward(embed(stages[0], TOKENS[:, slice(begin, end)].tolist()), rows))
            for begin, end in ((0, 7), (7, 8), (8, 20))
            for rows in [BatchRows((0, 1), (begin, begin), (end - begin, end - begin))]
        ]
    torch.testing.assert_close(logits_of(stages), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-5)


OTHERWISE_SHAPED = {*WITH_LATENT_KEYS, "afmoe", "gpt_oss", "laguna", "mimo_v2_flash", "qwen2_moe", "ernie4_5_moe"}
"""Kinds whose attention is not four matrices, whose shared experts have a gate, or whose experts have biases."""


@pytest.mark.parametrize("kind", sorted(TESTED - OTHERWISE_SHAPED))
def test_plans_count_the_matrices_of_layers(kind: str) -> None:
    spec = ModelSpec(config_of(kind), seed=3)
    matrices = sum(each.numel() for each in spec.layer(spec.layers - 1).parameters() if each.ndim > 1)
    assert spec.shape.layer_parameters - 2 * spec.shape.hidden == matrices


@every_kind
def test_gradients_are_those_of_the_whole_model(kind: str) -> None:
    """Without dropout, which some configurations ask for."""
    config = config_of(kind)
    tasks = tasks_of(ModelSpec(config, seed=3))
    model = whole_model(config, [each.model for each in tasks]).eval()
    loss = train_once(tasks)
    expected = functional.cross_entropy(model(input_ids=TOKENS, use_cache=False).logits.flatten(0, 1), LABELS.flatten())
    torch.autograd.backward(expected)
    assert math.isclose(loss, float(expected.detach()), rel_tol=1e-5)
    found = {name: each.grad for stage in tasks for name, each in stage.model.named_weights()}
    for name, each in model.named_parameters():
        if each.grad is not None:
            torch.testing.assert_close(found[name], each.grad, rtol=1e-3, atol=1e-5, msg=name)


@every_kind
def test_folders_of_transformers_are_read_and_ours_by_transformers(kind: str, tmp_path: Path) -> None:
    """Also where files have other names for the weights than models have, as for experts."""
    config = config_of(kind)
    config.vocab_size = TOKENIZER.size
    spec = ModelSpec(config, seed=3)
    stages = stages_of(spec)
    whole, theirs, ours = whole_model(config, stages).eval(), tmp_path / "theirs", tmp_path / "ours"
    whole.save_pretrained(theirs)
    TOKENIZER.save(theirs)
    folder = ModelFolder(ours, LAYERS, spec, TOKENIZER)
    for number, stage in enumerate(stages):
        weights = dict(stage.named_weights())
        layout = layout_of_stage(spec, LAYERS, number)
        folder.store_flat(number, torch.cat([weights[slot.name].detach().flatten() for slot in layout]))
    for place in (theirs, ours):
        outline = read_outline(place, "2,1,2")
        for number, (stage, other) in enumerate(zip(stages, load(place, "2,1,2").stages, strict=True)):
            expected = dict(stage.named_weights())
            for found in (other, load_stage(outline, number)):
                for name, each in found.named_weights():
                    assert torch.equal(each, expected[name]), name
    again = AutoModelForCausalLM.from_pretrained(ours, attn_implementation=config._attn_implementation)
    with torch.no_grad():
        assert torch.equal(again(input_ids=TOKENS, use_cache=False).logits, whole(TOKENS, use_cache=False).logits)


def test_values_beside_the_weights_are_refused() -> None:
    """Which no stage would read from a folder."""
    with pytest.raises(UserError, match=r"a gemma4_text model has values beside its weights \(layer_scalar"):
        ModelSpec(AutoConfig.for_model("gemma4_text", **SIZES))


@pytest.mark.parametrize("kind", ["deepseek_v3", "minimax_m2"])
def test_what_routers_add_is_used_and_kept(kind: str, tmp_path: Path) -> None:
    """It comes with a folder, goes into one, and no step changes it, also with gradients that were rounded together."""
    config = config_of(kind)
    config.vocab_size = TOKENIZER.size
    whole = whole_model(config, stages_of(ModelSpec(config, seed=3))).eval()
    biases = {name: each for name, each in whole.named_buffers() if name.endswith(ROUTER_BIAS)}
    for number, each in enumerate(biases.values()):
        each.copy_(torch.linspace(-3, 3, len(each)).roll(number))
    whole.save_pretrained(tmp_path)
    TOKENIZER.save(tmp_path)
    found = load(tmp_path, "2,1,2")
    with torch.no_grad():
        expected = whole(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(logits_of(found.stages), expected, rtol=1e-5, atol=1e-5)
    spec = ModelSpec(config)
    for number, stage in enumerate(found.stages):
        weights = FlatParams(stage.trained_weights(), OptimConfig())
        weights.gradient.fill_(0.5)
        weights.step(0.1, 1.0)
        assert [slot.name for slot in weights.slots] == [slot.name for slot in layout_of_stage(spec, LAYERS, number)]
        for name, each in stage.named_weights():
            assert name not in biases or torch.equal(each, biases.pop(name))
    assert not biases


@pytest.mark.parametrize("kind", ["doge", "nanochat"])
def test_models_that_do_more_between_their_parts_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match=f"a {kind} model does more between its layers than stages do"):
        ModelSpec(config_of(kind))


@pytest.mark.parametrize("names", ["those of today", "old ones"])
def test_the_text_model_of_one_that_also_reads_pictures_is_used(names: str, tmp_path: Path) -> None:
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**SIZES, "vocab_size": TOKENIZER.size, "layer_types": BETWEEN["layer_types"]}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config={**sight, "image_size": 28, "patch_size": 14}
    )
    whole = AutoModelForImageTextToText.from_config(config).eval()  # type: ignore[no-untyped-call]
    whole.save_pretrained(tmp_path)
    TOKENIZER.save(tmp_path)
    file = tmp_path / "model.safetensors"
    if names == "old ones":
        old = {
            name.replace("model.language_model", "language_model.model"): each for name, each in load_file(file).items()
        }
        save_file(old, file, {"format": "pt"})
    found = load(tmp_path, "2,1,2")
    assert found.stages[0].spec.config.model_type == "gemma3_text"
    with torch.no_grad():
        expected = whole(input_ids=TOKENS).logits
    torch.testing.assert_close(logits_of(found.stages), expected, rtol=1e-5, atol=1e-5)
    alone = dict(load_stage(read_outline(tmp_path, "2,1,2"), 1).named_weights())
    assert all(torch.equal(alone[name], each) for name, each in found.stages[1].named_weights())
    with pytest.raises(UserError, match=r"its text model \(qwen2_vl_text\) is not among those that were tested"):
        AutoConfig.for_model("qwen2_vl").save_pretrained(tmp_path)
        config_named(str(tmp_path))


@pytest.mark.parametrize("said", ["the whole", "its text model", "nobody"])
def test_a_head_that_differs_from_the_embedding_is_used_whatever_is_said(said: str, tmp_path: Path) -> None:
    """transformers takes it as well; that Mistral 3 ties them is its class's default, and no file of it says so."""
    sight = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    text = {**SIZES, "vocab_size": TOKENIZER.size, "model_type": "mistral", "tie_word_embeddings": False}
    vision = {**sight, "image_size": 28, "patch_size": 14, "model_type": "pixtral"}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=vision, tie_word_embeddings=False)
    whole = AutoModelForImageTextToText.from_config(config).eval()  # type: ignore[no-untyped-call]
    whole.save_pretrained(tmp_path)
    TOKENIZER.save(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    if said != "the whole":
        del fields["tie_word_embeddings"]
    if said == "nobody":
        fields["text_config"].pop("tie_word_embeddings", None)
    file.write_text(json.dumps(fields))
    found = load(tmp_path, "2,1,2")
    with torch.no_grad():
        torch.testing.assert_close(logits_of(found.stages), whole(input_ids=TOKENS).logits, rtol=1e-5, atol=1e-5)
    fields["quantization_config"] = {"quant_method": "fp8"}
    file.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"its weights are quantised \(quantization_config: fp8\)"):
        load(tmp_path)


def test_a_model_whose_file_has_another_head_is_not_tied(tmp_path: Path) -> None:
    for differs in (True, False):
        whole = AutoModelForCausalLM.from_config(tiny("llama", vocab_size=TOKENIZER.size))  # type: ignore[no-untyped-call]
        if not differs:
            whole.lm_head.weight.data.copy_(whole.model.embed_tokens.weight)
        whole.save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
        assert config_named(str(tmp_path)).tie_word_embeddings is not differs


def test_fields_that_models_leave_out_or_have_as_lists(tmp_path: Path) -> None:
    for kind in sorted(TESTED):
        assert (kind in TIED) == bool(AutoConfig.for_model(kind).tie_word_embeddings), kind
    lists = {"moe_topk": [2] * 5, "num_shared_expert": [1] * 5, "moe_intermediate_size": [40] * 5, "head_dim": 8}
    mixture = {**SIZES, "model_type": "hunyuan_v1_moe", "num_experts": 4, **lists}
    (tmp_path / "config.json").write_text(json.dumps(mixture))
    for layers in (0, 7):
        spec = ModelSpec(config_named(str(tmp_path), layers=layers))
        assert (spec.layers, spec.experts_active, spec.shape.experts_active) == (layers or 5, 2, 2)
        matrices = sum(each.numel() for each in spec.layer(0).parameters() if each.ndim > 1)
        assert spec.shape.layer_parameters - 2 * spec.shape.hidden == matrices
    config = tiny("llama", vocab_size=500, eos_token_id=[2, 400])
    config.save_pretrained(tmp_path)
    assert config_named(str(tmp_path), 450).eos_token_id == [2, 400]
    assert config_named(str(tmp_path), 400).eos_token_id is None


def test_layers_of_other_kinds_are_refused_before_anything_is_planned() -> None:
    with pytest.raises(UserError, match="layers of the kind 'linear_attention' are not supported"):
        ModelSpec(AutoConfig.for_model("qwen3_next", **SIZES))


def test_routers_of_several_kinds_are_refused() -> None:
    with pytest.raises(UserError, match="a jetmoe model has routers of several kinds"):
        ModelSpec(AutoConfig.for_model("jetmoe"))


def test_scales_that_were_not_tested_are_refused() -> None:
    """Most models divide their logits by `logits_scaling`, and one multiplies them."""
    config = config_of("deepseek_v2")
    config.logits_scaling = 8.0
    with pytest.raises(UserError, match=r"a deepseek_v2 model scales its embeddings or logits \(logits_scaling\)"):
        ModelSpec(config)


def test_other_kinds_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    assert {tiny(each).model_type for each in FAMILIES} < TESTED
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            warn_untested("deepseek_v2")
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == [
        "deepseek_v2 models are not among those that were tested"
    ]
