"""Bridges and repeats that begin as the best maps of their rank."""

from __future__ import annotations

import pytest
import torch

from skippipe.model.model_spec import ModelSpec
from skippipe.optim.config import OptimConfig
from skippipe.skip_schedule import SkipSchedule
from skippipe.stage_subset import Visits
from skippipe.study.engine import Engine
from skippipe.study.least_squares import fit_map, low_rank
from tests.helpers.exact_training import FULL, plan_of
from tests.helpers.models import tiny


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


@pytest.mark.parametrize(("wide", "high"), [(24, 40), (40, 24)])
def test_a_map_of_low_rank_is_the_closest_one(wide: int, high: int) -> None:
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randn(4000, wide, generator=chance, dtype=torch.float64) * torch.linspace(0.2, 5, wide)
    whole = torch.randn(wide, high, generator=chance, dtype=torch.float64)
    down, up = low_rank(inputs.T @ inputs, whole, 7)
    assert (down.shape, up.shape) == ((wide, 7), (7, high))
    least = torch.linalg.svdvals(inputs @ whole)[7:].norm()
    assert least <= (inputs @ (whole - down @ up)).norm() < 1.001 * least


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
    engine.fit_stand_ins(tokens[at : at + 16] for at in range(16, 80, 16))
    assert max(distance(*pair) for pair in pairs) < 0.9, "on tokens that they were not fitted on"
    assert engine.loss_of(tokens, tokens, whole, 1.0) == before, "the whole model is as it was"


def healing_engine(layers: tuple[int, ...], rank: int, repeats: int = 1) -> Engine:
    spec = ModelSpec(tiny("llama", num_hidden_layers=sum(layers), initializer_range=0.2), seed=11)
    recipe = SkipSchedule("0 until 50%, 1/2", bridges=16, adapters=rank, repeats=repeats, heal="50%")
    engine = Engine(spec, layers, OptimConfig(), recipe)
    for stage in engine.stages:  # norms that differ, as those of models that have learned
        for name, weight in stage.named_weights():
            if "layernorm" in name:
                weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return engine


TOKENS = torch.randint(0, 97, (160, 20), generator=torch.Generator().manual_seed(1))
FIT, TEST = torch.split(TOKENS[16:], 16), TOKENS[:16]


def damage(engine: Engine, *parts: Visits) -> float:
    """How far the final hidden states of parts are from those of the whole model, at most."""
    whole = engine.hidden_of(TEST, tuple(range(len(engine.stages))), 1.0)
    return max(float((engine.hidden_of(TEST, part, 1.0) - whole).norm() / whole.norm()) for part in parts)


def test_a_fitted_repeat_of_full_rank_is_the_stage_that_it_stands_for() -> None:
    engine = healing_engine((1, 1, 1, 1), 2 * 48)
    whole = engine.hidden_of(TEST, (0, 1, 2, 3), 1.0)
    apart: tuple[Visits, ...] = (0, 2), (0, 1, 2), (0, 2, 3)
    assert damage(engine, *apart) > 0.4
    engine.fit_stand_ins(FIT)
    assert damage(engine, *apart) < 0.01
    assert damage(engine, (0, 3)) > 0.1, "two stages in a row are missing, and one repeat is for one"
    assert torch.equal(engine.hidden_of(TEST, (0, 1, 2, 3), 1.0), whole), "the whole model is as it was"
    several = healing_engine((1, 1, 1, 1), 4 * 48, repeats=3)
    several.fit_stand_ins(FIT)
    assert damage(several, (0, 3), (0, 1), (0,)) < 0.01


@pytest.mark.slow
def test_a_fitted_repeat_is_the_better_the_larger_its_rank() -> None:
    before = healing_engine((2, 2, 2), 2)
    parts: tuple[Visits, ...] = (0, 1), (0, 2)
    damages = [damage(before, *parts)]
    for rank in (16, 32, 64, 96):
        engine = healing_engine((2, 2, 2), rank)
        engine.fit_stand_ins(FIT)
        damages.append(damage(engine, *parts))
    assert damages == sorted(damages, reverse=True), damages
    assert damages[-2] < 0.5 * damages[0]
    assert damages[-1] < 0.01, "of full rank, over two layers"


def test_a_stage_stands_for_none_with_another_number_of_layers_at_first() -> None:
    engine = healing_engine((1, 1, 2, 1), 4 * 48, repeats=3)
    engine.fit_stand_ins(FIT)
    gates = [each.gates.view(3, -1)[:, 0].tolist() for each in engine.adapters]
    assert gates == [[1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert damage(engine, (0, 2, 3)) < 0.01


def test_bridges_begin_where_repeats_end() -> None:
    """What repeats stand for is not added a second time."""
    engine = healing_engine((1, 1, 1, 1), 2 * 48)
    engine.fit_stand_ins(FIT, bridges=False)
    unfitted = damage(engine, (0, 3), (0, 1))
    engine.fit_stand_ins(FIT, repeats=False)
    assert damage(engine, (0, 2), (0, 1, 2)) < 0.01
    assert damage(engine, (0, 3), (0, 1)) < 0.9 * unfitted
