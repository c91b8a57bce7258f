"""Training over nodes beside one process with transformers, peft and torch's AdamW. Not part of the suite, which does
without peft:

make test-peft
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.manager import export_adapter
from skippipe.model.lora import LoraConfig
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import BatchConfig, CheckpointConfig
from tests.helpers.models import FAMILIES
from tests.helpers.pretrained_jobs import folder_of, job_in, loss_of_transformers, trained

peft: Any = pytest.importorskip("peft")

torch.set_num_threads(1)
STEPS = 10
NEAR = 1e-4
ALL = LoraConfig(rank=4, alpha=8)
SOME = LoraConfig(rank=3, alpha=5, targets=["q_proj", "v_proj"])
FULL = LoraConfig()


def job_of(tmp_path: Path, family: str, lora: LoraConfig) -> JobConfig:
    weights = folder_of(family, tmp_path / "model")
    if family == "qwen3_moe":  # one process as it is here has no balancing loss
        config = json.loads((weights / "config.json").read_text())
        (weights / "config.json").write_text(json.dumps({**config, "router_aux_loss_coef": 0.0}))
    job = job_in(tmp_path, weights, lora=lora, iterations=STEPS, checkpoint=CheckpointConfig(every=STEPS))
    learning = replace(job.learning, rate=5e-3 if lora.rank else 5e-4, warmup=2, clip=0.5)
    return replace(job, learning=learning, batch=BatchConfig(sequence=16, samples=2, microbatches=6))


def losses_of_peft(model: Any, run_setup: RunSetup) -> list[float]:
    """Trains the model in place: whole batches, torch's own clipping and AdamW."""
    settings, plan, sampler = run_setup.job.schedule, run_setup.plan, run_setup.node_config.sampler()
    weights = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in weights if each.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [each for each in weights if each.dim() < 2], "weight_decay": 0.0},
    ]
    betas = settings.beta1, settings.beta2
    optimizer = torch.optim.AdamW([each for each in groups if each["params"]], betas=betas, eps=settings.epsilon)
    losses = []
    for number in range(STEPS):
        batches = [sampler.batch(number, index) for index in range(plan.microbatches)]
        inputs, labels = (torch.cat([torch.from_numpy(each) for each in side]) for side in zip(*batches, strict=True))
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate_at(number)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        pytest.param(family, lora, id=f"{name}-{family}")
        for name, lora in {"all": ALL, "some": SOME, "full": FULL}.items()
        for family in FAMILIES
        if family != "deepseek_v3" or not lora.rank  # its maps have names of their own, and its layers different ones
    ],
)
def test_ten_steps_are_those_of_peft(family: str, lora: LoraConfig, tmp_path: Path) -> None:
    job = job_of(tmp_path, family, lora)
    run_setup, run = build_run(job), Path(job.output)
    found = trained(run_setup, "virtual")
    model: Any = AutoModelForCausalLM.from_pretrained(job.model.weights, dtype=torch.float32)
    if lora.rank:
        export_adapter(run / "checkpoints" / "000000", tmp_path / "begun")
        model = peft.PeftModel.from_pretrained(model, tmp_path / "begun", is_trainable=True)
        count = sum(each.numel() for each in model.parameters() if each.requires_grad)
        assert count == run_setup.plan.workload.adapter_parameters * run_setup.spec.layers
    expected = losses_of_peft(model, run_setup)
    assert found == pytest.approx(expected, rel=NEAR)
    assert expected[-1] < 0.99 * expected[0], "it has learned something"

    # What was trained gives the same logits: as our complete model, and as our adapter in peft.
    tokens = torch.arange(40).view(2, 20) % 97
    complete = AutoModelForCausalLM.from_pretrained(run / "model")
    with torch.no_grad():
        theirs, ours = model(tokens).logits, complete(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    if not lora.rank:
        return
    export_adapter(run / "checkpoints" / f"{STEPS:06d}", tmp_path / "ended")
    base = AutoModelForCausalLM.from_pretrained(job.model.weights, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "ended")
    with torch.no_grad():
        torch.testing.assert_close(adapted(tokens).logits, ours, rtol=1e-5, atol=1e-5)

    # And back: what peft has trained is where the next run here begins.
    model.save_pretrained(tmp_path / "theirs")
    written = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert written.keys() == load_file(tmp_path / "ended" / "adapter_model.safetensors").keys()
    again = build_run(
        replace(job, lora=LoraConfig(weights=str(tmp_path / "theirs")), output=str(tmp_path / "again"), iterations=1)
    )
    assert (again.spec.lora.rank, again.spec.lora.alpha) == (lora.rank, lora.alpha)
    first = trained(again, "virtual")[0]
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert first == pytest.approx(loss_of_transformers(tmp_path / "merged", again), rel=NEAR)
