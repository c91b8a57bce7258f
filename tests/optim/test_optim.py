"""The interface of optimizers: others than AdamW are trained with, stored, transferred and grown, by one registration.

`Momentum` and `Rowwise` are defined here. The second is as unlike AdamW as the interface allows: a state tensor in
bf16, one of another shape than the parameter's, and a step that mixes the numbers of a row.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skippipe import workload
from skippipe.checkpoint.format import MANIFEST, CheckpointOrigin, Manifest, verified
from skippipe.checkpoint.manager import CheckpointManager, origin_of
from skippipe.data.batch_sampler import BatchSampler
from skippipe.data.tokenizer import TextTokenizer, train_bpe
from skippipe.errors import UserError
from skippipe.json_fields import read_json
from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage import StageModel
from skippipe.model_shape import MODELS
from skippipe.optim import OPTIMIZERS, host_state
from skippipe.optim.config import OptimConfig
from skippipe.optim.interface import Optimizer, ParamSlot, StateTensor
from skippipe.plan import Lane, Plan, Stage
from skippipe.runtime import stage_executor
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.node.ops import PlanTransfer, ReadState, WriteState
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.runtime.state_source import StateSource
from skippipe.runtime.train_role import build_stage_executor
from skippipe.toml_config import from_table
from skippipe.training.depth_growth import grow, young_of
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import AveragingConfig
from skippipe.training.reference import ReferenceTrainer
from skippipe.training.run import Run
from skippipe.workload import Workload
from tests.helpers.executors import computer_of, noise, state_of, stepped
from tests.helpers.models import tiny
from tests.helpers.plans import uniform_cluster
from tests.helpers.quick import others_slow

torch.set_num_threads(1)
SEQUENCE, SAMPLES, MICROBATCHES = 12, 2, 3
TEXT = np.random.default_rng(5).integers(0, 97, 3000)
YOUNG, GROWN = (1, 1, 1), (1, 1, 1, 1)
DONORS = (0, 1, 1, 2)
"""The stage of the young model that each one of the grown model begins as a copy of."""


class Momentum(Optimizer):
    """What `torch.optim.SGD` does, with weight decay apart from it, from the interface alone."""

    state_tensors = (StateTensor("momentum"),)
    flops_per_parameter = 100

    def step(self, gradient: Tensor, rate: float) -> None:
        matrices = sum(slot.size for slot in self.slots if len(slot.shape) >= 2)
        self.values[:matrices].mul_(1 - rate * self.settings.weight_decay)
        self.state["momentum"].mul_(self.settings.beta1).add_(gradient)
        self.values.add_(self.state["momentum"], alpha=-rate)


class Rowwise(Optimizer):
    """Momentum in bf16, divided by the root of the mean square of its row so far."""

    state_tensors = (
        StateTensor("momentum", dtype="bf16"),
        StateTensor("rows", shape=lambda parameter: parameter[:1]),
    )
    elementwise = False
    flops_per_parameter = 300

    def step(self, gradient: Tensor, rate: float) -> None:
        self.state["momentum"].mul_(self.settings.beta1).add_(gradient)
        first = 0
        for slot in self.slots:
            here = slice(slot.start, slot.start + slot.size)
            rows = self.state["rows"][first : first + slot.shape[0]]
            rows.add_(gradient[here].view(slot.shape[0], -1).square().mean(1))
            update = self.state["momentum"][here].float().view(slot.shape[0], -1) / (rows.unsqueeze(1).sqrt() + 1e-6)
            self.values[here].sub_(rate / (self.steps + 1) * update.flatten())
            first += slot.shape[0]


class TorchSgd(Optimizer):
    """`torch.optim.SGD` itself, tensor by tensor: what others are compared with."""

    state_tensors = ()
    flops_per_parameter = 100

    def __init__(self, values: Tensor, slots: Sequence[ParamSlot], learning: OptimConfig, *, offload: bool) -> None:
        super().__init__(values, slots, learning, offload=offload)
        self._weights = [torch.nn.Parameter(_part(values, slot)) for slot in slots]
        self._sgd = torch.optim.SGD(self._weights, lr=1.0, momentum=0.9)

    def step(self, gradient: Tensor, rate: float) -> None:
        for weight, slot in zip(self._weights, self.slots, strict=True):
            weight.grad = _part(gradient, slot)
            if weight.dim() > 1:
                weight.data.mul_(1 - rate * 0.1)
        for group in self._sgd.param_groups:
            group["lr"] = rate
        self._sgd.step()


def _part(flat: Tensor, slot: ParamSlot) -> Tensor:
    return flat[slot.start : slot.start + slot.size].view(slot.shape)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "momentum", Momentum)
    monkeypatch.setitem(OPTIMIZERS, "rowwise", Rowwise)
    monkeypatch.setitem(OPTIMIZERS, "torch-sgd", TorchSgd)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_bpe(["some words, and some more words"] * 20, 270)


def run_of(folder: Path, tokenizer: TextTokenizer, layers: tuple[int, ...], optimizer: str) -> Run:
    """One node a stage and one lane, so that microbatches are added up in the order of one process."""
    spec = ModelSpec(tiny("llama", num_hidden_layers=sum(layers)), seed=11)
    work = Workload(
        spec.shape, SEQUENCE, SAMPLES, MICROBATCHES, wire_dtype="fp32", compute_dtype="fp32", optimizer=optimizer
    )
    stages = tuple(Stage(count, (node,), (node,)) for node, count in enumerate(layers))
    plan = Plan(uniform_cluster(len(layers)), work, stages, (Lane(tuple(range(len(layers))), MICROBATCHES),))
    learning = OptimConfig(optimizer, rate=3e-2, warmup=1, iterations=20)
    node_config = NodeConfig(plan, spec.config.to_dict(), 11, learning, "tokens", "0" * 64)
    return Run(node_config, spec, tokenizer, folder, CoordinatorSettings(learning, 20))


def sampler_of(plan: Plan) -> BatchSampler:
    return BatchSampler(TEXT, SEQUENCE, 3, plan.microbatches, SAMPLES)


def reference_of(run: Run) -> ReferenceTrainer:
    plan = run.node_config.plan
    return ReferenceTrainer(plan, run.spec, run.node_config.learning, sampler_of(plan))


def nodes_trained(run: Run, until: int, origin: CheckpointOrigin | None = None) -> dict[int, StageExecutor]:
    """Many nodes under virtual time, from the start or from a checkpoint; in the end there is a checkpoint."""
    config, first = run.node_config, origin.manifest.iterations if origin else 0
    sampler = sampler_of(config.plan)
    executors = {
        node: build_stage_executor(stage, config, ["cpu"], sampler if stage == 0 else None)
        for node, stage in config.plan.stage_of.items()
    }
    store = CheckpointManager(run.checkpoints, config, run.spec, run.tokenizer, origin)
    cluster = VirtualCluster(
        config.plan,
        CoordinatorSettings(config.learning, until, resumed_from=first if origin else None, checkpoint_every=100),
        executors,
        checkpoint_store=store,
    )
    cluster.run()
    store.close()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    return executors


def assert_equal(executors: dict[int, StageExecutor], reference: ReferenceTrainer) -> None:
    """To the last bit, weights and optimizer state."""
    for node, executor in executors.items():
        ours, theirs = executor.tasks.weights, reference.stages[node].weights
        assert ours.steps == theirs.steps
        assert torch.equal(ours.read_state(0, ours.state_values), theirs.read_state(0, theirs.state_values))
        for name, mine in ours.optimizer.state.items():
            assert mine.dtype == theirs.optimizer.state[name].dtype and torch.equal(mine, theirs.optimizer.state[name])


@pytest.mark.parametrize(
    "optimizer",
    others_slow(["adamw8bit"], ["muon", "adamw", "sgd", "momentum", "rowwise"]),  # test_exact.py: adamw
)
def test_nodes_checkpoints_and_growth_follow_one_process(
    tmp_path: Path, tokenizer: TextTokenizer, optimizer: str
) -> None:
    young = run_of(tmp_path / "young", tokenizer, YOUNG, optimizer)
    reference = reference_of(young)
    before = [stage.weights.values.clone() for stage in reference.stages]
    for number in range(4):
        reference.iteration(number)
    nodes_trained(young, 2)
    origin = origin_of(young.checkpoints, young.node_config)
    assert_equal(nodes_trained(young, 4, origin), reference)
    assert not any(
        torch.equal(stage.weights.values, each) for stage, each in zip(reference.stages, before, strict=True)
    )

    larger = run_of(tmp_path / "larger", tokenizer, GROWN, optimizer)
    grown = grow(young_of(young.output), larger)
    assert grown.donors == DONORS
    origin = origin_of(larger.checkpoints, larger.node_config)
    assert (origin.manifest.iterations, origin.manifest.optimizer) == (4, optimizer)
    larger_reference = reference_of(larger)
    for stage, donor in enumerate(DONORS):
        larger_reference.stages[stage].weights.grow_from(reference.stages[donor].weights)
    for number in range(4, 6):
        larger_reference.iteration(number)
    assert_equal(nodes_trained(larger, 6, origin), larger_reference)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_gradient_descent_is_that_of_torch(tmp_path: Path, tokenizer: TextTokenizer, optimizer: str) -> None:
    ours, theirs = (reference_of(run_of(tmp_path, tokenizer, YOUNG, name)) for name in (optimizer, "torch-sgd"))
    for number in range(4):
        assert ours.iteration(number) == theirs.iteration(number)
    expected = theirs.weights()
    for name, each in ours.weights().items():
        assert torch.equal(each, expected[name]), name


@pytest.mark.slow
def test_a_model_learns_as_much_with_state_in_8_bits(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "TEXT", np.arange(3000) ** 2 % 97)  # which can be learned
    losses: dict[str, list[float]] = {}
    for optimizer in ("adamw", "adamw8bit"):
        run = run_of(tmp_path, tokenizer, YOUNG, optimizer)
        learning = replace(run.node_config.learning, rate=3e-3)
        trainer = reference_of(replace(run, node_config=replace(run.node_config, learning=learning)))
        losses[optimizer] = [trainer.iteration(number).loss for number in range(20)]
    assert losses["adamw"][-1] < losses["adamw"][0] - 1
    assert 0 < abs(losses["adamw8bit"][-1] - losses["adamw"][-1]) < 0.005


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_muon_is_that_of_torch_for_matrices_of_layers_and_adamw_for_the_rest(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    ours = reference_of(run_of(tmp_path, tokenizer, YOUNG, "muon")).stages[0].weights
    begun = ours.values.clone()
    theirs = {slot.name: torch.nn.Parameter(slot.of(begun).clone()) for slot in ours.slots}
    layers = {slot.name for slot in ours.slots if slot.name.endswith("_proj.weight")}
    assert len(layers) == 7 and len(theirs) == 12
    decay: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.1}
    muon = torch.optim.Muon(
        [theirs[name] for name in layers], **decay, momentum=0.9, adjust_lr_fn="match_rms_adamw", nesterov=True
    )
    others = [each for name, each in theirs.items() if name not in layers]
    groups = [{"params": [each], "weight_decay": (each.dim() > 1) * 0.1} for each in others]
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    for number in range(4):
        ours.gradient.copy_(noise(number, len(ours.values)))
        for slot in ours.slots:
            theirs[slot.name].grad = slot.of(ours.gradient).clone()
        for each in (muon, adamw):
            for group in each.param_groups:
                group["lr"] = 0.01 * (number + 1)
            each.step()  # type: ignore[no-untyped-call]
        ours.step(0.01 * (number + 1), 1.0)
    for slot in ours.slots:
        way, expected = (each - slot.of(begun) for each in (slot.of(ours.values), theirs[slot.name].detach()))
        apart = 0.02 if slot.name in layers else 1e-5  # torch multiplies matrices in bf16
        assert float((way - expected).norm() / expected.norm()) < apart, slot.name


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "sgd"])
def test_steps_with_state_in_host_memory_are_the_same(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece by piece, through two buffers, to the last bit."""
    monkeypatch.setattr(host_state, "HOST_PIECE", 1024)
    spec = ModelSpec(tiny("llama"), 3)
    learning = OptimConfig(optimizer, warmup=1, iterations=20)
    ours, theirs = (
        FlatParams(StageModel(spec, range(2), ends=True).trained_weights(), learning, offload=offload)
        for offload in (True, False)
    )
    assert len(ours.values) % 1024 and len(ours.values) > 10 * 1024
    for number in range(4):
        for each in (ours, theirs):
            each.gradient.copy_(noise(number, len(ours.values)))
            each.step(0.01, 0.5)
    for name, state in ours.optimizer.state.items():
        assert torch.equal(state, theirs.optimizer.state[name])
    assert torch.equal(ours.read_state(0, ours.state_values), theirs.read_state(0, theirs.state_values))


