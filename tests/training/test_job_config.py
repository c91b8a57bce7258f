"""Job files: whatever is wrong is one line that says what, where and what to do, before anything is started."""

from __future__ import annotations

import json
import socket
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from skippipe.codecs import CODECS
from skippipe.errors import UserError
from skippipe.json_fields import json_text
from skippipe.model.model_spec import ModelSpec
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.problem import PlanRequest, lane_unit
from skippipe.planner.strategies import has_lengths
from skippipe.presets import preset
from skippipe.runtime.coordinator.interfaces import Callback, IterationReport
from skippipe.runtime.node.interfaces import JoinConfig
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.train_role import train_role
from skippipe.skip_schedule import SkipSchedule
from skippipe.toml_config import example, field_texts, from_table
from skippipe.training import train_job
from skippipe.training.backends import BACKENDS, one_process, virtual
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.job_config import ADVISED, JobConfig, load_job
from skippipe.training.job_plan import plans_by_length
from skippipe.validate import validate
from skippipe.workload import Workload
from tests.helpers.jobs import WORDS
from tests.helpers.models import tiny
from tests.helpers.plans import uniform_cluster
from tests.helpers.single_node import Bench

QUICK = PlanRequest(seed=0, budget_s=0.2, changes=300)


def job_in(folder: Path, text: str) -> JobConfig:
    file = folder / "job.toml"
    file.write_text(text, encoding="utf-8")
    return load_job(file)


