"""Every field of a job file has an effect, or is refused: none is accepted and ignored.

A new field needs one line in `FIELDS`: a value other than its default, which changes what the run is made of (`seen`);
or `Refused`, if no job may set it. Where another field leaves it without effect, a job that sets both is refused: a
line in `WITHOUT_EFFECT`.
"""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from skippipe.data.tokenizer import train_bpe
from skippipe.errors import UserError
from skippipe.model_shape import MODELS
from skippipe.optim import OPTIMIZERS
from skippipe.plan import Plan
from skippipe.planner.problem import PlanRequest
from skippipe.planner.strategies import make_plan_for, with_paths_of
from skippipe.toml_config import example, from_table
from skippipe.training import job_plan, train_job
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.job_config import FOR_STUDIES, JobConfig
from skippipe.training.metrics import CallbackList
from skippipe.training.run_folder import open_run_folder
from skippipe.transport.addresses import free_port
from tests.helpers.chats import chat_tokenizer
from tests.helpers.healed_folders import REPEATS, healed
from tests.helpers.jobs import WORDS
from tests.helpers.model_folders import export_to
from tests.helpers.models import tiny

Values = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A value that changes the run, in a job with these other fields; against what the job is with `before`."""

    value: Any
    others: Values = field(default_factory=dict)
    before: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """A value that no job may have: the error begins with the name of the field, or with this."""

    value: Any
    error: str = ""


TORCH = {"averaging.engine": "torch"}
JOINING = {"transport.peers": "peers.json", "transport.key": "coordinator.key"}
PLANNED = {"pipeline.plan": "plan.json"}
RECORDS = {"data.texts": ["records.jsonl"], "data.folder": None}
CHATS = {"data.texts": ["chats.jsonl"], "data.folder": None, "data.tokenizer": "chat", "data.vocabulary": None}
HELD_OUT = {"validation.share": 0.5}
WEIGHTS = {"model.weights": "weights", "model.config": None, "data.vocabulary": None, "data.folder": None}
ADAPTERS = {**WEIGHTS, "lora.rank": 4}
TAUGHT = {"recipe.distill": 0.5, "recipe.skip": "1/3", "pipeline.skip": None}
GROWS = {"recipe.skip": "1/3 until 50%, 0", "pipeline.skip": None}
FITTED = {**WEIGHTS, "model.weights": "fitted", "pipeline.layers": "2,1,2"}

FIELDS: dict[str, Any] = {
    "output": Change("elsewhere"),
    "iterations": Change(20),
    "seed": Change(1),
    "cluster": Change("five-sites:6"),
    "model.config": Change("llama-tiny"),
    "model.layers": Change(6),
    "model.weights": Change("weights", WEIGHTS),
    "model.checkpointing": Change(True),
    "data.texts": Change(["other.txt"], {"data.folder": None}, {"data.folder": None}),
    "data.tokenizer": Change("tokenizer", {"data.vocabulary": None, "data.folder": "tokens-2"}),
    "data.vocabulary": Change(310, {"data.folder": "tokens-3"}),
    "data.folder": Change("tokens-4"),
    "data.field": Change("body", RECORDS, RECORDS),
    "data.loss_on": Change("all", CHATS, CHATS),
    "data.packing": Change(False, CHATS, CHATS),
    "batch.sequence": Change(8),
    "batch.samples": Change(2),
    "batch.microbatches": Change(24),
    "pipeline.plan": Change("plan.json"),
    "pipeline.strategy": Change("skippipe"),
    "pipeline.stages": Change(4),
    "pipeline.skip": Change("0"),
    "pipeline.layers": Change("2,2,1"),
    "pipeline.max_slots": Change(2),
    "pipeline.split_backward": Change(True),
    "pipeline.budget_s": Change(0.5),
    "pipeline.nats": Change(0.02),
    "pipeline.prices": Change("prices.toml", {"pipeline.nats": 0.02}, {"pipeline.nats": 0.02}),
    "recipe.skip": Change("1/3 until 50%, 0", {"pipeline.skip": None}),
    "recipe.grow_preserving": Refused(True),
    "recipe.grow": Change("50%", GROWS, GROWS),
    "recipe.residual": Change("scaled"),
    "recipe.exposure": Refused([1.0, 2.0]),
    "recipe.swaps": Refused(0.5),
    "recipe.gradients": Change("all"),
    "recipe.early_exit": Change(0.5),
    "recipe.bridges": Change(8),
    "recipe.adapters": Refused(8),
    "recipe.adapters_by_hop": Refused(True),
    "recipe.adapters_shared": Refused(4),
    "recipe.repeats": Refused(1),
    "recipe.distill": Change(0.5, {"recipe.skip": "1/3", "pipeline.skip": None}),
    "recipe.distill_hidden": Change(1.5, TAUGHT, TAUGHT),
    "recipe.heal": Change("0%", FITTED, FITTED),
    "lora.rank": Change(4, WEIGHTS, WEIGHTS),
    "lora.alpha": Change(9.0, ADAPTERS, ADAPTERS),
    "lora.targets": Change(["q_proj"], ADAPTERS, ADAPTERS),
    "lora.weights": Refused("nowhere", "lora: adapters are for a model that exists"),
    "learning.optimizer": Change("sgd"),
    "learning.rate": Change(1e-3),
    "learning.warmup": Change(2),
    "learning.iterations": Change(50, {"iterations": 100}, {"iterations": 100}),
    "learning.hold": Change(0.1, {"iterations": 100}, {"iterations": 100}),
    "learning.floor": Change(0.5, {"iterations": 100}, {"iterations": 100}),
    "learning.beta1": Change(0.5),
    "learning.beta2": Change(0.5),
    "learning.epsilon": Change(1e-6),
    "learning.weight_decay": Change(0.2),
    "learning.clip": Change(0.5),
    "averaging.engine": Change("ring"),
    "averaging.dtype": Change("bf16"),
    "transport.wire": Change("fp32"),
    "transport.security": Change("none"),
    "transport.listen": Change("127.0.0.1:5999"),
    "transport.peers": Change("peers.json", JOINING),
    "transport.key": Change("another.key", {"transport.peers": "peers.json"}, JOINING),
    "compute.device": Refused("cuda:99", "device 'cuda:99': "),
    "compute.dtype": Change("bf16"),
    "compute.compiled": Change(True),
    "compute.threads": Change(2),
    "compute.offload": Change("optimizer"),
    "emulation.enabled": Change(True),
    "emulation.like": Change("llama-8b", {"emulation.enabled": True}, {"emulation.enabled": True}),
    "emulation.time": Change(0.5, {"emulation.enabled": True}, {"emulation.enabled": True}),
    "checkpoint.every": Change(7),
    "checkpoint.keep": Change(3),
    "validation.texts": Change(["other.txt"]),
    "validation.share": Change(0.5),
    "validation.every": Change(3, HELD_OUT, HELD_OUT),
    "validation.samples": Change(7, HELD_OUT, HELD_OUT),
    "validation.patience": Change(2, HELD_OUT, HELD_OUT),
    "survive.heartbeat_s": Change(9.0),
    "survive.join_s": Change(60.0),
    "survive.restarts": Change(1),
    "survive.lost_stage": Change("neighbours"),
    "survive.backup_every": Change(5),
    "survive.drift": Change(0.5),
    "survive.planning_s": Change(2.0),
    "report.recorded": Change(3),
    "report.tensorboard": Change(True),
    "report.prometheus": Change("a free port"),
    "report.wandb": Change("project") if find_spec("wandb") else Refused("project"),
    "report.mlflow": Change("experiment") if find_spec("mlflow") else Refused("experiment"),
}
"""Field → what shows that it is not ignored."""

WITHOUT_EFFECT: list[tuple[str, Any, Values]] = [
    ("data.vocabulary", 310, {"data.tokenizer": "tokenizer"}),
    ("data.vocabulary", 310, {"model.weights": "weights", "model.config": None}),
    ("emulation.like", "llama-8b", {}),
    ("emulation.time", 0.5, {}),
    ("checkpoint.keep", 3, {"checkpoint.every": 0}),
    ("transport.wire", "int8", {"pipeline.nats": 0.02}),
    ("averaging.dtype", "int8", {"pipeline.nats": 0.02}),
    ("pipeline.prices", "prices.toml", {}),
    ("survive.restarts", 1, JOINING),
    ("survive.lost_stage", "neighbours", TORCH),
    ("survive.backup_every", 5, TORCH),
    ("learning.beta2", 0.5, {"learning.optimizer": "sgd"}),
    ("learning.epsilon", 1e-6, {"learning.optimizer": "sgd"}),
    ("compute.offload", "averaging", TORCH),
    ("pipeline.skip", "1/3", {"recipe.skip": "1/3"}),
    *(
        (name, value, PLANNED)
        for name, value in {
            "batch.sequence": 8,
            "batch.samples": 2,
            "batch.microbatches": 24,
            "transport.wire": "fp32",
            "averaging.dtype": "bf16",
            "compute.dtype": "bf16",
            "model.checkpointing": True,
            "pipeline.stages": 4,
            "pipeline.skip": "0",
            "pipeline.layers": "2,2,1",
            "pipeline.max_slots": 2,
            "pipeline.split_backward": True,
            "pipeline.strategy": "skippipe",
            "pipeline.budget_s": 0.5,
            "pipeline.nats": 0.02,
        }.items()
    ),
    ("emulation.time", 0.5, {**PLANNED, "cluster": None, "emulation.enabled": True}),
]
"""Field, value, and the other fields with which it would be ignored: such a job is refused."""


SEEN: dict[str, Values] = {}
"""What is seen of jobs that were looked at already."""
PLANNED_ALREADY: dict[str, Plan] = {}
"""Most fields leave the problem that is planned as it is."""


def leaves(config: Any, place: str = "") -> Iterator[str]:
    for each in fields(config):
        value = getattr(config, each.name)
        at = f"{place}{each.name}"
        yield from leaves(value, f"{at}.") if is_dataclass(value) else [at]


def test_every_field_is_in_the_list() -> None:
    assert set(FIELDS) == set(leaves(JobConfig())), "a field needs a line in FIELDS, and FIELDS a field for each line"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fields")
    (made / "text.txt").write_text(WORDS * 50)
    (made / "other.txt").write_text(WORDS.upper() * 50)
    (made / "model.json").write_text(json.dumps(tiny("llama").to_dict()))
    (made / "records.jsonl").write_text(json.dumps({"text": WORDS * 50, "body": WORDS.upper() * 50}) + "\n")
    (made / "chats.jsonl").write_text((json.dumps({"prompt": "It was", "completion": "the best"}) + "\n") * 20)
    chat_tokenizer().save(made / "chat")
    train_bpe([WORDS], 300).save(made / "tokenizer")
    (made / "prices.toml").write_text("[int8]\nhops = 90.0\nweight_gradients = 90.0\n[int4]\nweight_gradients = 90.0\n")
    export_to(made / "weights")
    healed(made / "fitted", REPEATS)
    return made


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    if not (folder / "plan.json").exists():
        set_up(job_with({}), monkeypatch)[0].plan.save(folder / "plan.json")
    return folder


def job_with(values: Values) -> JobConfig:
    """A small job with these fields said otherwise; None: not said."""
    said: Values = {
        "output": "run",
        "iterations": 10,
        "cluster": "regions:6",
        "model.config": "model.json",
        "data.texts": ["text.txt"],
        "data.vocabulary": 300,
        "data.folder": "tokens",
        "batch.sequence": 16,
        "batch.samples": 1,
        "pipeline.stages": 3,
        "pipeline.skip": "1/3",
        **values,
    }
    table: Values = {}
    for name, value in said.items():
        if value is not None:
            *tables, last = name.split(".")
            (table.setdefault(tables[0], {}) if tables else table)[last] = value
    return from_table(JobConfig, table)


def set_up(job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[RunSetup, list[PlanRequest]]:
    """As `skippipe train` does it, with searches that are short and the same every time; what they were asked for."""
    requests: list[PlanRequest] = []

    def short(search: Any) -> Any:
        def searched(problem_or_plan: Any, *others: Any) -> Plan:
            *more, strategy, request = others
            requests.append(request)
            limited = strategy == "best" and search is make_plan_for
            little = {"budget_s": math.inf, "changes": 1} if limited else {"budget_s": 0.01}
            limits = replace(request, **little)
            key = repr((search, problem_or_plan, more, strategy, limits.seed, limits.placement, limits.robust, little))
            if key not in PLANNED_ALREADY:
                PLANNED_ALREADY[key] = search(problem_or_plan, *more, strategy, limits)
            return PLANNED_ALREADY[key]

        return searched

    monkeypatch.setattr(job_plan, "make_plan_for", short(make_plan_for))
    monkeypatch.setattr(job_plan, "with_paths_of", short(with_paths_of))
    shutil.rmtree(job.output, ignore_errors=True)
    with open_run_folder(Path(job.output)) as opened:
        return train_job.build_setup(job, [], True, opened), requests


def seen(job: JobConfig, monkeypatch: pytest.MonkeyPatch) -> Values:
    """What a run is made of: settings as they act, not as they were given."""
    setup, requests = set_up(job, monkeypatch)
    run, recipe, optim = setup.run, setup.node_config.recipe, setup.node_config.learning
    node = setup.node_config.to_json()
    del node["learning"], node["recipe"]
    others = ("plans", "optim", "skip_schedule")
    with train_job._callbacks(setup) as callback:
        assert isinstance(callback, CallbackList)
        names = [type(each).__name__ for each in callback._callbacks]
    return {
        "node": node,
        "plans": {length: plan.to_json() for length, plan in setup.plans.items()},
        "rates": [optim.rate_at(number) for number in range(job.iterations)],
        "clipped": optim.clipping([9.0]),
        "optimizer": (optim.optimizer, OPTIMIZERS[optim.optimizer].hyperparameters(optim), optim.weight_decay),  # type: ignore[attr-defined]
        "recipe": (recipe.residual_scale(3, 2), recipe.divisor(1, 2), recipe.early_exit, dict(setup.lengths)),
        "settings": {name: repr(value) for name, value in vars(run.settings).items() if name not in others},
        "run": (run.output, run.kept, run.security, run.listen, run.nodes_join, run.restarts, run.iterations),
        "read": setup.read_while_training,
        "planned": [(request.seed, request.budget_s) for request in requests],
        "callbacks": names,
    }


@pytest.mark.parametrize("name", [name for name, entry in FIELDS.items() if isinstance(entry, Change)])
@pytest.mark.usefixtures("here")
def test_a_field_has_an_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = FIELDS[name]
    value = free_port("127.0.0.1") if entry.value == "a free port" else entry.value
    before = job_with(entry.before)
    if (key := repr(before)) not in SEEN:
        SEEN[key] = seen(before, monkeypatch)
    after = job_with({**entry.others, name: value})
    assert after.value(name) != before.value(name)
    assert seen(after, monkeypatch) != SEEN[key]


@pytest.mark.parametrize("name", [name for name, entry in FIELDS.items() if isinstance(entry, Refused)])
@pytest.mark.usefixtures("here")
def test_a_field_is_refused(name: str) -> None:
    with pytest.raises(UserError) as caught:
        build_run(job_with({name: FIELDS[name].value}))
    assert str(caught.value).startswith(FIELDS[name].error or f"{name}: ")


def test_a_new_job_has_the_fields_that_are_not_refused() -> None:
    """Of its recipe: values of others may be refused on this machine alone."""
    recipe = {name: entry for name, entry in FIELDS.items() if name.startswith("recipe.")}
    refused = {name for name, entry in recipe.items() if isinstance(entry, Refused)}
    assert refused == FOR_STUDIES
    text = example(JobConfig, omitted=FOR_STUDIES)
    assert {f"recipe.{name}" for name in tomllib.loads(text)["recipe"]} == recipe.keys() - refused
    assert all(model in text for model in MODELS), "presets of model.config"


@pytest.mark.parametrize(("name", "value", "others"), WITHOUT_EFFECT)
@pytest.mark.usefixtures("here")
def test_a_field_that_another_leaves_without_effect_is_refused(name: str, value: Any, others: Values) -> None:
    assert name in FIELDS
    with pytest.raises(UserError) as caught:
        build_run(job_with({**others, name: value}))
    said = str(caught.value)
    assert said.startswith((f"{name}: ", f"{name} and "))
    assert "leave" in said, "what to do"
    assert "\n" not in said
    job_with({**others, name: None})  # the others alone are fine


@pytest.mark.usefixtures("here")
def test_what_is_seen_of_a_job_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(job_with({}), monkeypatch) == seen(job_with({}), monkeypatch)
