"""The computer of a node: what does not count leaves no trace, a broken ring can be begun again, a state can be
learned from replicas or rebuilt from neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch

from skippipe.dispatch import weights_after
from skippipe.learning import Learning
from skippipe.model.blueprint import Blueprint
from skippipe.model.rebuilding import same_depth
from skippipe.model.stage import layer_ranges
from skippipe.model.tasks import StageTasks
from skippipe.runtime import tensors
from skippipe.runtime.tensors import Tensors
from skippipe.runtime.work import (
    Clear,
    Drop,
    Inspect,
    Lend,
    Load,
    Measure,
    Origin,
    Outcome,
    Part,
    Pass,
    Reduce,
    Step,
    Study,
    Task,
)
from skippipe.text.sampler import Sampler
from skippipe.transport.packed import Packed, pack, unpack
from skippipe.workload import Workload
from tests.models import tiny

torch.set_num_threads(1)

LAYERS = (2, 1, 2)
SEQUENCE, SAMPLES, MICROBATCHES = 10, 2, 4
PATH = 3  # stages on a lane
HEAD = PATH
RATE = 1e-2


def computer_of(
    stage: int,
    family: str = "llama",
    *,
    layers: tuple[int, ...] = LAYERS,
    seed: int = 7,
    config: dict[str, Any] | None = None,
    split: bool = False,
    recompute: bool = False,
    reduce: Callable[[torch.Tensor], Any] | None = None,
    **workload: Any,
) -> Tensors:
    blueprint = Blueprint(tiny(family, num_hidden_layers=sum(layers), **(config or {})), seed)
    said = {"wire_dtype": "fp32", "compute_dtype": "fp32", **workload}
    work = Workload(blueprint.shape, SEQUENCE, SAMPLES, MICROBATCHES, **said)
    tasks = StageTasks(
        blueprint,
        layer_ranges(layers)[stage],
        Learning(clip=0),
        ends=stage == 0,
        compute_dtype=work.compute_dtype,
        recompute=recompute,
        split_backward=split,
    )
    text = np.random.default_rng(1).integers(0, 97, 2000)
    sampler = Sampler(text, SEQUENCE, 3, MICROBATCHES, SAMPLES) if stage == 0 else None
    return Tensors(stage, layers, work, blueprint, tasks, sampler, reduce=reduce)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (SAMPLES, SEQUENCE, 32), generator=torch.Generator().manual_seed(seed))


class Walk:
    """One microbatch, step by step, at one node."""

    def __init__(self, computer: Tensors, microbatch: int, place: int = 1) -> None:
        self.computer = computer
        self.microbatch = microbatch
        self.place = place

    def step(self, step: int, given: torch.Tensor | None = None, *, counts: bool = True) -> Outcome:
        packed = None if given is None else pack(given, "fp32")
        task = Task(0, 0, self.microbatch, step, PATH, self.microbatch, packed, counts)
        outcome = self.computer.run(task)
        assert isinstance(outcome, Outcome)
        return outcome

    def forward(self) -> Outcome:
        return self.step(self.place, noise(self.microbatch) if self.place else None)

    def head(self, *, counts: bool = True) -> Outcome:
        return self.step(HEAD, noise(10 + self.microbatch), counts=counts)

    def backward(self, *, counts: bool = True) -> Outcome:
        return self.step(2 * PATH - self.place, noise(20 + self.microbatch) / 100, counts=counts)

    def weights(self, *, counts: bool = True) -> Outcome:
        return self.step(weights_after(2 * PATH - self.place, PATH), counts=counts)


def gradient_of(computer: Tensors) -> torch.Tensor:
    return computer.tasks.weights.gradient.clone()


def state_of(computer: Tensors) -> torch.Tensor:
    return torch.cat(computer.tasks.weights.state)


# Microbatches that come again


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("option", ["plain", "split", "recompute", "split-recompute", "bf16"])
def test_what_does_not_count_gives_the_same_and_adds_nothing(family: str, option: str) -> None:
    split = "split" in option
    computer = computer_of(
        1,
        family,
        split=split,
        recompute="recompute" in option,
        compute_dtype="bf16" if option == "bf16" else "fp32",
        config={"router_aux_loss_coef": 0.5} if family == "qwen3_moe" else None,
    )
    first, second = Walk(computer, 0), Walk(computer, 1)

    def counted(walk: Walk) -> torch.Tensor:
        walk.forward()
        back = unpack(walk.backward().payload)
        if split:
            walk.weights()
        return back

    back = counted(second)
    alone = gradient_of(computer)
    computer.run(Clear())
    counted(first)
    before = gradient_of(computer)
    second.forward()
    assert torch.equal(unpack(second.backward(counts=False).payload), back)
    assert not computer.tasks.held
    assert not computer.tasks.put_off
    if split:
        second.weights(counts=False)
    assert torch.equal(gradient_of(computer), before)
    assert torch.equal(counted(second), back)
    torch.testing.assert_close(gradient_of(computer), before + alone)
    assert alone.any()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_at_the_data_node_head_and_backward_count_each_by_itself(family: str, split: bool) -> None:
    computer = computer_of(0, family, split=split)
    walk = Walk(computer, 1, place=0)

    def there_and_back(*, head: bool, backward: bool) -> tuple[float, torch.Tensor, torch.Tensor]:
        computer.run(Clear())
        walk.forward()
        made = walk.head(counts=head)
        assert walk.backward(counts=backward).payload is None
        if split:
            walk.weights(counts=backward)
        assert not computer.tasks.held
        assert not computer.tasks.put_off
        return float(made.loss), unpack(made.payload), gradient_of(computer)

    loss, back, both = there_and_back(head=True, backward=True)
    of_head, of_backward, of_none = (
        there_and_back(head=head, backward=backward)
        for head, backward in ((True, False), (False, True), (False, False))
    )
    for each in (of_head, of_backward, of_none):
        assert each[0] == loss
        assert torch.equal(each[1], back)
    assert not of_none[2].any()
    assert of_head[2].any()
    assert of_backward[2].any()
    torch.testing.assert_close(of_head[2] + of_backward[2], both)


def test_a_microbatch_that_comes_again_takes_the_place_of_what_was_held() -> None:
    computer = computer_of(1)
    walk = Walk(computer, 0)
    walk.step(1, noise(99))
    walk.forward()
    assert len(computer.tasks.held) == 1
    back = unpack(walk.backward().payload)
    found = gradient_of(computer)
    computer.run(Clear())
    walk.forward()
    assert torch.equal(unpack(walk.backward().payload), back)
    assert torch.equal(gradient_of(computer), found)


def test_what_was_put_off_counts_once_though_the_microbatch_comes_again() -> None:
    computer = computer_of(1, split=True)
    walk = Walk(computer, 0)
    walk.forward()
    walk.backward()
    walk.weights()
    once = gradient_of(computer)
    computer.run(Clear())
    for _ in range(2):
        walk.forward()
        walk.backward()  # the second before anything of the first is known to have been added
    walk.weights()
    walk.weights(counts=False)
    assert torch.equal(gradient_of(computer), once)


def test_a_dropped_microbatch_is_forgotten_and_the_others_are_not() -> None:
    computer = computer_of(1, split=True)
    walks = [Walk(computer, number) for number in range(3)]
    for walk in walks:
        walk.forward()
    walks[0].backward()
    computer.run(Drop(0, 0))
    computer.run(Drop(0, 1))
    computer.run(Drop(0, 3))
    assert not computer.tasks.put_off
    assert set(computer.tasks.held) == {(0, 2)}
    with pytest.raises(KeyError):
        walks[1].backward()
    with pytest.raises(KeyError):
        walks[0].weights()


def test_clear_forgets_all() -> None:
    computer = computer_of(1, split=True)
    for number in range(2):
        Walk(computer, number).forward()
    Walk(computer, 0).backward()
    computer.run(Clear())
    assert not computer.tasks.held
    assert not computer.tasks.put_off
    assert not gradient_of(computer).any()


@pytest.mark.parametrize("sick", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_cleared(sick: float) -> None:
    computer = computer_of(1)
    gradient = computer.tasks.weights.gradient
    gradient.fill_(3e38)
    assert computer.run(Inspect()) is True
    assert gradient.any()
    gradient[1234] = sick
    assert computer.run(Inspect()) is False
    assert not gradient.any()


# Averaging


def ring(computers: Sequence[Tensors], rounds: int | None = None) -> None:
    """Everybody in step, up to a round."""
    size = len(computers)
    passed: list[Packed | None] = [None] * size
    for number in range(2 * size - 1 if rounds is None else rounds):
        passed = [each.run(Pass(number, at, size, passed[at - 1])) for at, each in enumerate(computers)]


def replicas(count: int, dtype: str = "fp32") -> list[Tensors]:
    """With gradients of their own."""
    made = [computer_of(1, gradient_dtype=dtype) for _ in range(count)]
    for number, each in enumerate(made):
        each.tasks.weights.gradient.copy_(noise(number, len(each.tasks.weights.gradient)))
    return made


def stepped(computer: Tensors, visits: int, *, alone: bool = True) -> tuple[float, torch.Tensor]:
    norm = computer.run(Measure(visits, alone))
    computer.run(Step(RATE, 1.0))
    assert not gradient_of(computer).any()
    return norm, state_of(computer)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("left", [(0, 1), (1, 2), (2, 0), (1,)])
def test_a_ring_begun_again_is_a_ring_that_did_not_break(dtype: str, rounds: int, left: tuple[int, ...]) -> None:
    broken, fresh = replicas(3, dtype), replicas(3, dtype)
    before = [gradient_of(each) for each in broken]
    ring(broken, rounds)
    if rounds == 5:
        for each in broken:
            each.run(Measure(9, alone=False))
    for each, own in zip(broken, before, strict=True):
        assert torch.equal(gradient_of(each), own)
    ends = []
    for members in (broken, fresh):
        rest = [members[at] for at in left]
        if len(rest) > 1:
            ring(rest)
        ends.append([stepped(each, 5, alone=len(rest) == 1) for each in rest])
    for norm, state in ends[0]:
        assert norm == ends[0][0][0]
        assert torch.equal(state, ends[0][0][1]), "replicas are no longer alike"
    norm, state = ends[1][0]
    assert ends[0][0][0] == norm  # low precision too: there was no remainder of an iteration before
    assert torch.equal(ends[0][0][1], state)


def test_after_a_broken_ring_the_remainder_of_rounding_is_dropped_and_sums_stay_close() -> None:
    members = replicas(3, "bf16")
    ring(members)
    for each in members:
        stepped(each, 3, alone=False)
    own = [noise(40 + at, len(each.tasks.weights.gradient)) for at, each in enumerate(members)]
    for each, gradient in zip(members, own, strict=True):
        each.tasks.weights.gradient.copy_(gradient)
    ring(members, 3)
    ring(members[:2])
    norms = [each.run(Measure(1, alone=False)) for each in members[:2]]
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(float((own[0] + own[1]).double().square().sum()), rel=1e-3)


@pytest.mark.parametrize("size", [1, 2])
def test_measuring_twice_is_measuring_once(size: int) -> None:
    computers, once = replicas(size), replicas(size)
    alone = size == 1
    if not alone:
        ring(computers)
        ring(once)
    own = gradient_of(computers[0])
    whole = computers[0].run(Measure(1, alone))
    assert computers[0].run(Measure(3, alone)) == pytest.approx(whole / 9)
    assert computers[0].run(Measure(1, alone)) == whole
    assert torch.equal(gradient_of(computers[0]), own)
    for each, other in zip(computers, once, strict=True):
        assert stepped(each, 4, alone=alone)[0] == pytest.approx(whole / 16)
        stepped(other, 4, alone=alone)
        assert torch.equal(state_of(each), state_of(other))


def test_two_then_alone_then_two_again() -> None:
    one, other = replicas(2)
    own = gradient_of(one).double().square().sum()
    ring([one, other])
    both = one.run(Measure(4, alone=False))
    assert one.run(Measure(2, alone=True)) == pytest.approx(float(own) / 4)
    ring([one, other])
    assert one.run(Measure(4, alone=False)) == both
    assert other.run(Measure(4, alone=False)) == both
    ring([one, other], rounds=2)
    with pytest.raises(AssertionError, match="not complete"):
        one.run(Measure(4, alone=False))


def test_gradients_summed_by_other_means_are_measured_where_they_are() -> None:
    computer = computer_of(1, reduce=lambda gradient: gradient.mul_(2))
    computer.tasks.weights.gradient.fill_(1.0)
    computer.run(Reduce())
    assert computer.run(Measure(2, alone=False)) == len(gradient_of(computer))


def test_a_step_is_along_the_mean() -> None:
    computers = replicas(3)
    mean = torch.stack([gradient_of(each).double() for each in computers]).sum(0) / 7
    before = computers[0].tasks.weights.values.clone()
    ring(computers)
    for each in computers:
        norm, _ = stepped(each, 7, alone=False)
        assert norm == pytest.approx(float(mean.square().sum()))
        torch.testing.assert_close(each.tasks.weights.mean.double(), 0.1 * mean, rtol=1e-5, atol=1e-7)
        assert each.tasks.weights.steps == 1
    assert not torch.equal(computers[0].tasks.weights.values, before)


@pytest.mark.parametrize(("visits", "scale"), [(0, 1.0), (3, 0.0)])
def test_no_step_leaves_all_but_the_gradient(visits: int, scale: float) -> None:
    computers = replicas(2, "bf16")
    for each in computers:
        stepped(each, 1)
        each.tasks.weights.gradient.fill_(float("nan") if scale == 0 else 0.0)
    before = state_of(computers[0])
    ring(computers)
    for each in computers:
        each.run(Measure(visits, alone=False))
        each.run(Step(RATE, scale))
        assert not gradient_of(each).any()
        assert each.tasks.weights.steps == 1
    assert torch.equal(state_of(computers[0]), before)
    for each in computers:
        each.tasks.weights.gradient.fill_(1.0)
    ring(computers)
    norm = computers[0].run(Measure(2, alone=False))
    assert norm == pytest.approx(len(before) / 3), "what was not finite lives on in the remainder"


# States


def learn(learner: Tensors, parts: Sequence[Part], sources: dict[int, Tensors]) -> None:
    for part in parts:
        loan = sources[part.source].run(Lend(part.first, part.count, to=0))
        assert learner.run(Load(part, *loan)) is True


def test_a_learner_that_steps_along_ends_as_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "SHOWN_VALUES", 5000)
    replica, learner = computer_of(1), computer_of(1, seed=8)
    size = len(replica.tasks.weights.gradient)
    for number in range(3):
        replica.tasks.weights.gradient.copy_(noise(number, size))
        stepped(replica, 2)
    parts = learner.run(Study(Origin("replica", (4,), (1,), (1.0,), replica.tasks.weights.steps)))
    assert sum(part.count for part in parts) == 3 * size
    assert max(part.count for part in parts) == 5000
    assert size % 5000, "a part should hold the end of the weights and the beginning of the means"
    assert {part.source for part in parts} == {4}
    for number, part in enumerate(reversed(parts)):
        replica.tasks.weights.gradient.copy_(noise(50 + number, size))
        ring([replica, learner])
        norms = [each.run(Measure(2, alone=False)) for each in (replica, learner)]
        assert norms[0] == norms[1]
        learn(learner, [part], {4: replica})
        for each in (replica, learner):
            each.run(Step(RATE, 0.5))
    assert torch.equal(state_of(replica), state_of(learner))
    assert replica.tasks.weights.steps == learner.tasks.weights.steps == 3 + len(parts)


def named(computer: Tensors) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in computer.tasks.model.named_weights()}


def rebuilt(
    stage: int, stages: tuple[int, ...], shares: tuple[float, ...], layers: tuple[int, ...], **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The weights before and after, and those of the neighbours."""
    learner = computer_of(stage, layers=layers, seed=1, **options)
    others = {10 + each: computer_of(each, layers=layers, seed=2, **options) for each in stages}
    for part in (learner.tasks.weights.mean, learner.tasks.weights.square):
        part.fill_(1.0)
    before = named(learner)
    parts = learner.run(Study(Origin("neighbours", tuple(others), stages, shares, 6)))
    learn(learner, parts, others)
    assert learner.tasks.weights.steps == 6
    assert not learner.tasks.weights.mean.any()
    assert not learner.tasks.weights.square.any()
    return before, named(learner), [named(each) for each in others.values()]


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
    monkeypatch.setattr(tensors, "SHOWN_VALUES", shown)
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
    assert [same_depth(layer, 4, 4) for layer in range(4)] == [0, 1, 2, 3]
    assert [same_depth(layer, 3, 5) for layer in range(3)] == [0, 2, 4]
    assert [same_depth(layer, 5, 2) for layer in range(5)] == [0, 0, 0, 1, 1]
    assert [same_depth(0, 1, count) for count in (1, 2, 3, 4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["replica", "checkpoint"])
def test_all_of_a_state_comes_from_one(kind: Literal["replica", "checkpoint"]) -> None:
    learner, source = computer_of(0, seed=8), computer_of(0)
    source.tasks.weights.gradient.copy_(noise(0, len(source.tasks.weights.gradient)))
    stepped(source, 1)
    learn(learner, learner.run(Study(Origin(kind, (-1,), (0,), (1.0,), 1))), {-1: source})
    assert torch.equal(state_of(learner), state_of(source))


def test_what_was_not_asked_for_is_not_taken_over() -> None:
    computer = computer_of(1)
    size = len(state_of(computer))
    before = state_of(computer)
    for wrong in (pack(torch.ones(9), "fp32"), pack(torch.ones(10), "bf16"), None):
        assert computer.run(Load(Part(0, 0, 10, 0), wrong)) is False
    for first, count in ((size, 1), (size - 1, 2), (-1, 1), (0, 0)):
        assert computer.run(Lend(first, count, to=0)).payload is None
    with pytest.raises(ValueError, match="of a state of"):
        computer.run(Load(Part(0, 0, 10, size - 5), pack(torch.ones(10), "fp32")))
    loan = computer.run(Lend(0, 10, to=0))
    bent = bytearray(loan.payload.data)
    bent[3] ^= 1
    assert computer.run(Load(Part(0, 0, 10, 20), Packed("fp32", (10,), bent), loan.digest)) is False
    assert torch.equal(state_of(computer), before)
