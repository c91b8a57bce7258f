"""From a model and a batch to operations, bytes and slots."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from skippipe.codecs import CODECS
from skippipe.cost_model import cost_model_of, ns, seconds
from skippipe.errors import UserError
from skippipe.model_shape import MODELS, ModelShape, model_named
from skippipe.plan import LONGEST_NS
from skippipe.planner.published import published20
from skippipe.workload import Workload


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("llama-30m", 25e6, 40e6), ("llama-500m", 0.4e9, 0.6e9), ("llama-1.5b", 1.4e9, 1.6e9), ("llama-8b", 7.9e9, 8.1e9)],
)
def test_presets_have_the_size_in_their_name(name: str, low: float, high: float) -> None:
    assert low < MODELS[name].parameters < high


def test_huggingface_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rope_theta": 500000.0,
        "head_dim": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert replace(model_named(str(tmp_path)), name="llama-8b") == MODELS["llama-8b"]
    assert model_named(str(tmp_path / "config.json")) == model_named(str(tmp_path))


def test_mixture_of_experts_counts_all_weights_but_only_active_work(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    mixtral = model_named(str(tmp_path))
    assert mixtral.parameters == pytest.approx(46.7e9, rel=0.01)  # as its makers say: 46.7B, of which 12.9B active
    dense = replace(mixtral, experts=1, experts_active=1)
    assert 1.7 < mixtral.layer_flops(1024) / dense.layer_flops(1024) < 2


def test_blocks_without_a_gate_and_shared_experts_count_as_they_are() -> None:
    """As transformers has them: `tests/model/test_architectures.py` compares all kinds."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 99,
    }
    attention, norms = 4 * 64 * 64, 2 * 64

    def shape(kind: str, **others: int) -> ModelShape:
        return ModelShape.from_config({"model_type": kind, **sizes, **others}, kind)

    assert shape("llama").layer_parameters == attention + 3 * 64 * 256 + norms
    assert shape("starcoder2").layer_parameters == attention + 2 * 64 * 256 + norms
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    mixture = attention + 3 * 64 * 32 * 8 + 64 * 8 + norms
    assert shape("qwen3_moe", **experts).layer_parameters == mixture
    for said in ({"shared_expert_intermediate_size": 96}, {"n_shared_experts": 3}):
        found = shape("qwen2_moe", **experts, **said)
        assert found.layer_parameters == mixture + 3 * 64 * 96
        assert found.linear_maps == 7
        assert found.layer_flops(16) == 2 * 16 * (attention + 3 * 64 * (2 * 32 + 96)) + 2 * 16 * 16 * 64
        assert ModelShape.from_json(found.to_json(), "model") == found
    assert "gated" not in shape("llama").to_json()


def test_a_model_that_reads_more_than_text_says_itself_what_it_ties(tmp_path: Path) -> None:
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 99,
    }
    for whole, of_text, tied in ((True, False, True), (False, True, False), (None, True, True), (None, None, False)):
        said = {"tie_word_embeddings": whole, "text_config": text | {"tie_word_embeddings": of_text}}
        (tmp_path / "config.json").write_text(json.dumps(said))
        assert model_named(str(tmp_path)).tied_embeddings == tied


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({}, ": there is no hidden_size; is this a decoder-only model's config"),
        (
            {"hidden_size": 8, "num_experts": 2, "num_hidden_layers": 1},
            ": there is no moe_intermediate_size and no intermediate_size;",
        ),
        ({"hidden_size": 0}, ".hidden_size: "),
        ({"hidden_size": "wide"}, ".hidden_size: "),
    ],
)
def test_configs_that_are_not_of_a_decoder(broken: dict[str, object], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, **broken}))
    with pytest.raises(UserError, match=r"config\.json" + re.escape(reason)):
        model_named(str(tmp_path))


def test_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="llama-30m"):
        model_named("gpt-6")


def test_published_costs() -> None:
    """0.055 s a layer and sample, backward 1.5 times that, head a quarter of a stage, 3 slots."""
    example = published20()
    costs = cost_model_of(example.cluster, example.workload, (4,) * 6)
    assert set(costs.forward_ns.ravel()) == {440_000_000}
    assert set(costs.backward_ns.ravel()) == {660_000_000}
    assert set(costs.head_ns) == {110_000_000}
    assert set(costs.slots.ravel()) == {3}
    assert (costs.hop_bytes == 33_554_648).all()
    belgium, canada = 0, 1
    assert seconds(costs.hop_ns[belgium, canada]) == pytest.approx(1.9615622573571703, abs=2e-9)
    nl, london = example.cluster.number["nl-0"], example.cluster.number["london-0"]
    assert seconds(costs.hop_ns[nl, london]) == pytest.approx(132.3144123449581, abs=2e-9)


