"""Training over many nodes is training in one process: the same losses, the same weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from skippipe.collectives.schedule import Piece
from skippipe.data.batch_sampler import ANSWER, BEGINS, BatchSampler, ConversationSampler
from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ROUTER_BIAS, ModelSpec
from skippipe.model.stage import layer_ranges
from skippipe.model.stage_step import StageStep
from skippipe.plan import Lane, Plan
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.simulation.fault_injection import kill
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.training.reference import ReferenceTrainer
from skippipe.workload import LinkDtypes
from tests.helpers import exact_training
from tests.helpers.exact_training import (
    FULL,
    ITERATIONS,
    LEARNING,
    SKIPPED,
    SWAPPED,
    LowRankReference,
    assert_exact,
    assert_replicas_alike,
    distance,
    plan_of,
    sampler_of,
    tensors_of,
    trained,
    weights_of,
)
from tests.helpers.models import whole_model
from tests.helpers.quick import others_slow

torch.set_num_threads(1)


PATHS = {"full": FULL, "skipped": SKIPPED, "swapped": SWAPPED}


@pytest.mark.parametrize(
    ("paths", "split"), [("full", False), ("skipped", True), ("swapped", False), ("swapped", True)]
)
def test_many_nodes_are_one_process(paths: str, split: bool) -> None:
    assert_exact(*plan_of(PATHS[paths], (2, 1, 1, 1) if split else (1, 1, 1, 2), split=split))


WAYS = (Piece(2, 3), Piece(3, 1), Piece(4, 2)), (Piece(4, 2, ((2, 3),)), Piece(2, 1, ((4, 3),)))


@pytest.mark.parametrize("pieces", WAYS, ids=["direct", "trees"])
def test_every_way_to_average(pieces: tuple[Piece, ...]) -> None:
    assert_exact(*plan_of(SKIPPED, pieces=pieces))


@pytest.mark.parametrize("rated", [False, True], ids=["links alone", "shared uploads and downloads"])
def test_averaging_by_way_of_relays_of_other_stages(rated: bool) -> None:
    """Nodes 0 and 5 forward for stage 1; node 5 is alone on its stage, and done with averaging before."""
    pieces = Piece(2, 3, (), ((3, 5), (4, 0))), Piece(3, 1, ((2, 4),), ((2, 5), (4, 2))), Piece(4, 2, (), ((3, 0),))
    plan, spec = plan_of(SKIPPED, pieces=pieces)
    assert plan.stages[1].averaging.fault() is None
    if rated:
        nodes = [replace(each, upload_bytes_per_s=2e6) for each in plan.cluster.nodes]
        nodes[2:6] = [replace(each, download_bytes_per_s=1e6) for each in nodes[2:6]]
        plan = replace(plan, cluster=replace(plan.cluster, nodes=tuple(nodes)))
    sent = Counter[tuple[int, int]]()
    for report in assert_exact(plan, spec).reports:
        sent.update(report.sent_bytes)
    assert all(sent[link] for link in ((3, 5), (4, 0), (2, 5))), "to relays; without them no total would be there"


@pytest.mark.parametrize(
    "family", others_slow(["llama-tied", "qwen3_moe"], ["qwen3", "mistral", "gemma3", "deepseek_v3"])
)
def test_every_family(family: str) -> None:
    recompute = family == "mistral"
    assert_exact(*plan_of(SKIPPED, family=family, split=family != "qwen3", activation_checkpointing=recompute))


CODECS = ("fp32", "bf16", "int8", "fp8", "int4", "int6", "int4-tile32", "int4-stochastic", "int6-stochastic")
MIXED = tuple(
    LinkDtypes(f"n{i}", f"n{j}", CODECS[(i + j) % 7], CODECS[(i + 2 * j) % 9])
    for i, j in product(range(8), repeat=2)
    if (i, j) != (0, 5)  # this one has the usual codec
)
ALIKE = {each: (each, ()) for each in ("bf16", "int8", "fp8", "int4")} | {"mixed": ("bf16", MIXED)}
IN_THE_MIX = ("bf16", "int8", "fp8")


@pytest.mark.parametrize(
    ("wire", "links"),
    [pytest.param(*ALIKE[each], id=each, marks=pytest.mark.slow if each in IN_THE_MIX else ()) for each in ALIKE],
)
def test_hops_are_rounded_alike(wire: str, links: tuple[LinkDtypes, ...]) -> None:
    """To the bit in the first forward; then sums in another order now and then tip a value over to the next step."""
    plan, spec = plan_of(SWAPPED, wire_dtype=wire, wire_dtypes=links)
    cluster, computers, oracle, losses = trained(plan, spec)
    lossless = replace(plan, workload=replace(plan.workload, wire_dtype="fp32", wire_dtypes=()))
    exact = ReferenceTrainer(lossless, spec, LEARNING, sampler_of(plan))
    unrounded = [exact.iteration(number).loss for number in range(ITERATIONS)]
    found = [report.loss for report in cluster.reports]
    assert found[0] == pytest.approx(losses[0], rel=1e-7)
    assert found[0] != pytest.approx(unrounded[0], rel=1e-6)
    assert found == pytest.approx(losses, rel=1e-4)
    assert_replicas_alike(plan, computers)
    weights = weights_of(plan, computers)
    assert distance(weights, oracle.weights()) < 0.1 * distance(exact.weights(), oracle.weights())
    planned = {link[:2]: link[2] for link in simulate(plan, Timing.CONTENTION_ONLY).links}
    for report in cluster.reports:
        assert {link: report.sent_bytes[link] for link in planned} == planned


@pytest.mark.parametrize(("paths", "wire"), [("skipped", "fp32"), ("swapped", "bf16")])
def test_conversations_in_a_sample(paths: str, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they begin goes along every path with the activations; backward passes are split and recomputed."""
    random = np.random.default_rng(2)
    marks = np.where(random.random(600) < 0.2, BEGINS, 0) | np.where(random.random(600) < 0.5, ANSWER, 0)
    marks[0] |= BEGINS

    def sampler_of(plan: Plan) -> BatchSampler:
        return ConversationSampler(exact_training.TEXT[:600], marks.astype(np.uint8), 12, 3, plan.microbatches, 2)

    monkeypatch.setattr(exact_training, "sampler_of", sampler_of)
    plan, spec = plan_of(PATHS[paths], wire_dtype=wire, split=True, activation_checkpointing=True)
    assert sampler_of(plan).share(0, 0) != 1
    if wire == "fp32":
        assert_exact(plan, spec)
    else:
        cluster, computers, _, losses = trained(plan, spec)
        assert [report.loss for report in cluster.reports] == pytest.approx(losses, rel=1e-4)
        assert_replicas_alike(plan, computers)


