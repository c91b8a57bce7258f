"""The executor of a node that serves, on real tensors: as transformers has it, and undisturbed by bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from skippipe.codecs import CODECS, EncodedTensor, decode, encode
from skippipe.errors import UserError
from skippipe.inference.cached_stage import BatchRows, CachedStage, logits
from skippipe.inference.checkpoint_loader import fingerprint, load, load_stage, read_outline
from skippipe.inference.request import SamplingParams
from skippipe.model.model_spec import ModelSpec
from skippipe.model.spread_layers import SpreadLayers, inference_devices, weight_bytes
from skippipe.model.stage import StageModel
from skippipe.model.stand_ins import Bridges, StageAdapters, StandIns
from skippipe.runtime.node.interfaces import JoinConfig
from skippipe.serving.executor import ServingExecutor, alike
from skippipe.serving.node import ServingConfig, build_executor
from skippipe.serving.step_protocol import (
    ForwardStep,
    FreeSlots,
    InputRow,
    RowSampling,
    SampleTokens,
    StepInput,
    StepRefused,
)
from skippipe.stage_subset import StageHop
from tests.helpers.model_folders import LAYERS, TOKENIZER, checkpoint_in, export_to, made
from tests.helpers.models import tiny, whole_model
from tests.helpers.quick import MOST_FAMILIES_SLOW

torch.set_num_threads(1)
LANE = 1


def executors(stages: list[StageModel], wire: str = "fp32") -> list[ServingExecutor]:
    each = enumerate(stages)
    return [ServingExecutor(number, stage.eval(), cache_tokens=512, wire_dtype=wire) for number, stage in each]


def step_of(rows: list[InputRow], freed: tuple[int, ...] = (), sampling: tuple[RowSampling, ...] = ()) -> StepInput:
    return StepInput(0, LANE, (0, 1, 2), tuple(rows), freed, (), sampling)


def forward_all(
    nodes: list[ServingExecutor], rows: list[InputRow], tokens: list[list[int]], freed: tuple[int, ...]
) -> Any:
    """What the last stage makes of these tokens."""
    given: Any = tuple(map(tuple, tokens))
    for node in nodes:
        given = node.run(ForwardStep(step_of(rows, freed), 0, given))
        assert isinstance(given, EncodedTensor)
    return given


@torch.no_grad()
@pytest.mark.parametrize("family", MOST_FAMILIES_SLOW)
def test_logits_of_batched_prompts_and_single_tokens_are_those_of_transformers(family: str) -> None:
    """Streams enter and leave; in a step, some are new, some go on by a token, some by a piece of their prompt."""
    spec, stages = made(family)
    nodes, random = executors(stages), Random(family)
    texts = torch.randint(TOKENIZER.size, (8, 24), generator=torch.Generator().manual_seed(2))
    expected = whole_model(spec.config, stages).eval()(texts).logits
    computed: dict[int, tuple[int, int]] = {}  # slot → which text, and how much of it
    single = longer = 0
    for step in range(40):
        freed = tuple(slot for slot, (_, done) in computed.items() if done == 24 or random.random() < 0.05)
        for slot in freed:
            del computed[slot]
        if len(computed) < 4:
            computed[min(set(range(5)) - set(computed))] = step % 8, 0
        rows, tokens = [], []
        for slot, (text, done) in computed.items():
            count = 1 if done > 5 else random.randint(1, 6)
            rows.append(InputRow(slot, done, count))
            tokens.append(texts[text, done : done + count].tolist())
            computed[slot] = text, done + count
            single, longer = single + (done > 0 and count == 1), longer + (count > 1)
        back = decode(forward_all(nodes, rows, tokens, freed))
        found = torch.split(logits(stages[0], back), [row.count for row in rows])
        for row, each in zip(rows, found, strict=True):
            want = expected[computed[row.slot][0], row.start : row.start + row.count]
            assert (each - want).abs().max() < 1e-4
        ends = [computed[row.slot] for row in rows]
        greedy = tuple(RowSampling(SamplingParams(temperature=0)) for _ in rows)
        chosen = nodes[0].run(SampleTokens(step_of(rows, sampling=greedy), encode(back, "fp32")))
        assert chosen.tokens == [int(expected[text, done - 1].argmax()) for text, done in ends]
    assert min(single, longer) > 10


def test_no_row_is_padded_to_more_than_twice_its_length() -> None:
    rows = [InputRow(slot, 0, count) for slot, count in enumerate((1, 3000, 2, 1, 70, 100, 2))]
    groups = alike(rows)
    assert sorted(number for group in groups for number in group) == list(range(len(rows)))
    for group in groups:
        counts = [rows[number].count for number in group]
        assert max(counts) <= 2 * min(counts)


def test_what_cannot_be_done_is_said_and_the_node_goes_on() -> None:
    _, stages = made()
    first, second, _ = nodes = executors(stages)
    row = InputRow(0, 0, 2)
    sick = encode(torch.tensor([[0.0] * 31 + [float("nan")]] * 2), "fp32")
    for work in (
        ForwardStep(step_of([row]), 0, sick),
        SampleTokens(step_of([row], sampling=(RowSampling(SamplingParams()),)), sick),
    ):
        node = first if isinstance(work, SampleTokens) else second
        assert node.run(work) == StepRefused("hidden states that are not finite", bad_input=True)
    late = first.run(ForwardStep(step_of([InputRow(3, 7, 1)]), 0, ((1,),)))
    assert isinstance(late, StepRefused) and not late.bad_input
    much = first.run(ForwardStep(step_of([InputRow(0, 0, 600)]), 0, ((1,) * 600,)))
    assert isinstance(much, StepRefused) and not much.bad_input
    good = forward_all(nodes, [row], [[1, 2]], freed=(0, 5, 400))  # slots that were never taken
    for node in nodes:
        node.run(FreeSlots(LANE))
    assert forward_all(nodes, [row], [[1, 2]], freed=()).data == good.data


def test_a_head_that_is_damaged_is_its_own_fault() -> None:
    _, stages = made()
    head = stages[0].head
    assert head is not None
    with torch.no_grad():
        next(head.parameters()).fill_(float("inf"))
    node = executors(stages)[0]
    step = step_of([InputRow(0, 0, 1)], sampling=(RowSampling(SamplingParams()),))
    result = node.run(SampleTokens(step, encode(torch.ones(1, 32), "fp32")))
    assert isinstance(result, StepRefused) and not result.bad_input


def test_a_model_that_cannot_be_served_is_refused_before_anybody_asks() -> None:
    _, stages = made(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UserError, match="rope_type"):
        executors(stages)


# Weights


@pytest.mark.parametrize("family", MOST_FAMILIES_SLOW)
def test_a_stage_by_itself_is_that_of_the_whole(family: str, tmp_path: Path) -> None:
    export_to(tmp_path / "model", family)
    whole = load(tmp_path / "model")
    for number, stage in enumerate(whole.stages):
        alone = dict(load_stage(read_outline(tmp_path / "model"), number).named_weights())
        assert alone.keys() == dict(stage.named_weights()).keys()
        for name, each in stage.named_weights():
            assert torch.equal(each, alone[name])


def test_a_stage_reads_no_weights_but_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export_to(folder)
    outline = read_outline(folder)
    assert outline.layers == LAYERS
    kept, *others = sorted(folder.glob("*.safetensors"), reverse=True)
    for file in others:
        file.unlink()
    load_stage(outline, len(LAYERS) - 1)
    with pytest.raises(UserError, match="model"):
        load_stage(outline, 0)
    assert kept.exists()


def test_a_stage_of_a_checkpoint_whatever_its_cut(tmp_path: Path) -> None:
    stages = checkpoint_in(tmp_path / "run")
    stored = {name: each for stage in stages for name, each in stage.named_weights()}
    for cut, number in (("2,1,2", 1), ("2,1,2", 2), ("3,2", 0), ("1,1,1,1,1", 3)):
        for name, each in load_stage(read_outline(tmp_path / "run", cut), number).named_weights():
            assert torch.equal(each, stored[name])
    damaged = tmp_path / "run" / "checkpoints" / "000007" / "stage-1.weights.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    load_stage(read_outline(tmp_path / "run"), 2)
    with pytest.raises(UserError, match="not what was written"):
        load_stage(read_outline(tmp_path / "run"), 1)


def test_a_node_refuses_another_model(tmp_path: Path) -> None:
    export_to(tmp_path / "model")
    export_to(tmp_path / "other")
    weights = sorted((tmp_path / "other").glob("*.safetensors"))[1]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    node_config = ServingConfig(
        str(tmp_path / "model"), LAYERS, {"a": 0, "b": 1, "c": 2}, TOKENIZER.size, fingerprint(tmp_path / "model")
    )
    assert ServingConfig.from_json(node_config.to_json()) == node_config
    here = JoinConfig("b", "127.0.0.1:1")
    build_executor(node_config, 1, here)
    with pytest.raises(UserError, match="another model"):
        build_executor(node_config, 1, replace(here, checkpoint=tmp_path / "other"))
    with pytest.raises(UserError, match="--checkpoint"):
        build_executor(node_config, 1, replace(here, checkpoint=tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"layers": None}, "node_config.layers: expected a list, found None"),
        ({"layers": [2, "1"]}, "node_config.layers[1]: expected a whole number, found '1'"),
        ({"stage_of": ["a"]}, "node_config.stage_of: expected an object, found ['a']"),
        ({"stage_of": {"a": 0, "b": 3}}, "node_config.stage_of: expected names of nodes with their stages"),
        ({"wire_dtype": "fp12"}, f"node_config.wire_dtype: 'fp12' is none of {', '.join(CODECS)}"),
        ({"threads": 0}, "node_config.threads: 0 is out of range; give 1 to 1,024"),
        ({"thread": 1}, "node_config.thread: no such field; did you mean 'threads'?"),
        ({"fingerprint": ...}, "node_config.fingerprint: missing; add it"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_name(wrong: dict[str, Any], complaint: str) -> None:
    sent = ServingConfig("model", (2, 1), {"a": 0, "b": 1}, 300, "f").to_json() | wrong
    with pytest.raises(UserError) as caught:
        ServingConfig.from_json({name: value for name, value in sent.items() if value is not ...})
    assert str(caught.value) == complaint


# Several devices


def test_layers_on_several_devices_give_the_same_answers(tmp_path: Path) -> None:
    export_to(tmp_path / "model")
    outline = read_outline(tmp_path / "model")
    config = ServingConfig(
        str(outline.place), LAYERS, {"a": 0, "b": 1, "c": 2}, TOKENIZER.size, fingerprint(outline.place)
    )
    answers = []
    for devices in ("cpu", "cpu:2"):
        nodes = [build_executor(config, stage, JoinConfig("a", "127.0.0.1:1", devices=devices)) for stage in range(3)]
        prompts = forward_all(nodes, [InputRow(0, 0, 3), InputRow(3, 0, 2)], [[1, 2, 3], [4, 5]], ())
        singles = forward_all(nodes, [InputRow(3, 2, 1), InputRow(0, 3, 1)], [[6], [7]], ())
        answers.append((bytes(prompts.data), bytes(singles.data)))
        whole = load(tmp_path / "model", device=devices)
        assert whole.device == "cpu" and {each.devices for each in whole.stages} == {
            () if devices == "cpu" else ("cpu",) * 2
        }
    assert answers[0] == answers[1]


def _moved(module: nn.Module, device: str) -> nn.Module:
    """`nn.Module.to`, for tensors that are fake."""
    for each in module.modules():
        for held in (each._parameters, each._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = tensor.detach().to(device)  # type: ignore[assignment]
    return module


@torch.no_grad()
def test_all_that_a_layer_is_given_is_brought_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake tensors, which have devices that are not there, and refuse to be mixed."""
    monkeypatch.setattr(nn.Module, "to", _moved)
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage = StageModel(ModelSpec(tiny("mistral")), range(5), ends=True).eval()
        SpreadLayers(["cpu", "meta"], weight_bytes(stage)).place(stage)
        where = [next(layer.parameters()).device.type for layer in stage.layers]
        assert where == ["cpu", "cpu", "meta", "meta", "meta"]
        assert stage(torch.zeros(2, 7, 32)).device.type == "cpu"
        cached = CachedStage(stage, 512)
        for start, count in ((0, 7), (7, 1), (8, 3)):
            rows = BatchRows((0, 1), (start, start), (count, count))
            output = cached.forward(torch.zeros(2, count, 32), rows)
            assert output.shape == (2, count, 32) and output.device.type == "cpu"
        assert [pair[0].device.type for pair in cached.cache.stores if pair is not None] == where
        assert logits(stage, output).device.type == "cpu"