def complaint_about(folder: Path, text: str) -> str:
    """The one line, without the name of the file, which every complaint about it starts with."""
    with pytest.raises(UserError) as caught:
        job_in(folder, text)
    said = str(caught.value)
    assert "\n" not in said
    start = f"{folder / 'job.toml'}: "
    assert said.startswith(start)
    return said.removeprefix(start)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("iteration = 5", "iteration: no such field; did you mean 'iterations'?"),
        ("[pipelines]\nstages = 3", "pipelines: no such field; did you mean 'pipeline'?"),
        ("[model]\nconfg = 'x'", "model.confg: no such field; did you mean 'config'?"),
        ("[averaging]\nquite_another = 1", "averaging.quite_another: no such field; there are engine, dtype"),
        ("iterations = '5'", "iterations: expected a whole number, found '5'"),
        ("iterations = 5.0", "iterations: expected a whole number, found 5.0"),
        ("iterations = true", "iterations: expected a whole number, found True"),
        ("output = 3", "output: expected a text in quotes, found 3"),
        ("[learning]\nrate = 'high'", "learning.rate: expected a number, found 'high'"),
        ("[learning]\nrate = true", "learning.rate: expected a number, found True"),
        ("[compute]\ncompiled = 1", "compute.compiled: expected true or false, found 1"),
        ("[data]\ntexts = [1, 2]", "data.texts[0]: expected a text in quotes, found 1"),
        ("model = 'llama-tiny'", "model: expected a table, written [model]"),
        ("[[model]]\nconfig = 'x'", "model: expected a table, written [model]"),
        ("[averaging]\nengine = 'gloo'", "averaging.engine: 'gloo' is none of auto, ring, torch"),
        (
            "[transport]\nwire = 'fp64'",
            f"transport.wire: 'fp64' is none of {', '.join(CODECS)}",
        ),
        ("[compute]\ndtype = ['fp32']", "compute.dtype: ['fp32'] is none of fp32, bf16"),
        ("iterations = 0", "iterations: 0 is out of range; give 1 to 1,000,000,000"),
        ("seed = -1", "seed: -1 is out of range; give 0 to 9,007,199,254,740,992"),
        ("[batch]\nsequence = 0", "batch.sequence: 0 is out of range; give 1 to 10,000,000"),
        ("[batch]\nsamples = -2", "batch.samples: -2 is out of range; give 1 to 1,000,000"),
        ("[batch]\nmicrobatches = -1", "batch.microbatches: -1 is out of range; give 0 to 100,000"),
        ("[data]\nvocabulary = 256", "data.vocabulary: 256 is out of range; give 257 to 10,000,000"),
        ("[pipeline]\nmax_slots = 0", "pipeline.max_slots: 0 is out of range; give 1 to 1,000,000"),
        ("[pipeline]\nbudget_s = 0", "pipeline.budget_s: 0 is out of range; give 0.001 to 604,800"),
        ("[compute]\nthreads = 0", "compute.threads: 0 is out of range; give 1 to 1,024"),
        ("[report]\nrecorded = -1", "report.recorded: -1 is out of range; give 0 to 1,000,000,000"),
        ("[learning]\nrate = nan", "learning.rate: nan is not a finite number"),
        ("[learning]\nclip = inf", "learning.clip: inf is not a finite number"),
        (f"[learning]\nrate = 1{'0' * 400}", "learning.rate: a number of some 401 digits is not a finite number"),
        ("[learning]\nrate = 0", "learning.rate: 0 is out of range; give above 0 to 100"),
        ("[learning]\nepsilon = 0", "learning.epsilon: 0 is out of range; give above 0 to 1"),
        ("[learning]\nwarmup = -1", "learning.warmup: -1 is out of range; give 0 to 999,999,999"),
        ("[learning]\nclip = -1", "learning.clip: -1 is out of range; give 0 to 1,000,000,000"),
        ("[learning]\nweight_decay = -0.1", "learning.weight_decay: -0.1 is out of range; give 0 to 100"),
        ("[learning]\nbeta2 = 1", "learning.beta2: 1 is out of range; give 0 to below 1"),
        ("[learning]\nfloor = 1.5", "learning.floor: 1.5 is out of range; give 0 to 1"),
        ("[learning]\nwarmup = 20\niterations = 20", "learning.warmup: 20 iterations of warm-up leave none of 20"),
        ("[emulation]\nenabled = true\ntime = 0", "emulation.time: 0 is out of range; give 1e-06 to 1,000"),
        (
            "[emulation]\nenabled = true\n[transport]\npeers = 'p'\nkey = 'k'",
            "emulation.enabled: nodes that join from other machines cannot be emulated",
        ),
        ("[transport]\npeers = 'p'", "transport.peers and transport.key go together"),
        ("[transport]\nkey = 'k'", "transport.peers and transport.key go together"),
        (
            "[transport]\npeers = 'p'\nkey = 'k'\nsecurity = 'none'",
            "transport.peers: a list of keys is of no use with security 'none'",
        ),
        ("[averaging]\nengine = 'torch'\ndtype = 'int8'", "averaging.dtype: torch averages in fp32, not int8"),
        (
            "[averaging]\nengine = 'torch'\n[transport]\npeers = 'p'\nkey = 'k'",
            "averaging.engine: 'torch' is for nodes that are started here",
        ),
        ("iterations = 1000000000000", "iterations: 1,000,000,000,000 is out of range; give 1 to 1,000,000,000"),
        (f"seed = {2**70}", "seed: 1,180,591,620,717,411,303,424 is out of range; give 0 to 9,007,199,254,740,992"),
        (f"seed = 0x{'f' * 9999}", "seed: a number of some 12,040 digits is out of range"),
        (f"seed = {'9' * 9999}", "not valid TOML: Exceeds the limit"),
        ("[survive]\nheartbeat_s = 1e-9", "survive.heartbeat_s: 1e-09 is out of range; give 0.1 to 3,600"),
        (f"skip = {'[' * 9999}", "not valid TOML: "),
        ("iterations = ", "not valid TOML: Invalid value (at "),
        ("iterations = 1\niterations = 2", "not valid TOML: Cannot overwrite a value (at "),
    ],
)
def test_what_is_wrong_is_one_line(text: str, complaint: str, tmp_path: Path) -> None:
    assert complaint_about(tmp_path, text).startswith(complaint)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"job\.toml: no such file"):
        load_job(tmp_path / "job.toml")
    with pytest.raises(UserError, match="this is a folder"):
        load_job(tmp_path)
    (tmp_path / "job.toml").write_bytes(b"output = '\xff'")
    with pytest.raises(UserError, match="cannot be read"):
        load_job(tmp_path / "job.toml")


def test_whole_numbers_are_numbers_and_a_text_is_a_list_of_one(tmp_path: Path) -> None:
    job = job_in(tmp_path, "[learning]\nrate = 1\n[data]\ntexts = 'classics'")
    assert job.learning.rate == 1.0
    assert isinstance(job.learning.rate, float)
    assert job.data.texts == ["classics"]


