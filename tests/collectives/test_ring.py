"""Gradients averaged and followed: a broken ring can be begun again, and replicas stay alike."""

from __future__ import annotations

import pytest
import torch

from skippipe.collectives.torch_allreduce import InPlaceAverager
from skippipe.runtime.node.ops import GradNorm, OptimizerStep, RingStep
from skippipe.runtime.stage_executor import StageExecutor
from tests.helpers.executors import RATE, computer_of, gradient_of, noise, ring, state_of, stepped

torch.set_num_threads(1)


def replicas(count: int, dtype: str = "fp32") -> list[StageExecutor]:
    """With gradients of their own."""
    made = [computer_of(1, gradient_dtype=dtype) for _ in range(count)]
    for number, each in enumerate(made):
        each.tasks.weights.gradient.copy_(noise(number, len(each.tasks.weights.gradient)))
    return made


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rounds", range(6))
@pytest.mark.parametrize("left", [(0, 1), (1, 2), (2, 0), (1,)])
def test_a_ring_begun_again_is_a_ring_that_did_not_break(dtype: str, rounds: int, left: tuple[int, ...]) -> None:
    broken, fresh = replicas(3, dtype), replicas(3, dtype)
    before = [gradient_of(each) for each in broken]
    ring(broken, rounds)
    if rounds == 5:
        for each in broken:
            each.run(GradNorm(9, alone=False))
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
    norms = [each.run(GradNorm(1, alone=False)) for each in members[:2]]
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
    whole = computers[0].run(GradNorm(1, alone))
    assert computers[0].run(GradNorm(3, alone)) == pytest.approx(whole / 9)
    assert computers[0].run(GradNorm(1, alone)) == whole
    assert torch.equal(gradient_of(computers[0]), own)
    for each, other in zip(computers, once, strict=True):
        assert stepped(each, 4, alone=alone)[0] == pytest.approx(whole / 16)
        stepped(other, 4, alone=alone)
        assert torch.equal(state_of(each), state_of(other))


def test_two_then_alone_then_two_again() -> None:
    one, other = replicas(2)
    own = gradient_of(one).double().square().sum()
    ring([one, other])
    both = one.run(GradNorm(4, alone=False))
    assert one.run(GradNorm(2, alone=True)) == pytest.approx(float(own) / 4)
    ring([one, other])
    assert one.run(GradNorm(4, alone=False)) == both
    assert other.run(GradNorm(4, alone=False)) == both
    ring([one, other], rounds=2)
    with pytest.raises(AssertionError, match="not complete"):
        one.run(GradNorm(4, alone=False))


def doubled(gradient: torch.Tensor) -> None:
    gradient.mul_(2)


def test_gradients_summed_by_other_means_are_measured_where_they_are() -> None:
    executor = computer_of(1, make_averager=lambda gradient, codec: InPlaceAverager(gradient, doubled))
    executor.tasks.weights.gradient.fill_(1.0)
    executor.run(RingStep(0, 0, 2))
    assert executor.run(GradNorm(2, alone=False)) == len(gradient_of(executor))


def test_a_step_is_along_the_mean() -> None:
    computers = replicas(3)
    mean = torch.stack([gradient_of(each).double() for each in computers]).sum(0) / 7
    before = computers[0].tasks.weights.values.clone()
    ring(computers)
    for each in computers:
        norm, _ = stepped(each, 7, alone=False)
        assert norm == pytest.approx(float(mean.square().sum()))
        torch.testing.assert_close(
            each.tasks.weights.optimizer.state["exp_avg"].double(), 0.1 * mean, rtol=1e-5, atol=1e-7
        )
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
        each.run(GradNorm(visits, alone=False))
        each.run(OptimizerStep(RATE, scale))
        assert not gradient_of(each).any()
        assert each.tasks.weights.steps == 1
    assert torch.equal(state_of(computers[0]), before)
    for each in computers:
        each.tasks.weights.gradient.fill_(1.0)
    ring(computers)
    norm = computers[0].run(GradNorm(2, alone=False))
    assert norm == pytest.approx(len(before) / 3), "what was not finite lives on in the remainder"
