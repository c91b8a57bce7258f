"""The computer of a node: what does not count leaves no trace, what is given up is forgotten."""

from __future__ import annotations

import pytest
import torch

from skippipe.codecs import decode, encode
from skippipe.dispatch import weights_after
from skippipe.runtime.node.ops import CheckFinite, ClearGradients, DropMicrobatch, OpResult, StageTask
from skippipe.runtime.stage_executor import StageExecutor
from tests.helpers.executors import computer_of, gradient_of, noise

torch.set_num_threads(1)

PATH = 3  # stages on a lane
HEAD = PATH


class Walk:
    """One microbatch, step by step, at one node."""

    def __init__(self, executor: StageExecutor, microbatch: int, place: int = 1) -> None:
        self.executor = executor
        self.microbatch = microbatch
        self.place = place

    def step(self, step: int, given: torch.Tensor | None = None, *, counts: bool = True) -> OpResult:
        packed = None if given is None else encode(given, "fp32")
        task = StageTask(0, 0, self.microbatch, step, PATH, self.microbatch, packed, counts=counts)
        outcome = self.executor.run(task)
        assert isinstance(outcome, OpResult)
        return outcome

    def forward(self) -> OpResult:
        return self.step(self.place, noise(self.microbatch) if self.place else None)

    def head(self, *, counts: bool = True) -> OpResult:
        return self.step(HEAD, noise(10 + self.microbatch), counts=counts)

    def backward(self, *, counts: bool = True) -> OpResult:
        return self.step(2 * PATH - self.place, noise(20 + self.microbatch) / 100, counts=counts)

    def weights(self, *, counts: bool = True) -> OpResult:
        return self.step(weights_after(2 * PATH - self.place, PATH), counts=counts)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("option", ["plain", "split", "recompute", "split-recompute", "bf16"])
def test_what_does_not_count_gives_the_same_and_adds_nothing(family: str, option: str) -> None:
    split = "split" in option
    executor = computer_of(
        1,
        family,
        split=split,
        recompute="recompute" in option,
        compute_dtype="bf16" if option == "bf16" else "fp32",
        config={"router_aux_loss_coef": 0.5} if family == "qwen3_moe" else None,
    )
    first, second = Walk(executor, 0), Walk(executor, 1)

    def counted(walk: Walk) -> torch.Tensor:
        walk.forward()
        back = decode(walk.backward().payload)
        if split:
            walk.weights()
        return back

    back = counted(second)
    alone = gradient_of(executor)
    executor.run(ClearGradients())
    counted(first)
    before = gradient_of(executor)
    second.forward()
    assert torch.equal(decode(second.backward(counts=False).payload), back)
    assert not executor.tasks.held
    assert not executor.tasks.deferred
    if split:
        second.weights(counts=False)
    assert torch.equal(gradient_of(executor), before)
    assert torch.equal(counted(second), back)
    torch.testing.assert_close(gradient_of(executor), before + alone)
    assert alone.any()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_at_the_data_node_head_and_backward_count_each_by_itself(family: str, split: bool) -> None:
    executor = computer_of(0, family, split=split)
    walk = Walk(executor, 1, place=0)

    def there_and_back(*, head: bool, backward: bool) -> tuple[float, torch.Tensor, torch.Tensor]:
        executor.run(ClearGradients())
        walk.forward()
        made = walk.head(counts=head)
        assert walk.backward(counts=backward).payload is None
        if split:
            walk.weights(counts=backward)
        assert not executor.tasks.held
        assert not executor.tasks.deferred
        return float(made.loss), decode(made.payload), gradient_of(executor)

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
    executor = computer_of(1)
    walk = Walk(executor, 0)
    walk.step(1, noise(99))
    walk.forward()
    assert len(executor.tasks.held) == 1
    back = decode(walk.backward().payload)
    found = gradient_of(executor)
    executor.run(ClearGradients())
    walk.forward()
    assert torch.equal(decode(walk.backward().payload), back)
    assert torch.equal(gradient_of(executor), found)


def test_what_was_deferred_counts_once_though_the_microbatch_comes_again() -> None:
    executor = computer_of(1, split=True)
    walk = Walk(executor, 0)
    walk.forward()
    walk.backward()
    walk.weights()
    once = gradient_of(executor)
    executor.run(ClearGradients())
    for _ in range(2):
        walk.forward()
        walk.backward()  # the second before anything of the first is known to have been added
    walk.weights()
    walk.weights(counts=False)
    assert torch.equal(gradient_of(executor), once)


def test_a_dropped_microbatch_is_forgotten_and_the_others_are_not() -> None:
    executor = computer_of(1, split=True)
    walks = [Walk(executor, number) for number in range(3)]
    for walk in walks:
        walk.forward()
    walks[0].backward()
    executor.run(DropMicrobatch(0, 0))
    executor.run(DropMicrobatch(0, 1))
    executor.run(DropMicrobatch(0, 3))
    assert not executor.tasks.deferred
    assert set(executor.tasks.held) == {(0, 2)}
    with pytest.raises(KeyError):
        walks[1].backward()
    with pytest.raises(KeyError):
        walks[0].weights()


def test_clear_forgets_all() -> None:
    executor = computer_of(1, split=True)
    for number in range(2):
        Walk(executor, number).forward()
    Walk(executor, 0).backward()
    executor.run(ClearGradients())
    assert not executor.tasks.held
    assert not executor.tasks.deferred
    assert not gradient_of(executor).any()


@pytest.mark.parametrize("sick", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_cleared(sick: float) -> None:
    executor = computer_of(1)
    gradient = executor.tasks.weights.gradient
    gradient.fill_(3e38)
    assert executor.run(CheckFinite()) is True
    assert gradient.any()
    gradient[1234] = sick
    assert executor.run(CheckFinite()) is False
    assert not gradient.any()