def test_the_example_is_the_default_job_with_every_field_explained() -> None:
    text = example(JobConfig)
    assert from_table(JobConfig, tomllib.loads(text)) == JobConfig()
    said = tomllib.loads(text)
    for field in fields(JobConfig):
        assert field.name in said
        inner = getattr(JobConfig(), field.name)
        if isinstance(said[field.name], dict):
            names = {each.name for each in fields(inner)}
            assert set(said[field.name]) == {name for name in names if getattr(inner, name) is not None}
            assert field_texts(type(inner)).keys() == names, f"[{field.name}] has unexplained fields"
    assert field_texts(JobConfig).keys() == said.keys()
    assert max(len(line) for line in text.splitlines()) <= 100
    advised = from_table(JobConfig, tomllib.loads(example(JobConfig, advised=ADVISED)))
    assert {name: advised.value(name) for name in ADVISED} == ADVISED
    assert replace(advised, transport=JobConfig().transport, averaging=JobConfig().averaging) == JobConfig()
    words = example(JobConfig, advised=ADVISED).replace("#", " ").split()
    assert " ".join(words).count("Left out: ") == len(ADVISED)


def test_the_rate_falls_over_the_run_unless_it_is_told_otherwise() -> None:
    assert JobConfig(iterations=300).schedule.iterations == 300
    assert JobConfig(iterations=5).schedule.iterations == JobConfig().learning.warmup + 1
    assert JobConfig(iterations=5, learning=OptimConfig(iterations=70)).schedule.iterations == 70


# Beyond the file: what it names


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("job")
    (made / "text.txt").write_text(WORDS * 50)
    (made / "model.json").write_text(json.dumps(tiny("llama").to_dict()))
    assembled(made)  # makes the tokens, once
    return made


def assembled(folder: Path, text: str = "", **pipeline: Any) -> RunSetup:
    """A small job with some fields said otherwise."""
    said: dict[str, Any] = {
        "output": str(folder / "run"),
        "cluster": "regions:4",
        "model": {"config": str(folder / "model.json")},
        "data": {"texts": str(folder / "text.txt"), "vocabulary": 300, "folder": str(folder / "tokens")},
        "batch": {"sequence": 16, "samples": 1},
        "pipeline": {"stages": 3, **pipeline},
    }
    for name, value in tomllib.loads(text).items():
        said[name] = {**said.get(name, {}), **value} if isinstance(value, dict) else value
    return build_run(from_table(JobConfig, said), request=QUICK)


def complaint_of(folder: Path, text: str = "", **pipeline: Any) -> str:
    with pytest.raises(UserError) as caught:
        assembled(folder, text, **pipeline)
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("cluster = 'nowhere'", "cluster 'nowhere': no such file, and not one of"),
        ("cluster = 'regions:x'", "regions:x"),
        ("[data]\ntexts = '/no/such.txt'", "/no/such.txt: no such text file"),
        ("[data]\ntexts = []", "no text to prepare"),
        ("[data]\nvocabulary = 2048\ntokenizer = '/no/such'", "/no/such: no such tokenizer"),
        ("[model]\nconfig = 'gpt-9'", "model 'gpt-9': neither a preset (llama-tiny, "),
        ("[compute]\ndevice = 'tpu'", "device 'tpu': expected cpu, cpu:K (K workers), cuda, cuda:N or cuda:N-M"),
        ("[compute]\ndevice = 'cuda:7'", "device 'cuda:7': "),
        ("[batch]\nsequence = 100000", "tokens is too short for a sequence of 100,000"),
        ("[pipeline]\nstages = 9", "9 stages need at least 9 nodes"),
        ("[pipeline]\nskip = 'some'", "skip: 'some' is not a share"),
        ("[pipeline]\nlayers = '1,1'", "layers 1,1"),
        ("[batch]\nmicrobatches = 1", "CC3"),
        (
            "iterations = 9\n[recipe]\nskip = '2/3 until 50%, 0'",
            "recipe.skip: '2/3 until 50%, 0' leaves 1 of 3 stages in 5 iterations; a path has at least 2: skip 1/3 at ",
        ),
        (
            "[batch]\nmicrobatches = 3\n[recipe]\nskip = '0 until 90%, 1/3'",
            "recipe.skip: paths through 2 of 3 stages: 3 microbatches over 1 of 2 stages cannot visit each equally "
            "often (CC3): use a multiple of 2, such as 2 or 4",
        ),
        ("[emulation]\nenabled = true\nlike = 'gpt-9'", "model 'gpt-9'"),
        ("[report]\nprometheus = 99999", "report.prometheus"),
    ],
)
def test_what_cannot_be_found_or_done_is_one_line(text: str, complaint: str, folder: Path) -> None:
    assert complaint in complaint_of(folder, text)


