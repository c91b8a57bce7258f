"""A codec for each link, pass and stage, from job to processes: chosen, kept by every plan of a run, and applied."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skippipe.codecs import CODECS
from skippipe.data.prepare import prepare
from skippipe.launch.fork_server import ProcessPool
from skippipe.model.model_spec import ModelSpec
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.codec_prices import DEFAULT_PRICES, message_shares, plan_nats
from skippipe.planner.problem import PlanRequest
from skippipe.planner.repair.repair import repaired
from skippipe.runtime.coordinator.interfaces import Callback, IterationReport
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.coordinator.wal_records import plan_records
from skippipe.runtime.node_config import NodeConfig
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.training import train_job
from skippipe.training.backends import one_process, virtual
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.job_plan import plan_file, plan_of_earlier_run
from skippipe.training.reference import ReferenceTrainer
from skippipe.training.run import Run, RunOptions
from skippipe.validate import validate
from skippipe.workload import LinkDtypes, Workload
from tests.helpers.exact_training import distance
from tests.helpers.jobs import WORDS, tiny_job
from tests.helpers.models import tiny
from tests.helpers.plans import uniform_cluster
from tests.helpers.pretrained_jobs import Losses
from tests.helpers.processes import owner

torch.set_num_threads(1)

TIMEOUT_S = 60.0
ITERATIONS = 4
LOST_AFTER = 1
LEARNING = OptimConfig(rate=3e-3, warmup=1, iterations=ITERATIONS)
# Two nodes on stages 0 and 2, one on stage 1. One lane skips stage 1, one swaps 1 and 2.
STAGES = (Stage(2, (0, 1), (0, 1)), Stage(1, (2,), (2,)), Stage(2, (3, 4), (4, 3)))
LANES = (Lane((0, 2, 3), 2), Lane((1, 4), 1), Lane((1, 3, 2), 1))
HOPS = (
    LinkDtypes("n0", "n2", "int8", "int8"),
    LinkDtypes("n2", "n0", "bf16", "int4-stochastic"),
    LinkDtypes("n2", "n3", "fp8", "bf16"),
    LinkDtypes("n3", "n2", "fp32", "fp8"),
    LinkDtypes("n1", "n3", "bf16", "fp32"),
    LinkDtypes("n4", "n1", "int4", "int8"),
)
CODECS_OF = {"wire_dtype": "bf16", "wire_dtypes": HOPS, "gradient_dtypes": ("int8", "fp32", "int4")}
QUICK = PlanRequest(seed=0, budget_s=0.2, changes=300)


def run_in(folder: Path, iterations: int) -> Run:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(" ".join(f"{number} {WORDS}" for number in range(200)))
    tokens = prepare(text, 300, folder / "tokens")
    spec = ModelSpec(tiny("llama", vocab_size=tokens.vocabulary), seed=4)
    work = Workload(spec.shape, 16, 2, 4, compute_dtype="fp32", **CODECS_OF)  # type: ignore[arg-type]
    plan = Plan(uniform_cluster(5, latency_s=0.002, bandwidth=1e8, flops_per_s=1e9), work, STAGES, LANES)
    config = NodeConfig(plan, spec.config.to_dict(), 4, LEARNING, str(tokens.folder), tokens.fingerprint)
    settings = CoordinatorSettings(LEARNING, iterations)
    return Run(config, spec, tokens.tokenizer(), folder / "run", settings, "none")


class Noting(Callback):
    """Notes the loss of each iteration and the bytes on each link; and kills a node after one of them."""

    def __init__(self, folder: Path, killed: str = "") -> None:
        self._file, self._killed = folder / "iterations", killed
        self.pool: ProcessPool | None = None

    def started(self, pool: ProcessPool) -> None:
        self.pool = pool

    def iteration_done(self, report: IterationReport) -> None:
        with self._file.open("a") as file:
            print(json.dumps([report.loss, [[*link, sent] for link, sent in report.sent_bytes.items()]]), file=file)
        if self._killed and report.iteration == LOST_AFTER:
            assert self.pool is not None
            os.kill(self.pool.pids[self._killed], signal.SIGKILL)


def train(folder: Path) -> None:
    noting = Noting(folder)
    run_in(folder, ITERATIONS).launch_local(noting, noting.started)


def train_and_lose_a_node(folder: Path) -> None:
    noting = Noting(folder, "n3")
    replace(run_in(folder, 2 * ITERATIONS), restarts=0).launch_local(noting, noting.started)


def done_by(task: Any, folder: Path) -> tuple[list[float], list[dict[tuple[int, int], int]]]:
    with owner(task, folder) as process:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    rows = [json.loads(line) for line in (folder / "iterations").read_text().splitlines()]
    return [loss for loss, _ in rows], [{(a, b): sent for a, b, sent in links} for _, links in rows]


class EncodingTrainer(ReferenceTrainer):
    """One process with a gradient of its own for each node, which pairs of nodes sum as docs/formats.md says: of either
    half, one node sends its own, the other adds and sends the sum back, and what encoding takes away is added to the
    gradient of whoever encoded it in the next iteration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {node: self.stages[stage].weights.gradient for node, stage in self.plan.stage_of.items()}
        self._own = {node: torch.zeros_like(each) for node, each in sizes.items()}
        self._errors = {node: torch.zeros_like(each) for node, each in sizes.items()}

    def _forward_backward(self, plan: Plan, iteration: int, lane: int, microbatch: int) -> Tensor:
        loss = super()._forward_backward(plan, iteration, lane, microbatch)
        for node in plan.lanes[lane].path:
            gradient = self.stages[plan.stage_of[node]].weights.gradient
            self._own[node] += gradient
            gradient.zero_()
        if (lane, microbatch) == (len(plan.lanes) - 1, plan.lanes[lane].microbatches - 1):
            for number, stage in enumerate(plan.stages):
                self._average(stage.ring, plan.workload.stage_gradient_dtype(number), number)
        return loss

    def _average(self, ring: tuple[int, ...], codec: str, stage: int) -> None:
        summed = self.stages[stage].weights.gradient
        for node in ring:
            self._own[node] += self._errors[node]
        if len(ring) == 1:
            summed.copy_(self._own[ring[0]])
        else:
            middle = 1 + (len(summed) - 2) // 2
            one, other = ring
            for part, first, root in ((slice(0, middle), one, other), (slice(middle, None), other, one)):
                told = self._encoded(first, part, self._own[first][part], codec)
                summed[part] = self._encoded(root, part, self._own[root][part] + told, codec)
        for node in ring:
            self._own[node].zero_()

    def _encoded(self, node: int, part: slice, values: Tensor, codec: str) -> Tensor:
        told = CODECS[codec].rounded(values).float()
        if CODECS[codec].error_feedback:
            self._errors[node][part] = values - told
        return told


