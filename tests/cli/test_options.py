"""Every option of every command has an effect: none is accepted and ignored.

Options and command lines are in `tests/helpers/command_lines.py`, a line for each. A command is run with and without
its option, and what is seen must differ: what it hands on to the part that does the work (`PARTS`, which are not run),
what it prints, which files it writes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from random import Random
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer

from skippipe.cli.app import app
from skippipe.data.prepare import prepare
from skippipe.inference.engine import GenerationEngine
from skippipe.model_shape import MODELS
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest, Strategy
from skippipe.planner.problem_spec import PlanSpec, problem_of
from skippipe.planner.strategies import make_plan
from skippipe.presets import preset
from skippipe.profiling.results import ProfileResult, save_results
from skippipe.report.summary import Table
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.workload import Workload
from tests.helpers.chats import chat_tokenizer
from tests.helpers.command_lines import ARGUMENTS, OPTIONS, REFUSED, With
from tests.helpers.model_folders import checkpoint_in, export_to
from tests.helpers.processes import Command, CommandResult

torch.set_num_threads(1)
SOME_WORDS = "it was the best of links and worst lanes in an age wisdom that had some foolish nodes with no way"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its name, those of groups too."""

    def below(group: Any, name: str) -> Iterator[tuple[str, Any]]:
        for each, command in group.commands.items():
            full = f"{name} {each}".strip()
            yield from below(command, full) if hasattr(command, "commands") else [(full, command)]

    yield from below(typer.main.get_command(app), "")


def test_every_option_is_in_the_list() -> None:
    for name, command in commands():
        known = {param.opts[0] for param in command.params if param.param_type_name == "option"}
        names = [[*param.opts, *param.secondary_opts] for param in command.params]
        listed = {next((each[0] for each in names if option in each), option) for option in OPTIONS[name]}
        assert listed == known, f"'{name}': an option needs a line in OPTIONS, and a line there an option"
    assert {name for name, _ in commands()} == set(OPTIONS) == set(ARGUMENTS)


def test_every_output_is_o_and_json_is_a_flag() -> None:
    for name, command in commands():
        for param in command.params:
            if "--output" in param.opts:
                assert "-o" in param.opts, name
            if "--json" in param.opts:
                assert param.is_flag, name


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("inputs")
    problem = problem_of(preset("five-sites:5"), Workload(MODELS["llama-1.5b"]), PlanSpec())
    make_plan(problem, Strategy.BEST, PlanRequest(changes=1, budget_s=float("inf"))).save(made / "plan.json")
    preset("regions:2").save(made / "desks.json")
    preset("regions:2").save(made / "measured.json")
    result = ProfileResult.of_cluster(preset("regions:2"))
    save_results(made / "measured.json", [result])
    (made / "there.json").write_text("something of value")
    (made / "taken").mkdir()
    (made / "taken" / "best.json").write_text("something of value")
    for number, name in enumerate(("text.txt", "other.txt")):
        (made / name).write_text(prose(number))
    (made / "records.jsonl").write_text(json.dumps({"text": prose(2), "body": prose(3)}) + "\n")
    (made / "chats.jsonl").write_text(json.dumps({"prompt": "Some", "completion": "words"}) + "\n")
    chat_tokenizer().save(made / "chat")
    (made / "token").write_text("0123456789abcdef\n")
    (made / "token").chmod(0o600)
    (made / "job.toml").write_text('[model]\nconfig = "llama-tiny"\n[batch]\nsequence = 32\n')
    (made / "prices.toml").write_text("int8 = {hops = 0.003}\n")
    (made / "study.toml").write_text(STUDY)
    (made / "other.toml").write_text(STUDY.replace("small", "other"))
    (made / "results.jsonl").write_text("")
    export_to(made / "model", max_position_embeddings=128)
    checkpoint_in(made / "run")
    own, peers = KeyPair.new(), {}
    KeyFile("coordinator", own).save(made / "keys" / "coordinator.key")
    for name in ("a", "b", "c"):
        pair = KeyPair.new()
        peers[name] = pair.public
        KeyFile(name, pair, own.public).save(made / "keys" / f"{name}.key")
    PeerList(peers).save(made / "keys" / "peers.json")
    prepare([made / "text.txt"], 280, made / "prepared")
    return made


STUDY = """
name = "small"
model = "llama-tiny"
tokens = 100_000
seeds = [0]
[[variant]]
name = "full"
"""


