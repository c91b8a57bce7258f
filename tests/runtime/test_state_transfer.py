"""The state of a stage, received from a replica or a checkpoint, or rebuilt from the stages beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch

from skippipe.codecs import EncodedTensor, encode
from skippipe.runtime import stage_executor
from skippipe.runtime.neighbour_init import layer_at_same_depth
from skippipe.runtime.node.ops import GradNorm, OptimizerStep, PlanTransfer, ReadState, WriteState
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.runtime.state_source import StateSlice, StateSource
from tests.helpers.executors import RATE, average, computer_of, noise, state_of, stepped

torch.set_num_threads(1)


def transfer(receiver: StageExecutor, parts: Sequence[StateSlice], sources: dict[int, StageExecutor]) -> None:
    for part in parts:
        chunk = sources[part.source].run(ReadState(part.first, part.count, to=0))
        assert receiver.run(WriteState(part, *chunk)) is True


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon", "sgd"])
def test_a_learner_that_steps_along_ends_as_the_replica(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice an iteration, in the order in which a node requests them."""
    monkeypatch.setattr(stage_executor, "CHUNK_VALUES", 5000)
    replica, receiver = computer_of(1, optimizer=optimizer), computer_of(1, seed=8, optimizer=optimizer)
    size = len(replica.tasks.weights.gradient)
    for number in range(3):
        replica.tasks.weights.gradient.copy_(noise(number, size))
        stepped(replica, 2)
    parts = receiver.run(PlanTransfer(StateSource("replica", (4,), (1,), (1.0,), replica.tasks.weights.steps)))
    assert sum(part.count for part in parts) == replica.tasks.weights.state_values >= 2 * size
    assert max(part.count for part in parts) == 4864 < size  # whole blocks
    assert {part.source for part in parts} == {4}
    for number, part in enumerate(parts):
        replica.tasks.weights.gradient.copy_(noise(50 + number, size))
        average([replica, receiver])
        norms = [each.run(GradNorm(2, alone=False)) for each in (replica, receiver)]
        assert norms[0] == norms[1]
        transfer(receiver, [part], {4: replica})
        for each in (replica, receiver):
            each.run(OptimizerStep(RATE, 0.5))
    assert torch.equal(state_of(replica), state_of(receiver))
    assert replica.tasks.weights.steps == receiver.tasks.weights.steps == 3 + len(parts)


def named(executor: StageExecutor) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in executor.tasks.model.named_weights()}


