"""Codecs in studies: hops and sums of gradients as nodes have them, low rank as it was published, old results kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from skippipe.codecs import CODECS
from skippipe.codecs.factors import orthonormal
from skippipe.collectives.peer_to_peer import GradientAverager
from skippipe.collectives.schedule import Averaging, Piece
from skippipe.errors import UserError
from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ModelSpec
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan
from skippipe.skip_schedule import SkipSchedule
from skippipe.study.config import EvalSettings, HopCodecs, Study, Traffic, Variant
from skippipe.study.engine import Engine
from skippipe.study.path_sampling import group_by_stage, iteration_paths
from skippipe.study.planned_time import variant_of
from skippipe.study.traffic import LowRankSum, Subspace, sent
from skippipe.training.reference import ReferenceTrainer
from tests.helpers.exact_training import plan_of, sampler_of

COARSE = OptimConfig(rate=3e-3, warmup=2, iterations=5, clip=1.0, epsilon=1e-3)  # as in the tests of the engine
REPLICAS = 3
LANES = tuple(Lane(nodes, 1) for nodes in [(0, 2, 6), (1, 5, 7), (0, 3, 5), (1, 4, 6), (0, 2, 5), (1, 5, 6)])
EXCHANGE = Averaging((0, 1, 2), (Piece(root=2, share=1),)).schedule


class Replicated(ReferenceTrainer):
    """Microbatch by microbatch, with the averagers of nodes: every third of the lanes is that of one replica."""

    def average_with(self, codec: str) -> None:
        self._parts = [[torch.zeros_like(stage.weights.gradient) for _ in range(REPLICAS)] for stage in self.stages]
        self._averagers = [[GradientAverager(part, codec) for part in parts] for parts in self._parts]

    def _forward_backward(self, plan: Plan, iteration: int, lane: int, microbatch: int) -> Tensor:
        loss = super()._forward_backward(plan, iteration, lane, microbatch)
        replica, last = divmod(lane, len(LANES) // REPLICAS)
        if last:
            for stage, parts in zip(self.stages, self._parts, strict=True):
                parts[replica].copy_(stage.weights.gradient)
                stage.weights.gradient.zero_()
        if lane == len(LANES) - 1:
            for stage, averagers in zip(self.stages, self._averagers, strict=True):
                *others, root = averagers
                for each in averagers:
                    each.begin(EXCHANGE)
                total = root.contribute(0, [each.contribute(0, [], total=False) for each in others], total=True)
                others[0].adopt(0, total)
                stage.weights.gradient.copy_(others[0].summed)
                for each in averagers:
                    each.close(followed=True)
        return loss


def trained(plan: Plan, spec: ModelSpec, traffic: Traffic, iterations: int = 4) -> list[Tensor]:
    engine = Engine(spec, plan.layers, COARSE, SkipSchedule("1/4"), traffic=traffic)
    sampler, visits = sampler_of(plan), [plan.visits(lane) for lane in LANES]
    for number in range(iterations):
        batches = [sampler.batch(number, microbatch) for microbatch in range(plan.microbatches)]
        inputs, labels = (torch.cat([torch.from_numpy(batch[side]) for batch in batches]) for side in (0, 1))
        engine.iteration(number, inputs, labels, visits)
    return [each.values for each in engine.weights]


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat(one) - torch.cat(other)))


@pytest.mark.parametrize(("wire", "gradients"), [("int8", "fp32"), ("fp32", "int8"), ("int8", "int8")])
def test_traffic_is_that_of_nodes(wire: str, gradients: str) -> None:
    plan, spec = plan_of(LANES, wire_dtype=wire)
    alone = Replicated(plan, spec, COARSE, sampler_of(plan))
    alone.average_with(gradients)
    for number in range(4):
        alone.iteration(number)
    found = trained(plan, spec, Traffic(wire, gradients=gradients, replicas=REPLICAS))
    plain = trained(plan, spec, Traffic())
    expected = [each.weights.values for each in alone.stages]
    # what lies between two steps of a codec may be rounded either way, in sums of another order
    assert apart(found, expected) < 0.1 * apart(found, plain)


def test_a_hop_rounds_both_ways() -> None:
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, 64, generator=chance, requires_grad=True)
    gradient = torch.randn(hidden.shape, generator=chance)
    for wire, back, codec in (("int4", "", "int4-stochastic"), ("int4", "fp8", "fp8"), ("int8", "", "int8")):
        arrived = sent(hidden, wire, back)
        assert torch.equal(arrived, CODECS[wire].rounded(hidden))
        (found,) = torch.autograd.grad(arrived, hidden, gradient)
        assert torch.equal(found, CODECS[codec].rounded(gradient))
    assert sent(hidden, "") is hidden


def test_a_subspace_carries_a_projection_both_ways() -> None:
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 16, generator=chance, requires_grad=True)
    embedded = torch.randn(hidden.shape, generator=chance, requires_grad=True)
    gradient = torch.randn(hidden.shape, generator=chance)
    subspace = Subspace(Traffic(subspace=4, basis="fixed"), 16, "cpu")
    onto = subspace.basis @ subspace.basis.T
    arrived = subspace.sent(hidden, embedded, "")
    torch.testing.assert_close(arrived, embedded + (hidden - embedded) @ onto)
    found, none = torch.autograd.grad(arrived, (hidden, embedded), gradient, allow_unused=True)
    torch.testing.assert_close(found, gradient @ onto)
    assert none is None, "receivers make embeddings themselves, and send no gradient of them"
    rounded = subspace.sent(hidden, embedded, "int8")
    assert 0 < (rounded - arrived).abs().max() < 0.05, "coefficients are rounded"
    subspace.follow()
    assert torch.equal(subspace.basis @ subspace.basis.T, onto)


def test_a_basis_follows_what_is_sent() -> None:
    """Values that lie in four directions get through whole, once the basis has turned there."""
    chance = torch.Generator().manual_seed(1)
    directions = torch.randn(4, 16, generator=chance)
    subspace = Subspace(Traffic(subspace=4), 16, "cpu")
    embedded = torch.randn(6, 5, 16, generator=chance)
    lost = []
    for _ in range(2):
        hidden = embedded + torch.randn(6, 5, 4, generator=chance) @ directions
        lost.append(float((subspace.sent(hidden, embedded, "") - hidden).norm() / (hidden - embedded).norm()))
        subspace.follow()
    assert lost[0] > 0.5 and lost[1] < 1e-4


def test_engines_train_in_their_subspace() -> None:
    """With a basis of all directions as without; and with fewer, a model is evaluated with what it was trained for."""
    plan, spec = plan_of(LANES)
    plain = trained(plan, spec, Traffic())
    all_of_it, less = Traffic(subspace=32), Traffic(subspace=4)
    assert apart(trained(plan, spec, all_of_it), plain) < 1e-3 * apart(trained(plan, spec, less), plain)
    engine = Engine(spec, plan.layers, COARSE, SkipSchedule("1/4"), traffic=less)
    tokens = torch.randint(0, 97, (2, 8), generator=torch.Generator().manual_seed(0))
    stages, basis = engine.stages, engine._subspace
    assert basis is not None
    embedded = hidden = stages[0].embed(tokens)
    for stage in stages:
        hidden = basis.sent(stage(hidden), embedded, "")
    whole = tuple(range(len(stages)))
    torch.testing.assert_close(engine.loss_of(tokens, tokens, whole, 1.0), stages[0].loss(hidden, tokens).detach())


def test_lossless_codecs_change_nothing() -> None:
    plan, spec = plan_of(LANES)
    plain = trained(plan, spec, Traffic())
    assert apart(trained(plan, spec, Traffic("fp32", gradients="fp32", replicas=REPLICAS)), plain) == 0
    assert apart(trained(plan, spec, Traffic(gradients="rank-32")), plain) == 0, "no matrix is larger than its factors"


def test_low_rank_is_powersgd() -> None:
    """With errors of its own for each of three workers, as published."""
    chance = torch.Generator().manual_seed(0)
    weights = FlatParams(
        [("a", torch.nn.Parameter(torch.zeros(12, 9))), ("b", torch.nn.Parameter(torch.zeros(9)))], COARSE
    )
    low_rank = LowRankSum(2, [weights])
    factor = low_rank._factors[weights, 0].clone()
    errors = [torch.zeros(12, 9) for _ in range(REPLICAS)]
    for _ in range(3):
        found = [torch.randn(12 * 9 + 9, generator=chance) for _ in range(REPLICAS)]
        weights.gradient.copy_(torch.stack(found).sum(0))
        low_rank.add(0, [weights])
        wholes = [each[:108].view(12, 9) + error for each, error in zip(found, errors, strict=True)]
        left, _ = torch.linalg.qr(sum(each @ factor for each in wholes))
        rights = [each.T @ left for each in wholes]
        errors = [each - left @ right.T for each, right in zip(wholes, rights, strict=True)]
        factor = sum(rights)
        torch.testing.assert_close(weights.gradient[:108].view(12, 9), left @ factor.T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights.gradient[108:], torch.stack(found).sum(0)[108:])
        factor = low_rank._factors[weights, 0].clone()  # the same up to signs, by which nothing else changes
    torch.testing.assert_close(low_rank._remainders[weights][:108].view(12, 9), sum(errors), rtol=1e-4, atol=1e-5)


def test_columns_that_depend_on_others_become_zero() -> None:
    """And not rounding errors that are scaled up."""
    matrix = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)) @ torch.randn(
        2, 5, generator=torch.Generator().manual_seed(1)
    )
    for scale in (1.0, 1e-25, 1e25):
        found = orthonormal((matrix * scale).unsqueeze(0))[0]
        torch.testing.assert_close(found.T @ found, torch.diag(torch.tensor([1.0, 1.0, 0, 0, 0])), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_engines_that_begin_again_remember_nothing() -> None:
    plan, spec = plan_of(LANES)
    tokens = torch.randint(0, 97, (6, 8), generator=torch.Generator().manual_seed(0))
    visits = [plan.visits(lane) for lane in LANES]

    def after(engine: Engine) -> list[Tensor]:
        for number in range(3):
            engine.iteration(number, tokens, tokens, visits)
        return [each.values.clone() for each in engine.weights]

    recipe = SkipSchedule("1/4")
    engine = Engine(spec, plan.layers, COARSE, recipe)
    for traffic in (
        Traffic("int8", gradients="int8", replicas=REPLICAS),
        Traffic(gradients="rank 2"),
        Traffic(subspace=4),
        Traffic(),
    ):
        new = after(Engine(spec, plan.layers, COARSE, recipe, traffic=traffic))
        for _ in range(2):
            engine.begin_again(spec, COARSE, recipe, traffic)
            assert apart(after(engine), new) == 0


def test_evaluation_through_a_codec_rounds_every_hop() -> None:
    plan, spec = plan_of(LANES)
    engine = Engine(spec, plan.layers, COARSE, SkipSchedule("1/4"))
    tokens = torch.randint(0, 97, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = engine.stages[0].embed(tokens)
        for stage in (0, 2, 3):
            hidden = CODECS["int8"].rounded(engine.stages[stage](hidden))
        expected = engine.stages[0].loss(hidden, tokens)
    assert float(engine.loss_of(tokens, tokens, (0, 2, 3), 1.0, "int8")) == pytest.approx(float(expected), rel=1e-6)
    assert engine.loss_of(tokens, tokens, (0, 2, 3), 1.0) != expected


def test_codecs_of_hops_change_with_the_run() -> None:
    """Each phase has the codecs of its own, in every iteration; without its own way back, those that go with them."""
    late = Traffic("bf16 until 65%, int4", replicas=3)
    assert [late.hops(number, 10) for number in (0, 6, 7, 9)] == [("bf16", "bf16")] * 2 + [
        ("int4", "int4-stochastic")
    ] * 2
    assert late.back_text == "bf16 until 65%, int4-stochastic"
    early = Traffic("int4 until 1/2, int8", "int4-stochastic until 25%, fp8")
    expected = [("int4", "int4-stochastic"), ("int4", "fp8"), ("int8", "fp8"), ("int8", "fp8")]
    assert [early.hops(number, 4) for number in range(4)] == expected
    plan, spec = plan_of(LANES)
    tokens = torch.randint(0, 97, (6, 8), generator=torch.Generator().manual_seed(0))
    visits = [plan.visits(lane) for lane in LANES]
    engines = [
        Engine(spec, plan.layers, COARSE, SkipSchedule("1/4"), traffic=each) for each in (early, Traffic("int8"))
    ]
    for number, engine in enumerate(engines):
        for iteration in range(3):
            rounds = HopCodecs("int4", "int8") if iteration == 1 else HopCodecs("int8", "int8")
            engine.iteration(iteration, tokens, tokens, visits, hops=None if number and iteration != 1 else rounds)
    assert apart(*([each.values for each in engine.weights] for engine in engines)) == 0


def test_results_from_before_codecs_are_still_known() -> None:
    study = Study("headline", [Variant("full")])
    assert study.runs[0].key == "9d76a9eb7c2f6462"
    coded = Variant("coded", traffic=Traffic("int8", gradients="rank 4", replicas=3))
    study = replace(study, variant=[coded], measuring=EvalSettings(wire=["int8"]))
    (run,) = study.runs
    assert run.settings["variant"]["traffic"] == {"wire": "int8", "wire_back": "", "gradients": "rank 4", "replicas": 3}
    assert run.settings["measuring"]["wire"] == ["int8"]
    known = run.settings["variant"]["traffic"]
    projected = replace(coded, traffic=replace(coded.traffic, subspace=8))
    (other,) = replace(study, variant=[projected]).runs
    assert other.settings["variant"]["traffic"] == {**known, "subspace": 8, "basis": "tracked"}
    assert variant_of({"settings": other.settings}).traffic == projected.traffic
    assert variant_of({"settings": run.settings}).traffic == coded.traffic
    assert Traffic(gradients="rank-4").rank == coded.traffic.rank == 4


def test_replicas_have_parts_of_one_shape() -> None:
    """Or on a GPU hardly any pass would be one that was recorded."""
    traffic = Traffic(gradients="int8", replicas=3)
    study = Study("parts", [Variant("one", SkipSchedule("1/3"), traffic=traffic)], tokens=5 * 30_720)
    shapes = {
        tuple((stage, len(rows)) for stage, rows in group_by_stage(turn.visits[first : first + 10]))
        for turn in iteration_paths(study.runs[0])
        for first in (0, 10, 20)
    }
    assert shapes == {((0, 10), *((stage, 6) for stage in range(1, 6)))}


@pytest.mark.parametrize(
    ("traffic", "error"),
    [
        ({"wire": "int3"}, r"traffic\.wire: there is no codec 'int3', but fp32"),
        ({"gradients": "rank x"}, r"traffic\.gradients: there is no codec 'rank x'"),
        ({"wire_back": "int8"}, r"needs traffic\.wire"),
        (
            {"wire": "int8 until 65%"},
            r"traffic\.wire: 'int8 until 65%' ends before the run does: .* 'int8 until 65%, int4'",
        ),
        ({"wire": "int8, int4"}, r"traffic\.wire: 'int8' has no end"),
        ({"wire": "int8 until 1/2, int3"}, r"traffic\.wire: there is no codec 'int3'"),
        ({"basis": "fixed"}, r"traffic\.basis: needs traffic\.subspace"),
        ({"replicas": 4}, "30 microbatches do not divide into 4 equal parts"),
    ],
)
def test_traffic_that_makes_no_sense(traffic: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        Study("wrong", [Variant("one", traffic=Traffic(**traffic))])
