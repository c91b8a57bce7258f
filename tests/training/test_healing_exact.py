"""Healing: bridges and adapters of a frozen model are trained over many nodes as in one process, and as in studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model.stage_step import StageStep
from skippipe.model.stand_ins import StagePlace, is_stand_in
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.simulation.fault_injection import During, kill
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.skip_schedule import SkipSchedule
from skippipe.stage_subset import StageHop
from skippipe.study.engine import Engine
from skippipe.training.reference import ReferenceTrainer
from tests.helpers.exact_training import assert_exact, plan_of, sampler_of, tensors_of
from tests.helpers.executors import state_of
from tests.helpers.models import tiny
from tests.helpers.quick import others_slow

torch.set_num_threads(1)
COARSE = OptimConfig(rate=3e-3, warmup=2, iterations=4, clip=1.0, epsilon=1e-3)  # Adam sees how large gradients are
WHOLE, LONG_HOPS = Lane((0, 2, 5, 6), 1), (Lane((1, 7), 2), Lane((0, 4), 1))  # two stages left out by one hop
LANES = (WHOLE, *LONG_HOPS, Lane((1, 3, 7), 1), Lane((0, 5), 1))
PLAIN = SkipSchedule(residual="scaled", early_exit=0.3)
TAUGHT = SkipSchedule(distill=0.8, distill_hidden=2.0, early_exit=0.3)
CHECKPOINTING: dict[str, Any] = {"split": True, "activation_checkpointing": True}
UNBALANCED = {"config": {"router_aux_loss_coef": 0.0}}  # studies balance all microbatches together


def healed(config: Any, bridges: int = 3, repeats: int = 1) -> ModelSpec:
    return ModelSpec(config, 11, None, bridges, adapters=6, repeats=repeats)


@torch.no_grad()
def disturb(weights: dict[str, Tensor]) -> None:
    """Adapters and bridges that add nothing would hide what is wrong."""
    random = torch.Generator().manual_seed(2)
    for _, each in sorted(weights.items()):
        each.add_(0.05 * torch.randn(each.shape, generator=random))


@pytest.mark.parametrize(
    ("family", "ranks", "recipe", "options"),
    others_slow(
        [
            ("llama", {}, SkipSchedule(), {}),
            ("llama-tied", {"repeats": 2}, SkipSchedule(residual="scaled", early_exit=0.4), CHECKPOINTING),
            ("llama", {}, TAUGHT, {}),
        ],
        [
            ("qwen3", {"repeats": 0}, SkipSchedule(gradients="all"), {}),
            ("mistral", {"bridges": 0}, SkipSchedule(), CHECKPOINTING),
            ("llama", {}, SkipSchedule(distill=0.9, gradients="all"), CHECKPOINTING),
            ("qwen3_moe", {"repeats": 2}, SkipSchedule(), UNBALANCED),
            ("qwen3_moe", {}, SkipSchedule(early_exit=0.4), {**UNBALANCED, **CHECKPOINTING}),
        ],
    ),
)
def test_one_process_is_the_engine_of_studies(
    family: str, ranks: dict[str, int], recipe: SkipSchedule, options: dict[str, Any]
) -> None:
    plan, spec = plan_of(LANES, family=family, teacher=recipe.teacher, **options)
    spec = healed(spec.config, **ranks)
    sampler = sampler_of(plan)
    alone = ReferenceTrainer(plan, spec, COARSE, sampler, recipe=recipe)
    weights = alone.weights()
    assert all(map(is_stand_in, weights))
    disturb(weights)
    recipe = replace(recipe, heal="1%", bridges=spec.bridges, adapters=spec.adapters, repeats=spec.repeats)
    frozen = [
        StageModel(spec.without_adapters(), layers, ends=stage == 0)
        for stage, layers in enumerate(layer_ranges(plan.layers))
    ]
    engine = Engine(spec, plan.layers, COARSE, recipe, frozen=frozen)
    named = [each.named_weights() for each in engine.bridges] + [each.named_weights() for each in engine.adapters]
    trained: dict[str, Tensor] = dict(chain(*named))
    assert trained.keys() == weights.keys()
    with torch.no_grad():
        for name, each in trained.items():
            each.copy_(weights[name])
    before = {name: each.clone() for name, each in weights.items()}
    visits = [plan.visits(lane) for lane in plan.lanes for _ in range(lane.microbatches)]
    for number in range(3):
        batches = [sampler.batch(number, microbatch) for microbatch in range(plan.microbatches)]
        inputs, labels = (torch.cat([torch.from_numpy(batch[side]) for batch in batches]) for side in (0, 1))
        loss = engine.iteration(number, inputs, labels, visits, healing=True)
        assert float(loss) == pytest.approx(alone.iteration(number).loss, rel=1e-5)
    for name, each in alone.weights().items():
        torch.testing.assert_close(each, trained[name].detach(), rtol=1e-4, atol=1e-5, msg=name)
        unused = name == "adapters.3.gates"  # no stage is missing after the last one
        assert torch.equal(each, before[name]) == unused, name


@pytest.mark.parametrize(
    ("family", "ranks", "recipe", "options"),
    others_slow(
        [("llama", {}, PLAIN, {})],
        [
            ("llama-tied", {"bridges": 0, "repeats": 2}, TAUGHT, CHECKPOINTING),
            ("llama", {}, SkipSchedule(distill=0.9), {"wire_dtype": "int8"}),
            ("qwen3_moe", {}, PLAIN, {"split": True}),
            ("qwen3_moe", {}, TAUGHT, {"activation_checkpointing": True}),
        ],
    ),
)
def test_many_nodes_are_one_process(
    family: str, ranks: dict[str, int], recipe: SkipSchedule, options: dict[str, Any]
) -> None:
    plan, spec = plan_of(LANES, family=family, adapter_parameters=99, teacher=recipe.teacher, **options)
    assert_exact(plan, healed(spec.config, **ranks), COARSE, recipe)


@pytest.mark.parametrize("during", others_slow(["backward"], ["forward", "averaging", "step"]))
def test_a_node_that_is_lost_comes_back_with_the_frozen_weights_and_what_is_trained(during: During) -> None:
    plan, made = plan_of(LANES, bridges=3, adapter_parameters=99)
    spec, other = healed(made.config), healed(made.config)
    other.seed = 12  # whoever comes back has other weights at first
    cluster = VirtualCluster(
        plan,
        CoordinatorSettings(COARSE, 8, recovery=RecoverySettings(planning=timedelta(0))),
        tensors_of(plan, spec, COARSE),
        builder=lambda node, plan: tensors_of(plan, other, COARSE)[node],
        faults=[kill(node=2).at(iteration=1, during=during).back_after(0.1)],
    )
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    assert {event.node for _, event in cluster.events if event.kind == "recovered"} == {"n2"}
    alone = ReferenceTrainer(plan, spec, COARSE, sampler_of(plan))
    expected = [alone.iteration(number).loss for number in range(2)]
    assert [report.loss for report in cluster.reports[:2]] == pytest.approx(expected, rel=1e-4), "no path has changed"
    replicas: dict[int, list[StageExecutor]] = {}  # by stage; the node that came back may have taken another one
    for each in cluster.executor_of.values():
        assert isinstance(each, StageExecutor)
        replicas.setdefault(each._stage, []).append(each)
    back = cluster.executor_of[2]
    assert isinstance(back, StageExecutor) and len(replicas[back._stage]) > 1
    for stage, (one, *others) in replicas.items():
        own = dict(alone.stages[stage].model.frozen_weights())
        assert all(torch.equal(each, own[name]) for name, each in one.tasks.model.frozen_weights())
        assert all(torch.equal(state_of(one), state_of(same)) for same in others)
        assert not torch.equal(one.tasks.weights.values, alone.stages[stage].weights.values), "it went on"


# A stage by itself

HOPS: Sequence[StageHop | None] = (StageHop(1, 4, 2), None, StageHop(1, 2, 1), StageHop(1, 3, 2))


def stage_1(family: str = "llama", **options: Any) -> StageStep:
    """Stage 1 of four."""
    spec = healed(tiny(family, num_hidden_layers=4))
    step = StageStep(spec, range(1, 2), OptimConfig(warmup=0), ends=False, place=StagePlace(1, 4), **options)
    disturb({slot.name: slot.of(step.weights.values) for slot in step.weights.slots})
    return step


def gradients(step: StageStep, *, at_once: bool, split: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The sum of gradients of microbatches on different hops, and what each gives to the node before; all go forward
    before the first comes back, or one after another."""
    given = torch.randn(len(HOPS), 2, 2, 12, 32, generator=torch.Generator().manual_seed(1))
    backs = []

    def back(number: int) -> None:
        found = step.backward((0, number), given[number, 1])
        assert found is not None
        backs.append(found)
        if split:
            step.weight_gradients((0, number))

    for number, hop in enumerate(HOPS):
        step.forward((0, number), given[number, 0], 1.5, hop=hop)
        if not at_once:
            back(number)
    if at_once:
        step.evaluate(given[0, 0])
        for number in range(len(HOPS)):
            back(number)
    assert not step.held
    return step.weights.gradient.clone(), backs


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"split_backward": True, "recompute": True}])
def test_microbatches_on_different_hops_do_not_mix(family: str, options: dict[str, bool]) -> None:
    expected, backs = gradients(stage_1(family), at_once=False)
    assert all(slot.of(expected).any() for slot in stage_1(family).weights.slots)
    found, others = gradients(stage_1(family, **options), at_once=True, split="split_backward" in options)
    torch.testing.assert_close(found, expected)
    for one, other in zip(backs, others, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("recompute", [False, True])
def test_in_bf16_gradients_are_nearly_the_same(recompute: bool) -> None:
    step = stage_1(compute_dtype="bf16", recompute=recompute)
    held = {name: each.dtype for name, each in step.model.frozen_weights()}
    assert {dtype for name, dtype in held.items() if "proj" in name} == {torch.bfloat16}
    used = {name: each.dtype for name, each in step.model.trained_weights()}
    copied = {name for name, dtype in used.items() if dtype == torch.bfloat16}
    assert copied == (set() if recompute else {name for name in used if name.endswith(("proj.down", "proj.up"))})
    assert step.weights.values.dtype == torch.float32
    expected, _ = gradients(stage_1(), at_once=True)
    found, _ = gradients(step, at_once=True)
    assert (found - expected).norm() < 0.02 * expected.norm()
    step.weights.step(0.1, 1.0)
    again, _ = gradients(step, at_once=True)
    assert (again - found).norm() > 0.1 * found.norm(), "with the copies of the new weights"


def test_a_path_that_visits_all_stages_uses_nothing_that_is_trained() -> None:
    spec = healed(tiny("llama", num_hidden_layers=4))
    ends = StageStep(spec, range(1), OptimConfig(), ends=True, place=StagePlace(0, 4))
    plain = StageStep(spec.without_adapters(), range(1), OptimConfig(), ends=True)
    disturb({slot.name: slot.of(ends.weights.values) for slot in ends.weights.slots})
    tokens = torch.arange(24).view(2, 12)
    for hop in (StageHop(0, 2, 1), None):
        outputs = ends.begin((0, 0), tokens, hop=hop)
        assert ends.backward((0, 0), torch.ones_like(outputs)) is None
        assert ends.weights.gradient.any() == (hop is not None)
        ends.weights.clear_gradient()
    assert torch.equal(outputs, plain.begin((0, 0), tokens))


@pytest.mark.parametrize("stage", [0, 3])
def test_names_and_layout(stage: int) -> None:
    spec = healed(tiny("llama", num_hidden_layers=5), repeats=2)
    counts = (1, 1, 1, 2)
    model = StageModel(spec, layer_ranges(counts)[stage], ends=stage == 0, place=StagePlace(stage, 4))
    trained = dict(model.trained_weights())
    assert {slot.name: slot.shape for slot in layout_of_stage(spec, counts, stage)} == {
        name: tuple(each.shape) for name, each in trained.items()
    }
    bridges = {f"bridges.0.{part}" for part in ("down", "up", "gain")} if stage == 0 else set()
    maps = {f"adapters.{name}.{part}" for name, _ in model.linear_maps() for part in ("down", "up")}
    assert trained.keys() == bridges | maps | {f"adapters.{stage}.gates"}
    own = {name for name, _ in StageModel(spec.without_adapters(), model.numbers, ends=stage == 0).named_weights()}
    assert {name for name, _ in model.named_weights()} == {name for name, _ in model.frozen_weights()} == own