def rebuilt(
    stage: int, stages: tuple[int, ...], shares: tuple[float, ...], layers: tuple[int, ...], **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The weights before and after, and those of the neighbours."""
    receiver = computer_of(stage, layers=layers, seed=1, **options)
    others = {10 + each: computer_of(each, layers=layers, seed=2, **options) for each in stages}
    means = receiver.tasks.weights.optimizer.state
    for part in means.values():
        part.fill_(1.0)
    before = named(receiver)
    parts = receiver.run(PlanTransfer(StateSource("neighbours", tuple(others), stages, shares, 6)))
    transfer(receiver, parts, others)
    assert receiver.tasks.weights.steps == 6
    assert len(means) == 2 and not any(part.any() for part in means.values())
    return before, named(receiver), [named(each) for each in others.values()]


# Layers 0, 1 | 2 | 3, 4, 5 | 6, 7. Of the first neighbour and of the second, for each layer.
DEPTHS: dict[int, tuple[tuple[int, ...], dict[int, tuple[int, ...]]]] = {
    2: ((1, 3), {3: (2, 6), 4: (2, 6), 5: (2, 7)}),  # the middle one of two is the first
    1: ((0, 2), {2: (0, 4)}),
    3: ((2,), {6: (3,), 7: (5,)}),
    0: ((1,), {0: (2,), 1: (2,)}),
}


@pytest.mark.parametrize("stage", DEPTHS)
@pytest.mark.parametrize("shown", [2**22, 777])
def test_a_stage_is_the_mean_of_its_neighbours(stage: int, shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_executor, "CHUNK_VALUES", shown)
    stages, depths = DEPTHS[stage]
    shares = (0.3, 0.7)[: len(stages)] if len(stages) > 1 else (1.0,)
    before, found, neighbours = rebuilt(stage, stages, shares, (2, 1, 3, 2))
    for name, each in found.items():
        words = name.split(".")
        if words[1] != "layers":
            assert torch.equal(each, before[name])
            continue
        expected = torch.zeros_like(each)
        for layer, neighbour, share in zip(depths[int(words[2])], neighbours, shares, strict=True):
            expected += neighbour[".".join([*words[:2], str(layer), *words[3:]])] * share
        assert torch.equal(each, expected), name


def test_layers_of_another_kind_stay_and_the_rest_is_the_mean_of_those_that_have_it() -> None:
    """Stages of one layer: dense, mixture, mixture, dense."""
    options: dict[str, Any] = {"family": "qwen3_moe", "config": {"mlp_only_layers": [0, 3]}, "layers": (1, 1, 1, 1)}
    before, found, (first, second) = rebuilt(2, (1, 3), (0.25, 0.75), **options)
    prefix = "model.layers.2"
    norm, router = f"{prefix}.input_layernorm.weight", f"{prefix}.mlp.gate.weight"
    query = f"{prefix}.self_attn.q_proj.weight"
    assert torch.equal(found[norm], before[norm])  # ones, all of them
    assert torch.equal(found[router], first["model.layers.1.mlp.gate.weight"]), "only the first neighbour has routers"
    both = [first["model.layers.1.self_attn.q_proj.weight"], second["model.layers.3.self_attn.q_proj.weight"]]
    assert torch.equal(found[query], both[0] * 0.25 + both[1] * 0.75)
    before, found, _ = rebuilt(3, (2,), (1.0,), **options)
    up = "model.layers.3.mlp.up_proj.weight"
    assert torch.equal(found[up], before[up])


def test_the_same_depth() -> None:
    assert [layer_at_same_depth(layer, 4, 4) for layer in range(4)] == [0, 1, 2, 3]
    assert [layer_at_same_depth(layer, 3, 5) for layer in range(3)] == [0, 2, 4]
    assert [layer_at_same_depth(layer, 5, 2) for layer in range(5)] == [0, 0, 0, 1, 1]
    assert [layer_at_same_depth(0, 1, count) for count in (1, 2, 3, 4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["replica", "checkpoint"])
def test_all_of_a_state_comes_from_one(kind: Literal["replica", "checkpoint"]) -> None:
    receiver, source = computer_of(0, seed=8), computer_of(0)
    source.tasks.weights.gradient.copy_(noise(0, len(source.tasks.weights.gradient)))
    stepped(source, 1)
    transfer(receiver, receiver.run(PlanTransfer(StateSource(kind, (-1,), (0,), (1.0,), 1))), {-1: source})
    assert torch.equal(state_of(receiver), state_of(source))


def test_what_was_not_asked_for_is_not_taken_over() -> None:
    executor = computer_of(1)
    size = len(state_of(executor))
    before = state_of(executor)
    for wrong in (encode(torch.ones(9), "fp32"), encode(torch.ones(10), "bf16"), None):
        assert executor.run(WriteState(StateSlice(0, 0, 10, 0), wrong)) is False
    for first, count in ((size, 1), (size - 1, 2), (-1, 1), (0, 0)):
        assert executor.run(ReadState(first, count, to=0)).payload is None
    with pytest.raises(ValueError, match="of a state of"):
        executor.run(WriteState(StateSlice(0, 0, 10, size - 5), encode(torch.ones(10), "fp32")))
    chunk = executor.run(ReadState(0, 10, to=0))
    bent = bytearray(chunk.payload.data)
    bent[3] ^= 1
    assert executor.run(WriteState(StateSlice(0, 0, 10, 20), EncodedTensor("fp32", (10,), bent), chunk.digest)) is False
    assert torch.equal(state_of(executor), before)