def test_cuda_needs_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    said = complaint_of(folder, "[compute]\ndevice = 'cuda'")
    assert said.startswith("device 'cuda': torch ") and said.endswith(", or use cpu")


def test_an_output_that_cannot_be_a_folder(folder: Path) -> None:
    (folder / "taken").write_text("")
    assert (
        complaint_of(folder, f"output = '{folder / 'taken'}'") == f"output: {folder / 'taken'} is a file; name a folder"
    )
    assert "cannot be made" in complaint_of(folder, f"output = '{folder / 'taken' / 'below'}'")
    assert "cannot be made" in complaint_of(folder, f"output = '{'x' * 300}'")


def test_a_plan_must_be_there_and_fit(folder: Path) -> None:
    assert "nowhere.json: no such file" in complaint_of(folder, plan="nowhere.json")
    good = assembled(folder).plan
    file = folder / "plan.json"
    good.save(file)
    assert (
        complaint_of(folder, plan=str(file), stages=99)
        == f"pipeline.stages: 99, and pipeline.plan settles that: {file} has 3; leave one of them out"
    )
    again = assembled(folder, plan=str(file)).plan
    assert again == good
    assert again.expected is not None

    other = replace(good.workload.model, hidden=48, name="other")
    replace(good, workload=replace(good.workload, model=other), expected=None).save(file)
    said = complaint_of(folder, plan=str(file))
    assert "this plan is for another model than" in said
    assert "hidden 48 in the plan, 32 here" in said
    assert "vocab" not in said

    good.save(file)
    assert f"for the cluster '{good.cluster.name}', the job names" in complaint_of(
        folder, "cluster = 'regions:5'", plan=str(file)
    )
    assembled(folder, f"cluster = '{saved_cluster(folder, good)}'", plan=str(file))  # by whatever name

    lanes = (replace(good.lanes[0], path=good.lanes[0].path[::-1]), *good.lanes[1:])
    replace(good, lanes=lanes, expected=None).save(file)
    assert "the plan breaks a rule: " in complaint_of(folder, plan=str(file))


def saved_cluster(folder: Path, plan: Plan) -> Path:
    file = folder / "cluster.json"
    file.write_text(json_text(plan.cluster.to_json()))
    return file


def test_a_job_becomes_the_configuration_of_nodes(folder: Path) -> None:
    text = "seed = 7\n[averaging]\ndtype = 'int8'\n[transport]\nwire = 'fp32'\n[emulation]\nenabled = true\ntime = 0.5"
    made = assembled(folder, text, split_backward=True)
    node_config = made.node_config
    assert node_config.seed == 7
    assert node_config.plan.workload.gradient_dtype == "int8"
    assert node_config.plan.workload.wire_dtype == "fp32"
    assert node_config.plan.split_backward
    assert node_config.emulated
    assert node_config.plan.cluster.fingerprint != preset("regions:4").fingerprint
    assert node_config.config["vocab_size"] == made.tokens.vocabulary
    assert node_config.sampler().seed == 7
    assert node_config.learning.iterations == 100
    assert node_config.spec().shape == made.spec.shape


