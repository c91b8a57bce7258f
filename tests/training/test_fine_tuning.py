"""Fine-tuning on conversations over many nodes is what transformers and torch do with each of them alone."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skippipe.errors import UserError
from skippipe.optim.config import OptimConfig
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import BatchConfig, DataConfig, ModelConfig, PipelineConfig, TransportConfig
from tests.helpers.chats import chat_tokenizer, chats
from tests.helpers.models import tiny
from tests.helpers.pretrained_jobs import trained
from tests.helpers.processes import Command

STEPS, SEQUENCE = 10, 48
LEARNING = OptimConfig(rate=1e-3, warmup=2, clip=1.0)
NEAR = 1e-4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_in(tmp_path / "model")


def model_in(folder: Path, family: str = "llama") -> Path:
    tokenizer = chat_tokenizer()
    torch.manual_seed(7)
    made = AutoModelForCausalLM.from_config(tiny(family, vocab_size=tokenizer.size))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for each in made.parameters():
            each.add_(0.1 * torch.randn_like(each))
    made.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def job_of(folder: Path, weights: Path, **data: Any) -> JobConfig:
    text = folder / "chats.jsonl"
    text.write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats(60)))
    return JobConfig(
        cluster="datacentre:4",
        output=str(folder / "run"),
        iterations=STEPS,
        model=ModelConfig(weights=str(weights)),
        data=DataConfig([str(text)], folder=str(folder / "tokens"), **data),
        batch=BatchConfig(sequence=SEQUENCE, samples=2, microbatches=2),
        pipeline=PipelineConfig(stages=3, skip="0", strategy="dtfm-skip", budget_s=0.1),
        transport=TransportConfig(wire="fp32"),
        learning=LEARNING,
    )


def conversations_of(run_setup: RunSetup, iteration: int) -> list[tuple[int, ...]]:
    """The tokens, all but the last, of every conversation of an iteration: samples cut where others begin."""
    found = []
    for microbatch in range(run_setup.plan.microbatches):
        inputs, _ = run_setup.sampler.batch(iteration, microbatch)
        starts = run_setup.sampler.starts(iteration, microbatch)
        assert starts is not None
        for row, begins in zip(inputs, starts, strict=True):
            places = [*begins.nonzero()[0].tolist(), len(row)]
            found += [tuple(row[a:b].tolist()) for a, b in itertools.pairwise(places)]
    return found


def by_transformers(folder: Path, run_setup: RunSetup, *, answers_only: bool = True) -> tuple[list[float], Any]:
    """Each conversation alone, the loss over all answers of an iteration, clipping and AdamW of torch."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    for messages in chats(60):
        ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        labels, at = [], 0
        for message in messages:  # turn by turn, as the template writes them
            head = tokenizer.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False)
            body = tokenizer.encode(f"{message['content']}<|im_end|>\n", add_special_tokens=False)
            counts = message["role"] == "assistant"
            labels += [-100 if answers_only else each for each in head]
            labels += [each if counts or not answers_only else -100 for each in body]
            at += len(head) + len(body)
        assert at == len(ids) == len(labels)
        kept = SEQUENCE + 1  # what is longer ends there
        known[tuple(ids[:-1][:SEQUENCE])] = torch.tensor([ids[:kept]]), torch.tensor([labels[:kept]])
    groups = [
        {"params": [each for each in model.parameters() if (each.ndim >= 2) is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    schedule = run_setup.job.schedule
    optimizer = torch.optim.AdamW(groups, betas=(schedule.beta1, schedule.beta2), eps=schedule.epsilon)
    losses = []
    for iteration in range(STEPS):
        total, answers = torch.zeros(()), 0
        for tokens in conversations_of(run_setup, iteration):
            if tokens not in known:
                assert len(set(tokens)) == 1, "what is no conversation is padding"
                continue
            whole, targets = known[tokens]
            logits = model(whole).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, targets[0, 1:], reduction="sum")
            answers += int((targets[0, 1:] >= 0).sum())
        loss = total / answers
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(iteration)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize(
    ("data", "family"),
    [
        pytest.param({}, "llama", id="answers"),
        pytest.param({"packing": False}, "llama", id="unpacked", marks=pytest.mark.slow),
        pytest.param({"loss_on": "all"}, "llama", id="all", marks=pytest.mark.slow),
        pytest.param({}, "mistral", id="sliding", marks=pytest.mark.slow),
    ],
)
def test_equal_to_transformers_and_torch(data: dict[str, Any], family: str, tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", family)
    run_setup = build_run(job_of(tmp_path, folder, **data))
    packed = max(len(conversations_of(run_setup, number)) for number in range(STEPS))
    assert (packed > 2 * 4) is (data.get("packing", True)), "several in a sample, if they are packed"
    expected, model = by_transformers(folder, run_setup, answers_only=data.get("loss_on") != "all")
    assert trained(run_setup) == pytest.approx(expected, rel=NEAR)
    assert expected[-1] < 0.98 * expected[0]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    for (name, ours), theirs in zip(found.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=NEAR, atol=3e-5, msg=partial("{}: {}".format, name))


def test_jobs_that_do_not_fit(tmp_path: Path, model: Path) -> None:
    job = job_of(tmp_path, model)
    with pytest.raises(UserError, match="no conversation has an answer in its first 2 tokens"):
        build_run(replace(job, batch=replace(job.batch, sequence=1)))
    Path(job.data.texts[0]).write_text('{"text": "what is a stage of the model that nodes hold"}\n' * 50)
    for said, complaint in (({"loss_on": "all"}, "loss on all: is for"), ({"packing": False}, "data.packing: is for")):
        with pytest.raises(UserError, match=complaint):
            build_run(replace(job, data=replace(job.data, folder=str(tmp_path / "more"), **said)))


@pytest.mark.slow
def test_over_real_processes(skippipe: Command, tmp_path: Path, model: Path) -> None:
    job = job_of(tmp_path, model)
    expected = trained(build_run(replace(job, output=str(tmp_path / "other"))))
    file = tmp_path / "job.toml"
    file.write_text(
        f'cluster = "datacentre:4"\noutput = "{job.output}"\niterations = {STEPS}\n[model]\nweights = "{model}"\n'
        f'[data]\ntexts = ["{job.data.texts[0]}"]\n[batch]\nsequence = {SEQUENCE}\nsamples = 2\nmicrobatches = 2\n'
        '[pipeline]\nstages = 3\nskip = "0"\nstrategy = "dtfm-skip"\nbudget_s = 0.1\n[transport]\nwire = "fp32"\n'
        "[learning]\nrate = 1e-3\nwarmup = 2\n"
    )
    done = skippipe("train", file)
    assert done.code == 0, done.err
    assert "conversations in" in done.out
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [each["loss"] for each in metrics] == pytest.approx(expected, rel=NEAR)
