"""Training that begins with the weights of a Hugging Face folder: its first loss is that of transformers."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skippipe.data.tokenizer import train_bpe
from skippipe.errors import UserError
from skippipe.training.backends import BACKENDS
from skippipe.training.build_run import build_run
from skippipe.training.job_tables import ModelConfig
from tests.helpers.models import FAMILIES
from tests.helpers.pretrained_jobs import NEAR, Losses, folder_of, job_in, loss_of_transformers, trained
from tests.helpers.processes import Command
from tests.helpers.quick import others_slow


@pytest.mark.parametrize("family", others_slow(["llama"], [each for each in FAMILIES if each != "llama"]))
def test_the_first_loss_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "model")
    if family == "llama":
        assert len(list(folder.glob("*.safetensors"))) > 1, "in several files"
    run_setup = build_run(job_in(tmp_path, folder))
    first, second = trained(run_setup, "virtual")
    expected = loss_of_transformers(folder, run_setup)
    assert first == pytest.approx(expected, rel=NEAR)
    assert second != first
    (tmp_path / "other").mkdir()
    random = build_run(job_in(tmp_path / "other", "", model=ModelConfig(config=str(folder))))
    losses = Losses()
    BACKENDS["one-process"](random, losses, lambda: 0)
    assert losses.found[0] != pytest.approx(expected, rel=100 * NEAR), "without, weights are random"


@pytest.mark.parametrize("is_written", others_slow([True], [False]))
def test_a_deeper_model_begins_with_copies_of_layers(is_written: bool, tmp_path: Path) -> None:
    folder, deeper = folder_of("qwen3", tmp_path / "model"), tmp_path / "deeper"
    model = ModelConfig(layers=8, weights=str(folder))
    if is_written:
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": 8, "layer_types": config["layer_types"][:1] * 8}
        deeper.mkdir()
        (deeper / "config.json").write_text(json.dumps(config))
        model = ModelConfig(config=str(deeper), weights=str(folder))
    job = job_in(tmp_path, folder, model=model, iterations=1)
    run_setup = build_run(replace(job, learning=replace(job.learning, rate=1e-30)))
    (loss,) = trained(run_setup, "virtual")
    made, weights = tmp_path / "run" / "model", AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert loss == pytest.approx(loss_of_transformers(made, run_setup), rel=NEAR)
    found = AutoModelForCausalLM.from_pretrained(made).state_dict()
    for layer, donor in enumerate((0, 1, 2, 3, 1, 2, 3, 4)):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(found[name.format(layer)], weights[name.format(donor)]), layer
    assert torch.equal(found["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])


def test_one_process_begins_with_them_too(tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path / "model", dtype=torch.bfloat16)
    run_setup = build_run(job_in(tmp_path, folder))
    assert trained(run_setup, "one-process")[0] == pytest.approx(loss_of_transformers(folder, run_setup), rel=NEAR)


def test_a_model_comes_out_as_it_went_in_where_nothing_is_learned(tmp_path: Path) -> None:
    folder = folder_of("llama-tied", tmp_path / "model", shard="1GB")
    job = job_in(tmp_path, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    run_setup = build_run(replace(job, learning=replace(job.learning, rate=1e-30), iterations=1))
    trained(run_setup, "virtual")
    settings = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert settings["temperature"] == 0.6
    assert settings["eos_token_id"] == 0, "of the tokenizer"
    before, after = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, tmp_path / "run" / "model"))
    theirs = dict(before.named_parameters())
    for name, each in after.named_parameters():
        assert torch.equal(each, theirs[name]), name
    assert after.config.vocab_size == before.config.vocab_size


def test_command_and_resume(skippipe: Command, tmp_path: Path) -> None:
    """Over real processes, each of which gets the tensors of its stage; a checkpoint of none is no checkpoint lost."""
    folder, job = folder_of("llama", tmp_path / "model"), job_in(tmp_path, "x")
    file = tmp_path / "job.toml"
    file.write_text(
        f'cluster = "datacentre:4"\noutput = "{job.output}"\niterations = 2\n[model]\nweights = "{folder}"\n'
        f'[data]\ntexts = ["{job.data.texts[0]}"]\nfolder = "{job.data.folder}"\n'
        "[batch]\nsequence = 16\nsamples = 2\nmicrobatches = 4\n"
        '[pipeline]\nstages = 3\nstrategy = "dtfm-skip"\nbudget_s = 0.1\n[checkpoint]\nevery = 2\n'
        '[transport]\nwire = "fp32"\n[compute]\ndtype = "fp32"\n'
    )
    done = skippipe("train", file)
    assert done.code == 0, done.err
    assert f"begins with the weights in {folder}; no stage is skipped, as neither" in done.out
    expected = loss_of_transformers(folder, build_run(replace(job, model=ModelConfig(weights=str(folder)))))
    metrics = [json.loads(line) for line in (Path(job.output) / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["loss"] == pytest.approx(expected, rel=NEAR)
    done = skippipe("train", file, "--resume", "--iterations", "3")
    assert done.code == 0, done.err
    metrics = [json.loads(line) for line in (Path(job.output) / "metrics.jsonl").read_text().splitlines()]
    assert [each["iteration"] for each in metrics] == [1, 2, 3], "it goes on, and does not begin again"


def test_what_does_not_fit_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("llama", tmp_path / "model")
    with pytest.raises(UserError, match=r"model\.config: 'llama-30m', and model\.weights has a"):
        build_run(job_in(tmp_path, folder, model=ModelConfig(config="llama-30m", weights=str(folder))))
    with pytest.raises(UserError, match=r"model\.layers: 2, and model\.weights has 5: a model gets more layers, not"):
        build_run(job_in(tmp_path, folder, model=ModelConfig(layers=2, weights=str(folder))))
    job = job_in(tmp_path, folder)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    train_bpe([f"{number} {number * 7919}" for number in range(3_000)], 900).save(tokenizer)
    with pytest.raises(UserError, match=r"has \d+ tokens, and the model in .* knows \d+"):
        build_run(replace(job, data=replace(job.data, tokenizer=str(tokenizer), folder=str(tmp_path / "more"))))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        build_run(job)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match="no weights in safetensors"):
        build_run(job)
    with pytest.raises(UserError, match="no such folder"):
        build_run(job_in(tmp_path, tmp_path / "nowhere"))
    (tmp_path / "earlier" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="'skippipe export' makes a folder"):
        build_run(job_in(tmp_path, tmp_path / "earlier"))

    def no_network(*_: Any) -> Any:
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    with pytest.raises(UserError) as refused:
        build_run(job_in(tmp_path, "models/a-model"))
    assert str(refused.value).startswith(
        "model.weights: there is no folder 'models/a-model' here, and the Hugging Face hub could not be asked for it "
        "(no network); if it is a folder, check the path; if it is a name on the hub: 'hf download models/a-model --"
    )