def test_a_plan_promises_only_to_the_machines_that_it_is_for(folder: Path) -> None:
    made = assembled(folder)
    here = tuple(replace(node, location=socket.gethostname()) for node in made.plan.cluster.nodes)
    measured = replace(made, plan=replace(made.plan, cluster=replace(made.plan.cluster, nodes=here)))
    emulated = assembled(folder, "[emulation]\nenabled = true")

    def promises(run_setup: RunSetup, engine: str, nodes_here: bool = True) -> bool:
        return train_job._promises(run_setup, BACKENDS[engine], nodes_here)

    assert not promises(made, "processes"), "a preset, on this machine"
    assert promises(measured, "processes")
    assert promises(emulated, "processes")
    assert promises(made, "virtual")
    assert not any(promises(each, "one-process") for each in (made, measured, emulated))
    assert not promises(made, "processes", nodes_here=False), "a preset, on others"
    named = replace(made, job=replace(made.job, cluster=str(saved_cluster(folder, made.plan))))
    assert promises(named, "processes", nodes_here=False)


def test_links_that_are_not_there_are_not_emulated(folder: Path) -> None:
    made = assembled(folder, "[emulation]\nenabled = true")
    here, there, *_ = (node.name for node in made.plan.cluster.nodes)
    bandwidth = made.plan.cluster.bandwidth_bytes_per_s.copy()
    bandwidth[0, 1] = 0
    plan = replace(made.plan, cluster=replace(made.plan.cluster, bandwidth_bytes_per_s=bandwidth), expected=None)
    role = train_role(replace(made.node_config, plan=plan).to_json(), JoinConfig(here, ""), Bench(0, plan))
    assert there not in role.links
    assert role.links.keys() | {there} == role.links_here.keys()


# Paths that change their length

BY_TURNS = """
iterations = 5
[recipe]
skip = "2 x 1/3 + 0"
residual = "scaled"
gradients = "all"
early_exit = 0.2
[compute]
dtype = "fp32"
[transport]
wire = "fp32"
"""


def test_a_recipe_becomes_plans_on_the_same_stages(folder: Path) -> None:
    made = assembled(folder, BY_TURNS, max_slots=2)
    assert made.lengths == {2: 4, 3: 1}
    assert sorted(made.plans) == [2, 3]
    assert made.plan is made.plans[2], "which most iterations have"
    for length, plan in made.plans.items():
        assert plan.stages == made.plan.stages
        assert plan.workload == made.plan.workload
        assert plan.workload.early_exit
        assert {len(lane.path) for lane in plan.lanes} == {length}
        assert validate(plan) == []
    assert made.node_config.recipe == made.run.node_config.recipe == made.job.recipe
    assert made.run.settings.plans == made.plans
    for name in ("plan.json", "plan-3.json"):
        (Path(made.job.output) / name).unlink(missing_ok=True)
    made.save_plans()
    assert Plan.load(Path(made.job.output) / "plan.json") == made.plans[2]
    kept = Plan.load(Path(made.job.output) / "plan-3.json")
    assert kept == made.plans[3]
    other = replace(kept, lanes=kept.lanes[::-1], expected=None)
    other.save(Path(made.job.output) / "plan-3.json")
    read = plans_by_length(made.job, made.plan, (2, 3), QUICK, resumed=True)
    assert read == {2: made.plan, 3: other}, "a resumed run keeps what it had"
    replace(other, workload=replace(other.workload, max_slots=1)).save(Path(made.job.output) / "plan-3.json")
    assert plans_by_length(made.job, made.plan, (2, 3), QUICK, resumed=True)[3].workload == made.plan.workload


def test_a_sandwich_becomes_a_plan_with_paths_of_both_lengths(folder: Path) -> None:
    made = assembled(folder, BY_TURNS.replace("2 x 1/3 + 0", "1/3 until 40%, 2 x 0 & 1/3") + "[checkpoint]\nevery = 0")
    mix = (3, 3, 2)
    assert made.lengths == {2: 2, mix: 3}
    assert made.plan is made.plans[mix]
    assert made.plan.microbatches % lane_unit(3, mix) == 0
    assert has_lengths(made.plan, mix)
    assert validate(made.plan) == []
    made.save_plans()
    assert Plan.load(Path(made.job.output) / "plan.json") == made.plan
    assert plans_by_length(made.job, made.plan, made.lengths, QUICK, resumed=True) == made.plans
    nodes, oracle = Losses(), Losses()
    virtual(made, nodes, lambda: False)
    one_process(made, oracle, lambda: False)
    assert [loss for loss, _ in nodes.found] == pytest.approx([loss for loss, _ in oracle.found], rel=1e-4)
    assert [counts for _, counts in nodes.found] == [tuple(made.plans[each].exposure) for each in (2, 2, mix, mix, mix)]
    for skip in ("2 x 0 & 1/3", "0 & 2 x 1/3"):
        assert "a multiple of 6" in complaint_of(folder, f"[recipe]\nskip = '{skip}'\n[batch]\nmicrobatches = 9")