def prose(seed: int) -> str:
    """Sentences of some words."""
    random = Random(seed)
    sentences = (" ".join(random.sample(SOME_WORDS.split(), random.randint(8, 14))) for _ in range(400))
    ends = (".\n\n" if number % 5 == 4 else ". " for number in range(400))
    return "".join(each.capitalize() + end for each, end in zip(sentences, ends, strict=True))


PARTS: dict[str, tuple[str, ...]] = {
    "profile": ("skippipe.profiling.coordinator.profile_nodes",),
    "plan": ("skippipe.cli.plan.search_plan", "skippipe.planner.sweep.choose_batch_size"),
    "compare": ("skippipe.cli.plan.search_plan",),
    "sweep": ("skippipe.cli.sweep.search_plan",),
    "why": ("skippipe.planner.whatif.advisor.advise",),
    "train": (
        "skippipe.cli.train.run_job",
        "skippipe.cli.train.plan_job",
        "skippipe.dashboard.server.dashboard_process",
    ),
    "dashboard": ("skippipe.dashboard.server.listen", "skippipe.dashboard.server.run"),
    "grow": (
        "skippipe.training.depth_growth.young_of",
        "skippipe.training.depth_growth.check_job",
        "skippipe.training.run_folder.open_run_folder",
    ),
    "heal": ("skippipe.study.healing.heal",),
    "score": ("skippipe.lm_harness.tasks.write_tasks",),
    "serve": ("skippipe.serving.launcher.ServeApp", "skippipe.transport.addresses.listening_socket"),
    "node": ("skippipe.runtime.node.agent.NodeAgent", "skippipe.runtime.doctor.check_at_join"),
    "relay": ("skippipe.transport.relay.Relay", "skippipe.runtime.relay.RelayAgent"),
    "doctor": ("skippipe.runtime.doctor.examine",),
    "study run": ("skippipe.study.runner.run_study",),
    "study report": (
        "skippipe.study.results.runs_of",
        "skippipe.study.results.outdated_variants",
        "skippipe.study.tables.all_tables",
        "skippipe.study.planned_time.planned_times",
        "skippipe.study.plots.write_pictures",
        "skippipe.study.plots.write_page",
    ),
}
"""Of every command that hands its work on: to what."""


HEALED = {
    **dict.fromkeys(("bridges", "adapters", "parameters", "parameters_added", "steps", "steps_wanted"), 1),
    **dict.fromkeys(("tokens", "text_tokens", "held_out_tokens", "seconds"), 1),
    "layers": [1, 1],
    "perplexity": [{"missing": 0, "parts": 1, "before": 2.0, "after": 2.0, "worst_before": 2.0, "worst_after": 2.0}],
}


def answer(part: str, plan: Plan) -> Any:
    """What a part gives back that is not run."""
    name = part.rpartition(".")[2]
    answers: dict[str, Any] = {
        "search_plan": (plan, 1.0),
        "choose_batch_size": (plan, [plan]),
        "profile_nodes": ProfileResult.of_cluster(preset("regions:3")),
        "dashboard_process": nullcontext(),
        "NodeAgent": SimpleNamespace(run=lambda: ""),
        "Relay": SimpleNamespace(address="127.0.0.1:7002"),
        "RelayAgent": SimpleNamespace(run=lambda tell: None),
        "ServeApp": SimpleNamespace(run=lambda: None),
        "listening_socket": SimpleNamespace(close=lambda: None),
        "listen": nullcontext(SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1))),
        "heal": HEALED,
        "runs_of": [1],
        "outdated_variants": [],
        "all_tables": [Table("A table", "", ("a",), [["1"]])],
        "write_pictures": [],
        "examine": [],
    }
    return answers.get(name)


