"""docs/formats.md#training says how to train: a trainer written from it alone and the package's own agree."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from skippipe.data.batch_sampler import BatchSampler, permute
from skippipe.data.prepare import prepare
from skippipe.model.model_spec import ModelSpec, config_from, config_named
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.problem import PlanRequest
from skippipe.planner.strategies import has_lengths
from skippipe.skip_schedule import USUAL, SkipSchedule, parts_of
from skippipe.timeline import Timeline, Timing
from skippipe.toml_config import from_table
from skippipe.training.backends import BACKENDS, one_process
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.job_config import FOR_STUDIES, JobConfig, load_job
from skippipe.training.metrics import IterationMetrics, MetricsFile
from skippipe.training.reference import ReferenceState, ReferenceTrainer
from skippipe.workload import LinkDtypes, Workload
from tests.helpers import oracle_trainer as oracle
from tests.helpers.doc_pages import ROOT, pieces
from tests.helpers.jobs import WORDS
from tests.helpers.models import tiny
from tests.helpers.oracle_trainer import Done, Json, Trainer
from tests.helpers.plans import uniform_cluster

torch.set_num_threads(1)

PAGE = (ROOT / "docs/formats.md").read_text()
SECTION = re.split(r"^## Training$", PAGE, flags=re.MULTILINE)[1].partition("\n## ")[0]
EXAMPLE = SECTION.partition("### A worked example")[2]

Visits = tuple[tuple[tuple[int, ...], int], ...]
"""Of each lane: the stages that it visits, and its microbatches."""
FULL: Visits = (((0, 1, 2, 3), 2), ((0, 1, 2, 3), 1))
SWAPPED: Visits = (((0, 2, 1, 3), 1), ((0, 1, 3, 2), 2))
CODECS = ("fp32", "bf16", "int8")
SEVERAL = tuple(
    LinkDtypes(f"n{i}", f"n{j}", CODECS[(i + j) % 3], CODECS[(i + 2 * j) % 3]) for i in range(4) for j in range(4)
)
SANDWICH: Visits = (((0, 1, 2, 3), 2), ((0, 2, 3), 1), ((0, 1, 3), 1), ((0, 2), 1))
SHORTER: Visits = (((0, 1, 2), 2), ((0, 1, 3), 1), ((0, 2, 3), 2))
UNEQUAL: Visits = (((0, 2, 1), 2), ((0, 3), 1))


@dataclass(frozen=True)
class Setting:
    """All that a run is made of."""

    config: Any
    paths: tuple[Visits, ...]
    """Of the usual plan, and of the others."""
    job: Json = field(default_factory=dict)
    workload: Json = field(default_factory=dict)
    layers: tuple[int, ...] = (1, 2, 1, 1)
    sequence: int = 12
    samples: int = 2
    tokens: Any = field(default_factory=lambda: np.random.default_rng(5).integers(0, 97, 160))
    """Enough for two iterations and a sample: the second epoch begins in the middle of a microbatch."""

    @property
    def plans(self) -> list[Plan]:
        model = ModelSpec(self.config).shape
        exact: Json = {"wire_dtype": "fp32", "compute_dtype": "fp32", **self.workload}
        microbatches = sum(count for _, count in self.paths[0])
        return plans_of(Workload(model, self.sequence, self.samples, microbatches, **exact), self.layers, self.paths)


def plans_of(work: Workload, layers: tuple[int, ...], paths: tuple[Visits, ...]) -> list[Plan]:
    """One node a stage; nothing is planned, so that the planner need not be compiled."""
    stages = tuple(Stage(count, (number,), (number,)) for number, count in enumerate(layers))
    lanes = [tuple(Lane(*lane) for lane in visits) for visits in paths]
    return [Plan(uniform_cluster(len(stages)), work, stages, each) for each in lanes]


def by_package(setting: Setting) -> tuple[list[ReferenceState], dict[str, torch.Tensor]]:
    said, plans = setting.job, setting.plans
    job = JobConfig(
        iterations=said["iterations"],
        seed=said["seed"],
        recipe=SkipSchedule(**said.get("recipe", {})),
        learning=OptimConfig(**said.get("learning", {})),
    )
    stages, usual = len(plans[0].stages), plans[0].visited
    lengths = {job.recipe.visited(number, job.iterations, stages, usual) for number in range(job.iterations)}
    lengths = lengths if job.recipe.phases else set()
    one = ReferenceTrainer(
        plans[0],
        ModelSpec(setting.config, job.seed, bridges=job.recipe.bridges),
        job.schedule,
        BatchSampler(setting.tokens, setting.sequence, job.seed, plans[0].microbatches, setting.samples),
        recipe=job.recipe,
        plans={length: next(plan for plan in plans if has_lengths(plan, length)) for length in lengths},
        iterations=job.iterations,
    )
    return [one.iteration(number) for number in range(job.iterations)], one.weights()


def trainer(setting: Setting) -> Trainer:
    named = {"pipeline": {"plan": "plan.json"}, **setting.job}  # or what is usual would be skipped
    return Trainer(named, [plan.to_json() for plan in setting.plans], setting.tokens, setting.config)


def by_page(setting: Setting) -> tuple[list[Done], dict[str, torch.Tensor]]:
    second = trainer(setting)
    return [second.iteration(number) for number in range(second.iterations)], second.named_weights()


def distances(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far off each tensor is, relative to its size."""
    assert found.keys() == expected.keys()
    return {name: float((found[name] - each).norm() / each.norm()) for name, each in expected.items()}


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A single weight whose gradient cancels may move by some more: most tensors are within 3e-7."""
    assert {name: off for name, off in distances(found, expected).items() if not off < 1e-5} == {}


LEARNING = {"rate": 3e-3, "warmup": 1, "hold": 0.25}
SWITCHED = {"skip": "1/2 until 1/3, 0 + 1/2 until 2/3, 0", "residual": "scaled"}
RICH = {"residual": "scaled", "early_exit": 0.3}
TEACHER = {"distill": 0.6, "distill_hidden": 1.5}
MIXED = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"] * 2}
SETTINGS = {
    "nobody visits stage 1 at times, not clipped": Setting(
        tiny("llama"),
        (FULL, (((0, 3), 3),)),
        {
            "iterations": 6,
            "recipe": SWITCHED,
            "learning": {**LEARNING, "clip": 0.0, "epsilon": 1e-3, "weight_decay": 1.0},
        },
    ),
    "early exit, over all, clipped, eager, all sliding": Setting(
        tiny("mistral", attn_implementation="eager"),
        (UNEQUAL,),
        {
            "recipe": {"early_exit": 0.3, "gradients": "all"},
            "learning": {**LEARNING, "clip": 0.05, "epsilon": 1e-3},
        },
    ),
    "tied, padded, early exit, some sliding": Setting(
        tiny("qwen3", tie_word_embeddings=True, pad_token_id=3, num_hidden_layers=4, **MIXED),
        (SWAPPED,),
        {"recipe": {"early_exit": 0.3}},
        layers=(1, 1, 1, 1),
    ),
    "sandwich over bridges": Setting(
        tiny("llama"),
        (SANDWICH, SHORTER),
        {
            "iterations": 5,
            "recipe": {"skip": "1/4 until 40%, 0 & 1/4 & 1/2", **RICH, "bridges": 4},
            "learning": {**LEARNING, "weight_decay": 1.0},
        },
    ),
    "taught by the whole model": Setting(
        tiny("llama"),
        (UNEQUAL,),
        {"recipe": {**TEACHER, **RICH}, "learning": {**LEARNING, "epsilon": 1e-3}},
        {"teacher": "hidden"},
    ),
    "mixture": Setting(tiny("qwen3_moe"), (UNEQUAL,), {"recipe": {"residual": "scaled"}}),
}


def with_defaults(setting: Setting) -> Setting:
    return replace(setting, job={"iterations": 3, "seed": 11, "learning": LEARNING, **setting.job})


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trainer_from_the_page_agrees(name: str) -> None:
    setting = with_defaults(SETTINGS[name])
    found, weights = by_package(setting)
    expected, other_weights = by_page(setting)
    assert [done.rate for done in found] == pytest.approx([done.rate for done in expected], rel=1e-12)
    assert [done.loss for done in found] == pytest.approx([done.loss for done in expected], rel=1e-6)
    assert [done.norm for done in found] == pytest.approx([done.norm for done in expected], rel=1e-5)
    assert_same_weights(weights, other_weights)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # where the processor has no bf16
@pytest.mark.parametrize(
    ("family", "recipe", "workload"),
    [
        ("llama", RICH, {"wire_dtype": "int8"}),
        ("llama", RICH, {"wire_dtype": "bf16"}),
        ("llama", RICH, {"wire_dtype": "fp32", "wire_dtypes": SEVERAL}),
        ("qwen3_moe", RICH, {"wire_dtype": "fp32", "compute_dtype": "bf16"}),
        ("llama", {**TEACHER, **RICH}, {"wire_dtype": "int8", "teacher": "hidden"}),
    ],
    ids=["int8 hops", "bf16 hops", "hops of several codecs", "bf16", "int8 hops to and from a teacher"],
)
def test_rounding(family: str, recipe: Json, workload: Json) -> None:
    """The first iteration to the last digits. Then a value tips over to the next step now and then."""
    setting = with_defaults(Setting(tiny(family), (UNEQUAL,), {"recipe": recipe, "iterations": 2}, workload))
    found, weights = by_package(setting)
    expected, other_weights = by_page(setting)
    unrounded = {name: value for name, value in workload.items() if name == "teacher"}
    exact, exact_weights = by_page(replace(setting, workload=unrounded))
    assert found[0].loss == pytest.approx(expected[0].loss, rel=1e-7)
    assert found[0].norm == pytest.approx(expected[0].norm, rel=1e-7)
    assert found[0].norm != pytest.approx(exact[0].norm, rel=1e-5), "nothing was rounded"
    off, rounding = distances(weights, other_weights), distances(weights, exact_weights)
    assert sum(off.values()) < 0.2 * sum(rounding.values())


def test_a_run_is_rebuilt_from_its_files(tmp_path: Path) -> None:
    """Job, plans, tokens and configuration, as a run leaves them: a third is skipped until 65%, as is usual."""
    config, text, output = tmp_path / "model.json", tmp_path / "text.txt", tmp_path / "run"
    config.write_text(json.dumps(tiny("qwen3", tie_word_embeddings=True, num_hidden_layers=4).to_dict()))
    text.write_text("It was the best of links, it was the worst of links, it was the age of wisdom. " * 20)
    job = f"""
