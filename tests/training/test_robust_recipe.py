"""The commands of docs/training.md, "A model that is good whole and without stages" and "Healing over nodes", one after
another over processes: a smaller model is trained, grows and is trained in sandwiches while a node is killed, exported,
healed by nodes while another is killed, and answers with half of its stages."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.bridges_file import StandInsInfo, bridges_info
from skippipe.data.documents import source
from skippipe.inference.cached_stage import logits
from skippipe.inference.checkpoint_loader import load
from skippipe.inference.likelihood import SubsetModel
from skippipe.stage_subset import StageSubset
from skippipe.transport.addresses import free_port
from tests.helpers.processes import Command as CommandHere
from tests.helpers.processes import wait_for
from tests.helpers.serve_process import Command, Server

torch.set_num_threads(1)
STAGES, BRIDGES = 6, 8
SMALL, WHOLE = 16, 42
"""Iterations after which the smaller model grows, and after which training ends."""
HEALING = 30
"""Iterations of healing."""
SANDWICHES = "2 x 0 & 1/2 + 2 x 0 & 1/2 + 5 x 0 & 1/2"
KEPT = (0, 2, 4)
WAIT_S = 300.0  # on a busy machine; a third of that on an idle core
MODEL = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "num_hidden_layers": STAGES,
}
JOB = """
output = "{folder}/run"
iterations = {iterations}
cluster = "datacentre:7"
model.config = "{folder}/model.json"
data = {{ texts = ["{folder}/text.txt"], vocabulary = 400, folder = "{folder}/tokens" }}
batch = {{ sequence = 32, samples = 8, microbatches = 30 }}
pipeline = {{ stages = {stages}, max_slots = 6, budget_s = 0.5 }}
recipe = {{ skip = "1/3 until {grow}, {sandwiches}", grow = "{grow}", bridges = {bridges} }}
learning = {{ rate = 1e-2, warmup = 4 }}
checkpoint.every = 4
"""
HEAL = """
output = "{folder}/run-heal"
iterations = {iterations}
cluster = "datacentre:7"
model.weights = "{folder}/fitted"
data = {{ texts = ["{folder}/text.txt"], folder = "{folder}/tokens-heal" }}
batch = {{ sequence = 32, samples = 8, microbatches = 30 }}
pipeline = {{ max_slots = 6, budget_s = 0.5 }}
recipe = {{ skip = "1/3 & 2 x 1/2", heal = "0%", distill = 0.9, distill_hidden = 1.0 }}
learning = {{ rate = 2e-3, warmup = 4 }}
checkpoint.every = 4
"""


@pytest.fixture
def commands() -> Iterator[ExitStack]:
    """Ends all processes that are left."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
