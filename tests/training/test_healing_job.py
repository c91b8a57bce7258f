"""Healing over nodes: a job trains the bridges and adapters beside a model, which stays as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skippipe.checkpoint.bridges_file import BRIDGES_FILE, StandInsInfo, bridges_info
from skippipe.checkpoint.format import read_manifest
from skippipe.checkpoint.locate import locate_checkpoint
from skippipe.checkpoint.manager import export, export_adapter, origin_of
from skippipe.cluster import Cluster, DeviceMode
from skippipe.cost_model import room_of
from skippipe.errors import UserError
from skippipe.inference.cached_stage import logits
from skippipe.inference.checkpoint_loader import StagedModel, load, load_stage, read_outline
from skippipe.inference.likelihood import SubsetModel
from skippipe.model.lora import LoraConfig
from skippipe.model.stand_ins import is_stand_in
from skippipe.plan import Plan
from skippipe.planner.problem_spec import cluster_named
from skippipe.runtime.coordinator.interfaces import Callback, CoordinatorState
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.simulation.fault_injection import Fault, kill, kill_coordinator
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.runtime.train_role import build_stage_executor
from skippipe.simulator import simulate
from skippipe.skip_schedule import SkipSchedule
from skippipe.stage_subset import StageSubset
from skippipe.study.healing import HealSettings, begin_healing
from skippipe.training.backends import BACKENDS
from skippipe.training.build_run import RunSetup, build_run
from skippipe.training.depth_growth import young_of
from skippipe.training.job_config import JobConfig
from skippipe.training.job_plan import plan_file, plan_of_earlier_run
from skippipe.training.job_tables import (
    AveragingConfig,
    CheckpointConfig,
    ModelConfig,
    PipelineConfig,
    RecoveryConfig,
    ValidationConfig,
)
from skippipe.training.run import RunOptions
from skippipe.training.train_job import _announce
from skippipe.validate import validate
from tests.helpers.executors import state_of
from tests.helpers.healed_folders import REPEATS, healed
from tests.helpers.model_folders import LAYERS
from tests.helpers.pretrained_jobs import Losses, job_in, trained
from tests.helpers.quick import others_slow

torch.set_num_threads(1)
INFO = StandInsInfo(LAYERS, REPEATS.bridges, REPEATS.adapters, repeats=REPEATS.repeats)
HEAL = SkipSchedule("1/3", heal="0%")
TOKENS = torch.arange(48).view(2, 24)


def fitted(folder: Path, recipe: SkipSchedule = REPEATS) -> Path:
    healed(folder, recipe)
    return folder


def healing_job(tmp_path: Path, weights: Path, **others: Any) -> JobConfig:
    job = job_in(
        tmp_path,
        weights,
        **{
            "cluster": "datacentre:6",
            "pipeline": PipelineConfig(strategy="skippipe", budget_s=0.2),
            "recipe": HEAL,
            "checkpoint": CheckpointConfig(every=1),
            **others,
        },
    )
    return replace(job, learning=replace(job.learning, rate=0.02, warmup=0))


def test_a_job_trains_what_lies_beside_the_model_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fitted(tmp_path / "fitted")
    run_setup = build_run(healing_job(tmp_path, folder))
    assert run_setup.plan.layers == LAYERS, "those of the file"
    assert NodeConfig.from_json(run_setup.node_config.to_json()).spec().heals
    work, run = run_setup.plan.workload, Path(run_setup.job.output)
    assert (work.bridge_rank, work.repeats) == (REPEATS.bridges, REPEATS.repeats)
    assert work.mean_repeats == 0.5, "of the visits of 0→1 and 0→2, two leave a stage out after them"
    _announce(run_setup, promised=False)
    said = "heals: trains bridges of rank 2 and adapters of rank 6 with 2 repeats: "
    assert said in capsys.readouterr().out
    run_setup.save_plans()
    losses = trained(run_setup, "virtual")
    once = build_run(healing_job(tmp_path, folder, output=str(tmp_path / "once")))
    assert trained(once, "one-process") == pytest.approx(losses, rel=1e-4)
    assert locate_checkpoint(tmp_path / "once") == tmp_path / "once" / "model", "one process makes no checkpoints"
    newest = run / "checkpoints" / "000002"
    for file in newest.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert all(is_stand_in(name) for name in opened.keys()), file  # noqa: SIM118

    manifest = read_manifest(newest)
    assert (manifest.bridges, manifest.adapters, manifest.repeats) == (2, 6, 2)
    plain = replace(manifest, bridges=0, adapters=0, repeats=0)
    assert not {"bridges", "adapters", "repeats"} & plain.to_json().keys(), "as earlier versions wrote it"

    # The folder has the same weights, and other bridges and adapters; the checkpoint makes the same folder.
    model, exported = run / "model", tmp_path / "exported"
    export(newest, exported)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    begun = load_file(folder / BRIDGES_FILE)
    for each in (model, exported):
        after = AutoModelForCausalLM.from_pretrained(each).state_dict()
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        assert bridges_info(each, sum(LAYERS)) == INFO
        learned = load_file(each / BRIDGES_FILE)
        assert {name: value.shape for name, value in learned.items()} == {n: v.shape for n, v in begun.items()}
        changed = {name for name, value in learned.items() if not torch.equal(value, begun[name])}
        assert {"bridges.0.gain", "gates.1", "model.layers.2.mlp.up_proj.adapter_up"} <= changed

    assert "of rank 6, for missing stages, beside the weights" in (model / "README.md").read_text()

    # They all answer alike, with and without stages; and stage by stage
    found = [load(each) for each in (run, model, exported)]
    outline = read_outline(run)
    alone = replace(found[0], stages=[load_stage(outline, number) for number in range(len(LAYERS))])
    for stages in ((0, 1, 2), (0, 1), (0, 2), (0,)):
        answers = [answer(each, stages) for each in (*found, alone)]
        assert all(torch.equal(each, answers[0]) for each in answers[1:])
        assert torch.equal(answers[0], answer(load(folder), stages)) == (len(stages) == len(LAYERS))
    healing = begin_healing(model, [str(tmp_path / "text.txt")], None, HealSettings(sequence=16))
    assert healing.begins_with == "begins with the model's bridges of rank 2 and the model's adapters of rank 6"
    with pytest.raises(UserError, match="its adapters are for missing stages; export the model without"):
        export_adapter(newest, tmp_path / "adapter")
    with pytest.raises(UserError, match="its checkpoints hold adapters, and those do not grow"):
        young_of(run)


@pytest.mark.slow  # test_healing_exact.py
def test_the_whole_model_teaches_over_nodes_as_in_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, recipe = fitted(tmp_path / "fitted"), replace(HEAL, distill=0.9, distill_hidden=2.0)
    job = healing_job(tmp_path, folder, recipe=recipe, iterations=3)
    taught = build_run(job)
    assert taught.plan.workload.teacher == "hidden"
    without = taught.plan.edited(workload=replace(taught.plan.workload, teacher=""))
    assert taught.plan.promise.iteration_ns > simulate(without).iteration_ns, "passes of the teacher are promised"
    losses = trained(taught, "virtual")
    once = build_run(replace(job, output=str(tmp_path / "once")))
    assert trained(once, "one-process") == pytest.approx(losses, rel=1e-4)
    alone = build_run(replace(job, output=str(tmp_path / "alone"), recipe=HEAL))
    others = trained(alone, "virtual")
    assert others[0] == pytest.approx(losses[0], rel=1e-5), "the loss is that of the text"
    assert others[2] != pytest.approx(losses[2], rel=1e-4)
    for run_setup, said in (
        (
            taught,
            "the whole model teaches microbatches that leave stages out: 90% of their loss, and its hidden states",
        ),
        (alone, "note: it learns from the text alone; a teacher makes parts much better: recipe.distill"),
    ):
        _announce(run_setup, promised=False)
        assert said in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_a_plan_with_paths_of_several_lengths_says_how_often_layers_repeat(tmp_path: Path) -> None:
    """Some go through all stages, which is no reason to refuse it, and half of them leave one out."""
    job = healing_job(tmp_path, fitted(tmp_path / "fitted"), recipe=replace(HEAL, skip="0 & 1/3"))
    made = build_run(job)
    assert sorted({len(lane.path) for lane in made.plan.lanes}) == [2, 3]
    assert made.plan.workload.mean_repeats == pytest.approx(1 / 5), "one of a path's two visits, and none of three"
    made.plan.save(tmp_path / "plan.json")
    planned = replace(job, recipe=replace(HEAL, skip=""), pipeline=PipelineConfig(plan=str(tmp_path / "plan.json")))
    assert build_run(planned).plan == made.plan
    pipeline = PipelineConfig(strategy="dtfm", layers="2,1,2")
    whole = build_run(replace(job, recipe=SkipSchedule(), pipeline=pipeline, output=str(tmp_path / "whole")))
    whole.plan.save(tmp_path / "plan.json")
    with pytest.raises(UserError, match=r"recipe\.heal: would have no effect: no path leaves a stage out"):
        build_run(planned)


@pytest.mark.parametrize("dtype", others_slow([torch.bfloat16], [torch.float16]))
def test_what_is_made_of_a_folder_is_like_it(tmp_path: Path, dtype: torch.dtype) -> None:
    """Of half precision, and with its settings of generation; bridges and adapters are stored as they were trained."""
    folder = fitted(tmp_path / "fitted")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for file in folder.glob("model*"):
        file.unlink()
    model.save_pretrained(folder)
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    settings = {"eos_token_id": [end, 3], "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    run_setup = build_run(healing_job(tmp_path, folder, iterations=1))
    trained(run_setup)
    checkpoints, exported = tmp_path / "run" / "checkpoints", tmp_path / "exported"
    export(checkpoints / "000001", exported)
    for each in (checkpoints / "base", tmp_path / "run" / "model", exported):
        found = {name: value for file in each.glob("model-*.safetensors") for name, value in load_file(file).items()}
        theirs = model.state_dict()
        assert all(value.dtype == dtype and torch.equal(value, theirs[name]) for name, value in found.items())
        assert json.loads((each / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        written = json.loads((each / "generation_config.json").read_text())
        assert {name: written[name] for name in settings} == settings
    assert all(value.dtype == torch.float32 for value in load_file(exported / BRIDGES_FILE).values())


def answer(staged: StagedModel, stages: tuple[int, ...]) -> torch.Tensor:
    return logits(staged.stages[0], SubsetModel(staged, StageSubset(stages, len(LAYERS))).hidden(TOKENS))


@pytest.mark.slow  # test_a_job_trains_what_lies_beside_the_model_and_nothing_else, test_healing_exact.py
def test_a_resumed_run_goes_on_with_what_it_has_learned(tmp_path: Path) -> None:
    folder = fitted(tmp_path / "fitted")
    job = healing_job(tmp_path, folder, iterations=4)
    made = build_run(job)
    made.save_plans()
    whole = trained(replace(made, job=replace(made.job, output=str(tmp_path / "whole"))))
    first, begun = made.with_first_checkpoint(), Losses()
    BACKENDS["virtual"](first, begun, lambda: len(begun.found) >= 2)
    first.run.wal.close()
    assert 2 <= len(begun.found) < 4
    resumed, rest = build_run(job, options=RunOptions(resumed=True)), Losses()
    assert resumed.plan == made.plan
    BACKENDS["virtual"](resumed, rest, lambda: 0)
    assert begun.found + rest.found == pytest.approx(whole, rel=1e-5)

    checkpoints, config = resumed.run.checkpoints, resumed.node_config
    assert origin_of(checkpoints, config).manifest.adapters == 6
    with pytest.raises(UserError, match=r"another recipe\.adapters; resume with the job"):
        origin_of(checkpoints, replace(config, recipe=replace(config.recipe, adapters=3)))


@pytest.mark.slow  # test_healing_exact.py
def test_a_run_that_heals_survives_whoever_is_lost(tmp_path: Path) -> None:
    """A replica, the coordinator, all of stage 1 and all of stage 0; with real tensors under virtual time."""
    folder = fitted(tmp_path / "fitted")
    survive = RecoveryConfig(planning_s=0.0)
    made = build_run(healing_job(tmp_path, folder, iterations=9, survive=survive)).with_first_checkpoint()
    run, config, plan, sampler = made.run, made.node_config, made.plan, made.sampler
    assert [len(stage.nodes) for stage in plan.stages] == [2, 2, 2]

    def executor(node: int, current: Plan) -> StageExecutor:
        """With other weights than those in the folder: what the seed makes."""
        return build_stage_executor(current.stage_of[node], config, ["cpu"], sampler)

    def lost(stage: int, iteration: int) -> list[Fault]:
        return [kill(node).at(iteration, during="forward").back_after(1e-4) for node in plan.stages[stage].nodes]

    executors = {node: executor(node, plan) for node in plan.stage_of}
    cluster = VirtualCluster(
        plan,
        run.resumed_settings,
        executors,
        checkpoint_store=run.checkpoint_manager,
        builder=executor,
        faults=[
            kill(plan.stages[2].nodes[0]).at(1, during="backward").back_after(1e-4),
            kill_coordinator().at(3, during="averaging"),
            *lost(1, 4),
            *lost(0, 6),
        ],
    )
    cluster.run()
    run.close(Callback())
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    texts = [event.text for _, event in cluster.events]
    for stage in (0, 1):
        assert any(text.startswith(f"stage {stage} ") and "no node holds it any more" in text for text in texts), texts
    assert any("from the newest checkpoint" in text for text in texts), texts
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    begun = load_file(folder / BRIDGES_FILE)
    states: dict[int, list[StageExecutor]] = {}
    for node in cluster.coordinator.membership.active:
        machine = cluster.executor_of[node]
        assert isinstance(machine, StageExecutor)
        states.setdefault(cluster.coordinator.membership[node].stage, []).append(machine)
    assert sorted(states) == [0, 1, 2] and {each for some in states.values() for each in some} != {*executors.values()}
    for one, *others in states.values():
        assert all(torch.equal(weight, weights[name]) for name, weight in one.tasks.model.named_weights())
        assert all(torch.equal(state_of(one), state_of(other)) for other in others)
        up = f"model.layers.{one.tasks.model.numbers.start}.mlp.up_proj"
        learned = dict(one.tasks.model.trained_weights())[f"adapters.{up}.up"]
        before = begun[f"{up}.adapter_up"]
        assert 0.005 < (learned - before).abs().max() < 0.3, "trained further from what was fitted, not from anew"


def on_two_devices(tmp_path: Path, **others: Any) -> JobConfig:
    """A job on nodes with two devices each."""
    cluster, _ = cluster_named("datacentre:6")
    nodes = tuple(replace(node, devices=2, **others) for node in cluster.nodes)
    replace(cluster, nodes=nodes).save(tmp_path / "cluster.json")
    return healing_job(tmp_path, fitted(tmp_path / "fitted"), cluster=str(tmp_path / "cluster.json"))


def test_a_stage_on_several_devices_is_refused_before_nodes_start(tmp_path: Path) -> None:
    job = on_two_devices(tmp_path, device_mode=DeviceMode.SHARDED)
    with pytest.raises(
        UserError, match=r"recipe\.heal: '.*' would divide stage 0 over its 2 devices, and healing needs"
    ):
        build_run(job)


def test_no_node_gets_a_stage_that_it_would_have_to_divide(tmp_path: Path) -> None:
    """Neither at first nor in a repair: what one device cannot hold, a node cannot."""
    job = on_two_devices(tmp_path)
    run_setup = build_run(job)
    plan = run_setup.plan
    assert {node.device_mode for node in plan.cluster.nodes} == {DeviceMode.REPLICAS}
    run_setup.save_plans()
    assert build_run(job, options=RunOptions(run_id="")).plan.cluster.fingerprint == plan.cluster.fingerprint
    job = run_setup.job
    assert plan_of_earlier_run(job, run_setup.spec, plan_file(job)) == plan, "a resumed run keeps it"
    need = plan.workload.fixed_bytes(0, LAYERS[0])
    small = tuple(replace(node, memory_bytes=need // 2) for node in plan.cluster.nodes)
    assert room_of(small[0], plan.workload, 0, LAYERS[0]).slots == 0
    cluster = Cluster.load(tmp_path / "cluster.json")
    made = replace(plan, cluster=cluster, expected=None, lower_bound_ns=None)
    made.save(tmp_path / "plan.json")
    for planned in (
        replace(job, cluster=JobConfig().cluster, pipeline=PipelineConfig(plan=str(tmp_path / "plan.json"))),
        replace(job, pipeline=PipelineConfig(plan=str(tmp_path / "plan.json"))),
    ):
        assert build_run(planned).plan.cluster.fingerprint == plan.cluster.fingerprint


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"recipe": replace(HEAL, heal="50%")}, 'recipe.heal: 50%: a run heals all along, or not at all; set "0%"'),
        ({"model": ModelConfig()}, "recipe.heal: is for a finished model; name a folder that 'skippipe heal' has made"),
        ({"lora": LoraConfig(rank=4)}, "lora: with recipe.heal other adapters are trained"),
        ({"recipe": replace(HEAL, early_exit=0.5)}, "recipe.early_exit: is for a model that is trained itself"),
        ({"recipe": replace(HEAL, residual="scaled")}, "recipe.residual: is for a model that is trained itself"),
        ({"averaging": AveragingConfig(dtype="rank-64")}, "averaging.dtype: rank-64: adapters are of low rank already"),
        ({"pipeline": PipelineConfig(split_backward=True)}, "pipeline.split_backward: with recipe.heal the only"),
        ({"validation": ValidationConfig(share=0.1)}, "validation: measures the whole model"),
        ({"survive": RecoveryConfig(lost_stage="neighbours")}, "survive.lost_stage: the adapters of a lost stage"),
    ],
)
def test_jobs_that_cannot_heal_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        JobConfig(**{"model": ModelConfig(weights="fitted"), "recipe": HEAL, **fields})
    assert str(caught.value).startswith(reason)


def test_what_does_not_go_with_the_folder_is_said_in_one_line(tmp_path: Path) -> None:
    folder = fitted(tmp_path / "fitted")
    job, deeper = healing_job(tmp_path, folder), tmp_path / "deeper.json"
    deeper.write_text(json.dumps({**json.loads((folder / "config.json").read_text()), "num_hidden_layers": 6}))
    for changes, reason in (
        ({"recipe": replace(HEAL, bridges=3)}, rf"recipe\.bridges: 3 here, 2 in .*{BRIDGES_FILE}; leave it out"),
        ({"recipe": replace(HEAL, skip="0")}, r"recipe\.heal: would have no effect: no path leaves a stage out"),
        ({"pipeline": PipelineConfig(stages=2)}, rf"pipeline\.stages: 2 here, 3 in .*{BRIDGES_FILE}; leave it out"),
        (
            {"pipeline": PipelineConfig(stages=2, layers="2,1,2")},
            rf"pipeline\.stages: 2 here, 3 in .*{BRIDGES_FILE}; leave it out",
        ),
        ({"pipeline": PipelineConfig(layers="1,2,2")}, r"pipeline\.layers: 1,2,2 here, 2,1,2 in .*; leave it out"),
        ({"model": replace(job.model, config=str(deeper))}, r"model\.config: with recipe\.heal it is that of model"),
    ):
        with pytest.raises(UserError, match=reason):
            build_run(replace(job, **changes))
    other = build_run(replace(job, recipe=SkipSchedule("1/3"), pipeline=replace(job.pipeline, layers="1,2,2")))
    other.plan.save(tmp_path / "plan.json")
    planned = replace(job, pipeline=PipelineConfig(plan=str(tmp_path / "plan.json")))
    with pytest.raises(UserError, match=r"pipeline\.plan: .*plan\.json has stages of 1,2,2 layers, .* of 2,1,2: make"):
        build_run(planned)
    said = replace(HEAL, adapters=REPEATS.adapters, repeats=REPEATS.repeats)
    assert build_run(replace(job, recipe=said)).spec.repeats == REPEATS.repeats
    with pytest.raises(UserError, match=r"recipe\.repeats: turns share .* those beside model\.weights: leave it out"):
        replace(HEAL, repeats=REPEATS.repeats)
    (folder / BRIDGES_FILE).unlink()
    with pytest.raises(UserError, match=rf"there is no .*{BRIDGES_FILE}; 'skippipe heal .* --data TEXT --tokens 0 -o"):
        build_run(job)
    for recipe, reason in (
        (SkipSchedule("1/3", bridges=2), "has no adapters"),
        (SkipSchedule("1/3", adapters=2), "has no bridges"),
        (SkipSchedule("1/3", bridges=2, adapters=4, adapters_by_hop=True), "has adapters by hop"),
    ):
        with pytest.raises(UserError, match=rf"recipe\.heal: .*{reason}.*--tokens 0"):
            build_run(healing_job(tmp_path, fitted(tmp_path / "other", recipe)))


def test_a_plan_of_a_file_may_be_followed(tmp_path: Path) -> None:
    job = healing_job(tmp_path, fitted(tmp_path / "fitted"))
    made = build_run(job)
    made.plan.save(tmp_path / "plan.json")
    planned: RunSetup = build_run(replace(job, pipeline=PipelineConfig(plan=str(tmp_path / "plan.json"))))
    assert planned.plan == made.plan == Plan.load(tmp_path / "plan.json")
    assert validate(planned.plan) == []
    made.plan.edited(split_backward=True).save(tmp_path / "plan.json")
    with pytest.raises(UserError, match=r"pipeline\.plan: .*plan\.json splits the backward pass, and with"):
        build_run(planned.job)
