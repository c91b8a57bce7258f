"""The engine of studies: equal to one process, and with stand-ins for what is skipped to plain gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from itertools import chain, pairwise
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skippipe.model.flat_params import FlatParams
from skippipe.model.stand_ins import AdaptedLinear
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane
from skippipe.skip_schedule import SkipSchedule, donors, young_stages
from skippipe.stage_subset import Visits
from skippipe.study.engine import Engine
from skippipe.training.reference import ReferenceTrainer
from tests.helpers.exact_training import FULL, SKIPPED, SWAPPED, plan_of, sampler_of

COARSE = OptimConfig(
    rate=3e-3, warmup=2, iterations=5, clip=1.0, epsilon=1e-3
)  # so that Adam sees how large gradients are
SANDWICH = (Lane((0, 2, 5, 6), 2), Lane((1, 3, 7), 1), Lane((0, 5, 7), 1), Lane((1, 4, 5), 2))


@pytest.mark.parametrize(
    ("lanes", "family", "recipe"),
    [
        (FULL, "llama", SkipSchedule("0")),
        (SKIPPED, "llama", SkipSchedule("1/4", residual="scaled", early_exit=0.4)),
        (SKIPPED, "llama-tied", SkipSchedule("1/4", gradients="all")),
        (SWAPPED, "mistral", SkipSchedule("0")),
        (SANDWICH, "llama", SkipSchedule("0 & 1/4", bridges=3, early_exit=0.4)),
        (SANDWICH, "llama", SkipSchedule("0 & 1/4", distill=0.8, distill_hidden=2.0, early_exit=0.4)),
    ],
    ids=["full", "scaled with an early exit", "gradients over all", "swapped", "a sandwich with bridges", "taught"],
)
def test_the_engine_is_one_process(lanes: tuple[Lane, ...], family: str, recipe: SkipSchedule) -> None:
    plan, spec = plan_of(lanes, family=family, bridges=recipe.bridges, teacher=recipe.teacher)
    sampler = sampler_of(plan)
    visits = [plan.visits(lane) for lane in plan.lanes for _ in range(lane.microbatches)]
    alone = ReferenceTrainer(
        plan,
        spec,
        COARSE,
        sampler,
        recipe=replace(recipe, skip="", bridges=0),
    )
    engine = Engine(spec, plan.layers, COARSE, recipe)
    for number in range(4):
        batches = [sampler.batch(number, microbatch) for microbatch in range(plan.microbatches)]
        inputs, labels = (torch.cat([torch.from_numpy(batch[side]) for batch in batches]) for side in (0, 1))
        loss = engine.iteration(number, inputs, labels, visits)
        assert float(loss) == pytest.approx(alone.iteration(number).loss, rel=1e-5)
    expected = alone.weights()
    weights = [stage.named_weights() for stage in engine.stages] + [each.named_weights() for each in engine.bridges]
    for name, each in chain(*weights):
        torch.testing.assert_close(each.detach(), expected.pop(name), rtol=1e-4, atol=1e-5)
    assert not expected


def test_the_routers_scores_of_repeats_are_dropped() -> None:
    """Kept, they would be in the balancing loss of the next iteration, with a graph that is no more."""
    recipe = SkipSchedule("1/2", adapters=4, repeats=1, heal="1%")
    plan, spec = plan_of(FULL, family="qwen3_moe")
    engine = Engine(spec, plan.layers, COARSE, recipe)
    tokens = torch.arange(24).view(2, 12)
    losses = [float(engine.iteration(number, tokens, tokens + 1, [(0, 2), (0, 1)], healing=True)) for number in (0, 1)]
    assert losses[1] < losses[0]


class Slow:
    """What the engine does, microbatch by microbatch and in as few words: to hold it to."""

    def __init__(self, engine: Engine) -> None:
        self.stages = deepcopy(engine.stages)
        self.bridges = deepcopy(engine.bridges)
        self.adapters = [nn.ModuleList() for _ in engine.adapters]
        self._recipe = engine.recipe
        self._missing = self._left_out = self._turn = 0
        self.gates = [nn.ParameterList() for _ in engine.adapters]
        for stage, kept, gates in zip(self.stages, self.adapters, self.gates, strict=False):
            for each in stage.layers.modules():
                if isinstance(each, AdaptedLinear):
                    each.adapter.stage.scale = None
                    kept.append(each.adapter)
                    each.register_forward_hook(self._adapted)
                    if self._recipe.repeats and not gates:
                        gates.append(each.adapter.stage.gates)

    def _adapted(self, module: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
        assert isinstance(module, AdaptedLinear)
        scale = self._missing / (len(self.stages) / 2)
        down, up = module.adapter.down.T, module.adapter.up.T
        if self._recipe.adapters_by_hop:  # of rank 3: one each for hops that leave out 0, 1 and 2 or more stages
            scale = 1.0 if self._left_out else scale
            at = min(2, self._left_out)
            shared = self._recipe.adapters_shared  # before these
            made = made + self._missing / (len(self.stages) / 2) * (given[0] @ down[:, :shared] @ up[:shared])
            down, up = down[:, shared + at : shared + at + 1], up[shared + at : shared + at + 1]
        if self._recipe.repeats:  # of the rank, an equal part for each turn
            each = self._recipe.adapters // (self._recipe.repeats + 1)
            turn = slice(self._turn * each, (self._turn + 1) * each)
            down, up, scale = down[:, turn], up[turn], 1.0 if self._turn else scale
        return made + scale * (given[0] @ down @ up)

    def loss(self, inputs: Tensor, labels: Tensor, visits: Visits) -> Tensor:
        states = self.states(inputs, visits)
        loss = self.stages[0].loss(states[-1], labels)
        share = self._recipe.distill if len(visits) < len(self.stages) else 0.0
        if not share:
            return loss
        with torch.no_grad():
            teacher = self.states(inputs, tuple(range(len(self.stages))))
            probabilities = self._logits(teacher[-1]).softmax(-1)
        taught = -(probabilities * self._logits(states[-1]).log_softmax(-1)).sum(-1).mean()
        apart = torch.zeros(())
        for state, target in zip(states, (*visits[1:], len(self.stages)), strict=True):
            apart = apart + (self._normed(state) - self._normed(teacher[target - 1])).square().mean()
        return (1 - share) * loss + share * taught + self._recipe.distill_hidden * apart

    @staticmethod
    def _normed(hidden: Tensor) -> Tensor:
        return hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self.stages[0].norm is not None
        assert self.stages[0].head is not None
        logits: Tensor = self.stages[0].head(self.stages[0].norm(hidden))
        return logits

    def states(self, inputs: Tensor, visits: Visits) -> list[Tensor]:
        """The hidden states that each visited stage hands on."""
        found = []
        total = len(self.stages)
        self._missing = total - len(visits)
        hidden = self.stages[0].embed(inputs)
        for stage, target in pairwise((*visits, total)):
            self._left_out = target - stage - 1
            made = self.stages[stage](hidden)
            drive = self._recipe.residual_scale(total, len(visits)) if stage else 1.0
            hidden = hidden + drive * (made - hidden)
            for turn in range(min(self._left_out, self._recipe.repeats)):
                self._turn = turn + 1
                gate = self.gates[stage][0].view(-1, hidden.shape[-1])[turn]
                hidden = hidden + gate * (self.stages[stage](hidden) - hidden)
                self._turn = 0
            if self.bridges and target > stage + 1:
                bridges, at = self.bridges[stage], target - stage - 2
                width = hidden.shape[-1]
                normed = self._normed(hidden)
                low = normed @ bridges.down[at].view(width, -1)
                gain = bridges.gain.view(-1, width)[at]
                hidden = hidden + gain * normed + low @ bridges.up[at].view(-1, width)
            found.append(hidden)
        return found

    def gradients(self, tokens: Tensor, visits: list[Visits], healing: bool) -> tuple[float, dict[str, Tensor]]:
        """The mean loss, and of everything that learns the mean gradient over the visitors of its stage, clipped."""
        losses = [self.loss(each, each, path) for each, path in zip(torch.split(tokens, 1), visits, strict=True)]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        found: dict[str, Tensor] = {}
        kinds: dict[str, Sequence[nn.Module]]
        kinds = {"stage": self.stages, "bridges": self.bridges, "adapters": self.adapters, "gates": self.gates}
        for kind, parts in kinds.items():
            for stage, part in enumerate(parts):
                visitors = sum(stage in path for path in visits)
                for name, each in part.named_parameters():
                    if each.grad is not None and not (healing and kind == "stage"):
                        found[f"{kind} {stage} {name}"] = each.grad / visitors
        norm = torch.stack([each.square().sum() for each in found.values()]).sum().sqrt()
        return float(torch.stack(losses).mean().detach()), {
            name: each / norm.clamp(min=1) for name, each in found.items()
        }


MIXED = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2), (0, 1), (0, 3), (0, 1, 3)]
HALVES = [(0, 2), (0, 1), (0, 3), (0, 2), (0, 1), (0, 3)]


@pytest.mark.parametrize(
    ("visits", "recipe", "healing"),
    [
        (MIXED, SkipSchedule("0 & 1/2"), False),
        (MIXED, SkipSchedule("0 & 1/2", residual="scaled"), False),
        (HALVES, SkipSchedule("1/2", bridges=3), False),
        (MIXED, SkipSchedule("0 & 1/2", residual="scaled", bridges=3), False),
        (HALVES, SkipSchedule("0 until 50%, 1/2", bridges=3, heal="50%"), True),
        (MIXED, SkipSchedule("0 & 1/2", adapters=3), False),
        (MIXED, SkipSchedule("0 & 1/2", residual="scaled", bridges=3, adapters=3, distill=0.7), False),
        (MIXED, SkipSchedule("0 & 1/2", distill=1.0), False),
        (HALVES, SkipSchedule("0 until 50%, 1/2", adapters=3, distill=0.4, heal="50%"), True),
        (MIXED, SkipSchedule("0 & 1/2", bridges=3, adapters=3, distill=0.7, distill_hidden=2.0), False),
        (MIXED, SkipSchedule("0 & 1/2", adapters=3, adapters_by_hop=True, distill=0.7), False),
        (MIXED, SkipSchedule("0 & 1/2", adapters=5, adapters_by_hop=True, adapters_shared=2), False),
        (MIXED, SkipSchedule("0 & 1/2", bridges=3, adapters=6, repeats=1, distill=0.7, distill_hidden=2.0), False),
        (HALVES, SkipSchedule("0 until 50%, 1/2", adapters=6, repeats=2, distill=0.4, heal="50%"), True),
    ],
    ids=[
        "sandwich",
        "scaled sandwich",
        "bridges",
        "scaled sandwich with bridges",
        "healing",
        "adapters",
        "all of it",
        "distillation",
        "healing by adapters",
        "hidden states distilled",
        "adapters by hop",
        "adapters by hop and shared",
        "repeats",
        "healing with repeats",
    ],
)
def test_stand_ins_for_what_is_skipped_follow_plain_gradients(
    visits: list[Visits], recipe: SkipSchedule, healing: bool
) -> None:
    plan, spec = plan_of(FULL, (1, 1, 1, 1), config={"num_hidden_layers": 4})
    engine = Engine(spec, plan.layers, COARSE, recipe)
    chance = torch.Generator().manual_seed(3)
    # or those that are zero would hide what is wrong with the others
    for weights in [*engine.bridge_weights, *engine.adapter_weights]:
        weights.values.add_(0.1 * torch.randn(weights.values.shape, generator=chance))
    slow = Slow(engine)
    tokens = torch.randint(0, 97, (len(visits), 6), generator=chance)
    expected_loss, expected = slow.gradients(tokens, visits, healing)
    found: dict[str, Tensor] = {}

    def looked_at(kind: str, stage: int, part: nn.Module, weights: FlatParams) -> None:
        step = weights.step

        def noted(rate: float, scale: float) -> None:
            for name, each in part.named_parameters():
                assert each.grad is not None
                known = f"gates {stage} 0" if name == "gates" else f"{kind} {stage} {name.removeprefix('parts.')}"
                found[known] = each.grad.clone()
            step(rate, scale)

        weights.step = noted  # type: ignore[method-assign, assignment]

    for stage, (part, weights) in enumerate(zip(engine.stages, engine.weights, strict=True)):
        looked_at("stage", stage, part, weights)
    for stage, (bridges, weights) in enumerate(zip(engine.bridges, engine.bridge_weights, strict=True)):
        looked_at("bridges", stage, bridges, weights)
    for stage, (adapters, weights) in enumerate(zip(engine.adapters, engine.adapter_weights, strict=True)):
        looked_at("adapters", stage, adapters, weights)
    before = [weights.values.clone() for weights in engine.weights]
    loss = engine.iteration(0, tokens, tokens, visits, healing=healing)
    if not recipe.distill:  # the engine tells the loss of the text
        assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    if recipe.repeats:
        assert not found.pop("gates 3 0").any(), "after the last stage there is none to take the place of"
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-3, atol=1e-6, msg=name)
    if healing:
        assert all(torch.equal(weights.values, old) for weights, old in zip(engine.weights, before, strict=True))
        assert not any(weights.gradient.any() for weights in engine.weights), "or the next step would follow them"
    with torch.no_grad():
        slow = Slow(engine)
        lossless = slow.stages[0].loss(slow.states(tokens[:1], visits[-1])[-1], tokens[:1])
    drive = recipe.residual_scale(4, len(visits[-1]))
    assert float(engine.loss_of(tokens[:1], tokens[:1], visits[-1], drive)) == pytest.approx(float(lossless), rel=1e-5)


def test_bridges_change_nothing_at_first_and_then_learn() -> None:
    plan, spec = plan_of(FULL, (1, 1, 1, 1), config={"num_hidden_layers": 4})
    tokens = torch.randint(0, 97, (4, 6), generator=torch.Generator().manual_seed(0))
    halves = [(0, 2), (0, 1), (0, 3), (0, 2)]
    without, engine = (Engine(spec, plan.layers, COARSE, SkipSchedule("1/2", bridges=rank)) for rank in (0, 4))
    assert engine.parameters == without.parameters + 6 * (2 * 4 + 1) * spec.shape.hidden, (
        "a bridge for every hop past others"
    )
    assert torch.equal(engine.iteration(0, tokens, tokens, halves), without.iteration(0, tokens, tokens, halves)), (
        "zero at the start"
    )
    parts: list[Visits] = [(0, 1, 2, 3), (0, 2)]
    whole, half = (engine.loss_of(tokens, tokens, part, 1.0) for part in parts)
    for number in range(1, 5):
        engine.iteration(number, tokens, tokens, halves, healing=True)
    assert engine.loss_of(tokens, tokens, parts[0], 1.0) == whole, "no other weight has learned"
    assert engine.loss_of(tokens, tokens, parts[1], 1.0) < half - 0.01
    trained = [weights.values.clone() for weights in engine.bridge_weights]
    engine.iteration(4, tokens, tokens, [(0, 1, 2, 3)] * 4)
    assert all(torch.equal(old, new.values) for old, new in zip(trained, engine.bridge_weights, strict=True))
    engine.begin_again(spec, COARSE, SkipSchedule("1/2", bridges=4))
    assert not any(bridges.up.any() for bridges in engine.bridges)
    engine.begin_again(spec, COARSE, SkipSchedule("1/2"))
    assert engine.parameters == without.parameters


def test_new_stages_are_copies() -> None:
    plan, spec = plan_of(FULL, (1, 1, 1, 1), config={"num_hidden_layers": 4})
    engine = Engine(spec, plan.layers, COARSE, SkipSchedule("1/4", grow="50%", residual="scaled"))
    tokens = torch.randint(0, 97, (4, 6))
    young = young_stages(4, 3)
    engine.iteration(0, tokens, tokens, [young] * 4, young=True)
    untouched = engine.weights[2].values.clone()
    engine.iteration(1, tokens, tokens, [young] * 4, young=True)
    torch.testing.assert_close(engine.weights[2].values, untouched)
    engine.grow(donors(4, 3))
    new, old = engine.weights[2], engine.weights[1]
    torch.testing.assert_close(new.read_state(0, new.state_values), old.read_state(0, old.state_values))
    assert engine.weights[2].steps == 2


@pytest.mark.parametrize(
    "change",
    [
        {"heal": "50%"},
        {"distill": 0.2},
        {"distill_hidden": 0.0},
        {"adapters_by_hop": True},
        {"gradients": "all"},
        {"early_exit": 0.5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_passes_is_what_recordings_depend_on(change: dict[str, Any]) -> None:
    """On a GPU, runs of one engine would otherwise have the passes of a run before them."""
    plan, spec = plan_of(FULL, (1, 1, 1, 1), config={"num_hidden_layers": 4})
    tokens = torch.randint(0, 97, (4, 6), generator=torch.Generator().manual_seed(0))
    paths: list[Visits] = [(0, 1, 2, 3), (0, 2), (0, 1, 2, 3), (0, 3)]
    recipe = SkipSchedule("0 & 1/2", bridges=2, adapters=3, distill=0.9, distill_hidden=1.0)
    engine = Engine(spec, plan.layers, COARSE, recipe)
    found = []
    for each in (recipe, replace(recipe, **change)):
        engine.begin_again(spec, COARSE, each)
        for weights in engine.adapter_weights:
            weights.values.add_(0.01)  # or they would add nothing at first
        engine.iteration(0, tokens, tokens, paths)
        found.append((engine._recorded_with, torch.cat([weights.values for weights in engine._learned])))
    (before, values), (after, others) = found
    assert not torch.equal(values, others) and before != after


def test_what_a_machine_with_torch_and_transformers_alone_imports() -> None:
    """Many machines with GPUs let nothing be installed; `benchmarks.gpu_bundle` carries what training needs."""

    def child() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "skippipe"]:
            del sys.modules[name]
        modules: dict[str, Any] = sys.modules
        modules.update(dict.fromkeys(("msgspec", "numba", "ortools", "typer", "zmq")))  # None: cannot be imported
        for name in ("study.__main__", "inference.engine", "training.reference", "model.model_spec", "optim.muon"):
            import_module(f"skippipe.{name}")

    process = get_context("fork").Process(target=child)  # torch is there already: seconds less than a Python of its own
    process.start()
    process.join(60)
    assert process.exitcode == 0
