"""Stages of real models: together they are the model that transformers would make."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from skippipe.errors import UserError
from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ModelSpec, config_named
from skippipe.model_shape import MODELS
from skippipe.optim.config import OptimConfig
from tests.helpers.models import (
    FAMILIES,
    LABELS,
    TOKENS,
    logits_of,
    stages_of,
    tasks_of,
    tiny,
    train_once,
    whole_model,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_together_give_the_logits_of_transformers(family: str) -> None:
    config = tiny(family)
    stages = stages_of(ModelSpec(config, seed=3))
    with torch.no_grad():
        expected = whole_model(config, stages).eval()(input_ids=TOKENS).logits
    torch.testing.assert_close(logits_of(stages), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "mistral"])
@pytest.mark.parametrize("option", ["plain", "split_backward", "recompute"])
def test_gradients_are_those_of_the_whole_model(family: str, option: str) -> None:
    config = tiny(family)
    options = {} if option == "plain" else {option: True}
    tasks = tasks_of(ModelSpec(config, seed=3), **options)
    model = whole_model(config, [each.model for each in tasks])
    loss = train_once(tasks, split=option == "split_backward")
    logits = model(input_ids=TOKENS).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), LABELS.flatten())
    torch.autograd.backward(expected)
    assert math.isclose(loss, float(expected.detach()), rel_tol=1e-6)
    found = {name: each.grad for stage in tasks for name, each in stage.model.named_weights()}
    for name, each in model.named_parameters():
        torch.testing.assert_close(found[name], each.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("drive", [1.0, 2.5])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("family", "option"), [("llama", "plain"), ("llama-tied", "split_backward")])
def test_driven_stages_and_an_early_exit_have_the_gradients_of_one_graph(
    family: str, option: str, again: bool, drive: float
) -> None:
    """Also where the head comes to a node that has yet to do the forward pass, in place of one that was lost."""
    spec = ModelSpec(tiny(family), seed=3)
    options = {} if option == "plain" else {option: True}
    tasks, stages = tasks_of(spec, **options), stages_of(spec)
    loss = train_once(tasks, (0, 2), split=option == "split_backward", drive=drive, early=0.4, again=again)
    alone = stages[0](stages[0].embed(TOKENS))
    final = stages[0].loss(alone + drive * (stages[2](alone) - alone), LABELS)
    torch.autograd.backward(final + 0.4 * stages[0].loss(alone, LABELS))
    assert math.isclose(loss, float(final.detach()), rel_tol=1e-6), "the loss of the whole path is what is told"
    found = {name: each.grad for stage in (0, 2) for name, each in tasks[stage].model.named_weights()}
    for name, each in (pair for stage in (0, 2) for pair in stages[stage].named_weights()):
        torch.testing.assert_close(found[name], each.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_an_early_exit_of_a_microbatch_that_came_before_adds_nothing() -> None:
    tasks = tasks_of(ModelSpec(tiny("llama"), seed=3))[0]
    hidden = tasks.begin((0, 0), TOKENS)
    tasks.head((0, 0), hidden, LABELS, early=0.4, counts=False)
    assert not tasks.weights.gradient.any()
    assert tasks.held[0, 0].early is not None, "its backward pass may count all the same"


def test_driven_stages_and_an_early_exit_in_bf16() -> None:
    spec = ModelSpec(tiny("llama"), seed=3)
    exact, coarse = tasks_of(spec), tasks_of(spec, compute_dtype="bf16")
    for tasks in (exact, coarse):
        train_once(tasks, (0, 2), drive=2.0, early=0.5)
    for stage in (0, 2):
        ours, theirs = (tasks[stage].weights.gradient for tasks in (coarse, exact))
        assert float(functional.cosine_similarity(ours, theirs, 0)) > 0.99
        assert float(ours.norm() / theirs.norm()) == pytest.approx(1, rel=0.05)


def test_the_balancing_loss_of_one_layer_is_that_of_transformers() -> None:
    config = tiny("qwen3_moe", num_hidden_layers=3)
    config.mlp_only_layers = [0, 2]  # one mixture: their loss over all layers and ours by layer say the same
    spec = ModelSpec(config, seed=1)
    assert spec.routers(range(3)) == 1
    stages = stages_of(spec, (1, 1, 1))
    hidden = stages[0].embed(TOKENS)
    balances = []
    for stage in stages:
        hidden = stage(hidden)
        balances.append(stage.balance())
    assert balances[0] is None
    assert balances[2] is None
    assert balances[1] is not None
    expected = whole_model(config, stages)(input_ids=TOKENS, output_router_logits=True).aux_loss
    torch.testing.assert_close(balances[1], 0.01 * expected)


def test_the_balancing_loss_reaches_the_router() -> None:
    found = []
    for weight in (0.0, 0.5):
        tasks = tasks_of(ModelSpec(tiny("qwen3_moe", router_aux_loss_coef=weight), seed=2))
        train_once(tasks)
        gate = next(each for name, each in tasks[1].model.named_weights() if "gate.weight" in name)
        assert gate.grad is not None
        found.append(gate.grad.clone())
    assert not torch.allclose(found[0], found[1])


def test_a_layer_is_the_same_whatever_stage_it_is_in() -> None:
    spec = ModelSpec(tiny("llama"), seed=5)
    one = dict(pair for stage in stages_of(spec, (5,)) for pair in stage.named_weights())
    cut = dict(pair for stage in stages_of(spec, (1, 3, 1)) for pair in stage.named_weights())
    assert one.keys() == cut.keys()
    assert all(torch.equal(one[name], cut[name]) for name in one)
    other = dict(stages_of(ModelSpec(tiny("llama"), seed=6), (5,))[0].named_weights())
    assert not torch.equal(one["model.layers.2.mlp.up_proj.weight"], other["model.layers.2.mlp.up_proj.weight"])
    ups = [one[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (1, 2)]
    assert not torch.equal(ups[0], ups[1])


def test_a_node_makes_only_its_own_layers() -> None:
    stage = stages_of(ModelSpec(tiny("llama")))[1]
    assert {name.split(".")[2] for name, _ in stage.named_weights()} == {"2"}
    assert stage.embedding is None
    assert stage.head is None
    assert all(not each.is_meta for each in stage.parameters())


def test_several_microbatches_in_flight_do_not_mix() -> None:
    one, both = (tasks_of(ModelSpec(tiny("llama")))[1] for _ in range(2))
    first, second = torch.randn(2, 2, 20, 32, generator=torch.Generator().manual_seed(1))
    for key, hidden in (((0, 0), first), ((1, 0), second)):
        one.forward(key, hidden)
        one.backward(key, hidden)
    both.forward((0, 0), first)
    both.forward((1, 0), second)
    both.backward((1, 0), second)
    both.backward((0, 0), first)
    torch.testing.assert_close(one.weights.gradient, both.weights.gradient)
    assert not both.held


def test_flat_weights_follow_torch_adamw_and_clip() -> None:
    learning = OptimConfig(rate=1e-2, warmup=1, iterations=10, clip=0.5)
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1)))
    plain, flat = modules
    weights = FlatParams(flat.named_parameters(), learning)
    decayed = [each for each in plain.parameters() if each.dim() > 1]
    others = [each for each in plain.parameters() if each.dim() < 2]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for iteration in range(4):
        inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(iteration))
        for module in modules:
            (module(inputs) * 10).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        found, scale = learning.clipping([weights.squared_norm()])
        assert math.isclose(found, float(norm), rel_tol=1e-5)
        for group in adam.param_groups:
            group["lr"] = learning.rate_at(iteration)
        adam.step()
        adam.zero_grad()
        weights.step(learning.rate_at(iteration), scale)
        assert not weights.gradient.any()
    for a, b in zip(plain.parameters(), flat.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_rate_rises_then_falls_to_its_floor() -> None:
    at_once = OptimConfig(rate=1.0, warmup=4, iterations=20, hold=0.0, floor=0.1)
    held = replace(at_once, hold=0.5)
    for learning, falls_from in ((at_once, 4), (held, 12)):
        rates = [learning.rate_at(iteration) for iteration in range(30)]
        assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert rates[4 : falls_from + 1] == pytest.approx([1.0] * (falls_from - 3))
        assert all(a > b for a, b in pairwise(rates[falls_from:21]))
        assert rates[20:] == pytest.approx([0.1] * 10)
    with pytest.raises(UserError, match="warm-up"):
        OptimConfig(warmup=20, iterations=20)


def test_another_number_of_layers(tmp_path: Path) -> None:
    fewer = config_named("llama-46m", layers=8)
    assert {**fewer.to_dict(), "num_hidden_layers": 12} == config_named("llama-46m").to_dict()
    assert config_named("llama-46m", layers=12).to_dict() == config_named("llama-46m", layers=0).to_dict()
    config = tiny("qwen3", num_hidden_layers=4, eos_token_id=[1, 2, 3, 4])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    more = config_named(str(tmp_path), layers=6)
    assert (more.num_hidden_layers, more.layer_types) == (6, ["full_attention"] * 6)
    assert more.eos_token_id == [1, 2, 3, 4]
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 2, "use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps({**tiny("qwen3", num_hidden_layers=4).to_dict(), **kinds}))
    with pytest.raises(UserError, match=r"has layer_types of several kinds \(full_attention, sliding_attention\), and"):
        config_named(str(tmp_path), layers=6)


def test_presets_become_configurations() -> None:
    config = config_named("llama-30m", vocabulary=512)
    shape = ModelSpec(config).shape
    assert (shape.vocab, shape.hidden, shape.layers) == (512, 288, 12)
    assert sum(each.numel() for stage in stages_of(ModelSpec(tiny("llama"))) for each in stage.parameters()) == (
        ModelSpec(tiny("llama")).shape.parameters
    )
    assert MODELS["llama-30m"].layer_parameters == shape.layer_parameters


def test_other_models_are_refused_in_one_line() -> None:
    from transformers import GPT2Config

    with pytest.raises(UserError, match="embed_tokens"):
        ModelSpec(GPT2Config(n_layer=2, n_embd=32, n_head=2))