def described(value: Any) -> Any:
    """A value as plain data: equal for equal settings, whatever objects they are in."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: described(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {str(key): described(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [described(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if value is None or isinstance(value, (str, int, float, bytes, Path, timedelta, Fraction)):
        return value
    return value.__qualname__ if isinstance(value, FunctionType) else type(value).__name__


GENERATE = GenerationEngine.run
Seen = dict[str, Any]
SEEN: dict[str, Seen] = {}
"""What is seen of command lines that were run already."""


@pytest.fixture
def run(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skippipe: Command
) -> Callable[[str], tuple[CommandResult, Seen]]:
    plan = Plan.load(inputs / "plan.json")
    count = 0

    def ran(line: str) -> tuple[CommandResult, Seen]:
        """Runs a command in a folder of its own, which has the inputs."""
        nonlocal count
        count += 1
        folder = tmp_path / str(count)
        shutil.copytree(inputs, folder)
        monkeypatch.chdir(folder)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)
        handed: list[Any] = []

        def record(part: str) -> Callable[..., Any]:
            def called(*given: Any, **named: Any) -> Any:
                handed.append([part, described(given), described(named), os.environ.get("RAY_ADDRESS")])
                if part.endswith("open_run_folder"):  # nothing is done without it
                    raise SystemExit(0)
                return answer(part, plan)

            return called

        words = line.split()
        name = " ".join(words[:2]) if words[0] == "study" else words[0]
        for part in PARTS.get(name, ()):
            monkeypatch.setattr(part, record(part))
        if name == "generate":

            def generated(engine: Any, requests: Any, *others: Any) -> Any:
                handed.append([engine._max_sequences, described(requests)])
                return GENERATE(engine, requests, *others)

            monkeypatch.setattr(GenerationEngine, "run", generated)
        if name == "score":
            harness: Any = ModuleType("adapter")
            harness.SubsetLM = lambda staged, subset, progress, replicas: record("SubsetLM")(
                subset, staged.layers, staged.context
            )
            harness.score = lambda model, tasks, folder: record("score")([vars(each) for each in tasks]) or {}
            monkeypatch.setitem(sys.modules, "skippipe.lm_harness.adapter", harness)
            monkeypatch.setattr("skippipe.cli.eval._print_scores", record("printed"))
            monkeypatch.setattr("skippipe.cli.eval._as_json", lambda tasks, found: [])
        done = skippipe(*words)
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.endswith(".lock")
        }
        said = re.sub(r"(planned in |\"planning_s\": |after |then )[\d.,e-]+", r"\1", done.out + done.err)
        places = (str(folder), rf"{tempfile.gettempdir()}/tmp\w+")
        return done, {"handed": re.sub("|".join(places), "", repr(handed)), "said": said, "files": files}

    return ran


CASES = [(command, option) for command, options in OPTIONS.items() for option in options]


@pytest.mark.slow  # over two hundred command lines; that each option has a line is tested always
@pytest.mark.parametrize(("command", "option"), CASES, ids=[f"{command} {option}" for command, option in CASES])
def test_an_option_has_an_effect(command: str, option: str, run: Callable[[str], tuple[CommandResult, Seen]]) -> None:
    entry = OPTIONS[command][option]
    case = entry if isinstance(entry, With) else With(entry)
    assert case.without in ARGUMENTS[command]
    base = f"{ARGUMENTS[command].replace(case.without, '', 1 if case.without else 0)} {case.others}"
    others = re.sub(rf"{option} \S+", "", base)  # it is said there already: with another value
    given = case.value if case.value.startswith("--no-") else f"{option} {case.value}"
    after, now = run(f"{command} {others} {given}")
    assert after.code == (2 if case.refused else 0), after.err
    if (line := f"{command} {base}") not in SEEN:
        SEEN[line] = run(line)[1]
    assert now != SEEN[line]


@pytest.mark.parametrize("command", list(ARGUMENTS))
def test_what_is_seen_of_a_command_is_always_the_same(
    command: str, run: Callable[[str], tuple[CommandResult, Seen]]
) -> None:
    (first, seen), (_, again) = run(f"{command} {ARGUMENTS[command]}"), run(f"{command} {ARGUMENTS[command]}")
    assert first.code == 0, first.err
    if command not in ("keys", "invite", "revoke"):  # which are new every time, or have the time in them
        assert seen == again


@pytest.mark.parametrize("line", list(REFUSED))
def test_what_would_be_ignored_or_overwritten_is_refused(
    line: str, run: Callable[[str], tuple[CommandResult, Seen]], inputs: Path
) -> None:
    ran, seen = run(line)
    assert ran.code == 2
    assert ran.err.startswith(f"error: {REFUSED[line]}"), ran.err
    assert ran.err.count("\n") == 1
    assert seen["files"].keys() == {str(path.relative_to(inputs)) for path in inputs.rglob("*") if path.is_file()}
    assert seen["files"]["there.json"] == b"something of value"