@torch.no_grad()
def test_adapters_are_where_their_layers_are_and_count_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "to", _moved)
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage = StageModel(ModelSpec(tiny("llama")), range(5), ends=False).eval()
        adapters, bridges = StageAdapters(stage, 64, 0, repeats=1), Bridges(0, 3, 32, 2, 0)
        stage.stand_ins = StandIns(3, bridges, adapters, 0)
        assert weight_bytes(adapters) > 2 * weight_bytes(stage.layers)
        SpreadLayers(["cpu", "meta"], weight_bytes(stage)).place(stage)
        where = [next(layer.parameters()).device.type for layer in stage.layers]
        assert where == ["cpu", "cpu", "meta", "meta", "meta"]
        assert [adapter.down.device.type for adapter in adapters.parts] == [each for each in where for _ in range(7)]
        cached = CachedStage(stage, 512)
        for start, count in ((0, 7), (7, 1)):
            rows = BatchRows((0, 1), (start, start), (count, count))
            output = cached.forward(torch.zeros(2, count, 32), rows, hop=StageHop(0, 2, 1))
            assert output.shape == (2, count, 32) and output.device.type == "cpu"
        for cache in cached._caches:
            assert [pair[0].device.type for pair in cache.stores if pair is not None] == where


def test_as_many_gpus_are_used_as_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (100, 120))
    assert [len(inference_devices("cuda", size)) for size in (80, 81, 160, 250, 1000)] == [1, 2, 2, 4, 4]
    assert [inference_devices("cuda", 160, node) for node in (1, 3, 4)] == [
        ["cuda:1", "cuda:2"],
        ["cuda:3", "cuda:0"],
        ["cuda:0", "cuda:1"],
    ]
    assert inference_devices("cuda:1-2", 80, 1) == ["cuda:1", "cuda:2"]
    assert inference_devices("cpu:2", 80) == ["cpu", "cpu"]