output = "{output}"
iterations = 5
seed = 3
model.config = "{config}"
learning = {{warmup = 2, rate = 3e-3}}
checkpoint.every = 0
"""
    (tmp_path / "job.toml").write_text(job)
    asked = load_job(tmp_path / "job.toml")
    tokens = prepare([text], 300, tmp_path / "tokens")
    spec = ModelSpec(config_named(asked.model.config, tokens.vocabulary), asked.seed)
    work = Workload(spec.shape, 8, 2, 4, wire_dtype="fp32", compute_dtype="fp32")
    promise = Timeline(Timing.FULL, 10**9, 10**9, (), (), (), ())
    paths = (((0, 2), 3), ((0, 1), 1)), (((0, 2, 1), 1), ((0, 1, 2), 3))
    two, three = (plan.promising(promise) for plan in plans_of(work, (1, 2, 1), paths))
    run_setup = RunSetup(asked, two, spec, tokens, {2: two, 3: three}, {2: 4, 3: 1})
    output.mkdir()
    run_setup.save_plans()
    one_process(run_setup, MetricsFile(output / "metrics.jsonl", IterationMetrics(two), asked.iterations), lambda: 0)
    assert [each.length for each in rebuilt(tomllib.loads(job), tmp_path)] == [2, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("count", "layers"),
    [
        pytest.param(4, "", id="stages of one layer", marks=pytest.mark.slow),
        pytest.param(8, "", id="stages of two layers are copied whole", marks=pytest.mark.slow),
        pytest.param(9, "2,3,2,2", id="unequal stages"),
    ],
)
def test_a_run_that_grows_is_rebuilt_from_its_files(tmp_path: Path, count: int, layers: str) -> None:
    """Two stages for two iterations, three for two, then all four in sandwiches with bridges."""
    (tmp_path / "model.json").write_text(json.dumps(tiny("llama", num_hidden_layers=count).to_dict()))
    (tmp_path / "text.txt").write_text(WORDS * 20)
    said: Json = {
        "output": str(tmp_path / "run"),
        "iterations": 7,
        "cluster": "datacentre:6",
        "model": {"config": str(tmp_path / "model.json")},
        "data": {"texts": str(tmp_path / "text.txt"), "vocabulary": 300, "folder": str(tmp_path / "tokens")},
        "batch": {"sequence": 8, "samples": 1, "microbatches": 6},
        "pipeline": {"stages": 4, "strategy": "skippipe", "max_slots": 6, "layers": layers},
        "recipe": {"skip": "1/2 until 2/7, 1/4 until 4/7, 0 & 1/4", "grow": "2/7, 4/7", "bridges": 2},
        "transport": {"wire": "fp32"},
        "learning": LEARNING,
    }
    run_setup = build_run(from_table(JobConfig, said), request=PlanRequest(budget_s=0.2, changes=300))
    run_setup.save_plans()
    metrics = MetricsFile(tmp_path / "run/metrics.jsonl", IterationMetrics(run_setup.plan), run_setup.job.iterations)
    BACKENDS["one-process"](run_setup, metrics, lambda: 0)
    assert [each.length for each in rebuilt(said, tmp_path)] == [2, 2, 3, 3, 4, 4, 4]


def rebuilt(said: Json, folder: Path) -> list[Done]:
    """Train once more, by the page: what the run has written agrees with it."""
    output = folder / "run"
    again = oracle.trainer_of(said, output, folder / "tokens")
    done = [again.iteration(number) for number in range(said["iterations"])]
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for field_, name in (("loss", "loss"), ("gradient_norm", "norm"), ("learning_rate", "rate")):
        assert [line[field_] for line in metrics] == pytest.approx([getattr(each, name) for each in done], rel=1e-5)
    weights: dict[str, torch.Tensor] = {}
    for file in (output / "model").glob("*.safetensors"):
        weights |= load_file(file)
    expected = again.named_weights()
    flat = [{name: each.flatten() for name, each in found.items()} for found in (weights, expected)]
    assert_same_weights(*flat)  # in a file, bridges have another shape
    return done


# What the page says, in numbers


def rows(text: str) -> dict[str, list[str]]:
    """Of tables: first cell → the others."""
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    return {cells[0]: cells[1:] for cells in found}


def test_the_worked_example() -> None:
    """By the package, and by the trainer from the page."""
    (said,) = [json.loads(piece.text) for piece in pieces(EXAMPLE) if piece.kind == "json"]
    lanes = [tuple((tuple(visits), count) for visits, count in said["lanes"][length]) for length in ("3", "2")]
    setting = Setting(
        config_from(said["config"]),
        tuple(lanes),
        said["job"],
        {name: said[name] for name in ("wire_dtype", "compute_dtype")},
        tuple(said["layers"]),
        said["sequence_tokens"],
        said["samples_per_microbatch"],
        np.array([(k * k + k // 7) % 31 for k in range(300)]),
    )
    found, weights = by_package(setting)
    second = trainer(setting)
    table = rows(EXAMPLE)
    sampler = BatchSampler(setting.tokens, 8, 7, 4, 2)
    for number, one in enumerate(found):
        windows = [sampler.window(number, 0, sample) for sample in range(2)]
        for ours, theirs in zip(sampler.batch(number, 0), second.batch(number, 0), strict=True):
            assert (ours == theirs.numpy()).all()
        done = second.iteration(number)
        for each in (one, done):
            *exactly, norm, loss = table[str(number)]
            assert [str(done.length), "{}, {}".format(*windows), f"{each.rate:.8f}"] == exactly
            assert [each.norm, each.loss] == pytest.approx([float(norm), float(loss)], abs=1.5e-5)  # processors differ
    assert table["windows"] == [str(sampler.windows)]
    assert table["first key of epoch 0"] == [f"`{oracle.keys(7, 0)[0]:#x}`"]
    assert table["where offsets 0 to 9 of epoch 0 go"] == [", ".join(str(permute(7, 0, k, 37)) for k in range(10))]
    assert table["`7/layer 2` seeds torch with"] == [str(oracle.generator_seed(7, "layer 2"))]
    drawn = ModelSpec(setting.config, 7).layer(2).state_dict()["self_attn.q_proj.weight"][0, :3].tolist()
    begins = ", ".join(f"{each:.5f}".replace("-", "−") for each in drawn)
    assert table["`model.layers.2.self_attn.q_proj.weight` begins with"] == [begins]
    for trained in (weights, second.named_weights()):
        total = sum(float(weight.double().abs().sum()) for weight in trained.values())
        assert [f"{total:.4f}"] == table["sum of the magnitudes of all weights, after the last step"]


def test_fields_and_their_defaults() -> None:
    job = asdict(JobConfig())
    flat = {name: value for name, value in job.items() if name in ("iterations", "seed")}
    flat |= {f"learning.{name}": value for name, value in job["learning"].items()}
    flat |= {f"lora.{name}": value for name, value in job["lora"].items() if name != "weights"}
    recipe = {f"recipe.{name}": value for name, value in job["recipe"].items()}
    flat |= {name: value for name, value in recipe.items() if name not in FOR_STUDIES}
    table = rows(SECTION.partition("### Paths")[0].partition("| job field |")[2])
    said = {name.strip("`"): json.loads(cells[0].strip("`")) for name, cells in table.items()}
    assert said == flat


@pytest.mark.parametrize("clip", [0.0, 1e-6, 1.0])
def test_clipping(clip: float) -> None:
    """Where the norm is next to nothing, too."""
    for norm in (0.0, 1e-9, 1e-6, 0.3, 1.0, 7.0):
        (found, factor) = OptimConfig(clip=clip).clipping([norm**2])
        assert factor == pytest.approx(oracle.clipping_factor(clip, found), rel=1e-12)


@pytest.mark.parametrize("iterations", [0, 31])
@pytest.mark.parametrize(("warmup", "hold"), [(0, 0.0), (4, 0.6), (4, 0.0), (30, 0.9)])
def test_learning_rates(warmup: int, hold: float, iterations: int) -> None:
    said = OptimConfig(warmup=warmup, hold=hold, iterations=iterations)
    job = JobConfig(iterations=20, learning=said)
    expected = [oracle.learning_rate(asdict(said), 20, number) for number in range(20)]
    assert [job.schedule.rate_at(number) for number in range(20)] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    "skip",
    [
        "1/3",
        "33% until 0.5, 0",
        USUAL,
        "9 x 1/3 + 0",
        "1/2 until 25%, 2x 1/3 + 1/6 until 7/9, 0 + 1/2",
        "0 & 2 x 1/2 until 0.5, 1/4 + 5 x 0 & 1/2",
    ],
)
def test_lengths_of_paths(skip: str) -> None:
    recipe = SkipSchedule(skip)
    for iterations, stages in product((1, 7, 20, 101), (4, 5, 6, 9)):
        found = [parts_of(recipe.visited(number, iterations, stages, 0)) for number in range(iterations)]
        expected = [oracle.path_lengths(skip, iterations, stages, number) for number in range(iterations)]
        assert list(map(sorted, found)) == list(map(sorted, expected))


@pytest.mark.parametrize("windows", [1, 2, 3, 16, 17, 64, 65, 1000, 5000])
def test_permutations(windows: int) -> None:
    for seed, epoch in ((0, 0), (7, 3)):
        offsets = range(0, windows, max(1, windows // 40))
        found = [permute(seed, epoch, offset, windows) for offset in offsets]
        assert found == [oracle.permuted(seed, epoch, offset, windows) for offset in offsets]


def test_the_other_trainer_is_another() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "torch" in names
    assert [name for name in names if name.split(".")[0] in ("skippipe", "tests", "")] == []