def trained(kind: type[ReferenceTrainer], run: Run, **codecs: Any) -> tuple[list[float], dict[str, Tensor]]:
    plan = replace(run.node_config.plan, workload=replace(run.node_config.plan.workload, **codecs))
    one = kind(plan, run.spec, LEARNING, run.node_config.sampler())
    return [one.iteration(number).loss for number in range(ITERATIONS)], one.weights()


def hop_bytes(plan: Plan) -> dict[tuple[int, int], int]:
    """What hops alone send over each link, as planned."""
    return {(a, b): sent for a, b, sent, *_ in simulate(plan, Timing.CONTENTION_ONLY).links if sent}


def built(folder: Path, *, resumed: bool = False, **pipeline: Any) -> RunSetup:
    """A job over regions, with paths of two lengths."""
    job = tiny_job(
        folder,
        iterations=6,
        cluster="regions:8",
        pipeline={"stages": 4, "strategy": "dtfm-skip", **pipeline},
        recipe={"skip": "1/4 until 60%, 0"},
        emulation={"enabled": True},
        checkpoint={"every": 3},
    )
    return build_run(job, request=QUICK, options=RunOptions(resumed=resumed))


@pytest.mark.slow
def test_a_job_lets_codecs_be_chosen_and_every_plan_of_the_run_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths of both lengths, a repair, a run that is resumed; and nodes train what one process does."""
    nats = 0.004
    made = built(tmp_path, nats=nats)
    work = made.plan.workload
    assert len(work.hop_dtypes) > 2 and len(set(work.gradient_dtypes)) > 1, "links and stages that differ"
    three, four = made.plans[3], made.plans[4]
    assert made.plan is three
    alone = {message[1:] for message in set(message_shares(four)) - set(message_shares(three))}
    number = made.plan.cluster.number
    assert alone & {(number[row.sender], number[row.receiver]) for row in work.wire_dtypes}
    plain = replace(work, wire_dtypes=(), gradient_dtypes=())
    assert (plain.wire_dtype, plain.gradient_dtype) == ("bf16", "fp32")
    for plan in made.plans.values():
        assert plan.workload == work
        assert validate(plan) == []
        assert plan.expected == simulate(plan, Timing.FULL)
        assert plan.expected.iteration_s < 0.9 * simulate(replace(plan, workload=plain), Timing.FULL).iteration_s
        assert 0 < plan_nats(plan, DEFAULT_PRICES) <= nats + 1e-8
    train_job._announce(made, promised=True)
    assert f"codecs for {plan_nats(three, DEFAULT_PRICES):.2g} nats: activations " in capsys.readouterr().out
    lost = next(node for stage in three.stages if len(stage.nodes) > 1 for node in stage.nodes)
    members = [[node for node in stage.nodes if node != lost] for stage in three.stages]
    left = repaired(three, members, set(three.stage_of) - {lost}, budget_s=0.0)
    assert left is not None and left.workload == work
    once, losses = Losses(), Losses()
    one_process(replace(made, job=replace(made.job, output=str(tmp_path / "once"))), once, lambda: False)
    made.save_plans()
    virtual(made, losses, lambda: len(losses.found) >= 3)
    assert losses.found[0] == pytest.approx(once.found[0], rel=1e-6)
    assert 3 <= len(losses.found) < 6
    assert losses.found == pytest.approx(once.found[: len(losses.found)], rel=2e-3)
    assert built(tmp_path, resumed=True, nats=nats).plans == made.plans
    not_chosen = replace(made.job, pipeline=replace(made.job.pipeline, nats=None))
    assert plan_of_earlier_run(made.job, made.spec, plan_file(made.job)) is not None
    assert plan_of_earlier_run(not_chosen, made.spec, plan_file(not_chosen)) is None, "it says bf16 and fp32 everywhere"


def test_processes_with_mixed_codecs_are_one_process_with_the_same(tmp_path: Path) -> None:
    """The first loss to the last digits. Then a value tips over to the next step now and then."""
    losses, sent = done_by(train, tmp_path)
    run = run_in(tmp_path, ITERATIONS)
    weights: dict[str, Tensor] = {}
    for file in (tmp_path / "run" / "model").glob("*.safetensors"):
        weights |= load_file(file)
    expected, same = trained(EncodingTrainer, run)
    _, only_hops = trained(ReferenceTrainer, run)
    _, only_gradients = trained(EncodingTrainer, run, wire_dtype="fp32", wire_dtypes=())
    assert losses[0] == pytest.approx(expected[0], rel=1e-7)
    assert losses == pytest.approx(expected, rel=1e-4)
    for other in (only_hops, only_gradients):
        assert distance(weights, same) < 0.1 * distance(weights, other)
    planned = hop_bytes(run.node_config.plan)
    assert planned.keys() > {(0, 2), (2, 0), (2, 3), (3, 2), (4, 1)}
    assert [{link: each.get(link) for link in planned} for each in sent] == [planned] * ITERATIONS


def test_a_killed_node_is_repaired_and_codecs_are_kept(tmp_path: Path) -> None:
    losses, sent = done_by(train_and_lose_a_node, tmp_path)
    run = run_in(tmp_path, ITERATIONS)
    given, before = run.node_config.plan, LOST_AFTER + 1
    assert losses[:before] == pytest.approx(trained(EncodingTrainer, run)[0][:before], rel=1e-4)
    assert len(losses) == 2 * ITERATIONS and max(losses[before:]) < losses[0]
    after = Plan.from_json(plan_records(run.wal.records)[-1]["plan"])
    assert 3 in given.stage_of and 3 not in after.stage_of
    assert after.workload == given.workload
    planned = hop_bytes(after)
    assert {link: sent[-1].get(link) for link in planned} == planned, "hops are encoded as the repaired plan says"