def test_state_of_any_type_and_shape_is_transferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_executor, "CHUNK_VALUES", 5000)
    replica, learner = (computer_of(1, seed=seed, optimizer="rowwise") for seed in (7, 8))
    size = len(replica.tasks.weights.values)
    for number in range(3):
        replica.tasks.weights.gradient.copy_(noise(number, size))
        stepped(replica, 2)
    slices = learner.run(PlanTransfer(StateSource("replica", (4,), (1,), (1.0,), 3)))
    assert 2 * size < sum(each.count for each in slices) < 2.1 * size
    for each in slices:
        assert learner.run(WriteState(each, *replica.run(ReadState(each.first, each.count, to=0))))
    assert torch.equal(state_of(replica), state_of(learner))
    assert learner.tasks.weights.optimizer.state["momentum"].dtype is torch.bfloat16
    learner.run(PlanTransfer(StateSource("neighbours", (4,), (2,), (1.0,), 0)))
    assert not any(each.any() for each in learner.tasks.weights.optimizer.state.values())


def test_files_name_the_optimizer_unless_it_is_the_default(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    for optimizer in ("adamw", "rowwise"):
        run = run_of(tmp_path / optimizer, tokenizer, YOUNG, optimizer)
        nodes_trained(run, 1)
        (place,) = run.checkpoints.complete()
        fields = read_json(place / MANIFEST)
        assert fields.get("optimizer") == (None if optimizer == "adamw" else optimizer)
        assert Manifest.from_json(fields) == verified(place)
        assert run.node_config.to_json()["learning"].get("optimizer") == fields.get("optimizer")
        assert run.node_config.plan.workload.to_json().get("optimizer") == fields.get("optimizer")
        assert NodeConfig.from_json(run.node_config.to_json()) == run.node_config
    stored = load_file(tmp_path / "rowwise" / "checkpoints" / "000001" / "stage-1.optimizer.safetensors")
    weights = load_file(tmp_path / "rowwise" / "checkpoints" / "000001" / "stage-1.weights.safetensors")
    assert {name: each.shape for name, each in stored.items()} == {
        **{f"momentum.{name}": each.shape for name, each in weights.items()},
        **{f"rows.{name}": each.shape[:1] for name, each in weights.items()},
    }


def test_a_job_names_its_optimizer() -> None:
    assert from_table(JobConfig, {"learning": {"optimizer": "sgd"}}).learning.optimizer == "sgd"
    choices = ", ".join(OPTIMIZERS)
    for said, end in (("adam", "; did you mean 'adamw'?"), ("lbfgs", "")):
        with pytest.raises(UserError) as error:
            from_table(JobConfig, {"learning": {"optimizer": said}})
        assert str(error.value) == f"learning.optimizer: '{said}' is none of {choices}{end}"
    with pytest.raises(UserError, match=r"workload\.optimizer: 'adam' is none of"):
        Workload(MODELS["llama-tiny"], optimizer="adam")


def test_an_optimizer_that_mixes_numbers_takes_no_newcomers() -> None:
    learning = OptimConfig("rowwise")
    with pytest.raises(
        UserError, match=r"learning\.optimizer: .* mixes the numbers .* choose averaging\.engine 'torch'"
    ):
        JobConfig(learning=learning)
    JobConfig(learning=learning, averaging=AveragingConfig("torch"))


def test_the_planner_counts_what_an_optimizer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = Workload(MODELS["llama-tiny"], optimizer="adamw", compute_dtype="fp32")
    parameters, working = adamw.stage_parameters(1, 4), adamw.working_bytes(1, 4)
    found: dict[str, Any] = {}
    for name in ("adamw", "adamw8bit", "muon", "sgd", "rowwise"):
        work = replace(adamw, optimizer=name)
        assert Workload.from_json(work.to_json()) == work
        found[name] = (
            (work.fixed_bytes(1, 4) - adamw.fixed_bytes(1, 4)) / parameters,
            work.state_bytes(1, 4) / parameters,
            work.optimizer_flops(1, 4) / parameters,
        )
    assert found == {
        "adamw": (0, 12, 250),
        "adamw8bit": (-6, 12, 2000),
        "muon": (-4, 8, 250 + 25 * 64),
        "sgd": (-4, 8, 180),
        "rowwise": (-6, 8, 300),
    }
    muon, ends = replace(adamw, optimizer="muon"), adamw.model.end_parameters
    assert adamw.fixed_bytes(0, 4) - muon.fixed_bytes(0, 4) == 4 * (adamw.stage_parameters(0, 4) - ends)
    assert adamw.fixed_bytes(1, 4) == 20 * parameters + working
    offloaded = {
        (name, offload): replace(adamw, optimizer=name, offload=offload)
        for name in ("adamw", "adamw8bit")
        for offload in ("averaging", "optimizer")
    }
    monkeypatch.setattr(workload, "HOST_PIECE", 0)
    held = {key: (work.fixed_bytes(1, 4) - working) / parameters for key, work in offloaded.items()}
    assert held == {
        ("adamw", "averaging"): 16,
        ("adamw", "optimizer"): 8,
        ("adamw8bit", "averaging"): 10,
        ("adamw8bit", "optimizer"): 8,
    }
    for work in offloaded.values():
        assert Workload.from_json(work.to_json()) == work
        assert replace(work, gradient_dtype="bf16").fixed_bytes(1, 4) == work.fixed_bytes(1, 4)
        assert work.optimizer_flops(1, 4) > adamw.optimizer_flops(1, 4)
    for codec in ("bf16", "int8"):  # and what encoding takes away is added to the next gradient
        assert replace(adamw, gradient_dtype=codec).fixed_bytes(1, 4) == 24 * parameters + working


def test_slots_are_one_after_another() -> None:
    weights = [ParamSlot("a", (3, 4), 0), ParamSlot("b", (5,), 12)]
    slots = Rowwise.state_slots(weights)
    assert [slot.name for slot in slots] == ["a", "b", "momentum.a", "momentum.b", "rows.a", "rows.b"]
    assert [slot.start for slot in slots] == [0, 12, 17, 29, 34, 37]
    assert [prod(slot.shape) for slot in slots] == [12, 5, 12, 5, 3, 5]


def test_planning_with_an_optimizer_takes_no_torch() -> None:
    program = "import sys, skippipe.workload, skippipe.optim.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
