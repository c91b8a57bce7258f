"""Bridges that begin as the best linear map."""

from __future__ import annotations

import torch

from skippipe.optim.config import OptimConfig
from skippipe.skip_schedule import SkipSchedule
from skippipe.stage_subset import Visits
from skippipe.study.engine import Engine
from skippipe.study.least_squares import fit_map
from tests.helpers.exact_training import FULL, plan_of


def test_a_map_of_gain_and_low_rank_is_found_again() -> None:
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randn(4000, 24, generator=chance, dtype=torch.float64)
    inputs[:, 0] *= 8  # channels are of different size
    gain, down, up = (torch.randn(shape, generator=chance, dtype=torch.float64) for shape in ((24,), (24, 2), (2, 24)))
    outputs = inputs * gain + inputs @ down @ up

    def error(rank: int) -> float:
        gain, down, up = fit_map(inputs.T @ inputs, inputs.T @ outputs, rank)
        assert down.shape == (24, min(rank, 24))
        return float((inputs * gain + inputs @ down @ up - outputs).norm() / outputs.norm())

    assert error(2) < 0.03
    assert error(1) > 0.1, "a lower rank cannot have it"
    assert error(50) < 0.01


def test_fitted_bridges_lead_to_what_the_whole_model_has() -> None:
    plan, spec = plan_of(FULL, (1, 1, 1, 1), config={"num_hidden_layers": 4, "initializer_range": 0.2})
    engine = Engine(
        spec, plan.layers, OptimConfig(), SkipSchedule("0 until 50%, 1/2", bridges=16, adapters=3, heal="50%")
    )
    tokens = torch.randint(0, 97, (80, 20), generator=torch.Generator().manual_seed(1))
    states = engine._whole_states(tokens[:16])
    whole: Visits = (0, 1, 2, 3)
    before = engine.loss_of(tokens, tokens, whole, 1.0)

    @torch.no_grad()
    def distance(start: int, end: int) -> float:
        """From what the bridge hands on to what stage `end`, or the head, has in the whole model; in shares of what
        lies between without it."""
        target = torch.full((16,), end)
        made = engine.bridges[start](states[start], target)
        return float((made - states[end - 1]).norm() / (states[start] - states[end - 1]).norm())

    pairs = [(start, end) for start in range(3) for end in range(start + 2, 5)]
    assert {distance(*pair) for pair in pairs} == {1.0}
    engine.fit_bridges(tokens[at : at + 16] for at in range(16, 80, 16))
    assert max(distance(*pair) for pair in pairs) < 0.9, "on tokens that they were not fitted on"
    assert engine.loss_of(tokens, tokens, whole, 1.0) == before, "the whole model is as it was"