def test_a_model_that_is_good_whole_and_without_half_of_its_stages(
    tmp_path: Path, skippipe: CommandHere, commands: ExitStack
) -> None:
    job = write_job(tmp_path)
    text, unseen = tmp_path / "text.txt", tmp_path / "unseen.txt"

    def done(*words: object) -> str:
        ran = skippipe(*map(str, words))
        assert ran.code == 0, ran.err
        return ran.out

    # 1: the smaller model; then the whole one in sandwiches, while the only node of a stage is killed
    run = tmp_path / "run"
    lines = trained_through_a_loss(commands, run, job, after=SMALL)
    assert [each["iteration"] for each in lines] == list(range(1, WHOLE + 1))
    assert lines[-1]["loss"] < lines[SMALL]["loss"] < lines[0]["loss"]
    (grown,) = (each for each in events_of(run) if each["kind"] == "grown")
    assert (grown["iteration"], grown["text"]) == (SMALL + 1, "4 layers become 6, copies of 0 1 2 1 2 3")

    # 2: an ordinary model to others
    model, fitted, healed = (tmp_path / name for name in ("model", "fitted", "healed"))
    done("export", run, model)
    assert bridges_info(model, STAGES) == StandInsInfo((1,) * STAGES, bridges=BRIDGES)
    tokens = torch.arange(48).view(2, 24)
    ours = whole_logits(model, tokens)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(model)(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    # 3: bridges of the training are fitted anew, beside repeats; nodes train them, of which one is killed; and the
    # whole model stays
    options = ("--sequence", 32, "--tokens", 0)
    found = json.loads(done("heal", model, "--data", text, "--held-out", unseen, "-o", fitted, *options, "--json"))
    assert (found["bridges"], found["new_bridges"], found["new_adapters"]) == (BRIDGES, True, True)
    job = tmp_path / "heal.toml"
    job.write_text(HEAL.format(folder=tmp_path, iterations=HEALING))
    lines = trained_through_a_loss(commands, tmp_path / "run-heal", job)
    assert [each["iteration"] for each in lines] == list(range(1, HEALING + 1))
    done("export", tmp_path / "run-heal", healed)
    ranks = {name: found[name] for name in ("bridges", "adapters", "repeats")}
    assert bridges_info(healed, STAGES) == StandInsInfo((1,) * STAGES, **ranks)
    assert torch.equal(whole_logits(healed, tokens), ours)

    # 4: with half of the stages
    before, between, after = (
        halves(done("eval", each, "--text", unseen, "--keep", "1/2", "--json")) for each in (model, fitted, healed)
    )
    assert after[STAGES] == between[STAGES] == before[STAGES], "whole"
    assert after[STAGES // 2] < between[STAGES // 2] < before[STAGES // 2]
    asked = ("--temperature", 0, "--max-tokens", 12)
    expected = done("generate", healed, "It is a truth", "--stages", ",".join(map(str, KEPT)), *asked)
    assert served_without_others(tmp_path, healed, skippipe, commands).rstrip("\n") == expected.rstrip("\n")


def write_job(folder: Path) -> Path:
    (folder / "model.json").write_text(json.dumps(MODEL))
    for name, text, characters in (("text.txt", "classics", 300_000), ("unseen.txt", "classics-val", 10_000)):
        (folder / name).write_text("".join(piece.text for piece in source(text).pieces())[:characters])
    said = {"folder": folder, "iterations": WHOLE, "stages": STAGES, "bridges": BRIDGES}
    job = folder / "job.toml"
    job.write_text(JOB.format(**said, grow=f"{SMALL}/{WHOLE}", sandwiches=SANDWICHES))
    return job


class Training(Command):
    def succeeds(self) -> None:
        self.process.join(WAIT_S)
        assert self.process.exitcode == 0, "\n".join(self.lines)


def trained(commands: ExitStack, *words: object) -> Training:
    found = Training("train", *words)
    commands.callback(found.end, signal.SIGKILL)
    return found


def trained_through_a_loss(commands: ExitStack, run: Path, job: Path, after: int = 0) -> list[dict[str, Any]]:
    """The metrics of a run in which the only node of a stage is killed on the way, and replaced."""
    training = trained(commands, job)
    wait_for(lambda: iterations_of(run) >= after + 6, WAIT_S)
    stages = [each["nodes"] for each in json.loads((run / "plan.json").read_text())["stages"]]
    lost = next(nodes[0] for nodes in stages[1:] if len(nodes) == 1)
    os.kill(process_with_log(run / "logs" / f"{lost}.log"), signal.SIGKILL)
    training.succeeds()
    assert {"lost", "recovered"} <= {each["kind"] for each in events_of(run) if each["node"] == lost}
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def iterations_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def process_with_log(log: Path) -> int:
    """The process of a node: the one that writes to its log."""
    for place in Path("/proc").glob("[0-9]*/fd/2"):
        try:
            if place.readlink() == log:
                return int(place.parts[2])
        except OSError:  # ended, or of another user
            continue
    raise AssertionError(f"no process writes to {log}")


def whole_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    staged = load(folder)
    return logits(staged.stages[0], SubsetModel(staged, StageSubset(tuple(range(STAGES)), STAGES)).hidden(tokens))


def halves(measured: str) -> dict[int, float]:
    """Stages that are kept → the mean perplexity of such parts."""
    (sizes,) = json.loads(measured)["sizes"].values()
    return {each["kept"]: each["mean"] for each in sizes}


def served_without_others(folder: Path, model: Path, skippipe: CommandHere, commands: ExitStack) -> str:
    """The answer of six nodes, of which those that hold the other stages are killed."""
    names = [f"n{stage}" for stage in range(STAGES)]
    assert skippipe("keys", ",".join(names), folder / "keys").code == 0
    at = f"127.0.0.1:{free_port('127.0.0.1')}"
    server = Server(model, "--port", 0, "--keys", folder / "keys", "--listen", at, "--grace", 0.2)
    commands.callback(server.end, signal.SIGKILL)
    nodes = [Command("node", "--join", at, "--key", folder / "keys" / f"{name}.key") for name in names]
    for node in nodes:
        commands.callback(node.end, signal.SIGKILL)
    address = server.address
    for stage in set(range(STAGES)) - set(KEPT):
        nodes[stage].end(signal.SIGKILL)
    health: dict[str, Any] = {"stages": len(KEPT), "of": STAGES, "missing": sorted(set(range(STAGES)) - set(KEPT))}
    wait_for(lambda: httpx2.get(f"{address}/health").json() == {"status": "degraded", **health}, WAIT_S)
    wanted = {"model": "healed", "prompt": "It is a truth", "temperature": 0, "max_tokens": 12}
    answer = httpx2.post(f"{address}/v1/completions", json=wanted, timeout=WAIT_S).json()
    assert answer["skippipe"] == health
    return str(answer["choices"][0]["text"])