@pytest.mark.parametrize(
    ("paths", "dtype", "dtypes", "share"),
    others_slow(
        [("full", "bf16", (), 0.1), ("skipped", "int2", ("fp32", "int8", "fp32", "bf16"), 0.1)],
        [("skipped", "int8", (), 0.1), ("full", "int4", (), 0.3), ("skipped", "int2", (), 0.6)],
    ),
)
def test_gradients_rounded_on_the_wire_stay_close_and_replicas_alike(
    paths: str, dtype: str, dtypes: tuple[str, ...], share: float
) -> None:
    plan, spec = plan_of(PATHS[paths], gradient_dtype=dtype, gradient_dtypes=dtypes)
    cluster, computers, oracle, losses = trained(plan, spec)
    assert [report.loss for report in cluster.reports] == pytest.approx(losses, rel=5e-3)
    assert_replicas_alike(plan, computers)
    off = distance(weights_of(plan, computers), oracle.weights())
    assert 0 < off < share * LEARNING.rate  # where a gradient is next to nothing, Adam makes a step of a wrong sign


@pytest.mark.slow
def test_what_routers_add_does_not_move_by_rounding() -> None:
    """It lies beside norms in what is rounded, and after the rotation of int4 gets something of their gradients."""
    plan, spec = plan_of(SKIPPED, family="deepseek_v3", gradient_dtype="int4")
    _, computers, _, _ = trained(plan, spec)
    assert_replicas_alike(plan, computers)
    biases = {name: each for name, each in weights_of(plan, computers).items() if name.endswith(ROUTER_BIAS)}
    assert biases and not any(each.any() for each in biases.values())