def test_microbatches_suit_every_length(folder: Path) -> None:
    """Three stages: two microbatches, or any number, visit each of the others equally often."""
    whole = assembled(folder, "[recipe]\nskip = '0 until 90%, 1/3'")
    assert whole.plan.visited == 3
    assert whole.plan.microbatches % 2 == 0
    same = assembled(folder, plan=saved_plan(folder, whole.plan))
    assert same.plans == {3: same.plan}
    other = assembled(folder, "[recipe]\nskip = '1/3'", plan=saved_plan(folder, whole.plan))
    assert sorted(other.plans) == [2], "the stages of a plan file, and paths as the recipe has them"
    assert other.plan.stages == whole.plan.stages


def saved_plan(folder: Path, plan: Plan) -> str:
    plan.save(folder / "given.json")
    return str(folder / "given.json")


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[tuple[float, tuple[int, ...]]] = []

    def iteration_done(self, report: IterationReport) -> None:
        self.found.append((report.loss, report.stage_microbatches))


def test_nodes_follow_the_recipe_of_a_job(folder: Path) -> None:
    made = assembled(folder, BY_TURNS + "[checkpoint]\nevery = 0")
    nodes, oracle = Losses(), Losses()
    virtual(made, nodes, lambda: False)
    one_process(made, oracle, lambda: False)
    assert [loss for loss, _ in nodes.found] == pytest.approx([loss for loss, _ in oracle.found], rel=1e-4)
    assert len({loss for loss, _ in oracle.found}) == 5
    planned = [tuple(made.plans[length].exposure) for length in (2, 2, 3, 2, 2)]
    assert [counts for _, counts in nodes.found] == planned


# Briefs on the wire


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_moe"])
def test_a_node_configuration_there_and_back(family: str) -> None:
    spec = ModelSpec(tiny(family), seed=5)
    stages = (Stage(3, (0,), (0,)), Stage(2, (1, 2), (2, 1)))
    plan = Plan(
        uniform_cluster(3),
        Workload(spec.shape, 16, 2, 3, collective="torch"),
        stages,
        (Lane((0, 1), 2), Lane((0, 2), 1)),
    )
    node_config = NodeConfig(
        plan,
        spec.config.to_dict(),
        5,
        OptimConfig(rate=1.0, iterations=40),
        "/some/where",
        "0123",
        device="cuda:1",
        compiled=True,
        threads=3,
        emulated=True,
        rendezvous="127.0.0.1:5",
        recipe=SkipSchedule("1/3 until 90%, 0", residual="scaled", early_exit=0.1),
    )
    for each in (node_config, replace(node_config, rendezvous=None)):
        text = json.dumps(each.to_json(), allow_nan=False)
        back = NodeConfig.from_json(json.loads(text))
        assert json.dumps(back.to_json()) == text
        assert replace(back, plan=plan, config=each.config) == each
        assert back.spec().config.to_dict() == spec.config.to_dict()


def test_a_node_configuration_that_is_none(folder: Path) -> None:
    good = assembled(folder).node_config.to_json()
    for name in good:
        with pytest.raises(UserError, match=name):
            NodeConfig.from_json({key: value for key, value in good.items() if key != name})
    for name, value in (
        ("config", 3),
        ("seed", -1),
        ("averaging", "gossip"),
        ("threads", 0),
        ("learning", {"x": 1}),
        ("recipe", {"skip": 1}),
    ):
        with pytest.raises(UserError, match=name):
            NodeConfig.from_json({**good, name: value})
    with pytest.raises(UserError, match="nonsense"):
        NodeConfig.from_json({**good, "nonsense": 1})


def test_other_tokens_than_the_jobs_are_refused(folder: Path) -> None:
    node_config = replace(assembled(folder).node_config, data_fingerprint="f" * 64)
    with pytest.raises(UserError, match=r"other tokens .* than the job's"):
        node_config.sampler()
