"""A run whose model grows: the smaller model, the larger ones and the whole one, by the same nodes, as one run."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.format import Checkpoints
from skippipe.errors import UserError
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest
from skippipe.planner.problem_spec import cluster_named
from skippipe.runs.history import read_history
from skippipe.runs.wal import WriteAheadLog
from skippipe.runtime.coordinator.interfaces import Callback, Event, IterationReport
from skippipe.toml_config import from_table
from skippipe.training import depth_growth
from skippipe.training.backends import BACKENDS
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.depth_growth import depth_reached, grown_job, young_jobs
from skippipe.training.job_config import JobConfig, load_job
from skippipe.training.metrics import IterationMetrics, promised_left
from skippipe.training.run import RunOptions
from skippipe.transport.addresses import free_port
from tests.helpers.jobs import WORDS
from tests.helpers.models import tiny
from tests.helpers.processes import Command as CommandHere
from tests.helpers.processes import wait_for
from tests.helpers.serve_process import Command

torch.set_num_threads(1)
QUICK = PlanRequest(budget_s=0.2, changes=300)
STAGES, ITERATIONS = 4, 9
RECIPE = {"skip": "1/2 until 1/3, 1/4 until 2/3, 0 & 1/4", "grow": "1/3, 2/3", "bridges": 3}
"""Two stages for three iterations, three for three, then all four in sandwiches with bridges."""
WAIT_S = 120.0


def table(folder: Path, **tables: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(WORDS * 99)
    (folder / "model.json").write_text(json.dumps(tiny("llama", num_hidden_layers=STAGES).to_dict()))
    said: dict[str, Any] = {
        "output": str(folder / "run"),
        "iterations": ITERATIONS,
        "cluster": "datacentre:6",
        "model": {"config": str(folder / "model.json")},
        "data": {"texts": str(folder / "text.txt"), "vocabulary": 300, "folder": str(folder / "tokens")},
        "batch": {"sequence": 16, "samples": 1, "microbatches": 12},
        "pipeline": {"stages": STAGES, "strategy": "skippipe", "max_slots": 6},
        "recipe": RECIPE,
        "transport": {"wire": "fp32"},
        "learning": {"rate": 3e-3, "warmup": 2},
        "checkpoint": {"every": 2},
        **tables,
    }
    return said


def built(folder: Path, *, resumed: bool = False, **tables: Any) -> RunSetup:
    job = from_table(JobConfig, table(folder, **tables))
    return build_run(job, request=QUICK, options=RunOptions(resumed=resumed))


class Seen(Callback):
    """Losses and events; the run is to stop when there are so many losses."""

    def __init__(self, until: int = 99) -> None:
        self.losses: list[float] = []
        self.events: list[Event] = []
        self._until = until

    def iteration_done(self, report: IterationReport) -> None:
        self.losses.append(report.loss)

    def happened(self, event: Event) -> None:
        self.events.append(event)

    def stop_requests(self) -> int:
        return int(len(self.losses) >= self._until)

    @property
    def grown(self) -> list[tuple[int, str]]:
        return [(event.iteration, event.text) for event in self.events if event.kind == "grown"]


def trained(run_setup: RunSetup, backend: str, until: int = 99) -> Seen:
    Path(run_setup.job.output).mkdir(exist_ok=True)
    run_setup.save_plans()
    seen = Seen(until)
    BACKENDS[backend](run_setup, seen, seen.stop_requests)
    return seen


def elsewhere(run_setup: RunSetup, output: Path) -> RunSetup:
    """The same plans, in another folder."""
    after = elsewhere(run_setup.grows_into, output) if run_setup.grows_into else None
    return replace(run_setup, job=replace(run_setup.job, output=str(output)), grows_into=after)


def model_in(output: Path) -> dict[str, Tensor]:
    return {name: each for file in (output / "model").glob("*.safetensors") for name, each in load_file(file).items()}


def assert_same_models(output: Path, other: Path, tolerance: float = 1e-5) -> None:
    ours, theirs = model_in(output), model_in(other)
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        torch.testing.assert_close(theirs[name], each, rtol=1e-3, atol=tolerance, msg=name)


# What a run consists of


def test_jobs_of_each_depth() -> None:
    recipe = {"skip": "2/3 until 30%, 1/2 until 50%, 1/3 until 70%, 0", "grow": "30%, 50%", "bridges": 8}
    job = from_table(JobConfig, {"iterations": 101, "recipe": {**recipe, "distill": 0.5}, "learning": {"rate": 1e-3}})
    first, second = young_jobs(job, 13, 6, 30)
    assert [each.model.layers for each in (first, second)] == [2 + 3, 2 + 2 + 3], "first ones and the last"
    assert [each.pipeline.stages for each in (first, second)] == [2, 3]
    assert [each.iterations for each in (first, second)] == [31, 51]
    for each in (first, second):
        assert each.recipe == replace(job.recipe, skip="0", grow="", bridges=0, distill=0.0)
        assert each.batch.microbatches == 30
    last = grown_job(job)
    assert last.recipe == replace(job.recipe, skip="1/3 until 70%, 0", grow="")
    for each in (first, second, last):
        assert [each.schedule.rate_at(number) for number in (0, 50, 100)] == [
            job.schedule.rate_at(number) for number in (0, 50, 100)
        ]
    cut = replace(job, pipeline=replace(job.pipeline, layers="1,2,3,1,2,4"))
    assert [each.pipeline.layers for each in young_jobs(cut, 13, 6, 30)] == ["1,4", "1,2,4"]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"recipe": {"grow": "50%"}}, "recipe.grow: until 50% one share must be skipped all along, and be given"),
        ({"recipe": {"skip": "1/3 until 40%, 0", "grow": "50%"}}, "one share must be skipped all along"),
        (
            {"recipe": {"skip": "1/3 until 50%, 0", "grow": "50%, 30%"}},
            "recipe.grow: 50%, 30%: a model that grows again does so later",
        ),
        ({"model": {"weights": "folder"}}, "model.weights: with recipe.grow these are of the whole model"),
        ({"pipeline": {"plan": "plan.json"}}, "pipeline.plan: with recipe.grow a plan is for one model"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every: with recipe.grow a model grows from a checkpoint"),
        ({"averaging": {"engine": "torch"}}, "averaging.engine: with recipe.grow nodes begin anew"),
        ({"iterations": 1}, "recipe.grow: of 1 iterations, 50% leaves none before or after it"),
        ({"recipe": {"skip": "1/3 until 50%, 0", "grow": "50%", "grow_preserving": True}}, "only studies have it"),
        ({"recipe": {"skip": "1/3 until 50%, 0", "grow": "50%", "heal": "0%"}}, "must be after the model has grown"),
    ],
)
def test_what_does_not_go_with_growth(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        from_table(JobConfig, {"recipe": {"skip": "1/3 until 50%, 0", "grow": "50%"}, **tables})
    assert words in str(caught.value)


def test_a_model_that_would_not_grow_is_refused() -> None:
    for skip, words in (("1/20 until 50%, 0", "has 6 of 6 stages"), ("5/6 until 50%, 0", "has 1 of 6 stages")):
        job = from_table(JobConfig, {"recipe": {"skip": skip, "grow": "50%"}})
        with pytest.raises(UserError, match=words):
            young_jobs(job, 12, 6, 30)


def test_growth_that_cannot_work_is_refused_before_training(tmp_path: Path) -> None:
    def complaint(**model: Any) -> str:
        config = tmp_path / "other.json"
        config.write_text(json.dumps(tiny(**model, num_hidden_layers=STAGES).to_dict()))
        with pytest.raises(UserError) as caught:
            built(tmp_path, model={"config": str(config)}, recipe={"skip": "1/2 until 1/3, 0", "grow": "1/3"})
        return str(caught.value)

    dense = complaint(family="qwen3_moe", mlp_only_layers=[1])
    assert "cannot be a copy of" in dense
    kinds = ["full_attention", "sliding_attention"] * 2
    assert complaint(family="qwen3", layer_types=kinds, sliding_window=6).startswith(
        "recipe.grow: 2 layers would be trained first"
    )


def test_plans_are_for_iterations_that_there_are(tmp_path: Path) -> None:
    """Iterations before the model has grown do not count."""
    assert [dict(each.lengths) for each in built(tmp_path).depths] == [{2: 3}, {3: 3}, {(4, 3): 3}]
    setup = built(tmp_path, recipe={"skip": "1/4 until 5/9, 0", "grow": "1/3"})
    assert setup.grows_into is not None
    assert setup.grows_into.lengths == {3: 2, 4: 4}
    assert setup.grows_into.plan.visited == STAGES


# One run


def test_nodes_train_what_one_process_does(tmp_path: Path) -> None:
    setup = built(tmp_path)
    assert [(len(each.plan.stages), each.job.iterations) for each in setup.depths] == [(2, 3), (3, 6), (4, 9)]
    assert {each.plan.microbatches for each in setup.depths} == {12}
    seen = trained(setup, "virtual")
    once = trained(elsewhere(setup, tmp_path / "once"), "one-process")
    assert once.losses == pytest.approx(seen.losses, rel=1e-5)
    assert_same_models(tmp_path / "run", tmp_path / "once")
    assert (
        once.grown
        == seen.grown
        == [
            (3, "2 layers become 3, copies of 0 1 1"),
            (6, "3 layers become 4, copies of 0 1 1 2"),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert len(model.model.layers) == STAGES
    newest, *_ = Checkpoints(tmp_path / "run" / "checkpoints").complete()
    assert newest.name == "000009"
    assert Plan.load(tmp_path / "run" / "plan-of-2.json").layers == (1, 1)
    assert Plan.load(tmp_path / "run" / "plan.json").layers == (1,) * STAGES


@pytest.mark.slow
def test_it_is_what_train_and_grow_do_by_themselves(tmp_path: Path) -> None:
    recipe = {"skip": "1/2 until 1/3, 0", "grow": "1/3"}
    setup = built(tmp_path, recipe=recipe)
    losses = trained(setup, "virtual").losses
    assert setup.grows_into is not None
    young = elsewhere(replace(setup, grows_into=None), tmp_path / "young")
    assert trained(young, "virtual").losses == losses[:3]
    whole = elsewhere(setup.grows_into, tmp_path / "whole")
    depth_growth.grow(depth_growth.young_of(tmp_path / "young"), whole.run)
    assert trained(replace(whole, resumed=True, has_grown=False), "virtual").losses == losses[3:]
    assert_same_models(tmp_path / "run", tmp_path / "whole", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("done", [2, 3, 5, 8])
def test_a_run_that_was_stopped_goes_on_at_its_depth(tmp_path: Path, done: int) -> None:
    setup = built(tmp_path)
    whole = trained(elsewhere(setup, tmp_path / "whole"), "virtual")
    begun = trained(setup, "virtual", done - 1)  # after which one more is done
    assert begun.losses == whole.losses[:done]
    layers = next(each.spec.layers for each in setup.depths if each.job.iterations >= done)
    assert setup.reached.spec.layers == layers
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").model.layers) == layers
    resumed = built(tmp_path, resumed=True)
    assert resumed.has_grown == (done >= 3)
    rest = trained(resumed, "virtual")
    assert rest.losses == whole.losses[done:]
    assert rest.grown == [each for each in whole.grown if each[0] >= done]
    assert_same_models(tmp_path / "run", tmp_path / "whole", 0.0)


def test_time_left_counts_all_depths(tmp_path: Path) -> None:
    setup = built(tmp_path)
    each_s = [depth.plan.promise.iteration_s for depth in setup.depths]
    left = promised_left([(each.job, each.plan, each.plans) for each in setup.depths])
    assert [left(done) for done in (0, 4, 9)] == pytest.approx([3 * sum(each_s), 2 * each_s[1] + 3 * each_s[2], 0.0])
    computed = IterationMetrics(setup.plan, ITERATIONS, promised_left_s=left)
    assert computed.iterations == ITERATIONS


# Which depth a run is in that is resumed


def test_the_depth_of_a_journal_counts_while_nodes_may_be_there(tmp_path: Path) -> None:
    setup = built(tmp_path)
    trained(setup, "virtual", until=4)  # the last checkpoint is after five iterations
    jobs, output = [each.job for each in setup.depths], tmp_path / "run"
    joined = [replace(each, transport=replace(each.transport, peers="peers", key="key")) for each in jobs]
    (output / "journal").unlink(missing_ok=True)
    plans = [{"plan": each.plan.to_json()} for each in setup.depths]

    def reached(records: list[dict[str, Any]], of: list[JobConfig] = joined) -> int:
        wal = WriteAheadLog(output / "journal")
        wal.rewrite([{"run": ""}, *records])
        wal.close()
        return depth_reached(of, STAGES, "")

    assert reached([]) == 1
    assert reached([plans[1], {"commit": 3}]) == 1
    assert reached([plans[2], {"commit": 6}]) == 2, "nodes are further than the checkpoint"
    assert reached([plans[2], {"commit": 6}], jobs) == 1, "nodes of this machine ended with their coordinator"
    assert reached([plans[2], {"done": 8}]) == 1
    assert reached([plans[0], {"commit": 2}]) == 1, "that is over"
    assert reached([plans[0], {"grown": 2}, {"run": ""}, {"term": 1}, plans[1]]) == 1
    assert reached([], [replace(joined[0], iterations=8), *joined[1:]]) == 1, "a model does not shrink"


def test_nodes_that_have_known_another_coordinator_hear_the_new_one(tmp_path: Path) -> None:
    """They take a higher term for a newer coordinator: more than any in the journal, or any that they may know."""
    setup = built(tmp_path)
    trained(setup, "virtual", until=4)
    run = built(tmp_path, resumed=True).run
    run.wal.close()

    def term(records: list[dict[str, Any]], **others: Any) -> int:
        wal = WriteAheadLog(tmp_path / "run" / "journal")
        wal.rewrite(records)
        wal.close()
        other = replace(run, **others)
        found = other.first_term
        other.wal.close()
        return found

    committed = {"plan": setup.plan.to_json()}, {"commit": 2}
    assert term([{"run": ""}, *committed]) == 1, "it did not say that the model has grown"
    assert term([{"run": ""}, {"term": 4}, *committed, {"grown": 2}]) == 5
    assert term([{"run": ""}, {"term": 4}, *committed, {"done": 2}], has_grown=False) == 0, "nodes of this machine"
    assert term([{"run": ""}, {"term": 4}, {"done": 2}], nodes_join=True) == 5
    (tmp_path / "run" / "journal").unlink()
    lost = replace(run, nodes_join=True)
    assert lost.first_term > 10**9
    lost.wal.close()


# Over processes


JOB = """
output = "{folder}/run"
iterations = 40
cluster = "datacentre:5"
model.config = "{folder}/model.json"
data = {{ texts = ["{folder}/text.txt"], vocabulary = 300, folder = "{folder}/tokens" }}
batch = {{ sequence = 16, samples = 2, microbatches = 12 }}
pipeline = {{ stages = 4, budget_s = 0.3 }}
recipe = {{ skip = "1/2 until 50%, 0", grow = "50%" }}
learning = {{ rate = 5e-3, warmup = 4 }}
checkpoint.every = 5
{more}
"""


@pytest.fixture
def commands() -> Iterator[ExitStack]:
    """Ends all processes that are left."""
    with ExitStack() as stack:
        yield stack


def job_file(folder: Path, more: str = "") -> Path:
    table(folder)
    (folder / "job.toml").write_text(JOB.format(folder=folder, more=more))
    return folder / "job.toml"


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    file = folder / "run" / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def begun(commands: ExitStack, *words: object) -> Command:
    found = Command(*words)
    commands.callback(found.end, signal.SIGKILL)
    return found


def assert_succeeds(command: Command) -> None:
    command.process.join(WAIT_S)
    assert command.process.exitcode == 0, "\n".join(command.lines)


def assert_whole(folder: Path) -> None:
    """The run has all its iterations, learned all along, and says what became of it."""
    rows = lines_of(folder, "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(1, 41))
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["loss"] < rows[20]["loss"] < rows[0]["loss"]
    assert [len(row["visits"]) for row in rows] == [2] * 20 + [4] * 20
    history = read_history(folder / "run")
    assert history.ended
    assert history.last_plan is not None and history.last_plan.layers == (1,) * STAGES
    assert [event.iteration for event in history.events if event.kind == "grown"] == [20]


@pytest.mark.slow
def test_a_node_is_lost_before_and_after_the_model_grows(tmp_path: Path, commands: ExitStack) -> None:
    job = job_file(tmp_path)
    assert_succeeds(begun(commands, "train", job, "--drill", 10, "--drill", 30))
    assert_whole(tmp_path)
    events = lines_of(tmp_path, "events.jsonl")
    killed = [(event["iteration"], event["node"]) for event in events if event["kind"] == "drill"]
    assert [iteration for iteration, _ in killed] == [11, 31]
    for iteration, node in killed:
        kinds = {each["kind"] for each in events if each["node"] == node and each["iteration"] >= iteration}
        assert {"lost", "rerouted", "recovered"} <= kinds, "it held a stage"


def test_a_dry_run_says_how_long_it_would_take(tmp_path: Path, skippipe: CommandHere) -> None:
    job = job_file(tmp_path)
    text = job.read_text().replace("datacentre:5", "regions:5").replace('50%, 0"', '50%, 1/4 until 75%, 0"')
    job.write_text(text)
    out = skippipe("train", job, "--dry-run").out
    assert not (tmp_path / "run").exists()
    seconds = "([0-9.]+) s"
    found = re.search(
        rf"{seconds} an iteration promised.*until iteration 20 it has 2 layers in 2 stages, {seconds} an iteration; "
        rf"then 4 in 4: 10 iterations through 3 of 4 stages at {seconds}, "
        rf"10 iterations through 4 of 4 stages at {seconds}: "
        rf".*40 iterations would take (?:([0-9]+) min )?{seconds} on the machines of 'regions:5'",
        out,
        re.DOTALL,
    )
    assert found, out
    young_s, same_s, shorter_s, whole_s, minutes, rest_s = (float(each or 0) for each in found.groups())
    assert young_s == same_s
    assert 60 * minutes + rest_s == pytest.approx(20 * young_s + 10 * shorter_s + 10 * whole_s, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed_after", "number", "keeps_journal"),
    [(12, signal.SIGKILL, True), (28, signal.SIGKILL, True), (28, signal.SIGKILL, False), (19, signal.SIGTERM, True)],
    ids=["before it grows", "afterwards", "and its journal is lost", "in the last iteration of the smaller model"],
)
def test_nodes_that_join_outlive_the_coordinator(
    tmp_path: Path,
    skippipe: CommandHere,
    commands: ExitStack,
    killed_after: int,
    number: int,
    keeps_journal: bool,
) -> None:
    at = f"127.0.0.1:{free_port('127.0.0.1')}"
    keys = tmp_path / "keys"
    joined = f'peers = "{keys}/peers.json", key = "{keys}/coordinator.key"'
    job = job_file(tmp_path, f'transport = {{ listen = "{at}", {joined} }}')
    names = [node.name for node in cluster_named(load_job(job).cluster)[0].nodes]
    assert skippipe("keys", ",".join(names), str(keys)).code == 0
    train = begun(commands, "train", job)
    nodes = [begun(commands, "node", "--join", at, "--key", keys / f"{name}.key") for name in names]
    wait_for(lambda: len(lines_of(tmp_path, "metrics.jsonl")) >= killed_after, WAIT_S)
    train.end(number)
    done = len(lines_of(tmp_path, "metrics.jsonl"))
    if not keeps_journal:
        (tmp_path / "run" / "journal").unlink()
    assert_succeeds(begun(commands, "train", job, "--resume"))
    assert_whole(tmp_path)
    restarted = [each for each in lines_of(tmp_path, "events.jsonl") if each["kind"] == "coordinator-restarted"]
    assert len(restarted) <= keeps_journal
    assert all(each["iteration"] >= done for each in restarted)
    for node in nodes:
        assert_succeeds(node)