@pytest.mark.parametrize(("family", "pieces"), others_slow([("qwen3_moe", WAYS[1])], [("llama", WAYS[0])]))
def test_low_rank(family: str, pieces: tuple[Piece, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rounds, error feedback and the factors of the iteration before."""
    plan, spec = plan_of(SKIPPED, family=family, gradient_dtype="rank-4", pieces=pieces)
    exact = ReferenceTrainer(plan, spec, LEARNING, sampler_of(plan))
    for number in range(ITERATIONS):
        exact.iteration(number)
    monkeypatch.setattr(exact_training, "ReferenceTrainer", LowRankReference)
    cluster, computers, oracle, losses = trained(plan, spec)
    assert [report.loss for report in cluster.reports] == pytest.approx(losses, rel=1e-5)
    assert_replicas_alike(plan, computers)
    off = distance(weights_of(plan, computers), oracle.weights())
    assert off < 0.01 * distance(exact.weights(), oracle.weights())


@pytest.mark.slow
def test_a_node_that_is_lost_while_it_averages_at_low_rank_comes_back_to_the_same_bits() -> None:
    """With nothing kept and first factors of its own; the others have factors of the iterations before."""
    plan, spec = plan_of(FULL, gradient_dtype="rank-4", pieces=WAYS[1])
    cluster = VirtualCluster(
        plan,
        CoordinatorSettings(LEARNING, 8, recovery=RecoverySettings(planning=timedelta(0))),
        tensors_of(plan, spec),
        builder=lambda node, plan: tensors_of(plan, spec)[node],
        faults=[kill(node=2).at(iteration=1, during="averaging").back_after(0.1)],
    )
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    assert {event.node for _, event in cluster.events if event.kind == "recovered"} == {"n2"}
    replicas: dict[int, list[torch.Tensor]] = {}  # by stage; the node that came back may have taken another one
    for each in cluster.executor_of.values():
        assert isinstance(each, StageExecutor)
        replicas.setdefault(each._stage, []).append(each.tasks.weights.values)
    back = cluster.executor_of[2]
    assert isinstance(back, StageExecutor) and len(replicas[back._stage]) > 1
    assert all(torch.equal(one, other) for one, *others in replicas.values() for other in others)


def test_clipping_is_by_the_norm_of_the_whole_model() -> None:
    """Adam does not see the scale of its gradient, unless epsilon is large."""
    cluster = assert_exact(*plan_of(SKIPPED), replace(LEARNING, clip=0.01, epsilon=1e-3))
    assert cluster.reports[0].norm > 0.02, "the limit is one"


def test_a_stage_that_nobody_visits_stays_as_it_is() -> None:
    """Also one of three nodes, whose ring has nothing to round; `trained` sees to it."""
    plan, spec = plan_of((Lane((0, 6), 2), Lane((1, 7), 1)), gradient_dtype="int8")
    _, computers, oracle, _ = trained(plan, spec)
    for node, stage in ((3, 1), (5, 2)):
        assert torch.equal(computers[node].tasks.weights.values, oracle.stages[stage].weights.values)


def mean_gradients(plan: Plan, spec: ModelSpec) -> list[torch.Tensor]:
    """By hand, from whole transformers models that lack the layers a microbatch skips: the mean over visitors."""
    config = spec.config
    counts = tuple(stage.layers for stage in plan.stages)
    ranges = layer_ranges(counts)
    parts = [StageStep(spec, layers, LEARNING, ends=index == 0) for index, layers in enumerate(ranges)]
    sums: list[dict[str, torch.Tensor]] = [{} for _ in counts]
    visitors = [0] * len(counts)
    place = 0
    for lane in plan.lanes:
        visits = plan.visits(lane)
        order = [layer for stage in visits for layer in ranges[stage]]
        for _ in range(lane.microbatches):
            inputs, labels = (torch.from_numpy(each) for each in sampler_of(plan).batch(0, place))
            place += 1
            model = whole_model(config, [part.model for part in parts])
            kept = torch.nn.ModuleList([model.model.layers[layer] for layer in order])
            named = {id(each): name for name, each in model.named_parameters()}
            model.model.layers = kept
            model.config.num_hidden_layers = len(kept)
            logits = model(input_ids=inputs, use_cache=False).logits
            torch.autograd.backward(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            for stage in visits:
                visitors[stage] += 1
                mine = {name for name, _ in parts[stage].model.named_weights()}
                for each in model.parameters():
                    name = named[id(each)]
                    if name in mine and each.grad is not None:
                        sums[stage][name] = sums[stage].get(name, 0) + each.grad
            config.num_hidden_layers = sum(counts)
    means = []
    for stage, part in enumerate(parts):
        flat = part.weights.gradient
        for name, each in part.model.named_weights():
            assert each.grad is not None
            each.grad.copy_(sums[stage][name] / visitors[stage])
        means.append(flat.clone())
    return means


def test_gradients_are_means_over_the_microbatches_that_came() -> None:
    """Not over all microbatches, not over nodes: the stages see 5, 3, 3 and 4 of 5 microbatches."""
    plan, spec = plan_of(SKIPPED)
    expected = mean_gradients(plan, spec)
    computers = tensors_of(plan, spec)
    found: dict[int, torch.Tensor] = {}

    def noted(node: int, weights: FlatParams, step: Any, rate: float, scale: float, summed: Any) -> None:
        found[node] = (weights.gradient if summed is None else summed) / plan.exposure[plan.stage_of[node]]
        step(rate, scale, summed)

    for node, executor in computers.items():
        weights = executor.tasks.weights
        weights.step = partial(noted, node, weights, weights.step)  # type: ignore[method-assign]
    cluster = VirtualCluster(plan, CoordinatorSettings(LEARNING, 1), executors=computers)
    cluster.run()
    for node, stage in plan.stage_of.items():
        torch.testing.assert_close(found[node], expected[stage], rtol=1e-4, atol=1e-7, msg=f"node {node}")
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in expected))
    assert cluster.reports[0].norm == pytest.approx(norm, rel=1e-5)
