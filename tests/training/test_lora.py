"""LoRA: adapters are trained over many nodes as in one process, and all that knows a run knows them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.manager import export, export_adapter
from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import fingerprint, load, load_stage, read_outline
from skippipe.model.lora import LoraConfig, initial, is_adapter
from skippipe.model.model_spec import ModelSpec
from skippipe.model.stage_step import StageStep
from skippipe.model_shape import MODELS
from skippipe.optim.config import OptimConfig
from skippipe.plan import Plan
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.simulation.fault_injection import kill
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.runtime.train_role import build_stage_executor
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import CheckpointConfig, ModelConfig, RecoveryConfig
from skippipe.workload import Workload
from tests.helpers.exact_training import SKIPPED, assert_exact, plan_of
from tests.helpers.pretrained_jobs import NEAR, folder_of, job_in, loss_of_transformers, trained

torch.set_num_threads(1)
LORA = LoraConfig(rank=4, alpha=8)


def lora_job(tmp_path: Path, family: str = "llama", **others: Any) -> JobConfig:
    dtype = torch.bfloat16 if family == "qwen3" else torch.float32
    job = job_in(tmp_path, folder_of(family, tmp_path / "model", dtype=dtype), **{"lora": LORA, **others})
    return replace(job, learning=replace(job.learning, rate=0.02, warmup=0))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama-tied", []),
        ("qwen3", ["q_proj", "mlp.down_proj"]),
        pytest.param("qwen3_moe", [], marks=pytest.mark.slow),
    ],
)
def test_many_nodes_are_one_process(family: str, targets: list[str]) -> None:
    split, recompute = family == "qwen3", family == "qwen3_moe"
    plan, spec = plan_of(SKIPPED, family=family, split=split, activation_checkpointing=recompute, adapter_parameters=99)
    assert_exact(plan, ModelSpec(spec.config, spec.seed, replace(LORA, targets=targets)))


def test_weights_that_stay_are_held_in_the_type_of_computing_and_give_the_same_bits() -> None:
    _, spec = plan_of(SKIPPED, family="qwen3_moe")
    learning, losses = OptimConfig(iterations=1, warmup=0), []
    for lora in (LORA, None):
        step = StageStep(ModelSpec(spec.config, 3, lora), range(5), learning, ends=True, compute_dtype="bf16")
        tokens = torch.arange(24).view(2, 12)
        loss, gradient = step.head((0, 0), step.begin((0, 0), tokens), tokens + 1)
        step.backward((0, 0), gradient)
        losses.append((float(loss), gradient))
        held = {each.dtype for _, each in step.model.frozen_weights()}
        assert held == ({torch.float32, torch.bfloat16} if lora else set())
        if lora:  # as one sequence of numbers, in whatever types
            state = step.weights.read_state(0, step.weights.state_values)
            again = StageStep(ModelSpec(spec.config, 4, lora), range(5), learning, ends=True, compute_dtype="bf16")
            again.weights.write_state(0, state)
            pairs = zip(step.model.named_weights(), again.model.named_weights(), strict=True)
            assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)
    assert losses[0][0] == losses[1][0]
    assert torch.equal(losses[0][1], losses[1][1])


def test_adapters_begin_as_in_peft_and_wherever_a_layer_is_made() -> None:
    name = "model.layers.3.self_attn.q_proj.lora_A.weight"
    drawn = initial(name, (8, 4096), 5)
    assert drawn.abs().max() <= 1 / 64 < 1.01 * drawn.abs().max(), "kaiming_uniform_(a=√5): within 1/√inputs"
    assert torch.equal(drawn, initial(name, (8, 4096), 5))
    assert not torch.equal(drawn, initial(name, (8, 4096), 6))
    assert not initial(name.replace("lora_A", "lora_B"), (4096, 8), 5).any()


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3"])
def test_a_run_begins_with_the_model_and_stores_only_adapters(family: str, tmp_path: Path) -> None:
    job = lora_job(tmp_path, family, checkpoint=CheckpointConfig(every=1))
    run_setup = build_run(job)
    folder, run = Path(job.model.weights), Path(job.output)
    first, second = trained(run_setup, "virtual")
    assert first == pytest.approx(loss_of_transformers(folder, run_setup), rel=NEAR)
    assert second != pytest.approx(first, rel=100 * NEAR)
    once = build_run(replace(job, output=str(tmp_path / "once")))
    assert trained(once, "one-process") == pytest.approx([first, second], rel=1e-5)
    newest = run / "checkpoints" / "000002"
    for file in newest.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert all(is_adapter(name) for name in opened.keys()), file  # noqa: SIM118
    base = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "base", dtype=torch.float32)
    theirs = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    for name, each in base.named_parameters():
        assert torch.equal(each, theirs[name]), name
    stored = (run / "checkpoints" / "base" / "model-00001-of-00003.safetensors").stat().st_size
    assert stored < (4 if family == "llama" else 2.5) * sum(each.numel() for each in theirs.values())

    # What was trained is the same, merged or not, wherever it is loaded from.
    merged = dict(AutoModelForCausalLM.from_pretrained(run / "model").named_parameters())
    export(newest, tmp_path / "exported")
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "exported").named_parameters())
    staged = [pair for stage in load(run).stages for pair in stage.named_weights()]
    outline = read_outline(run, "2,3")
    alone = [pair for number in (0, 1) for pair in load_stage(outline, number).named_weights()]
    moved = 0
    for found in (exported, dict(staged), dict(alone)):
        for name, each in merged.items():
            torch.testing.assert_close(found[name], each, rtol=0, atol=1e-7, msg=name)
            moved += not torch.equal(each, theirs[name])
    assert moved == 3 * 7 * 5, "all linear maps of five layers, and nothing else"
    adapter = export_adapter(newest, tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    down, up = (weights[f"base_model.model.model.layers.4.mlp.up_proj.lora_{part}.weight"] for part in "AB")
    name = "model.layers.4.mlp.up_proj.weight"
    torch.testing.assert_close(merged[name], theirs[name] + adapter.lora.scale * up @ down)
    before = fingerprint(newest)
    damaged = run / "checkpoints" / "base" / "model-00001-of-00003.safetensors"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert fingerprint(newest) != before, "other weights under the same adapters"


@pytest.mark.slow  # test_state_transfer.py
def test_a_lost_stage_and_a_node_that_joins_get_both_halves(tmp_path: Path) -> None:
    """A node of stage 2 comes back from its replica; all of stage 1 are lost, and come back from a checkpoint."""
    job = lora_job(tmp_path, checkpoint=CheckpointConfig(every=1), iterations=8, cluster="datacentre:6")
    run_setup = build_run(job).with_first_checkpoint()
    run, config, sampler = run_setup.run, run_setup.node_config, run_setup.node_config.sampler()
    plan = config.plan
    assert [len(stage.nodes) for stage in plan.stages] == [2, 2, 2]

    def executor(node: int, current: Plan) -> StageExecutor:
        """With other weights than those in the folder: what the seed makes."""
        return build_stage_executor(current.stage_of[node], config, ["cpu"], sampler, packing=False)

    executors = {node: executor(node, plan) for node in plan.stage_of}
    cluster = VirtualCluster(
        plan,
        run.resumed_settings,
        executors,
        checkpoint_store=run.checkpoint_manager,
        builder=executor,
        faults=[
            kill(plan.stages[2].nodes[0]).at(iteration=1, during="forward").back_after(1e-4),
            *(kill(node).at(iteration=5, during="forward").back_after(1e-4) for node in plan.stages[1].nodes),
        ],
    )
    cluster.run()
    run.checkpoint_manager.close()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    texts = [event.text for _, event in cluster.events]
    assert any("from the newest checkpoint" in text for text in texts), texts
    assert any(" from 'rack-" in text for text in texts), texts
    weights = AutoModelForCausalLM.from_pretrained(job.model.weights).state_dict()
    found = [each for each in cluster.executor_of.values() if isinstance(each, StageExecutor)]
    assert len(set(found) - set(executors.values())) >= 3, "those that came back"
    for each in found:
        for name, weight in each.tasks.model.named_weights():
            assert torch.equal(weight, weights[name]), name
        assert each.tasks.weights.optimizer.state["exp_avg"].any()


@pytest.mark.slow
def test_an_adapter_is_a_start(tmp_path: Path) -> None:
    job = lora_job(tmp_path)
    trained(build_run(job), "virtual")
    export_adapter(Path(job.output) / "checkpoints" / "000002", tmp_path / "adapter")
    more = replace(job, lora=LoraConfig(weights=str(tmp_path / "adapter")), output=str(tmp_path / "more"))
    run_setup = build_run(more)
    assert run_setup.spec.lora == replace(LORA, targets=run_setup.spec.lora.targets)
    found = trained(run_setup, "virtual")[0]
    assert found == pytest.approx(loss_of_transformers(Path(job.output) / "model", run_setup), rel=NEAR)

    def with_settings(**settings: Any) -> RunSetup:
        file = tmp_path / "adapter" / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
        return build_run(more)

    with pytest.raises(UserError, match=r"lora\.rank: 8 here, 4 in "):
        build_run(replace(more, lora=LoraConfig(rank=8, weights=str(tmp_path / "adapter"))))
    with pytest.raises(UserError, match="has use_dora true, which is not supported"):
        with_settings(use_dora=True)
    with pytest.raises(UserError, match="'pissa_niter_4', which changes the model too"):
        with_settings(use_dora=False, init_lora_weights="pissa_niter_4")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    weights.pop(min(weights))
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"lora_A\.weight' \[4, 48\] is not there"):
        with_settings(init_lora_weights=True).with_first_checkpoint()


def test_what_makes_no_sense_is_said_in_one_line(tmp_path: Path) -> None:
    weights = ModelConfig(weights="somewhere")
    for wrong, expected in (
        ({"lora": LORA}, r"lora: adapters are for a model that exists; name its folder: model\.weights"),
        ({"lora": LoraConfig(alpha=7)}, r"lora\.rank: without one there are no adapters"),
        ({"lora": LORA, "model": weights, "survive": RecoveryConfig(lost_stage="neighbours")}, r"survive\.lost_stage"),
    ):
        with pytest.raises(UserError, match=expected):
            JobConfig(**wrong)
    job = lora_job(tmp_path, lora=replace(LORA, targets=["q_proj", "c_attn"]))
    with pytest.raises(UserError, match=r"lora\.targets: no linear map of the layers is called 'c_attn'; there"):
        build_run(job)


def test_plans_know_that_layers_are_repeated() -> None:
    """Three turns at most, and on average one and a half."""
    model = MODELS["llama-1.5b"]
    once = Workload(model, adapter_parameters=model.adapter_parameters(96), bridge_parameters=1000, bridge_rank=8)
    healing = replace(once, repeats=2, mean_repeats=0.5)
    assert Workload.from_json(healing.to_json()) == healing
    layer, adapters = 4 * 2 * model.layer_flops(4096), 2 * 8192 * 4 * once.adapter_parameters
    assert healing.forward_flops(4) - once.forward_flops(4) == 0.5 * layer - 0.5 * adapters
    ratio = replace(healing, head_ratio=0.5)
    assert ratio.head_flops(4) == replace(ratio, mean_repeats=0.0).head_flops(4), "the head does not repeat"
    assert healing.trained_parameters(0, 4) == 4 * once.adapter_parameters + 1000
    assert 2.8 < healing.held_bytes(4) / once.held_bytes(4) < 3, "of every turn"
    gradients = 2 * 4 * once.adapter_parameters
    assert healing.fixed_bytes(1, 4) - once.fixed_bytes(1, 4) == gradients, "of all turns at once"


def test_plans_know_that_little_is_averaged() -> None:
    for name in ("llama-1.5b", "llama-8b"):
        model = MODELS[name]
        full = Workload(model)
        lora = replace(full, adapter_parameters=model.adapter_parameters(16))
        for stage in (0, 1):
            assert lora.gradient_bytes(stage, 4) * 50 <= full.gradient_bytes(stage, 4)
            assert lora.fixed_bytes(stage, 4) < 0.4 * full.fixed_bytes(stage, 4)
        assert 1 < lora.forward_flops(4) / full.forward_flops(4) < 1.03
        assert 0.5 < lora.backward_flops(4) / full.backward_flops(4) < 0.53, "no gradients of weights that stay"
        assert lora.trained_share < 0.03
        assert Workload.from_json(lora.to_json()) == lora
    tiny = ModelSpec(plan_of(SKIPPED)[1].config, 0, LORA)
    assert tiny.shape.adapter_parameters(4) == 4 * (4 * 32 + 3 * (32 + 48) + 32 + 16 + 16 + 32)
