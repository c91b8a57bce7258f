"""AdamW with state in 8 bits: what docs/formats.md says, computed number by number without torch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from skippipe.optim import adamw8bit, host_state
from skippipe.optim.adamw8bit import AdamW8bit
from skippipe.optim.config import OptimConfig
from skippipe.optim.interface import ParamSlot
from tests.helpers.executors import noise
from tests.helpers.quick import others_slow

torch.set_num_threads(1)
LEARNING = OptimConfig("adamw8bit", beta1=0.8, beta2=0.97, weight_decay=0.3, epsilon=1e-6)
SLOTS = [ParamSlot("matrix", (9, 70), 0), ParamSlot("vector", (41,), 630)]
SIZE, DECAYED = 671, 630  # two whole blocks, and one that is not


def gradient_of(step: int) -> torch.Tensor:
    """Numbers of very different size, and some that are always zero."""
    random = np.random.default_rng(step)
    sizes = 10.0 ** np.linspace(-13, 1, SIZE)
    return torch.tensor(random.normal(size=SIZE) * random.permutation(sizes) * (np.arange(SIZE) % 7 > 0)).float()


def in_8_bits(block: list[float], levels: int, power: int, least: int, step: int) -> list[float]:
    """What is left of a block. The first 31 numbers have a bit less."""
    scale = max(map(abs, block))
    if scale < 2.0**-66:
        return [0.0] * len(block)
    found = []
    for place, value in enumerate(block):
        most, lowest = (levels // 2, least // 2) if place < 31 else (levels, least)
        held = (np.arange(most + 2) / most) ** power
        share = abs(value) / scale
        code = int(np.searchsorted(held, share * (1 + 1e-12), side="right")) - 1
        upper = (place * 2**0.5 + step * 0.6180339887498949) % 1
        code += (share - held[code]) > upper * (held[code + 1] - held[code])
        found.append(float(np.sign(value) or 1) * scale * held[min(most, max(lowest, code))])
    return found


def test_steps_are_those_of_an_independent_computation() -> None:
    weights = gradient_of(1000).double().numpy()
    ours = AdamW8bit(torch.tensor(weights).float(), SLOTS, LEARNING)
    mean, square = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(12):
        gradient = gradient_of(step)
        now = gradient.double().numpy()
        mean = 0.8 * mean + 0.2 * now
        square = 0.97 * square + 0.03 * now**2
        weights[:DECAYED] *= 1 - 0.01 * 0.3
        root = np.sqrt(square / (1 - 0.97 ** (step + 1)))
        weights -= 0.01 * mean / (1 - 0.8 ** (step + 1)) / (root + 1e-6)
        ours.step(gradient, 0.01)
        for first in range(0, SIZE, 256):
            here = slice(first, first + 256)
            mean[here] = in_8_bits(mean[here].tolist(), 127, 2, 0, step)
            square[here] = in_8_bits(square[here].tolist(), 255, 4, 2, step)
        ours.steps += 1
        for name, expected in (("exp_avg", mean), ("exp_avg_sq", square)):
            found = ours.read_state(name, 0, SIZE).double().numpy()
            near = np.isclose(found, expected, rtol=1e-5, atol=1e-30)
            assert near.mean() > 0.99, (step, name)  # a number between two codes may be rounded otherwise in fp32
            (mean if name == "exp_avg" else square)[:] = found
        np.testing.assert_allclose(ours.values.double().numpy(), weights, rtol=1e-4, atol=1e-6)
        weights = ours.values.double().numpy()


def test_what_is_read_and_written_again_is_held_in_the_same_bits() -> None:
    """From subnormal numbers to large ones: a node that rejoins has the state of its replica."""
    ours, theirs = (AdamW8bit(torch.zeros(SIZE), SLOTS, LEARNING) for _ in range(2))
    for scale in (1e-44, 1e-21, 1e-11, 3e-11, 1e-6, 1.0, 1e12):
        ours.clear_state()
        for step in range(5):
            ours.step(gradient_of(step) * scale, 0.01)
            ours.steps += 1
        for name, held in ours.state.items():
            theirs.write_state(name, 512, ours.read_state(name, 512, SIZE - 512))
            theirs.write_state(name, 0, ours.read_state(name, 0, 512))
            assert torch.equal(held, theirs.state[name])
            assert torch.equal(ours.read_state(name, 5, 600), theirs.read_state(name, 5, 600))
        assert scale < 1e-8 or ours.read_state("exp_avg_sq", 0, SIZE).count_nonzero() == SIZE


@pytest.mark.parametrize("beta2", others_slow([0.999], [0.95]))
def test_a_running_mean_follows_changes_that_are_smaller_than_the_distance_of_two_codes(beta2: float) -> None:
    """Rounded to the nearest code, the mean of squares would stay where it was when gradients were large."""
    size = 1024
    learning = OptimConfig("adamw8bit", beta2=beta2, weight_decay=0)
    ours = AdamW8bit(torch.zeros(size), [ParamSlot("vector", (size,), 0)], learning)
    square = torch.zeros(size, dtype=torch.float64)
    random = torch.Generator().manual_seed(1)
    for step in range(600):
        gradient = torch.randn(size, generator=random) * (3 if step < 300 else 1)
        square = beta2 * square + (1 - beta2) * gradient.double() ** 2
        ours.step(gradient, 1e-3)
        ours.steps += 1
    ratio = (ours.read_state("exp_avg_sq", 0, size).double() / square).sqrt()
    assert abs(float(ratio.mean()) - 1) < 0.01
    assert float(ratio.std()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("offload", [True, False])
def test_a_compiled_step_is_traced_once_and_is_the_same(monkeypatch: pytest.MonkeyPatch, offload: bool) -> None:
    """What a GPU gets, up to its kernels, which take a compiler: whole pieces, of any step, are one graph. The last
    piece, shorter, is stepped along as it is."""
    piece = 512
    monkeypatch.setattr(adamw8bit, "HOST_PIECE", piece)
    monkeypatch.setattr(host_state, "HOST_PIECE", piece)
    torch.compiler.reset()
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    size, made = 2 * piece + 300, []
    for compiled in (False, True):
        values = noise(1, size)
        optimizer = AdamW8bit(values, [ParamSlot("a", (size, 1), 0)], LEARNING, offload=offload)
        if compiled:
            optimizer.compile()
        for step in range(6):
            optimizer.step_along(noise(10 + step, size), 0.01 / (1 + step), 0.5)
            optimizer.steps += 1
        made.append((values, *(optimizer.read_state(name, 0, size) for name in optimizer.state)))
        assert graphs.frame_count == int(compiled)
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