def test_weight_gradients_are_a_share_of_the_backward_and_nothing_takes_no_time() -> None:
    example = published20()
    for share, weight_ns, input_ns in ((0.5, 330_000_000, 330_000_000), (0.2, 132_000_000, 528_000_000)):
        costs = cost_model_of(example.cluster, replace(example.workload, weight_share=share), (4,) * 6)
        assert set(costs.weight_ns.ravel()) == {weight_ns}
        assert set(costs.input_ns.ravel()) == {input_ns}
    fast = tuple(replace(node, flops_per_s=1e30) for node in example.cluster.nodes)
    costs = cost_model_of(replace(example.cluster, nodes=fast), example.workload, (4,) * 6)
    assert set(costs.backward_ns.ravel()) == set(costs.weight_ns.ravel()) == set(costs.input_ns.ravel()) == {1}


@pytest.mark.parametrize("share", [0, 1, -0.5, float("nan")])
def test_weight_share_is_a_share(share: float) -> None:
    with pytest.raises(UserError, match=r"workload\.weight_share: .* is out of range; give above 0 to below 1"):
        replace(published20().workload, weight_share=share)


def test_slots_follow_memory() -> None:
    work = Workload(MODELS["llama-1.5b"], samples_per_microbatch=1)
    fixed, held = work.fixed_bytes(0, 4), work.held_bytes(4)
    assert work.slots(fixed + 3 * held, 0, 4) == 3
    assert work.slots(fixed + 3 * held - 1, 0, 4) == 2
    assert work.slots(fixed - 1, 0, 4) == 0
    assert replace(work, max_slots=2).slots(fixed + 3 * held, 0, 4) == 2
    assert work.fixed_bytes(0, 4) > work.fixed_bytes(1, 4)  # embedding and head
    assert replace(work, activation_checkpointing=True).held_bytes(4) < held / 5


def test_layer_split_is_even_and_complete() -> None:
    work = Workload(MODELS["llama-1.5b"])
    assert work.layer_split(6) == (4,) * 6
    assert work.layer_split(5) == (4, 5, 5, 5, 5)
    with pytest.raises(UserError, match="at most 24 stages"):
        work.layer_split(25)


def test_expected_bytes() -> None:
    assert {name: codec.expected_bytes(1000) for name, codec in CODECS.items()} == {
        "fp32": 4000,
        "bf16": 2000,
        "int8": 1000 + 8 * 4,
        "fp8": 1000 + 8,
        "fp8-e5m2": 1000 + 8,
        "int4": 8 * (64 + 2),
        "int4-stochastic": 8 * (64 + 2),
        "int2": 8 * (32 + 2),
        "int6": 8 * (96 + 2),
        "int6-stochastic": 8 * (96 + 2),
        "int4-tile32": 32 * (16 + 2),
        "int4-tile32-stochastic": 32 * (16 + 2),
        "int4-rank8": 8 * (64 + 2),
        "int4-rank8-stochastic": 8 * (64 + 2),
    }
    model = replace(MODELS["llama-1.5b"], hidden=256)
    work = Workload(model, samples_per_microbatch=3, sequence_tokens=512, wire_dtype="int4-rank8", header_bytes=0)
    assert work.activation_bytes == 3 * (512 * 256 // 128 * 66 + 8 * (512 + 256 + 4)), "factors of every sample"


def test_workload_file_and_back() -> None:
    work = Workload(ModelShape("m", 3, 4, 2, 1, 2, 8, 16, True, 4, 2), head_ratio=0.5, max_slots=7, wire_dtype="int8")
    assert Workload.from_json(json.loads(json.dumps(work.to_json()))) == work
    with pytest.raises(UserError, match=r"workload\.microbatches"):
        replace(work, microbatches=0)
    with pytest.raises(UserError, match="wire_dtype"):
        replace(work, wire_dtype="fp7")


@pytest.mark.parametrize("count", [0, 1, 999_999_999, 10**15 + 1, LONGEST_NS - 1])
def test_seconds_give_the_nanoseconds_back(count: int) -> None:
    assert ns(seconds(count)) == count
